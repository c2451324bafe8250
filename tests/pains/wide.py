"""Which doors a test goes through: a few always, the others in the slow suite."""

import pytest

ALWAYS = {"default-auto", "compat-hooks", "compat-ghost"}


def through_some(doors, always=ALWAYS):
    """Parametrizes a test with ``door``; all doors but those named in ``always`` are for the slow suite."""
    marks = {True: (), False: pytest.mark.slow}
    return pytest.mark.parametrize(
        "door", [pytest.param(door, id=door.id, marks=marks[door.id in always]) for door in doors]
    )
