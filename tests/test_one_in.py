"""The mark ``one_in``, which leaves most cases of a long table to the slow or the nightly suite."""

import pytest

LETTERS, NUMBERS = "abcd", range(6)


@pytest.mark.one_in(6, "letter", "number", others="slow")
@pytest.mark.one_in(3, "letter", "number")
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("letter", LETTERS)
def test_the_other_cases_are_slow_or_nightly(request, letter, number):
    place = LETTERS.index(letter) + number
    assert (request.node.get_closest_marker("nightly") is not None) == (place % 3 > 0)
    assert (request.node.get_closest_marker("slow") is not None) == (place % 6 > 0)
