"""The remedy that a message names, typed as it stands, works."""

import copy
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from case_models import model_of
from loops import (
    BATCH,
    CLASSES,
    FEATURES,
    MAX_NORM,
    ROWS,
    assert_same_gradients,
    examples,
    expected_gradients,
    first_batch,
    gradients_of,
    make_loop,
)
from reference import clipped_sum, flat_norms, per_sample_gradients
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
    RepeatedBackwardError,
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


def judged(model, inputs, real):
    outputs = model(inputs)
    return F.binary_cross_entropy_with_logits(outputs, torch.full_like(outputs, real))


def gan(frozen):
    discriminator = nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))
    generator = nn.Linear(2, FEATURES)
    loop = make_loop(discriminator, **NOISE)
    public = torch.optim.SGD(generator.parameters(), lr=0.1)

    for inputs, _ in loop.loader:
        loop.optimizer.zero_grad()
        fake = generator(torch.randn(len(inputs), 2))
        (judged(discriminator, inputs, 1.0) + judged(discriminator, fake.detach(), 0.0)).backward()
        loop.optimizer.step()
        public.zero_grad()
        if frozen:
            discriminator.requires_grad_(False)
        judged(discriminator, fake, 1.0).backward()
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


def test_the_passes_of_a_gan_are_exact_for_the_discriminator_and_ordinary_for_the_generator():
    loop = make_loop(nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1)))
    generator, plain = nn.Linear(2, FEATURES), copy.deepcopy(loop.model).double()
    real, _ = first_batch(loop.loader, least=3)
    fake, rows = generator(torch.randn(len(real), 2)), []
    for one, other in zip(real.double(), fake.detach().double(), strict=True):
        plain.zero_grad()
        (judged(plain, one, 1.0) + judged(plain, other, 0.0)).backward()
        rows.append({name: p.grad.clone() for name, p in plain.named_parameters()})
    truth = torch.autograd.grad(judged(plain, fake.double(), 1.0), list(generator.parameters()), retain_graph=True)
    (judged(loop.model, real, 1.0) + judged(loop.model, fake.detach(), 0.0)).backward()
    loop.model.requires_grad_(False)
    judged(loop.model, fake, 1.0).backward()
    loop.model.requires_grad_(True)
    loop.optimizer.step()
    expected = {name: total / BATCH for name, total in clipped_sum(rows, MAX_NORM).items()}
    assert_same_gradients(gradients_of(loop.model), expected)
    torch.testing.assert_close([p.grad for p in generator.parameters()], list(truth))


def attacked(loop, inputs, targets, steps, evaluates):
    """Inputs that have been moved along the signs of their gradients."""
    moved = inputs
    loop.model.train(not evaluates)
    for _ in range(steps):
        moved = moved.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(F.cross_entropy(loop.model(moved), targets, reduction="sum"), moved)
        moved = moved + 0.1 * gradient.sign()
    loop.model.train()
    return moved.detach()


@pytest.mark.parametrize("steps", [1, 3], ids=["FGSM", "PGD"])
def test_an_attack_on_inputs_names_eval_mode_and_is_exact_in_it(steps):
    loop = make_loop()
    inputs, targets = first_batch(loop.loader, least=3)
    with pytest.raises(RepeatedBackwardError, match=r"DPE017.*FGSM or PGD, call model\.eval\(\) before"):
        F.cross_entropy(loop.model(attacked(loop, inputs, targets, steps, evaluates=False)), targets).backward()
    loop = make_loop()
    inputs, targets = first_batch(loop.loader, least=3)
    moved = attacked(loop, inputs, targets, steps, evaluates=True)
    expected = expected_gradients(copy.deepcopy(loop.model), [(moved, targets)])
    loop.optimizer.zero_grad()
    F.cross_entropy(loop.model(moved), targets).backward()
    loop.optimizer.step()
    assert_same_gradients(gradients_of(loop.model), expected)


class Difference(nn.Module):
    """The scores of two inputs of a sample, for the loop over samples."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, one, other):
        return scores(self.model, one) - scores(self.model, other)


def scores(model, inputs):
    return model(inputs).sin().sum(1)


def test_two_texts_of_a_preference_are_exact_if_the_model_is_called_once_for_each():
    dataset = TensorDataset(torch.randn(ROWS, FEATURES), torch.randn(ROWS, FEATURES))
    loop = make_loop(dataset=dataset)
    chosen, rejected = first_batch(loop.loader, least=3)
    with pytest.raises(BatchMismatchError, match=r"DPE018.*both texts of a preference, call the model once for each"):
        one, other = scores(loop.model, torch.cat([chosen, rejected])).chunk(2)
        (-F.logsigmoid(one - other)).mean().backward()
    loop = make_loop(dataset=dataset)
    chosen, rejected = first_batch(loop.loader, least=3)
    paired = Difference(copy.deepcopy(loop.model))
    rows = per_sample_gradients(paired, lambda d, _: -F.logsigmoid(d).mean(), (chosen, rejected), chosen)
    loop.optimizer.zero_grad()
    preference(loop.model, chosen, rejected).mean().backward()
    loop.optimizer.step()
    truth = clipped_sum(rows, MAX_NORM)
    expected = {name.removeprefix("model."): total / BATCH for name, total in truth.items()}
    assert_same_gradients(gradients_of(loop.model), expected)


def preference(model, chosen, rejected):
    return -F.logsigmoid(scores(model, chosen) - scores(model, rejected))


def test_preferences_of_one_user_are_clipped_together():
    users = torch.arange(ROWS) // 3
    dataset = TensorDataset(torch.randn(ROWS, FEATURES), torch.randn(ROWS, FEATURES), users)
    loop = make_loop(dataset=dataset, privacy_unit=users)
    chosen, rejected, user_B = first_batch(loop.loader, least=6)
    plain, rows = copy.deepcopy(loop.model).double(), []
    for user in user_B.unique():
        plain.zero_grad()
        preference(plain, chosen[user_B == user].double(), rejected[user_B == user].double()).mean().backward()
        rows.append({name: p.grad.clone() for name, p in plain.named_parameters()})
    loop.optimizer.zero_grad()
    preference(loop.model, chosen, rejected).mean().backward()
    loop.optimizer.step()
    expected = {name: total / BATCH for name, total in clipped_sum(rows, MAX_NORM).items()}
    assert_same_gradients(gradients_of(loop.model), expected)


def test_preferences_in_two_rows_name_one_example_for_both():
    pairs = torch.arange(ROWS) // 2
    loop = make_loop(dataset=TensorDataset(torch.randn(ROWS, FEATURES), pairs), privacy_unit=pairs)
    with pytest.raises(BatchDependentLossError, match=r"DPE010.*pairs.*store both in one example, and call the model"):
        for inputs, _ in loop.loader:
            one, other = scores(loop.model, inputs).view(-1, 2).T
            (-F.logsigmoid(one - other)).mean().backward()


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


def test_a_contrastive_loss_in_the_loop_is_rejected_with_that_reason():
    loop = make_loop(**NOISE)
    with pytest.raises(BatchDependentLossError, match=r"DPE010.*contrastive loss compares samples.*cannot be trained"):
        for inputs, _ in loop.loader:
            one, two = loop.model(inputs), loop.model(inputs + 0.1)
            F.cross_entropy(one @ two.T, torch.arange(len(inputs))).backward()


def test_class_weights_name_a_loss_that_keeps_them():
    weight, loop = torch.tensor([1.0, 2.0, 9.0]), make_loop(**NOISE)
    with pytest.raises(BatchDependentLossError, match=r"DPE010.*class weights.*reduction='none' and average"):
        for inputs, targets in loop.loader:
            F.cross_entropy(loop.model(inputs), targets, weight=weight).backward()
    remedy = make_loop(**NOISE)

    def losses(outputs, targets):
        return F.cross_entropy(outputs, targets, weight=weight, reduction="none")

    assert trains(remedy, lambda inputs, targets: losses(remedy.model(inputs), targets).mean())


def test_a_loader_that_is_cycled_raises_because_batches_repeat():
    loop = make_loop(**NOISE)
    with pytest.raises(PrivacyError, match=r"DPE022.*itertools.cycle repeats old batches"):
        for inputs, targets in itertools.cycle(loop.loader):
            loop.step(inputs, targets)
    assert loop.engine.ledger.steps == len(loop.loader)


def test_a_mean_over_selected_samples_names_a_loss_that_trains():
    loop = make_loop(**NOISE)
    with pytest.raises(BatchDependentLossError, match=r"DPE010.*over selected samples") as seen:
        for inputs, targets in loop.loader:
            mask = inputs[:, 0] > 0
            F.cross_entropy(loop.model(inputs), targets, reduction="none")[mask].mean().backward()
    line = re.search(r"\(losses \* mask\)\.mean\(\)", str(seen.value)).group()
    remedy = make_loop(**NOISE)
    for inputs, targets in remedy.loader:
        remedy.optimizer.zero_grad()
        losses = F.cross_entropy(remedy.model(inputs), targets, reduction="none")
        eval(line, {"losses": losses, "mask": inputs[:, 0] > 0}).backward()
        remedy.optimizer.step()
    assert remedy.engine.ledger.steps == len(remedy.loader)


def test_a_sum_in_the_loop_says_that_the_sensitivity_grows_and_names_the_argument():
    def summed(outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="sum")

    loop = make_loop(**NOISE)
    with pytest.raises(ReductionError, match=r"DPE013.*up to twice the clipping norm") as seen:
        for inputs, targets in loop.loader:
            loop.optimizer.zero_grad()
            summed(loop.model(inputs), targets).backward()
            loop.optimizer.step()
    name, value = re.search(r'Pass (\w+)="(\w+)" to make_private', str(seen.value)).groups()
    remedy = make_loop(**{name: value}, **NOISE)
    for inputs, targets in remedy.loader:
        remedy.optimizer.zero_grad()
        summed(remedy.model(inputs), targets).backward()
        remedy.optimizer.step()
    assert remedy.engine.ledger.steps == len(remedy.loader)


@model_of(lambda: {"layer": nn.Linear(FEATURES, CLASSES)})
def graph_model(m, nodes, edges):
    hidden = m.layer(nodes)
    if edges.layout is not torch.strided:
        return torch.sparse.mm(edges, hidden)
    return torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]])


EDGES = torch.randint(0, ROWS, (2, 60), generator=torch.Generator().manual_seed(0))
GRAPHS = {"edges": EDGES, "adjacency": torch.sparse_coo_tensor(EDGES, torch.ones(60), (ROWS, ROWS)).coalesce()}


@pytest.mark.parametrize("edges", GRAPHS.values(), ids=GRAPHS)
def test_the_nodes_of_a_graph_are_named_first(edges):
    loop = make_loop(graph_model(), batch_size=ROWS, sample_rate=1.0, **NOISE)
    ((inputs, targets),) = loop.loader
    with pytest.raises(PrivacyError, match=r"DPE001.*Nodes of one graph share its edges.*make each graph a sample"):
        F.cross_entropy(loop.model(inputs, edges), targets).backward()


def test_forward_called_by_name_is_reported():
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
        check(
            graph_model(), F.cross_entropy, ((torch.randn(ROWS, FEATURES), EDGES), torch.zeros(ROWS, dtype=torch.long))
        )


# Several networks, learned weights of losses, losses with masks, folds


class Both(nn.Module):
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
    loop = make_loop(Both(*networks), **NOISE)
    assert trains(loop, lambda x, _: sum(outputs.square().mean() for outputs in loop.model(x)))


def test_a_container_that_is_not_called_raises_about_its_forward():
    forget_notices()
    loop = make_loop(nn.ModuleList([nn.Linear(FEATURES, 2), nn.Linear(FEATURES, 2)]), **NOISE)
    with pytest.warns(PrivacyWarning, match=r"not its forward or its parts.*outputs of several networks"):
        trains(loop, lambda x, _: sum(part(x).square().mean() for part in loop.model))


class LossWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, one, other):
        first, second = self.log_variances
        return torch.exp(-first) * one + torch.exp(-second) * other + first + second


class TwoTasks(nn.Module):
    """Returns its loss."""

    def __init__(self, reduction):
        super().__init__()
        torch.manual_seed(0)
        self.reduction, self.body, self.weights = reduction, nn.Linear(FEATURES, 2), LossWeights()

    def forward(self, x):
        one, other = self.body(x).T
        target = x.sum(dim=1)
        losses = [F.mse_loss(some, target, reduction=self.reduction) for some in (one, other)]
        return self.weights(*losses).mean()


def test_learned_weights_of_losses_are_exact_on_losses_of_single_samples():
    loop = make_loop(TwoTasks("mean"), grad_sample_mode="hooks")
    inputs, _ = first_batch(loop.loader, least=2)
    with pytest.raises(UnsupportedLayerError, match=r"'weights' \(LossWeights\) returned one number.*reduction='none'"):
        loop.model(inputs).backward()
    loop = make_loop(TwoTasks("none"))
    inputs, targets = first_batch(loop.loader, least=2)
    truth = expected_gradients(loop.model, [(inputs, targets)], loss_fn=lambda loss, _: loss)
    loop.model(inputs).backward()
    loop.optimizer.step()
    assert_same_gradients(gradients_of(loop.model), truth)


def masked_mean(outputs, targets, mask):
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")[mask].mean()


def test_per_example_takes_a_mask_next_to_the_targets():
    outputs = torch.randn(5, 4, CLASSES, requires_grad=True)
    targets, mask = torch.randint(CLASSES, (5, 4)), torch.rand(5, 4) < 0.7
    mask[:, 0] = True
    (grads,) = torch.autograd.grad(per_example(masked_mean)(outputs, targets, mask), outputs)
    for i in range(5):
        row = outputs[i : i + 1].detach().requires_grad_()
        masked_mean(row, targets[i : i + 1], mask[i : i + 1]).backward()
        torch.testing.assert_close(5 * grads[i], row.grad[0])


# Folds of a cross-validation, with an engine each


def train_on(dataset, engine=None):
    return trains(make_loop(dataset=dataset, engine=engine or PrivacyEngine(seed=0), **NOISE))


@pytest.mark.filterwarnings("ignore:.*DPE006")
def test_engines_of_overlapping_folds_raise_with_the_advice_to_use_one():
    forget_notices()
    data, folds = examples(), [range(16), range(8, ROWS)]
    train_on(Subset(data, folds[0]))
    with pytest.warns(PrivacyWarning, match=r"some examples of this data set.*one engine for both"):
        train_on(Subset(data, folds[1]))


@pytest.mark.parametrize("second", [[*range(16, ROWS)], [*range(-8, 0)]], ids=["indices", "negative indices"])
def test_engines_of_disjoint_parts_and_one_engine_of_all_folds_are_silent(recwarn, second):
    forget_notices()
    data = examples()
    train_on(Subset(data, range(16)))
    train_on(Subset(data, second))
    data, engine = examples(), PrivacyEngine(seed=0)
    for part in (Subset(data, range(16)), Subset(data, range(8, ROWS)), data):
        train_on(part, engine)
    assert not [w for w in recwarn if "Another engine" in str(w.message)]


# Models that no rule of a layer covers, and arguments that accept them

WIDTH, SAMPLES = 4, 5


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)


class OwnParameter(Part):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(SAMPLES, SAMPLES))

    def forward(self, x):
        return self.mix.softmax(-1) @ self.layer(x)


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0)


class OwnFunction(Part):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return Times.apply(self.layer(x), self.scale)


class EntriesAsWeight(Part):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x):
        return F.linear(self.layer(x), self.table(torch.arange(WIDTH)))


class UsedTwice(Part):
    def forward(self, x):
        return F.linear(torch.tanh(self.layer(x)), self.layer.weight)


class Flattens(Part):
    def forward(self, x):
        return self.layer(x.flatten(0, 1)).view_as(x)


class TimeInside(Part):
    def forward(self, x):
        return self.layer(x[:, :3].transpose(0, 1)).transpose(0, 1)


class Places(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x, places):
        return x * self.scale * places[:, None]


class SharedPlaces(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Places()

    def forward(self, x):
        return self.layer(x, torch.arange(x.shape[1], dtype=x.dtype))


OWN = torch.Generator()


class DrawsBefore(Part):
    """Draws from a generator of its own, before the layer."""

    def forward(self, x):
        return self.layer(x + 0 * torch.rand(WIDTH, generator=OWN))


class DrawsInside(nn.Module):
    """A layer that draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return x * self.scale + 0 * torch.rand(WIDTH, generator=OWN)


class KeepsHidden(Part):
    def forward(self, x):
        self.hidden = self.layer(x)
        return torch.tanh(self.hidden)


class Pooled(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part, self.head = part, nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(self.part(x)).mean(dim=1))


def of_outputs(model, x, y):
    return F.cross_entropy(model(x), y)


def own_loss(model, x, _):
    return model(x)


def of_activations_too(model, x, y):
    return F.cross_entropy(model(x), y) + model.part.hidden.square().sum(dim=(1, 2)).mean()


AUTO, WHOLE_MODEL = {"grad_sample_mode": "auto"}, {"grad_sample_mode": "whole_model"}
HOOKS, GHOST = {"grad_sample_mode": "hooks"}, {"grad_sample_mode": "ghost"}
OTHER_AXIS = r"DPE018.*Layer 'part\.layer' saw \d+ samples, and the sampler drew 5"
SHARED = r"DPE001.*Layer 'part\.layer' \(Places\) gave a different output.*has the size of the batch by chance"
GHOST_AGAIN = r"DPE001.*Layer 'part\.layer' had other gradients.*run again"
# What is rejected: model, arguments, message, loss, and the arguments that the message names.
REJECTED = {
    "operation": (OwnParameter, HOOKS, r"DPE001.*'part\.mix' is used by softmax", of_outputs, [AUTO, WHOLE_MODEL]),
    "function": (
        OwnFunction,
        HOOKS,
        r"DPE001.*'part\.scale' is used in a torch\.autograd\.Function",
        of_outputs,
        [AUTO, WHOLE_MODEL],
    ),
    "entries": (
        EntriesAsWeight,
        HOOKS,
        r"DPE001.*'part\.table\.weight' is used by linear",
        of_outputs,
        [AUTO, WHOLE_MODEL],
    ),
    "outside its layer": (UsedTwice, HOOKS, r"DPE002.*'part\.layer\.weight'", of_outputs, [AUTO, WHOLE_MODEL]),
    "flattened": (Flattens, HOOKS, OTHER_AXIS, of_outputs, [AUTO, WHOLE_MODEL]),
    "time on axis 0 inside": (TimeInside, HOOKS, OTHER_AXIS, of_outputs, [AUTO, WHOLE_MODEL]),
    "as many places as samples": (SharedPlaces, HOOKS, SHARED, of_outputs, [AUTO, WHOLE_MODEL]),
    "random numbers before a layer": (
        DrawsBefore,
        WHOLE_MODEL,
        r"DPE001.*The model \(Pooled\) could not be run on each sample alone",
        of_outputs,
        [AUTO],
    ),
    "activations in the loss": (KeepsHidden, GHOST, GHOST_AGAIN, of_activations_too, [AUTO]),
    "weights of losses": (
        lambda: TwoTasks("mean"),
        HOOKS,
        r"DPE001.*'weights' \(LossWeights\) returned one number",
        own_loss,
        [AUTO, WHOLE_MODEL],
    ),
}


def whole_batch(make, options, **more):
    """A loop whose only batch is the whole data, and a copy of the model."""
    torch.manual_seed(0)
    model = make()
    if not isinstance(model, TwoTasks):
        model = Pooled(model)
    shape = (SAMPLES, FEATURES) if isinstance(model, TwoTasks) else (SAMPLES, SAMPLES, WIDTH)
    dataset = TensorDataset(torch.randn(shape), torch.arange(SAMPLES) % CLASSES)
    loop = make_loop(copy.deepcopy(model), dataset=dataset, batch_size=SAMPLES, sample_rate=1.0, **options, **more)
    return loop, model.double(), next(iter(loop.loader))


def assert_exact(make, options, loss_of=of_outputs):
    """Compares a step with a loop over samples on a copy of the model."""
    _, plain, (inputs, targets) = whole_batch(make, options)
    gradients = []
    for x, y in zip(inputs.double(), targets, strict=True):
        plain.zero_grad()
        loss_of(plain, x[None], y[None]).backward()
        gradients.append({name: p.grad.clone() for name, p in plain.named_parameters() if p.requires_grad})
    max_norm = flat_norms(gradients).median().item()
    loop, _, batch = whole_batch(make, options, max_grad_norm=max_norm)
    loss_of(loop.model, *batch).backward()
    loop.optimizer.step()
    expected = {name: total / SAMPLES for name, total in clipped_sum(gradients, max_norm).items()}
    assert_same_gradients(gradients_of(loop.model), expected)


@pytest.mark.one_in(3, "name", others="slow")
@pytest.mark.filterwarnings("ignore:.*DPE028", "ignore:.*DPE012")
@pytest.mark.parametrize("name", REJECTED)
def test_each_argument_that_a_rejection_names_gives_the_sums_of_a_loop_over_samples(name):
    make, options, says, loss_of, accepted_by = REJECTED[name]
    loop, _, batch = whole_batch(make, options)
    with pytest.raises(PrivacyError, match=says) as seen:
        loss_of(loop.model, *batch).backward()
    for remedy in accepted_by:
        ((argument, value),) = remedy.items()
        assert re.search(rf"\b{argument}=('\w+' or,? (if that is in use, )?)?'{value}'", seen.value.fix)
        assert_exact(make, remedy, loss_of)


def rule_of_draws_inside(layer, inputs, grads):
    return {layer.scale: (inputs[0] * grads).sum(dim=1)}


@pytest.mark.usefixtures("registries")
@pytest.mark.filterwarnings("ignore:.*DPE012")
def test_a_layer_that_draws_from_its_own_generator_is_exact_if_it_is_frozen_or_has_a_rule():
    loop, _, batch = whole_batch(DrawsInside, {})
    with pytest.raises(
        UnsupportedLayerError, match=r"'part' .*@register_grad_sampler\(DrawsInside\).*freeze the layer"
    ):
        of_outputs(loop.model, *batch).backward()
    assert_exact(lambda: DrawsInside().requires_grad_(False), {})
    dpengine.register_grad_sampler(DrawsInside)(rule_of_draws_inside)
    assert_exact(DrawsInside, {})
