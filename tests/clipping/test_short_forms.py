import pytest

from dpengine.clipping.adaptive import Adaptive
from dpengine.clipping.flat import Automatic, Flat
from dpengine.clipping.per_layer import PerLayer
from dpengine.clipping.short_forms import SHORT_FORMS, clipping_from
from dpengine.errors import InvalidBudgetError

KINDS = {"flat": Flat, "per_layer": PerLayer, "automatic": Automatic, "adaptive": Adaptive}


@pytest.mark.parametrize("name", SHORT_FORMS)
def test_a_name_gives_its_policy_with_the_threshold(name):
    policy = clipping_from(name, 1.5)
    assert type(policy) is KINDS[name] and policy.max_grad_norm == 1.5


def test_per_layer_takes_a_list():
    assert clipping_from("per_layer", [1.0, 2.0]) == PerLayer([1.0, 2.0])


@pytest.mark.parametrize(
    ("clipping", "norm", "error", "words"),
    [
        *(
            (name, [1.0, 2.0], InvalidBudgetError, r"max_grad_norm=\[1.0, 2.0\]")
            for name in ("flat", "automatic", "adaptive")
        ),
        *((name, 1.0, ValueError, "flat, per_layer, automatic, adaptive") for name in ("Flat", "per-layer", "")),
        *((one, 1.0, TypeError, r"with bounds, group_of, factors.*'flat', 'per_layer'") for one in (None, 3, Flat)),
        ("flat", None, InvalidBudgetError, r"max_grad_norm=1\.0"),
        *(
            (name, norm, InvalidBudgetError, "not a positive, finite number")
            for norm in (0.0, -1.0, float("nan"), float("inf"))
            for name in SHORT_FORMS
        ),
    ],
)
def test_unknown_names_and_thresholds_that_do_not_fit_are_rejected(clipping, norm, error, words):
    with pytest.raises(error, match=words):
        clipping_from(clipping, *(() if norm is None else (norm,)))


@pytest.mark.parametrize(
    ("policy", "same"), [(Flat(2.0), 2.0), (PerLayer([3.0, 4.0]), 5.0), (PerLayer([3.0, 4.0]), [3, 4])]
)
def test_a_policy_is_used_unless_max_grad_norm_contradicts_it(policy, same):
    """A contradicting clipping norm must not be ignored silently."""
    assert clipping_from(policy) is policy and clipping_from(policy, same) is policy
    with pytest.raises(ValueError, match="contradicts clipping="):
        clipping_from(policy, 1.0)
