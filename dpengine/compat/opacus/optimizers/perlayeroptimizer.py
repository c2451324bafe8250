"""Clipping with one clipping norm for each parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dpengine.clipping.groups import Groups
from dpengine.clipping.policy import AbstractClip
from dpengine.errors import keyword_hints

from . import step_of
from .optimizer import DPOptimizer
from .utils import params


@keyword_hints
class DPPerLayerOptimizer(DPOptimizer):
    """``DPOptimizer`` with one clipping norm for each parameter. The sensitivity is their L2 norm.

    ``max_grad_norm`` is a list with a clipping norm for each trainable parameter, in the optimizer's order, or one
    number C, of which each of K parameters gets C / sqrt(K). The other arguments are those of ``DPOptimizer``.

    Raises:
        ValueError: If the number of clipping norms differs from the number of parameters.
    """

    def _policy(self, max_grad_norm: Any) -> AbstractClip:
        parameters = params(self.original_optimizer)
        if not isinstance(max_grad_norm, Sequence):
            max_grad_norm = [max_grad_norm / math.sqrt(max(len(parameters), 1))] * len(parameters)
        if len(max_grad_norm) != len(parameters):
            raise ValueError(
                f"max_grad_norm has {len(max_grad_norm)} clipping norms for the {len(parameters)} trainable parameters "
                "of the optimizer. Pass one for each, in their order, or one number for all together."
            )
        names = step_of.dotted_names(parameters)
        return Groups(dict(zip(names, max_grad_norm, strict=True)))

    @property
    def max_grad_norms(self) -> list[float]:
        """Clipping norms in force, in the order of ``params``. A new list takes effect at the next step."""
        return list(self._clipping.bounds)

    @max_grad_norms.setter
    def max_grad_norms(self, value: Sequence[float]) -> None:
        self._change(clipping=self._policy(list(value)))
