"""The fix that an error message suggests works as written."""

import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from case_models import model_of
from loops import (
    CLASSES,
    FEATURES,
    ROWS,
    examples,
    first_batch,
    make_loop,
)
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import dpengine
from dpengine import PrivacyEngine, PrivacyWarning, check, check_loss
from dpengine.errors import (
    BatchDependentLossError,
    BatchMismatchError,
    InvalidBudgetError,
    ParameterMismatchError,
    PrivacyError,
    ReductionError,
    UnsupportedLayerError,
    forget_notices,
)
from dpengine.validation import per_example

NOISE = {"noise_multiplier": 1.0}
TIME = 11


def trains(loop, loss_of=None):
    for inputs, targets in loop.loader:
        loop.optimizer.zero_grad()
        (F.cross_entropy(loop.model(inputs), targets) if loss_of is None else loss_of(inputs, targets)).backward()
        loop.optimizer.step()
    return loop.engine.ledger.steps == len(loop.loader)


def test_the_error_for_a_large_delta_names_the_argument_and_a_value():
    with pytest.raises(InvalidBudgetError, match="DPE007") as seen:
        make_loop(target_delta=0.5, **NOISE)
    name, value = re.search(r"Pass (\w+)=([\d.e-]+)\.", str(seen.value)).groups()
    make_loop(**{name: float(value)}, **NOISE)


def test_the_error_for_batch_norm_names_a_function_that_exists():
    scope = {
        "dpengine": dpengine,
        "model": nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)),
    }
    with pytest.raises(UnsupportedLayerError, match="DPE001") as seen:
        make_loop(scope["model"], **NOISE)
    exec(re.search(r"model, changes = [^;]+", str(seen.value)).group(), scope)
    assert trains(make_loop(scope["model"], **NOISE))


@model_of(lambda: {"words": nn.Embedding(9, 4), "head": nn.Linear(4, 9)})
def time_first(m, ids):
    return m.head(m.words(ids))


def time_first_loss(loop):
    return lambda ids, targets: F.cross_entropy(loop.model(ids.t()).flatten(0, 1), targets.t().flatten())


def test_time_on_axis_0_is_rejected_and_batch_first_accepts_it():
    ids = torch.randint(0, 9, (ROWS, TIME), generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(ids, ids)
    loop = make_loop(time_first(), dataset=dataset, **NOISE)
    with pytest.raises(
        BatchMismatchError, match=r"DPE018.*For inputs \(T, B, ...\), pass batch_first=False to make_private"
    ):
        inputs, targets = first_batch(loop.loader)
        time_first_loss(loop)(inputs, targets).backward()
    remedy = make_loop(time_first(), dataset=dataset, batch_first=False, **NOISE)
    assert trains(remedy, time_first_loss(remedy))


def test_the_error_for_two_views_suggests_a_valid_loss_and_rules_out_a_contrastive_one():
    loop = make_loop(**NOISE)
    inputs, _ = first_batch(loop.loader)
    with pytest.raises(BatchMismatchError, match=r"DPE018.*contrastive loss.*SimCLR.*neither can be trained") as seen:
        loop.model(torch.cat([inputs, inputs + 0.1])).sum().backward()
    line = re.search(r"\(loss_fn\(model\(a\), y\) \+ .*?\)(?=\.backward\(\))", str(seen.value)).group()
    remedy = make_loop(**NOISE)
    names = {"loss_fn": F.cross_entropy, "model": remedy.model}
    assert trains(remedy, lambda x, y: eval(line, names | {"a": x, "b": x + 0.1, "y": y}))


def test_the_warning_of_changed_gradients_names_the_arguments():
    forget_notices()
    loop = make_loop(**NOISE)
    loop.backward(*first_batch(loop.loader))
    for p in loop.model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.warns(PrivacyWarning, match=r"DPE015.*clip_grad_norm_\(\).*max_grad_norm= to.*gradient_clip_val"):
        loop.optimizer.step()
    assert trains(make_loop(max_grad_norm=0.5, **NOISE))


def test_the_error_for_a_contrastive_loss_says_that_it_is_contrastive():
    model, batch = nn.Linear(FEATURES, CLASSES), next(iter(torch.utils.data.DataLoader(examples(), batch_size=6)))

    def contrastive(outputs, targets):
        return (outputs @ outputs.t()).logsumexp(dim=1).mean()

    with pytest.raises(BatchDependentLossError, match=r"DPE010.*compares samples.*contrastive.*cannot be trained"):
        check_loss(model, contrastive, batch)


def test_the_error_for_a_contrastive_loss_in_the_loop_says_that_it_is_contrastive():
    loop = make_loop(**NOISE)
    with pytest.raises(BatchDependentLossError, match=r"DPE010.*contrastive loss compares samples.*cannot be trained"):
        for inputs, _ in loop.loader:
            first_view, second_view = loop.model(inputs), loop.model(inputs + 0.1)
            F.cross_entropy(first_view @ second_view.T, torch.arange(len(inputs))).backward()


def test_the_error_for_class_weights_suggests_a_loss_that_keeps_them():
    weight, loop = torch.tensor([1.0, 2.0, 9.0]), make_loop(**NOISE)
    with pytest.raises(BatchDependentLossError, match=r"DPE010.*class weights.*reduction='none' and average"):
        for inputs, targets in loop.loader:
            F.cross_entropy(loop.model(inputs), targets, weight=weight).backward()
    remedy = make_loop(**NOISE)

    def losses(outputs, targets):
        return F.cross_entropy(outputs, targets, weight=weight, reduction="none")

    assert trains(remedy, lambda inputs, targets: losses(remedy.model(inputs), targets).mean())


def test_itertools_cycle_over_the_loader_is_rejected():
    loop = make_loop(**NOISE)
    with pytest.raises(PrivacyError, match=r"DPE022.*itertools.cycle repeats old batches"):
        for inputs, targets in itertools.cycle(loop.loader):
            loop.step(inputs, targets)
    assert loop.engine.ledger.steps == len(loop.loader)


def test_the_error_for_a_mean_over_selected_samples_suggests_a_loss_that_trains():
    loop = make_loop(**NOISE)
    with pytest.raises(BatchDependentLossError, match=r"DPE010.*over selected samples") as seen:
        for inputs, targets in loop.loader:
            mask = inputs[:, 0] > 0
            F.cross_entropy(loop.model(inputs), targets, reduction="none")[mask].mean().backward()
    line = re.search(r"\(losses \* mask\)\.mean\(\)", str(seen.value)).group()
    remedy = make_loop(**NOISE)

    def loss_of(inputs, targets):
        losses = F.cross_entropy(remedy.model(inputs), targets, reduction="none")
        return eval(line, {"losses": losses, "mask": inputs[:, 0] > 0})

    assert trains(remedy, loss_of)


def test_the_error_for_a_summed_loss_names_the_sensitivity_and_the_argument():
    def trains_on_sum(loop):
        return trains(loop, lambda inputs, targets: F.cross_entropy(loop.model(inputs), targets, reduction="sum"))

    with pytest.raises(ReductionError, match=r"DPE013.*up to twice the clipping norm") as seen:
        trains_on_sum(make_loop(**NOISE))
    name, value = re.search(r'Pass (\w+)="(\w+)" to make_private', str(seen.value)).groups()
    assert trains_on_sum(make_loop(**{name: value}, **NOISE))


@model_of(lambda: {"layer": nn.Linear(FEATURES, CLASSES)})
def graph_model(m, nodes, edges):
    hidden = m.layer(nodes)
    if edges.layout is not torch.strided:
        return torch.sparse.mm(edges, hidden)
    return torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]])


EDGES = torch.randint(0, ROWS, (2, 60), generator=torch.Generator().manual_seed(0))
GRAPHS = {"edges": EDGES, "adjacency": torch.sparse_coo_tensor(EDGES, torch.ones(60), (ROWS, ROWS)).coalesce()}


@pytest.mark.parametrize("edges", GRAPHS.values(), ids=GRAPHS)
def test_the_error_for_shared_edges_names_the_nodes_of_a_graph(edges):
    loop = make_loop(graph_model(), batch_size=ROWS, sample_rate=1.0, **NOISE)
    ((inputs, targets),) = loop.loader
    with pytest.raises(PrivacyError, match=r"DPE001.*Nodes of one graph share its edges.*make each graph a sample"):
        F.cross_entropy(loop.model(inputs, edges), targets).backward()


def test_a_direct_call_of_forward_is_reported():
    class WithTrainingStep(nn.Sequential):
        def training_step(self, inputs, targets):
            return F.cross_entropy(self.forward(inputs), targets)

    forget_notices()
    loop = make_loop(WithTrainingStep(nn.Linear(FEATURES, CLASSES)), **NOISE)
    with pytest.warns(PrivacyWarning, match=r"DPE012.*self\(x\), not self.forward\(x\)"):
        trains(loop, loop.model.training_step)
    assert trains(make_loop(WithTrainingStep(nn.Linear(FEATURES, CLASSES)), **NOISE))


def test_check_names_the_graph():
    forget_notices()
    with pytest.warns(PrivacyWarning, match="Nodes of one graph"):
        check(
            graph_model(), F.cross_entropy, ((torch.randn(ROWS, FEATURES), EDGES), torch.zeros(ROWS, dtype=torch.long))
        )


# Several networks, learned weights of losses, losses with masks, folds


class SeveralNetworks(nn.Module):
    def __init__(self, *networks):
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, x):
        return [network(x) for network in self.networks]


def test_two_networks_of_one_optimizer_become_parts_of_one_module():
    networks = [nn.Linear(FEATURES, 2), nn.Linear(FEATURES, 2)]
    optimizer = torch.optim.SGD([p for network in networks for p in network.parameters()], lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(ROWS, FEATURES)), batch_size=4)
    with pytest.raises(ParameterMismatchError, match=r"one module whose forward returns all outputs"):
        PrivacyEngine().make_private(networks[0], optimizer, loader, noise_multiplier=1.0, max_grad_norm=1.0)
    loop = make_loop(SeveralNetworks(*networks), **NOISE)
    assert trains(loop, lambda x, _: sum(outputs.square().mean() for outputs in loop.model(x)))


def test_a_container_that_is_not_called_warns_about_its_forward():
    forget_notices()
    loop = make_loop(nn.ModuleList([nn.Linear(FEATURES, 2), nn.Linear(FEATURES, 2)]), **NOISE)
    with pytest.warns(PrivacyWarning, match=r"not its forward or its parts.*outputs of several networks"):
        trains(loop, lambda x, _: sum(part(x).square().mean() for part in loop.model))


def masked_mean(outputs, targets, mask):
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")[mask].mean()


def test_per_example_accepts_a_mask_in_addition_to_the_targets():
    outputs = torch.randn(5, 4, CLASSES, requires_grad=True)
    targets, mask = torch.randint(CLASSES, (5, 4)), torch.rand(5, 4) < 0.7
    mask[:, 0] = True
    (grads,) = torch.autograd.grad(per_example(masked_mean)(outputs, targets, mask), outputs)
    for i in range(5):
        row = outputs[i : i + 1].detach().requires_grad_()
        masked_mean(row, targets[i : i + 1], mask[i : i + 1]).backward()
        torch.testing.assert_close(5 * grads[i], row.grad[0])


# Folds of a cross-validation with one engine per fold


def train_on(dataset, engine=None):
    return trains(make_loop(dataset=dataset, engine=engine or PrivacyEngine(seed=0), **NOISE))


@pytest.mark.filterwarnings("ignore:.*DPE006")
def test_engines_of_overlapping_folds_warn_with_the_advice_to_use_one():
    forget_notices()
    data, folds = examples(), [range(16), range(8, ROWS)]
    train_on(Subset(data, folds[0]))
    with pytest.warns(PrivacyWarning, match=r"some examples of this data set.*one engine for both"):
        train_on(Subset(data, folds[1]))


@pytest.mark.parametrize("second", [[*range(16, ROWS)], [*range(-8, 0)]], ids=["indices", "negative indices"])
def test_engines_of_disjoint_parts_and_one_engine_for_all_folds_do_not_warn(recwarn, second):
    forget_notices()
    data = examples()
    train_on(Subset(data, range(16)))
    train_on(Subset(data, second))
    data, engine = examples(), PrivacyEngine(seed=0)
    for part in (Subset(data, range(16)), Subset(data, range(8, ROWS)), data):
        train_on(part, engine)
    assert not [w for w in recwarn if "Another engine" in str(w.message)]
