"""Calls a ``collate_fn`` with examples next to different others, to see whether each row depends on one example only.

Examples are compared at the same place, from the same state of the random generators. A function that draws random
numbers is compared for the first example of a batch, whose numbers cannot depend on those of the others.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import pickle
import random
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data.dataloader import default_collate, default_convert

from dpengine.errors import BatchDependentLossError, BatchMismatchError, PrivacyError, notice

from .collate import restored_generators
from .collate_entries import Entry, Sizes, entries, is_order, plain, same

_EXAMPLES = 7  # besides example 0, which is read for the structure of an empty batch
_ROUNDS = 8  # of random numbers
_BATCH, _SMALLER = (0, 1, 2, 3), (0, 1, 2)  # numbers of examples, from the longest to the shortest
_SECOND = (0, 4, 5, 6)
_PAIRS = (  # with the same longest example, so that padding does not change
    (_BATCH, _SECOND),
    (_BATCH, (0, 1, 4, 6)),
    (_BATCH, (0, 4, 2, 5)),
    (_BATCH, (0, 5, 6, 3)),
    (_SECOND, (0, 4, 1, 2)),
    (_SECOND, (0, 1, 5, 2)),
    (_SECOND, (0, 2, 1, 6)),
    ((4, 1, 2, 5), (6, 1, 3, 4)),
)
_OTHER_LENGTHS = ((_BATCH, (4, 1, 2, 5)),)
Rows = tuple[int, ...]


class _Undecided(Exception):
    """It is not known whether examples are mixed; the text is the reason."""


def check_collate(loader: DataLoader[Any], *, batch_first: bool = True) -> None:
    """Raises BatchDependentLossError if ``collate_fn`` changes an example depending on the others of a batch.

    Reads at most 7 examples of the data set and restores the random generators. If it cannot decide, it shows one
    notice.
    """
    if _is_of_torch(loader.collate_fn) or len(loader.dataset) < 2:  # type: ignore[arg-type]
        return
    with restored_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # shown in training
        try:
            _Probe(loader.collate_fn, _read(loader.dataset), 0 if batch_first else 1).run()
            return
        except _Undecided as undecided:
            reason = str(undecided)
    notice(
        "DPE012",
        f"It could not be checked whether {_name(loader.collate_fn)} mixes the examples of a batch: {reason}. Return "
        "one row for each example, made from that example alone, and draw random numbers from torch, random or NumPy.",
        key="collate",
        of=loader,
    )


class _Probe:
    """A ``collate_fn`` and a few examples."""

    def __init__(self, collate: Callable[[list[Any]], Any], examples: list[Any], axis: int):
        self.collate, self.axis, self.name = collate, axis, _name(collate)
        self.examples = sorted(examples, key=_size, reverse=True)
        self.generators = _generators(collate)
        self.smaller: Any = None
        self.whole: set[str] = set()  # paths of values of the batch that depend on its examples
        self.names: set[str] = set()  # paths of texts that are other ones in each call, such as a uuid

    def run(self) -> None:
        """Raises BatchDependentLossError, BatchMismatchError or _Undecided."""
        states = self._states()
        with contextlib.suppress(_Undecided):
            self._call(_SMALLER)
        self._set(states)
        self.generators = _generators(self.collate)  # with those that the first call made
        states = self._states()
        torch.default_generator.manual_seed(0)  # the same result in all processes
        random.seed(0)
        np.random.seed(0)
        try:
            self._run()
        except (PrivacyError, _Undecided):
            # Sizes of examples may not tell which has the longest row, if they are strings for example.
            order = sorted(self.examples, key=self._size_of_row, reverse=True)
            if [*map(id, order)] == [*map(id, self.examples)]:
                raise
            self.examples, self.whole = order, set()
            self._run()
        finally:
            self._set(states)

    def _run(self) -> None:
        states = self._states()
        self.smaller = self._call(_SMALLER)
        before = self._states()
        batch = self._entries(_BATCH)
        drew = self._states() != states
        self._check_rows(batch)
        again = self._from(before, _BATCH)
        self.names = {path for path, entry in batch.items() if path in again and _are_new_names(entry, again[path])}
        if drew:
            self._compare_random()
            return
        for path, entry in batch.items():
            if path in self.names:
                continue
            if path not in again or not same(entry.value, again[path].value):
                if entry.rows is None:
                    continue  # such as a time
                raise _Undecided(f"{path} differs between two calls with the same examples")
        own = {path for path, entry in batch.items() if path in again and same(entry.value, again[path].value)}
        for one, other in _PAIRS:
            self._compare(one, other, own)
        sizes = Sizes(len(_SMALLER), len(_BATCH), self.axis)
        self._match(_BATCH, batch, _SMALLER, entries(self.smaller, self._call(_BATCH), sizes), "constant")
        for one, other in _OTHER_LENGTHS:
            self._compare(one, other, set(), padded="any")
        if self.whole:
            raise _Undecided(f"{min(self.whole)} is one value for the batch that depends on all of its examples")

    def _compare(self, one: Rows, other: Rows, own: set[str], *, padded: str = "constant") -> None:
        """Raises if the row of an example differs next to other examples."""
        first, second = self._entries(one), self._entries(other)
        self._match(one, first, other, second, padded)
        sizes = {size for entry in (*first.values(), *second.values()) for size in _shape(entry.value)}
        for path in own:
            values = [found[path].value for found in (first, second) if path in found and found[path].rows is None]
            if len(values) == 2 and not same(*values) and not all(_is_one_of(value, sizes) for value in values):
                self.whole.add(path)

    def _match(self, one: Rows, first: dict[str, Entry], other: Rows, second: dict[str, Entry], padded: str) -> None:
        """Compares the rows of common examples, at the same place or, if the batch is sorted, at any place."""
        paths = self._common(first, second)
        one, other = self._numbers(one), self._numbers(other)
        shared = [i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a == b]
        differ = self._differing(paths, first, second, shared, padded)
        if differ is None:
            return
        free = [path for path in paths if not (is_order(first[path]) and is_order(second[path]))]
        left = list(range(len(other)))
        for i in range(len(one)):
            at = (j for j in left if all(same(first[p].row(i), second[p].row(j), padded=padded) for p in free))
            if (j := next(at, None)) is not None:
                left.remove(j)
        common = sum((Counter(one) & Counter(other)).values())
        if len(other) - len(left) < common:
            if padded == "any" and any(_shape(first[path].value) != _shape(second[path].value) for path in first):
                raise _Undecided(f"{differ} changes with the length of the longest example")
            raise self._mixes(differ)

    @staticmethod
    def _differing(
        paths: list[str], first: dict[str, Entry], second: dict[str, Entry], places: Iterable[int], padded: str
    ) -> str | None:
        """Returns the path of an entry with another row at one of these places."""
        for path in paths:
            if not all(same(first[path].row(i), second[path].row(i), padded=padded) for i in places):
                return path
        return None

    def _compare_random(self) -> None:
        """Compares the first example of batches, and examples next to others in another order."""
        for turn in range(_ROUNDS):
            first = turn % min(len(self.examples), _EXAMPLES)
            rest = [i for i in range(1, len(self.examples)) if i != first] or [first]
            rest = [rest[i % len(rest)] for i in range(4)]
            one, other = (first, 0, rest[0], rest[1]), (first, rest[2], rest[3], 0)
            states = self._states()
            found, beside = self._from(states, one), self._from(states, other)
            paths = self._common(found, beside)
            differ = [self._differing(paths, found, beside, [i], "constant") for i in range(len(one))]
            if None not in differ:
                turned = self._from(states, (*one[:2], *one[:1:-1]))
                if one[2] != one[3] and self._differing(paths, found, turned, range(len(one)), "") is None:
                    raise _Undecided("it sorts examples and draws random numbers for them")
                raise self._mixes(str(differ[0]))
        for last in range(1, len(self.examples)):
            if not any(self._keeps_last(last) for _ in range(_ROUNDS)):
                raise _Undecided("its random numbers for an example depend on the examples before it")

    def _keeps_last(self, last: int) -> bool:
        """Returns True if the last example has the same row after the same examples in another order."""
        states = self._states()
        rest = [i for i in range(1, len(self.examples)) if i != last] or [0]
        before = (0, rest[0], rest[-1])
        found, turned = (self._from(states, (*order, last)) for order in (before, (before[2], *before[:2])))
        paths = self._common(found, turned)
        return any(self._differing(paths, found, turned, [i], "constant") is None for i in range(len(_BATCH)))

    def _from(self, states: list[bytes], numbers: Rows) -> dict[str, Entry]:
        self._set(states)
        return self._entries(numbers)

    def _states(self) -> list[bytes]:
        return [pickle.dumps(get()) for get, _ in self.generators]

    def _set(self, states: list[bytes]) -> None:
        for (_, put), state in zip(self.generators, states, strict=True):
            put(pickle.loads(state))

    def _check_rows(self, batch: dict[str, Entry]) -> None:
        """Raises if the batch has no entry with a row for each example."""
        if any(entry.rows is not None for entry in batch.values()):
            return
        fewer = entries(self.smaller, self.smaller, Sizes(-1, -1, self.axis))
        for path, entry in batch.items():
            if path in fewer and entry.size != fewer[path].size:
                raise self._other_number(path, entry.size, len(_BATCH))
        raise _Undecided("no entry of the batch has a row for each example")

    def _common(self, first: dict[str, Entry], second: dict[str, Entry]) -> list[str]:
        """Returns the paths of entries with rows. Raises if one has rows in one of two batches only."""
        if first.keys() != second.keys():
            raise _Undecided("batches have different entries")
        for path, entry in first.items():
            if (entry.rows is None) is not (second[path].rows is None):
                wrong = entry if entry.rows is None else second[path]
                raise self._other_number(path, wrong.size, len(_BATCH))
        return [path for path, entry in first.items() if entry.rows is not None and path not in self.names]

    def _other_number(self, path: str, rows: int | None, examples: int) -> BatchMismatchError:
        return BatchMismatchError(
            f"{self.name} returned {rows} rows in {path} for {examples} examples. The engine clips one row for each "
            "example that was drawn.",
            fix="Return one row for each example in the axis of the batch: repeat views and leave out bad examples in "
            "the data set instead.",
        )

    def _mixes(self, path: str) -> BatchDependentLossError:
        return BatchDependentLossError(
            f"{self.name} changes an example depending on the others of its batch: the row of an example in {path} "
            "was not the same beside other examples.",
            fix="Make each row from its own example alone: replace statistics of the batch by constants, and leave out "
            "mixup and stand-ins for bad examples.",
        )

    def _numbers(self, numbers: Rows) -> Rows:
        return tuple(number % len(self.examples) for number in numbers)

    def _entries(self, numbers: Rows) -> dict[str, Entry]:
        return entries(self._call(numbers), self.smaller, Sizes(len(_BATCH), len(_SMALLER), self.axis))

    def _call(self, numbers: Rows) -> Any:
        """Returns the batch of copies of these examples."""
        try:
            return self.collate([_copied(self.examples[number]) for number in self._numbers(numbers)])
        except Exception as error:
            raise _Undecided(f"a call with {len(numbers)} examples raised {type(error).__name__}") from error

    def _size_of_row(self, example: Any) -> int:
        try:
            return _size(self.collate([_copied(example)]))
        except Exception:
            return _size(example)


def _is_of_torch(collate: Any) -> bool:
    """Returns True for the functions of torch, unless the user registered functions for classes of their own."""
    if collate is default_convert:
        return True
    ours = torch_collate.default_collate_fn_map.values()
    return collate is default_collate and all(function.__module__ == torch_collate.__name__ for function in ours)


def _are_new_names(entry: Entry, again: Entry) -> bool:
    """Returns True for texts that differ between equal calls. The check of the loop names texts that are used."""
    texts = entry.rows is not None and all(isinstance(row, (str, bytes, uuid.UUID, os.PathLike)) for row in entry.rows)
    return texts and not same(entry.value, again.value)


def _name(collate: Any) -> str:
    return f"collate_fn={getattr(collate, '__qualname__', type(collate).__qualname__)}"


def _read(dataset: Any) -> list[Any]:
    """Returns a few examples, as a loader reads them."""
    rows, count = len(dataset), min(len(dataset), _EXAMPLES)
    indices = [i * (rows - 1) // (count - 1) for i in range(count)]
    try:
        if hasattr(dataset, "__getitems__"):
            return list(dataset.__getitems__(indices))
        return [dataset[i] for i in indices]
    except Exception as error:
        raise _Undecided(f"examples of {type(dataset).__name__} cannot be read ({type(error).__name__})") from error


def _copied(example: Any) -> Any:
    """Returns a copy of an example. A copy of a view would otherwise copy the whole data set with it."""
    tensors = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]
    return copy.deepcopy(example, {id(tensor): tensor.clone() for tensor in tensors})


def _size(value: Any, depth: int = 4) -> int:
    """Returns the number of values in an example."""
    value = plain(value)
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, (str, bytes)) or not depth:
        return len(value) if isinstance(value, (str, bytes)) else 1
    if isinstance(value, dict):
        value = list(value.values())
    return sum(_size(one, depth - 1) for one in value) if isinstance(value, (list, tuple)) else 1


def _shape(value: Any) -> Sequence[int]:
    return value.shape if isinstance(value, Tensor) else [len(value)] if isinstance(value, (list, tuple)) else []


def _is_one_of(value: Any, sizes: set[int]) -> bool:
    """Returns True for a number that is the size of an axis, such as the length of the longest example."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return isinstance(value, (int, float)) and value in sizes


Generator = tuple[Callable[[], Any], Callable[[Any], Any]]


@functools.cache
def _of_kinds() -> dict[type, Callable[[Any], Generator]]:
    """Returns how the states of generators are read and written. Loads NumPy's, which importing it does not."""
    return {
        # As arrays, because equal tensors may differ when they are pickled.
        torch.Generator: lambda one: (
            lambda: one.get_state().numpy(),
            lambda state: one.set_state(torch.from_numpy(state.copy())),
        ),
        random.Random: lambda one: (one.getstate, one.setstate),
        np.random.RandomState: lambda one: (one.get_state, one.set_state),
        np.random.Generator: lambda one: (
            lambda: one.bit_generator.state,
            lambda state: setattr(one.bit_generator, "state", state),
        ),
    }


def _generators(collate: Any) -> list[Generator]:
    """Returns functions that read and write the states of the generators of the process, and of the function's own."""
    kinds, seen = _of_kinds(), {id(torch.default_generator): torch.default_generator}
    _reach(collate, seen, depth=3)
    return [
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
        *(kinds[type(value)](value) for value in seen.values() if type(value) in kinds),
    ]


def _reach(value: Any, seen: dict[int, Any], depth: int) -> None:
    """Adds a function and the values that it can use: attributes, arguments, and variables from outside."""
    if id(value) in seen or value is None or inspect.ismodule(value):
        return
    seen[id(value)] = value
    if not depth or isinstance(value, (Tensor, str, bytes, type)):
        return
    used = [*getattr(value, "__dict__", {}).values(), getattr(value, "__self__", None)]
    if isinstance(value, functools.partial):
        used += [value.func, *value.args, *value.keywords.values()]
    if inspect.isfunction(value):
        with contextlib.suppress(ValueError):  # of a variable that is not set yet
            outside = inspect.getclosurevars(value)
            used += [*outside.nonlocals.values(), *outside.globals.values()]
    for one in used:
        _reach(one, seen, depth - 1)
