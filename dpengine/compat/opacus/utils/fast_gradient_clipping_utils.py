"""Loss classes of ghost clipping, whose backward pass is that of an ordinary loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.errors import BatchDependentLossError


class DPTensorFastGradientClipping:
    """Per-sample losses with a reduction.

    Args:
        module: The model.
        optimizer: Its optimizer.
        loss_per_sample: ``(B,)``, or a scalar loss that the criterion has reduced.
        loss_reduction: ``"mean"`` or ``"sum"`` over samples.
    """

    def __init__(self, module: nn.Module, optimizer: Any, loss_per_sample: Tensor, loss_reduction: str = "mean"):
        self.module = module
        self.optimizer = optimizer
        self.loss_per_sample = loss_per_sample
        self.loss_reduction = loss_reduction

    @property
    def reduced(self) -> Tensor:
        """Loss of the batch; 0 for an empty batch."""
        total = self.loss_per_sample.sum()
        return total / max(self.loss_per_sample.numel(), 1) if self.loss_reduction == "mean" else total

    def item(self) -> float:
        """Returns the value of the loss. Not private."""
        return float(self.reduced.detach())

    def detach(self) -> Tensor:
        """Returns the loss without its graph. Not private."""
        return self.reduced.detach()

    def backward(self) -> None:
        """Runs the single backward pass for norms and sums."""
        self.reduced.backward()

    def _with(self, loss_per_sample: Tensor) -> DPTensorFastGradientClipping:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, loss_per_sample=loss_per_sample)
        return other

    def _addend(self, other: Any) -> Any:
        """Returns what to add to each per-sample loss, from another loss of the same samples or a number."""
        if isinstance(other, DPTensorFastGradientClipping):
            ours, theirs = self.loss_per_sample.shape, other.loss_per_sample.shape
            if ours != theirs:
                raise ValueError(
                    f"Losses of shapes {tuple(ours)} and {tuple(theirs)} cannot be added. Both must be of one batch."
                )
            return other.loss_per_sample
        if isinstance(other, Tensor) and other.dim():
            raise TypeError(f"A tensor of shape {tuple(other.shape)} cannot be added to a loss; pass a number.")
        return other / (max(self.loss_per_sample.numel(), 1) if self.loss_reduction == "sum" else 1)

    def __add__(self, other: Any) -> DPTensorFastGradientClipping:
        return self._with(self.loss_per_sample + self._addend(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> DPTensorFastGradientClipping:
        return self._with(self.loss_per_sample - self._addend(other))

    def __rsub__(self, other: Any) -> DPTensorFastGradientClipping:
        return self._with(self._addend(other) - self.loss_per_sample)

    def __mul__(self, other: float) -> DPTensorFastGradientClipping:
        return self._with(self.loss_per_sample * other)

    __rmul__ = __mul__

    def __truediv__(self, other: float) -> DPTensorFastGradientClipping:
        return self._with(self.loss_per_sample / other)

    def __neg__(self) -> DPTensorFastGradientClipping:
        return self._with(-self.loss_per_sample)

    def __float__(self) -> float:
        return self.item()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.item():g}, samples={self.loss_per_sample.numel()})"


class DPLossFastGradientClipping:
    """Criterion that returns per-sample losses. A training loop with the wrapped criterion is equally private.

    Args:
        module: The model, wrapped or with hooks.
        optimizer: Its private optimizer.
        criterion: A module or function with ``reduction``, such as ``nn.CrossEntropyLoss()`` or ``F.cross_entropy``.
        loss_reduction: ``"mean"`` or ``"sum"`` over samples; other values raise ``ValueError``.
    """

    def __init__(self, module: Any, optimizer: Any, criterion: Any, loss_reduction: str = "mean"):
        if loss_reduction not in {"mean", "sum"}:
            raise ValueError(f"loss_reduction={loss_reduction!r} is unknown. Choose one of: 'mean', 'sum'.")
        self.module = module
        self.optimizer = optimizer
        self.criterion = criterion
        self.loss_reduction = loss_reduction

    def __call__(self, *args: Any, shape: tuple[int, ...] | None = None, **kwargs: Any) -> DPTensorFastGradientClipping:
        """Returns the loss of a batch.

        Args:
            args: Arguments of the criterion: outputs, then targets.
            shape: ``(B, T, ...)``, the shape of the tokens before flattening; by default B is that of the arguments.
            kwargs: Arguments of the criterion.

        Raises:
            BatchDependentLossError: If the number of losses is not a multiple of the number of samples.
        """
        samples = self._number_of_samples(args, shape)
        losses = self._unreduced(*args, **kwargs)
        if losses.dim() == 0:  # the user's function reduces the losses: equally private
            return DPTensorFastGradientClipping(self.module, self.optimizer, losses, self.loss_reduction)
        if losses.numel() % samples if samples else losses.numel():
            raise BatchDependentLossError(
                f"The criterion returned losses of shape {tuple(losses.shape)} for {samples} samples. It must return "
                "a whole number of losses per sample.",
                fix='Use a criterion that supports reduction="none", and pass shape=(B, T) for flattened tokens.',
            )
        per_sample = (samples, losses.numel() // samples if samples else 1)
        counted = self._counted(args, losses).reshape(per_sample)
        total_B = losses.reshape(per_sample).sum(dim=1)
        mean = self._criterion_reduction() == "mean"
        loss_B = total_B / counted.sum(dim=1).clamp(min=1) if mean else total_B
        return DPTensorFastGradientClipping(self.module, self.optimizer, loss_B, self.loss_reduction)

    def _number_of_samples(self, args: Any, shape: tuple[int, ...] | None) -> int:
        if shape is not None:
            return int(shape[0])
        passes = getattr(self.module, "_pending_passes", None)
        samples = None if passes is None else passes.clipper.capture.rows
        first = next((arg for arg in args if isinstance(arg, Tensor) and arg.dim()), None)
        if samples is None or (first is not None and samples and len(first) % samples):
            return 0 if first is None else len(first)
        return int(samples)

    def _criterion_reduction(self) -> str:
        return str(getattr(self.criterion, "reduction", self.loss_reduction))

    def _unreduced(self, *args: Any, **kwargs: Any) -> Tensor:
        criterion: Any = self.criterion
        if isinstance(getattr(criterion, "reduction", None), str):
            reduction, criterion.reduction = criterion.reduction, "none"
            try:
                return criterion(*args, **kwargs)  # type: ignore[no-any-return]
            finally:
                criterion.reduction = reduction
        if _takes_reduction(criterion):
            kwargs = {**kwargs, "reduction": "none"}
        return criterion(*args, **kwargs)  # type: ignore[no-any-return]

    def _counted(self, args: Any, losses: Tensor) -> Tensor:
        """Returns the mask of losses that count in a mean, without ignored targets."""
        ignored = getattr(self.criterion, "ignore_index", None)
        targets = args[1] if len(args) > 1 else None
        if isinstance(targets, Tensor) and ignored is not None and targets.shape == losses.shape:
            return targets != ignored
        return torch.ones_like(losses, requires_grad=False)


def _takes_reduction(function: Callable[..., Any]) -> bool:
    try:
        return "reduction" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
