"""The history as a list that writes through: what is added is charged, what is changed replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Keeper(Protocol):
    """Holder of the charges behind a history."""

    def _entries(self) -> list[Any]: ...

    def _add(self, entries: Iterable[Any]) -> None: ...

    def _replace(self, entries: Iterable[Any]) -> None: ...


class History(list):
    """Triples ``(noise_multiplier, sample_rate, steps)``, always those of the accountant's ledger.

    ``append``, ``extend`` and ``+=`` charge the ledger. All else that changes a list gives the accountant a ledger of
    its own with the changed content: a ledger never forgets.

    Args:
        keeper: The accountant.
    """

    def __init__(self, keeper: Keeper):
        super().__init__()
        self._keeper = keeper
        self._refresh()

    def append(self, entry: Any, /) -> None:
        """Charges one entry; ``ValueError`` if it is none."""
        self.extend([entry])

    def extend(self, entries: Iterable[Any], /) -> None:
        """Charges entries; ``ValueError`` if one of them is none, and then none is charged."""
        self._keeper._add(list(entries))
        self._refresh()

    def __iadd__(self, entries: Iterable[Any]) -> History:  # type: ignore[override, misc]
        self.extend(entries)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, ([tuple(entry) for entry in self],)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return [tuple(entry) for entry in self]

    def _refresh(self) -> None:
        list.__setitem__(self, slice(None), self._keeper._entries())


def _reading(name: str) -> Callable[..., Any]:
    own = getattr(list, name)

    def read(self: History, *args: Any) -> Any:
        self._refresh()
        return own(self, *args)

    return _named(read, name)


def _changing(name: str) -> Callable[..., Any]:
    own = getattr(list, name)

    def change(self: History, *args: Any, **kwargs: Any) -> Any:
        changed = self._keeper._entries()
        result = own(changed, *args, **kwargs)
        self._keeper._replace(changed)
        self._refresh()
        return self if name == "__imul__" else result

    return _named(change, name)


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    function.__name__, function.__qualname__ = name, f"History.{name}"
    function.__doc__ = getattr(list, name).__doc__
    return function


_READING = (
    *("__getitem__", "__len__", "__iter__", "__reversed__", "__contains__", "__eq__", "__ne__", "__repr__"),
    *("__add__", "__mul__", "__rmul__", "__lt__", "__le__", "__gt__", "__ge__", "copy", "count", "index"),
)
_CHANGING = ("__setitem__", "__delitem__", "__imul__", "insert", "pop", "remove", "clear", "sort", "reverse")

for _name in _READING:
    setattr(History, _name, _reading(_name))
for _name in _CHANGING:
    setattr(History, _name, _changing(_name))
