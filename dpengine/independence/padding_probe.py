"""Checks whether the outputs for a sample depend on the length to which its batch is padded.

A collate function pads to the longest example. If the model does not mask the padding, the longest sample of a batch
changes the gradients of all others. The check runs a forward pass again with the shorter samples only, once at the full
length and once truncated, and compares the outputs that the loss uses. Padding that changes outputs is harmless if all
batches have the same length. Therefore the error is raised only if outputs changed in batches of two lengths.

Axes: B samples, T positions, R other axes, flattened.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture.capture import Capture
from dpengine.capture.replay import ForwardPass, Replay
from dpengine.capture.tensors import tensors_in
from dpengine.errors import BatchDependentLossError, notice

from .compare_runs import EXACT, HALF, BatchAxis
from .random_states import random_states

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_MIN_PADDING = 3  # smallest number of padded positions in a batch; fewer may be equal tokens by chance


class Padding(NamedTuple):
    """Padding of a batch.

    Attributes:
        leaf: Index of the first padded tensor among the tensors of the inputs.
        axis: Padded axis of this tensor, if the batch is on axis 0.
        length: Size of the padded axis.
        at_end: False if the padding is at the beginning.
        lengths_B: Number of positions of each sample, without padding.
        padded: Indices of all tensors that are padded on this axis.
    """

    leaf: int
    axis: int
    length: int
    at_end: bool
    lengths_B: Tensor
    padded: list[int]


def padding_error() -> BatchDependentLossError:
    """Returns the error for samples whose gradients depend on the longest sample of the batch."""
    return BatchDependentLossError(
        "The result of a sample depends on padding: it changed when its batch was padded to another length, and "
        "batches have different lengths. So the longest sample changes the gradients of all others.",
        fix="Give the model a mask and use it, also in means over positions (attention_mask, src_key_padding_mask, "
        'pack_padded_sequence), or pad all batches to one length (padding="max_length").',
    )


class PaddingProbe:
    """Checks the probed forward passes of one model."""

    def __init__(self, capture: Capture):
        self._capture = capture
        # Lengths of batches whose padding changed outputs, and of batches without a check, by tensor and axis.
        self._changed_at: dict[tuple[int, int], set[int]] = {}
        self._unchecked: dict[tuple[int, int], set[int]] = {}

    @property
    def needs_other_length(self) -> bool:
        """True if padding changed outputs at one length, so that a batch of another length must decide."""
        return bool(self._changed_at)

    def check(self, replay: Replay, samples: int) -> None:
        """Raises BatchDependentLossError if padding changed outputs in batches of two lengths."""
        batch_axis = BatchAxis(samples, self._capture.batch_to_front)
        for forward_pass in replay.reached:
            with self._capture.paused():
                self._check_pass(forward_pass, batch_axis)
        if any(len(lengths) > 1 for lengths in self._changed_at.values()):
            raise padding_error()
        if any(len(lengths) > 1 for lengths in self._unchecked.values()):
            self._warn_unchecked()

    def _warn_unchecked(self) -> None:
        notice(
            "DPE012",
            "Batches are padded to different lengths, and the model did not run with a shorter batch, or draws random "
            "numbers in eval mode. So it is not known whether padding changes the result of a sample. Pad all batches "
            "to one length.",
            key="padding",
            of=self._capture.model,
        )
        self._unchecked = {}

    def _check_pass(self, forward_pass: ForwardPass, batch_axis: BatchAxis) -> None:
        inputs = tensors_in((forward_pass.args, forward_pass.kwargs))
        for padding in paddings([batch_axis.to_front(tensor) for tensor in inputs], batch_axis.samples):
            key, depends = (padding.leaf, padding.axis), None
            for length in shorter_lengths(padding):
                depends = _Comparison(self._capture, forward_pass, batch_axis, padding, length).depends()
                if depends is not None:
                    break
            if depends is not False:
                (self._changed_at if depends else self._unchecked).setdefault(key, set()).add(padding.length)


class _Comparison:
    """Compares the outputs for the shorter samples of a pass at two lengths."""

    def __init__(
        self, capture: Capture, forward_pass: ForwardPass, batch_axis: BatchAxis, padding: Padding, length: int
    ):
        self._capture, self._pass, self._batch_axis = capture, forward_pass, batch_axis
        self._padding, self._length = padding, length
        kept_B = padding.lengths_B <= length
        first = int(kept_B.nonzero()[0])
        self._source_B = torch.where(kept_B, torch.arange(len(kept_B)), first)
        self._kept_B = kept_B
        # If the model returns a loss, both runs use shorter samples only. Other outputs are compared sample by sample.
        self._returns_loss = any(g is not None and g.dim() == 0 for g in forward_pass.grads)
        before, after = forward_pass.initial.random, forward_pass.random_after
        self._drew = not after or not all(
            torch.equal(old, new) for (_, old), (_, new) in zip(before, after, strict=True)
        )

    def depends(self) -> bool | None:
        """Returns True if outputs that the loss uses differ; None if they cannot be compared."""
        try:
            as_recorded = not (self._returns_loss or self._drew)
            full = list(self._pass.outputs) if as_recorded else self._run(cut=False)
            cut = self._run(cut=True)
        except Exception:  # for example if the model accepts one length only
            return None
        if full is None or cut is None or len(full) != len(cut) or len(full) != len(self._pass.grads):
            return None
        return any(
            self._differ(a, b, grad)
            for a, b, grad in zip(full, cut, self._pass.grads, strict=True)
            if grad is not None and grad.shape == a.shape
        )

    def _run(self, *, cut: bool) -> list[Tensor] | None:
        """Returns the outputs; None if the model draws random numbers. Uses eval mode if the recorded pass drew any."""
        forward_pass, inputs = self._pass, (self._pass.args, self._pass.kwargs)
        index = iter(range(len(tensors_in(inputs))))
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: self._replacement(t, next(index), cut=cut), inputs)
        model = self._capture.model
        with forward_pass.in_initial_state(model):
            if self._drew:
                model.eval()
            self._replace_attributes(model, cut=cut)
            before = random_states()
            outputs = [output.detach() for output in forward_pass.forward(model, args, kwargs)]
            return outputs if all(map(torch.equal, before, random_states())) else None

    def _replace_attributes(self, model: nn.Module, *, cut: bool) -> None:
        """Replaces tensor attributes with an entry per sample and position, such as a mask, as inputs are replaced.

        The caller restores the attributes.
        """
        for module in model.modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and value.dim() > 1:
                    front = self._batch_axis.to_front(value)
                    if len(front) == self._batch_axis.samples and self._padding.length in front.shape[1:]:
                        setattr(module, name, self._replacement(value, -1, cut=cut))

    def _replacement(self, tensor: Tensor, index: int, *, cut: bool) -> Tensor:
        """Returns an input, truncated if ``cut``, with its longer samples replaced by a shorter one where needed."""
        batch_axis, padding = self._batch_axis, self._padding
        front = batch_axis.to_front(tensor)
        batched = front.dim() > 0 and len(front) == batch_axis.samples
        if batched and (cut or self._returns_loss):
            front = front[self._source_B.to(front.device)]
        if not cut:
            return batch_axis.to_front(front)
        if index in padding.padded:
            axes: Sequence[int] = (padding.axis,)
        else:
            axes = [a for a in range(int(batched), front.dim()) if front.shape[a] == padding.length]
        for axis in axes:
            front = narrowed(front, axis, self._length, padding.at_end)
        return batch_axis.to_front(front)

    def _differ(self, full: Tensor, cut: Tensor, grad: Tensor) -> bool:
        """Returns True if entries with a gradient differ, or if entries that were cut off have a gradient."""
        parts = [part for part in map(self._by_sample, (full, cut, grad)) if part is not None]
        if len(parts) < 3:
            return False
        full, cut, grad = (part[self._kept_B.to(part.device)] if part.dim() else part for part in parts)
        if full.dim() != cut.dim() or any(n < m for n, m in zip(full.shape, cut.shape, strict=True)):
            return False  # for example if another input determines the number of positions
        used, total = grad, grad.count_nonzero()
        for axis, size in enumerate(cut.shape):
            full = narrowed(full, axis, size, self._padding.at_end)
            used = narrowed(used, axis, size, self._padding.at_end)
        if used.count_nonzero() != total:
            return True
        half = full.dtype in (torch.float16, torch.bfloat16) or self._pass.initial.autocast_enabled
        finite = full.isfinite()
        sizes = torch.where(finite, full.abs(), 0)
        far = (full - cut).abs() > (HALF if half else EXACT) * (sizes + (sizes.max() if sizes.numel() else 0.0))
        return bool((far & finite & (used != 0)).any())

    def _by_sample(self, tensor: Tensor) -> Tensor | None:
        """Returns an output as ``(B, N, ...)``; a scalar unchanged; None if there is no batch axis."""
        if tensor.dim() > 1 and tensor.shape[0] != self._batch_axis.samples == tensor.shape[1]:
            return tensor.transpose(0, 1)[:, None]
        return tensor if tensor.dim() == 0 else self._batch_axis.split(tensor)


def narrowed(tensor: Tensor, axis: int, length: int, at_end: bool) -> Tensor:
    """Returns the first ``length`` positions of an axis, or the last ones if padding is at the beginning."""
    return tensor.narrow(axis, 0 if at_end else tensor.shape[axis] - length, length)


def shorter_lengths(padding: Padding) -> Iterator[int]:
    """Yields the median and the maximum length of the samples that are shorter than the batch."""
    below = padding.lengths_B[(padding.lengths_B < padding.length) & (padding.lengths_B > 0)]
    if len(below):
        yield from dict.fromkeys((int(below.median()), int(below.max())))


def paddings(fronts: Sequence[Tensor], samples: int) -> Iterator[Padding]:
    """Yields the padding of tensors.

    Padding is a constant at the end or the beginning of an axis, whose length differs between samples.

    Args:
        fronts: Tensors with the batch on axis 0.
        samples: Number of samples.
    """
    yielded: set[tuple[int, int]] = set()
    may_pad = [i for i, t in enumerate(fronts) if t.dim() > 1 and len(t) == samples and _may_be_padded(t)]
    for at_end, leaf in itertools.product((True, False), may_pad):
        for axis in dict.fromkeys((1, fronts[leaf].dim() - 1)):
            length = fronts[leaf].shape[axis]
            if (length, axis) in yielded or (lengths_B := _lengths(fronts[leaf], axis, at_end)) is None:
                continue
            padded = [leaf]
            for other in may_pad:
                if other != leaf and fronts[other].dim() > axis and fronts[other].shape[axis] == length:
                    other_lengths_B = _lengths(fronts[other], axis, at_end)
                    if other_lengths_B is not None:
                        lengths_B, padded = torch.maximum(lengths_B, other_lengths_B), [*padded, other]
            is_square = any(t.shape[:2] == (length, length) for i, t in enumerate(fronts) if i not in padded)
            yielded.add((length, axis))
            if not (is_square and length == samples):  # of a square tensor, either axis may be the batch
                yield Padding(leaf, axis, length, at_end, lengths_B, padded)


def _may_be_padded(tensor: Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and (tensor.is_floating_point() or tensor.dtype in _INTEGERS)


def _lengths(front: Tensor, axis: int, at_end: bool) -> Tensor | None:
    """Returns the number of positions of each sample before its padding; None if the tensor is not padded."""
    values_BTR = front.detach().movedim(axis, 1).flatten(2) if front.dim() > 2 else front.detach()[:, :, None]
    if not at_end:
        values_BTR = values_BTR.flip(1)
    exact = not front.is_floating_point()
    if values_BTR.numel() == 0:
        return None
    value = values_BTR[:, -1].flatten().mode().values if exact else values_BTR.new_zeros(())
    is_pad_BT = (values_BTR == value).all(dim=2)
    tail_BT = is_pad_BT.flip(1).cumprod(dim=1)
    padding_B = tail_BT.sum(dim=1)
    occurs_inside = int(is_pad_BT.sum()) > int(padding_B.sum())
    if (exact and occurs_inside) or int(padding_B.sum()) < _MIN_PADDING or int(padding_B.max()) < 2:
        return None
    return None if bool((padding_B == padding_B[0]).all()) else (front.shape[axis] - padding_B).cpu()
