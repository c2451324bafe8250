"""Records of functions that compute the per-sample gradients of a layer, and access to its inputs.

``grad`` is the definition. The other slots are shortcuts that must agree with it; an absent slot is derived from
``grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dpengine.capture.record import LayerCall


def argument(call: LayerCall, position: int, name: str) -> Any:
    """The input at ``position``, or the keyword input ``name``; None where neither was given."""
    return call.inputs[position] if position < len(call.inputs) else call.kwargs.get(name)


Rows = Callable[[LayerCall], Tensor]


@dataclass(frozen=True)
class Cost:
    """What a call costs by each way, for the first guess, in floating point operations of one row. Shapes only.

    Attributes:
        grads: For each way to form ``grad``.
        sq_norms: For each way to form ``sq_norm``; a way that does not fit the call is left out.
        weighted_sum: For ``weighted_sum``.
    """

    grads: Mapping[str, float]
    sq_norms: Mapping[str, float]
    weighted_sum: float


@dataclass(frozen=True)
class GradSampler:
    """Per-sample gradients of one parameter.

    Tensors arrive in float32 or float64, batch first.

    Attributes:
        grad: ``(B, *param.shape)``, the gradient of each row.
        sq_norm: ``(B,)``, the squared norms of ``grad``, without forming it. Never below the truth by more than
            rounding: where the method can cancel, raised by its error bound.
        weighted_sum: ``param.shape``, the sum over rows of ``factor_B[i] * grad[i]``, without forming it.
        add_weighted_sum: ``(call, factor_B, scale, keep, out)``: ``out`` times ``keep``, which is 0 or 1, plus
            ``scale`` times ``weighted_sum``, into ``out``. For layers whose product can be written where it belongs;
            with 0, ``out`` may hold anything.
        concat: Joins several calls of one parameter into one whose ``grad`` is the sum of theirs.
        spread: ``(B,)``, at least the norms, added up, of the parts of a row that ``weighted_sum`` adds one by one, and
            for each 64 of them as much again, since errors of a long sum add up. Where parts cancel, it tells how much
            rounding is left. Needed beside ``weighted_sum``.
        factors: Tensors ``(B, T, F)`` whose outer product, summed over T, is ``grad`` but for its shape. ``sq_norm``
            follows, and Grams of tensors that several parameters share are formed once.
        cost: What each way costs; without it ``sq_norm`` is taken if there is one.
        more_grads: Other ways to form ``grad``, by name.
        more_sq_norms: Other ways to form ``sq_norm``, by name.
        write_grads: For ways to form ``grad`` that can write it where it shall be: ``(call, out)``. They return its
            squared norms ``(B,)`` if these come with it, else None.
        grad_name: What ``grad`` is called beside them.
        sq_norm_name: What ``sq_norm`` is called beside them.
        whole_calls: Whether it may be asked of calls only as they were recorded: not of some of their rows, nor with
            other numbers in them. So for rules from outside, which may depend on more than their rows.
        settings: Names of the attributes of the layer on which ``grad`` depends, besides its call. Gradients of layers
            with equal settings may then be formed in one call. None if these attributes are not known.
        stacked_name: The one of ``grads`` that forms them.
        takes_bfloat16: Whether all of these also take bfloat16 tensors, and return float32 that was not rounded to
            bfloat16. They get them on devices that multiply them so: see note [bfloat16 products] of `linear`.
        plain: What stands in where a parameter has several calls, since norms do not add; None for the sampler itself.
    """

    grad: Rows
    sq_norm: Rows | None = None
    weighted_sum: Callable[[LayerCall, Tensor], Tensor] | None = None
    add_weighted_sum: Callable[[LayerCall, Tensor, float, float, Tensor], None] | None = None
    concat: Callable[[Sequence[LayerCall]], LayerCall] | None = None
    spread: Rows | None = None
    factors: Callable[[LayerCall], tuple[Tensor, ...]] | None = None
    cost: Callable[[LayerCall], Cost] | None = None
    more_grads: Mapping[str, Rows] = field(default_factory=dict)
    more_sq_norms: Mapping[str, Rows] = field(default_factory=dict)
    write_grads: Mapping[str, Callable[[LayerCall, Tensor], Tensor | None]] = field(default_factory=dict)
    grad_name: str = "direct"
    sq_norm_name: str = "shortcut"
    whole_calls: bool = False
    settings: tuple[str, ...] | None = None
    stacked_name: str = ""
    takes_bfloat16: bool = False
    plain: GradSampler | None = None

    @cached_property
    def grads(self) -> Mapping[str, Rows]:
        """All ways to form ``grad``."""
        return {self.grad_name: self.grad, **self.more_grads}

    @cached_property
    def sq_norms(self) -> Mapping[str, Rows]:
        """All ways to form ``sq_norm``."""
        return {} if self.sq_norm is None else {self.sq_norm_name: self.sq_norm, **self.more_sq_norms}

    def total(self, call: LayerCall, factor_B: Tensor) -> Tensor:
        """The sum of gradients weighted by ``factor_B``, shape of the parameter."""
        if self.weighted_sum is not None:
            return self.weighted_sum(call, factor_B)
        return torch.einsum("b,b...->...", factor_B, self.grad(call))


@dataclass(frozen=True)
class JointSampler:
    """Per-sample gradients of all parameters of a module at once.

    Attributes:
        grads: Maps a call to ``{name within the module: (B, *param.shape)}``.
        needs_output: Whether the call must carry the module's output.
    """

    grads: Callable[[LayerCall], dict[str, Tensor]]
    needs_output: bool = False


@dataclass(frozen=True)
class NormedRule:
    """A layer's rule with norms from outside.

    Attributes:
        gradients: What forms gradients and sums: a sampler for each parameter, or a joint one.
        sq_norm: For a parameter's name within the layer, what gives its squared norms ``(B,)``.
    """

    gradients: Mapping[str, GradSampler] | JointSampler
    sq_norm: Callable[[str], Rows]

    @property
    def by_parameters(self) -> bool:
        """Whether gradients are formed by a sampler for each parameter."""
        return isinstance(self.gradients, Mapping)

    @property
    def needs_output(self) -> bool:
        """Whether the call must carry the module's output."""
        return isinstance(self.gradients, JointSampler) and self.gradients.needs_output

    def normed(self, name: str, sampler: GradSampler) -> GradSampler:
        """The sampler of a parameter, with its only norm from outside."""
        return replace(
            sampler,
            sq_norm=self.sq_norm(name),
            sq_norm_name="registered",
            more_sq_norms={},
            factors=None,
            cost=None,
            plain=sampler,
        )
