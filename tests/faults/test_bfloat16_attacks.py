"""Adversarial samples whose bfloat16 sum would exceed the clipping norm by rounding of norms or factors."""

import pytest
import torch
from torch import nn

from dpengine.capture import LayerCall, Use
from dpengine.clipping.flat import Flat
from dpengine.grad_modes.entry import Entry
from dpengine.grad_modes.flat_buffer import FlatBuffer
from dpengine.grad_modes.method import Algorithm, Method
from dpengine.grad_modes.scratch import Scratch
from dpengine.grad_samplers import bfloat16
from dpengine.grad_samplers.linear import SAMPLERS

GRAM = Algorithm(Method.GHOST, "gram")
ROWS = 8
JUST_ABOVE = 1 + 2.0**-7  # multiplied by most factors, it is rounded by up to 2**-8


def opposite_pairs(acts, grads):
    """Pairs of positions whose inputs differ in the last bit, with opposite gradients."""
    acts, grads = acts.clone(), grads.clone()
    acts[:, 1::2] = acts[:, : acts.shape[1] // 2 * 2 : 2] * (1 + 2.0**-7)
    grads[:, 1::2] = -grads[:, : grads.shape[1] // 2 * 2 : 2]
    return acts, grads


def one_nonzero_column(acts, grads):
    """Output gradients with one nonzero entry, equal at all positions, as from a mean over positions."""
    grads = torch.zeros_like(grads)
    grads[..., 0] = JUST_ABOVE
    return acts, grads


def equal_positions(acts, grads):
    return acts[:, :1].expand_as(acts), grads


def wide_range(acts, grads):
    return acts.mul(3).exp(), grads * torch.randn_like(grads).mul(3).exp()


ATTACKS = {
    "random": lambda acts, grads: (acts, grads),
    "opposite": opposite_pairs,
    "all-cancel": lambda acts, grads: (equal_positions(acts, grads)[0], grads - grads.mean(dim=1, keepdim=True)),
    "dominated": one_nonzero_column,
    "alike": equal_positions,
    "wide-range": wide_range,
    "tiny": lambda acts, grads: (acts * 2.0**-70, grads * 2.0**-66),
    "tiny-and-large": lambda acts, grads: (acts * 2.0**-80, grads * 2.0**28),
    "large-and-tiny": lambda acts, grads: (acts * 2.0**28, grads * 2.0**-80),
    "small-squares": lambda acts, grads: (acts * 2.0**24, grads * 2.0**-36),
    "large": lambda acts, grads: (acts * 2.0**20, grads * 2.0**20),
    "subnormal": lambda acts, grads: (acts * 2.0**28, grads * 2.0**-128),
    "too-large": lambda acts, grads: (acts * 2.0**60, grads * 2.0**-60),
}
SHAPES = {"one": (1, 24, 40), "short": (6, 40, 24), "long": (300, 5, 7), "wide-head": (3, 8, 5000)}


def make_attack(attack, shape):
    torch.manual_seed(0)
    length, inside, outside = SHAPES[shape]
    acts, grads = ATTACKS[attack](torch.randn(ROWS, length, inside), torch.randn(ROWS, length, outside))
    return acts.bfloat16(), grads.bfloat16()


def entry_of(acts, grads):
    layer = nn.Linear(acts.shape[2], grads.shape[2])
    return Entry(Use(layer.weight, "weight"), [(LayerCall(layer, (acts,), grads), SAMPLERS["weight"])])


def true_norms(acts, grads):
    return torch.einsum("bto,bti->boi", grads.double(), acts.double()).flatten(1).norm(dim=1)


def contribution(acts, grads, bound):
    """Returns the norm of the clipped gradient of one sample relative to the clipping norm."""
    one = entry_of(acts, grads)
    norm_B = one.sq_norm(GRAM, 1, Scratch()).sqrt()
    buffer = FlatBuffer([one.use.parameter])
    one.add_sum(Flat(bound).factors(norm_B.unsqueeze(1)).squeeze(1), 1.0, buffer)
    (total,) = buffer.drain().views.values()
    return float(total.double().norm()) / bound


@pytest.mark.one_in(4, "attack", "shape", others="slow")
@pytest.mark.hazard("U2")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_sample_exceeds_the_clipping_norm(attack, shape):
    acts, grads = make_attack(attack, shape)
    truth_B = true_norms(acts, grads)
    for i in range(ROWS):
        for part in (0.9, 0.51, 1 / 3, 1e-3, 1e-9):  # factors whose products are rounded up or down
            bound = part * float(truth_B[i])
            assert not bound or contribution(acts[i : i + 1], grads[i : i + 1], bound) <= 1 + 1e-6


@pytest.mark.hazard("U2")
def test_no_sample_exceeds_the_clipping_norm_if_rounding_undoes_a_cancellation():
    """Searches pairs of numbers with opposite signs such that one is rounded up and the other down."""
    torch.manual_seed(0)
    found = []
    for _ in range(300):
        grads = torch.tensor([[[1.0], [-1.0]]]).bfloat16() * (1 - 0.4 * torch.rand(1, 2, 1)).bfloat16()
        acts = torch.ones(1, 2, 3).bfloat16()
        truth, part = float(true_norms(acts, grads)), float(0.4 + 0.5 * torch.rand(()))
        if truth:
            found.append(contribution(acts, grads, truth * part))
    assert max(found) <= 1 + 1e-6
    assert min(found) < 0.55  # the search found samples that are halved


@pytest.mark.hazard("U2")
def test_no_factor_makes_a_sample_exceed_the_clipping_norm():
    """Searches clipping factors whose products with all entries are rounded up."""
    acts, grads = (tensor[:1] for tensor in make_attack("dominated", "short"))
    truth = float(true_norms(acts, grads))
    found = [contribution(acts, grads, truth * part) for part in torch.linspace(0.4, 0.99, 400).tolist()]
    assert max(found) <= 1 + 1e-6
    assert min(found) >= 0.99  # it is never halved
    assert max(found) >= 0.998  # the search found rounding


@pytest.mark.one_in(4, "attack", "shape", "sign", others="slow")
@pytest.mark.hazard("U2")
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attack", ["random", "opposite", "all-cancel", "alike", "wide-range", "small-squares"])
def test_norms_are_not_low_if_each_product_has_the_largest_error(attack, shape, sign, monkeypatch):
    exact = bfloat16.product

    def wrong(left, right, out=None):
        error = (0.75 * left.shape[2] + 8) * 2.0**-23  # as in note [bfloat16 products]
        found = exact(left, right) + sign * error * exact(left.abs(), right.abs())
        return found if out is None else out.copy_(found)

    monkeypatch.setattr(bfloat16, "product", wrong)
    acts, grads = make_attack(attack, shape)
    found_B = bfloat16.gram_sq_norm((grads, acts)).sqrt()
    parts_B = (acts.double().norm(dim=2) * grads.double().norm(dim=2)).sum(dim=1)
    lost_B = (0.75 * acts.shape[1] + 8) * 2.0**-23 * parts_B  # error of the sum over positions
    assert (found_B >= true_norms(acts, grads) + lost_B).all()


@pytest.mark.parametrize("shape", ["one", "short", "wide-head"])
def test_an_ordinary_sample_is_not_scaled_down(shape):
    acts, grads = make_attack("random", shape)
    truth_B = true_norms(acts, grads)
    for i in range(ROWS):
        kept = contribution(acts[i : i + 1], grads[i : i + 1], 0.37 * float(truth_B[i]))
        assert kept >= 0.99


def test_a_sample_with_positions_that_are_too_large_is_dropped():
    acts, grads = make_attack("too-large", "short")
    norm_B = entry_of(acts, grads).sq_norm(GRAM, ROWS, Scratch()).sqrt()
    assert not norm_B.isfinite().any()
    assert not Flat(1.0).factors(norm_B.unsqueeze(1)).any()


@pytest.mark.parametrize("bound", [torch.inf, torch.nan])
def test_a_sample_whose_bound_after_rounding_is_not_finite_contributes_zero(bound, monkeypatch):
    acts, grads = make_attack("random", "short")
    norms = bfloat16.GramNorms.of([(grads, acts)])
    bounds = torch.ones(1, ROWS)
    bounds[0, 0] = bound
    monkeypatch.setattr("dpengine.grad_samplers.bfloat16._norm_bounds", lambda *_: bounds)
    ((weighted_grads, same_acts),) = norms.multiplied([(grads, acts)], torch.full((1, ROWS), 0.5))
    assert ((true_norms(same_acts, weighted_grads) > 0) == (torch.arange(ROWS) > 0)).all()


def test_a_dropped_sample_does_not_change_the_others():
    acts, grads = make_attack("random", "short")
    grads[2] = float("nan")
    one = entry_of(acts, grads)
    one.sq_norm(GRAM, ROWS, Scratch())
    dropped_B = torch.arange(ROWS) == 2
    one.drop(dropped_B)
    buffer = FlatBuffer([one.use.parameter])
    one.add_sum(torch.full((ROWS,), 0.3).masked_fill(dropped_B, 0), 1.0, buffer)
    (total,) = buffer.drain().views.values()
    kept = ~dropped_B
    expected = 0.3 * torch.einsum("bto,bti->oi", grads[kept].double(), acts[kept].double())
    assert float((total - expected).norm() / expected.norm()) < 0.01


@pytest.mark.parametrize("shared", [True, False])
def test_parameters_of_one_shape_have_the_norms_and_sums_of_separate_parameters(shared):
    acts, grads = make_attack("random", "short")
    other_acts, other_grads = make_attack("wide-range", "short")
    pairs = [(grads, acts), (other_grads, acts if shared else other_acts), (grads.flip(0), acts)]
    assert list(bfloat16.groups_for_grams(pairs)) == [[0, 1, 2]]
    norms = bfloat16.GramNorms.of(pairs)
    factor_LB = torch.rand(3, ROWS)
    found = norms.multiplied(pairs, factor_LB)
    for i, pair in enumerate(pairs):
        alone = bfloat16.GramNorms.of([pair])
        torch.testing.assert_close(norms.sq_norm_LB[i], alone.sq_norm_LB[0], rtol=1e-6, atol=0)
        ((first, second),) = alone.multiplied([pair], factor_LB[i : i + 1])
        assert torch.equal(first, found[i][0]) and torch.equal(second, found[i][1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features", [1, 5])
def test_norms_do_not_depend_on_the_default_dtype(features, dtype):
    torch.manual_seed(0)
    pair = torch.randn(ROWS, 4, features).bfloat16(), torch.randn(ROWS, 4, features).bfloat16()
    expected = bfloat16.GramNorms.of([pair])
    factor_LB = torch.rand(1, ROWS)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = bfloat16.GramNorms.of([pair])
        torch.testing.assert_close(found.multiplied([pair], factor_LB), expected.multiplied([pair], factor_LB))
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found.sq_norm_LB, expected.sq_norm_LB)
