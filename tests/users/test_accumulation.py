"""Schedulers, and steps over several batches or over the chunks of one batch."""

import copy
import functools
import itertools
import math
import pickle

import inside
import pytest
import torch
from loops import (
    BATCH,
    ROWS,
    assert_same_gradients,
    every_mode,
    exact_gradients,
    expected_gradients,
    first_batch,
    gradients_of,
    make_loop,
    mlp,
    same_state,
    state_of,
)
from torch.nn import functional as F
from torch.optim import lr_scheduler

from dpengine import PrivacyEngine
from dpengine.accounting import Charge, epsilon_of, release_event
from dpengine.engine import fetch_ahead
from dpengine.errors import BatchMismatchError, BatchStateError, InvalidBudgetError, PrivacyError, PrivacyWarning

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012", "ignore:.*DPE006")


def applied_gradients(loop, batches=None):
    """Returns the gradient of each logical step over all batches of the loop."""
    found = []
    for inputs, targets in loop.loader if batches is None else batches:
        loop.step(inputs, targets)
        if not loop.optimizer.step_was_skipped:
            found.append(gradients_of(loop.model))
    return found


def assert_same_steps(loop, batches, expected):
    """Checks that both loops apply equal gradients and have equal privacy cost."""
    truth, found = applied_gradients(expected), applied_gradients(loop, batches)
    assert len(found) == len(truth) > 1
    assert all(same_state(one, other) for one, other in zip(found, truth, strict=True))
    assert loop.engine.ledger.history == expected.engine.ledger.history


# Schedulers


def test_step_was_skipped_is_true_for_a_step_that_only_accumulated():
    loop = make_loop(accumulation_steps=3)
    skipped = []
    for inputs, targets in loop.loader:
        before = state_of(loop.model)
        loop.step(inputs, targets)
        skipped.append(loop.optimizer.step_was_skipped)
        assert same_state(before, state_of(loop.model)) is skipped[-1]
    assert skipped == [True, True, False] * len(loop.loader)
    assert loop.engine.ledger.steps == len(loop.loader)


def loop_with_scheduler(make, **options):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = make(optimizer)
    return make_loop(model, make_optimizer=lambda _: optimizer, lr_scheduler=scheduler, **options), scheduler


def test_a_scheduler_that_was_passed_counts_logical_steps_only():
    loop, scheduler = loop_with_scheduler(lambda o: lr_scheduler.StepLR(o, 1, gamma=0.5), accumulation_steps=3)
    state = set(lr_scheduler.StepLR(torch.optim.SGD(mlp().parameters()), 1).state_dict())
    for inputs, targets in loop.loader:
        loop.step(inputs, targets)
        scheduler.step()
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.5 ** len(loop.loader))
    assert set(scheduler.state_dict()) == state
    assert isinstance(scheduler, lr_scheduler.StepLR)
    assert type(pickle.loads(pickle.dumps(scheduler))) is type(copy.deepcopy(scheduler)) is lr_scheduler.StepLR
    loop.engine.detach(loop.model)
    assert type(scheduler) is lr_scheduler.StepLR


def test_a_scheduler_driven_by_a_metric_is_passed_its_metric():
    plateau = functools.partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0)
    loop, scheduler = loop_with_scheduler(plateau, accumulation_steps=2)
    for inputs, targets in itertools.islice(loop.loader, 4):
        loop.step(inputs, targets)
        scheduler.step(1.0)
    # Of two logical steps, the first sets the best value, and the second is no better.
    assert loop.optimizer.param_groups[0]["lr"] == 0.5


# Physical batches and batches fetched ahead


@pytest.mark.one_in(6, "mode", "chunks", others="slow")
@pytest.mark.one_in(3, "mode", "chunks")
@every_mode
@pytest.mark.parametrize("chunks", [{"accumulation_steps": 3}, {"accumulation_steps": 9}, {"physical_batch_size": 2}])
@pytest.mark.hazard("S9")
def test_chunks_add_up_to_one_large_batch(chunks, mode):
    unchunked, chunked = make_loop(grad_sample_mode=mode), make_loop(grad_sample_mode=mode, **chunks)
    drawn = [len(targets) for _, targets in inside.without_placeholders(chunked.loader)]
    assert 0 in drawn or "accumulation_steps" not in chunks or len(drawn) < 36
    chunked = make_loop(grad_sample_mode=mode, **chunks)  # the same batches again
    for large, small in zip(applied_gradients(unchunked), applied_gradients(chunked), strict=True):
        assert_same_gradients(small, {name: value.double() for name, value in large.items()})


def test_one_step_after_all_chunks_equals_a_step_of_the_whole_batch():
    unchunked, chunked = make_loop(), make_loop(accumulation_steps=4)
    chunks = iter(chunked.loader)
    for inputs, targets in unchunked.loader:
        unchunked.step(inputs, targets)
        chunked.optimizer.zero_grad()
        for _ in range(4):
            chunked.backward(*next(chunks))
        chunked.optimizer.step()
        assert_same_gradients(
            gradients_of(chunked.model), {n: g.double() for n, g in gradients_of(unchunked.model).items()}
        )
    assert chunked.engine.ledger.history == unchunked.engine.ledger.history


def test_merged_batches_without_noise_equal_a_loop_over_samples():
    loop = make_loop(accumulation_steps=2, max_grad_norm=0.1)
    chunks = iter(loop.loader)
    for _ in range(len(loop.loader)):
        before, batches = copy.deepcopy(loop.model), []
        for _ in range(2):
            batches.append(next(chunks))
            loop.step(*batches[-1])
        assert_same_gradients(gradients_of(loop.model), expected_gradients(before, batches, max_norm=0.1))


def fetching_ahead(loader, count):
    """Yields batches like a trainer that always fetches some batches ahead."""
    held = []
    for batch in loader:
        held.append(batch)
        if len(held) > count:
            yield held.pop(0)
    yield from held


@pytest.mark.one_in(2, "chunks", "ahead")
@pytest.mark.parametrize("chunks", [{}, {"accumulation_steps": 3}, {"batch_size": 1}])
@pytest.mark.parametrize("ahead", [1, 3])
def test_trainers_may_fetch_ahead(ahead, chunks):
    loop = make_loop(**chunks)
    fetch_ahead(loop.engine, ahead)
    assert_same_steps(loop, fetching_ahead(loop.loader, ahead), make_loop(**chunks))


@pytest.mark.parametrize(("declared", "ahead"), [(1, 1), (3, 1), (3, 0)])
def test_a_batch_that_was_fetched_ahead_and_left_out_is_charged(declared, ahead):
    loop = make_loop()
    fetch_ahead(loop.engine, declared)
    batches = fetching_ahead(loop.loader, ahead)
    sizes = set()
    for batch in itertools.islice(batches, 1, None):  # the first is left out
        sizes.add(len(batch[1]))
        with exact_gradients(loop, batch):
            loop.step(*batch)
    assert len(sizes) > 1
    kinds = [charge.kind for charge in loop.engine.ledger.history for _ in range(charge.count)]
    assert sorted(kinds) == ["release"] * (len(loop.loader) - 1) + ["void"]


def test_empty_batches_fetched_ahead_need_no_backward():
    reference, loop = make_loop(batch_size=1, noise_multiplier=1.0), make_loop(batch_size=1, noise_multiplier=1.0)
    fetch_ahead(loop.engine, 2)
    for one in (reference, loop):
        inside.without_placeholders(one.loader)
    sizes = []
    for one, batches in ((reference, reference.loader), (loop, fetching_ahead(loop.loader, 2))):
        for inputs, targets in batches:
            one.optimizer.zero_grad()
            if len(targets):
                one.backward(inputs, targets)
            one.optimizer.step()
            sizes.append(len(targets))
    assert 0 in sizes
    assert same_state(state_of(reference.model), state_of(loop.model))
    assert loop.engine.ledger.history == reference.engine.ledger.history


@pytest.mark.parametrize("ahead", [1, 2])
def test_chunks_of_physical_batches_may_be_fetched_ahead_across_logical_batches(ahead):
    options = {"physical_batch_size": 2, "noise_multiplier": 1.0}
    loop = make_loop(**options)
    fetch_ahead(loop.engine, ahead)
    assert_same_steps(loop, fetching_ahead(loop.loader, ahead), make_loop(**options))


def test_an_error_between_batches_fetched_ahead_discards_only_its_batch():
    loop = make_loop()
    fetch_ahead(loop.engine, 2)
    batches = fetching_ahead(loop.loader, 2)
    loop.optimizer.zero_grad()
    inputs, _ = next(batches)
    loss = (loop.model(inputs) * loop.model[0].weight.sum()).sum()
    with pytest.raises(PrivacyError, match="DPE002"):
        loss.backward()
    assert inside.state(loop.engine).zero
    assert loop.charges == [("void", 1)]
    for batch in batches:
        with exact_gradients(loop, batch):
            loop.step(*batch)
    assert loop.engine.ledger.steps == ROWS // BATCH


def test_fetching_further_ahead_than_declared_is_an_error():
    loop = make_loop()
    fetch_ahead(loop.engine, 1)
    with pytest.raises((BatchStateError, BatchMismatchError)):
        applied_gradients(loop, fetching_ahead(loop.loader, 3))


def test_fetch_ahead_can_be_switched_off():
    loop = make_loop()
    fetch_ahead(loop.engine, 2)
    fetch_ahead(loop.engine, 0)
    assert_same_steps(loop, loop.loader, make_loop())


@pytest.mark.parametrize(
    ("batches", "error", "words"),
    [
        (-1, ValueError, "fetch_ahead: batches must be at least 0, got -1"),
        (1.5, TypeError, "fetch_ahead: batches must be a whole number, got 1.5"),
        (True, TypeError, "batches must be a whole number, got True"),
    ],
)
def test_fetch_ahead_checks_the_number_of_batches(batches, error, words):
    with pytest.raises(error, match=words):
        fetch_ahead(make_loop().engine, batches)


def test_fetch_ahead_needs_a_private_run():
    with pytest.raises(InvalidBudgetError, match=r"DPE007.*Call make_private first"):
        fetch_ahead(PrivacyEngine(), 2)
    with pytest.raises(TypeError, match="Did you mean 'batches'"):
        fetch_ahead(make_loop().engine, batchs=2)


def test_detaching_charges_batches_that_were_fetched_and_not_used():
    loop = make_loop(noise_multiplier=1.0, accumulation_steps=2)
    fetch_ahead(loop.engine, 3)
    chunks = iter(loop.loader)
    for _ in range(4):
        next(chunks)
    loop.engine.detach(loop.model)
    assert loop.charges == [("void", 2)]


# Undeclared accumulation


@pytest.mark.parametrize("count", [2, 4])
def test_undeclared_accumulation_charges_each_batch_for_its_share_of_the_noise(count):
    loop = make_loop(noise_multiplier=2.0)
    chunks = iter(loop.loader)
    with pytest.warns(PrivacyWarning, match=f"DPE006.*accumulation_steps={count}") as seen:
        for _ in range(4 // count):
            loop.optimizer.zero_grad()
            for _ in range(count):
                loop.backward(*next(chunks))
            loop.optimizer.step()
    assert len([w for w in seen if "DPE006" in str(w.message)]) == 1  # warned once per process
    rate = math.nextafter(BATCH / ROWS, 1)  # plus the tolerance of the random draw
    event = release_event(noise_multiplier=2.0 / math.sqrt(count), sample_rate=rate)
    assert loop.engine.ledger.history == (Charge(event, 4),)
    separate = epsilon_of((Charge(release_event(noise_multiplier=2.0, sample_rate=BATCH / ROWS), 4),), 1e-3)
    assert loop.engine.get_epsilon(1e-3) > separate


def test_undeclared_accumulation_is_the_mean_over_all_samples():
    loop = make_loop(max_grad_norm=0.3)
    batches = itertools.islice(make_loop().loader, 2)
    with exact_gradients(loop, *batches, max_norm=0.3, divisor=2 * BATCH):
        for inputs, targets in itertools.islice(loop.loader, 2):
            loop.backward(inputs, targets)
        loop.optimizer.step()


def test_zero_grad_between_batches_discards_the_earlier_batch():
    loop = make_loop(noise_multiplier=1.0)
    without_noise = make_loop()
    chunks, same = iter(loop.loader), iter(without_noise.loader)
    loop.backward(*next(chunks))
    next(same)
    batch = next(chunks)
    with exact_gradients(without_noise, next(same)):
        without_noise.step(*batch)
    loop.step(*batch)
    assert loop.charges == [("void", 1), ("release", 1)]


def test_zero_grad_before_the_step_leaves_no_gradient_to_apply():
    loop = make_loop(noise_multiplier=1.0)
    loop.backward(*first_batch(loop.loader))
    loop.optimizer.zero_grad()
    assert inside.state(loop.engine).zero
    with pytest.raises(BatchStateError, match="discarded"):
        loop.optimizer.step()
    assert loop.charges == [("void", 1)]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_failed_chunk_of_a_batch_fetched_ahead_does_not_misalign_later_batches(ahead):
    loop = make_loop(physical_batch_size=1, seed=3)
    fetch_ahead(loop.engine, ahead)
    sampled = list(make_loop(seed=3).loader)
    found = []
    for number, (inputs, targets) in enumerate(fetching_ahead(loop.loader, ahead)):
        loop.optimizer.zero_grad()
        before = mlp()
        before.load_state_dict(state_of(loop.model))
        loss = F.cross_entropy(loop.model(inputs), targets)
        if number == 0:
            loss = loss + loop.model[0].weight.sum()  # a parameter used outside its layer: the batch is discarded
        try:
            loss.backward()
            loop.optimizer.step()
        except PrivacyError:
            continue
        if not loop.optimizer.step_was_skipped:
            found.append((before, gradients_of(loop.model)))
    assert len(found) == len(sampled) - 1
    for (before, gradients), batch in zip(found, sampled[1:], strict=True):
        assert_same_gradients(gradients, expected_gradients(before, [batch]))
    assert loop.charges == [("void", 1), ("release", 3)]
