"""Misspelt keywords: a ``TypeError`` that names the nearest argument."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

C = TypeVar("C", bound=Callable[..., Any])


def suggests_names(target: C) -> C:
    """Makes a public function or class answer an unknown keyword with the nearest one that it knows."""
    if isinstance(target, type):
        target.__init__ = _checked(target.__init__, target.__qualname__)  # type: ignore[misc]
        return target
    return _checked(target, target.__qualname__)


def refuse_unknown(called: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Refuses keywords that are not known.

    Args:
        called: What was called.
        names: The keywords.
        known: All that it takes.

    Raises:
        TypeError: If one is not known, with the nearest that is.
    """
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" It takes: {', '.join(known) or 'none'}."
            raise TypeError(f"{called}() has no argument {name!r}.{hint}")


def _checked(function: Any, called: str) -> Any:
    known = [p.name for p in inspect.signature(function).parameters.values() if p.name != "self"]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        refuse_unknown(called, kwargs, known)
        return function(*args, **kwargs)

    return checked
