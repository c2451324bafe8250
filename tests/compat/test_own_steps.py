"""Optimizers of the user's own, with the helpers that Opacus has for them."""

import pytest
import torch
from opacus_runs import assert_clipped_step, batch, by_hand, flat, loss, private, train

from dpengine.compat.opacus.optimizers.optimizer import (
    DPOptimizer,
    _check_processed_flag,
    _generate_noise,
    _mark_as_processed,
)
from dpengine.compat.opacus.utils.batch_memory_manager import BatchMemoryManager
from dpengine.errors import BatchStateError


class OwnNoise(DPOptimizer):
    """Noise as in research code."""

    drawn = 0

    def add_noise(self):
        for p in self.params:
            _check_processed_flag(p.summed_grad)
            std = self.noise_multiplier * self.max_grad_norm
            noise = _generate_noise(std, p.summed_grad, generator=self.generator, secure_mode=self.secure_mode)
            p.grad = (p.summed_grad + noise).view_as(p)
            _mark_as_processed(p.summed_grad)
            OwnNoise.drawn += 1


@pytest.mark.parametrize("sigma", [0.0, 1e-9])
def test_a_subclass_with_noise_of_its_own_steps(sigma):
    wrapped, optimizer = by_hand(kind=OwnNoise, noise_multiplier=sigma)
    OwnNoise.drawn = 0
    for _ in range(2):
        assert_clipped_step(wrapped, optimizer, *batch())
    assert OwnNoise.drawn == 8


def test_the_noise_has_the_deviation_and_form_that_were_asked_for():
    reference = torch.empty(400, 500, dtype=torch.float64)
    noise = _generate_noise(3.0, reference)
    assert (noise.shape, noise.dtype) == (reference.shape, reference.dtype)
    assert float(noise.std()) == pytest.approx(3.0, abs=0.03)  # 6 deviations
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.05)
    assert not torch.equal(noise, _generate_noise(3.0, reference))
    assert not _generate_noise(0.0, reference).any()
    assert _generate_noise(1.0, torch.empty(3, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert _generate_noise(1.0, torch.empty(0, 2)).shape == (0, 2)


@pytest.mark.parametrize("secure", [False, True])
def test_a_generator_makes_it_repeat(secure):
    def drawn():
        generator = torch.Generator().manual_seed(4)
        return [_generate_noise(1.0, torch.empty(5), generator, secure) for _ in range(2)]

    one, other = drawn(), drawn()
    assert all(map(torch.equal, one, other))
    assert not torch.equal(*one)


def test_a_gradient_that_went_into_a_step_is_rejected():
    fresh, used = torch.zeros(2), torch.zeros(2)
    _mark_as_processed([used])
    _check_processed_flag([fresh])
    _check_processed_flag(fresh)
    for obj in (used, [fresh, used]):
        with pytest.raises(ValueError, match="zero_grad"):
            _check_processed_flag(obj)


class OwnStep(DPOptimizer):
    """A step of the user's own, out of the parts that Opacus has."""

    def pre_step(self, closure=None):
        self.clip_and_accumulate()
        if self._check_skip_next_step():
            self._is_last_step_skipped = True
            return False
        self.add_noise()
        self.scale_grad()
        self._is_last_step_skipped = False
        return True


def chunked(parts):
    with BatchMemoryManager(data_loader=parts.loader, max_physical_batch_size=3, optimizer=parts.optimizer) as chunks:
        train(parts._replace(loader=chunks))


def test_a_step_of_ones_own_waits_for_all_chunks_of_a_batch():
    parts, own = (private(count=16, batch_size=8, noise_multiplier=0.0) for _ in range(2))
    own.optimizer.__class__ = OwnStep
    for each in (parts, own):
        chunked(each)
    assert own.engine.accountant.history == parts.engine.accountant.history
    found, expected = (flat(dict(each.model.named_parameters())) for each in (own, parts))
    torch.testing.assert_close(found, expected)


def test_a_part_of_a_batch_gets_no_noise_and_does_not_leave():
    parts = private(count=16, batch_size=8, noise_multiplier=1.0)
    before = flat(dict(parts.model.named_parameters())).clone()
    chunks = BatchMemoryManager(data_loader=parts.loader, max_physical_batch_size=3, optimizer=parts.optimizer)
    with pytest.raises(BatchStateError, match="part of a logical batch"), chunks as some:
        inputs, targets = next(iter(some))
        loss(parts.model, inputs, targets).backward()
        parts.optimizer.clip_and_accumulate()
        parts.optimizer.add_noise()
    assert all(p.grad is None or not p.grad.any() for p in parts.model.parameters())
    assert torch.equal(flat(dict(parts.model.named_parameters())), before)
