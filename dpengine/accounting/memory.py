"""Results that are kept while they fit into an amount of memory, the least recently used given up first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Memory(Generic[V]):
    """Keeps results.

    Args:
        most_bytes: Of all that is kept. A result that is larger than all of it is not kept.
        bytes_of: How much a result takes.
    """

    def __init__(self, most_bytes: int, bytes_of: Callable[[V], int]):
        self._most, self._bytes_of = most_bytes, bytes_of
        self._kept: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._taken = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Returns what is kept under ``key``, or makes it."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
        made = make()
        size = self._bytes_of(made)
        with self._lock:
            if size <= self._most and key not in self._kept:
                self._kept[key] = made, size
                self._taken += size
            while self._taken > self._most:
                self._taken -= self._kept.popitem(last=False)[1][1]
        return made

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._kept.clear()
            self._taken = 0
