"""Interfaces that a test uses: a few always, the others in the slow suite or by night."""

import pytest
from pains.doors import marks_of

ALWAYS = {"default-auto", "compat-hooks", "compat-ghost"}


def through_some(doors, always=ALWAYS):
    """Parametrizes a test with ``door``; those not named in ``always`` are for the slow suite, or the night."""
    return pytest.mark.parametrize(
        "door", [pytest.param(door, id=door.id, marks=() if door.id in always else marks_of(door)) for door in doors]
    )
