"""Compares the engine's per-sample gradients with those that autograd computes for each sample separately.

Axes: B samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from dpengine.errors import keyword_hints
from dpengine.grad_samplers.rule_check import without_rule_checks

from .grad_sample_module import GradSampleModule

REDUCTIONS = ("mean", "sum")
Gradients = dict[str, Tensor]  # dotted name -> (B, *parameter)


@dataclass(frozen=True)
class Difference:
    """Difference between the per-sample gradients of one parameter and the reference.

    Attributes:
        name: Name of the parameter.
        sample: Index of the sample with the entry that exceeds its tolerance by most, or is closest to it.
        largest: Absolute difference of that entry.
        allowed: Tolerance of that entry.
    """

    name: str
    sample: int
    largest: float
    allowed: float

    @property
    def ok(self) -> bool:
        """True if the difference is within the tolerance. NaN is not."""
        return self.largest <= self.allowed


@dataclass(frozen=True)
class GradientReport:
    """One difference for each trainable parameter. ``str(report)`` is a table."""

    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        """True if all differences are within the tolerance."""
        return all(difference.ok for difference in self.differences)

    def __str__(self) -> str:
        """Returns one line for each parameter."""
        return "\n".join(
            f"{'ok   ' if difference.ok else 'WRONG'} {difference.name}: sample {difference.sample} is off by "
            f"{difference.largest:.3g}, {difference.allowed:.3g} is allowed"
            for difference in self.differences
        )


@keyword_hints
@without_rule_checks()
def check_per_sample_gradients(
    model: nn.Module,
    inputs: Any,
    *,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    atol: float = 1e-5,
    rtol: float = 1e-4,
    force_functorch: bool = False,
) -> GradientReport:
    """Compares the engine's per-sample gradients of a model with those that autograd computes for each single sample.

    Copies of the model run in train mode, with the loss ``probe_loss``. A model that draws random numbers, as in
    dropout, cannot be compared. If the inputs cannot be split into samples, call ``reference_gradients``,
    ``batch_gradients`` and ``compare`` directly.

    Args:
        model: The model, as for ``GradSampleModule``. It returns a tensor or a ``PackedSequence``.
        inputs: A tensor, a tuple of positional or a mapping of keyword inputs. Tensors with as many samples as the
            first one are split into samples. All other tensors are passed unchanged with each sample.
        batch_first: True if axis 0 of inputs and output is the batch; False for axis 1.
        loss_reduction: ``"mean"`` or ``"sum"``.
        atol: Absolute tolerance of each entry.
        rtol: Relative tolerance of each entry.
        force_functorch: As for ``GradSampleModule``.

    Returns:
        A difference for each trainable parameter.

    Raises:
        ValueError: If the batch is empty, or ``loss_reduction`` is unknown.
        TypeError: If the inputs hold no tensor, or the output is not a tensor.
    """  # noqa: DOC502 - raised by called functions
    samples = samples_of(inputs, batch_first)
    reference = reference_gradients(model, samples, batch_first=batch_first, loss_reduction=loss_reduction)
    gradients = batch_gradients(
        GradSampleModule(
            copy.deepcopy(model),
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            force_functorch=force_functorch,
        ),
        inputs,
        batch_first=batch_first,
        loss_reduction=loss_reduction,
    )
    return compare(reference, gradients, atol=atol, rtol=rtol)


def reference_gradients(
    model: nn.Module, samples: Iterable[Any], *, batch_first: bool = True, loss_reduction: str = "mean"
) -> Gradients:
    """Returns the gradient of the loss of each sample, computed by autograd in a separate pass for each sample."""
    model = copy.deepcopy(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads_of: dict[str, list[Tensor]] = {name: [] for name in parameters}
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for sample in samples:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(state[name])
        loss = probe_loss(call(model, sample), batch_first=batch_first, loss_reduction=loss_reduction)
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            grads_of[name].append(torch.zeros_like(parameter) if gradient is None else gradient.to_dense().detach())
    if not all(grads_of.values()):
        raise ValueError("reference_gradients: the batch is empty. Pass at least one sample.")
    return {name: torch.stack(gradients) for name, gradients in grads_of.items()}


@without_rule_checks()
def batch_gradients(
    wrapped: GradSampleModule, inputs: Any, *, batch_first: bool = True, loss_reduction: str = "mean"
) -> Gradients:
    """Returns the ``grad_sample`` of each parameter, from one pass of the complete batch."""
    wrapped.zero_grad()
    probe_loss(call(wrapped, inputs), batch_first=batch_first, loss_reduction=loss_reduction).backward()
    named = wrapped.module.named_parameters()
    return {name: getattr(p, "grad_sample", None) for name, p in named if p.requires_grad}  # type: ignore[misc]


@without_rule_checks()  # because some gradients are formed on first use
def compare(
    reference: Gradients, gradients: Mapping[str, Tensor | None], *, atol: float, rtol: float
) -> GradientReport:
    """Compares per-sample gradients with the reference. Missing ones count as zero."""
    if reference.keys() != gradients.keys():
        raise ValueError(
            f"compare: parameters in the reference only: {sorted(reference.keys() - gradients.keys())}; "
            f"in the gradients only: {sorted(gradients.keys() - reference.keys())}."
        )
    return GradientReport(tuple(_difference(name, reference[name], gradients[name], atol, rtol) for name in reference))


def probe_loss(output: Tensor | PackedSequence, *, batch_first: bool = True, loss_reduction: str = "mean") -> Tensor:
    """Returns a loss whose gradient has random entries, so that symmetries and zeros do not hide an error.

    The loss of a sample with output ``y`` is ``<c, y + y^2 / 2>`` with a fixed random ``c``. Its gradient ``c (1 + y)``
    differs between samples, and does not depend on the other samples of the batch.
    """
    if loss_reduction not in REDUCTIONS:
        raise ValueError(f"loss_reduction={loss_reduction!r} is not known. Choose one of: 'mean', 'sum'.")
    losses = torch.stack([_reduced(sample, loss_reduction) for sample in _output_samples(output, batch_first)])
    return losses.mean() if loss_reduction == "mean" else losses.sum()


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Calls the model with a tensor or packed sequence, a tuple of positional or a mapping of keyword inputs."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    positional = isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence)
    return model(*inputs) if positional else model(inputs)


def samples_of(inputs: Any, batch_first: bool = True) -> list[Any]:
    """Returns the inputs of each sample, as batches of one."""
    axis = 0 if batch_first else 1
    if isinstance(inputs, PackedSequence):
        return [sequence.unsqueeze(axis) for sequence in unpacked(inputs)]
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > axis]
    if not leaves:
        raise TypeError(f"samples_of: the inputs ({torch.typename(inputs)}) hold no tensor with an axis {axis}.")
    size = leaves[0].shape[axis]

    def sample_of(leaf: Any, index: int) -> Any:
        has_batch = isinstance(leaf, Tensor) and leaf.dim() > axis and leaf.shape[axis] == size
        return leaf.narrow(axis, index, 1) if has_batch else leaf

    return [pytree.tree_map(lambda leaf, i=i: sample_of(leaf, i), inputs) for i in range(size)]


def unpacked(packed: PackedSequence) -> list[Tensor]:
    """Returns the sequences of a packed sequence, ``(length, ...)`` each, in their original order."""
    starts = packed.batch_sizes.cumsum(0) - packed.batch_sizes
    unsorted = packed.unsorted_indices
    indices = range(int(packed.batch_sizes[0])) if unsorted is None else unsorted.tolist()
    positions = [starts[packed.batch_sizes > i] + i for i in indices]
    return [packed.data[position.to(packed.data.device)] for position in positions]


def _output_samples(output: Any, batch_first: bool) -> tuple[Tensor, ...] | list[Tensor]:
    if isinstance(output, PackedSequence):
        return unpacked(output)
    if not isinstance(output, Tensor):
        raise TypeError(
            f"probe_loss: the output is a {type(output).__name__}; wrap the model so that it returns one tensor."
        )
    axis = 0 if batch_first else 1
    if output.dim() <= axis:
        raise ValueError(
            f"probe_loss: the output has shape {tuple(output.shape)}, without an axis {axis} as its batch."
        )
    return output.unbind(axis)


def _reduced(output: Tensor, reduction: str) -> Tensor:
    generator = torch.Generator().manual_seed(output.dim())
    cotangent = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    products = cotangent * (output + output.square() / 2)
    return products.mean() if reduction == "mean" else products.sum()


def _difference(name: str, reference: Tensor, gradients: Tensor | None, atol: float, rtol: float) -> Difference:
    if gradients is None:
        gradients = torch.zeros_like(reference)
    if gradients.shape != reference.shape:
        return Difference(name, 0, float("nan"), atol)
    error = (gradients - reference).abs().double().flatten()
    if not len(error):
        return Difference(name, 0, 0.0, atol)
    allowed = (atol + rtol * reference.abs()).double().flatten()
    worst = int(torch.nan_to_num(error - allowed, nan=float("inf")).argmax())
    return Difference(name, worst // (len(error) // len(reference)), float(error[worst]), float(allowed[worst]))
