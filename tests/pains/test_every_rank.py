"""No pain of the list is left out: every rank has a test of its name."""

import re
from pathlib import Path

RANKS = range(1, 66)
NAMED = re.compile(r"^def test_rank_(\d\d)_\w+\(", re.MULTILINE)


def ranks_in(text: str) -> set[int]:
    """The ranks that test functions of this source are named by."""
    return {int(rank) for rank in NAMED.findall(text)}


def test_every_rank_has_a_test_and_every_test_a_rank():
    found = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        found |= ranks_in(path.read_text())
    assert found == set(RANKS), sorted(found ^ set(RANKS))


def test_ranks_are_read_from_names_of_test_functions_alone():
    text = "def test_rank_07_a(door):\n# def test_rank_08_b():\n    def test_rank_09_c():\nx = 'test_rank_10_d('\n"
    assert ranks_in(text) == {7}
