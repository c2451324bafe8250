"""Noise for loops without the engine: ``init`` once, then ``update`` for the sum of each step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpengine.errors import BudgetExceeded

from .correlated import Recurrence, mechanism_for
from .mechanism import AbstractNoise
from .source import NoiseSource

Place = tuple[torch.device, torch.dtype]


@dataclasses.dataclass(frozen=True)
class NoiseTransform:
    """Adds ``stddev`` times row t of ``S^-1 Z`` to the sum of step t.

    Attributes:
        stddev: Of each fresh normal, in units of the sums: noise multiplier times sensitivity times the largest column
            norm of S.
        recurrence: How noise hangs together over steps; None for independent noise.
        noise_seed: None for the operating system's randomness. With a seed noise repeats, and is no secret.
        iterations: Steps of the run, after which there is no noise; None for no end.

    Raises:
        ValueError: If ``stddev`` is negative or not finite.
    """

    stddev: float
    recurrence: Recurrence | None = None
    noise_seed: int | None = None
    iterations: int | None = None

    def __post_init__(self) -> None:
        """Refuses what is no standard deviation."""
        if not (self.stddev >= 0 and math.isfinite(self.stddev)):
            raise ValueError(f"NoiseTransform: stddev={self.stddev!r} must be finite and at least 0.")

    def init(self, params: Any) -> NoiseState:
        """The state before the first step.

        Args:
            params: Tensors of the shapes, dtypes and devices of the sums, in any nesting.

        Returns:
            The state. It is secret.
        """
        source = NoiseSource.fresh() if self.noise_seed is None else NoiseSource.seeded(self.noise_seed)
        return NoiseState(source, mechanism_for(source, self.recurrence), 0, _shapes(params))

    def update(self, sums: Any, state: NoiseState) -> tuple[Any, NoiseState]:
        """The noisy sums of the next step.

        Args:
            sums: The clipped sums as they were formed: anything that scaled them before would change the guarantee.
            state: What ``init`` or the last ``update`` returned. An older one is refused with a ``PrivacyError``, since
                noise that was used cancels.

        Returns:
            Sums of the same dtypes, and the state after this step.

        Raises:
            ValueError: If the sums have other shapes than at the start.
            BudgetExceeded: If the run is over.
        """
        if self.iterations is not None and state.step >= self.iterations:
            raise BudgetExceeded(
                f"This run was planned for {self.iterations:,} steps, and all of them were taken.",
                fix="Make a plan with more iterations.",
            )
        leaves, spec = pytree.tree_flatten(sums)
        if _shapes(sums) != state.shapes:
            raise ValueError(
                "NoiseTransform: the sums have other shapes, dtypes or devices than what init was given. Give them as "
                "the clipped gradient returned them."
            )
        noisy: list[Tensor] = list(leaves)
        start = 0
        for places in _by_place(leaves).values():
            flat = torch.cat([leaves[i].detach().reshape(-1).to(_wide(leaves[i].dtype)) for i in places])
            state.noise.add(flat, std=self.stddev, step=state.step, start=start)
            start += flat.numel()
            parts = flat.split([leaves[i].numel() for i in places])
            for i, part in zip(places, parts, strict=True):
                noisy[i] = part.view(leaves[i].shape).to(leaves[i].dtype)
        after = dataclasses.replace(state, step=state.step + 1)
        return pytree.tree_unflatten(noisy, spec), after


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NoiseState:
    """Where the noise of a run is. Secret.

    Attributes:
        source: Where fresh normals come from.
        noise: What is kept.
        step: Of the next sum.
        shapes: Of the sums.
    """

    source: NoiseSource
    noise: AbstractNoise
    step: int
    shapes: object

    def state_dict(self) -> dict[str, Any]:
        """All that later noise follows from, **the key included**: for a checkpoint that is kept secret."""
        return {"step": self.step, "source": self.source.secret_state(), "noise": self.noise.state_dict()}

    def resumed(self, state: Mapping[str, Any], recurrence: Recurrence | None) -> NoiseState:
        """The state that ``state_dict`` described, bit by bit; later noise is that of the run it was taken from.

        A step that was taken after it must not be taken again over other data.

        Args:
            state: What ``state_dict`` returned.
            recurrence: That of the transform.

        Returns:
            A state for sums of the same shapes as this one.
        """
        source = NoiseSource.from_secret_state(state["source"])
        noise = mechanism_for(source, recurrence)
        noise.load_state_dict(state["noise"])
        return NoiseState(source, noise, state["step"], self.shapes)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _by_place(leaves: list[Tensor]) -> dict[Place, list[int]]:
    """Numbers of leaves by the device and dtype in which they are noised."""
    places: dict[Place, list[int]] = {}
    for i, leaf in enumerate(leaves):
        places.setdefault((leaf.device, _wide(leaf.dtype)), []).append(i)
    return places


def _shapes(tree: Any) -> object:
    leaves, spec = pytree.tree_flatten(tree)
    return [(tuple(leaf.shape), leaf.dtype, leaf.device) for leaf in leaves], spec
