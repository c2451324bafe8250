"""Per-sample gradient clipping without an engine: clipped averages in ``p.grad``, without noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dpengine.clipping.custom_policy import is_policy
from dpengine.clipping.policy import AbstractClip
from dpengine.clipping.short_forms import clipping_from
from dpengine.errors import BatchStateError, UnsupportedLayerError, keyword_hints

from .add_clipped import ClipStatistics
from .pass_clipper import PassClipper, RecordedPass


@keyword_hints
class PerSampleGradientClipper:
    """Clips the gradient of every sample of a module and accumulates the clipped gradients.

    It bounds the contribution of each sample to ``p.grad``. It adds no noise, so its results are not private. ::

        clipper = PerSampleGradientClipper(model, Flat(1.0))
        for inputs, targets in minibatches:  # sizes may differ
            loss_fn(model(inputs), targets).backward()
            clipper.clip_and_accumulate()
        threshold, largest_norm = clipper.pre_step()
        optimizer.step()

    Args:
        module: The module. Gradients of all its trainable parameters are clipped. Only passes in train mode are
            recorded.
        norm_clipper: A clipping policy, such as ``Flat(1.0)``, that fits the module.
        batch_first: True if axis 0 of the inputs is the batch; False for axis 1, as in time-major models.
        loss_reduction: Reduction of the loss over the samples of a minibatch, ``"mean"`` or ``"sum"``. With ``"mean"``,
            gradients are first multiplied by the number of samples.
        grad_sample_mode: ``"auto"``, ``"hooks"``, ``"functorch"``, ``"ew"``, ``"whole_model"`` or ``"ghost"``.

    Raises:
        TypeError: If the module is not a ``torch.nn.Module``, or ``norm_clipper`` is not a policy.
        ValueError: If ``loss_reduction`` or ``grad_sample_mode`` is unknown, or the policy does not fit the module.
        UnsupportedLayerError: If the module has no trainable parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        norm_clipper: AbstractClip,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        *,
        grad_sample_mode: str = "auto",
    ):
        norm_clipper = _checked_policy(module, norm_clipper)
        self.module = module
        self.norm_clipper = norm_clipper
        self.loss_reduction = loss_reduction
        self._clipper = PassClipper(
            module,
            norm_clipper,
            self._pass_ended,
            grad_sample_mode=grad_sample_mode,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
        )
        self._statistics: list[ClipStatistics] = []
        self._recorded: RecordedPass | None = None
        self._clipper.attach()

    def _pass_ended(self, recorded: RecordedPass) -> None:
        if self._recorded is not None:
            self._clipper.forget()
            self._recorded = None
            raise BatchStateError(
                "A second backward pass ran before clip_and_accumulate(); both passes are discarded.",
                fix="Call clip_and_accumulate() after every backward().",
            )
        self._recorded = recorded

    def clip_and_accumulate(self) -> None:
        """Clips the gradients of the last backward pass and accumulates them.

        Raises:
            BatchStateError: If there was no backward pass.
            BatchMismatchError: If layers saw different numbers of samples.
            MissingGradientError: If autograd filled the gradient of a parameter directly.
            UnknownParameterError: If the trainable parameters changed since the pass, or since the last `pre_step`.
        """  # noqa: DOC502 - clip() raises
        interrupted = self._clipper.capture.unfinished is not None
        if interrupted or (self._recorded is None and self._clipper.pending):
            self._clipper.settle()
        recorded, self._recorded = None if interrupted else self._recorded, None
        if recorded is None:
            raise BatchStateError(
                "clip_and_accumulate() found no per-sample gradients.",
                fix="Run forward in train mode and backward first.",
            )
        try:
            self._statistics.append(self._clipper.clip(recorded))
        finally:
            if self._clipper.buffer.clean and not self._clipper.contributed:
                self._statistics = []  # an error zeroed the sums, because they may have held a part of the pass

    def pre_step(self) -> tuple[float | list[float], float]:
        """Writes the mean of the clipped gradients (the sum for a sum loss) to ``p.grad``, and clears the accumulator.

        Returns:
            The clipping norm (a list for a policy with several groups), and the largest per-sample norm.

        Raises:
            BatchStateError: If nothing was accumulated.
        """
        if not self._statistics:
            raise BatchStateError("pre_step(): no gradients were accumulated.", fix="Call clip_and_accumulate() first.")
        samples = sum(statistics.samples for statistics in self._statistics)
        divisor = max(samples, 1) if self.loss_reduction == "mean" else 1
        for parameter, total in self._clipper.buffer:
            parameter.grad = (total / divisor).to(parameter.dtype)
        largest = max(statistics.largest_norm for statistics in self._statistics)
        bounds = self.norm_clipper.bounds
        self.reset()
        return (bounds[0] if len(bounds) == 1 else list(bounds)), largest

    def reset(self) -> None:
        """Discards the accumulated gradients."""
        self._statistics = []
        self._recorded = None
        self._clipper.discard()

    def detach(self) -> None:
        """Removes all hooks from the module."""
        self.reset()
        self._clipper.detach()


def _checked_policy(module: nn.Module, policy: Any) -> AbstractClip:
    """Returns the policy. Raises if an argument has the wrong type, or if the policy does not fit the module."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"PerSampleGradientClipper: module is {torch.typename(module)}; pass an instance of torch.nn.Module."
        )
    if not is_policy(policy):
        raise TypeError(
            f"PerSampleGradientClipper: norm_clipper={policy!r} is not a clipping policy. Pass a policy, such as "
            "dpengine.Flat(1.0)."
        )
    policy = clipping_from(policy)
    trainable = [name for name, p in module.named_parameters() if p.requires_grad]
    if not trainable:
        raise UnsupportedLayerError(
            f"PerSampleGradientClipper: the module ({type(module).__name__}) has no trainable parameter.",
            fix="Unfreeze the parameters to train: module.requires_grad_(True).",
        )
    policy.group_of(trainable)  # raises if the policy does not fit
    return policy
