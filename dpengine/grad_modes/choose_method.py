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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpengine.capture.record import LayerCall
from dpengine.distributed.ranks import world
from dpengine.grad_samplers.devices import launches_kernels, memory_for, operations_per_byte, operations_per_second
from dpengine.grad_samplers.sampler import Cost
from dpengine.grad_samplers.tied import tied_cost

from .entry import Entry, norms_and_sums
from .flat_buffer import FlatBuffer
from .method import KEEP, Algorithm, Choice, Method
from .rows import is_batched, shapes_of, slice_batch, wide
from .scratch import Scratch
from .stacks import bucket_of

KEEP_BUDGET = 512 * 2**20  # maximum bytes of kept per-sample gradients, over all parameters
_MAX_KEPT = 16 * 2**30  # the same on a GPU, whose default is 1/32 of its memory
_MAX_RATIO = 4.0  # multiple of the best estimate above which a method is not timed
_MIN_TIMED = 1e-4  # seconds of the best estimate, below which estimates decide
_TIMED_BYTES = 64 * 2**20  # gradients and inputs of the timed samples
_REPEATS = 3
_MAX_COPIES = 8  # parameters with equal calls that are timed together
_MAX_SECONDS = 0.05  # total seconds of repeats after which timing stops
_STOP_RATIO = 1.5  # multiple of the best time from which repeats stop
_VERSION = 1  # of saved tables
_MAX_SCALING = 4  # ratio of batch sizes within which time is taken as proportional to the batch size
_CACHE_BYTES = 48 * 2**20  # more than the caches of most processors
_OTHER_LAYERS = 4  # memory that other layers write in a pass, as a multiple of the layer's own


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
        """Chooses an algorithm for each parameter of a backward pass with batch size ``rows``."""


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
        self.seconds: dict[str, dict[str, float]] = {}  # signature -> algorithm -> seconds for the rounded batch size
        self.version = 0
        self._per_row: dict[str, tuple[int, Mapping[str, float]]] = {}  # batch size, seconds by algorithm
        self._alike: Counter[str] = Counter()  # number of parameters on accelerators, which share kernels, by signature

    def plan(self, entries: Sequence[Entry], rows: int) -> Plan:
        """Chooses an algorithm for each parameter of a backward pass with batch size ``rows``."""
        self._alike = Counter(_signature(entry, rows) for entry in entries if _launches_kernels(entry))
        options = [self._options(entry, rows) for entry in entries]
        remaining = self.keep_budget
        if self._given_budget is None and entries:
            remaining = memory_for(entries[0].use.parameter.device, remaining, most=_MAX_KEPT)
        keeping: set[int] = set()
        # The gradients that save most time per byte come first; without times, the smallest.
        for i in sorted(range(len(options)), key=lambda i: options[i].urgency, reverse=True):
            if options[i].keep is not None and (options[i].other is None or options[i].kept_bytes <= remaining):
                keeping.add(i)
                remaining -= options[i].kept_bytes
        return {
            entry.use.parameter: option.choice(entry, keeps=i in keeping)
            for i, (entry, option) in enumerate(zip(entries, options, strict=True))
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
            seconds: Seconds of each algorithm, by signature.

        Returns:
            The table.
        """
        other = MethodTable(keep_budget=self.keep_budget, timed=False)
        other.seconds = dict(seconds)
        return other

    def share(self) -> None:
        """Broadcasts rank 0's times to all ranks of ``torch.distributed`` and ends timing, so that all choose equally.

        A collective operation: all ranks must call it at the same place, with NCCL after ``torch.cuda.set_device``.
        Without it, ranks may choose differently, which affects speed and rounding only.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        shared = world().broadcast(dict(self.seconds))
        self.seconds.clear()
        self.seconds.update(shared)
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
                table.seconds[signature] = {str(Algorithm.of(name)): float(value) for name, value in seconds.items()}
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is not a saved MethodTable: {error}. Create one with its save().") from None
        return table

    def _options(self, entry: Entry, rows: int) -> _Options:
        numel = entry.use.numel
        kept_bytes = _largest_size(rows) * numel * wide(entry.use.parameter.dtype).itemsize
        if entry.kept is not None:
            return _Options(KEEP, None, {}, 0, "computed per sample")
        # Without weighted_sum, the norm must be that of the very gradients that are summed. Gradients formed for fewer
        # samples may differ by rounding, because torch may add in another order.
        sums = all(sampler.weighted_sum is not None for _, sampler in entry.calls)
        can_slice = sums and rows > 0 and (rows == 1 or all(is_batched(call, rows) for call, _ in entry.calls))
        first, sampler = entry.calls[0]
        cost = tied_cost(entry.calls) if len(entry.calls) > 1 else sampler.cost and sampler.cost(first)
        if cost is None:
            if len(entry.calls) == 1 and sampler.sq_norm is not None:
                return _Options(None, Algorithm(Method.GHOST, sampler.sq_norm_name), {}, 0, "has a shortcut")
            why = "several uses" if len(entry.calls) > 1 else "no shortcut"
            other = Algorithm(Method.DISCARD, sampler.grad_name) if can_slice else None
            return _Options(Algorithm(Method.KEEP, sampler.grad_name), other, {}, kept_bytes, why)
        # Per-sample gradients of a tied weight are as large as the vocabulary and are not kept.
        one_use, device = len(entry.calls) == 1, first.grad_output.device
        estimates = _estimates(cost, rows, numel, device, keep=one_use, discard=can_slice)
        seconds, why = self._times(entry, rows, estimates)
        keep = _fastest(seconds, lambda algorithm: algorithm.method is Method.KEEP)
        other = _fastest(seconds, lambda algorithm: algorithm.method is not Method.KEEP)
        if keep is not None and other is not None and seconds[str(other)] <= seconds[str(keep)]:
            keep = None
        return _Options(keep, other, seconds, kept_bytes, why)

    def _times(self, entry: Entry, rows: int, estimates: Mapping[str, float]) -> tuple[Mapping[str, float], str]:
        """Returns the seconds of each algorithm, and a short text on how they were obtained."""
        signature = _signature(entry, rows)
        known = {name: s for name, s in self.seconds.get(signature, {}).items() if name in estimates}
        if any(map(_keeps_nothing, known)) or (known and not any(map(_keeps_nothing, estimates))):
            return known, "timed"
        per_row = _signature(entry, rows, per_row=True)
        if known := _scaled(self._per_row.get(per_row), rows, estimates):
            return known, "timed"
        best = min(estimates.values())
        if not self.timed or best < _MIN_TIMED:
            return estimates, "estimated" if best >= _MIN_TIMED else "too small to time"
        candidates = [name for name, seconds in estimates.items() if seconds <= _MAX_RATIO * best]
        # The budget may exclude KEEP, so at least one other algorithm is always timed.
        if others := [name for name in estimates if _keeps_nothing(name)]:
            candidates = list(dict.fromkeys([*candidates, min(others, key=estimates.__getitem__)]))
        candidates.sort(key=estimates.__getitem__)  # the best first, so that timing of slower ones stops early
        if len(candidates) == 1:
            return {candidates[0]: estimates[candidates[0]]}, "no competitive alternative"
        try:
            copies = min(_MAX_COPIES, self._alike[signature] or 1)
            self.seconds[signature] = time_algorithms(entry, list(map(Algorithm.of, candidates)), rows, copies)
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
    raise TypeError(f"methods is a {type(given).__name__}. Pass a MethodTable or the path of a saved one.")


@dataclass(frozen=True)
class _Options:
    """Options of one parameter: keeping its gradients, if that is faster, and the best algorithm without."""

    keep: Algorithm | None
    other: Algorithm | None
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
        """Returns the record of the chosen algorithm."""
        algorithm = self.keep if keeps else self.other
        assert algorithm is not None
        layer = entry.calls[0][0].layer if entry.calls else None
        description = "" if layer is None else f"{type(layer).__name__}({layer.extra_repr()})"
        kept_bytes = self.kept_bytes if keeps else 0
        return Choice(entry.use.name, description, algorithm, self.why, self.seconds.get(str(algorithm)), kept_bytes)


def _estimates(
    cost: Cost, rows: int, numel: int, device: torch.device, *, keep: bool, discard: bool
) -> dict[str, float]:
    read = 4.0 * numel * operations_per_byte(device)
    operations = {Algorithm(Method.GHOST, name): norm + cost.weighted_sum for name, norm in cost.sq_norms.items()}
    for name, grad in cost.grads.items():
        if keep:
            operations[Algorithm(Method.KEEP, name)] = grad + 3 * read
        if discard:
            operations[Algorithm(Method.DISCARD, name)] = grad + 2 * read + cost.weighted_sum
    return {str(algorithm): rows * count / operations_per_second(device) for algorithm, count in operations.items()}


def _fastest(seconds: Mapping[str, float], fits: Callable[[Algorithm], bool]) -> Algorithm | None:
    algorithms = [algorithm for algorithm in map(Algorithm.of, seconds) if fits(algorithm)]
    return min(algorithms, key=lambda algorithm: seconds[str(algorithm)]) if algorithms else None


def time_algorithms(entry: Entry, algorithms: Sequence[Algorithm], rows: int, copies: int = 1) -> dict[str, float]:
    """Times norm and clipped sum of each algorithm in seconds, on random numbers with the shapes of the calls.

    With ``copies``, times that number of parameters together, and returns the seconds of one.
    """
    numbers = sum(tensor.numel() for call, _ in entry.calls for tensor in call.tensors())
    row_bytes = 4 * copies * (numbers // rows + entry.use.numel)
    device = entry.calls[0][0].grad_output.device
    timed_rows = max(1, min(rows, memory_for(device, _TIMED_BYTES) // row_bytes))
    size = entry.use.shape[0]
    first_rows = lambda call: slice_batch(call, 0, timed_rows) if timed_rows < rows else call  # noqa: E731
    calls = [[(_random(first_rows(call), size), s) for call, s in entry.calls] for _ in range(copies)]
    weight_B, buffer, scratch = torch.ones(timed_rows, device=device), FlatBuffer([entry.use.parameter]), Scratch()
    evictor = torch.empty(min(_CACHE_BYTES, _OTHER_LAYERS * timed_rows * row_bytes) // 4, device=device)
    seconds: dict[str, float] = {}
    for algorithm in algorithms:
        times: list[float] = []
        for repeat in range(1 + _REPEATS):  # the first one warms up
            entries = [Entry(entry.use, list(calls_of_copy)) for calls_of_copy in calls]
            if repeat:
                evictor.fill_(repeat)  # evicts cached data, as other layers do in a pass
            _synchronize(device)
            start = time.perf_counter()
            norms_and_sums(entries, algorithm, timed_rows, scratch, weight_B, buffer)
            _synchronize(device)
            times.append((time.perf_counter() - start) / copies)
            if sum(times[1:]) > _MAX_SECONDS:  # long runs vary little
                break
            ratio = _STOP_RATIO if repeat else 2 * _STOP_RATIO
            if seconds and min(times) > ratio * min(seconds.values()) * timed_rows / rows:
                break
        seconds[str(algorithm)] = min(times) * rows / timed_rows
    return seconds


def _random(call: LayerCall, entries: int) -> LayerCall:
    """Returns the call with random values: normal floats, and indices below ``entries``."""
    generators: dict[torch.device, torch.Generator] = {}

    def drawn(leaf: Tensor) -> Tensor:
        generator = generators.setdefault(leaf.device, torch.Generator(leaf.device).manual_seed(0))
        if leaf.is_floating_point():  # does not advance the user's generators
            return torch.empty_like(leaf).normal_(generator=generator)
        return torch.empty_like(leaf).random_(entries, generator=generator)

    return call.map(drawn)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _scaled(
    timed: tuple[int, Mapping[str, float]] | None, rows: int, estimates: Mapping[str, float]
) -> dict[str, float]:
    """Scales times of another batch size to ``rows``. Returns an empty dict if the sizes differ too much."""
    if timed is None or not rows or max(rows, timed[0]) > _MAX_SCALING * min(rows, timed[0]):
        return {}
    known = {name: seconds * rows / timed[0] for name, seconds in timed[1].items() if name in estimates}
    return known if any(map(_keeps_nothing, known)) or not any(map(_keeps_nothing, estimates)) else {}


def _signature(entry: Entry, rows: int, *, per_row: bool = False) -> str:
    """Returns a string of everything that affects times: layer settings, shapes, dtypes and device.

    With ``per_row``, the string does not contain the batch size.
    """
    call = entry.calls[0][0]
    described = [shape for each, _ in entry.calls for shape in shapes_of(each)]
    sizes = [[bucket_of(n) if n != rows or not per_row else "B" for n in shape] for shape, _ in described]
    shapes = ["x".join(map(str, size)) + f" {dtype}" for size, (_, dtype) in zip(sizes, described, strict=True)]
    device = call.grad_output.device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {torch.get_num_threads()}"
    name = entry.use.name.rpartition(".")[2]
    layer = f"{type(call.layer).__name__}({call.layer.extra_repr()})"
    count = "B" if per_row else bucket_of(rows)
    return f"{layer}.{name} | {count} rows | {', '.join(shapes)} | {kind}".replace("torch.", "")


def _launches_kernels(entry: Entry) -> bool:
    return bool(entry.calls) and launches_kernels(entry.calls[0][0].grad_output.device)


def _keeps_nothing(name: str) -> bool:
    """Returns True if an algorithm keeps no gradients."""
    return Algorithm.of(name).method is not Method.KEEP


def _largest_size(size: int) -> int:
    """Returns the largest size with the same rounding."""
    return math.ceil(bucket_of(size) * 2**0.25) if size > 8 else size


def plan_key(entries: Sequence[Entry], rows: int) -> object:
    """Returns a key that is equal for passes with the same plan.

    The key holds the parameters, which are compared by identity, and not their addresses, which could be reused.
    """
    shapes: dict[LayerCall, tuple[Any, ...]] = {}  # the parameters of a layer share its call
    key: list[object] = [bucket_of(rows)]
    for entry in entries:
        key += (entry.use.parameter, entry.kept is None, len(entry.calls))
        for call, _ in entry.calls:
            if call not in shapes:
                shapes[call] = shapes_of(call)
            key.append(shapes[call])
    return tuple(key)


class KeepAll:
    """Planner that keeps every per-sample gradient."""

    version = 0
    keep_budget = 0

    def plan(self, entries: Sequence[Entry], rows: int) -> Plan:
        """Returns ``KEEP`` for all parameters."""
        return {e.use.parameter: Choice(e.use.name, "", KEEP, "asked for", None, 0) for e in entries}
