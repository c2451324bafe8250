"""Section 1.2 of the user rules: schedulers, accumulation, odd batches and odd losses inside the training loop."""

import copy
import gc
import itertools
import math
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from loops import (
    BATCH,
    CLASSES,
    FEATURES,
    ROWS,
    assert_same_gradients,
    examples,
    expected_gradients,
    first_batch,
    gradients_of,
    make_loop,
    mlp,
    state_of,
)
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, WeightedRandomSampler

import dpengine
from dpengine import PrivacyEngine
from dpengine.accounting import Charge, epsilon_of, release_event
from dpengine.errors import (
    BatchDependentLossError,
    BatchMismatchError,
    MissingGradientError,
    PrivacyWarning,
    ReductionError,
    RepeatedBackwardError,
    SamplingError,
    StaleGradientError,
    TicketError,
    UnsupportedLayerError,
)
from dpengine.validation.loss import check_loss, per_example

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012", "ignore:.*DPE006")

MODES = ["auto", "hooks", "functorch", "ew", "ghost"]
every_mode = pytest.mark.parametrize("mode", MODES)


def released(loop, batches):
    """The gradients of each logical step over these batches, all of the loop's own."""
    found = []
    for inputs, targets in batches:
        loop.optimizer.zero_grad()
        loop.backward(inputs, targets)
        loop.optimizer.step()
        if not loop.optimizer.step_was_skipped:
            found.append(gradients_of(loop.model))
    return found


# S1


def test_s1_step_was_skipped_says_that_a_step_only_accumulated():
    loop = make_loop(accumulation_steps=3)
    skipped = []
    before = state_of(loop.model)
    for inputs, targets in loop.loader:
        loop.step(inputs, targets)
        skipped.append(loop.optimizer.step_was_skipped)
        same = all(torch.equal(before[name], value) for name, value in state_of(loop.model).items())
        assert same is skipped[-1]
        before = state_of(loop.model)
    assert skipped == [True, True, False] * len(loop.loader)
    assert loop.engine.ledger.steps == len(loop.loader)


def test_s1_a_scheduler_that_was_passed_counts_logical_steps_only():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state = set(scheduler.state_dict())
    loop = make_loop(model, make_optimizer=lambda _: optimizer, accumulation_steps=3, lr_scheduler=scheduler)
    for inputs, targets in loop.loader:
        loop.step(inputs, targets)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 ** len(loop.loader))
    assert set(scheduler.state_dict()) == state
    assert isinstance(scheduler, lr_scheduler.StepLR)
    assert type(pickle.loads(pickle.dumps(scheduler))) is type(copy.deepcopy(scheduler)) is lr_scheduler.StepLR
    loop.engine.detach(model)
    assert type(scheduler) is lr_scheduler.StepLR


def test_s1_a_scheduler_driven_by_a_metric_is_passed_its_metric():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    loop = make_loop(model, make_optimizer=lambda _: optimizer, accumulation_steps=2, lr_scheduler=scheduler)
    for inputs, targets in itertools.islice(loop.loader, 4):
        loop.step(inputs, targets)
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == 0.5  # two logical steps: the first sets the best, the second is no better


# S2


@every_mode
@pytest.mark.parametrize("chunks", [{"accumulation_steps": 3}, {"accumulation_steps": 9}, {"physical_batch_size": 2}])
def test_s2_chunks_add_up_to_one_large_batch(chunks, mode):
    whole, parts = make_loop(grad_sample_mode=mode), make_loop(grad_sample_mode=mode, **chunks)
    drawn = list(parts.loader)
    assert 0 in {len(targets) for _, targets in drawn} or "accumulation_steps" not in chunks or len(drawn) < 36
    parts = make_loop(grad_sample_mode=mode, **chunks)  # the same batches again
    for large, small in zip(released(whole, whole.loader), released(parts, parts.loader), strict=True):
        assert_same_gradients(small, {name: value.double() for name, value in large.items()})


def test_s2_one_step_after_all_chunks_is_the_same():
    whole, parts = make_loop(), make_loop(accumulation_steps=4)
    chunks = iter(parts.loader)
    for inputs, targets in whole.loader:
        whole.step(inputs, targets)
        parts.optimizer.zero_grad()
        for _ in range(4):
            parts.backward(*next(chunks))
        parts.optimizer.step()
        assert_same_gradients(gradients_of(parts.model), {n: g.double() for n, g in gradients_of(whole.model).items()})
    assert parts.engine.ledger.history == whole.engine.ledger.history


def test_s2_the_loop_without_noise_is_the_loop_over_rows():
    loop = make_loop(accumulation_steps=2, max_grad_norm=0.1)
    chunks = iter(loop.loader)
    for _ in range(len(loop.loader)):
        before, batches = copy.deepcopy(loop.model), []
        for _ in range(2):
            batches.append(next(chunks))
            loop.step(*batches[-1])
        assert_same_gradients(gradients_of(loop.model), expected_gradients(before, batches, max_norm=0.1))


def fetching_ahead(loader, count):
    """Batches as a trainer sees them that always holds so many more."""
    held = []
    for batch in loader:
        held.append(batch)
        if len(held) > count:
            yield held.pop(0)
    yield from held


@pytest.mark.parametrize("chunks", [{}, {"accumulation_steps": 3}, {"batch_size": 1}])
@pytest.mark.parametrize("ahead", [1, 3])
def test_s2_trainers_may_fetch_ahead(ahead, chunks):
    plain, loop = make_loop(**chunks), make_loop(**chunks)
    loop.release.ahead = ahead
    expected = released(plain, plain.loader)
    found = released(loop, fetching_ahead(loop.loader, ahead))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)
    assert loop.engine.ledger.history == plain.engine.ledger.history


@pytest.mark.parametrize(("declared", "ahead"), [(1, 1), (3, 1), (3, 0)])
def test_s2_what_was_fetched_ahead_and_left_out_is_charged(declared, ahead):
    loop = make_loop()
    loop.release.ahead = declared
    batches = fetching_ahead(loop.loader, ahead)
    sizes = set()
    for inputs, targets in itertools.islice(batches, 1, None):  # the first is left out
        sizes.add(len(targets))
        expected = expected_gradients(loop.model, [(inputs, targets)])
        loop.step(inputs, targets)
        assert_same_gradients(gradients_of(loop.model), expected)
    assert len(sizes) > 1
    kinds = [charge.kind for charge in loop.engine.ledger.history for _ in range(charge.count)]
    assert sorted(kinds) == ["release"] * (len(loop.loader) - 1) + ["void"]


def test_s2_empty_batches_fetched_ahead_need_no_backward():
    plain, loop = make_loop(batch_size=1, noise_multiplier=1.0), make_loop(batch_size=1, noise_multiplier=1.0)
    loop.release.ahead = 2
    sizes = []
    for one, batches in ((plain, plain.loader), (loop, fetching_ahead(loop.loader, 2))):
        for inputs, targets in batches:
            one.optimizer.zero_grad()
            if len(targets):
                one.backward(inputs, targets)
            one.optimizer.step()
            sizes.append(len(targets))
    assert 0 in sizes
    assert all(torch.equal(state_of(plain.model)[name], value) for name, value in state_of(loop.model).items())
    assert loop.engine.ledger.history == plain.engine.ledger.history


def test_s2_detaching_charges_what_was_fetched_and_not_used():
    loop = make_loop(noise_multiplier=1.0, accumulation_steps=2)
    loop.release.ahead = 3
    chunks = iter(loop.loader)
    for _ in range(4):
        next(chunks)
    loop.engine.detach(loop.model)
    assert [(charge.kind, charge.count) for charge in loop.engine.ledger.history] == [("void", 2)]


# S3


@pytest.mark.parametrize("count", [2, 4])
def test_s3_undeclared_accumulation_costs_each_batch_at_its_share_of_the_noise(count):
    loop = make_loop(noise_multiplier=2.0)
    batches = list(itertools.islice(loop.loader, 0))
    chunks = iter(loop.loader)
    with pytest.warns(PrivacyWarning, match=f"DPE006.*accumulation_steps={count}") as seen:
        for _ in range(4 // count):
            loop.optimizer.zero_grad()
            for _ in range(count):
                batches.append(next(chunks))
                loop.backward(*batches[-1])
            loop.optimizer.step()
    assert len([w for w in seen if "DPE006" in str(w.message)]) == 1  # once for each process
    booked = math.nextafter(BATCH / ROWS, 1)  # the rate, and what the draw may lie above it
    event = release_event(noise_multiplier=2.0 / math.sqrt(count), sample_rate=booked)
    assert loop.engine.ledger.history == (Charge(event, 4),)
    apart = epsilon_of((Charge(release_event(noise_multiplier=2.0, sample_rate=BATCH / ROWS), 4),), 1e-3)
    assert loop.engine.get_epsilon(1e-3) > apart


def test_s3_undeclared_accumulation_is_the_mean_over_all_rows():
    loop = make_loop(max_grad_norm=0.3)
    batches = list(itertools.islice(make_loop().loader, 2))
    expected = expected_gradients(loop.model, batches, max_norm=0.3, divisor=2 * BATCH)
    loop.optimizer.zero_grad()
    for inputs, targets in itertools.islice(loop.loader, 2):
        loop.backward(inputs, targets)
    loop.optimizer.step()
    assert_same_gradients(gradients_of(loop.model), expected)


def test_s3_zero_grad_between_batches_discards_as_it_does_without_an_engine():
    loop = make_loop(noise_multiplier=1.0)
    quiet = make_loop()
    chunks, same = iter(loop.loader), iter(quiet.loader)
    loop.backward(*next(chunks))
    next(same)
    batch = next(chunks)
    expected = expected_gradients(quiet.model, [next(same)])
    for one in (loop, quiet):
        one.optimizer.zero_grad()
        one.backward(*batch)
        one.optimizer.step()
    assert_same_gradients(gradients_of(quiet.model), expected)
    assert [charge.kind for charge in loop.engine.ledger.history] == ["void", "release"]


def test_s3_zero_grad_before_the_step_leaves_nothing_to_release():
    loop = make_loop(noise_multiplier=1.0)
    loop.backward(*first_batch(loop.loader))
    loop.optimizer.zero_grad()
    assert not loop.release.sums.buffer.flats.popitem()[1].any()
    with pytest.raises(TicketError, match="given up"):
        loop.optimizer.step()
    assert [(charge.kind, charge.count) for charge in loop.engine.ledger.history] == [("void", 1)]


# S4 and S5


def two_forward_passes(loop, inputs, targets):
    loop.backward(inputs, targets)
    loop.backward(inputs, targets)


def one_forward_pass(loop, inputs, targets):
    outputs = loop.model(inputs)
    F.cross_entropy(outputs, targets).backward(retain_graph=True)
    outputs.square().mean().backward()


@every_mode
@pytest.mark.parametrize("twice", [two_forward_passes, one_forward_pass])
def test_s4_a_second_backward_over_the_same_rows_is_refused(twice, mode):
    loop = make_loop(grad_sample_mode=mode, noise_multiplier=1.0)
    chunks = iter(loop.loader)
    with pytest.raises(RepeatedBackwardError, match=r"DPE017.*\(.*a \+ .*b\)\.backward\(\)"):
        twice(loop, *next(chunks))
    with pytest.raises(TicketError, match="given up"):
        loop.optimizer.step()
    loop.step(*next(chunks))  # and the next batch is as good as ever
    assert [charge.kind for charge in loop.engine.ledger.history] == ["void", "release"]


@every_mode
def test_s4_an_old_graph_cannot_serve_another_batch(mode):
    loop = make_loop(grad_sample_mode=mode, sampling="shuffle")  # for batches of one size
    chunks = iter(loop.loader)
    inputs, targets = next(chunks)
    loss = F.cross_entropy(loop.model(inputs), targets)
    loss.backward(retain_graph=True)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    assert len(next(chunks)[1]) == len(targets)
    with pytest.raises((RepeatedBackwardError, MissingGradientError), match=r"DPE017|DPE002"):
        loss.backward()
        loop.optimizer.step()  # ExpandedWeights does not see it, and has nothing to give


@every_mode
def test_s4_the_sum_of_two_losses_is_one_backward(mode):
    loop = make_loop(grad_sample_mode=mode)
    inputs, targets = first_batch(loop.loader)
    both = lambda outputs, t: F.cross_entropy(outputs, t) + outputs.square().sum(1).mean()  # noqa: E731
    expected = expected_gradients(loop.model, [(inputs, targets)], loss_fn=both)
    outputs = loop.model(inputs)
    (F.cross_entropy(outputs, targets) + outputs.square().sum(1).mean()).backward()
    loop.optimizer.step()
    assert_same_gradients(gradients_of(loop.model), expected)


def test_s5_a_forgotten_zero_grad_and_accumulation_are_told_apart():
    loop = make_loop(noise_multiplier=1.0)
    chunks = iter(loop.loader)
    loop.backward(*next(chunks))
    loop.optimizer.step()
    with pytest.raises(StaleGradientError, match=r"DPE005.*zero_grad\(\) was not called.*top of the loop"):
        loop.backward(*next(chunks))
    loop.optimizer.zero_grad()
    loop.backward(*next(chunks))
    loop.backward(*next(chunks))
    with pytest.warns(PrivacyWarning, match="DPE006"):
        loop.optimizer.step()


def test_s5_zero_grad_of_the_model_will_do():
    loop = make_loop()
    for inputs, targets in loop.loader:
        loop.model.zero_grad()
        loop.backward(inputs, targets)
        loop.optimizer.step()
    assert loop.engine.ledger.steps == len(loop.loader)


def test_s5_zero_grad_after_the_step_will_do():
    loop = make_loop()
    for inputs, targets in loop.loader:
        loop.backward(inputs, targets)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    assert loop.engine.ledger.steps == len(loop.loader)


def test_s5_a_forgotten_zero_grad_is_seen_on_an_empty_batch_too():
    loop = make_loop(batch_size=1)
    stepped = False
    with pytest.raises(StaleGradientError):
        for inputs, targets in loop.loader:
            if stepped and len(targets) == 0:
                loop.optimizer.step()
            elif not stepped:
                loop.step(inputs, targets)
                stepped = True


# S6


class OfDicts(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"x": {"values": torch.randn(FEATURES, generator=generator)}, "y": index % CLASSES}


def test_s6_an_empty_batch_of_tuples_has_the_shapes_and_costs_a_step():
    loop = make_loop(batch_size=1, noise_multiplier=1.0)
    empty = 0
    for inputs, targets in loop.loader:
        before = state_of(loop.model)
        loop.optimizer.zero_grad()
        loss = loop.backward(inputs, targets)
        loop.optimizer.step()
        changed = [not torch.equal(before[name], value) for name, value in state_of(loop.model).items()]
        assert all(changed)  # noise is added, rows or none
        assert all(value.isfinite().all() for value in state_of(loop.model).values())
        if len(targets) == 0:
            empty += 1
            assert inputs.shape == (0, FEATURES)
            assert targets.dtype is torch.int64
            assert loss.isnan()
    assert empty > 0
    assert loop.engine.ledger.steps == len(loop.loader) == ROWS
    assert {charge.kind for charge in loop.engine.ledger.history} == {"release"}


@pytest.mark.parametrize("leave_out", [True, False], ids=["without backward", "with backward"])
def test_s6_an_empty_batch_of_dicts_goes_through_the_loop(leave_out):
    loop = make_loop(batch_size=1, dataset=OfDicts(), seed=1)
    sizes = []
    for batch in loop.loader:
        sizes.append(len(batch["y"]))
        assert batch["x"]["values"].shape == (sizes[-1], FEATURES)
        loop.optimizer.zero_grad()
        if sizes[-1] or not leave_out:
            loop.backward(batch["x"]["values"], batch["y"])
        loop.optimizer.step()
        if sizes[-1] == 0:
            assert all(not p.grad.any() for p in loop.model.parameters())
    assert 0 in sizes
    assert loop.engine.ledger.steps == 8


class FirstStep(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, inputs):
        out = (
            self.layer(inputs, inputs, inputs) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(inputs)
        )
        return (out[0] if isinstance(out, tuple) else out)[:, 0]


EMPTY_MODELS = {
    "conv-groupnorm": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3)),
        (1, 6, 6),
    ),
    "linear-layernorm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)), (4,)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 3)), (3,)),
    "attention": (
        lambda: nn.Sequential(FirstStep(nn.MultiheadAttention(4, 2, batch_first=True)), nn.Linear(4, 3)),
        (2, 4),
    ),
    "lstm": (lambda: nn.Sequential(FirstStep(nn.LSTM(4, 5, batch_first=True)), nn.Linear(5, 3)), (2, 4)),
}


@every_mode
@pytest.mark.parametrize(("make_model", "shape"), EMPTY_MODELS.values(), ids=EMPTY_MODELS)
def test_s6_layers_take_batches_without_rows(make_model, shape, mode):
    torch.manual_seed(0)
    inputs = torch.randint(0, 5, (6, *shape)) if shape == (3,) else torch.randn(6, *shape)
    dataset = torch.utils.data.TensorDataset(inputs, torch.randint(0, CLASSES, (6,)))
    loop = make_loop(make_model(), dataset=dataset, batch_size=1, grad_sample_mode=mode, max_grad_norm=0.5, seed=4)
    sizes = set()
    for batch, targets in loop.loader:
        expected = expected_gradients(loop.model, [(batch, targets)], max_norm=0.5, divisor=1)
        loop.step(batch, targets)
        assert_same_gradients(gradients_of(loop.model), expected, rtol=1e-5 if len(targets) else 0)
        sizes.add(len(targets))
    assert sizes > {0}


# S7


@every_mode
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e38])
def test_s7_rows_that_are_not_finite_count_for_nothing(bad, mode):
    dataset = examples()
    dataset.tensors[0][::3] = bad
    loop = make_loop(dataset=dataset, grad_sample_mode=mode)
    dropped = 0
    for inputs, targets in loop.loader:
        good = (inputs.abs() < 1e30).all(dim=1)
        expected = expected_gradients(loop.model, [(inputs[good], targets[good])])
        loop.step(inputs, targets)
        dropped += int((~good).sum())
        found = gradients_of(loop.model)
        if bad == 1e38:  # finite: saturated units may leave a finite gradient, which is clipped
            assert all(gradient.isfinite().all() for gradient in found.values())
        else:
            assert_same_gradients(found, expected)
    assert all(value.isfinite().all() for value in state_of(loop.model).values())
    if bad != 1e38:
        assert loop.release.dropped_rows == dropped > 0
        assert loop.engine.metrics(nonprivate=True)["nonprivate/dropped_rows"] == dropped


# S8


def evaluate(loop, inputs, targets):
    loop.model.eval()
    loop.model(inputs)
    loop.model.train()


def without_grad(loop, inputs, targets):
    with torch.no_grad():
        loop.model(inputs)


def look_at_training_loss(loop, inputs, targets):
    F.cross_entropy(loop.model(inputs), targets)


def gradient_in_eval_mode(loop, inputs, targets):
    loop.model.eval()
    loop.backward(inputs, targets)
    loop.model.train()
    loop.model.zero_grad()


def fail_in_forward(loop, inputs, targets):
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        loop.model(inputs[:, :2])


def fail_in_backward(loop, inputs, targets):
    outputs = loop.model(inputs)
    outputs.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        F.cross_entropy(outputs, targets).backward()


def fail_inside_backward(loop, inputs, targets):
    """After some layers have reported already."""
    handle = loop.model[1].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        F.cross_entropy(loop.model(inputs), targets).backward()
    handle.remove()


INTERLUDES = [
    evaluate,
    without_grad,
    look_at_training_loss,
    gradient_in_eval_mode,
    fail_in_forward,
    fail_in_backward,
    fail_inside_backward,
]


@every_mode
@pytest.mark.parametrize("interlude", INTERLUDES, ids=lambda f: f.__name__)
def test_s8_what_is_no_training_leaves_no_trace(interlude, mode):
    loop = make_loop(grad_sample_mode=mode)
    other = examples(7, scale=3.0).tensors
    for inputs, targets in loop.loader:
        expected = expected_gradients(loop.model, [(inputs, targets)])
        loop.optimizer.zero_grad()
        interlude(loop, *other)
        loop.backward(inputs, targets)
        loop.optimizer.step()
        assert_same_gradients(gradients_of(loop.model), expected)
        interlude(loop, *other)
    assert [(charge.kind, charge.count) for charge in loop.engine.ledger.history] == [("release", len(loop.loader))]


@every_mode
@pytest.mark.parametrize("interlude", [look_at_training_loss, gradient_in_eval_mode, fail_in_forward, evaluate])
def test_s8_nor_between_backward_and_step(interlude, mode):
    loop = make_loop(grad_sample_mode=mode)
    inputs, targets = first_batch(loop.loader)
    expected = expected_gradients(loop.model, [(inputs, targets)])
    loop.backward(inputs, targets)
    interlude(loop, *examples(7, scale=3.0).tensors)
    loop.optimizer.step()
    assert_same_gradients(gradients_of(loop.model), expected)


@every_mode
def test_s8_an_interrupt_inside_a_layer_leaves_no_trace(mode):
    def interrupt(*_):
        raise KeyboardInterrupt

    loop = make_loop(grad_sample_mode=mode)
    inputs, targets = first_batch(loop.loader)
    expected = expected_gradients(loop.model, [(inputs, targets)])
    loop.model[0].forward = interrupt  # inside the layer, where torch runs no hook any more
    with pytest.raises(KeyboardInterrupt):
        loop.model(inputs)
    del loop.model[0].forward
    loop.backward(inputs, targets)
    loop.optimizer.step()
    assert_same_gradients(gradients_of(loop.model), expected)
    assert all(isinstance(p, nn.Parameter) for p in loop.model.parameters())


@every_mode
def test_s8_two_forward_passes_may_share_a_backward(mode):
    loop = make_loop(grad_sample_mode=mode)
    inputs, targets = first_batch(loop.loader)
    twice = lambda outputs, t: F.cross_entropy(outputs[0], t) + F.cross_entropy(outputs[1], t)  # noqa: E731

    class Twice(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, values):
            return self.inner(values), self.inner(2 * values)

    plain = Twice(copy.deepcopy(loop.model))
    expected = expected_gradients(plain, [(inputs, targets)], loss_fn=twice)
    twice((loop.model(inputs), loop.model(2 * inputs)), targets).backward()
    loop.optimizer.step()
    assert_same_gradients(gradients_of(loop.model), {n.removeprefix("inner."): g for n, g in expected.items()})


@every_mode
def test_s8_two_older_forward_passes_never_escape_the_threshold(mode):
    loop = make_loop(grad_sample_mode=mode, max_grad_norm=0.01)
    inputs, targets = first_batch(loop.loader)
    older, oldest = loop.model(inputs), loop.model(2 * inputs)
    fail_inside_backward(loop, inputs, targets)
    try:
        (F.cross_entropy(older, targets) + F.cross_entropy(oldest, targets)).backward()
        loop.optimizer.step()
    except (TicketError, UnsupportedLayerError, MissingGradientError):
        return  # refused is fine
    released = torch.cat([gradient.flatten() for gradient in gradients_of(loop.model).values()])
    assert released.norm() <= 0.01 * len(targets) / BATCH


@every_mode
def test_s8_a_pass_that_failed_at_its_end_does_not_join_an_older_forward(mode):
    loop = make_loop(grad_sample_mode=mode, max_grad_norm=100.0)  # a doubled gradient would be clipped back
    inputs, targets = first_batch(loop.loader)
    expected = expected_gradients(loop.model, [(inputs, targets)], max_norm=100.0)
    older = loop.model(inputs)
    watched = inputs.clone().requires_grad_()
    watched.register_hook(lambda grad: 1 / 0)  # runs after all layers have reported
    with pytest.raises(ZeroDivisionError):
        loop.backward(watched, targets)
    F.cross_entropy(older, targets).backward()
    loop.optimizer.step()
    assert_same_gradients(gradients_of(loop.model), expected)


@pytest.mark.parametrize("fail", [fail_in_backward, fail_inside_backward])
def test_s8_a_batch_that_failed_leaves_nothing_in_the_next(fail):
    loop = make_loop(accumulation_steps=2)
    chunks = iter(loop.loader)
    loop.backward(*next(chunks))
    fail(loop, *next(chunks))
    with pytest.raises(TicketError):
        loop.optimizer.step()
    first = next(chunks)
    assert loop.release.sums.buffer.clean
    assert [(charge.kind, charge.count) for charge in loop.engine.ledger.history] == [("void", 1)]
    last = [batch for _, batch in zip(range(4), make_loop(accumulation_steps=2).loader, strict=False)][2:]
    expected = expected_gradients(loop.model, last)
    loop.step(*first)
    loop.step(*next(chunks))
    assert_same_gradients(gradients_of(loop.model), expected)


def test_s8_a_failure_while_gradients_are_summed_voids_the_batch(monkeypatch):
    loop = make_loop(noise_multiplier=1.0)
    chunks = iter(loop.loader)
    batch = next(chunks)
    fill, calls = loop.release.sums.buffer.fill, []

    def fail_at_the_third(parameter, write):
        calls.append(parameter)
        if len(calls) == 3:
            raise MemoryError
        fill(parameter, write)

    monkeypatch.setattr(loop.release.sums.buffer, "fill", fail_at_the_third)
    with pytest.raises(MemoryError):
        loop.backward(*batch)
    monkeypatch.undo()
    assert not any(flat.any() for flat in loop.release.sums.buffer.flats.values())
    with pytest.raises(TicketError, match="given up"):
        loop.backward(*batch)  # half of it was in the sums once: it must not be tried again
    assert [(charge.kind, charge.count) for charge in loop.engine.ledger.history] == [("void", 1)]


# S9


def test_s9_more_rows_than_were_drawn_are_refused():
    loop = make_loop(noise_multiplier=1.0)
    inputs, targets = first_batch(loop.loader)
    size = len(targets)
    message = rf"DPE018.*Layer '2' saw {2 * size} rows, the sampler drew {size}.*duplicates"
    with pytest.raises(BatchMismatchError, match=message):
        loop.backward(torch.cat([inputs, inputs]), torch.cat([targets, targets]))
    assert [(charge.kind, charge.count) for charge in loop.engine.ledger.history] == [("void", 1)]


def test_s9_fewer_rows_are_refused_too_since_axis_0_may_not_be_the_batch():
    loop = make_loop()
    inputs, targets = first_batch(loop.loader, least=2)
    with pytest.raises(BatchMismatchError, match=r"DPE018.*axis 0"):
        loop.backward(inputs[1:], targets[1:])


# S10


def test_s10_a_second_model_on_one_engine_composes():
    dataset = examples()
    one = make_loop(dataset=dataset, noise_multiplier=1.0)
    two = make_loop(mlp(), engine=one.engine, dataset=dataset, noise_multiplier=2.0, batch_size=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loop in (one, two):
            for batch in loop.loader:
                loop.step(*batch)
    charges = [
        Charge(release_event(noise_multiplier=1.0, sample_rate=6 / ROWS), 4),
        Charge(release_event(noise_multiplier=2.0, sample_rate=3 / ROWS), 8),
    ]
    assert one.engine.get_epsilon(1e-3) == pytest.approx(epsilon_of(charges, 1e-3))
    assert one.engine.get_epsilon(1e-3) > max(epsilon_of([charge], 1e-3) for charge in charges)


def test_s10_two_engines_on_one_data_set_warn():
    dataset = examples()
    first = make_loop(dataset=dataset, noise_multiplier=1.0)
    with pytest.warns(PrivacyWarning, match=r"DPE012.*Another engine.*Use one engine"):
        make_loop(dataset=dataset, noise_multiplier=1.0)
    assert first.engine is not None  # alive until here


@pytest.mark.parametrize("as_list", [True, False])
def test_s10_other_data_or_an_engine_that_is_gone_do_not_warn(as_list):
    def data():
        return list(examples()) if as_list else examples()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = [make_loop(dataset=data(), noise_multiplier=1.0).engine for _ in range(3)]
        dataset = data()
        loop = make_loop(dataset=dataset, noise_multiplier=1.0)
        del loop
        gc.collect()
        make_loop(dataset=dataset, noise_multiplier=1.0)
    assert len(kept) == 3


# S11 and S12


def token_mean(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-1)


def token_batch():
    torch.manual_seed(5)
    inputs, targets = torch.randn(5, 7, FEATURES), torch.randint(0, CLASSES, (5, 7))
    targets[0, 2:] = -1  # row 0 is short, so a mean over tokens weighs it by its neighbours
    return inputs, targets


def test_s11_a_summed_loss_is_found_where_a_mean_was_declared():
    batch = examples().tensors
    summed = lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="sum")  # noqa: E731
    with pytest.raises(ReductionError, match=r'DPE013.*looks like a sum, expected a mean.*loss_reduction="sum"'):
        check_loss(mlp(), summed, batch)
    check_loss(mlp(), summed, batch, loss_reduction="sum")
    with pytest.raises(ReductionError, match=r'looks like a mean, expected a sum.*loss_reduction="mean"'):
        check_loss(mlp(), F.cross_entropy, batch, loss_reduction="sum")
    check_loss(mlp(), F.cross_entropy, batch)


@every_mode
def test_s11_a_declared_sum_gives_the_same_sums(mode):
    loop = make_loop(loss_reduction="sum", grad_sample_mode=mode)
    inputs, targets = first_batch(loop.loader)
    expected = expected_gradients(loop.model, [(inputs, targets)], divisor=1)
    F.cross_entropy(loop.model(inputs), targets, reduction="sum").backward()
    loop.optimizer.step()
    assert_same_gradients(gradients_of(loop.model), expected)


def test_s12_a_loss_that_mixes_rows_is_found_and_its_remedy_works():
    with pytest.raises(BatchDependentLossError, match=r"DPE010.*row 0 changes with its batch.*per_example\(loss_fn\)"):
        check_loss(mlp(), token_mean, token_batch())
    check_loss(mlp(), per_example(token_mean), token_batch())


def per_row_tokens(outputs, targets):
    """The loss of each row, ``(B,)``."""
    each = F.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=-1, reduction="none")
    return each.sum(1) / (targets != -1).sum(1)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@every_mode
def test_s12_backward_of_the_engine_keeps_rows_apart(reduction, mode):
    dataset = torch.utils.data.TensorDataset(*token_batch())
    loop = make_loop(dataset=dataset, batch_size=3, loss_reduction=reduction, grad_sample_mode=mode, max_grad_norm=0.8)
    inputs, targets = first_batch(loop.loader, least=2)
    expected = expected_gradients(
        loop.model, [(inputs, targets)], max_norm=0.8, divisor=3 if reduction == "mean" else 1, loss_fn=token_mean
    )
    loop.engine.backward(per_row_tokens(loop.model(inputs), targets))
    loop.optimizer.step()
    assert_same_gradients(gradients_of(loop.model), expected)


def test_s12_backward_of_the_engine_takes_batches_without_rows():
    loop = make_loop(batch_size=1)
    sizes = set()
    for inputs, targets in loop.loader:
        sizes.add(len(targets))
        loop.optimizer.zero_grad()
        loop.engine.backward(F.cross_entropy(loop.model(inputs), targets, reduction="none"))
        loop.optimizer.step()
    assert 0 in sizes
    assert all(value.isfinite().all() for value in state_of(loop.model).values())


@pytest.mark.parametrize("shape", [(), (5, 7)])
def test_s12_fb16_backward_of_the_engine_wants_one_loss_for_each_row(shape):
    loop = make_loop()
    next(iter(loop.loader))
    with pytest.raises(BatchDependentLossError, match=r'DPE010.*one number for each row.*reduction="none"'):
        loop.engine.backward(torch.zeros(shape, requires_grad=True))
    with pytest.raises(BatchMismatchError, match=r"DPE018.*loss_per_example has 99 numbers"):
        loop.engine.backward(torch.zeros(99, requires_grad=True))


def test_s12_backward_of_the_engine_scales_with_the_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loop = make_loop(grad_scaler=scaler)
    inputs, targets = first_batch(loop.loader)
    expected = expected_gradients(loop.model, [(inputs, targets)])
    loop.engine.backward(F.cross_entropy(loop.model(inputs), targets, reduction="none"))
    scaler.step(loop.optimizer)
    assert_same_gradients(gradients_of(loop.model), expected)


# U2


class Stream(IterableDataset):
    def __iter__(self):
        return iter(examples())


REFUSED_LOADERS = {
    "WeightedRandomSampler": lambda: DataLoader(examples(), 6, sampler=WeightedRandomSampler([1.0] * ROWS, ROWS)),
    "SubsetRandomSampler": lambda: DataLoader(examples(), 6, sampler=SubsetRandomSampler(range(8))),
    "Stream": lambda: DataLoader(Stream(), 6),
    "batch_size=None": lambda: DataLoader(examples(), batch_size=None),
    "not a torch DataLoader": lambda: [examples().tensors],
}


@pytest.mark.parametrize("name", REFUSED_LOADERS)
def test_u2_loaders_with_unequal_or_unknown_chances_are_refused(name):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SamplingError, match=f"DPE004.*{name}") as seen:
        PrivacyEngine().make_private(model, optimizer, REFUSED_LOADERS[name](), noise_multiplier=1.0)
    assert seen.value.fix in str(seen.value) and seen.value.fix
    if name == "WeightedRandomSampler":
        assert "Weight the loss instead" in str(seen.value)
    assert type(optimizer) is torch.optim.SGD


def test_the_public_names_used_here_exist():
    assert dpengine.check_loss is check_loss
