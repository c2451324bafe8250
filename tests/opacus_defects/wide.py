"""Interfaces that a test uses: a few always, the others in the slow suite or by night."""

import pytest
from opacus_defects.apis import marks_of

ALWAYS = {"default-auto", "compat-hooks", "compat-ghost"}


def through_some(apis, always=ALWAYS):
    """Parametrizes a test with ``api``; those not named in ``always`` are for the slow suite, or the night."""
    return pytest.mark.parametrize(
        "api", [pytest.param(api, id=api.id, marks=() if api.id in always else marks_of(api)) for api in apis]
    )
