"""The run-time check of loss and loop: losses that mix samples are rejected, ordinary ones are not."""

import gc
import warnings
import weakref
from collections import UserDict

import inside
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from case_calls import Doubled
from independence.training import private, train
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.data import DataLoader, TensorDataset

from dpengine.errors import BatchDependentLossError, PrivacyWarning, ReductionError
from dpengine.independence import loop_record
from dpengine.losses import per_token_mean
from dpengine.validation import per_example

CLASSES, STEPS = 3, 4
WEIGHTS = torch.tensor([1.0, 2.0, 5.0])


def run_training(loss_of, *, reduction="mean", steps=STEPS, model=None, data=None, batch_size=16):
    """Trains a few private steps, and returns the engine. ``loss_of`` is called with model, inputs and targets."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    data = data or TensorDataset(torch.randn(80, 4), torch.arange(80) % CLASSES)
    run = private(model, data, batch_size, seed=3, loss_reduction=reduction)
    return train(run, lambda model, batch: loss_of(model, *batch), steps)


def sample_losses(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def focal(outputs, targets):
    loss_B = sample_losses(outputs, targets)
    return ((1 - torch.exp(-loss_B)) ** 2 * loss_B).mean()


def info_nce(outputs, targets):
    normalized = F.normalize(outputs)
    return F.cross_entropy(normalized @ normalized.T, torch.arange(len(normalized)))


def in_place(outputs, targets):
    one_hot = torch.zeros(len(outputs), CLASSES)
    one_hot.scatter_(1, targets[:, None], 1.0)
    return F.mse_loss(outputs.sigmoid_(), one_hot)


def with_logged_accuracy(outputs, targets):
    accuracy = (outputs.argmax(1) == targets).float().mean().item()
    assert 0 <= accuracy <= 1
    return F.cross_entropy(outputs, targets)


SOUND = {  # more are in test_ordinary_loops.py
    "focal": focal,
    "in place": in_place,
    "two losses": lambda o, t: F.cross_entropy(o, t) + F.multi_margin_loss(o, t),
    "accuracy before the loss": with_logged_accuracy,
    "random samples over len": lambda o, t: (sample_losses(o, t) * (torch.rand(len(t)) < 0.5)).sum() / len(t),
    "random weights": lambda o, t: (sample_losses(o, t) * torch.empty(len(t)).uniform_()).mean(),
    "one random number": lambda o, t: sample_losses(o, t).mean() * torch.rand(()),
    "random projection": lambda o, t: F.cross_entropy(
        o @ torch.eye(CLASSES).add_(0.1 * torch.randn(CLASSES, CLASSES)), t
    ),
    "teacher": lambda o, t: F.kl_div(
        o.log_softmax(1), torch.softmax(WEIGHTS[t][:, None] * o.detach(), 1), reduction="batchmean"
    ),
    "per example": per_example(lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS)),
    "assertion": lambda o, t: F.cross_entropy(o, t) if torch.isfinite(o).all() else o.sum(),
}

MIXING = {
    "class weights": lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS),
    "masked mean": lambda o, t: (sample_losses(o, t) * (t > 0)).sum() / (t > 0).sum(),
    "mean of a part": lambda o, t: F.cross_entropy(o[t > 0], t[t > 0]),
    "ignored label": lambda o, t: F.cross_entropy(o, t, ignore_index=0),
    "contrastive": info_nce,
    "batch softmax": lambda o, t: -F.log_softmax(o, 0).gather(1, t[:, None]).mean(),
    "normalized by the batch": lambda o, t: F.cross_entropy((o - o.mean(0)) / o.std(0), t),
    "variance of outputs": lambda o, t: F.cross_entropy(o, t) - o.var(0).mean(),
    "hardest sample": lambda o, t: sample_losses(o, t).max(),
    "dice of the batch": lambda o, t: 1 - (o.sigmoid()[:, 0] * t).sum() / (o.sigmoid()[:, 0] + t).sum(),
    "mixed outputs": lambda o, t: F.cross_entropy(0.7 * o + 0.3 * o.flip(0), t),
}

MASKS = {
    "rand": lambda t: torch.rand(len(t)) < 0.5,
    "rand_like": lambda t: torch.rand_like(t.float()) < 0.5,
    "bernoulli_": lambda t: torch.empty(len(t)).bernoulli_(0.5) > 0,
    "bernoulli": lambda t: torch.bernoulli(torch.full((len(t),), 0.5)) > 0,
    "dropout": lambda t: F.dropout(torch.ones(len(t))) > 0,
}

MIXING_INPUTS = {
    "mixup": lambda x: 0.7 * x + 0.3 * x[torch.randperm(len(x))],
    "normalized": lambda x: (x - x.mean(0)) / x.std(0),
    "bootstrap": lambda x: x[torch.randint(len(x), (len(x),))],
    "shifted": lambda x: x.roll(1, 0),
    "in place": lambda x: x.sub_(x.mean(0)),
}

NUMBER_READS = {
    "item": lambda o, t: (sample_losses(o, t) * (t > 0)).sum() / (t > 0).sum().item(),
    "int": lambda o, t: (sample_losses(o, t) * (t > 0)).sum() / int((t > 0).sum()),
    "numpy": lambda o, t: (sample_losses(o, t) * (t > 0)).sum() / float((t > 0).numpy().sum()),
    "length of a part": lambda o, t: sample_losses(o, t)[t > 0].sum() / max(1, len(t[t > 0].tolist())),
}


@pytest.mark.one_in(3, "loss", others="slow")
@pytest.mark.parametrize("loss", SOUND.values(), ids=SOUND)
def test_a_loss_of_independent_samples_is_accepted_without_a_warning(loss):
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        warnings.filterwarnings("ignore", message=".*INSECURE|.*seed", category=PrivacyWarning)
        engine = run_training(lambda model, x, y: loss(model(x), y))
    assert inside.checked_loops(engine) > 0


@pytest.mark.parametrize("loss", MIXING.values(), ids=MIXING)
def test_a_loss_that_mixes_samples_is_rejected_in_the_first_backward_pass(loss):
    with pytest.raises(BatchDependentLossError, match=r"DPE010.*The loss mixes samples.*per_example\(loss_fn\)"):
        run_training(lambda model, x, y: loss(model(x), y), steps=1)


@pytest.mark.filterwarnings("ignore:.*random numbers")
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_mean_over_a_random_number_of_entries_is_rejected_at_the_next_batch_size(mask):
    def loss_of(model, x, y):
        kept = mask(y)
        return (sample_losses(model(x), y) * kept).sum() / kept.sum().clamp(min=1)

    with pytest.warns(PrivacyWarning, match=r"DPE012.*depends on a random tensor") as shown:
        run_training(loss_of, steps=1)
    (text,) = (str(one.message) for one in shown if "could not be checked" in str(one.message))
    assert not any(map(str.isdigit, text.partition(": ")[2]))  # reports contain the reason, and batch sizes are secret
    with pytest.raises(BatchDependentLossError, match="The loss mixes samples"):
        run_training(loss_of)


@pytest.mark.filterwarnings("ignore:.*random numbers")
def test_random_numbers_that_are_as_many_as_the_samples_by_chance_are_accepted_at_another_size():
    def loss_of(model, x, y):
        row, column = torch.rand(2) * 0.01  # shared by all samples
        return F.cross_entropy(model(x) + row * torch.arange(CLASSES) + column, y)

    data = TensorDataset(torch.randn(12, 4), torch.arange(12) % CLASSES)
    engine = run_training(loss_of, data=data, batch_size=2, steps=12)
    assert inside.checked_loops(engine) > 0


@pytest.mark.parametrize(
    "use", [lambda out, old: out - old, lambda out, old: out * old.detach().norm()], ids=["x", "y"]
)
def test_a_tensor_of_an_earlier_batch_in_the_loop_is_reported(use):
    last = []

    def loss_of(model, x, y):
        outputs = model(x)
        mixed = use(outputs, last[-1].detach()) if last else outputs
        last[:] = [outputs.mean(0)]
        return F.cross_entropy(mixed, y)

    with pytest.warns(PrivacyWarning, match=r"DPE012.*graph of an earlier batch, such as a hidden state"):
        run_training(loss_of)


@pytest.mark.parametrize("change", MIXING_INPUTS.values(), ids=MIXING_INPUTS)
def test_a_loop_that_mixes_samples_before_the_model_is_rejected(change):
    with pytest.raises(BatchDependentLossError, match="model input of one sample changed"):
        run_training(lambda model, x, y: F.cross_entropy(model(change(x)), y), steps=1)


@pytest.mark.parametrize("loss", NUMBER_READS.values(), ids=NUMBER_READS)
def test_number_read_from_the_batch_is_rejected_at_the_next_batch_size(loss):
    with pytest.raises(BatchDependentLossError, match=r"a number that was read from the batch \(Tensor\."):
        run_training(lambda model, x, y: loss(model(x), y), steps=6)


@pytest.mark.parametrize("fix", ["per_example", "sum over len"])
def test_suggested_fixes_are_accepted(fix):
    weighted = lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS)  # noqa: E731
    loss = (
        per_example(weighted)
        if fix == "per_example"
        else lambda o, t: (sample_losses(o, t) * WEIGHTS[t]).sum() / len(t)
    )
    run_training(lambda model, x, y: loss(model(x), y))


def test_tokens_of_the_batch_are_rejected_and_tokens_of_each_sample_accepted():
    torch.manual_seed(0)
    words, labels = torch.randint(9, (80, 5)), torch.randint(9, (80, 5))
    labels[torch.arange(80) % 2 == 0, 2:] = -100
    model = lambda: nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))  # noqa: E731
    of_batch = lambda m, x, y: F.cross_entropy(m(x).transpose(1, 2), y)  # noqa: E731
    with pytest.raises(BatchDependentLossError, match=r"per_token_mean\(logits, labels\)"):
        run_training(of_batch, model=model(), data=TensorDataset(words, labels))
    run_training(lambda m, x, y: per_token_mean(m(x), y), model=model(), data=TensorDataset(words, labels))


@pytest.mark.parametrize(
    ("loss", "declared", "right"),
    [
        (lambda o, t: F.cross_entropy(o, t, reduction="sum"), "mean", "sum"),
        (lambda o, t: F.cross_entropy(o, t, reduction="sum") / 16, "mean", "sum"),
        (F.cross_entropy, "sum", "mean"),
        (lambda o, t: sample_losses(o, t).sum() / len(t), "sum", "mean"),
    ],
    ids=["sum", "constant", "mean", "mean by len"],
)
def test_a_mean_and_a_sum_are_distinguished(loss, declared, right):
    with pytest.raises(ReductionError, match=f'Pass loss_reduction="{right}" to make_private'):
        run_training(lambda model, x, y: loss(model(x), y), reduction=declared, steps=6)
    run_training(lambda model, x, y: loss(model(x), y), reduction=right, steps=6)


def test_a_loss_is_taken_for_a_sum_on_the_first_batch():
    with pytest.raises(ReductionError, match='loss_reduction="sum"'):
        run_training(lambda model, x, y: F.cross_entropy(model(x), y, reduction="sum"), steps=1)


def run_bfloat16_training(loss, seed, size=64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    data = TensorDataset(torch.randn(4 * size, 4), torch.arange(4 * size) % CLASSES)
    _, model, optimizer, loader = private(model, data, size, seed=seed)
    for _ in range(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value = loss(model(inputs), targets)
            value.backward()
            optimizer.step()


@pytest.mark.one_in(4, "size", others="slow")
@pytest.mark.parametrize(("size", "seed"), [(64, 0), (64, 4), (4096, 3), (4096, 8)])
def test_batches_of_nearly_the_same_size_are_not_compared_in_half_precision(size, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        run_bfloat16_training(F.cross_entropy, seed, size)
        run_bfloat16_training(with_logged_accuracy, seed, min(size, 64))


@pytest.mark.one_in(8, "seed", others="slow")
@pytest.mark.parametrize("seed", range(8))
def test_a_sum_is_reported_at_a_later_size_if_the_second_is_nearly_the_first(seed):
    with pytest.raises(ReductionError, match='loss_reduction="sum"'):
        run_bfloat16_training(lambda outputs, y: sample_losses(outputs, y).sum() / 64, seed)


def with_gradient_hook(outputs):
    outputs.register_hook(lambda grad: 2 * grad)
    return outputs


UNDECIDED = {
    "custom function": lambda model, x, y: F.cross_entropy(Doubled.apply(model(x)), y),
    "input by numpy": lambda model, x, y: F.cross_entropy(model(torch.from_numpy(x.numpy()[::1].copy())), y),
    "gradient hook": lambda model, x, y: F.cross_entropy(with_gradient_hook(model(x)), y),
    "branch": lambda model, x, y: F.cross_entropy(model(x), y) * (2.0 if x[0].sum() > 0 else 1.0),
}


@pytest.mark.parametrize("loss_of", UNDECIDED.values(), ids=UNDECIDED)
def test_an_undecided_loop_is_accepted_with_one_warning(loss_of):
    with pytest.warns(PrivacyWarning) as shown:
        engine = run_training(loss_of, steps=10)
    assert inside.checked_loops(engine) == 0
    texts = [str(one.message) for one in shown if "could not be checked" in str(one.message)]
    assert len(texts) == 1
    remedies = ("Call dpengine.check_loop(step, batches)", "Select per sample, as torch.where does")
    assert all(any(remedy in text for remedy in remedies) for text in texts)


def test_a_batch_in_an_object_is_checked():
    def collate(rows):
        inputs, targets = zip(*rows, strict=True)
        return UserDict(x=torch.stack(inputs), y=torch.stack(targets))  # as a BatchEncoding of transformers

    model = nn.Linear(4, CLASSES)
    data = TensorDataset(torch.randn(80, 4), torch.arange(80) % CLASSES)
    _, _, _, loader = private(model, DataLoader(data, batch_size=16, collate_fn=collate))
    with pytest.raises(BatchDependentLossError, match="The loss mixes samples"):
        for batch in loader:
            sample_losses(model(batch["x"]), batch["y"]).mul(WEIGHTS[batch["y"]]).sum().div(
                WEIGHTS[batch["y"]].sum()
            ).backward()


def test_data_without_a_batch_axis_are_accepted():
    ids = torch.randint(9, (80, 7))
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9))
    _, model, optimizer, loader = private(model, TensorDataset(ids), batch_first=False)
    for (batch,) in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(batch.T).flatten(0, 1), batch.T.flatten()).backward()
        optimizer.step()


@pytest.mark.parametrize("weights", [torch.linspace, np.linspace])
def test_weight_that_depends_on_the_position_in_the_batch_is_reported(weights):
    weighted = lambda o, y: (sample_losses(o, y) * torch.as_tensor(weights(0, 1, len(y))).float()).mean()  # noqa: E731
    with pytest.raises(BatchDependentLossError, match="depends on the sample's position in the batch"):
        run_training(lambda model, x, y: weighted(model(x), y))


def test_values_of_single_samples_without_a_record_are_reported_as_such():
    def loss_of(model, x, y):
        teacher = torch.func.vmap(lambda row: (row / 2).softmax(0))(x[:, :CLASSES])
        return F.kl_div(model(x).log_softmax(1), teacher, reduction="batchmean")

    with pytest.warns(PrivacyWarning, match="a tensor with an entry for each sample comes from code without a record"):
        run_training(loss_of)


def test_a_batch_with_as_many_samples_as_positions_is_not_rejected():
    def train_epoch(length, step=lambda logits, ids: F.cross_entropy(logits.flatten(0, 1), ids.flatten())):
        ids = torch.randint(9, (80, length))
        model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9))
        engine, model, optimizer, loader = private(model, TensorDataset(ids), 8, seed=1, batch_first=False)
        found = []
        for (batch,) in loader:
            found.append(len(batch))
            optimizer.zero_grad()
            step(model(batch.T), batch.T).backward()
            optimizer.step()
        return found, inside.checked_loops(engine)

    (first, *_), _ = train_epoch(99)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        warnings.filterwarnings("ignore", message=".*INSECURE|.*seed", category=PrivacyWarning)
        (again, *_), checked = train_epoch(first)
    assert again == first
    assert checked > 0
    with pytest.raises(BatchDependentLossError):
        train_epoch(first, lambda logits, ids: F.cross_entropy((logits - logits.mean(1, keepdim=True))[0], ids[0]))


def test_a_second_model_gets_its_own_warning():
    for _ in range(2):
        with pytest.warns(PrivacyWarning, match="The loss could not be checked"):
            run_training(UNDECIDED["custom function"], steps=1)


def test_loop_check_leaves_no_hooks_or_modes():
    seen, own = [], []

    class RecordingMode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            own.append(function)
            return function(*args, **(kwargs or {}))

    def loss_of(model, inputs, targets):
        outputs = model(inputs)
        seen.append(weakref.ref(outputs))
        return F.cross_entropy(outputs, targets)

    backward = torch.Tensor.backward
    with RecordingMode() as mode:
        run_training(loss_of, steps=2)
        assert _get_current_function_mode_stack() == [mode]
    gc.collect()
    assert own
    assert torch.Tensor.backward is backward
    assert not loop_record.OPEN_RECORDS
    assert all(one() is None for one in seen)


def test_leaving_the_loop_ends_the_trace():
    _, _, _, loader = private(nn.Linear(4, CLASSES), TensorDataset(torch.randn(80, 4)))
    for _ in loader:
        assert len(loop_record.OPEN_RECORDS) == 1
        break
    assert not loop_record.OPEN_RECORDS
    assert not _get_current_function_mode_stack()


def test_records_that_end_in_any_order_leave_the_compiler_as_it_was():
    compiled = torch.compile(lambda x: x + 1, backend=lambda graph, inputs: lambda *args: (args[0] - 1,))
    first, second = (loop_record.LoopRecord(torch.zeros(2), 2, nn.Linear(1, 1)) for _ in range(2))
    assert float(compiled(torch.zeros(1))) == 1
    first.close()
    second.close()
    assert float(compiled(torch.zeros(1))) == -1


def test_the_check_does_not_change_random_numbers(monkeypatch):
    drawn = []

    def loss_of(model, inputs, targets):
        outputs = F.dropout(model(inputs), 0.5)
        drawn.append(torch.rand(()).item())
        return F.cross_entropy(outputs, targets)

    run_training(loss_of)
    monkeypatch.setattr("dpengine.independence.loop_probe.LoopProbe.batch_returned", lambda *_: None)
    run_training(loss_of)
    assert drawn[:STEPS] == drawn[STEPS:]


def test_rejected_batch_is_charged_as_discarded():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(80, 4), torch.arange(80) % CLASSES)
    engine, model, optimizer, loader = private(nn.Linear(4, CLASSES), data)
    before = model.weight.detach().clone()
    with pytest.raises(BatchDependentLossError):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets, weight=WEIGHTS).backward()
    assert torch.equal(model.weight, before)
    assert engine.get_epsilon(delta=1e-5) > 0
