"""Compares two runs of a loop in which some samples had different data.

Tensors of the runs are matched by a key, which names for example an output of a model call. Axes: B samples, N entries
per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture.tensors import map_outputs, tensors_in, tensors_in_outputs
from dpengine.errors import BatchDependentLossError, ReductionError
from dpengine.grad_modes.flat_buffer import Sums

EXACT, HALF = 1e-4, 2e-2  # relative tolerance between two runs, in float32 and in half precision
_WIDTH = 4096  # length of a sketch; shorter vectors are stored in full
_REPETITIONS = 4  # number of independent sketches of a vector


class KeptSamples(NamedTuple):
    """Indices, in each run, of the samples whose data are the same in both runs."""

    in_baseline: Tensor
    in_rerun: Tensor


class BatchAxis(NamedTuple):
    """Batch axis of tensors, which may hold several entries per sample.

    Attributes:
        samples: Number of samples.
        to_front: Moves the batch axis of a tensor to axis 0, or from axis 0 back to its original position.
    """

    samples: int
    to_front: Callable[[Tensor], Tensor]

    def split(self, tensor: Tensor, samples: int | None = None) -> Tensor | None:
        """Returns a tensor as ``(B, N, ...)``; None if it has no batch axis."""
        samples = samples or self.samples
        front = self._front(tensor, samples)
        if front.dim() == 0 or len(front) == 0 or len(front) % samples:
            return None
        return front.unflatten(0, (samples, -1))

    def _front(self, tensor: Tensor, samples: int) -> Tensor:
        """Returns the tensor with the batch on axis 0; unchanged if only axis 0 has the size of the batch."""
        front = self.to_front(tensor)
        return tensor if tensor.shape[:1] == (samples,) != front.shape[:1] else front

    def restore(self, tensor: Tensor, values_BN: Tensor) -> Tensor:
        """Converts the result of `split` back to the axes of ``tensor``."""
        front = values_BN.flatten(0, 1)
        return front if self._front(tensor, self.samples) is tensor else self.to_front(front)

    def gather(self, tensor: Tensor, source_B: Tensor) -> Tensor:
        """Returns the tensor with the samples at the indices ``source_B``; unchanged if it has no batch axis."""
        values_BN = self.split(tensor)
        return tensor if values_BN is None else self.restore(tensor, values_BN[source_B.to(values_BN.device)])

    def select(self, tensors: Mapping[Any, Tensor], indices: slice, samples: int | None = None) -> dict[Any, Tensor]:
        """Returns copies of the samples at ``indices`` of each tensor that has a batch axis."""
        split = {key: self.split(tensor, samples) for key, tensor in tensors.items()}
        return {key: values_BN[indices].clone() for key, values_BN in split.items() if values_BN is not None}

    def is_ambiguous_in(self, data: Sequence[Tensor]) -> bool:
        """Returns True if a tensor has its batch on axis 1, and axis 0 has the same size."""
        return any(t.shape[:2] == (self.samples, self.samples) and self.to_front(t) is not t for t in data)

    def can_permute(self, data: Sequence[Tensor]) -> bool:
        """Returns True if samples can change positions, because every tensor of the batch has them on axis 0."""
        return bool(data) and all(self.to_front(t) is t and self.split(t) is not None for t in data)

    def halves(self, *, permute: bool) -> Iterator[tuple[KeptSamples, Tensor]]:
        """Yields a random half of the samples to keep, then the other half.

        Each half comes with gather indices ``(B,)`` that replace all other samples with the first kept one. With
        ``permute``, each sample of the second half moves to the next position.
        """
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.samples))
        for kept, step in zip(order.tensor_split(2), (0, int(permute)), strict=True):
            source_B = torch.full((self.samples,), int(kept[0])).index_copy(0, kept, kept)
            yield KeptSamples(kept, (kept + step) % self.samples), source_B.roll(step)


def holds_samples(node: Any, samples: int) -> bool:
    """Returns True for a list with one element per sample, for example tensors of different lengths.

    All elements must have the same type and structure. A list of columns, in which each element has one entry per
    sample, does not count.
    """
    if type(node) not in (list, tuple) or len(node) != samples:
        return False
    kind = _structure if tensors_in(node) else _kind
    return len({kind(element) for element in node}) == 1 and not all(_length(element) == samples for element in node)


def number_of_samples(batch: Any, to_front: Callable[[Tensor], Tensor]) -> int | None:
    """Returns the number of samples of a batch; None if it is ambiguous.

    It is the size of the first tensor, else of the arrays, else the length of the lists in a dict, else of the list.
    """
    if (tensor := next((t for t in tensors_in_outputs(batch) if t.dim()), None)) is not None:
        return len(to_front(tensor))
    sizes = {leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, np.ndarray) and leaf.ndim}
    if not sizes and isinstance(batch, dict):
        sizes = {len(value) for value in batch.values() if isinstance(value, (list, tuple))}
    elif not sizes and isinstance(batch, list) and len({type(element) for element in batch}) == 1:
        # A list of lists of one kind may hold samples or columns.
        columns = [isinstance(part, (list, tuple)) and len({type(entry) for entry in part}) == 1 for part in batch]
        sizes = set() if all(columns) else {len(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def _structure(element: Any) -> str:
    of_leaf = lambda leaf: (leaf.dim(), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)  # noqa: E731
    return str(pytree.tree_map(of_leaf, element))


def _kind(element: Any) -> str:
    if isinstance(element, (list, tuple)):
        return f"{type(element)} of {_kind(element[0]) if element else ''}"
    return str((type(element), getattr(element, "ndim", 0), getattr(element, "dtype", None)))


def _length(element: Any) -> int | None:
    if isinstance(element, (Tensor, np.ndarray)):
        return element.shape[0] if element.ndim else None
    return len(element) if isinstance(element, (list, tuple)) else None


def lists_of_samples(batch: Any, samples: int) -> list[Any]:
    """Returns the lists of a batch that contain tensors and hold one element per sample."""
    leaves = pytree.tree_leaves(batch, is_leaf=lambda node: holds_samples(node, samples))
    return [leaf for leaf in leaves if holds_samples(leaf, samples) and tensors_in(leaf)]


def is_ambiguous(batch: Any, samples: int) -> bool:
    """Returns True if a list in the batch may hold either samples or columns.

    Such a list has as many elements as there are samples, and each element, a tensor or a list, has as many entries.
    """
    ambiguous = False

    def visit(node: Any) -> bool:
        nonlocal ambiguous
        if type(node) in (list, tuple) and len(node) == samples and all(_length(part) == samples for part in node):
            kinds = (list, tuple) if node is batch else (list, tuple, Tensor)  # tensors of a batch are its columns
            ambiguous |= all(isinstance(part, kinds) for part in node) and bool(tensors_in(node))
        return False

    pytree.tree_leaves(batch, is_leaf=visit)
    return ambiguous


def map_batch(batch: Any, samples: int, replace: Callable[[Tensor], Tensor]) -> Any:
    """Returns the batch with ``replace`` applied to its tensors, and with its lists reordered in the same way."""

    def of_leaf(leaf: Any) -> Any:
        is_array = isinstance(leaf, np.ndarray) and _length(leaf) == samples
        if not (is_array or holds_samples(leaf, samples)):
            return map_outputs(replace, leaf)
        order = replace(torch.arange(samples)).tolist()
        return leaf[order] if is_array else type(leaf)(leaf[i] for i in order)

    return pytree.tree_map(of_leaf, batch, is_leaf=lambda node: holds_samples(node, samples))


def largest_change(
    batch_axis: BatchAxis,
    expected: Mapping[Any, Tensor],
    actual: Mapping[Any, Tensor],
    tolerance: float,
    kept: KeptSamples | None = None,
) -> float:
    """Returns the largest relative change of a kept sample; 0 within the tolerance.

    Args:
        batch_axis: Batch axis of the tensors.
        expected: Tensors of the baseline run, by key.
        actual: Tensors of the rerun.
        tolerance: Relative tolerance.
        kept: Samples to compare; None for all.
    """
    largest = 0.0
    for key, before in expected.items():
        after = actual.get(key)
        if after is None or before.shape != after.shape:
            return 1.0
        a, b = batch_axis.split(before), batch_axis.split(after)
        if a is None or b is None:
            a, b = before.reshape(1, -1), after.reshape(1, -1)
        elif kept is not None:
            a, b = a[kept.in_baseline.to(a.device)], b[kept.in_rerun.to(b.device)]
        if a.dtype == b.dtype and torch.equal(a, b):
            continue  # fast path for the common case
        a, b = (t.flatten(1) if t.is_floating_point() else t.flatten(1).double() for t in (a, b))
        size_B, change_B = norms(a), norms(a - b)
        if not (size_B + change_B).isfinite().all():
            a, b = (tensor.double().nan_to_num(0, 0, 0) for tensor in (a, b))
            size_B, change_B = norms(a), norms(a - b)
        if change_B.max() > 1e-12 * max(1.0, float(size_B.max())):
            largest = max(largest, float((change_B / (size_B + 1e-3 * size_B.mean() + 1e-30)).max()))
    return largest if largest > tolerance else 0.0


def norms(values_BN: Tensor) -> Tensor:
    """Returns the norm of each sample, computed in float64 where it would underflow or overflow in float32."""
    dtype = torch.promote_types(values_BN.dtype, torch.float32)
    norm_B = torch.linalg.vector_norm(values_BN, dim=1, dtype=dtype).double()
    extreme_B = ~(norm_B > 1e-12) | norm_B.isinf()
    if bool(extreme_B.any()) and bool((extreme := values_BN[extreme_B]).any()):
        norm_B[extreme_B] = torch.linalg.vector_norm(extreme, dim=1, dtype=torch.float64)
    return norm_B


def mixed_inputs_error() -> BatchDependentLossError:
    """Returns the error for a loop that mixes samples before the model."""
    return BatchDependentLossError(
        "The model input of one sample changed when other samples in the batch were changed: the loop repeats, mixes "
        "or reorders samples, or normalizes over the batch, before the model.",
        fix="Give the model the batch as the loader returned it. Augment single samples in the data set.",
    )


def position_error() -> BatchDependentLossError:
    """Returns the error for a loop in which the gradient of a sample depends on its position in the batch."""
    return BatchDependentLossError(
        "The model input or the gradient of a sample depends on the sample's position in the batch, and so on the "
        "samples before it: the training loop uses a weight, index or random number per position.",
        fix="Give all samples the same weights, or store a weight with each sample in the data set. Draw random "
        "numbers with torch, or with the global generator of numpy or Python.",
    )


def mixed_outputs_error() -> BatchDependentLossError:
    """Returns the error for a model whose output for a sample changes with the other samples."""
    return BatchDependentLossError(
        "The model output of one sample changed when other samples in the batch were changed: a layer mixes samples, "
        "or the loop gave the model a number or an attribute that depends on several samples.",
        fix="Find layers that mix samples with dpengine.check(model), and give the model nothing but the batch.",
    )


def mixed_loss_error(change: float, *, by_bound: bool = False) -> BatchDependentLossError:
    """Returns the error for a loss that mixes samples.

    Args:
        change: Relative change of the gradient of a sample.
        by_bound: True if the gradient changed only when the outputs or data of other samples were shifted very far.
    """
    shown = f"{100 * change:.2g}" if change < 0.99 else "100 or more"
    cause, typical = (
        (
            "were given far larger or smaller losses or data",
            "bounds on losses of several samples, such as loss.mean().clamp(max=5)",
        )
        if by_bound
        else (
            "were changed",
            "a mean over the tokens of the batch or over selected samples, class weights, and a loss between samples",
        )
    )
    return BatchDependentLossError(
        f"The loss mixes samples: the gradient of one sample changed by {shown} % when other samples in the batch "
        f"{cause}. Typical causes are {typical}.",
        fix="Compute per-sample losses with reduction='none' and average over all samples. For selected samples, use "
        "(losses * mask).mean(). For other losses, use dpengine.validation.per_example(loss_fn). For tokens, import "
        "dpengine.losses and use dpengine.losses.per_token_mean(logits, labels). For pairs, such as preferences, store "
        "both in one example, and call the model once for each. A contrastive loss compares samples, and cannot be "
        "trained with this guarantee.",
    )


def check_reduction(reduction: str | None, declared: str) -> None:
    """Raises ReductionError if a loss is a mean and was declared as a sum, or vice versa."""
    if reduction in ("mean", "sum") and reduction != declared:
        is_sum = reduction == "sum"
        actual = "a sum over the samples, or a sum that is divided by a constant" if is_sum else "a mean"
        raise ReductionError(
            f"The loss is {actual}, but loss_reduction={declared!r} was declared. Gradients would be scaled by the "
            "batch size, which is private: one sample would change the sum by up to twice the clipping norm.",
            fix=f'Pass loss_reduction="{reduction}" to make_private.',
        )


def reduction_of(
    grads: Mapping[Any, Tensor], reference: Mapping[Any, Tensor], mean_ratio: float, tolerance: float
) -> str | None:
    """Distinguishes a mean from a sum, based on the gradients of the same samples in two batches.

    Args:
        grads: Gradients in one batch, by key.
        reference: Gradients in the other batch.
        mean_ratio: Expected ratio of ``grads`` to ``reference`` if the loss is a mean.
        tolerance: Relative tolerance between two runs.

    Returns:
        "mean", "sum" or "neither"; None if the gradients are not proportional.
    """
    keys = [key for key in reference if key in grads and grads[key].shape == reference[key].shape]
    a, b = (
        torch.cat([tensors[key].flatten().double().cpu() for key in keys] or [torch.zeros(1)])
        for tensors in (grads, reference)
    )
    scale = float(b.square().sum())
    ratio = float((a * b).sum()) / scale if scale else 0.0
    if (
        not ratio
        or not 0 < scale < torch.inf
        or float((a - ratio * b).norm()) > min(10 * tolerance, 0.05) * abs(ratio) * scale**0.5
    ):
        return None  # the loop changed, or draws random numbers
    for reduction, expected in (("mean", mean_ratio), ("sum", 1.0)):
        if abs(ratio / expected - 1) < min(10 * tolerance, abs(mean_ratio - 1) / 3):
            return reduction
    return "neither"


class Sketches(Sums):
    """Replacement of a ``FlatBuffer`` that stores a linear sketch of each sum: its products with random signs.

    The expected squared norm of a sketch is the squared norm of the sum (Alon, Matias and Szegedy 1996). The relative
    error of the norm is about one half.
    """

    def __init__(self) -> None:
        self.by_parameter: dict[nn.Parameter, Tensor] = {}

    def add(self, parameter: nn.Parameter, total: Tensor, scale: float = 1.0) -> None:
        """Adds ``scale * total``."""
        sketch = _sketched(total.reshape(-1)) * scale
        previous = self.by_parameter.get(parameter)
        self.by_parameter[parameter] = sketch if previous is None else previous + sketch

    def fill(self, parameter: nn.Parameter, write: Callable[[Tensor, float], None]) -> None:
        """Adds the sum that ``write`` computes. See ``FlatBuffer.fill``."""
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        total = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        write(total, 0.0)
        self.add(parameter, total)

    def complete(self, parameter: nn.Parameter) -> None:
        """Does nothing."""


def norm_of_sketch(sketch: Tensor) -> Tensor:
    """Estimates the norm of the sketched vector."""
    return sketch.norm() / (len(sketch) ** 0.5 if sketch.dim() == 2 else 1)


def _sketched(flat: Tensor) -> Tensor:
    if flat.numel() <= _WIDTH:
        return flat.clone()
    blocks = flat.numel() // _WIDTH
    generator = torch.Generator().manual_seed(blocks)  # sums that are compared need equal signs
    signs = torch.randint(0, 2, (_REPETITIONS, blocks + 1), generator=generator).to(flat) * 2 - 1
    sketch = signs[:, :blocks] @ flat[: blocks * _WIDTH].view(blocks, _WIDTH)
    rest = flat[blocks * _WIDTH :]
    sketch[:, : len(rest)] += signs[:, blocks:] * rest
    return sketch
