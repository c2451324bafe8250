"""Bugs to plant in the engine, and the context manager that plants one.

A row names the bug, the functions that it replaces, the training run in which it is planted, and the detectors that
must catch it. The rows are in ``bugs_*.py``; ``ordinary_tests.py`` names a test of the suite that fails with each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dpengine.auditing.subject import Maker, small

_DEFAULT = small()


@dataclass(frozen=True)
class Patch:
    """One function of the engine and its replacement.

    Attributes:
        owner: The class or module that holds the function.
        name: The name of the function in ``owner``.
        wrong: ``wrong(original)`` returns the replacement.
    """

    owner: type | ModuleType
    name: str
    wrong: Callable[[Any], Any]


@dataclass(frozen=True)
class Planted:
    """One bug.

    Attributes:
        id: ``"PB-1"`` and so on; an id is never used for another bug.
        what: A short description.
        detectors: Codes of the detectors that catch it. The first one must.
        patches: The functions that it replaces.
        make: Makes the training run in which it is planted.
        instead: For a bug that this engine cannot have: the reason, and the bug that is planted in its place.
    """

    id: str
    what: str
    detectors: tuple[str, ...]
    patches: tuple[Patch, ...]
    make: Maker = _DEFAULT
    instead: str = ""


def module_of(symbol: Any) -> ModuleType:
    """Returns the module that defines a class or function, to patch a global name of that module."""
    return sys.modules[symbol.__module__]


@contextmanager
def planted(bug: Planted) -> Iterator[None]:
    """Plants a bug, and restores the original functions on exit."""
    with ExitStack() as undo:
        for patch in bug.patches:
            original = patch.owner.__dict__[patch.name]
            setattr(patch.owner, patch.name, patch.wrong(original))
            undo.callback(setattr, patch.owner, patch.name, original)
        yield
