"""Functions with bounded sensitivity to each example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dpengine.accounting.events import Relation


class AuxiliaryOutput(NamedTuple):
    """Optional per-example outputs of a clipped sum, in batch order. They are not private.

    Attributes:
        values: Values of the function before clipping, ``(B,)``.
        grad_norms: Gradient norms before the transformation and clipping, ``(B,)`` or a tree of such tensors.
        aux: Auxiliary output of the function, stacked over examples.
    """

    values: Any = None
    grad_norms: Any = None
    aux: Any = None


@dataclass(frozen=True)
class BoundedSensitivityCallable:
    """Function of a batch whose first output has bounded sensitivity to each example.

    Attributes:
        function: The function.
        l2_norm_bound: Largest L2 norm of the contribution of one example to that output.
        has_aux: Whether the function returns a pair, of which only the first element is bounded.
        batch_argnums: Positions of the batched arguments.
    """

    function: Callable[..., Any]
    l2_norm_bound: float
    has_aux: bool
    batch_argnums: tuple[int, ...] = (0,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.function(*args, **kwargs)

    def sensitivity(self, relation: Relation | str = Relation.ZERO_OUT) -> float:
        """Returns the sensitivity of the output in L2 norm.

        Args:
            relation: Neighboring relation, or one of the names of dp-accounting: ``"ADD_OR_REMOVE_ONE"``,
                ``"REPLACE_SPECIAL"``, ``"REPLACE_ONE"``.

        Returns:
            ``l2_norm_bound``, doubled for the replace-one relation.

        Raises:
            ValueError: If the relation is unknown.
        """
        name = getattr(relation, "name", relation)
        if name not in _FACTORS:
            raise ValueError(f"sensitivity: relation {relation!r} is not known. Choose one of: {', '.join(_FACTORS)}.")
        return _FACTORS[name] * self.l2_norm_bound


_FACTORS = {"ADD_OR_REMOVE_ONE": 1.0, "ZERO_OUT": 1.0, "REPLACE_SPECIAL": 1.0, "REPLACE_ONE": 2.0}
