"""The mark ``one_in``, which leaves most cases of a long table to the night."""

import pytest

LETTERS, NUMBERS = "abcd", range(6)


@pytest.mark.one_in(3, "letter", "number")
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("letter", LETTERS)
def test_cases_that_are_left_have_the_mark_of_the_night(request, letter, number):
    by_night = (LETTERS.index(letter) + number) % 3 > 0
    assert (request.node.get_closest_marker("nightly") is not None) == by_night
