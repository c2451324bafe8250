"""History of an accountant as a list. New entries are charged to the ledger; other changes replace the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol


class HistoryOwner(Protocol):
    """Accountant whose charges a history lists."""

    def _entries(self) -> list[Any]: ...

    def _add(self, entries: Iterable[Any]) -> None: ...

    def _replace(self, entries: Iterable[Any]) -> None: ...


class History(list):
    """Triples ``(noise_multiplier, sample_rate, steps)`` of the accountant's current ledger.

    ``append``, ``extend`` and ``+=`` charge the ledger. Other changes give the accountant a new ledger with the changed
    content, because charges cannot be removed from a ledger.

    Args:
        owner: The accountant.
    """

    def __init__(self, owner: HistoryOwner):
        super().__init__()
        self._owner = owner
        self._refresh()

    def append(self, entry: Any, /) -> None:
        """Charges one entry. Raises ValueError if it is invalid."""
        self.extend([entry])

    def extend(self, entries: Iterable[Any], /) -> None:
        """Charges all entries; if one is invalid, raises ValueError and charges none."""
        self._owner._add(list(entries))
        self._refresh()

    def __iadd__(self, entries: Iterable[Any]) -> History:  # type: ignore[override, misc]
        self.extend(entries)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, ([tuple(entry) for entry in self],)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return [tuple(entry) for entry in self]

    def _refresh(self) -> None:
        list.__setitem__(self, slice(None), self._owner._entries())


def _reading(name: str) -> Callable[..., Any]:
    list_method = getattr(list, name)

    def read(self: History, *args: Any) -> Any:
        self._refresh()
        return list_method(self, *args)

    return _named(read, name)


def _changing(name: str) -> Callable[..., Any]:
    list_method = getattr(list, name)

    def change(self: History, *args: Any, **kwargs: Any) -> Any:
        changed = self._owner._entries()
        result = list_method(changed, *args, **kwargs)
        self._owner._replace(changed)
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
