"""Noise that hangs together over steps: step t gets row t of ``S^-1 Z``, where Z has a fresh normal row for each step.

A recurrence says how a row follows from the fresh ones and from what is kept; this file keeps it, addresses it, and
refuses what the guarantee does not cover. A step that was given up has a row all the same: otherwise the steps of one
example would move closer together than the guarantee allows.

Axes: K rows of state, D numbers of the slice that is noised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from dpengine.distributed.local_shards import Places
from dpengine.errors import PrivacyError

from .mechanism import AbstractNoise, GaussianNoise, check_release, end_of
from .source import NoiseSource

Fresh = Callable[[Tensor, float, int], None]
"""``fresh(out, weight, step)`` adds ``weight`` times that step's fresh row to ``out`` ``(D,)``."""


@dataclass(frozen=True)
class Recurrence:
    """How the noise of a step follows from fresh normals.

    Attributes:
        name: What it is called in reports and checkpoints.
        row: ``row(t, fresh, state_KD, out)`` adds row t of ``S^-1 Z`` to ``out`` ``(D,)``, which is zero, and brings
            the state forward. Rows come in order.
        kept: Rows of state, K.
        size: Steps after which there is no row; None if there is no end.
        column_norm: Largest column norm of S: the sensitivity to one participation, by which noise is multiplied.
        facts: What reports say of it.
    """

    name: str
    row: Callable[[int, Fresh, Tensor, Tensor], None]
    kept: int = 0
    size: int | None = None
    column_norm: float = 1.0
    facts: Mapping[str, Any] = field(default_factory=dict)


@final
class CorrelatedNoise(AbstractNoise):
    """Adds ``std`` times row t of ``S^-1 Z`` at step t, counted from 0.

    The guarantee is for the whole matrix, so ``std`` is the same at every step, no row is used twice, and none is asked
    for beyond the last. What is kept is secret: with it, a part of the noise of later steps can be told.

    Args:
        source: Where fresh normals come from.
        recurrence: The matrix.
        domain: What the normals are for, as against other uses of the same source.
        first_step: The step that has row 0.
    """

    def __init__(self, source: NoiseSource, recurrence: Recurrence, *, domain: str = "noise", first_step: int = 0):
        self._source = source
        self._recurrence = recurrence
        self._domain = domain
        self._first = first_step
        self._next = (first_step, 0)  # (step, index): the first address not used yet
        self._std: float | None = None
        self._slices: dict[Places, _Slice] = {}
        self._lives: dict[int, int] = {}  # incarnation of the source by the first step that was drawn in it

    def add(
        self,
        sums: Tensor,
        *,
        std: float,
        step: int,
        start: int = 0,
        scale: float = 1.0,
        rows: int = 1,
        stride: int = 0,
    ) -> None:
        """Adds this step's noise in place, and multiplies by ``scale``.

        Slices of one step's vector come in the order of their ``start``, and are cut alike at every step.

        Args:
            sums: Contiguous 1-D tensor of clipped sums, float32 or float64. Noise is computed and kept in its type.
            std: Standard deviation of the fresh rows, the same at every step. 0 adds nothing.
            step: Number of the logical batch since the run began, above those before it.
            start: Index of ``sums[0]`` in the whole vector.
            scale: What the noisy sums are multiplied by.
            rows: See ``AbstractNoise.add``.
            stride: See ``AbstractNoise.add``.

        Raises:
            PrivacyError: If the address has been used, the matrix is at its end, or ``std`` or the slices changed.
        """  # noqa: DOC502 - the checks raise on our behalf
        where = "noise.CorrelatedNoise.add"
        check_release(where, sums, std)
        self._refuse(where, std, step, start)
        part = self._slice(where, sums, step, Places(start, sums.numel() // rows, rows, stride))
        self._std = std
        self._next = (step, end_of(sums, start, rows, stride))  # before: an address that failed half-way is used up
        if not self._lives or self._source.incarnation != next(reversed(self._lives.values())):
            self._lives[part.rows] = self._source.incarnation
        last = step - self._first
        if std == 0:
            part.rows = last + 1
            sums.mul_(scale)
            return

        def fresh(out: Tensor, weight: float, drawn: int) -> None:
            life = next(life for first, life in reversed(self._lives.items()) if first <= drawn)
            address: dict[str, Any] = {"step": drawn + self._first, "start": start, "rows": rows, "stride": stride}
            self._source.add_normal_(out, weight, domain=self._domain, incarnation=life, **address)

        noise = sums.new_empty(sums.shape)
        while part.rows <= last:  # rows of steps that were given up go into the state alone
            noise.zero_()
            self._recurrence.row(part.rows, fresh, part.state_KD, noise)
            part.rows += 1
        sums.add_(noise, alpha=std).mul_(scale)

    def _refuse(self, where: str, std: float, step: int, start: int) -> None:
        if (step, start) < self._next:
            raise PrivacyError(
                f"{where}: got step {step} from index {start}, after step {self._next[0]} up to index "
                f"{self._next[1]}. The same noise in two releases cancels in their difference.",
                fix="Give each release its own step, and each slice of one vector its own start.",
            )
        size = self._recurrence.size
        if size is not None and step - self._first >= size:
            raise PrivacyError(
                f"{where}: step {step - self._first} of a run whose noise was planned for {size} steps.",
                fix="Plan for as many steps as the run has, or begin a new run, which composes with this one.",
            )
        if self._std is not None and std != self._std:
            raise PrivacyError(
                f"{where}: std is {std!r} now and was {self._std!r}. The guarantee of correlated noise is for the "
                "whole run with one noise multiplier and one sensitivity.",
                fix="Keep noise multiplier and clipping threshold as they are, or use independent noise.",
            )

    def _slice(self, where: str, sums: Tensor, step: int, places: Places) -> _Slice:
        """What is kept for these numbers of the vector, which must be the same at every step."""
        part = self._slices.get(places)
        begun = max((other.rows for other in self._slices.values()), default=0)
        if part is None and begun in (0, step - self._first + 1):  # the first step, whose slices arrive one by one
            if not self._slices or all(other.first == step for other in self._slices.values()):
                part = self._slices[places] = _Slice(sums.new_zeros(self._recurrence.kept, sums.numel()), first=step)
        if part is None:
            raise PrivacyError(
                f"{where}: the vector is cut otherwise than at earlier steps (index {places.start}, {places.count} "
                "numbers).",
                fix="Freeze, thaw or move parameters before training starts.",
            )
        part.state_KD = part.state_KD.to(sums)  # a state that was loaded is on the CPU
        return part

    def state_dict(self) -> dict[str, Any]:
        """All that later noise depends on beside the source. Secret.

        Returns:
            ``"slices"`` has what is kept for the slices drawn here, ``(K, D)`` each, by their places; they may be cut
            otherwise when they are loaded. The rest is the same wherever parts of one vector are drawn.

        Raises:
            PrivacyError: If a step's noise was drawn for some slices, and failed for others.
        """
        progress = {(part.first, part.rows) for part in self._slices.values()}
        if len(progress) > 1:
            raise PrivacyError(
                "noise.CorrelatedNoise.state_dict: a step failed when a part of its noise was drawn.",
                fix="Ask after the next step, which brings all of it forward.",
            )
        first, rows = progress.pop() if progress else (None, None)
        return {
            "recurrence": self._recurrence.name,
            "first_step": self._first,
            "next_step": self._next[0] + (self._next[1] > 0),
            "std": self._std,
            "lives": dict(self._lives),
            "first": first,
            "rows": rows,
            "slices": {places: part.state_KD.clone() for places, part in self._slices.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from ``state_dict()``, bit by bit as if nothing had been between.

        Args:
            state: What that returned; its slices may be cut otherwise.

        Raises:
            ValueError: If it is of another mechanism.
        """
        if state["recurrence"] != self._recurrence.name:
            raise ValueError(
                f"noise.CorrelatedNoise: the state is of {state['recurrence']!r}, this is {self._recurrence.name!r}. "
                "Load it into the mechanism that it was taken from."
            )
        self._first = state["first_step"]
        self._next = (state["next_step"], 0)
        self._std = state["std"]
        self._lives = {int(first): int(life) for first, life in state["lives"].items()}
        self._slices = {
            places: _Slice(state_KD.clone(), first=state["first"], rows=state["rows"])
            for places, state_KD in state["slices"].items()
        }


def mechanism_for(source: NoiseSource, recurrence: Recurrence | None, *, first_step: int = 0) -> AbstractNoise:
    """The mechanism that draws from a source: independent noise where no recurrence is given."""
    return GaussianNoise(source) if recurrence is None else CorrelatedNoise(source, recurrence, first_step=first_step)


@dataclass(eq=False)
class _Slice:
    """What is kept for a slice of the vector.

    Attributes:
        state_KD: The recurrence's own.
        first: The step at which it was first seen.
        rows: Rows that were drawn.
    """

    state_KD: Tensor
    first: int
    rows: int = 0
