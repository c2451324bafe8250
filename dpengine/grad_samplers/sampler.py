"""Rules for the per-sample gradients of a layer, as records of functions.

The function ``grad`` defines the gradient. The other functions are shortcuts, whose results must equal those derived
from ``grad``. A missing shortcut is derived from ``grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dpengine.capture.record import ForwardCall, LayerCall
from dpengine.kernels.products import Job


def argument(call: LayerCall, position: int, name: str) -> Any:
    """Returns the input at ``position``, or the keyword input ``name``; None if the call has neither."""
    return call.inputs[position] if position < len(call.inputs) else call.kwargs.get(name)


PerSample = Callable[[LayerCall], Tensor]
"""Function of a call that returns one value for each sample, with the batch on axis 0."""


@dataclass(frozen=True)
class Cost:
    """Estimated cost of a call, in floating point operations per sample. Depends on shapes only.

    Attributes:
        grads: Cost of each function that computes ``grad``, by name.
        sq_norms: Cost of each function that computes ``sq_norm`` and supports the call, by name.
        weighted_sum: Cost of ``weighted_sum``.
    """

    grads: Mapping[str, float]
    sq_norms: Mapping[str, float]
    weighted_sum: float


@dataclass(frozen=True)
class GradSampler:
    """Rule for the per-sample gradients of one parameter.

    Tensors are float32 or float64, batch first.

    Attributes:
        grad: Per-sample gradients, ``(B, *param.shape)``.
        sq_norm: Squared norms of ``grad``, ``(B,)``, computed without forming it. They must not be below the exact
            values by more than rounding errors. A function whose terms cancel must add its error bound.
        weighted_sum: Sum over samples of ``factor_B[i] * grad[i]``, ``param.shape``, computed without forming ``grad``.
        add_weighted_sum: ``(call, factor_B, scale, keep, out)`` writes ``keep * out + scale * weighted_sum`` to
            ``out``, where ``keep`` is 0 or 1. If ``keep`` is 0, ``out`` may be uninitialized. For layers whose product
            can be written in place. With ``with_factors``, ``factor_B`` may be None for factors of 1.
        concat: Concatenates several calls of one parameter to one call whose ``grad`` is the sum of theirs.
        rounding_scale: Scale of the rounding error of ``weighted_sum``, ``(B,)``. At least the sum of the norms of the
            terms of a sample that ``weighted_sum`` adds one by one, plus the same sum for each 64 terms, because the
            errors of a long sum add up. It may be far above the norm if terms cancel. Required with ``weighted_sum``.
        factors: Tensors ``(B, T, F)`` whose outer product, summed over T, is ``grad`` up to its shape. ``sq_norm`` is
            computed from them. Gram matrices of tensors shared by several parameters are computed once.
        with_factors: Returns the call with given ``factors``. With this function, bfloat16 factors are multiplied by
            the clipping factors before the sum; see note [rounded factors] of `bfloat16`.
        cost: Estimated cost of each function. Without it, ``sq_norm`` is used if it exists.
        more_grads: Other functions that compute ``grad``, by name.
        more_sq_norms: Other functions that compute ``sq_norm``, by name.
        write_grads: Functions ``(call, out)`` that write ``grad`` to a tensor, by the names in ``grads``. They return
            the squared norms ``(B,)`` if they also compute them, else None.
        grad_name: Name of ``grad`` in ``grads``.
        sq_norm_name: Name of ``sq_norm`` in ``sq_norms``.
        needs_complete_calls: True if the functions accept only complete recorded calls, neither parts of the batch nor
            modified values. Set for registered rules, whose results may depend on more than the samples.
        settings: Names of the attributes of the layer on which ``grad`` depends in addition to its call. Gradients of
            layers with equal settings may be computed in one call. None if these attributes are unknown.
        job: Returns the two tensors of which ``grad`` is a sum of products. Compiled code forms the gradients of many
            layers from such jobs in one call. Depends on the tensors, their shapes and ``settings``.
        stacked_name: Name of the function in ``grads`` that computes the gradients of several layers in one call. Empty
            for ``grad``.
        with_bias: Returns ``grad`` and the gradient of the layer's ``bias``, which take less time together on a device
            that launches kernels.
        accepts_bfloat16: True if all functions also accept bfloat16 tensors and return float32 that was not rounded to
            bfloat16. Used on devices with such products; see note [bfloat16 products] of `bfloat16`.
        multi_call_sampler: Sampler to use if a parameter has several calls, whose norms cannot be added; None for this
            sampler.
    """

    grad: PerSample
    sq_norm: PerSample | None = None
    weighted_sum: Callable[[LayerCall, Tensor], Tensor] | None = None
    add_weighted_sum: Callable[[LayerCall, Any, float, float, Tensor], None] | None = None
    concat: Callable[[Sequence[LayerCall]], LayerCall] | None = None
    rounding_scale: PerSample | None = None
    factors: Callable[[LayerCall], tuple[Tensor, ...]] | None = None
    with_factors: Callable[[LayerCall, Sequence[Tensor]], LayerCall] | None = None
    cost: Callable[[LayerCall], Cost] | None = None
    more_grads: Mapping[str, PerSample] = field(default_factory=dict)
    more_sq_norms: Mapping[str, PerSample] = field(default_factory=dict)
    write_grads: Mapping[str, Callable[[LayerCall, Tensor], Tensor | None]] = field(default_factory=dict)
    grad_name: str = "direct"
    sq_norm_name: str = "shortcut"
    needs_complete_calls: bool = False
    settings: tuple[str, ...] | None = None
    job: Callable[[LayerCall], Job] | None = None
    stacked_name: str = ""
    with_bias: Callable[[LayerCall], tuple[Tensor, Tensor]] | None = None
    accepts_bfloat16: bool = False
    multi_call_sampler: GradSampler | None = None

    @cached_property
    def grads(self) -> Mapping[str, PerSample]:
        """All functions that compute ``grad``, by name."""
        return {self.grad_name: self.grad, **self.more_grads}

    @cached_property
    def sq_norms(self) -> Mapping[str, PerSample]:
        """All functions that compute ``sq_norm``, by name."""
        return {} if self.sq_norm is None else {self.sq_norm_name: self.sq_norm, **self.more_sq_norms}

    def total(self, call: LayerCall, factor_B: Tensor) -> Tensor:
        """Returns the sum of the gradients weighted by ``factor_B``, with the shape of the parameter."""
        if self.weighted_sum is not None:
            return self.weighted_sum(call, factor_B)
        return torch.einsum("b,b...->...", factor_B, self.grad(call))


@dataclass(frozen=True)
class JointSampler:
    """Rule that computes the per-sample gradients of all parameters of a module together.

    Attributes:
        grads: Maps a call to ``{name within the module: (B, *param.shape)}``.
        needs_output: True if the call must contain the module's output.
        forward: Runs the module. Returns its output and `LayerCall.per_sample_run`, which is None if the module ran on
            the batch.
    """

    grads: Callable[[LayerCall], dict[str, Tensor]]
    needs_output: bool = False
    forward: Callable[[ForwardCall], tuple[Any, Any]] | None = None


@dataclass(frozen=True)
class NormedRule:
    """Rule of a layer with a registered norm function.

    Attributes:
        gradients: Rule for gradients and sums: a sampler for each parameter, or a joint sampler.
        sq_norm: Maps the name of a parameter within the layer to the function of its squared norms ``(B,)``.
    """

    gradients: Mapping[str, GradSampler] | JointSampler
    sq_norm: Callable[[str], PerSample]

    @property
    def needs_output(self) -> bool:
        """True if the call must contain the module's output."""
        return isinstance(self.gradients, JointSampler) and self.gradients.needs_output

    def normed(self, name: str, sampler: GradSampler) -> GradSampler:
        """Returns the sampler of a parameter with the registered function as its only norm function."""
        return replace(
            sampler,
            sq_norm=self.sq_norm(name),
            sq_norm_name="registered",
            more_sq_norms={},
            factors=None,
            cost=None,
            multi_call_sampler=sampler,
        )
