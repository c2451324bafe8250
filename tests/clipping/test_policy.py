"""Properties of all policies: scaled norms stay within the clipping norms in exact rational arithmetic."""

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpengine.clipping.adaptive import Adaptive
from dpengine.clipping.custom_policy import CustomPolicy
from dpengine.clipping.flat import Automatic, Flat
from dpengine.clipping.groups import Groups
from dpengine.clipping.per_layer import PerLayer
from dpengine.clipping.policy import RELATIONS, AbstractClip
from dpengine.errors import InvalidBudgetError

NAMES = ["a.weight", "a.bias", "b.weight", "b.bias", "c.weight"]  # three layers

# id -> how to make the policy from a threshold C, and the threshold of each group
CASES = {
    "flat": (Flat, lambda c: [c]),
    "per-layer-shared-out": (PerLayer, lambda c: [c / math.sqrt(3)] * 3),
    "per-layer-listed": (lambda c: PerLayer([c, 2 * c, c / 3]), lambda c: [c, 2 * c, c / 3]),
    "groups": (lambda c: Groups({"a": c, "": c / 7}), lambda c: [c, c / 7]),
    "automatic": (Automatic, lambda c: [c]),
    "automatic-wide": (lambda c: Automatic(c, stability=10 * c), lambda c: [c]),
    "adaptive": (lambda c: Adaptive(c, min_norm=1e-12, max_norm=1e12), lambda c: [c]),
}
DTYPES = [torch.float32, torch.float64]
THRESHOLDS = st.floats(1e-6, 1e6)

every_policy = pytest.mark.parametrize("case", CASES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def adversarial_norms(dtype: torch.dtype, threshold: float) -> torch.Tensor:
    """Zero, the smallest and the largest numbers, and the neighbours of the threshold."""
    info = torch.finfo(dtype)
    near = torch.tensor([threshold, threshold / math.sqrt(3), threshold / 7, 2 * threshold], dtype=dtype)
    around = [near]
    for _ in range(8):
        around.append(torch.nextafter(around[-1], torch.full_like(near, math.inf)))
    for _ in range(8):
        around.append(torch.nextafter(around[-1], torch.zeros_like(near)))
    ends = torch.tensor([0.0, info.tiny * info.eps, info.tiny, info.eps, 1.0, info.max / 3, info.max], dtype=dtype)
    return torch.cat((*around, ends, torch.logspace(-30, 38, 500, dtype=dtype)))


@pytest.mark.one_in(4, "case", "dtype", others="slow")
@pytest.mark.one_in(2, "case", "dtype")
@every_policy
@every_dtype
@given(threshold=THRESHOLDS)
@settings(max_examples=15, deadline=None)
def test_factor_times_norm_never_exceeds_the_threshold(case, dtype, threshold):
    make, bounds_of = CASES[case]
    bounds = bounds_of(threshold)
    norms = adversarial_norms(dtype, threshold)
    factors = make(threshold).factors(norms.unsqueeze(1).repeat(1, len(bounds)))
    assert factors.dtype == dtype and factors.isfinite().all() and (factors >= 0).all()
    for k, bound in enumerate(bounds):
        limit = Fraction(bound) * (1 + Fraction(1, 2**50))  # C / sqrt(3) is rounded in this test, too
        assert all(
            Fraction(f) * Fraction(n) <= limit for f, n in zip(factors[:, k].tolist(), norms.tolist(), strict=True)
        )


@every_policy
@given(entries=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=6, max_size=24), threshold=THRESHOLDS)
@settings(max_examples=60, deadline=None)
def test_a_clipped_float32_gradient_never_exceeds_the_clipping_norm(case, entries, threshold):
    make, bounds_of = CASES[case]
    groups = len(bounds_of(threshold))
    policy, gradient = make(threshold), torch.tensor(entries, dtype=torch.float32)
    parts = gradient.tensor_split(groups)
    norms = torch.stack([part.double().norm() for part in parts]).float().unsqueeze(0)
    factors = policy.factors(norms)[0]
    clipped = [value for part, factor in zip(parts, factors, strict=True) for value in (part * factor).tolist()]
    assert sum(Fraction(value) ** 2 for value in clipped) <= Fraction(policy.sensitivity()) ** 2


@pytest.mark.one_in(4, "dtype", "case", others="slow")
@pytest.mark.one_in(2, "dtype", "case")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["flat", "per-layer-shared-out", "automatic", "adaptive"])
def test_none_of_a_million_samples_exceeds_its_threshold(case, dtype):
    """A product of two float32 numbers is exact in long double; of two float64, rounded by 2**-64."""
    make, bounds_of = CASES[case]
    threshold = 1.3
    generator = torch.Generator().manual_seed(0)
    norms = (torch.rand(1_000_000, 1, generator=generator, dtype=torch.float64) * 40 - 20).exp().to(dtype)
    groups = len(bounds_of(threshold))
    factors = make(threshold).factors(norms.repeat(1, groups))
    product = factors[:, :1].numpy().astype(np.longdouble) * norms.numpy().astype(np.longdouble)
    assert (product <= np.longdouble(threshold) / np.sqrt(np.longdouble(groups))).all()


@pytest.mark.parametrize("case", ["flat", "per-layer-shared-out", "per-layer-listed", "groups", "adaptive"])
@pytest.mark.parametrize("threshold", [1e-6, 2.0, 1e6])
def test_norms_within_the_clipping_norm_are_not_scaled(case, threshold):
    make, bounds_of = CASES[case]
    bounds = bounds_of(threshold)
    norms = torch.stack([torch.zeros(len(bounds)), torch.tensor(bounds) * 0.99])
    assert make(threshold).factors(norms).equal(torch.ones_like(norms))


@pytest.mark.parametrize("case", ["flat", "per-layer-shared-out", "per-layer-listed", "groups", "adaptive"])
def test_a_huge_finite_gradient_is_clipped_and_not_dropped(case):
    make, bounds_of = CASES[case]
    bounds = torch.tensor(bounds_of(2.0))
    norms = torch.full((1, len(bounds)), 1e30)
    assert torch.allclose(make(2.0).factors(norms) * norms, bounds, rtol=2**-19)


@every_policy
@every_dtype
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
def test_one_unusable_norm_drops_the_sample_from_every_group(case, dtype, bad):
    make, bounds_of = CASES[case]
    groups = len(bounds_of(1.0))
    for place in range(groups):
        norms = torch.ones(3, groups, dtype=dtype)
        norms[1, place] = bad
        factors = make(1.0).factors(norms)
        assert factors[1].equal(torch.zeros(groups, dtype=dtype))
        assert (factors[[0, 2]] > 0).all()


@every_policy
def test_an_empty_batch_has_empty_factors(case):
    make, bounds_of = CASES[case]
    groups = len(bounds_of(1.0))
    assert make(1.0).factors(torch.zeros(0, groups)).shape == (0, groups)


@every_policy
@given(threshold=THRESHOLDS)
@settings(max_examples=20, deadline=None)
def test_sensitivity_is_the_root_of_the_sum_of_squared_thresholds(case, threshold):
    make, bounds_of = CASES[case]
    policy = make(threshold)
    total = math.sqrt(sum(bound**2 for bound in bounds_of(threshold)))
    assert policy.sensitivity() == pytest.approx(total, rel=1e-12)
    assert policy.max_grad_norm == policy.sensitivity("add-or-remove-one") == policy.sensitivity("zero-out")
    assert policy.sensitivity("replace-one") == 2 * policy.sensitivity()


@every_policy
def test_an_unknown_relation_is_rejected_with_the_known_ones(case):
    with pytest.raises(ValueError, match=", ".join(RELATIONS)):
        CASES[case][0](1.0).sensitivity("add_remove")


@every_policy
def test_group_indices_are_contiguous_and_match_the_number_of_thresholds(case):
    make, bounds_of = CASES[case]
    policy = make(1.0)
    assert sorted(set(policy.group_of(NAMES))) == list(range(policy.num_groups(NAMES)))
    assert policy.num_groups(NAMES) == len(bounds_of(1.0))


@every_policy
@pytest.mark.parametrize("bad", [0, 0.0, -1.0, math.nan, math.inf, -math.inf, True, None, "1.0", torch.tensor(1.0)])
@pytest.mark.hazard("C10", "B2")
def test_a_clipping_norm_that_is_not_positive_and_finite_is_rejected_by_name(case, bad):
    others = {  # this case has further arguments
        "per-layer-listed": lambda: PerLayer([1.0, bad]),
        "groups": lambda: Groups({"": bad}),
        "automatic-wide": lambda: Automatic(1.0, bad),
        "adaptive": lambda: Adaptive(bad),
    }
    with pytest.raises(InvalidBudgetError, match=r"DPE007.*norm|DPE007.*stability"):
        others.get(case, lambda: CASES[case][0](bad))()


@every_policy
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64], ids=str)
def test_norms_narrower_than_float32_are_rejected(case, dtype):
    make, bounds_of = CASES[case]
    with pytest.raises(TypeError, match="float32 or float64"):
        make(1.0).factors(torch.ones(2, len(bounds_of(1.0)), dtype=dtype))


@pytest.mark.parametrize("case", [case for case in CASES if case != "per-layer-shared-out"])
def test_norms_for_another_number_of_groups_are_rejected(case):
    make, bounds_of = CASES[case]
    for shape in [(2, len(bounds_of(1.0)) + 1), (2,)]:
        with pytest.raises(ValueError, match=r"must have shape \(B, "):
            make(1.0).factors(torch.ones(shape))


@pytest.mark.parametrize("case", [case for case in CASES if case != "adaptive"])
def test_a_stateless_policy_is_immutable_and_comparable(case):
    make, bounds_of = CASES[case]
    policy = make(1.0)
    assert policy == make(1.0) == copy.deepcopy(policy) and hash(policy) == hash(make(1.0)) and policy != make(2.0)
    for name in vars(policy):
        with pytest.raises(AttributeError):
            setattr(policy, name, 5.0)
    before = policy.bounds
    policy.observe(torch.full((4, len(bounds_of(1.0))), 100.0))
    policy.finish_step(None, 1, 4)
    policy.discard()
    assert policy.bounds == before and policy.state_dict() == {} and policy.gradient_noise_multiplier(1.1) == 1.1


@every_policy
def test_the_description_names_the_policy(case):
    policy = CASES[case][0](1.0)
    assert policy.describe()["policy"] == case.split("-")[0].replace("per", "per_layer")


def test_every_policy_has_a_case():
    ours = {kind for kind in AbstractClip.__subclasses__() if kind.__module__.startswith("dpengine.")}
    assert {type(make(1.0)) for make, _ in CASES.values()} == ours - {
        CustomPolicy
    }  # tests/extending covers that policy
