"""Optimizers of the user's own, with the helpers that Opacus has for them."""

import pytest
import torch
from opacus_runs import assert_same, batch, by_hand, gradients, loss, truth

from dpengine.compat.opacus.optimizers.optimizer import (
    DPOptimizer,
    _check_processed_flag,
    _generate_noise,
    _mark_as_processed,
)


class OwnNoise(DPOptimizer):
    """As research code writes it."""

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
        expected = truth(wrapped._module, *batch())
        optimizer.zero_grad()
        loss(wrapped, *batch()).backward()
        optimizer.step()
        assert_same(gradients(wrapped._module, 4), expected)
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


def test_a_gradient_that_went_into_a_step_is_refused():
    fresh, used = torch.zeros(2), torch.zeros(2)
    _mark_as_processed([used])
    _check_processed_flag([fresh])
    _check_processed_flag(fresh)
    for obj in (used, [fresh, used]):
        with pytest.raises(ValueError, match="zero_grad"):
            _check_processed_flag(obj)
