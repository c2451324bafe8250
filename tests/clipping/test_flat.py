"""Clipping of all parameters together: flat and automatic."""

import pytest
import torch

from dpengine.clipping.flat import Automatic, Flat


@pytest.mark.parametrize(
    ("policy", "factor"),
    [(Flat(2.0), lambda n: min(1.0, 2.0 / n) if n else 1.0), (Automatic(3.0, 0.25), lambda n: 3.0 / (n + 0.25))],
    ids=["flat", "automatic"],
)
def test_factors_are_those_of_a_loop_over_samples(policy, factor):
    norms = torch.tensor([[0.0], [1e-3], [0.5], [1.9], [2.0], [4.0], [1e6]], dtype=torch.float64)
    expected = torch.tensor([[factor(n)] for n in norms[:, 0].tolist()], dtype=torch.float64)
    assert torch.allclose(policy.factors(norms), expected, rtol=2**-19)


def test_a_threshold_may_be_any_real_number_and_is_stored_as_a_float():
    assert Flat(2).max_norm == 2.0 and isinstance(Flat(2).max_norm, float)


def test_all_parameters_are_one_group():
    assert Flat(1.0).group_of(["a.weight", "b.weight", "c"]) == [0, 0, 0]
    assert Flat(1.0).group_of([]) == []


def test_a_gradient_of_zeros_stays_zero_whatever_the_settings():
    """The factor would overflow to infinity, and infinity times zero is not a number."""
    assert (Automatic(1e30, 1e-30).factors(torch.zeros(1, 1)) * torch.zeros(1, 1)).equal(torch.zeros(1, 1))


def test_larger_gradients_stay_larger_in_automatic_clipping():
    norms = torch.logspace(-3, 1, 50).unsqueeze(1)
    assert ((Automatic().factors(norms) * norms).diff(dim=0) > 0).all()
