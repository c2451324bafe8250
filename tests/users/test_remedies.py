"""The remedy that a message names, typed as it stands, works."""

import re

import pytest
import torch
import torch.nn.functional as F
from loops import CLASSES, FEATURES, ROWS, examples, first_batch, make_loop
from torch import nn
from torch.utils.data import TensorDataset

import dpengine
from dpengine import PrivacyWarning, check, check_loss
from dpengine.errors import (
    BatchDependentLossError,
    BatchMismatchError,
    InvalidBudgetError,
    PrivacyError,
    ReductionError,
    RepeatedBackwardError,
    UnsupportedLayerError,
    forget_notices,
)

NOISE = {"noise_multiplier": 1.0}
TIME = 11


def trains(loop, loss_of=None):
    for inputs, targets in loop.loader:
        loop.optimizer.zero_grad()
        (F.cross_entropy(loop.model(inputs), targets) if loss_of is None else loss_of(inputs, targets)).backward()
        loop.optimizer.step()
    return loop.engine.ledger.steps == len(loop.loader)


def test_delta_too_large_names_the_argument_and_a_value():
    with pytest.raises(InvalidBudgetError, match="DPE007") as seen:
        make_loop(target_delta=0.5, **NOISE)
    name, value = re.search(r"Pass (\w+)=([\d.e-]+)\.", str(seen.value)).groups()
    make_loop(**{name: float(value)}, **NOISE)


def test_a_batch_norm_names_a_function_that_exists():
    scope = {
        "dpengine": dpengine,
        "model": nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)),
    }
    with pytest.raises(UnsupportedLayerError, match="DPE001") as seen:
        make_loop(scope["model"], **NOISE)
    exec(re.search(r"model, changes = [^;]+", str(seen.value)).group(), scope)
    assert trains(make_loop(scope["model"], **NOISE))


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, ids):
        return self.head(self.words(ids))


def time_first_loss(loop):
    return lambda ids, targets: F.cross_entropy(loop.model(ids.t()).flatten(0, 1), targets.t().flatten())


def test_time_on_axis_0_names_batch_first():
    ids = torch.randint(0, 9, (ROWS, TIME), generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(ids, ids)
    loop = make_loop(TimeFirst(), dataset=dataset, **NOISE)
    with pytest.raises(BatchMismatchError, match=r"DPE018.*for \(T, B, ...\), pass batch_first=False to make_private"):
        inputs, targets = first_batch(loop.loader)
        time_first_loss(loop)(inputs, targets).backward()
    remedy = make_loop(TimeFirst(), dataset=dataset, batch_first=False, **NOISE)
    assert trains(remedy, time_first_loss(remedy))


def test_two_views_name_a_sound_loss_and_say_that_a_contrastive_one_is_not():
    loop = make_loop(**NOISE)
    inputs, _ = first_batch(loop.loader)
    with pytest.raises(BatchMismatchError, match=r"DPE018.*contrastive loss.*SimCLR.*neither can be trained") as seen:
        loop.model(torch.cat([inputs, inputs + 0.1])).sum().backward()
    line = re.search(r"\(loss_fn\(model\(a\), y\) \+ .*?\.backward\(\)", str(seen.value)).group()
    remedy = make_loop(**NOISE)
    for x, y in remedy.loader:
        remedy.optimizer.zero_grad()
        exec(line, {"loss_fn": F.cross_entropy, "model": remedy.model, "a": x, "b": x + 0.1, "y": y})
        remedy.optimizer.step()
    assert remedy.engine.ledger.steps == len(remedy.loader)


def gan(frozen):
    discriminator = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))
    generator = nn.Linear(2, FEATURES)
    loop = make_loop(discriminator, **NOISE)
    public = torch.optim.SGD(generator.parameters(), lr=0.1)

    def loss(x, real):
        return F.binary_cross_entropy_with_logits(discriminator(x), torch.full((len(x), 1), real))

    for inputs, _ in loop.loader:
        loop.optimizer.zero_grad()
        fake = generator(torch.randn(len(inputs), 2))
        (loss(inputs, 1.0) + loss(fake.detach(), 0.0)).backward()
        loop.optimizer.step()
        public.zero_grad()
        if frozen:
            discriminator.requires_grad_(False)
        loss(fake, 1.0).backward()
        if frozen:
            discriminator.requires_grad_(True)
        public.step()
    return loop


def test_a_gan_names_requires_grad_around_the_generator():
    with pytest.raises(RepeatedBackwardError, match=r"DPE017.*discriminator.requires_grad_\(False\) before"):
        gan(frozen=False)
    loop = gan(frozen=True)
    assert loop.engine.ledger.steps == len(loop.loader)
    assert {charge.kind for charge in loop.engine.ledger.history} == {"release"}


def test_changed_gradients_name_the_arguments():
    forget_notices()
    loop = make_loop(**NOISE)
    loop.backward(*first_batch(loop.loader))
    for p in loop.model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.warns(PrivacyWarning, match=r"DPE015.*clip_grad_norm_\(\).*max_grad_norm= to.*gradient_clip_val"):
        loop.optimizer.step()
    assert trains(make_loop(max_grad_norm=0.5, **NOISE))


def test_a_sum_says_that_the_sensitivity_grows_and_names_the_argument():
    model, batch = nn.Linear(FEATURES, CLASSES), next(iter(torch.utils.data.DataLoader(examples(), batch_size=6)))

    def summed(outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="sum")

    with pytest.raises(ReductionError, match=r"DPE013.*up to twice the clipping norm") as seen:
        check_loss(model, summed, batch)
    name, value = re.search(r'Pass (\w+)="(\w+)"', str(seen.value)).groups()
    check_loss(model, summed, batch, **{name: value})


def test_a_contrastive_loss_is_rejected_with_that_reason():
    model, batch = nn.Linear(FEATURES, CLASSES), next(iter(torch.utils.data.DataLoader(examples(), batch_size=6)))

    def contrastive(outputs, targets):
        return (outputs @ outputs.t()).logsumexp(dim=1).mean()

    with pytest.raises(BatchDependentLossError, match=r"DPE010.*compares samples.*contrastive.*cannot be trained"):
        check_loss(model, contrastive, batch)


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, nodes, edges):
        hidden = self.layer(nodes)
        if edges.layout is not torch.strided:
            return torch.sparse.mm(edges, hidden)
        return torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]])


EDGES = torch.randint(0, ROWS, (2, 60), generator=torch.Generator().manual_seed(0))
GRAPHS = {"edges": EDGES, "adjacency": torch.sparse_coo_tensor(EDGES, torch.ones(60), (ROWS, ROWS)).coalesce()}


@pytest.mark.parametrize("edges", GRAPHS.values(), ids=GRAPHS)
def test_the_nodes_of_a_graph_are_named_first(edges):
    loop = make_loop(Graph(), batch_size=ROWS, sample_rate=1.0, **NOISE)
    ((inputs, targets),) = loop.loader
    with pytest.raises(PrivacyError, match=r"DPE001.*Nodes of one graph share its edges.*make each graph a sample"):
        F.cross_entropy(loop.model(inputs, edges), targets).backward()


def test_forward_called_by_name_is_told():
    class Own(nn.Sequential):
        def training_step(self, inputs, targets):
            return F.cross_entropy(self.forward(inputs), targets)

    forget_notices()
    loop = make_loop(Own(nn.Linear(FEATURES, CLASSES)), **NOISE)
    with pytest.warns(PrivacyWarning, match=r"DPE012.*self\(x\), not self.forward\(x\)"):
        trains(loop, loop.model.training_step)
    assert trains(make_loop(Own(nn.Linear(FEATURES, CLASSES)), **NOISE))


def test_check_names_the_graph():
    forget_notices()
    with pytest.warns(PrivacyWarning, match="Nodes of one graph"):
        check(Graph(), F.cross_entropy, ((torch.randn(ROWS, FEATURES), EDGES), torch.zeros(ROWS, dtype=torch.long)))
