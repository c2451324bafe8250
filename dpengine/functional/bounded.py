"""A function that knows how far one example can move what it returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dpengine.accounting.events import Relation


class AuxiliaryOutput(NamedTuple):
    """What was asked for beside the sum, for each example in the order of the batch. It is not private.

    Attributes:
        values: Values of the function before clipping, ``(B,)``.
        grad_norms: Norms of the gradients as they were, before any transformation, ``(B,)`` or a tree of them.
        aux: What the function returned beside its value.
    """

    values: Any = None
    grad_norms: Any = None
    aux: Any = None


@dataclass(frozen=True)
class BoundedSensitivityCallable:
    """A function of a batch whose first output has bounded sensitivity to each example.

    Attributes:
        function: What is called.
        l2_norm_bound: How much one example can add to that output, in L2 norm.
        has_aux: Whether it returns a pair, of which only the first is bounded.
        batch_argnums: Which arguments hold the examples.
    """

    function: Callable[..., Any]
    l2_norm_bound: float
    has_aux: bool
    batch_argnums: tuple[int, ...] = (0,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.function(*args, **kwargs)

    def sensitivity(self, relation: Relation | str = Relation.ZERO_OUT) -> float:
        """How far the output moves between neighbours, in L2 norm.

        Args:
            relation: Which batches are neighbours, also by the names of dp-accounting: ``"ADD_OR_REMOVE_ONE"``,
                ``"REPLACE_SPECIAL"``, ``"REPLACE_ONE"``.

        Returns:
            The bound, doubled where one example takes the place of another.

        Raises:
            ValueError: If the relation is not known.
        """
        name = getattr(relation, "name", relation)
        if name not in _TIMES:
            raise ValueError(f"sensitivity: relation {relation!r} is not known. Choose one of: {', '.join(_TIMES)}.")
        return _TIMES[name] * self.l2_norm_bound


_TIMES = {"ADD_OR_REMOVE_ONE": 1.0, "ZERO_OUT": 1.0, "REPLACE_SPECIAL": 1.0, "REPLACE_ONE": 2.0}


def finite_positive(where: str, name: str, value: Any) -> float:
    """``value`` as a float; ValueError unless it is positive and finite."""
    number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"{where}: {name} must be positive and finite, got {value!r}.")
    return number
