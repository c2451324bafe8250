"""``check_loop``, which repeats the user's step with other data in some samples."""

import random
from collections import UserDict

import inside
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpengine
from dpengine import check_loop
from dpengine.errors import BatchDependentLossError, BatchStateError, ReductionError
from dpengine.losses import per_token_mean
from dpengine.validation import LoopCheck

CLASSES = 3
WEIGHTS = torch.tensor([1.0, 2.0, 5.0])


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, CLASSES))


def batch(size=12):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 4, generator=generator), torch.arange(size) % CLASSES


def each(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


class Scaled(torch.autograd.Function):
    """Scales the gradient by a batch statistic, which a trace of torch calls does not show."""

    @staticmethod
    def forward(ctx, outputs):
        return outputs.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.abs().max()


@torch.jit.script
def scripted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    chosen = outputs.gather(1, targets[:, None]).squeeze(1)
    return -(chosen.log_softmax(0)).mean()


@torch.jit.script
def scripted_mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -outputs.log_softmax(1).gather(1, targets[:, None]).mean()


SOUND = {
    "mean": F.cross_entropy,
    "scripted": scripted_mean,
    "some zero gradients": lambda o, t: (each(o, t) * (t > 0)).sum() / len(t),
    "numpy": lambda o, t: (each(o, t) * torch.from_numpy(np.sqrt(1.0 + t.numpy()))).mean(),
    "loop over samples": lambda o, t: sum(F.cross_entropy(o[i : i + 1], t[i : i + 1]) for i in range(len(t))) / len(t),
    "branch of a sample": lambda o, t: torch.stack([x.sum() if y > 0 else x.max() for x, y in zip(o, t)]).mean(),  # noqa: B905
}

MIXING = {
    "class weights": lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS),
    "scripted": scripted,
    "branch": lambda o, t: F.cross_entropy(o, t) * (2.0 if t[0] < t[1] else 1.0),
    "numpy": lambda o, t: each(o, t).sum() / float((t.numpy() > 0).sum()),
    "own function": lambda o, t: F.cross_entropy(Scaled.apply(o), t),
    "hardest": lambda o, t: sum(sorted(each(o, t), key=float)[-3:]) / len(t),
    "root of the size": lambda o, t: each(o, t).sum() / len(t) ** 0.5,
}


@pytest.mark.one_in(14, "calls_backward", "loss", others="slow")
@pytest.mark.one_in(2, "calls_backward", "loss")
@pytest.mark.parametrize("calls_backward", [False, True])
@pytest.mark.parametrize("loss", SOUND.values(), ids=SOUND)
def test_a_loss_with_independent_samples_passes(loss, calls_backward):
    model = mlp()

    def step(data):
        value = loss(model(data[0]), data[1])
        return value.backward() if calls_backward else value

    assert check_loop(step, [batch(), batch(8)]) == LoopCheck(2, "mean")


@pytest.mark.one_in(4, "loss", others="slow")
@pytest.mark.parametrize("loss", MIXING.values(), ids=MIXING)
def test_a_loss_that_mixes_samples_is_rejected(loss):
    model = mlp()
    with pytest.raises(BatchDependentLossError, match=r"DPE010.*The loss (mixes samples|depends on the number)"):
        check_loop(lambda data: loss(model(data[0]), data[1]), [batch()])


def test_a_loop_that_mixes_samples_before_the_model_is_rejected():
    model = mlp()
    mixed = lambda x: torch.from_numpy(0.9 * x.numpy() + 0.1 * np.random.permutation(x.numpy()))  # noqa: E731
    with pytest.raises(BatchDependentLossError, match="The model input of one sample changed"):
        check_loop(lambda data: F.cross_entropy(model(mixed(data[0])), data[1]).backward(), [batch()])


def test_a_sum_and_a_mean_are_distinguished():
    model = mlp()
    summed = lambda data: F.cross_entropy(model(data[0]), data[1], reduction="sum")  # noqa: E731
    with pytest.raises(ReductionError, match='Pass loss_reduction="sum" to make_private'):
        check_loop(summed, [batch()])
    assert check_loop(summed, [batch()], loss_reduction="sum").reduction == "sum"


def own_loss(loss):
    run = lambda m, words, labels: {"loss": m.loss(m.head(m.words(words)), labels)}  # noqa: E731
    return Parts(run, words=nn.Embedding(9, 8), head=nn.Linear(8, 9), loss=loss)


@pytest.mark.slow
def test_a_loss_inside_the_model_is_checked_at_its_layers():
    torch.manual_seed(0)
    words, labels = torch.randint(9, (8, 5)), torch.randint(9, (8, 5))
    labels[::2, 2:] = -100
    data = [UserDict(words=words, labels=labels)]  # like a BatchEncoding
    mixing = own_loss(lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels))
    with pytest.raises(BatchDependentLossError, match=r"per_token_mean\(logits, labels\)"):
        check_loop(lambda one: mixing(one["words"], one["labels"])["loss"], data)
    apart = own_loss(per_token_mean)
    assert check_loop(lambda one: apart(one["words"], one["labels"])["loss"].backward(), data).ok


def test_a_batch_on_axis_1_is_found():
    model = nn.Linear(4, CLASSES)
    data = [(torch.randn(5, 8, 4), torch.randint(CLASSES, (5, 8)))]
    step = lambda one: F.cross_entropy(model(one[0]).flatten(0, 1), one[1].flatten())  # noqa: E731
    assert check_loop(step, data, batch_first=False).reduction == "mean"


@pytest.mark.slow
def test_check_loop_does_not_affect_a_private_run():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    model.register_buffer("seen", torch.zeros(()))
    data = TensorDataset(*batch(60))
    plain = DataLoader(data, batch_size=12)
    engine = dpengine.PrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = engine.make_private(model, optimizer, plain, noise_multiplier=1.0, max_grad_norm=1.0)
    for inputs, targets in loader:  # in the middle of a step
        F.cross_entropy(model(inputs), targets).backward()
        break
    model[0].weight.grad = kept = torch.ones_like(model[0].weight)

    def step(one):
        optimizer.zero_grad()
        model.zero_grad()
        model.seen += random.random() + np.random.rand()
        loss = F.cross_entropy(model(one[0]), one[1])
        torch.autograd.backward([loss])
        return loss

    def now():
        states = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
        return engine.get_epsilon(delta=1e-5), vars(inside.state(engine)), states, float(model.seen)

    before, weights = now(), [p.detach().clone() for p in model.parameters()]
    assert check_loop(step, plain).ok
    assert now() == before
    assert all(map(torch.equal, model.parameters(), weights))
    assert model[0].weight.grad is kept
    assert engine.report().facts.loss_checked is True
    with pytest.raises(BatchDependentLossError):
        check_loop(lambda one: F.cross_entropy(model(one[0]), one[1], weight=WEIGHTS), plain)
    assert now() == before


VALUES = [random.Random(i).uniform(-1, 1) for i in range(12)]
WITHOUT_TENSORS = {
    "arrays": {"x": np.array(VALUES), "id": np.arange(12)},
    "dict of lists": {"x": VALUES, "text": [str(value) for value in VALUES]},
    "list of samples": [{"x": value, "text": str(value)} for value in VALUES],
    "list of tuples": [(value, str(value)) for value in VALUES],
    "texts": [str(value) for value in VALUES],
}


def values_of(batch):
    if isinstance(batch, dict):
        return torch.tensor([float(value) for value in batch["x"]])
    first = [one["x"] if isinstance(one, dict) else one[0] if isinstance(one, tuple) else one for one in batch]
    return torch.tensor([float(value) for value in first])


@pytest.mark.one_in(5, "data", others="slow")
@pytest.mark.parametrize("data", WITHOUT_TENSORS.values(), ids=WITHOUT_TENSORS)
def test_a_batch_without_tensors_is_checked(data):
    model = nn.Linear(1, 1)
    square_B = lambda batch: (model(values_of(batch)[:, None])[:, 0] - 1).square()  # noqa: E731
    assert check_loop(lambda batch: square_B(batch).mean(), [data]).ok
    with pytest.raises(BatchDependentLossError, match="The loss mixes samples"):
        check_loop(lambda batch: square_B(batch).mean() * values_of(batch).sum(), [data])
    with pytest.raises(BatchDependentLossError, match="The model input of one sample changed"):
        check_loop(lambda batch: model(values_of(batch)[:, None] - values_of(batch).mean()).mean(), [data])


def test_a_count_of_words_is_rejected_by_check_loop():
    model = nn.Linear(1, 1)
    data = {"x": torch.ones(6, 1), "text": ["a", "b c", "d", "e f g", "h", "i"]}
    with pytest.raises(BatchDependentLossError, match="The loss mixes samples"):
        check_loop(lambda batch: model(batch["x"]).sum() * 7 / len(" ".join(batch["text"]).split()), [data])


def test_only_lists_can_hold_samples_or_columns():
    step = lambda batch: nn.Linear(1, 1)(torch.ones(2, 1)).mean()  # noqa: E731
    for data in ([["a", "b"], ["c", "d"]], {"a": ["b"], "c": ["d", "e"]}, UserDict(a=["b", "c"]), 3):
        with pytest.raises(TypeError, match=r"samples of a batch \(.*\) is unknown. Pass a dict of lists"):
            check_loop(step, [data])


@pytest.mark.parametrize("private", [False, True])
def test_a_step_of_the_optimizer_is_rejected(private):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(*batch(60)), batch_size=12)
    if private:
        settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
        optimizer = dpengine.PrivacyEngine().make_private(model, optimizer, data, **settings)[1]

    def step(one):
        loss = F.cross_entropy(model(one[0]), one[1])
        loss.backward()
        optimizer.step()

    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(BatchStateError, match=r"does not call optimizer\.step\(\)"):
        check_loop(step, data)
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.slow
def test_undecided_checks_are_listed():
    model, count = mlp(), iter(range(99))
    changing = lambda one: F.cross_entropy(model(one[0]), one[1]) * next(count)  # noqa: E731
    result = check_loop(changing, [batch()])
    assert not result.ok
    assert result.undecided == ("step gives other gradients when it runs again with the same batch",)
    no_rows = lambda one: model(one[0]).sum() + model(torch.ones(1, 4)).sum() * 0  # noqa: E731
    assert check_loop(lambda one: model(torch.ones(1, 4)).sum(), [batch()]).undecided
    assert check_loop(no_rows, [batch()], loss_reduction="sum").ok


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((None, []), TypeError, "step is NoneType"),
        ((lambda one: 0, []), ValueError, "batches is empty"),
        ((lambda one: 0, [3]), TypeError, "is unknown"),
        ((lambda one: 0, [torch.ones(1, 2)]), ValueError, "at least two samples"),
        ((lambda one: 0, [torch.ones(2, 2)]), ValueError, "called no model"),
        ((lambda one: mlp()(one[0]).tolist(), [batch()]), ValueError, "returned no loss"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, text):
    with pytest.raises(error, match=text):
        check_loop(*arguments)


def test_a_private_loader_and_an_unknown_reduction_are_rejected():
    model = mlp()
    data = DataLoader(TensorDataset(*batch(60)), batch_size=12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = dpengine.PrivacyEngine()
    loader = engine.make_private(model, optimizer, data, noise_multiplier=1.0, max_grad_norm=1.0)[2]
    with pytest.raises(ValueError, match="batches is a private loader"):
        check_loop(lambda one: F.cross_entropy(model(one[0]), one[1]), loader)
    with pytest.raises(ValueError, match="loss_reduction='total' is not known"):
        check_loop(lambda one: 0, data, loss_reduction="total")
    assert engine.get_epsilon(delta=1e-5) == 0
