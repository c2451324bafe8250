"""Noise for training loops without the engine. Call ``init`` once, and then ``update`` with the sum of each step."""

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

Placement = tuple[torch.device, torch.dtype]


@dataclasses.dataclass(frozen=True)
class NoiseTransform:
    """Adds ``stddev`` times row t of ``S^-1 Z`` to the sum of step t.

    Attributes:
        stddev: Standard deviation of each fresh normal, in units of the sums: noise multiplier times sensitivity times
            the largest column norm of S.
        recurrence: Correlation of the noise across steps; None for independent noise.
        noise_seed: None for a random key from the operating system. With a seed, noise is reproducible and not secret.
        iterations: Number of steps of the run; None for no limit.

    Raises:
        ValueError: If ``stddev`` is negative or not finite.
    """

    stddev: float
    recurrence: Recurrence | None = None
    noise_seed: int | None = None
    iterations: int | None = None

    def __post_init__(self) -> None:
        """Checks the standard deviation."""
        if not (self.stddev >= 0 and math.isfinite(self.stddev)):
            raise ValueError(f"NoiseTransform: stddev={self.stddev!r} must be finite and at least 0.")

    def init(self, params: Any) -> NoiseState:
        """Returns the state before the first step.

        Args:
            params: Tensors with the shapes, dtypes and devices of the sums, as any pytree.

        Returns:
            The state, which is secret.
        """
        source = NoiseSource.fresh() if self.noise_seed is None else NoiseSource.seeded(self.noise_seed)
        return NoiseState(source, mechanism_for(source, self.recurrence), 0, _shapes(params))

    def update(self, sums: Any, state: NoiseState) -> tuple[Any, NoiseState]:
        """Returns the noisy sums of the next step.

        Args:
            sums: The clipped sums. They must not be scaled before, which would change the guarantee.
            state: Result of ``init`` or of the last ``update``. An older state raises ``PrivacyError``, because it
                would reuse noise.

        Returns:
            Sums of the same dtypes, and the state after this step.

        Raises:
            ValueError: If the shapes, dtypes or devices of the sums differ from the params of ``init``.
            BudgetExceeded: If the run has no further steps.
        """
        if self.iterations is not None and state.step >= self.iterations:
            raise BudgetExceeded(
                f"This run was planned for {self.iterations:,} steps, which are complete.",
                fix="Create a plan with more iterations.",
            )
        leaves, spec = pytree.tree_flatten(sums)
        if _shapes(sums) != state.shapes:
            raise ValueError(
                "NoiseTransform: the shapes, dtypes or devices of the sums differ from the params of init. Pass the "
                "sums that the clipped gradient returned."
            )
        noisy: list[Tensor] = list(leaves)
        start = 0
        for group in _group_by_placement(leaves).values():
            flat = torch.cat([leaves[i].detach().reshape(-1).to(_noise_dtype(leaves[i].dtype)) for i in group])
            state.noise.add(flat, std=self.stddev, step=state.step, start=start)
            start += flat.numel()
            parts = flat.split([leaves[i].numel() for i in group])
            for i, part in zip(group, parts, strict=True):
                noisy[i] = part.view(leaves[i].shape).to(leaves[i].dtype)
        return pytree.tree_unflatten(noisy, spec), dataclasses.replace(state, step=state.step + 1)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NoiseState:
    """State of the noise of a run. Secret.

    Attributes:
        source: Source of fresh normals.
        noise: The noise mechanism, with its state.
        step: Number of the next step.
        shapes: Shapes of the sums.
    """

    source: NoiseSource
    noise: AbstractNoise
    step: int
    shapes: object

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that determines later noise, **with the key**. Store it in a private file only."""
        return {"step": self.step, "source": self.source.secret_state(), "noise": self.noise.state_dict()}

    def resumed(self, state: Mapping[str, Any], recurrence: Recurrence | None) -> NoiseState:
        """Returns the state that ``state_dict`` saved. Later noise is bit-identical to that of the saved run.

        Steps after the save must not be repeated with different data.

        Args:
            state: Result of ``state_dict``.
            recurrence: Recurrence of the transform.

        Returns:
            A state for sums of the same shapes as this one.
        """
        source = NoiseSource.from_secret_state(state["source"])
        noise = mechanism_for(source, recurrence)
        noise.load_state_dict(state["noise"])
        return NoiseState(source, noise, state["step"], self.shapes)


def _noise_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _group_by_placement(leaves: list[Tensor]) -> dict[Placement, list[int]]:
    """Groups the indices of leaves by the device and dtype in which noise is added."""
    groups: dict[Placement, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault((leaf.device, _noise_dtype(leaf.dtype)), []).append(i)
    return groups


def _shapes(tree: Any) -> object:
    leaves, spec = pytree.tree_flatten(tree)
    return [(tuple(leaf.shape), leaf.dtype, leaf.device) for leaf in leaves], spec
