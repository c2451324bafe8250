"""Wraps a grad mode with the independence probe, which runs at some of the first passes and periodically after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.capture.capture import Capture
from dpengine.capture.record import LayerCall, Use
from dpengine.capture.replay import Replay
from dpengine.errors import UnsupportedLayerError
from dpengine.grad_modes.bookkeep import Bookkeep
from dpengine.grad_modes.choose_method import Choice
from dpengine.grad_modes.flat_buffer import Sums
from dpengine.grad_modes.rows import Units
from dpengine.grad_modes.strategy import AbstractGradients

from .live_probe import Company

EVERY = 500  # backward passes from one probe to the next; the first ones are at 1, 8, 64 and 512


class Probed(AbstractGradients):
    """Any strategy, with a probe before its sums are used: at some of the first passes, and at every ``every``-th.

    A pass of more than twice the rows that were probed has the next one probed, as thoroughly as the first.

    Rows that do not stay apart raise UnsupportedLayerError, which names the parameter that shows it most. A model whose
    forward does not repeat itself under the same random state cannot be probed, nor can gradients that did not come
    through its outputs, which is noticed once.
    """

    def __init__(self, inner: AbstractGradients, capture: Capture, every: int | None = EVERY):
        self._inner = inner
        self._capture = capture
        self._every = every
        self._passes = 0
        self._next = 1  # the pass that is probed next
        self._thorough = True  # whether that is on more rows than were probed
        self._most_rows = 0  # of a pass that was probed, or had the next one probed
        self._sq_norms_B = torch.zeros(0)
        self._own = Replay() if capture.replay is None else None
        self._combined = False  # whether rows are units now
        self._arm()

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        self._inner.receive(call, uses, rule)

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        self._inner.receive_rows(use, grad)

    @property
    def rows(self) -> Mapping[str, int]:
        return self._inner.rows

    @property
    def parameters(self) -> Mapping[nn.Parameter, str]:
        return self._inner.parameters

    @property
    def choices(self) -> Sequence[Choice]:
        return self._inner.choices

    def formed(self, parameter: nn.Parameter) -> Tensor:
        """Per-sample gradients of a parameter, where the strategy can form them at any time."""
        assert isinstance(self._inner, Bookkeep)
        return self._inner.formed(parameter)

    def combine(self, units: Units) -> None:
        """From here on a row is a unit of privacy. The probe looks at rows, before that."""
        if not isinstance(self._inner, Bookkeep):
            raise UnsupportedLayerError(
                "Gradients of a unit of privacy are formed by grad_sample_mode='auto' alone.", fix="Pass that."
            )
        if self.due:
            everything = dict.fromkeys(self._inner.parameters, 0)
            self._sq_norms_B = self._inner.sq_norms(everything, 1, 1.0).sum(dim=1)
        self._combined = True
        self._inner.combine(units)

    def sq_norms(self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float) -> Tensor:
        norms_BK = self._inner.sq_norms(groups, num_groups, scale)
        if not self._combined:
            self._sq_norms_B = norms_BK.sum(dim=1) / scale**2
        return norms_BK

    def _arm(self) -> None:
        """Has the next forward pass noted if a probe is due, where no strategy has it noted anyway."""
        if self._own is not None:
            self._own.clear()
            self._capture.replay = self._own if self.due else None

    @property
    def due(self) -> bool:
        """Whether the next pass is probed."""
        return self._every is not None and self._passes + 1 >= self._next

    def passed_elsewhere(self) -> None:
        """Counts a pass that was not seen here."""
        self._passes += 1
        self._arm()

    def backward_ended(self) -> None:
        self._inner.backward_ended()

    def drop(self, rows_B: Tensor) -> None:
        self._inner.drop(rows_B)

    def add_sums(self, groups: Mapping[nn.Parameter, int], weights_BK: Tensor, scale: float, into: Sums) -> None:
        # The probe comes last, when what was held of the batch is free: it needs as much once more.
        self._inner.add_sums(groups, weights_BK, scale, into)
        self.probe()

    def probe(self) -> None:
        """Ends a pass whose norms were asked for, with a probe if one is due."""
        replay, sq_norms_B = self._capture.replay, self._sq_norms_B
        rows = len(sq_norms_B)
        self._passes += 1
        if self._every is not None and self._passes >= self._next and replay is not None and rows > 1:
            thorough, self._thorough = self._thorough, False
            self._next = min(8 * self._passes, self._passes + self._every)
            self._most_rows = max(self._most_rows, rows)
            Company(self._capture, replay, sq_norms_B, self._passes, thorough=thorough).ask()
        elif rows > 2 * self._most_rows > 0:  # what keeps few rows apart may mix many
            self._next, self._most_rows, self._thorough = self._passes + 1, rows, True
        self._arm()

    def clear(self) -> None:
        self._combined = False
        self._inner.clear()
