"""Batches that the training loop draws itself."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

from dpengine.accounting.run_events import Participation, PoissonParticipation, UnknownParticipation
from dpengine.errors import keyword_hints

from .poisson import checked_batch_size, checked_sample_rate
from .scheme import Draws, WordStream, checked_integer


@keyword_hints
@dataclasses.dataclass(frozen=True)
class ExternalBatches(Draws):
    """Sampling scheme of a loop that draws its own batches. Each backward pass is one logical batch.

    Privacy: epsilon is claimed only if ``sample_rate`` is given. By passing it, you declare that each batch includes
    each example independently with this probability, that the draws are secret, and that the loop neither drops nor
    repeats a batch because of its content. An empty batch must also go through forward, backward and step. The engine
    cannot check this, and reports state that the user declared the rate.

    Attributes:
        expected_batch_size: Public, positive constant that divides the gradient sums of a mean loss.
        num_examples: Number of examples in the data set; 0 if unknown. ``make_private`` then needs ``target_delta``.
        sample_rate: Probability that an example is in a batch, in (0, 1]. None to claim no epsilon; stored as 1.
        claims_epsilon: Whether a sampling rate was given.
        steps_per_epoch: Number of logical batches per epoch, for ``make_private(epochs=...)``.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If an argument is not a number.
    """

    expected_batch_size: float
    num_examples: int = 0
    sample_rate: float | None = None  # type: ignore[assignment]
    steps_per_epoch: int = 1
    claims_epsilon: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Checks the arguments."""
        size = checked_batch_size("ExternalBatches", self.expected_batch_size)
        object.__setattr__(self, "expected_batch_size", size)
        checked_integer("ExternalBatches", "num_examples", self.num_examples, at_least=0)
        checked_integer("ExternalBatches", "steps_per_epoch", self.steps_per_epoch, at_least=1)
        is_declared = self.sample_rate is not None
        rate = checked_sample_rate("ExternalBatches", self.sample_rate) if is_declared else 1.0  # type: ignore[arg-type]
        object.__setattr__(self, "sample_rate", rate)
        object.__setattr__(self, "claims_epsilon", is_declared)

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the scheme in reports: ``"external-poisson"`` with a sampling rate, else ``"external"``."""
        return "external-poisson" if self.claims_epsilon else "external"

    @property
    def participation(self) -> Participation:
        """Participation of examples, as the user declared it."""
        if self.claims_epsilon:
            return PoissonParticipation(self.sample_rate)  # type: ignore[arg-type]
        return UnknownParticipation("sampling='external' does not draw Poisson batches.")

    def draw(self, step: int, words: WordStream) -> NoReturn:  # type: ignore[override]
        """Raises TypeError, because the training loop draws these batches."""
        raise TypeError("ExternalBatches are drawn by the training loop, not by the engine.")


def is_drawn_by_loop(sampling: Any) -> bool:
    """Returns True if the training loop draws the batches itself."""
    return isinstance(sampling, ExternalBatches)
