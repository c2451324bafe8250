"""Progress bar that shows the privacy cost so far."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Protocol, TypeVar

import torch

from dpengine.accounting.ledger import Ledger
from dpengine.accounting.rounding import round_up
from dpengine.errors import AccountingRefusedError, suggests_names

B = TypeVar("B")

_MIN_INTERVAL = 1.0  # seconds between two computations of epsilon
_COST_SHARE = 20  # minimum ratio of that interval and the time of a computation
_BAR = "training {bar:12} {n_fmt}/{total_fmt}  {desc}  {elapsed}<{remaining}, {rate_fmt}"
_BAR_WITHOUT_TOTAL = "training {n_fmt} steps  {desc}  {elapsed}, {rate_fmt}"


class Spender(Protocol):
    """Part of an engine that the progress bar uses."""

    @property
    def ledger(self) -> Ledger:
        """The ledger."""

    @property
    def epsilon(self) -> float:
        """Epsilon so far."""


@suggests_names
def progress(
    engine: Spender, loader: Iterable[B], *, target_epsilon: float | None = None, total: int | None = None
) -> Iterator[B]:
    """Yields the batches of a loader, with a progress bar that counts logical batches and shows epsilon.

    The bar is hidden if the standard error stream is not a terminal or a notebook, on all ranks but the first, without
    tqdm, and with ``DPENGINE_PROGRESS=0``. Epsilon is computed about once a second, less often if that takes long.
    """
    if not is_shown():
        yield from loader
        return
    from tqdm.auto import tqdm

    if total is None and isinstance(loader, Sized):
        total = len(loader)
    shown = _Throttled(lambda: spent_text(engine, target_epsilon))
    before = engine.ledger.steps
    layout = _BAR_WITHOUT_TOTAL if total is None else _BAR
    columns, rows = shutil.get_terminal_size()  # 80 and 24 if unknown, as in some CI
    text = spent_text(engine, target_epsilon)
    with tqdm(total=total, bar_format=layout, desc=text, ncols=columns, nrows=rows) as bar:

        def show(*, at_once: bool = False) -> None:
            # Counts charged steps, because a logical batch may be returned as several physical batches.
            bar.set_description_str(shown.look(at_once=at_once), refresh=False)
            bar.update(engine.ledger.steps - before - bar.n)
            if at_once:
                bar.refresh()

        try:
            for batch in loader:
                yield batch
                show()
        finally:
            show(at_once=True)


def spent_text(engine: Spender, target_epsilon: float | None) -> str:
    """Returns the privacy cost as short text, rounded up: ``"ε 1.42/3.00 (48 %)"``."""
    try:
        cost = engine.epsilon
    except AccountingRefusedError:
        return "ε not claimed"
    if target_epsilon is None:
        return f"ε {round_up(cost)}"
    return f"ε {round_up(cost)}/{round_up(target_epsilon)} ({math.ceil(100 * cost / target_epsilon)} %)"


def is_shown() -> bool:
    """Returns True if ``progress`` shows a bar here."""
    setting = os.environ.get("DPENGINE_PROGRESS")
    notebook = "ipykernel" in sys.modules
    if setting == "0" or _rank() != 0 or not (setting == "1" or notebook or sys.stderr.isatty()):
        return False
    return importlib.util.find_spec("tqdm") is not None


class _Throttled:
    """Text that is updated at most once per interval."""

    def __init__(self, make: Callable[[], str]):
        self._make = make
        self._text = ""
        self._next = 0.0

    def look(self, *, at_once: bool = False) -> str:
        start = time.monotonic()
        if at_once or start >= self._next:
            self._text = self._make()
            end = time.monotonic()
            self._next = end + max(_MIN_INTERVAL, _COST_SHARE * (end - start))
        return self._text


def _rank() -> int:
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if ready else 0
