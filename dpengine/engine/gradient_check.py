"""Compares the engine's per-sample gradients with those of each sample run alone through autograd.

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
        row: Index of the sample whose entry exceeds its tolerance by most, or comes closest to it.
        largest: Absolute difference of that entry.
        allowed: Tolerance of that entry.
    """

    name: str
    row: int
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
            f"{'ok   ' if difference.ok else 'WRONG'} {difference.name}: sample {difference.row} is off by "
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
    """Compares the engine's per-sample gradients of a model with those of each sample run alone.

    Copies of the model run in train mode, with the loss ``probe_loss``. A model that draws random numbers, as in
    dropout, cannot be compared. If the inputs cannot be split into samples, call ``gradients_alone``,
    ``gradients_together`` and ``compare`` directly.

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
    alone = gradients_alone(model, rows_of(inputs, batch_first), batch_first=batch_first, loss_reduction=loss_reduction)
    together = gradients_together(
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
    return compare(alone, together, atol=atol, rtol=rtol)


def gradients_alone(
    model: nn.Module, rows: Iterable[Any], *, batch_first: bool = True, loss_reduction: str = "mean"
) -> Gradients:
    """Returns the gradient of the loss of each sample, computed by autograd in a separate pass for each sample."""
    model = copy.deepcopy(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads_of: dict[str, list[Tensor]] = {name: [] for name in parameters}
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for row in rows:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(state[name])
        loss = probe_loss(call(model, row), batch_first=batch_first, loss_reduction=loss_reduction)
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            grads_of[name].append(torch.zeros_like(parameter) if gradient is None else gradient.to_dense().detach())
    if not all(grads_of.values()):
        raise ValueError("gradients_alone: the batch is empty. Pass at least one sample.")
    return {name: torch.stack(gradients) for name, gradients in grads_of.items()}


@without_rule_checks()
def gradients_together(
    wrapped: GradSampleModule, inputs: Any, *, batch_first: bool = True, loss_reduction: str = "mean"
) -> Gradients:
    """Returns the ``grad_sample`` of each parameter, from one pass of the complete batch."""
    wrapped.zero_grad()
    probe_loss(call(wrapped, inputs), batch_first=batch_first, loss_reduction=loss_reduction).backward()
    named = wrapped.module.named_parameters()
    return {name: getattr(p, "grad_sample", None) for name, p in named if p.requires_grad}  # type: ignore[misc]


@without_rule_checks()  # because some gradients are formed on first use
def compare(alone: Gradients, together: Mapping[str, Tensor | None], *, atol: float, rtol: float) -> GradientReport:
    """Compares per-sample gradients with the reference. Missing ones count as zero."""
    if alone.keys() != together.keys():
        raise ValueError(
            f"compare: only alone: {sorted(alone.keys() - together.keys())}; "
            f"only together: {sorted(together.keys() - alone.keys())}."
        )
    return GradientReport(tuple(_difference(name, alone[name], together[name], atol, rtol) for name in alone))


def probe_loss(output: Tensor | PackedSequence, *, batch_first: bool = True, loss_reduction: str = "mean") -> Tensor:
    """Returns a loss whose gradient has random entries, so that symmetries and zeros do not hide an error.

    The loss of a sample with output ``y`` is ``<c, y + y^2 / 2>`` with a fixed random ``c``. Its gradient ``c (1 + y)``
    differs between samples, and does not depend on the other samples of the batch.
    """
    if loss_reduction not in REDUCTIONS:
        raise ValueError(f"loss_reduction={loss_reduction!r} is not known. Choose one of: 'mean', 'sum'.")
    losses = torch.stack([_reduced(row, loss_reduction) for row in _output_rows(output, batch_first)])
    return losses.mean() if loss_reduction == "mean" else losses.sum()


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Calls the model with a tensor or packed sequence, a tuple of positional or a mapping of keyword inputs."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    positional = isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence)
    return model(*inputs) if positional else model(inputs)


def rows_of(inputs: Any, batch_first: bool = True) -> list[Any]:
    """Returns the inputs of each sample, as batches of one."""
    axis = 0 if batch_first else 1
    if isinstance(inputs, PackedSequence):
        return [row.unsqueeze(axis) for row in unpacked(inputs)]
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > axis]
    if not leaves:
        raise TypeError(f"rows_of: the inputs ({torch.typename(inputs)}) hold no tensor with an axis {axis}.")
    size = leaves[0].shape[axis]

    def cut(leaf: Any, row: int) -> Any:
        has_batch = isinstance(leaf, Tensor) and leaf.dim() > axis and leaf.shape[axis] == size
        return leaf.narrow(axis, row, 1) if has_batch else leaf

    return [pytree.tree_map(lambda leaf, row=row: cut(leaf, row), inputs) for row in range(size)]


def unpacked(packed: PackedSequence) -> list[Tensor]:
    """Returns the sequences of a packed sequence, ``(length, ...)`` each, in their original order."""
    starts = packed.batch_sizes.cumsum(0) - packed.batch_sizes
    rows = range(int(packed.batch_sizes[0])) if packed.unsorted_indices is None else packed.unsorted_indices.tolist()
    positions = [starts[packed.batch_sizes > row] + row for row in rows]
    return [packed.data[position.to(packed.data.device)] for position in positions]


def _output_rows(output: Any, batch_first: bool) -> tuple[Tensor, ...] | list[Tensor]:
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


def _reduced(row: Tensor, reduction: str) -> Tensor:
    generator = torch.Generator().manual_seed(row.dim())
    cotangent = torch.randn(row.shape, generator=generator, dtype=torch.float64).to(row)
    products = cotangent * (row + row.square() / 2)
    return products.mean() if reduction == "mean" else products.sum()


def _difference(name: str, alone: Tensor, together: Tensor | None, atol: float, rtol: float) -> Difference:
    if together is None:
        together = torch.zeros_like(alone)
    if together.shape != alone.shape:
        return Difference(name, 0, float("nan"), atol)
    error = (together - alone).abs().double().flatten()
    if not len(error):
        return Difference(name, 0, 0.0, atol)
    allowed = (atol + rtol * alone.abs()).double().flatten()
    worst = int(torch.nan_to_num(error - allowed, nan=float("inf")).argmax())
    return Difference(name, worst // (len(error) // len(alone)), float(error[worst]), float(allowed[worst]))
