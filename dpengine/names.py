"""Misspelt keywords: a ``TypeError`` that names the nearest argument."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def suggests_names(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a public function answer an unknown keyword with the nearest one that it knows."""
    known = [p.name for p in inspect.signature(function).parameters.values() if p.name != "self"]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else f" It takes: {', '.join(known)}."
                raise TypeError(f"{function.__qualname__}() has no argument {name!r}.{hint}")
        return function(*args, **kwargs)

    return checked
