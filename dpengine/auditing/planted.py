"""Bugs to plant in the real engine, one at a time, to see that they are caught.

A bug is a row: what it is, which functions it replaces while it is planted, what it is planted under, and the detectors
that must catch it. The rows are in the files ``bugs_*.py``; ``ordinary_tests.py`` has a test for each that fails too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from .built_in import small
from .subject import Maker

_USUAL = small()


@dataclass(frozen=True)
class Patch:
    """One function of the engine, replaced.

    Attributes:
        target: ``"package.module:Class.function"``.
        wrong: ``wrong(original)`` is what takes its place.
    """

    target: str
    wrong: Callable[[Any], Any]


@dataclass(frozen=True)
class Planted:
    """One bug.

    Attributes:
        id: ``"PB-1"`` and so on; never used again.
        what: A few words.
        detectors: Codes of those that catch it, the first of which must.
        patches: What it replaces.
        make: What it is planted under.
        instead: Where the bug cannot be in this engine: why, and what is planted in its place.
    """

    id: str
    what: str
    detectors: tuple[str, ...]
    patches: tuple[Patch, ...]
    make: Maker = _USUAL
    instead: str = ""


@contextmanager
def planted(bug: Planted) -> Iterator[None]:
    """Plants a bug, and takes it out again."""
    with ExitStack() as undo:
        for patch in bug.patches:
            owner, name = _owner_of(patch.target)
            original = owner.__dict__[name]
            setattr(owner, name, patch.wrong(original))
            undo.callback(setattr, owner, name, original)
        yield


def _owner_of(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    return owner, name
