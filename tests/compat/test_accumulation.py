"""Several batches of the loader before one step: accumulated, or in skipped steps; an error under Poisson sampling."""

import pytest
import torch
from opacus_runs import assert_same, flat, gradients, loss, private, steps_in_history, truth

from dpengine.errors import RepeatedBackwardError, StaleGradientError


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_per_sample_gradients_of_all_batches_are_kept_until_the_step(mode):
    parts = private(count=8, grad_sample_mode=mode)
    seen = []
    for inputs, targets in parts.loader:
        loss(parts.model, inputs, targets).backward()
        seen.append((inputs, targets))
        assert parts.optimizer.accumulated_iterations == len(seen)
    rows = [torch.cat(part) for part in zip(*seen, strict=True)]
    shown = parts.optimizer.grad_samples
    assert [one.shape for one in shown] == [(8, *p.shape) for p in parts.model.parameters()]
    expected = truth(parts.model._module, *rows, max_norm=1e9)
    for one, name in zip(shown, expected, strict=True):
        torch.testing.assert_close(one.sum(0).double(), expected[name], rtol=1e-4, atol=1e-5)
    clipped = truth(parts.model._module, *rows)
    parts.optimizer.step()
    assert_same(gradients(parts.model._module, 8), clipped)


def backward(parts, batch):
    loss(parts.model, *batch).backward()


def poisson():
    return private(count=40, batch_size=20, poisson_sampling=True, noise_multiplier=1.0)


def test_under_poisson_sampling_a_second_batch_before_the_step_is_rejected():
    parts = poisson()
    before = flat(dict(parts.model.named_parameters())).clone()
    batches = iter(parts.loader)
    backward(parts, next(batches))
    with pytest.raises(
        RepeatedBackwardError, match=r"parameter '[02]\.(weight|bias)' before optimizer\.step"
    ) as raised:
        backward(parts, next(batches))
    assert isinstance(raised.value, ValueError)
    assert torch.equal(flat(dict(parts.model.named_parameters())), before)
    parts.optimizer.zero_grad()


@pytest.mark.parametrize("clears", ["optimizer", "model", "by hand"])
def test_a_batch_whose_gradients_were_cleared_does_not_block_the_next(clears):
    parts = poisson()
    batches = iter(parts.loader)
    backward(parts, next(batches))
    second = next(batches)
    if clears == "optimizer":
        parts.optimizer.zero_grad()
    elif clears == "model":
        parts.model.zero_grad()
    else:
        for p in parts.model.parameters():
            p.grad_sample = None
    backward(parts, second)
    parts.optimizer.step()
    assert steps_in_history(parts) == 2  # the discarded batch counts as well


def test_gradients_not_cleared_after_a_step_are_named_in_the_error():
    parts = poisson()
    with pytest.raises(StaleGradientError, match="not cleared"):
        for batch in parts.loader:
            backward(parts, batch)
            parts.optimizer.step()


SIZE = 4


def run(parts, skips, *, clears=True):
    """Returns the gradients of each step, and the expected ones before the division."""
    waiting, found = [], []
    for skip, batch in zip(skips, parts.loader, strict=True):
        waiting.append(batch)
        if skip is not None:
            parts.optimizer.signal_skip_step(do_skip=skip)
        loss(parts.model, *batch).backward()
        if skip is None:
            continue
        expected = truth(parts.model._module, *map(torch.cat, zip(*waiting, strict=True)))
        parts.optimizer.step()
        if not skip:
            found.append((gradients(parts.model._module), expected))
            waiting = []
        if clears:
            parts.optimizer.zero_grad()
    return found


def scaled(grads, factor):
    return {name: grad * factor for name, grad in grads.items()}


STEPS = {  # whether each step is skipped, None for no step; and the divisor in units of a batch
    "two batches of a step": ([True, False, True, False], 1),
    "a step without skips before it": ([True, False, False, True, False], 1),
    "accumulated passes": ([None, False, None, False], 2),
    "accumulated passes after a skipped step": ([True, None, False], 2),
}
CASES = [("two batches of a step", "functorch"), ("two batches of a step", "ew"), *((name, "hooks") for name in STEPS)]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_skipped_steps_are_divided_as_one_batch_and_accumulated_passes_by_their_number(name, mode):
    skips, factor = STEPS[name]
    parts = private(count=SIZE * len(skips), grad_sample_mode=mode)
    found = run(parts, skips)
    assert len(found) == skips.count(False)
    for grads, expected in found:
        assert_same(scaled(grads, factor * SIZE), expected)
    assert steps_in_history(parts) == len(skips)  # each batch is charged
