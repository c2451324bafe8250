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

_LEAST_PAUSE = 1.0  # seconds between two looks at epsilon
_COST_SHARE = 20  # and at least so many times what a look takes
_BAR = "training {bar:19} {n_fmt}/{total_fmt}  {desc}  {elapsed}"
_BAR_WITHOUT_TOTAL = "training {n_fmt} steps  {desc}  {elapsed}"


class Spender(Protocol):
    """What a bar asks of an engine."""

    @property
    def ledger(self) -> Ledger:
        """What was charged."""

    @property
    def epsilon(self) -> float:
        """Epsilon spent so far."""


@suggests_names
def progress(
    engine: Spender, loader: Iterable[B], *, target_epsilon: float | None = None, total: int | None = None
) -> Iterator[B]:
    """Yields the batches of a loader, beside a bar that counts logical batches and shows epsilon.

    Silent where nobody looks: if the standard error stream is no terminal (a notebook counts as one), on any rank but
    the first, without tqdm, and with ``DPENGINE_PROGRESS=0``. Epsilon is asked for about once a second, less often
    where the answer takes long.
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
    columns, rows = shutil.get_terminal_size()  # 80 and 24 where the terminal does not know, as in some CI
    text = spent_text(engine, target_epsilon)
    with tqdm(total=total, bar_format=layout, desc=text, ncols=columns, nrows=rows) as bar:

        def show(*, at_once: bool = False) -> None:
            # Steps charged, not chunks yielded: a logical batch may come in several chunks.
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
    """What was spent, in a few characters, rounded up: ``"ε 1.42/3.00 (48 %)"``."""
    try:
        spent = engine.epsilon
    except AccountingRefusedError:
        return "ε not claimed"
    if target_epsilon is None:
        return f"ε {round_up(spent)}"
    return f"ε {round_up(spent)}/{round_up(target_epsilon)} ({math.ceil(100 * spent / target_epsilon)} %)"


def is_shown() -> bool:
    """Whether ``progress`` shows a bar here."""
    wanted = os.environ.get("DPENGINE_PROGRESS")
    notebook = "ipykernel" in sys.modules
    if wanted == "0" or _rank() != 0 or not (wanted == "1" or notebook or sys.stderr.isatty()):
        return False
    return importlib.util.find_spec("tqdm") is not None


class _Throttled:
    """A text that is made anew only now and then."""

    def __init__(self, make: Callable[[], str]):
        self._make = make
        self._text = ""
        self._next = 0.0

    def look(self, *, at_once: bool = False) -> str:
        began = time.monotonic()
        if at_once or began >= self._next:
            self._text = self._make()
            ended = time.monotonic()
            self._next = ended + max(_LEAST_PAUSE, _COST_SHARE * (ended - began))
        return self._text


def _rank() -> int:
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if ready else 0
