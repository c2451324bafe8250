"""The run-time check of loops: inactive clamps and branches, Python numbers, and limits on time and size."""

import contextlib
import itertools
import math
import random
import warnings
from concurrent.futures import ThreadPoolExecutor

import inside
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from independence.training import private, train, undecided
from torch import nn

import dpengine
from dpengine.errors import BatchDependentLossError, PrivacyWarning, ReductionError
from dpengine.independence import loop_record, run_again

CLASSES, EXAMPLES, BATCH = 3, 80, 16
WEIGHTS = torch.tensor([1.0, 2.0, 5.0])


def run_training(
    loss_of,
    *,
    steps=6,
    last_layer=nn.Identity,
    reduction="mean",
    before=lambda model: None,
    pass_data=False,
    pass_model=False,
    augment=lambda x: x,
):
    """Trains a few private steps; returns the engine and the warnings that name the loss.

    ``loss_of`` is called with outputs (or the model), labels, texts (or inputs) and the number of the step.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES), last_layer())
    data = [(torch.randn(4), i % CLASSES, "a word " * (1 + i % 3)) for i in range(EXAMPLES)]
    run = private(model, data, BATCH, seed=3, loss_reduction=reduction)
    before(model)
    step = itertools.count(1)

    def loss(model, batch):
        x, y, texts = batch
        given = (model, y, x) if pass_model else (model(augment(x)), y, x if pass_data else texts)
        return loss_of(*given, next(step))

    with undecided() as shown:
        engine = train(run, loss, steps)
    return engine, shown


def sample_losses(o, y):
    return F.cross_entropy(o, y, reduction="none")


def correct(o, y):
    return o.argmax(1) == y


# Clamps that are inactive in every checked batch

INACTIVE_BOUNDS = {
    "clamp of a mean": lambda o, y: F.cross_entropy(o, y).clamp(max=5),
    "minimum": lambda o, y: torch.minimum(F.cross_entropy(o, y), torch.tensor(4.0)),
    "where": lambda o, y: (lambda loss: torch.where(loss > 6, loss.detach(), loss))(F.cross_entropy(o, y)),
    "outliers left out": lambda o, y: (lambda loss: (loss * (loss < 4 * loss.mean())).mean())(sample_losses(o, y)),
    "scaled down": lambda o, y: (lambda loss: loss / loss.detach().clamp(min=5))(F.cross_entropy(o, y)),
    "mean of absolute outputs": lambda o, y: F.cross_entropy(o, y) * (o.detach().abs().mean() < 3),
    "all are right": lambda o, y: F.cross_entropy(o, y) * (1 - 0.9 * correct(o, y).all().float()),
    "all are wrong": lambda o, y: F.cross_entropy(o, y) * (1 + (~correct(o, y)).all().float()),
    "one predicted class": lambda o, y: F.cross_entropy(o, y) * (1 + (o.argmax(1) == o[0].argmax()).all().float()),
    "high accuracy": lambda o, y: F.cross_entropy(o, y) * (1 + 20 * F.relu(correct(o, y).float().mean() - 0.95)),
    "largest output": lambda o, y: F.cross_entropy(o / o.detach().abs().max().clamp(min=10), y),
}
PER_SAMPLE_BOUNDS = {
    "clamp of each": (lambda o, y: sample_losses(o, y).clamp(max=2).mean(), nn.Identity),
    "hinge": (lambda o, y: F.relu(sample_losses(o, y) - 1).mean(), nn.Identity),
    "probabilities": (lambda o, y: F.binary_cross_entropy(o, F.one_hot(y, CLASSES).float()), nn.Sigmoid),
    "exponential": (lambda o, y: F.poisson_nll_loss(o[:, 0], y.float()), nn.Identity),
    "validated": (lambda o, y: -torch.distributions.Bernoulli(o[:, 0]).log_prob((y > 0).float()).mean(), nn.Sigmoid),
}


@pytest.mark.parametrize("loss", INACTIVE_BOUNDS.values(), ids=INACTIVE_BOUNDS)
def test_inactive_clamp_on_a_loss_over_several_samples_is_rejected(loss):
    with pytest.raises(
        BatchDependentLossError, match=r"changed by 100 or more % when other samples in the batch were given far"
    ):
        run_training(lambda o, y, *_: loss(o, y), steps=1)


def test_branch_on_a_loss_value_outside_the_observed_range_is_reported():
    def damped(o, y, *_):
        loss = F.cross_entropy(o, y)
        return 0.1 * loss if loss > 4 else loss

    _, (text,) = run_training(damped)
    assert "the loop takes a branch that depends on the batch" in text


def scaled_if(test, *, to=0.1):
    """Returns a loss that is scaled if a condition on outputs, labels and inputs holds."""
    return lambda o, y, x: F.cross_entropy(o, y) * (to if test(o, y, x) else 1.0)


def zero_if(test):
    return lambda o, y, x: 0 * o.sum() if test(F.cross_entropy(o, y)) else F.cross_entropy(o, y)


def raise_if(o, y, test):
    if test:
        raise ValueError("no valid outputs")
    return F.cross_entropy(o, y)


def assert_not(o, y, test):
    assert not test
    return F.cross_entropy(o, y)


def caught_error(o, y, x):
    try:
        if o.abs().max() > 50:
            raise ValueError("too large")
    except ValueError:
        return F.mse_loss(o, F.one_hot(y, CLASSES).float())
    return F.cross_entropy(o, y)


def suppressed_error(o, y, x):
    weight = 0.1
    with contextlib.suppress(AssertionError):
        assert not (o.abs() < 20).all()
        weight = 1.0
    return weight * F.cross_entropy(o, y)


def zero_if_infinite(o, y, x):
    loss = F.cross_entropy(o, y)
    return loss if math.isfinite(loss.item()) else 0 * o.sum()


def error_for_large_outputs(o, y, x):
    largest = o.abs().max().item()
    if largest > 50:
        raise ValueError("no valid outputs")
    return F.cross_entropy(o, y)


def named_accuracy(o, y, x):
    accuracy = correct(o, y).float().mean().item()
    loss = F.cross_entropy(o, y)
    if accuracy > 0.99:
        loss = 0.1 * loss
    return loss


class Trainer:
    step, last_layer, best = 0, 0.0, 1e9

    def loss(self, o, y, x):
        loss = F.cross_entropy(o, y)
        self.last, stats = loss.item(), {"loss": loss.item(), "n": self.step}
        if self.step % 4 == 0 and stats["n"] % 2 == 0:
            self.step = 0
        self.step += 1
        return loss

    def best_loss(self, o, y, x):
        loss = F.cross_entropy(o, y)
        if loss.item() < self.best:
            self.best = loss.item()
        if loss > 6:
            warnings.warn("a large loss", stacklevel=1)
        return loss


OTHER_BRANCH = {  # none of these conditions changes its value within the first batches
    "all are right": scaled_if(lambda o, y, x: correct(o, y).all()),
    "any is wrong": scaled_if(lambda o, y, x: not (~correct(o, y)).any(), to=0.5),
    "int of a bool": lambda o, y, x: F.cross_entropy(o, y) * (1 + int(correct(o, y).all())),
    "float of a bool": lambda o, y, x: F.cross_entropy(o, y) * (1 + float(correct(o, y).all())),
    "item of a bool": scaled_if(lambda o, y, x: correct(o, y).all().item()),
    "high accuracy": scaled_if(lambda o, y, x: correct(o, y).float().mean() > 0.99),
    "confident": scaled_if(lambda o, y, x: (o.softmax(1).amax(1) > 0.999).all()),
    "large output": scaled_if(lambda o, y, x: (o > 20).any()),
    "large outputs": scaled_if(lambda o, y, x: (o.abs() > 9).all()),
    "large data": scaled_if(lambda o, y, x: x.max() > 100),
    "any label": scaled_if(lambda o, y, x: (y[:8] == 0).any() and not (o < 50).all()),
    "a number in a test": scaled_if(lambda o, y, x: correct(o, y).sum().item() == len(y)),
    "a number with a name": named_accuracy,
    "an error that is caught": caught_error,
    "an error that is suppressed": suppressed_error,
    "a number of bools": lambda o, y, x: F.cross_entropy(o, y) * 0.5 ** sum((o.amax(1) > 20).tolist()),
    "a length": lambda o, y, x: F.cross_entropy(o, y) / (1 + len((o.amax(1) > 20).nonzero())),
    "a shape": lambda o, y, x: F.cross_entropy(o, y) / (1 + o[o > 20].flatten().shape[0]),
    "a number that bounds": lambda o, y, x: F.cross_entropy(o.clamp(max=9 * o.detach().std().item()), y),
    "a bounded number": lambda o, y, x: F.cross_entropy(o, y) * min(1.0, 5 / F.cross_entropy(o, y).item()),
    "a number with a lower bound": lambda o, y, x: F.cross_entropy(o, y) / max(50.0, o.abs().max().item()),
    "a number that is rounded down": lambda o, y, x: F.cross_entropy(o, y) / (1 + o.max().item() // 5),
    "next to an assert": lambda o, y, x: assert_not(o, y, (o.abs() > 50).any()) * (1 + int(correct(o, y).all())),
}
NO_OTHER_BRANCH = {
    "NaN": zero_if(torch.isnan),
    "not finite": zero_if(lambda loss: not (torch.isfinite(loss).all() and not loss.isinf().any())),
    "error for outputs": lambda o, y, x: raise_if(o, y, (o.abs() > 50).any()),
    "error for labels": lambda o, y, x: raise_if(o, y, (y >= CLASSES).any()),
    "assert": lambda o, y, x: assert_not(o, y, o.abs().max() > 50),
    "error for a number": error_for_large_outputs,
    "number for infinity": zero_if_infinite,
    "perplexity": lambda o, y, x: (math.exp(min(20, o.mean().item())), F.cross_entropy(o, y))[1],
    "count that is divided by": lambda o, y, x: (1 / max(1, correct(o, y).sum().item()), F.cross_entropy(o, y))[1],
    "number in a text": lambda o, y, x: ("%.3f" % o.mean().item(), F.cross_entropy(o, y))[1],  # noqa: UP031
    "a length of labels": lambda o, y, x: F.cross_entropy(o, y) + 0 * len(o[y == 0]) + 0 * o[y == 1].shape[0],
    "other attributes and items": Trainer().loss,
    "the best loss": Trainer().best_loss,
    "number that is shown": lambda o, y, x: (F.cross_entropy(o, y), correct(o, y).sum().item())[0],
}


@pytest.mark.one_in(3, "loss", others="slow")
@pytest.mark.parametrize("loss", OTHER_BRANCH.values(), ids=OTHER_BRANCH)
def test_branch_on_values_outside_the_observed_range_is_reported(loss):
    _, (text,) = run_training(lambda o, y, x, _: loss(o, y, x), pass_data=True)
    reasons = ("the loop takes a branch that depends on the batch", "the loop tests a number computed from the batch")
    assert any(reason in text for reason in reasons)


@pytest.mark.one_in(3, "loss", others="slow")
@pytest.mark.parametrize("loss", NO_OTHER_BRANCH.values(), ids=NO_OTHER_BRANCH)
def test_branch_that_only_raises_is_accepted(loss):
    engine, shown = run_training(lambda o, y, x, _: loss(o, y, x), pass_data=True)
    assert inside.checked_loops(engine) > 0
    assert not shown


def test_check_loop_does_not_suppress_warnings_about_branches():
    loss = scaled_if(lambda o, y, x: correct(o, y).all())

    def call_check_loop(model):
        batch = torch.randn(BATCH, 4), torch.arange(BATCH) % CLASSES
        assert dpengine.check_loop(lambda batch: loss(model(batch[0]), batch[1], batch[0]), [batch]).ok

    engine, (text,) = run_training(lambda o, y, x, _: loss(o, y, x), pass_data=True, before=call_check_loop)
    assert "Select per sample" in text
    assert engine.report().facts.loss_checked is None


BOUNDS_ON_DATA = {
    "before the model": lambda model, x, y: sample_losses(model(torch.where((x > 9).any(), x / 2, x)), y).mean(),
    "clipped before the model": lambda model, x, y: sample_losses(model(x * (99 / x.norm()).clamp(max=1)), y).mean(),
    "in the loss": lambda model, x, y: sample_losses(model(x), y).mean() / (x.abs().max() / 9).clamp(min=1),
}


@pytest.mark.parametrize("loss", BOUNDS_ON_DATA.values(), ids=BOUNDS_ON_DATA)
def test_inactive_clamp_on_data_of_several_samples_is_rejected(loss):
    with pytest.raises(BatchDependentLossError):
        run_training(lambda model, y, x, _: loss(model, x, y), pass_model=True, steps=1)


def running_mean(model, y, x, state):
    mean = state.get("mean", torch.zeros(4))
    state["mean"] = 0.9 * mean + 0.1 * x.mean(0)
    return F.cross_entropy(model(x - mean), y)


def queue(model, y, x, state):
    o = model(x)
    others = state.get("queue", torch.ones(4, CLASSES))
    state["queue"] = torch.cat([o.detach(), others])[:4]
    return F.cross_entropy(o, y) + (o @ others.T).mean()


@torch.jit.script
def scripted_mean(x: torch.Tensor) -> torch.Tensor:
    return x.mean(0)


def in_thread(x):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: x.mean(0)).result()


UNTRACED_TENSORS = {
    "running mean": running_mean,
    "queue": queue,
    "scripted": lambda model, y, x, _: F.cross_entropy(model(x - scripted_mean(x)), y),
    "vmap": lambda model, y, x, _: F.cross_entropy(model(x - torch.func.vmap(torch.mean, in_dims=1)(x)), y),
    "thread": lambda model, y, x, _: F.cross_entropy(model(x - in_thread(x)), y),
}


@pytest.mark.parametrize("loss", UNTRACED_TENSORS.values(), ids=UNTRACED_TENSORS)
def test_tensors_from_other_batches_or_untraced_code_are_reported(loss):
    state = {}
    _, (text,) = run_training(lambda model, y, x, _: loss(model, y, x, state), pass_model=True)
    assert "a tensor in the loop changes from batch to batch" in text
    assert "Use no values of other batches" in text


def test_constants_and_running_sums_outside_the_loss_are_accepted():
    total, mean = torch.zeros(()), torch.ones(4)

    def loss_of(model, y, x, _):
        nonlocal total
        o = model(x - mean)
        loss = F.cross_entropy(o, y, weight=None) + 0.1 * (o * torch.tensor([1.0, 0.0, 1.0])).mean()
        total = total + loss.detach()
        return loss

    engine, shown = run_training(loss_of, pass_model=True)
    assert inside.checked_loops(engine) > 0
    assert not shown


def cut_out(x, number):
    x = x.clone()
    for row in x:
        row[number()] = 0
    return x


GENERATOR = torch.Generator()
RANDOM_FOR_SAMPLES = {
    "Python": lambda x: cut_out(x, lambda: random.randrange(4)),
    "numpy": lambda x: cut_out(x, lambda: np.random.randint(4)),
    "numpy matrix": lambda x: x + torch.from_numpy(np.random.normal(size=x.shape)).float(),
    "own generator": lambda x: x + torch.randn(x.shape, generator=GENERATOR).mul_(0.1),
}


@pytest.mark.parametrize("augment", RANDOM_FOR_SAMPLES.values(), ids=RANDOM_FOR_SAMPLES)
def test_random_numbers_for_each_sample_are_accepted(augment):
    engine, shown = run_training(lambda o, y, *_: F.cross_entropy(o, y), augment=augment)
    assert inside.checked_loops(engine) > 0
    assert not shown


@pytest.mark.parametrize("noisy", [lambda x: x + 0.01 * torch.randn_like(x), F.dropout], ids=["noise", "dropout"])
def test_a_number_before_the_model_is_reported_if_random_inputs_cannot_be_compared(noisy):
    scaled = lambda x: noisy(x / x.abs().max().item())  # noqa: E731
    _, (text,) = run_training(lambda o, y, *_: F.cross_entropy(o, y), augment=scaled)
    assert "the input of the model may depend on a number read by Tensor.item" in text


def gap_of_groups(o, y, x, state):
    rates = [correct(o[group], y[group]).float().mean().nan_to_num().item() * 0 for group in (y < 1, y > 0)]
    weight = torch.ones(len(y))
    weight[y > 0] += rates[1] - rates[0]
    return (weight * sample_losses(o, y)).mean()


def scaled_by_first_loss(o, y, x, state):
    loss = F.cross_entropy(o, y)
    if "first" not in state:
        state["first"] = loss.item()
    return loss / state["first"]


def accuracy(o, y):
    count = correct(o, y).sum().item()
    return count / len(y)


def with_logging(o, y, x, state):
    loss, hits = F.cross_entropy(o, y), correct(o, y).sum().item()
    state["accuracy"] = accuracy(o, y)
    state["loss"], state["total"] = loss.item(), state.get("total", 0.0) + loss.item()
    rate = hits / len(y)
    loss = loss * 1.0
    return loss, rate


NUMBERS_IN_THE_LOSS = {"rates of groups": gap_of_groups, "first loss": scaled_by_first_loss}


@pytest.mark.parametrize("loss", NUMBERS_IN_THE_LOSS.values(), ids=NUMBERS_IN_THE_LOSS)
def test_python_number_that_flows_into_the_loss_is_reported(loss):
    state = {}
    _, (text,) = run_training(lambda o, y, x, _: loss(o, y, x, state), pass_data=True)
    assert "the loss depends on a number computed from the batch, which the loop reads by Tensor.item" in text


def test_numbers_used_only_for_logging_are_accepted():
    state = {}
    engine, seen = run_training(lambda o, y, x, _: with_logging(o, y, x, state)[0], pass_data=True)
    assert inside.checked_loops(engine) > 0
    assert not seen


def test_a_seed_from_the_batch_is_reported():
    def seeded(o, y, *_):
        torch.manual_seed(int(y.sum()))
        return F.cross_entropy(F.dropout(o), y)

    _, (text,) = run_training(seeded)
    assert "or seeds a random generator with it" in text


def test_weight_computed_from_the_text_of_each_sample_is_accepted():
    def weighted_by_texts(o, y, texts, _):
        weight = torch.ones(len(y))
        for i, text in enumerate(texts):
            weight[i] = len(text)
        return (sample_losses(o, y) * weight * torch.ones(len(y))[[len(text) % 2 for text in texts]]).mean()

    assert run_training(weighted_by_texts)[1] == []


@pytest.mark.parametrize(("loss", "last_layer"), PER_SAMPLE_BOUNDS.values(), ids=PER_SAMPLE_BOUNDS)
def test_a_bound_on_the_loss_of_each_sample_is_accepted(loss, last_layer):
    engine, shown = run_training(lambda o, y, *_: loss(o, y), last_layer=last_layer)
    assert inside.checked_loops(engine) > 0
    assert not shown


def test_loss_that_raises_for_extreme_outputs_is_checked_with_observed_outputs():
    def loss_of(o, y, *_):
        loss_B = F.binary_cross_entropy(o, F.one_hot(y, CLASSES).float(), reduction="none").mean(1)
        return (loss_B * WEIGHTS[y]).sum() / WEIGHTS[y].sum()

    with pytest.raises(BatchDependentLossError, match="when other samples in the batch were changed"):
        run_training(loss_of, last_layer=nn.Sigmoid, steps=1)


# Python numbers

COUNTS = {
    "words": lambda loss_B, texts: loss_B.sum() * 7 / len(" ".join(texts).split()),
    "share of words": lambda loss_B, texts: loss_B.sum() * (7 / len(" ".join(texts).split())),
    "texts of one word": lambda loss_B, texts: loss_B.sum() / max(1, sum(len(text) < 8 for text in texts)),
}


@pytest.mark.parametrize("loss", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_count_in_texts_is_reported_as_a_number_and_not_as_a_sum(loss, reduction):
    _, (text,) = run_training(lambda o, y, texts, _: loss(sample_losses(o, y), texts), reduction=reduction)
    assert "a number in the loss changed between batches of two sizes" in text
    assert "a number of words" in text


def test_a_count_that_is_equal_in_two_batches_by_chance_is_not_taken_for_a_sum():
    _, (text,) = run_training(lambda o, y, texts, step: sample_losses(o, y).sum() / (3 if step < 4 else 5), steps=8)
    assert "a number in the loss changed" in text


def test_a_weight_that_depends_on_the_step_is_reported_unless_check_loop_accepted_the_loop():
    with_warm_up = lambda o, y, step: F.cross_entropy(o, y) * min(1, step / 100)  # noqa: E731
    _, (text,) = run_training(lambda o, y, _, step: with_warm_up(o, y, step))
    assert "depend on the step, as a warm-up does" in text

    def call_check_loop(model):
        batch = torch.randn(BATCH, 4), torch.arange(BATCH) % CLASSES
        assert dpengine.check_loop(lambda batch: with_warm_up(model(batch[0]), batch[1], 1), [batch]).ok

    engine, shown = run_training(lambda o, y, _, step: with_warm_up(o, y, step), before=call_check_loop)
    assert not shown
    assert engine.report().facts.loss_checked


def test_random_inputs_do_not_hide_a_weight_that_depends_on_the_step():
    noisy = lambda x: x + 0.1 * torch.randn_like(x)  # noqa: E731
    _, (text,) = run_training(lambda o, y, _, step: F.cross_entropy(o, y) * min(1, step / 100), augment=noisy)
    assert "a number in the loss changed between batches of two sizes" in text
    assert run_training(lambda o, y, *_: F.cross_entropy(o, y), augment=noisy)[1] == []
    assert run_training(lambda o, y, *_: F.cross_entropy(o, y) * torch.rand(()), augment=noisy)[1] == []


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_mean_with_a_factor_is_not_taken_for_a_sum(factor):
    engine, shown = run_training(lambda o, y, *_: sample_losses(o, y).sum() * (factor / len(y)))
    assert inside.checked_loops(engine) > 0
    assert not shown


def test_a_sum_next_to_texts_is_reported_when_two_batches_agree():
    with pytest.raises(ReductionError, match='loss_reduction="sum"'):
        run_training(lambda o, y, *_: sample_losses(o, y).sum() / BATCH)
    assert run_training(lambda o, y, *_: sample_losses(o, y).sum() / BATCH, reduction="sum")[1] == []


# Size


@pytest.mark.parametrize(
    ("limit", "loss"),
    [
        ("MAX_CALLS", lambda o, y: F.cross_entropy(sum(o for _ in range(40)) / 40, y)),
        ("MAX_BYTES", lambda o, y: F.cross_entropy(o.repeat(1, 4000)[:, :CLASSES], y)),
        ("MAX_BYTES", lambda o, y: F.cross_entropy(o * torch.ones(50_000)[0], y)),
    ],
    ids=["calls", "results", "constants"],
)
def test_trace_above_the_size_limit_is_reported(monkeypatch, limit, loss):
    monkeypatch.setattr(loop_record, limit, 20 if limit == "MAX_CALLS" else 150_000)
    _, (text,) = run_training(lambda o, y, *_: loss(o, y))
    assert "the loss has too many intermediate results" in text
    assert run_training(lambda o, y, *_: F.cross_entropy(o, y))[1] == []


# Time


@pytest.fixture
def _no_time(monkeypatch):
    monkeypatch.setattr(run_again, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(run_again, "_MAX_TIMES", 0)


@pytest.mark.usefixtures("_no_time")
def test_loop_above_the_time_limit_is_reported_once_at_its_second_checked_step():
    plain = lambda o, y, *_: F.cross_entropy(o, y)  # noqa: E731
    engine, shown = run_training(plain, steps=1)
    assert not shown
    assert inside.checked_loops(engine) == 0
    assert "rerunning the calls of the loop takes too long" in engine.report().facts.loss_evidence
    _, (text,) = run_training(plain, steps=10)
    assert "rerunning the calls of the loop takes too long" in text
    assert "Call dpengine.check_loop(step, batches)" in text


def test_a_loop_that_was_checked_once_is_checked_again_only_within_the_time_limit(monkeypatch):
    plain, raise_if = lambda o, y, *_: F.cross_entropy(o, y), []
    for times in (0, 1000):
        monkeypatch.setattr(run_again, "_MAX_TIMES", times)
        engine, shown = run_training(plain, steps=10)
        raise_if.append(inside.checked_loops(engine))
        assert engine.report().facts.loss_checked
        assert not shown
    assert 0 < raise_if[0] < raise_if[1]


def test_a_step_is_checked_for_a_second_however_short_it_is():
    def many_calls(o, y, *_):
        for _ in range(500):
            o = o * 1.0001
        return F.cross_entropy(o, y)

    engine, shown = run_training(many_calls, steps=1)
    assert inside.checked_loops(engine) == 1
    assert not shown
    with pytest.raises(BatchDependentLossError), contextlib.suppress(PrivacyWarning):
        run_training(lambda o, y, *_: many_calls(o - o.mean(0), y), steps=1)
