import torch

from dpengine.clipping.flat import Flat


def test_factors_are_those_of_a_loop_over_samples():
    norms = torch.tensor([[0.0], [0.5], [1.9], [2.0], [4.0], [1000.0]])
    expected = [min(1.0, 2.0 / n) if n else 1.0 for n in norms[:, 0].tolist()]
    assert torch.allclose(Flat(2.0).factors(norms)[:, 0], torch.tensor(expected), rtol=2**-19)


def test_a_threshold_may_be_any_real_number_and_reads_as_a_float():
    assert Flat(2).max_norm == 2.0 and isinstance(Flat(2).max_norm, float)


def test_all_parameters_are_one_group():
    assert Flat(1.0).group_of(["a.weight", "b.weight", "c"]) == [0, 0, 0]
    assert Flat(1.0).group_of([]) == []
