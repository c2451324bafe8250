"""Clipping in groups of parameters, which are given by prefixes of parameter names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

from torch import Tensor

from dpengine.errors import keyword_hints

from .policy import AbstractClip, check_norms, factors_within, positive

_WHERE = "clipping.Groups"
_OPTIMIZER_FIX = "If the optimizer has this attribute, assign new clipping norms: optimizer.max_grad_norms = [...]."


@final
@keyword_hints
@dataclass(frozen=True)
class Groups(AbstractClip):
    """Scales each sample's gradient separately in each group of parameters.

    Args:
        max_norms: Clipping norm of each prefix of dotted names, as in ``{"encoder": 1.0, "encoder.embed": 0.1}``. A
            prefix matches complete components of a name, the longest matching prefix applies, and ``""`` matches all.

    Raises:
        InvalidBudgetError: If a clipping norm is not positive and finite.
        ValueError: If there are no prefixes.
    """

    max_norms: Mapping[str, float] | tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        checked = tuple(
            (prefix, positive(_WHERE, f"max_norms[{prefix!r}]", c)) for prefix, c in self._by_prefix.items()
        )
        if not checked:
            raise ValueError(f"{_WHERE}: max_norms is empty. Pass a clipping norm for each prefix, or for ''.")
        object.__setattr__(self, "max_norms", checked)  # a tuple of pairs, because the caller may change the dict

    @property
    def _by_prefix(self) -> Mapping[str, float]:
        return MappingProxyType(dict(self.max_norms))

    @property
    def bounds(self) -> tuple[float, ...]:
        return tuple(self._by_prefix.values())

    def group_of(self, names: Sequence[str]) -> list[int]:
        """Returns the group of each parameter.

        Args:
            names: Dotted names of trainable parameters.

        Returns:
            The index of the longest prefix that matches each name.

        Raises:
            ValueError: If a name matches no prefix, or a prefix is not the longest match of any name.
        """
        prefixes = list(self._by_prefix)
        matches = [[prefix for prefix in prefixes if _matches(prefix, name)] for name in names]
        unmatched = [name for name, matching in zip(names, matches, strict=True) if not matching]
        if unmatched:
            raise ValueError(
                f"{_WHERE}: no prefix of {prefixes} matches the trainable parameters {unmatched}. Add a prefix for "
                f"them, or '' for all others. {_OPTIMIZER_FIX}"
            )
        groups = [prefixes.index(max(matching, key=len)) for matching in matches]
        unused = [prefix for index, prefix in enumerate(prefixes) if index not in groups]
        if unused:
            raise ValueError(
                f"{_WHERE}: the prefixes {unused} apply to no trainable parameter. Remove them, because each prefix "
                f"adds noise. {_OPTIMIZER_FIX}"
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


def _matches(prefix: str, name: str) -> bool:
    return prefix in ("", name) or name.startswith(prefix + ".")
