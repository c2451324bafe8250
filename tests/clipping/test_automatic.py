import torch

from dpengine.clipping.flat import Automatic


def test_factors_are_those_of_auto_s():
    norms = torch.tensor([[0.0], [1e-3], [0.5], [2.0], [1e6]], dtype=torch.float64)
    expected = torch.tensor([[3.0 / (n + 0.25)] for n in norms[:, 0].tolist()], dtype=torch.float64)
    assert torch.allclose(Automatic(3.0, 0.25).factors(norms), expected, rtol=2**-19)


def test_a_gradient_of_zeros_stays_zero_whatever_the_settings():
    """The factor would overflow to infinity, and infinity times zero is not a number."""
    assert (Automatic(1e30, 1e-30).factors(torch.zeros(1, 1)) * torch.zeros(1, 1)).equal(torch.zeros(1, 1))


def test_larger_gradients_stay_larger():
    norms = torch.logspace(-3, 1, 50).unsqueeze(1)
    assert ((Automatic().factors(norms) * norms).diff(dim=0) > 0).all()
