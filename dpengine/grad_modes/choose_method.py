"""Which way gives each parameter's norms and sums: by timing, within a memory budget. Reads shapes and clocks, no data.

Estimates from shapes rule out what is hopeless, and decide where there is nothing to win. The rest is timed once for
each kind of call, on random numbers, norm and clipped sum together, and remembered by a signature in which sizes of
batches and sequences are rounded, since under Poisson sampling they change with every step.
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

KEEP_BUDGET = 512 * 2**20  # bytes of per-sample gradients kept at most, over all parameters
_MOST_KEPT = 16 * 2**30  # on a GPU, which keeps a 32nd of its memory
_HOPELESS = 4.0  # times the best estimate: not worth timing
_WORTH_TIMING = 1e-4  # seconds of the best estimate, below which estimates decide
_TIMED_BYTES = 64 * 2**20  # of the gradients and inputs of the rows that are timed
_REPEATS = 3
_LONG = 0.05  # seconds of repeats that are enough
_FAR = 1.5  # times the best: further repeats would not make a way the best
_VERSION = 1  # of saved tables
_SAME_ORDER = 4  # times are in proportion to rows within this factor: samples come one by one from Poisson draws
_CACHE_BYTES = 48 * 2**20  # more than most processors' caches hold
_OTHERS = 4  # times the layer's own memory: what a small model's other layers write in a pass


Plan = Mapping[nn.Parameter, Choice]


class Planner(Protocol):
    """Who chooses.

    Attributes:
        version: Rises when what was planned before may not hold any more.
        keep_budget: Bytes of per-sample gradients kept at most; 0 if each parameter is to be treated alone.
    """

    version: int
    keep_budget: int

    def plan(self, entries: Sequence[Entry], rows: int) -> Plan:
        """A way for each parameter of a backward pass over so many rows."""


class MethodTable:
    """Remembers how long each way takes, and chooses.

    Args:
        keep_budget: Bytes of per-sample gradients kept at most, over all parameters. None for 512 MiB on the CPU and a
            32nd of the memory of a GPU.
        timed: Whether ways are timed; else estimates decide, which are the same on every machine.
    """

    def __init__(self, *, keep_budget: int | None = None, timed: bool = True):
        self._given_budget = keep_budget
        self.keep_budget = KEEP_BUDGET if keep_budget is None else keep_budget
        self.timed = timed
        self.seconds: dict[str, dict[str, float]] = {}  # signature -> way -> seconds for a batch of the rounded size
        self.version = 0
        self._per_row: dict[str, tuple[int, Mapping[str, float]]] = {}  # and of one number of rows, for others

    def plan(self, entries: Sequence[Entry], rows: int) -> Plan:
        """A way for each parameter of a backward pass over so many rows."""
        offers = [self._offer(entry, rows) for entry in entries]
        left = self.keep_budget
        if self._given_budget is None and entries:
            left = memory_for(entries[0].use.parameter.device, left, most=_MOST_KEPT)
        keeping: set[int] = set()
        # What saves most time for each byte goes first; where nothing is known, what is small.
        for i in sorted(range(len(offers)), key=lambda i: offers[i].urgency, reverse=True):
            if offers[i].keep is not None and (offers[i].other is None or offers[i].kept_bytes <= left):
                keeping.add(i)
                left -= offers[i].kept_bytes
        return {
            entry.use.parameter: offer.choice(entry, keeps=i in keeping)
            for i, (entry, offer) in enumerate(zip(entries, offers, strict=True))
        }

    def with_budget(self, keep_budget: int) -> MethodTable:
        """The same table, to which the times go too, under another budget."""
        other = MethodTable(keep_budget=keep_budget, timed=self.timed)
        other.seconds = self.seconds  # the same dictionary, in which each finds what the other timed
        other._per_row = self._per_row
        return other

    def untimed(self, seconds: dict[str, dict[str, float]]) -> MethodTable:
        """A table of given times that learns no others, so that all processes which have these choose alike."""
        other = MethodTable(keep_budget=self._given_budget, timed=False)
        other.seconds = dict(seconds)
        return other

    def share(self) -> None:
        """Gives rank 0's times to every rank of ``torch.distributed``. From here on none times, so that all agree.

        A collective operation: every rank calls it at the same place. Before it, each rank decides for itself, which
        changes speed and rounding only.
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
        """Writes what was timed, to be passed to another run on the same kind of machine."""
        Path(path).write_text(json.dumps({"version": _VERSION, "seconds": self.seconds}, indent=1, sort_keys=True))

    @classmethod
    def load(cls, path: str | Path, *, keep_budget: int | None = None, timed: bool = True) -> MethodTable:
        """A table that another run saved. Calls that are not in it are timed, or estimated with ``timed=False``.

        Args:
            path: The file.
            keep_budget: As for the class.
            timed: As for the class.

        Returns:
            The table.

        Raises:
            ValueError: If the file is no such table.
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
        # Without a sum of its own that knows what its parts had, a sampler's norm must be of the very numbers that are
        # summed: formed for fewer rows, torch may add them in another order.
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
        # Gradients of a tied weight are as large as the vocabulary, and are not kept.
        estimates = _estimates(cost, rows, numel, first.grad_output.device, cut=cut, keep=len(entry.calls) == 1)
        seconds, why = self._times(entry, rows, estimates)
        keep = _fastest(seconds, lambda way: way.method is Method.KEEP)
        other = _fastest(seconds, lambda way: way.method is not Method.KEEP)
        if keep is not None and other is not None and seconds[str(other)] <= seconds[str(keep)]:
            keep = None
        return _Offer(keep, other, seconds, kept_bytes, why)

    def _times(self, entry: Entry, rows: int, estimates: Mapping[str, float]) -> tuple[Mapping[str, float], str]:
        """Seconds by way, and where they are from."""
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
        # The budget may rule out a keep, so a way without it is timed in any case.
        if others := [way for way in estimates if _frees(way)]:
            hopeful = list(dict.fromkeys([*hopeful, min(others, key=estimates.__getitem__)]))
        hopeful.sort(key=estimates.__getitem__)  # the best first, so that others may be cut short
        if len(hopeful) == 1:
            return {hopeful[0]: estimates[hopeful[0]]}, "nothing comes near"
        try:
            self.seconds[signature] = time_ways(entry, [Way.of(way) for way in hopeful], rows)
        except RuntimeError as error:  # on the CPU, memory that is not there is no OutOfMemoryError
            if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
                raise
            return estimates, "no memory to time"
        self._per_row[per_row] = (rows, self.seconds[signature])
        return self.seconds[signature], "timed"


def method_table(given: MethodTable | str | Path | None) -> MethodTable:
    """The table that was meant: that one, one from a file, or a new one; TypeError for anything else."""
    if isinstance(given, MethodTable):
        return given
    if given is None or isinstance(given, (str, Path)):
        return MethodTable() if given is None else MethodTable.load(given)
    raise TypeError(f"methods is a {type(given).__name__}; pass a MethodTable, or a file that one was saved to.")


@dataclass(frozen=True)
class _Offer:
    """What there is to choose from for one parameter: keeping, if that is faster, and the best way without it."""

    keep: Way | None
    other: Way | None
    seconds: Mapping[str, float]
    kept_bytes: int
    why: str

    @property
    def urgency(self) -> float:
        """Seconds saved for each byte that is kept; infinite where nothing else is known, most so for small ones."""
        if self.keep is None or self.other is None or not self.seconds:
            return 1e9 / (1 + self.kept_bytes)
        return (self.seconds[str(self.other)] - self.seconds[str(self.keep)]) / (1 + self.kept_bytes)

    def choice(self, entry: Entry, *, keeps: bool) -> Choice:
        """What is said of the way that was taken."""
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
    """Seconds that each way takes for norm and sum, on random numbers of the shape and layout of an entry's call."""
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
                broom.fill_(repeat)  # as in a pass, where other layers have written to the cache meanwhile
            _synchronise(device)
            start = time.perf_counter()
            one.norm_and_sum(way, some, scratch, weight_B, buffer)
            _synchronise(device)
            times.append(time.perf_counter() - start)
            if sum(times[1:]) > _LONG:  # what lasts long is little disturbed
                break
            if seconds and min(times) > (_FAR if repeat else 2 * _FAR) * min(seconds.values()) * some / rows:
                break
        seconds[str(way)] = min(times) * rows / some
    return seconds


def _random(call: LayerCall, entries: int) -> LayerCall:
    """The call with other numbers: normal ones, and indices below ``entries``."""
    generators: dict[torch.device, torch.Generator] = {}

    def drawn(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        generator = generators.setdefault(leaf.device, torch.Generator(leaf.device).manual_seed(0))
        if leaf.is_floating_point():  # the generators of the user are left alone
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
    """Times of a batch that has so many rows, from one that has up to a few times more or fewer; empty if none fit."""
    if timed is None or not rows or max(rows, timed[0]) > _SAME_ORDER * min(rows, timed[0]):
        return {}
    known = {way: seconds * rows / timed[0] for way, seconds in timed[1].items() if way in estimates}
    return known if any(map(_frees, known)) or not any(map(_frees, estimates)) else {}


def _signature(entry: Entry, rows: int, *, per_row: bool = False) -> str:
    """What a time may depend on, in words: the layer's settings, shapes, types and the device; or all but the rows."""
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
    """Whether a way keeps no gradients."""
    return Way.of(way).method is not Method.KEEP


def _most(size: int) -> int:
    """The largest size that is rounded like this one."""
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
    """Has every per-sample gradient kept."""

    version = 0
    keep_budget = 0

    def plan(self, entries: Sequence[Entry], rows: int) -> Plan:
        """Keeps them all."""
        return {e.use.parameter: Choice(e.use.name, "", KEEP, "asked for", None, 0) for e in entries}
