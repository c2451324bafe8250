"""Clipping in groups that the user names by the beginnings of parameter names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

from torch import Tensor

from dpengine.errors import suggests_names

from .policy import AbstractClip, check_norms, factors_within, positive

_WHERE = "clipping.Groups"
_BY_WRITING = "If the optimizer has this attribute, write new thresholds as optimizer.max_grad_norms = [...]."


@final
@suggests_names
@dataclass(frozen=True)
class Groups(AbstractClip):
    """Scales each sample's gradient group by group.

    Args:
        max_norms: A threshold for each prefix of dotted names, as in ``{"encoder": 1.0, "encoder.embed": 0.1}``. A
            prefix covers whole parts of a name, the longest that fits wins, and ``""`` fits everything.

    Raises:
        InvalidBudgetError: If a threshold is not positive and finite.
        ValueError: If there is none.
    """

    max_norms: Mapping[str, float] | tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        checked = tuple(
            (prefix, positive(_WHERE, f"max_norms[{prefix!r}]", c)) for prefix, c in self._by_prefix.items()
        )
        if not checked:
            raise ValueError(f"{_WHERE}: max_norms is empty. Give a threshold for each prefix, or for ''.")
        object.__setattr__(self, "max_norms", checked)  # a tuple of pairs: the caller's dict may change

    @property
    def _by_prefix(self) -> Mapping[str, float]:
        return MappingProxyType(dict(self.max_norms))

    @property
    def bounds(self) -> tuple[float, ...]:
        return tuple(self._by_prefix.values())

    def group_of(self, names: Sequence[str]) -> list[int]:
        """The group of each parameter.

        Args:
            names: Dotted names of trainable parameters.

        Returns:
            The place of the longest prefix that fits each name.

        Raises:
            ValueError: If a name fits no prefix, or a prefix no name.
        """
        prefixes = list(self._by_prefix)
        fitting = [[prefix for prefix in prefixes if _covers(prefix, name)] for name in names]
        outside = [name for name, fits in zip(names, fitting, strict=True) if not fits]
        if outside:
            raise ValueError(
                f"{_WHERE}: no prefix of {prefixes} fits the trainable parameters {outside}. Add a prefix for them, or "
                f"'' for all others. {_BY_WRITING}"
            )
        groups = [prefixes.index(max(fits, key=len)) for fits in fitting]
        idle = [prefix for place, prefix in enumerate(prefixes) if place not in groups]
        if idle:
            raise ValueError(
                f"{_WHERE}: no trainable parameter falls to the prefixes {idle}. Take them out: each one adds noise. "
                f"{_BY_WRITING}"
            )
        return groups

    def factors(self, norms_BK: Tensor) -> Tensor:
        check_norms(_WHERE, norms_BK, len(self.bounds))
        return factors_within(self.bounds, norms_BK)

    def resized(self, max_grad_norm: float) -> Groups:
        factor = positive(_WHERE, "max_grad_norm", max_grad_norm) / self.max_grad_norm
        return Groups({prefix: bound * factor for prefix, bound in self._by_prefix.items()})

    def describe(self) -> dict[str, Any]:
        return {"policy": "groups", "max_norms": dict(self._by_prefix)}


def _covers(prefix: str, name: str) -> bool:
    return prefix in ("", name) or name.startswith(prefix + ".")
