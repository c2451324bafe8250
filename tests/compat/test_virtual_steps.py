"""Batches of skipped steps are parts of the next one: summed and charged, and the divisor stays, as in Opacus."""

import pytest
import torch
from opacus_runs import assert_same, gradients, loss, private, truth

MODES = ["hooks", "functorch", "ew"]
SIZE = 4


def run(parts, skips, *, clears=True):
    """The gradients of each step that was made, and what they should be but for the divisor."""
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


def times(grads, factor):
    return {name: grad * factor for name, grad in grads.items()}


@pytest.mark.parametrize("mode", MODES)
def test_two_batches_of_one_step_are_divided_as_one(mode):
    parts = private(count=16, grad_sample_mode=mode)
    found = run(parts, [True, False, True, False])
    assert len(found) == 2
    for grads, expected in found:
        assert_same(times(grads, SIZE), expected)
    assert sum(steps for *_, steps in parts.engine.accountant.history) == 4  # each batch is charged


def test_a_step_without_skips_before_it_divides_by_its_own_batches_only():
    parts = private(count=20)
    found = run(parts, [True, False, False, True, False])
    for grads, expected in found:
        assert_same(times(grads, SIZE), expected)


def test_passes_that_accumulate_are_divided_by_their_number():
    parts = private(count=16)
    found = run(parts, [None, False, None, False])
    for grads, expected in found:
        assert_same(times(grads, 2 * SIZE), expected)


def test_accumulated_passes_after_a_skipped_step_are_counted_alone():
    parts = private(count=12)
    ((grads, expected),) = run(parts, [True, None, False])
    assert_same(times(grads, 2 * SIZE), expected)
