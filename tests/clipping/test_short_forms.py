import pytest

from dpengine.clipping.adaptive import Adaptive
from dpengine.clipping.flat import Automatic, Flat
from dpengine.clipping.per_layer import PerLayer
from dpengine.clipping.short_forms import SHORT_FORMS, clipping_from
from dpengine.errors import InvalidBudgetError


@pytest.mark.parametrize(
    ("name", "kind"), [("flat", Flat), ("per_layer", PerLayer), ("automatic", Automatic), ("adaptive", Adaptive)]
)
def test_a_name_gives_its_policy_with_the_threshold(name, kind):
    policy = clipping_from(name, 1.5)
    assert type(policy) is kind and policy.max_grad_norm == 1.5


def test_every_short_form_is_tested():
    assert set(SHORT_FORMS) == {"flat", "per_layer", "automatic", "adaptive"}


def test_per_layer_takes_a_list():
    assert clipping_from("per_layer", [1.0, 2.0]) == PerLayer([1.0, 2.0])


@pytest.mark.parametrize("name", ["flat", "automatic", "adaptive"])
def test_a_list_is_refused_elsewhere(name):
    with pytest.raises(InvalidBudgetError, match=r"max_grad_norm=\[1.0, 2.0\]"):
        clipping_from(name, [1.0, 2.0])


@pytest.mark.parametrize("name", ["Flat", "per-layer", ""])
def test_an_unknown_name_is_refused_with_the_choices(name):
    with pytest.raises(ValueError, match="flat, per_layer, automatic, adaptive"):
        clipping_from(name, 1.0)


@pytest.mark.parametrize("value", [None, 3, Flat])
def test_an_object_without_the_members_of_a_policy_is_refused(value):
    with pytest.raises(TypeError, match=r"with bounds, group_of, factors.*'flat', 'per_layer'"):
        clipping_from(value, 1.0)


def test_a_name_without_threshold_is_refused():
    with pytest.raises(InvalidBudgetError, match=r"max_grad_norm=1\.0"):
        clipping_from("flat")


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_threshold_is_refused(bad):
    for name in SHORT_FORMS:
        with pytest.raises(InvalidBudgetError, match="not a positive, finite number"):
            clipping_from(name, bad)


@pytest.mark.parametrize(
    ("policy", "same"), [(Flat(2.0), 2.0), (PerLayer([3.0, 4.0]), 5.0), (PerLayer([3.0, 4.0]), [3, 4])]
)
def test_a_policy_is_handed_through_unless_the_threshold_contradicts_it(policy, same):
    """A contradicting clipping norm must not be ignored silently."""
    assert clipping_from(policy) is policy and clipping_from(policy, same) is policy
    with pytest.raises(ValueError, match="contradicts clipping="):
        clipping_from(policy, 1.0)
