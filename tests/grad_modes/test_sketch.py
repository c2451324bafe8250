"""Sketches detect whether two sums differ, in memory that does not depend on their size."""

import pytest
import torch
from torch import nn

from dpengine.independence.compare_runs import Sketches, norm_of_sketch


def sketch_of(values):
    sketches, parameter = Sketches(), nn.Parameter(torch.empty(values.shape))
    sketches.add(parameter, values)
    return sketches.by_parameter[parameter]


@pytest.mark.parametrize("shape", [(), (7,), (64, 64), (70, 61), (300, 200), (4097,)], ids=str)
def test_sketches_add_up_as_sums_do(shape):
    torch.manual_seed(0)
    one, other = torch.randn(shape), torch.randn(shape)
    together, parameter = Sketches(), nn.Parameter(torch.empty(shape))
    together.add(parameter, one, 2.0)
    together.fill(parameter, lambda out, keep: out.copy_(other))
    expected = sketch_of(2 * one + other)
    torch.testing.assert_close(together.by_parameter[parameter], expected, rtol=1e-4, atol=1e-3)
    assert expected.numel() <= 4 * 4096


@pytest.mark.parametrize("shape", [(5,), (300, 200), (1000, 1000)], ids=str)
def test_the_norm_of_a_sketch_is_about_that_of_the_sum(shape):
    torch.manual_seed(0)
    for scale in (1.0, 1e-3):
        values = scale * torch.randn(shape)
        assert float(norm_of_sketch(sketch_of(values))) == pytest.approx(float(values.norm()), rel=0.1)
    one = torch.zeros(shape)
    one.view(-1)[-1] = 3.0
    assert float(norm_of_sketch(sketch_of(one))) == pytest.approx(3.0, rel=1e-6)


def test_a_rank_one_difference_shows_in_the_sketch():
    """One sample makes a rank-one difference. In 200 trials the norm of its sketch is at least a third of its norm."""
    torch.manual_seed(1)
    ratios = []
    for _ in range(200):
        difference = torch.outer(torch.randn(256), torch.randn(256))
        ratios.append(float(norm_of_sketch(sketch_of(difference)) / difference.norm()))
    assert min(ratios) > 1 / 3 and sum(ratios) / 200 == pytest.approx(1, abs=0.15)
