"""Chooses the method for each parameter's norms and clipped sum, by timing, within a memory budget.

The choice depends on shapes and clocks only, not on data. Estimates from shapes exclude slow methods, and decide alone
if the possible gain is small. The other methods are timed once for each kind of call, on random numbers, norm and
clipped sum together. Times are cached by a signature in which the sizes of batches and sequences are rounded, because
Poisson sampling changes them in every step.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture.record import LayerCall
from dpengine.grad_samplers.machine import memory_for, operations_per_byte, operations_per_second
from dpengine.grad_samplers.sampler import Cost
from dpengine.grad_samplers.tied import tied_cost

from .entry import Entry, Scratch
from .flat_buffer import FlatBuffer, wide
from .method import KEEP, Choice, Method, Way
from .rows import in_rows, shapes_of, some_rows
from .stacks import bucket_of

KEEP_BUDGET = 512 * 2**20  # maximum bytes of kept per-sample gradients, over all parameters
_MOST_KEPT = 16 * 2**30  # the same on a GPU, whose default is 1/32 of its memory
_HOPELESS = 4.0  # multiple of the best estimate above which a method is not timed
_WORTH_TIMING = 1e-4  # seconds of the best estimate, below which estimates decide
_TIMED_BYTES = 64 * 2**20  # gradients and inputs of the timed samples
_REPEATS = 3
_LONG = 0.05  # total seconds of repeats after which timing stops
_FAR = 1.5  # multiple of the best time from which repeats stop
_VERSION = 1  # of saved tables
_SAME_ORDER = 4  # ratio of batch sizes within which time is taken as proportional to the batch size
_CACHE_BYTES = 48 * 2**20  # more than the caches of most processors
_OTHERS = 4  # memory that other layers write in a pass, as a multiple of the layer's own


Plan = Mapping[nn.Parameter, Choice]


class Planner(Protocol):
    """Interface of a planner, which chooses the methods of a backward pass.

    Attributes:
        version: Increases when earlier plans may be outdated.
        keep_budget: Maximum bytes of kept per-sample gradients; 0 disables stacking.
    """

    version: int
    keep_budget: int

    def plan(self, entries: Sequence[Entry], rows: int) -> Plan:
        """Chooses a way for each parameter of a backward pass with batch size ``rows``."""


class MethodTable:
    """Records the duration of each method and chooses the fastest within the memory budget.

    Args:
        keep_budget: Maximum bytes of kept per-sample gradients, over all parameters. None selects 512 MiB on the CPU
            and 1/32 of the memory of a GPU.
        timed: If True, methods are timed. If False, estimates decide, which are equal on all machines.
    """

    def __init__(self, *, keep_budget: int | None = None, timed: bool = True):
        self._given_budget = keep_budget
        self.keep_budget = KEEP_BUDGET if keep_budget is None else keep_budget
        self.timed = timed
        self.seconds: dict[str, dict[str, float]] = {}  # signature -> way -> seconds for a batch of the rounded size
        self.version = 0
        self._per_row: dict[str, tuple[int, Mapping[str, float]]] = {}  # batch size and seconds by way, to scale

    def plan(self, entries: Sequence[Entry], rows: int) -> Plan:
        """Chooses a way for each parameter of a backward pass with batch size ``rows``."""
        offers = [self._offer(entry, rows) for entry in entries]
        left = self.keep_budget
        if self._given_budget is None and entries:
            left = memory_for(entries[0].use.parameter.device, left, most=_MOST_KEPT)
        keeping: set[int] = set()
        # The gradients that save most time per byte come first; without times, the smallest.
        for i in sorted(range(len(offers)), key=lambda i: offers[i].urgency, reverse=True):
            if offers[i].keep is not None and (offers[i].other is None or offers[i].kept_bytes <= left):
                keeping.add(i)
                left -= offers[i].kept_bytes
        return {
            entry.use.parameter: offer.choice(entry, keeps=i in keeping)
            for i, (entry, offer) in enumerate(zip(entries, offers, strict=True))
        }

    def with_budget(self, keep_budget: int) -> MethodTable:
        """Returns a table with another budget. Both tables share all times."""
        other = MethodTable(keep_budget=keep_budget, timed=self.timed)
        other.seconds = self.seconds  # the same dictionary, so that each table finds the times of the other
        other._per_row = self._per_row
        return other

    def untimed(self, seconds: dict[str, dict[str, float]]) -> MethodTable:
        """Returns a table with given times, so that processes with equal times choose equally.

        Its budget does not depend on the memory of a GPU.

        Args:
            seconds: Seconds of each way, by signature.

        Returns:
            The table.
        """
        other = MethodTable(keep_budget=self.keep_budget, timed=False)
        other.seconds = dict(seconds)
        return other

    def share(self) -> None:
        """Broadcasts rank 0's times to all ranks of ``torch.distributed`` and ends timing, so that all choose equally.

        A collective operation: all ranks must call it at the same place. Without it, ranks may choose differently,
        which affects speed and rounding only.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        shared = [dict(self.seconds)]
        torch.distributed.broadcast_object_list(shared, src=0)
        self.seconds.clear()
        self.seconds.update(shared[0])
        self.timed = False
        self.version += 1

    def save(self, path: str | Path) -> None:
        """Writes the times to a file, for other runs on the same kind of machine."""
        Path(path).write_text(json.dumps({"version": _VERSION, "seconds": self.seconds}, indent=1, sort_keys=True))

    @classmethod
    def load(cls, path: str | Path, *, keep_budget: int | None = None, timed: bool = True) -> MethodTable:
        """Loads a saved table. Calls that it does not contain are timed, or estimated if ``timed=False``.

        Args:
            path: File written by ``save``.
            keep_budget: Maximum bytes of kept per-sample gradients; see `MethodTable`.
            timed: If True, methods are timed; see `MethodTable`.

        Returns:
            The table.

        Raises:
            ValueError: If the file is not a saved table.
        """
        table = cls(keep_budget=keep_budget, timed=timed)
        try:
            stored = json.loads(Path(path).read_text())
            if stored["version"] != _VERSION:
                raise ValueError(f"its version is {stored['version']!r}, not {_VERSION}")
            for signature, seconds in stored["seconds"].items():
                table.seconds[signature] = {str(Way.of(way)): float(value) for way, value in seconds.items()}
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is no table of methods: {error}. Write one with MethodTable.save().") from None
        return table

    def _offer(self, entry: Entry, rows: int) -> _Offer:
        numel = entry.use.numel
        kept_bytes = _most(rows) * numel * wide(entry.use.parameter.dtype).itemsize
        if entry.kept is not None:
            return _Offer(KEEP, None, {}, 0, "arrives per sample")
        # Without weighted_sum, the norm must be that of the very gradients that are summed. Gradients formed for fewer
        # samples may differ by rounding, because torch may add in another order.
        sums = all(sampler.weighted_sum is not None for _, sampler in entry.calls)
        cut = sums and rows > 0 and (rows == 1 or all(in_rows(call, rows) for call, _ in entry.calls))
        first, sampler = entry.calls[0]
        cost = tied_cost(entry.calls) if len(entry.calls) > 1 else sampler.cost and sampler.cost(first)
        if cost is None:
            if len(entry.calls) == 1 and sampler.sq_norm is not None:
                return _Offer(None, Way(Method.GHOST, sampler.sq_norm_name), {}, 0, "has a shortcut")
            several = "several uses" if len(entry.calls) > 1 else "no shortcut"
            grad_name = sampler.grad_name
            other = Way(Method.DISCARD, grad_name) if cut else None
            return _Offer(Way(Method.KEEP, grad_name), other, {}, kept_bytes, several)
        # Per-sample gradients of a tied weight are as large as the vocabulary and are not kept.
        estimates = _estimates(cost, rows, numel, first.grad_output.device, cut=cut, keep=len(entry.calls) == 1)
        seconds, why = self._times(entry, rows, estimates)
        keep = _fastest(seconds, lambda way: way.method is Method.KEEP)
        other = _fastest(seconds, lambda way: way.method is not Method.KEEP)
        if keep is not None and other is not None and seconds[str(other)] <= seconds[str(keep)]:
            keep = None
        return _Offer(keep, other, seconds, kept_bytes, why)

    def _times(self, entry: Entry, rows: int, estimates: Mapping[str, float]) -> tuple[Mapping[str, float], str]:
        """Returns seconds by way and their origin."""
        signature = _signature(entry, rows)
        known = {way: s for way, s in self.seconds.get(signature, {}).items() if way in estimates}
        if any(map(_frees, known)) or (known and not any(map(_frees, estimates))):
            return known, "timed"
        per_row = _signature(entry, rows, per_row=True)
        if known := _scaled(self._per_row.get(per_row), rows, estimates):
            return known, "timed"
        best = min(estimates.values())
        if not self.timed or best < _WORTH_TIMING:
            return estimates, "estimated" if best >= _WORTH_TIMING else "too small to time"
        hopeful = [way for way, seconds in estimates.items() if seconds <= _HOPELESS * best]
        # The budget may exclude KEEP, so at least one other way is always timed.
        if others := [way for way in estimates if _frees(way)]:
            hopeful = list(dict.fromkeys([*hopeful, min(others, key=estimates.__getitem__)]))
        hopeful.sort(key=estimates.__getitem__)  # the best first, so that timing of slower ones stops early
        if len(hopeful) == 1:
            return {hopeful[0]: estimates[hopeful[0]]}, "nothing comes near"
        try:
            self.seconds[signature] = time_ways(entry, [Way.of(way) for way in hopeful], rows)
        except RuntimeError as error:  # on the CPU torch does not raise OutOfMemoryError
            if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
                raise
            return estimates, "no memory to time"
        self._per_row[per_row] = (rows, self.seconds[signature])
        return self.seconds[signature], "timed"


def method_table(given: MethodTable | str | Path | None) -> MethodTable:
    """Returns the given table, one loaded from a file, or a new one for None. Raises TypeError for anything else."""
    if isinstance(given, MethodTable):
        return given
    if given is None or isinstance(given, (str, Path)):
        return MethodTable() if given is None else MethodTable.load(given)
    raise TypeError(f"methods is a {type(given).__name__}; pass a MethodTable, or a file that one was saved to.")


@dataclass(frozen=True)
class _Offer:
    """Options of one parameter: keeping its gradients, if that is faster, and the best way without keeping them."""

    keep: Way | None
    other: Way | None
    seconds: Mapping[str, float]
    kept_bytes: int
    why: str

    @property
    def urgency(self) -> float:
        """Seconds saved per kept byte. Very large without times or alternatives, and larger for fewer bytes."""
        if self.keep is None or self.other is None or not self.seconds:
            return 1e9 / (1 + self.kept_bytes)
        return (self.seconds[str(self.other)] - self.seconds[str(self.keep)]) / (1 + self.kept_bytes)

    def choice(self, entry: Entry, *, keeps: bool) -> Choice:
        """Returns the record of the chosen way."""
        way = self.keep if keeps else self.other
        assert way is not None
        layer = entry.calls[0][0].layer if entry.calls else None
        shown = "" if layer is None else f"{type(layer).__name__}({layer.extra_repr()})"
        kept_bytes = self.kept_bytes if keeps else 0
        return Choice(entry.use.name, shown, way, self.why, self.seconds.get(str(way)), kept_bytes)


def _estimates(cost: Cost, rows: int, numel: int, device: torch.device, *, cut: bool, keep: bool) -> dict[str, float]:
    read = 4.0 * numel * operations_per_byte(device)
    operations = {Way(Method.GHOST, name): norm + cost.weighted_sum for name, norm in cost.sq_norms.items()}
    for name, grad in cost.grads.items():
        if keep:
            operations[Way(Method.KEEP, name)] = grad + 3 * read
        if cut:
            operations[Way(Method.DISCARD, name)] = grad + 2 * read + cost.weighted_sum
    return {str(way): rows * count / operations_per_second(device) for way, count in operations.items()}


def _fastest(seconds: Mapping[str, float], fits: Callable[[Way], bool]) -> Way | None:
    ways = [way for way in map(Way.of, seconds) if fits(way)]
    return min(ways, key=lambda way: seconds[str(way)]) if ways else None


def time_ways(entry: Entry, ways: Sequence[Way], rows: int) -> dict[str, float]:
    """Times norm and clipped sum of each way in seconds, on random numbers of the shape and layout of the calls."""
    leaves = pytree.tree_leaves([(call.inputs, call.grad_output) for call, _ in entry.calls])
    numbers = sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
    row_bytes = 4 * (numbers // rows + entry.use.numel)
    device = entry.calls[0][0].grad_output.device
    some = max(1, min(rows, memory_for(device, _TIMED_BYTES) // row_bytes))
    size = entry.use.shape[0]
    calls = [(_random(some_rows(call, 0, some) if some < rows else call, size), s) for call, s in entry.calls]
    weight_B, buffer, scratch = torch.ones(some, device=device), FlatBuffer([entry.use.parameter]), Scratch()
    broom = torch.empty(min(_CACHE_BYTES, _OTHERS * some * row_bytes) // 4, device=device)
    seconds: dict[str, float] = {}
    for way in ways:
        times: list[float] = []
        for repeat in range(1 + _REPEATS):  # the first one warms up
            one = Entry(entry.use, list(calls))
            if repeat:
                broom.fill_(repeat)  # evicts cached data, as other layers do in a pass
            _synchronise(device)
            start = time.perf_counter()
            one.norm_and_sum(way, some, scratch, weight_B, buffer)
            _synchronise(device)
            times.append(time.perf_counter() - start)
            if sum(times[1:]) > _LONG:  # long runs vary little
                break
            if seconds and min(times) > (_FAR if repeat else 2 * _FAR) * min(seconds.values()) * some / rows:
                break
        seconds[str(way)] = min(times) * rows / some
    return seconds


def _random(call: LayerCall, entries: int) -> LayerCall:
    """Returns the call with random values: normal floats, and indices below ``entries``."""
    generators: dict[torch.device, torch.Generator] = {}

    def drawn(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        generator = generators.setdefault(leaf.device, torch.Generator(leaf.device).manual_seed(0))
        if leaf.is_floating_point():  # does not advance the user's generators
            return torch.empty_like(leaf).normal_(generator=generator)
        return torch.empty_like(leaf).random_(entries, generator=generator)

    inputs, kwargs, grad = pytree.tree_map(drawn, (call.inputs, dict(call.kwargs), call.grad_output))
    return call.replace(inputs=inputs, kwargs=kwargs, grad_output=grad)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _scaled(
    timed: tuple[int, Mapping[str, float]] | None, rows: int, estimates: Mapping[str, float]
) -> dict[str, float]:
    """Scales times of another batch size to ``rows``. Returns an empty dict if the sizes differ too much."""
    if timed is None or not rows or max(rows, timed[0]) > _SAME_ORDER * min(rows, timed[0]):
        return {}
    known = {way: seconds * rows / timed[0] for way, seconds in timed[1].items() if way in estimates}
    return known if any(map(_frees, known)) or not any(map(_frees, estimates)) else {}


def _signature(entry: Entry, rows: int, *, per_row: bool = False) -> str:
    """Returns a string of everything that affects times: layer settings, shapes, dtypes and device.

    With ``per_row``, the string does not contain the batch size.
    """
    call = entry.calls[0][0]
    described = [shape for one, _ in entry.calls for shape in shapes_of(one)]
    sizes = [[bucket_of(n) if n != rows or not per_row else "B" for n in shape] for shape, _ in described]
    shapes = ["x".join(map(str, size)) + f" {dtype}" for size, (_, dtype) in zip(sizes, described, strict=True)]
    device = call.grad_output.device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {torch.get_num_threads()}"
    name = entry.use.name.rpartition(".")[2]
    layer = f"{type(call.layer).__name__}({call.layer.extra_repr()})"
    count = "B" if per_row else bucket_of(rows)
    return f"{layer}.{name} | {count} rows | {', '.join(shapes)} | {kind}".replace("torch.", "")


def _frees(way: str) -> bool:
    """Returns True if a way keeps no gradients."""
    return Way.of(way).method is not Method.KEEP


def _most(size: int) -> int:
    """Returns the largest size with the same rounding."""
    return math.ceil(bucket_of(size) * 2**0.25) if size > 8 else size


def plan_key(entries: Sequence[Entry], rows: int) -> object:
    """Returns a key that is equal for passes with the same plan.

    It holds the parameters themselves, which hash and compare by identity: an address could be reused.
    """
    shapes: dict[LayerCall, tuple[Any, ...]] = {}  # the parameters of a layer share its call
    found: list[object] = [bucket_of(rows)]
    for entry in entries:
        found += (entry.use.parameter, entry.kept is None, len(entry.calls))
        for call, _ in entry.calls:
            if call not in shapes:
                shapes[call] = shapes_of(call)
            found.append(shapes[call])
    return tuple(found)


class KeepAll:
    """Planner that keeps every per-sample gradient."""

    version = 0
    keep_budget = 0

    def plan(self, entries: Sequence[Entry], rows: int) -> Plan:
        """Returns ``KEEP`` for all parameters."""
        return {e.use.parameter: Choice(e.use.name, "", KEEP, "asked for", None, 0) for e in entries}
