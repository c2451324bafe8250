"""Noise correlated across steps: step t gets row t of ``S^-1 Z``, where the rows of Z are independent normal vectors.

A `Recurrence` defines the weights by which each row is computed from fresh rows (of Z) and kept rows (sums of earlier
rows). This module generates and stores the rows, and raises if the guarantee does not hold. A discarded step also uses
a row. Otherwise two participations of an example could be closer than the guarantee allows.

Axes: K kept rows, D elements of the slice that gets noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import numpy as np
import torch
from torch import Tensor

from dpengine.accounting.run_events import Correlation
from dpengine.distributed.local_shards import StridedPositions
from dpengine.errors import PrivacyError

from .mechanism import AbstractNoise, GaussianNoise, check_noise_arguments, end_of, used_address
from .source import NoiseSource

Weights = Sequence[float] | np.ndarray
Fresh = Callable[[Tensor, float, int], None]
"""``fresh(out, weight, step)`` adds ``weight`` times that step's fresh row to ``out`` ``(D,)``."""


class CorrelatedRows(Protocol):
    """Interface of correlated noise for ``make_private(noise=...)``. Returns the weights of each row, which are public.

    Row t of the noise is ``x_t = sum_j fresh[j] z_(t-j) + sum_k weights[k] m_k``, with independent normal rows z and K
    kept rows m, which are zero before the first step. Then ``m_k`` is set to ``factors[k] m_k + gains[k] x_t``. The
    engine generates the fresh rows, stores the kept rows, and computes the sensitivity of the strategy.
    """

    @property
    def size(self) -> int | None:
        """Number of steps; None for no limit."""

    def row(self, step: int) -> tuple[Weights, Weights]:
        """Returns ``fresh``, whose first number is positive, and ``weights`` ``(K,)``."""

    def kept(self, step: int) -> tuple[Weights, Weights]:
        """Returns ``factors`` and ``gains``, ``(K,)`` each."""


UNKNOWN = Correlation(bands=None)


@dataclass(frozen=True)
class Recurrence:
    """Correlated noise as in `CorrelatedRows`, with its privacy analysis.

    Attributes:
        name: Name in reports and checkpoints.
        row: See `CorrelatedRows`.
        kept: See `CorrelatedRows`.
        size: Number of rows; None for no limit.
        column_norm: Largest column norm of S: the sensitivity to one participation, by which the noise is multiplied.
        correlation: Properties of S for the privacy analysis.
        description: Public description for reports.
    """

    name: str
    row: Callable[[int], tuple[Weights, Weights]]
    kept: Callable[[int], tuple[Weights, Weights]] = lambda step: ((), ())
    size: int | None = None
    column_norm: float = 1.0
    correlation: Correlation = UNKNOWN
    description: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_kept(self) -> int:
        """Number of kept rows, K."""
        return len(self.row(0)[1])

    @property
    def regenerates(self) -> bool:
        """True if a step may use fresh rows of earlier steps."""
        return self.size is None or any(len(self.row(step)[0]) > 1 for step in range(self.size))


def add_row(noise: Recurrence, step: int, fresh: Fresh, kept_KD: Tensor, out: Tensor) -> None:
    """Adds row ``step`` to ``out`` ``(D,)``, which must be zero, and updates the kept rows. Steps must be in order."""
    fresh_weights, weights = noise.row(step)
    for lag, weight in enumerate(fresh_weights[: step + 1]):
        if weight:
            fresh(out, float(weight), step - lag)
    if not len(kept_KD):
        return
    out.addmv_(kept_KD.t(), torch.as_tensor(weights, dtype=out.dtype, device=out.device))
    factors, gains = (np.asarray(values, dtype=np.float64) for values in noise.kept(step))
    changed = np.flatnonzero((factors != 1) | (gains != 0))
    if len(changed) == len(kept_KD):
        factors_K, gains_K = (
            torch.as_tensor(values, dtype=out.dtype, device=out.device) for values in (factors, gains)
        )
        kept_KD.mul_(factors_K.unsqueeze(1)).addr_(gains_K, out)
        return
    for k in changed:
        kept_KD[k].mul_(float(factors[k])).add_(out, alpha=float(gains[k]))


@final
class CorrelatedNoise(AbstractNoise):
    """Adds ``std`` times row t of ``S^-1 Z`` at step t, counted from 0.

    Privacy: the guarantee is for all rows together. It requires the same ``std`` at every step, and that every row is
    used at most once. The state is secret, because it determines a part of the noise of later steps.

    Args:
        source: Source of fresh normals.
        recurrence: Weights of the rows.
        domain: Purpose of the normals. Each use of the source must have a different domain.
        first_step: Step of row 0.
    """

    def __init__(self, source: NoiseSource, recurrence: Recurrence, *, domain: str = "noise", first_step: int = 0):
        self._source = source
        self._recurrence = recurrence
        self._domain = domain
        self._first_step = first_step
        self._next_address = (first_step, 0)  # (step, index) of the first unused address
        self._std: float | None = None
        self._slices: dict[StridedPositions, _Slice] = {}
        self._nonces: dict[int, int] = {}  # nonces of the source, by the first row generated with the nonce
        # Generator of each slice. The key None is for a loaded state.
        self._generators: dict[StridedPositions | None, str] = {}

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
        """Adds the noise of a step in place, and multiplies by ``scale``.

        The slices of a step's vector must be passed in the order of their ``start``, and be the same at every step.

        Args:
            sums: Contiguous 1-D tensor of clipped sums, float32 or float64. Noise is computed and stored in its dtype.
            std: Standard deviation of the fresh rows, the same at every step. 0 adds nothing.
            step: Number of the logical batch in the run. It must increase.
            start: Index of ``sums[0]`` in the complete vector.
            scale: Factor of the noisy sums.
            rows: See ``AbstractNoise.add``.
            stride: See ``AbstractNoise.add``.

        Raises:
            PrivacyError: If the address was used, the run has no further row, or ``std`` or the slices changed.
        """  # noqa: DOC502 - the checks raise on our behalf
        where = "noise.CorrelatedNoise.add"
        check_noise_arguments(where, sums, std)
        self._check_step(where, std, step, start)
        positions = StridedPositions(start, sums.numel() // rows, rows, stride)
        slice_state = self._slice_state(where, sums, step, positions)
        self._std = std
        # Set before the noise is added: an address counts as used even if the addition fails.
        self._next_address = (step, end_of(sums, start, rows, stride))
        if not self._nonces or self._source.nonce != next(reversed(self._nonces.values())):
            self._nonces[slice_state.rows] = self._source.nonce
        row = step - self._first_step
        if std == 0:
            slice_state.rows = row + 1
            sums.mul_(scale)
            return

        self._check_generator(where, sums, positions)

        def fresh(out: Tensor, weight: float, fresh_row: int) -> None:
            nonce = next(nonce for first, nonce in reversed(self._nonces.items()) if first <= fresh_row)
            fresh_step = fresh_row + self._first_step
            address: dict[str, Any] = {"step": fresh_step, "start": start, "rows": rows, "stride": stride}
            self._source.add_normal_(out, weight, domain=self._domain, nonce=nonce, **address)

        noise = sums.new_empty(sums.shape)
        while slice_state.rows <= row:  # rows of discarded steps only update the state
            noise.zero_()
            add_row(self._recurrence, slice_state.rows, fresh, slice_state.state_KD, noise)
            slice_state.rows += 1
        sums.add_(noise, alpha=std).mul_(scale)

    def _check_step(self, where: str, std: float, step: int, start: int) -> None:
        if (step, start) < self._next_address:
            raise used_address(where, step, start, self._next_address)
        size = self._recurrence.size
        if size is not None and step - self._first_step >= size:
            raise PrivacyError(
                f"{where}: got step {step - self._first_step} of a run whose noise was planned for {size} steps.",
                fix="Plan for all steps of the run, or begin a new run, which adds to the privacy cost.",
            )
        if self._std is not None and std != self._std:
            raise PrivacyError(
                f"{where}: std changed from {self._std!r} to {std!r}. Correlated noise needs a constant noise "
                "multiplier and sensitivity.",
                fix="Do not change the noise multiplier or the clipping norm, or use independent noise.",
            )

    def _check_generator(self, where: str, sums: Tensor, positions: StridedPositions) -> None:
        """Raises if a different generator would regenerate different rows of earlier steps, which would not cancel."""
        generator = self._source.generator_on(sums.device)
        earlier = self._generators.setdefault(positions, self._generators.get(None, generator))
        if generator != earlier and self._recurrence.regenerates:
            raise PrivacyError(
                f"{where}: the noise of earlier steps comes from a different generator ({earlier}, now "
                f"{generator}), so it would not cancel.",
                fix="Move the model before training starts, and keep it on devices of the same type.",
            )

    def _slice_state(self, where: str, sums: Tensor, step: int, positions: StridedPositions) -> _Slice:
        """Returns the state of a slice of the vector. Slices must be the same at every step."""
        slice_state = self._slices.get(positions)
        rows_used = max((other.rows for other in self._slices.values()), default=0)
        is_first_step = rows_used in (0, step - self._first_step + 1)
        if slice_state is None and is_first_step and all(other.first == step for other in self._slices.values()):
            state_KD = sums.new_zeros(self._recurrence.num_kept, sums.numel())
            slice_state = self._slices[positions] = _Slice(state_KD, first=step)
        if slice_state is None:
            raise PrivacyError(
                f"{where}: the slices of the vector differ from those of earlier steps (index {positions.start}, "
                f"{positions.count} elements).",
                fix="Freeze, unfreeze or move parameters before training starts.",
            )
        slice_state.state_KD = slice_state.state_KD.to(sums)  # a loaded state is on the CPU
        return slice_state

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that determines later noise, without the source. Secret.

        Returns:
            ``"slices"`` maps the positions of each slice of this rank to its state ``(K, D)``. It may be loaded
            with different boundaries of the slices. The other entries are equal on all ranks.

        Raises:
            PrivacyError: If a step failed after noise was added to some of its slices.
        """
        progress = {(slice_state.first, slice_state.rows) for slice_state in self._slices.values()}
        if len(progress) > 1:
            raise PrivacyError(
                "noise.CorrelatedNoise.state_dict: a step failed after noise was added to some of its slices.",
                fix="Call state_dict() after the next step, which updates all slices.",
            )
        first, rows = progress.pop() if progress else (None, None)
        return {
            "recurrence": self._recurrence.name,
            "first_step": self._first_step,
            "next_step": self._next_address[0] + (self._next_address[1] > 0),
            "std": self._std,
            "lives": dict(self._nonces),
            "generators": sorted(set(self._generators.values())),
            "first": first,
            "rows": rows,
            "slices": {positions: slice_state.state_KD.clone() for positions, slice_state in self._slices.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the result of ``state_dict()``. Later noise is bit-identical to that without the interruption.

        Args:
            state: Result of ``state_dict``, possibly with slices at different boundaries.

        Raises:
            ValueError: If the state belongs to a different mechanism.
        """
        if state["recurrence"] != self._recurrence.name:
            raise ValueError(
                f"noise.CorrelatedNoise: the state belongs to {state['recurrence']!r}, not to "
                f"{self._recurrence.name!r}. Load it into the mechanism that saved it."
            )
        self._first_step = state["first_step"]
        self._next_address = (state["next_step"], 0)
        self._std = state["std"]
        self._nonces = {int(first): int(nonce) for first, nonce in state["lives"].items()}
        generators = state.get("generators")  # missing in states of earlier versions
        self._generators = {None: " and ".join(generators)} if generators else {}
        self._slices = {
            positions: _Slice(state_KD.clone(), first=state["first"], rows=state["rows"])
            for positions, state_KD in state["slices"].items()
        }


def mechanism_for(source: NoiseSource, recurrence: Recurrence | None, *, first_step: int = 0) -> AbstractNoise:
    """Returns the noise mechanism: `GaussianNoise` without a recurrence, otherwise `CorrelatedNoise`."""
    return GaussianNoise(source) if recurrence is None else CorrelatedNoise(source, recurrence, first_step=first_step)


@dataclass(eq=False)
class _Slice:
    """State of a slice of the vector.

    Attributes:
        state_KD: Kept rows of the recurrence.
        first: First step of the slice.
        rows: Number of rows generated.
    """

    state_KD: Tensor
    first: int
    rows: int = 0
