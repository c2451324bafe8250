"""Canaries in the user's own run: rows of the data set whose part in the training hangs on a coin each.

All canaries have a row, so that nothing public follows from the coins, and are drawn as others are. A canary that is
out adds a gradient of zero. One that is in adds its own gradient, or, as a gradient canary, a long one along a
direction that only the audit knows: norms, clipping factors and sums are formed of it as of any other.

Axes: M canaries, K places of a direction, B rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dpengine.capture import LayerCall, Use
from dpengine.gradients import AbstractGradients, Sums, wide

Indices = npt.NDArray[np.int64]
Bits = npt.NDArray[np.bool_]

_PLACES = 16  # of a direction, at most: some in most layers, yet few enough to keep for thousands of canaries
_LOUD = 8.0  # norm of a canary's gradient over the threshold, so that clipping has to shorten it


@dataclass(frozen=True, eq=False)
class Canaries:
    """Which rows are canaries, and what their coins say.

    Attributes:
        coins: ``(M,)``, whether each takes part.
        at: ``(N,)``, the canary of each row of the data set, -1 for rows that are none.
    """

    coins: Bits
    at: Indices

    @property
    def count(self) -> int:
        """How many canaries there are."""
        return len(self.coins)


class Directions:
    """Unit vectors in the space of all parameters, each with few places other than zero that no other one has.

    So what one canary adds is not seen along another's direction.

    Args:
        sizes: Numbers in each parameter, in the order of the vector of all.
        count: Directions.
        rng: Draws places and signs.

    Raises:
        ValueError: If there are more canaries than parameters.
    """

    def __init__(self, sizes: Sequence[int], count: int, rng: np.random.Generator):
        self.ends = np.cumsum(sizes, dtype=np.int64)
        total = int(self.ends[-1]) if len(sizes) else 0
        if count > total:
            raise ValueError(
                f"auditing: {count:,} gradient canaries for {total:,} trainable numbers; each needs one of its own. "
                f"Pass canaries={total} or less, or kind='input'."
            )
        places = min(_PLACES, total // count)
        self.places_MK = rng.permutation(total)[: count * places].reshape(count, places)
        self.values_MK = rng.choice([-1.0, 1.0], self.places_MK.shape) / np.sqrt(places)

    def along(self, vector: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The product ``(M,)`` of a vector of all parameters with each direction."""
        found: npt.NDArray[np.float64] = (vector[self.places_MK] * self.values_MK).sum(axis=1)
        return found

    def rows(self, number: int, shape: Sequence[int], canary_B: Indices, norm: float, like: Tensor) -> Tensor:
        """One parameter's part of the gradients of some canaries.

        Args:
            number: Of the parameter.
            shape: Its own.
            canary_B: The canary of each row; -1 for rows that get zero.
            norm: Of each canary's whole gradient.
            like: Has the device and the dtype.

        Returns:
            ``(B, *shape)``.
        """
        begin, end = (int(self.ends[number - 1]) if number else 0), int(self.ends[number])
        row_C = np.flatnonzero(canary_B >= 0)
        places_CK, values_CK = self.places_MK[canary_B[row_C]], norm * self.values_MK[canary_B[row_C]]
        inside = (places_CK >= begin) & (places_CK < end)
        flat = torch.zeros(len(canary_B) * (end - begin), dtype=wide(like.dtype), device=like.device)
        at = (row_C[:, None] * (end - begin) + places_CK - begin)[inside]
        flat[torch.from_numpy(at).to(flat.device)] = torch.from_numpy(values_CK[inside]).to(flat)
        return flat.view(len(canary_B), *shape)


class PlantedGradients(AbstractGradients):
    """Any strategy, with the gradients of canaries put in the place of their rows' own, before norms are formed.

    Args:
        inner: The strategy that does the work.
        canaries: The canaries.
        chunk: The rows of the data set that the chunk at hand has, in order, and the step.
        directions: Of gradient canaries; None leaves canaries that are in their own gradients.
        parameters: The trainable parameters now, by name, in the order of the directions.
        threshold: What a whole gradient is clipped to now.

    Attributes:
        drawn: By step, the canaries that were in the batch, whatever their coins say.
    """

    def __init__(
        self,
        inner: AbstractGradients,
        canaries: Canaries,
        chunk: Callable[[], tuple[int, Indices]],
        directions: Directions | None,
        parameters: Callable[[], Mapping[str, nn.Parameter]],
        threshold: Callable[[], float],
    ):
        self.inner = inner
        self.drawn: dict[int, list[Indices]] = {}
        self._canaries = canaries
        self._chunk = chunk
        self._directions = directions
        self._parameters = parameters
        self._threshold = threshold
        self._replaced: Tensor | None = None

    def sq_norms(self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float) -> Tensor:
        if self.inner.rows:
            self._plant(scale)
        return self.inner.sq_norms(groups, num_groups, scale)

    def _plant(self, scale: float) -> None:
        step, rows = self._chunk()
        canary_B = self._canaries.at[rows]
        self.drawn.setdefault(step, []).append(canary_B[canary_B >= 0])
        is_in = np.append(self._canaries.coins, False)[canary_B]  # -1 takes the last
        replaced = (canary_B >= 0) & (~is_in if self._directions is None else True)
        if not replaced.any():
            return
        parameters = self._parameters()
        self._replaced = torch.from_numpy(replaced).to(next(iter(parameters.values())).device)
        self.inner.drop(self._replaced)
        if self._directions is None or not is_in.any():
            return
        planted_B = np.where(is_in, canary_B, -1)
        norm = _LOUD * self._threshold() / scale
        for number, (name, parameter) in enumerate(parameters.items()):
            grad = self._directions.rows(number, parameter.shape, planted_B, norm, parameter)
            self.inner.receive_rows(Use(parameter, name), grad)

    def drop(self, rows_B: Tensor) -> None:
        # A strategy may hold one set of dropped rows only, the last that it was told.
        if self._replaced is not None and self._directions is None:
            rows_B = rows_B | self._replaced.to(rows_B.device)
        self.inner.drop(rows_B)

    def clear(self) -> None:
        self._replaced = None
        self.inner.clear()

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        self.inner.receive(call, uses, rule)

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        self.inner.receive_rows(use, grad)

    def backward_ended(self) -> None:
        self.inner.backward_ended()

    @property
    def rows(self) -> Mapping[str, int]:
        return self.inner.rows

    @property
    def parameters(self) -> Mapping[nn.Parameter, str]:
        return self.inner.parameters

    @property
    def choices(self) -> Sequence[Any]:
        return self.inner.choices

    def add_sums(self, groups: Mapping[nn.Parameter, int], weights_BK: Tensor, scale: float, into: Sums) -> None:
        self.inner.add_sums(groups, weights_BK, scale, into)
