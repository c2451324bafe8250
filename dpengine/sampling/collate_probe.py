"""Checks whether each row that a ``collate_fn`` returns depends on one example only.

The function is called with batches that have some examples in common. The rows of a common example at the same position
are compared. If the function draws random numbers, each call starts from the same state of the generators, and the
first examples of batches are compared, because their random numbers cannot depend on later examples.
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
from .collate_entries import Entry, Sizes, entries, is_order, same, to_standard_types

_EXAMPLES = 7  # number of examples that are read
_ROUNDS = 8  # number of comparisons of a function that draws random numbers
_BATCH, _SMALLER = (0, 1, 2, 3), (0, 1, 2)  # indices of examples, sorted from the longest to the shortest
_SECOND = (0, 4, 5, 6)
_PAIRS = (  # batches with a common longest example, so that the padded length is equal
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
Indices = tuple[int, ...]
Entries = dict[str, Entry]


class _Undecided(Exception):
    """Raised if the check is inconclusive. The message is the reason."""


def check_collate(loader: DataLoader[Any], *, batch_first: bool = True) -> None:
    """Raises BatchDependentLossError if ``collate_fn`` changes an example depending on other examples of the batch.

    Reads at most 7 examples of the data set, and restores the random generators. Warns once if the check is
    inconclusive.
    """
    if _is_torch_function(loader.collate_fn) or len(loader.dataset) < 2:  # type: ignore[arg-type]
        return
    with restored_generators(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they will be repeated in training
        try:
            _Probe(loader.collate_fn, _read(loader.dataset), 0 if batch_first else 1).run()
            return
        except _Undecided as undecided:
            reason = str(undecided)
    notice(
        "DPE012",
        f"It could not be checked whether {_name(loader.collate_fn)} mixes the examples of a batch: {reason}. Return "
        "one row for each example, computed from that example alone, and draw random numbers from torch, random or "
        "NumPy.",
        key="collate",
        of=loader,
    )


class _Probe:
    """Compares the batches that a ``collate_fn`` returns for a few examples."""

    def __init__(self, collate: Callable[[list[Any]], Any], examples: list[Any], axis: int):
        self.collate, self.axis, self.name = collate, axis, _name(collate)
        self.examples = sorted(examples, key=_size, reverse=True)
        self.generators = _generators(collate)
        self.smaller: Any = None  # result for the smaller batch
        self.statistics: set[str] = set()  # paths of values without rows that depend on the examples
        self.unstable: set[str] = set()  # paths of strings that differ in each call, such as a UUID

    def run(self) -> None:
        """Raises BatchDependentLossError, BatchMismatchError or _Undecided."""
        states = self._states()
        with contextlib.suppress(_Undecided):
            self._call(_SMALLER)
        self._restore(states)
        self.generators = _generators(self.collate)  # includes generators that the first call created
        states = self._states()
        torch.default_generator.manual_seed(0)  # the same result in all processes
        random.seed(0)
        np.random.seed(0)
        try:
            self._run()
        except (PrivacyError, _Undecided):
            # The longest example may not have the longest row, for example if examples are strings. So sort by row.
            order = sorted(self.examples, key=self._size_of_row, reverse=True)
            if [*map(id, order)] == [*map(id, self.examples)]:
                raise
            self.examples, self.statistics = order, set()
            self._run()
        finally:
            self._restore(states)

    def _run(self) -> None:
        states = self._states()
        self.smaller = self._call(_SMALLER)
        before = self._states()
        batch = self._entries(_BATCH)
        drew_random = self._states() != states
        self._check_rows(batch)
        repeat = self._entries_from(before, _BATCH)
        self.unstable = {path for path, entry in batch.items() if path in repeat and _are_unstable(entry, repeat[path])}
        if drew_random:
            self._compare_random()
            return
        for path, entry in batch.items():
            if path in self.unstable:
                continue
            if path not in repeat or not same(entry.value, repeat[path].value):
                if entry.rows is None:
                    continue  # for example the current time
                raise _Undecided(f"{path} differs between two calls with the same examples")
        repeatable = {path for path, entry in batch.items() if path in repeat and same(entry.value, repeat[path].value)}
        for indices, other_indices in _PAIRS:
            self._compare(indices, other_indices, repeatable)
        sizes = Sizes(len(_SMALLER), len(_BATCH), self.axis)
        self._match(_BATCH, batch, _SMALLER, entries(self.smaller, self._call(_BATCH), sizes), "constant")
        for indices, other_indices in _OTHER_LENGTHS:
            self._compare(indices, other_indices, set(), padded="any")
        if self.statistics:
            raise _Undecided(f"{min(self.statistics)} is one value for the batch that depends on all of its examples")

    def _compare(
        self, indices: Indices, other_indices: Indices, repeatable: set[str], *, padded: str = "constant"
    ) -> None:
        """Raises if the row of an example depends on the other examples of its batch.

        ``repeatable`` contains the paths of values that are equal in two calls with the same examples. ``padded`` is
        the allowed difference in padding, as for `same`.
        """
        first, second = self._entries(indices), self._entries(other_indices)
        self._match(indices, first, other_indices, second, padded)
        sizes = {size for entry in (*first.values(), *second.values()) for size in _shape(entry.value)}
        for path in repeatable:
            values = [batch[path].value for batch in (first, second) if path in batch and batch[path].rows is None]
            if len(values) == 2 and not same(*values) and not all(_is_size(value, sizes) for value in values):
                self.statistics.add(path)

    def _match(self, indices: Indices, first: Entries, other_indices: Indices, second: Entries, padded: str) -> None:
        """Compares the rows of common examples, at any position if the function sorts. For ``padded``, see `same`."""
        paths = self._paths_with_rows(first, second)
        indices, other_indices = self._wrap(indices), self._wrap(other_indices)
        same_positions = [i for i, (a, b) in enumerate(zip(indices, other_indices, strict=False)) if a == b]
        differing_path = self._first_difference(paths, first, second, same_positions, padded)
        if differing_path is None:
            return
        compared = [path for path in paths if not (is_order(first[path]) and is_order(second[path]))]
        unmatched = list(range(len(other_indices)))
        for i in range(len(indices)):
            matches = (
                j for j in unmatched if all(same(first[p].row(i), second[p].row(j), padded=padded) for p in compared)
            )
            if (match := next(matches, None)) is not None:
                unmatched.remove(match)
        common = sum((Counter(indices) & Counter(other_indices)).values())
        if len(other_indices) - len(unmatched) < common:
            if padded == "any" and any(_shape(first[path].value) != _shape(second[path].value) for path in first):
                raise _Undecided(f"{differing_path} changes with the length of the longest example")
            raise self._mixing_error(differing_path)

    @staticmethod
    def _first_difference(
        paths: list[str], first: Entries, second: Entries, positions: Iterable[int], padded: str
    ) -> str | None:
        """Returns the first path whose rows differ at a position in ``positions``; None if there is none."""
        for path in paths:
            if not all(same(first[path].row(i), second[path].row(i), padded=padded) for i in positions):
                return path
        return None

    def _compare_random(self) -> None:
        """Checks that first rows do not depend on later examples, and last rows not on the order of earlier ones."""
        for number in range(_ROUNDS):
            first = number % min(len(self.examples), _EXAMPLES)
            rest = [i for i in range(1, len(self.examples)) if i != first] or [first]
            a, b, c, d = (rest[i % len(rest)] for i in range(4))
            indices, other_indices = (first, 0, a, b), (first, c, d, 0)
            states = self._states()
            batch, other = self._entries_from(states, indices), self._entries_from(states, other_indices)
            paths = self._paths_with_rows(batch, other)
            differing = [self._first_difference(paths, batch, other, [i], "constant") for i in range(len(indices))]
            if None not in differing:
                reordered = self._entries_from(states, (*indices[:2], *indices[:1:-1]))
                is_sorted = self._first_difference(paths, batch, reordered, range(len(indices)), "") is None
                if a != b and is_sorted:
                    raise _Undecided("it sorts examples and draws random numbers for them")
                raise self._mixing_error(str(differing[0]))
        for last in range(1, len(self.examples)):
            if not any(self._keeps_last(last) for _ in range(_ROUNDS)):
                raise _Undecided("its random numbers for an example depend on the examples before it")

    def _keeps_last(self, last: int) -> bool:
        """Returns True if the row of the last example is the same after earlier examples are reordered."""
        states = self._states()
        rest = [i for i in range(1, len(self.examples)) if i != last] or [0]
        before = (0, rest[0], rest[-1])
        batch, reordered = (self._entries_from(states, (*order, last)) for order in (before, (before[2], *before[:2])))
        paths = self._paths_with_rows(batch, reordered)
        return any(self._first_difference(paths, batch, reordered, [i], "constant") is None for i in range(len(_BATCH)))

    def _entries_from(self, states: list[bytes], indices: Indices) -> Entries:
        self._restore(states)
        return self._entries(indices)

    def _states(self) -> list[bytes]:
        return [pickle.dumps(get()) for get, _ in self.generators]

    def _restore(self, states: list[bytes]) -> None:
        for (_, put), state in zip(self.generators, states, strict=True):
            put(pickle.loads(state))

    def _check_rows(self, batch: Entries) -> None:
        """Raises if the batch has no entry with one row per example."""
        if any(entry.rows is not None for entry in batch.values()):
            return
        smaller_entries = entries(self.smaller, self.smaller, Sizes(-1, -1, self.axis))
        for path, entry in batch.items():
            if path in smaller_entries and entry.size != smaller_entries[path].size:
                raise self._row_count_error(path, entry.size, len(_BATCH))
        raise _Undecided("no entry of the batch has a row for each example")

    def _paths_with_rows(self, first: Entries, second: Entries) -> list[str]:
        """Returns the paths of entries with rows. Raises if an entry has rows in only one of the batches."""
        if first.keys() != second.keys():
            raise _Undecided("batches have different entries")
        for path, entry in first.items():
            if (entry.rows is None) is not (second[path].rows is None):
                unsplit = entry if entry.rows is None else second[path]
                raise self._row_count_error(path, unsplit.size, len(_BATCH))
        return [path for path, entry in first.items() if entry.rows is not None and path not in self.unstable]

    def _row_count_error(self, path: str, rows: int | None, examples: int) -> BatchMismatchError:
        return BatchMismatchError(
            f"{self.name} returned {rows} rows in {path} for {examples} examples; per-example clipping requires "
            "exactly one row per example.",
            fix="Create augmented views and drop invalid examples in the data set, not in collate_fn.",
        )

    def _mixing_error(self, path: str) -> BatchDependentLossError:
        return BatchDependentLossError(
            f"{self.name} changes an example depending on other examples of the batch: the row of an example in {path} "
            "was not the same in another batch.",
            fix="Compute each row from its own example alone: replace statistics of the batch by constants, and do not "
            "use mixup or replace bad examples by others.",
        )

    def _wrap(self, indices: Indices) -> Indices:
        """Returns the indices modulo the number of examples."""
        return tuple(index % len(self.examples) for index in indices)

    def _entries(self, indices: Indices) -> Entries:
        return entries(self._call(indices), self.smaller, Sizes(len(_BATCH), len(_SMALLER), self.axis))

    def _call(self, indices: Indices) -> Any:
        """Returns the batch that the function returns for copies of the examples."""
        try:
            return self.collate([_copied(self.examples[index]) for index in self._wrap(indices)])
        except Exception as error:
            raise _Undecided(f"a call with {len(indices)} examples raised {type(error).__name__}") from error

    def _size_of_row(self, example: Any) -> int:
        try:
            return _size(self.collate([_copied(example)]))
        except Exception:
            return _size(example)


def _is_torch_function(collate: Any) -> bool:
    """Returns True for the collate functions of torch, unless the user registered functions for other classes."""
    if collate is default_convert:
        return True
    functions = torch_collate.default_collate_fn_map.values()
    return collate is default_collate and all(function.__module__ == torch_collate.__name__ for function in functions)


def _are_unstable(entry: Entry, repeat: Entry) -> bool:
    """Returns True for strings that differ between equal calls. `check_loop` reports loops that use them."""
    if entry.rows is None or not all(isinstance(row, (str, bytes, uuid.UUID, os.PathLike)) for row in entry.rows):
        return False
    return not same(entry.value, repeat.value)


def _name(collate: Any) -> str:
    return f"collate_fn={getattr(collate, '__qualname__', type(collate).__qualname__)}"


def _read(dataset: Any) -> list[Any]:
    """Returns a few examples, read in the same way as a DataLoader reads them."""
    count = min(len(dataset), _EXAMPLES)
    indices = [i * (len(dataset) - 1) // (count - 1) for i in range(count)]
    try:
        if hasattr(dataset, "__getitems__"):
            return list(dataset.__getitems__(indices))
        return [dataset[i] for i in indices]
    except Exception as error:
        raise _Undecided(f"examples of {type(dataset).__name__} cannot be read ({type(error).__name__})") from error


def _copied(example: Any) -> Any:
    """Returns a copy of an example. Tensors are cloned, because ``deepcopy`` of a view copies its complete storage."""
    tensors = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor)]
    return copy.deepcopy(example, {id(tensor): tensor.clone() for tensor in tensors})


def _size(value: Any, depth: int = 4) -> int:
    """Returns the number of values in an example."""
    value = to_standard_types(value)
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, (str, bytes)) or not depth:
        return len(value) if isinstance(value, (str, bytes)) else 1
    if isinstance(value, dict):
        value = list(value.values())
    return sum(_size(item, depth - 1) for item in value) if isinstance(value, (list, tuple)) else 1


def _shape(value: Any) -> Sequence[int]:
    return value.shape if isinstance(value, Tensor) else [len(value)] if isinstance(value, (list, tuple)) else []


def _is_size(value: Any, sizes: set[int]) -> bool:
    """Returns True for a number that equals the size of an axis, such as the length of the longest example."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return isinstance(value, (int, float)) and value in sizes


Generator = tuple[Callable[[], Any], Callable[[Any], Any]]


@functools.cache
def _state_functions() -> dict[type, Callable[[Any], Generator]]:
    """Returns the functions that read and write the states of each type of generator. Loads ``numpy.random``."""
    return {
        # States are arrays, because the pickled bytes of equal tensors may differ.
        torch.Generator: lambda generator: (
            lambda: generator.get_state().numpy(),
            lambda state: generator.set_state(torch.from_numpy(state.copy())),
        ),
        random.Random: lambda generator: (generator.getstate, generator.setstate),
        np.random.RandomState: lambda generator: (generator.get_state, generator.set_state),
        np.random.Generator: lambda generator: (
            lambda: generator.bit_generator.state,
            lambda state: setattr(generator.bit_generator, "state", state),
        ),
    }


def _generators(collate: Any) -> list[Generator]:
    """Returns functions that read and write the states of the global generators, and of those that ``collate`` uses."""
    functions, reachable = _state_functions(), {id(torch.default_generator): torch.default_generator}
    _add_reachable(collate, reachable, depth=3)
    return [
        (random.getstate, random.setstate),
        (np.random.get_state, np.random.set_state),
        *(functions[type(value)](value) for value in reachable.values() if type(value) in functions),
    ]


def _add_reachable(value: Any, reachable: dict[int, Any], depth: int) -> None:
    """Adds a value and the values that it can use, by id: attributes, bound arguments and outer variables."""
    if id(value) in reachable or value is None or inspect.ismodule(value):
        return
    reachable[id(value)] = value
    if not depth or isinstance(value, (Tensor, str, bytes, type)):
        return
    used = [*getattr(value, "__dict__", {}).values(), getattr(value, "__self__", None)]
    if isinstance(value, functools.partial):
        used += [value.func, *value.args, *value.keywords.values()]
    if inspect.isfunction(value):
        with contextlib.suppress(ValueError):  # raised for a variable that is not set yet
            closure = inspect.getclosurevars(value)
            used += [*closure.nonlocals.values(), *closure.globals.values()]
    for item in used:
        _add_reachable(item, reachable, depth - 1)
