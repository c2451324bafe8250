"""Progress bar that shows the privacy cost so far."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from typing import Any, Generic, Protocol, TypeVar, final

import torch
from torch import Tensor

from dpengine.accounting.ledger import Ledger
from dpengine.accounting.rounding import round_up
from dpengine.errors import AccountingRefusedError, keyword_hints

B = TypeVar("B")
T = TypeVar("T")

_MIN_INTERVAL = 1.0  # minimum time between two computations of epsilon, in seconds
_COST_RATIO = 20  # minimum ratio of that time to the duration of a computation
_BAR = "{bar:8} {n_fmt}/{total_fmt}  {desc}  {elapsed}<{remaining}, {rate_fmt}{postfix}"
_BAR_WITHOUT_TOTAL = "{n_fmt} steps  {desc}  {elapsed}, {rate_fmt}{postfix}"


class EngineCost(Protocol):
    """Part of an engine that the progress bar uses."""

    @property
    def ledger(self) -> Ledger:
        """The ledger."""

    @property
    def epsilon(self) -> float:
        """Epsilon so far."""


@final
class ProgressBar(Iterator[B]):
    """Iterator over the batches of a loader, with a progress bar; see `progress`."""

    def __init__(self, batches: Generator[B], postfix: dict[str, Any]):
        self._batches = batches
        self._postfix = postfix

    def __next__(self) -> B:
        """Returns the next batch."""
        return next(self._batches)

    def set_postfix(self, values: Mapping[str, float | Tensor]) -> None:
        """Sets numbers of the training loop that the bar shows, such as ``{"loss": loss}``.

        A tensor is read when the bar shows it, about once a second. The guarantee does not cover these
        numbers: do not publish them.
        """
        self._postfix.clear()
        for name, value in values.items():
            self._postfix[name] = value.detach() if isinstance(value, Tensor) else value

    def close(self) -> None:
        """Ends the iteration and shows the final state."""
        self._batches.close()


@keyword_hints
def progress(
    engine: EngineCost, loader: Iterable[B], *, target_epsilon: float | None = None, total: int | None = None
) -> ProgressBar[B]:
    """Yields the batches of a loader, with a progress bar that counts logical batches and shows epsilon.

    The bar is hidden if the standard error stream is not a terminal or a notebook, on all ranks but the first, without
    tqdm, and with ``DPENGINE_PROGRESS=0``. Epsilon is computed about once a second, less often if that takes long.
    `ProgressBar.set_postfix` adds the loss.
    """
    postfix: dict[str, Any] = {}
    return ProgressBar(_batches(engine, loader, target_epsilon, total, postfix), postfix)


def _batches(
    engine: EngineCost, loader: Iterable[B], target_epsilon: float | None, total: int | None, postfix: dict[str, Any]
) -> Generator[B]:
    if not is_shown():
        yield from loader
        return
    from tqdm.auto import tqdm

    if total is None and isinstance(loader, Sized):
        total = len(loader)
    values = _Throttled(lambda: (cost_text(engine, target_epsilon), _as_numbers(postfix)))
    before = engine.ledger.steps
    layout = _BAR_WITHOUT_TOTAL if total is None else _BAR
    columns, rows = shutil.get_terminal_size()  # 80 and 24 if unknown, as in some CI
    with tqdm(total=total, bar_format=layout, desc=values.get()[0], ncols=columns, nrows=rows) as bar:

        def show(*, force: bool = False) -> None:
            # Counts charged steps, because a logical batch may be returned as several physical batches.
            text, numbers = values.get(force=force)
            bar.set_description_str(text, refresh=False)
            bar.set_postfix(numbers, refresh=False)
            bar.update(engine.ledger.steps - before - bar.n)
            if force:
                bar.refresh()

        try:
            for batch in loader:
                yield batch
                show()
        finally:
            show(force=True)


def cost_text(engine: EngineCost, target_epsilon: float | None) -> str:
    """Returns the privacy cost as short text, rounded up: ``"ε 1.42/3.00 (48 %)"``."""
    try:
        cost = engine.epsilon
    except AccountingRefusedError:
        return "ε not claimed"
    if target_epsilon is None:
        return f"ε {round_up(cost)}"
    return f"ε {round_up(cost)}/{round_up(target_epsilon)} ({math.ceil(100 * cost / target_epsilon)} %)"


def is_shown() -> bool:
    """Returns True if ``progress`` shows a bar in this process."""
    setting = os.environ.get("DPENGINE_PROGRESS")
    notebook = "ipykernel" in sys.modules
    if setting == "0" or _rank() != 0 or not (setting == "1" or notebook or sys.stderr.isatty()):
        return False
    return importlib.util.find_spec("tqdm") is not None


def _as_numbers(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in numbers.items()}


class _Throttled(Generic[T]):
    """Value that is updated at most once per interval."""

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._value: T
        self._next = -math.inf

    def get(self, *, force: bool = False) -> T:
        start = time.monotonic()
        if force or start >= self._next:
            self._value = self._make()
            end = time.monotonic()
            self._next = end + max(_MIN_INTERVAL, _COST_RATIO * (end - start))
        return self._value


def _rank() -> int:
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if ready else 0
