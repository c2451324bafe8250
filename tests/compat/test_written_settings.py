"""Values written to ``DPOptimizer`` hold from the next step, for clipping, noise and ledger."""

import inside
import pytest
import torch
from opacus_runs import assert_same, backward, batch, by_hand, flat, gradients, loss, private, rows, truth

from dpengine.compat.opacus import GradSampleModule, GradSampleModuleFastGradientClipping
from dpengine.compat.opacus.grad_sample import GradSampleModuleExpandedWeights

WRAPPERS = {
    "hooks": GradSampleModule,
    "functorch": lambda m: GradSampleModule(m, force_functorch=True),
    "ew": GradSampleModuleExpandedWeights,
    "ghost": GradSampleModuleFastGradientClipping,
}


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("moment", ["before the first step", "before forward", "before backward", "before step"])
def test_a_threshold_that_is_written_is_that_of_the_next_step(moment, mode):
    parts = private(grad_sample_mode=mode)
    parts.optimizer.max_grad_norm = 0.5 if moment == "before the first step" else 1.0
    batches = iter(parts.loader)
    if moment != "before the first step":
        loss(parts.model, *next(batches)).backward()
        parts.optimizer.step()
        parts.optimizer.zero_grad()
    inputs, targets = next(batches)

    def write(now):
        if moment == now:
            parts.optimizer.max_grad_norm = 0.5

    write("before forward")
    value = loss(parts.model, inputs, targets)
    write("before backward")
    value.backward()
    write("before step")
    assert parts.optimizer.max_grad_norm == 0.5
    expected = truth(parts.model._module, inputs, targets, 0.5)
    parts.optimizer.step()
    assert_same(gradients(parts.model._module, 4), expected)


@pytest.mark.parametrize("poisson", [True, False])
def test_noise_that_is_written_is_charged_from_the_release_that_has_it(poisson):
    parts = private(noise_multiplier=1.0, poisson_sampling=poisson)
    batches = iter(parts.loader)
    stds = []
    for sigma in (1.0, 4.0, 4.0):
        value = loss(parts.model, *next(batches))
        value.backward()
        parts.optimizer.noise_multiplier = sigma  # between backward and step
        parts.optimizer.max_grad_norm = 2.0
        stds.append(inside.state(parts.optimizer).noise_std)
        parts.optimizer.step()
        parts.optimizer.zero_grad()
    assert stds == [2.0, 8.0, 8.0]
    assert [(sigma, steps) for sigma, _, steps in parts.engine.accountant.history] == [(1.0, 1), (4.0, 2)]


def test_a_change_between_chunks_waits_for_the_next_logical_batch():
    wrapped, optimizer = by_hand(noise_multiplier=1e-9)
    expected = truth(wrapped._module, *[tensor[:6] for tensor in rows().tensors])
    optimizer.signal_skip_step()
    backward(wrapped, 4)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.max_grad_norm = 0.25
    optimizer.noise_multiplier = 2e-9
    loss(wrapped, *[tensor[4:6] for tensor in rows().tensors]).backward()
    optimizer.step()
    assert_same(gradients(wrapped._module, 4), expected)
    assert optimizer.max_grad_norm == 0.25
    assert inside.state(optimizer).noise_std == pytest.approx(0.5e-9, rel=1e-9, abs=0)


def test_other_constants_may_be_written_too():
    wrapped, optimizer = by_hand()
    expected = truth(wrapped._module, *batch())
    optimizer.expected_batch_size = 16
    backward(wrapped)
    optimizer.step()
    assert_same(gradients(wrapped._module, 16), expected)
    optimizer.generator = torch.Generator().manual_seed(0)
    assert inside.noise_source(optimizer).insecure_seed
    for name, value in (("noise_multiplier", -1.0), ("max_grad_norm", 0.0), ("expected_batch_size", -3)):
        before = getattr(optimizer, name)
        with pytest.raises(ValueError, match=r".+"):
            setattr(optimizer, name, value)
        assert getattr(optimizer, name) == before


def test_writing_a_generator_again_never_repeats_noise_of_a_step():
    wrapped, optimizer = by_hand(noise_multiplier=1.0)
    seen = []
    for _ in range(3):
        optimizer.generator = torch.Generator().manual_seed(5)
        optimizer.zero_grad()
        (loss(wrapped, *batch()) * 0).backward()
        optimizer.step()
        seen.append(flat(gradients(wrapped)))
    assert not torch.allclose(seen[0], seen[1])
    assert not torch.allclose(seen[1], seen[2])
