"""Schedule of the independence checks, which run at some of the first backward passes and then periodically."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dpengine.capture.capture import Capture
from dpengine.capture.replay import Replay

from .live_probe import IndependenceCheck
from .memory_probe import MemoryCheck, StoredAttributes
from .padding_probe import PaddingProbe

EVERY = 500  # backward passes between checks; the first checks are at passes 1, 8, 64 and 512


class Probe:
    """Checks backward passes for gradients that depend on other samples of the batch.

    If a pass has more than twice as many samples as any checked pass, the next pass is checked as well. If samples are
    not independent, UnsupportedLayerError names the parameter with the largest deviation. If the batch after a checked
    one reads data that the model stored, BufferUpdateError is raised. Two cases cannot be checked and give one warning:
    a forward pass that is not reproducible from its random state, and gradients that bypass the model's outputs.

    Attributes:
        every: Number of passes between checks; None disables the checks.
        armed: True if the next forward pass is recorded.
        needs_other_length: True if a batch of another padded length is needed to decide whether padding has effects.
    """

    def __init__(self, capture: Capture, every: int | None = EVERY):
        self.every = every
        self._capture = capture
        self._replay = Replay() if capture.replay is None else None  # a grad mode may record every pass itself
        self._passes = 0
        self._next = 1  # number of the next pass to check
        self._max_samples = 0  # largest number of samples of a pass that was checked or caused a check
        self._stored: list[StoredAttributes] = []  # attributes that the next pass may read
        self._padding = PaddingProbe(capture)
        self.needs_other_length = False
        self.armed = False
        self.arm()

    @property
    def due(self) -> bool:
        """True if the next pass is checked."""
        return self.every is not None and self._passes + 1 >= self._next

    def arm(self) -> None:
        """Records the next forward pass if a check is due."""
        self.armed = self.due or bool(self._stored)
        if self._replay is not None:
            if self._replay.reached:
                self._replay.clear()
            self._capture.replay = self._replay if self.armed else None

    def record_next(self) -> None:
        """Records the next forward pass even if no check of the model is due."""
        self.armed = True
        if self._replay is not None:
            self._capture.replay = self._replay

    def take_replay(self) -> Replay | None:
        """Returns the recorded forward passes of the last backward pass, for a later check; None if none."""
        return None if self._replay is None or not self._replay.reached else self._replay.split()

    def end_pass(self, replay: Replay | None, samples: int, sq_norms_B: Callable[[], Tensor]) -> None:
        """Ends a pass, and checks it if a check is due and the pass was recorded.

        Args:
            replay: The recorded forward passes; None if none were recorded.
            samples: Number of samples.
            sq_norms_B: Returns the squared norms ``(B,)`` of the unscaled per-sample gradients.
        """
        self._passes += 1
        if self._stored and replay is not None:
            stored, self._stored = self._stored, []
            MemoryCheck(self._capture, replay).check_read(stored)
        due = self.every is not None and self._passes >= self._next and samples > 1
        if due and replay is not None:
            self._next = min(8 * self._passes, self._passes + (self.every or EVERY))
            self._max_samples = max(self._max_samples, samples)
            IndependenceCheck(self._capture, replay, sq_norms_B(), self._passes).run()
            self._stored = MemoryCheck(self._capture, replay).stored_attributes(samples)
        elif samples > 2 * self._max_samples > 0:  # a model may mix samples only in large batches
            self._next, self._max_samples = self._passes + 1, samples
        if replay is not None and (due or self.needs_other_length):
            self._padding.check(replay, samples)
            self.needs_other_length = self._padding.needs_other_length
        self.arm()
