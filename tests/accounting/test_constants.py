"""Steps, rates and deltas of a run, and numbers that are printed rounded up."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpengine.accounting import round_up, suggested_delta
from dpengine.accounting.constants import check_delta, sample_rate_of, steps_of_epochs, steps_per_epoch
from dpengine.accounting.rounding import percent_up, round_up_delta
from dpengine.errors import InvalidBudgetError


@pytest.mark.hazard("S4")
def test_no_step_is_lost_to_floating_point():
    for batches in range(1, 5001):
        assert steps_per_epoch(batches, 1) == batches
    for rows in range(1, 5001):
        for batch in (2, 3, 7, 32, 49, 64, 100, rows):
            expected = len(range(0, rows, batch))
            for epochs in (1, 3, 20):
                assert epochs * steps_per_epoch(rows, batch) == epochs * expected


@pytest.mark.hazard("S4")
def test_the_naive_formula_does_lose_steps():
    assert any(int(1 / (1 / rows)) != steps_per_epoch(rows, 1) for rows in range(1, 5000))


@pytest.mark.parametrize(("rows", "batch"), [(0, 1), (1, 0), (-3, 1), (10, 2.0), (10.0, 2), (True, 1), ("9", 1)])
def test_dataset_and_batch_sizes_must_be_positive_integers(rows, batch):
    for function in (steps_per_epoch, sample_rate_of):
        with pytest.raises(InvalidBudgetError, match=r"num_examples=|batch_size="):
            function(rows, batch)


def test_sample_rate_is_batch_size_over_dataset_size():
    assert sample_rate_of(60000, 256) == 256 / 60000
    assert sample_rate_of(10, 10) == sample_rate_of(10, 64) == 1.0


def test_the_suggested_delta_lies_below_one_over_n():
    for rows in (2, 10, 32561, 10**9):
        assert suggested_delta(rows) == pytest.approx(math.exp(-1.1 * math.log(rows)))
        assert suggested_delta(rows) < 1 / rows
        check_delta(suggested_delta(rows), rows)
    with pytest.raises(InvalidBudgetError):
        suggested_delta(1)


def test_a_large_delta_is_rejected_with_a_suggestion():
    with pytest.raises(InvalidBudgetError) as caught:
        check_delta(0.5, 32561)
    assert str(caught.value) == (
        "[DPE007] delta=0.5 is too large for 32,561 examples: at 1/N, a mechanism may publish a complete record. "
        "Pass delta=1.1e-05."
    )
    check_delta(0.5, 32561, allow_large=True)
    check_delta(0.9 / 32561, 32561)
    for rows in range(2, 200):  # 1/49 * 49 < 1 in floating point
        with pytest.raises(InvalidBudgetError):
            check_delta(1 / rows, rows)


@pytest.mark.parametrize("delta", [0, 1, -1e-5, 2, math.nan, math.inf, "1e-5"])
def test_a_delta_outside_zero_one_is_rejected_even_when_large_is_allowed(delta):
    with pytest.raises(InvalidBudgetError, match="delta="):
        check_delta(delta, 100, allow_large=True)


def test_epochs_of_a_rate_lose_no_step():
    for steps in range(1, 2001):
        for epochs in (1, 3, 20):
            assert steps_of_epochs(epochs, 1 / steps) == epochs * steps
    assert steps_of_epochs(0.5, 0.01) == 50
    assert steps_of_epochs(1e-9, 1.0) == 1
    with pytest.raises(InvalidBudgetError, match="epochs"):
        steps_of_epochs(0, 0.1)


@given(st.floats(min_value=1e-300, max_value=1e9))
def test_a_bound_is_rounded_up_by_less_than_one_digit(value):
    text = round_up(value)
    last_digit = Fraction(1, 10 ** len(text.partition(".")[2]))
    assert float(text) >= value
    assert Fraction(text) - last_digit < Fraction(value)


@given(st.floats(min_value=1e9, max_value=1e307))
def test_a_very_large_bound_is_printed_short_and_never_rounded_down(value):
    assert value <= float(round_up(value)) <= value * (1 + 1e-5)
    assert len(round_up(value)) <= 19


@given(st.floats(min_value=1e-300, max_value=1, exclude_max=True))
def test_a_delta_is_never_rounded_down(delta):
    assert delta <= float(round_up_delta(delta)) <= 1.01 * delta


@given(st.floats(min_value=0, max_value=1))
def test_a_percentage_is_never_rounded_down(share):
    assert float(percent_up(share).removesuffix(" %")) >= 100 * share * (1 - 1e-15)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.00"),
        (3.0, "3.00"),
        (0.9999, "1.00"),
        (1.0001, "1.01"),
        (0.1, "0.10"),
        (0.00123, "0.0013"),
        (math.inf, "∞"),
        (9866089203292.357, "9866089203292.36"),
        (2.5620478194867347e17, "2.56205e+17"),
        (1e300, "1e+300"),
        (9.9999999e299, "1e+300"),
    ],
)
def test_epsilon_keeps_two_significant_digits(value, text):
    assert round_up(value) == text


def test_a_short_delta_is_printed_as_the_user_wrote_it():
    assert [round_up_delta(d) for d in (1e-5, 1e-10, 0.25)] == ["1e-05", "1e-10", "0.25"]
    assert round_up_delta(1.0684e-05) == "1.07e-05"


def test_a_percentage_has_one_decimal():
    assert [percent_up(s) for s in (0.0, 0.01, 0.10301, 1.0)] == ["0.0 %", "1.0 %", "10.4 %", "100.0 %"]
