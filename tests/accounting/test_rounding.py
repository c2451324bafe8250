import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpengine.accounting import round_up
from dpengine.accounting.rounding import percent_up, round_up_delta


@given(st.floats(min_value=1e-300, max_value=1e9))
def test_a_bound_is_never_printed_below_itself_nor_a_whole_digit_above(value):
    text = round_up(value)
    last_digit = Fraction(1, 10 ** len(text.partition(".")[2]))
    assert float(text) >= value
    assert Fraction(text) - last_digit < Fraction(value)


@given(st.floats(min_value=1e9, max_value=1e307))
def test_an_enormous_bound_is_printed_short_and_never_below_itself(value):
    assert value <= float(round_up(value)) <= value * (1 + 1e-5)
    assert len(round_up(value)) <= 19


@given(st.floats(min_value=1e-300, max_value=1, exclude_max=True))
def test_a_delta_is_never_printed_below_itself(delta):
    assert delta <= float(round_up_delta(delta)) <= 1.01 * delta


@given(st.floats(min_value=0, max_value=1))
def test_a_share_is_never_printed_below_itself(share):
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
def test_epsilon_keeps_two_digits_that_count(value, text):
    assert round_up(value) == text


def test_a_delta_that_is_short_stays_as_the_user_wrote_it():
    assert [round_up_delta(d) for d in (1e-5, 1e-10, 0.25)] == ["1e-05", "1e-10", "0.25"]
    assert round_up_delta(1.0684e-05) == "1.07e-05"


def test_a_percentage_has_one_decimal():
    assert [percent_up(s) for s in (0.0, 0.01, 0.10301, 1.0)] == ["0.0 %", "1.0 %", "10.4 %", "100.0 %"]
