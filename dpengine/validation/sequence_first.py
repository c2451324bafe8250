"""Adapts sequence-first models (time on axis 0, batch on axis 1) for the validation checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

LossFunction = Callable[[Any, Any], Tensor]


class _Shared(list[bool]):
    """List that copies of a model share."""

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self


class BatchFirst(nn.Module):
    """Wraps a model with the batch on axis 1, so that it is called with the batch on axis 0.

    Flat tensors, in which both axes are merged, such as targets ``(T * B,)``, are supported as well.
    """

    def __init__(self, model: nn.Module, inputs: Any):
        super().__init__()
        self.model = model
        first = next(leaf for leaf in pytree.tree_leaves(inputs) if _has_axis_1(leaf))
        self.length, self.size = first.shape[:2]
        self._flat = _Shared()  # True for each leaf of the last outputs that was flat

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(_swapped, (args, kwargs))
        size = next(leaf.shape[1] for leaf in pytree.tree_leaves((args, kwargs)) if _has_axis_1(leaf))
        outputs, self._flat[:] = self.to_front(self.model(*args, **kwargs), size)
        return outputs

    def to_front(self, tree: Any, size: int) -> tuple[Any, list[bool]]:
        """Returns a tree of ``size`` samples with the batch on axis 0, and for each leaf True if it was flat."""
        leaves, spec = pytree.tree_flatten(tree)
        flat = [self._is_flat(leaf, size) for leaf in leaves]
        fronts = [
            _swapped(self._unflattened(leaf) if is_flat else leaf) for leaf, is_flat in zip(leaves, flat, strict=True)
        ]
        return pytree.tree_unflatten(fronts, spec), flat

    def loss(self, loss_fn: LossFunction, flat_targets: list[bool]) -> LossFunction:
        """Returns the loss as a function of outputs and targets with the batch on axis 0."""

        def batch_loss(outputs: Any, targets: Any) -> Tensor:
            return loss_fn(_restored(outputs, self._flat), _restored(targets, flat_targets))

        return batch_loss

    def _is_flat(self, leaf: Any, size: int) -> bool:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or (_has_axis_1(leaf) and leaf.shape[1] == size):
            return False
        return self.length > 1 and leaf.shape[0] == self.length * size

    def _unflattened(self, leaf: Tensor) -> Tensor:
        return leaf.reshape(self.length, -1, *leaf.shape[1:])


def per_sample_losses(outputs: Any, targets: Any, loss_fn: LossFunction) -> list[Tensor]:
    """Returns the losses of single samples, for outputs and targets with the batch on axis 1."""
    adapter = BatchFirst(nn.Identity(), outputs)
    front, adapter._flat[:] = adapter.to_front(outputs, adapter.size)
    front_targets, flat = adapter.to_front(targets, adapter.size)
    batch_loss = adapter.loss(loss_fn, flat)

    def sample(tree: Any, i: int) -> Any:
        return pytree.tree_map(lambda leaf: leaf[i : i + 1] if _has_samples(leaf, adapter.size) else leaf, tree)

    return [batch_loss(sample(front, i), sample(front_targets, i)) for i in range(adapter.size)]


def batch_first_parts(model: nn.Module, loss_fn: LossFunction, batch: Any) -> tuple[nn.Module, LossFunction, Any]:
    """Returns the model, loss and batch, adapted to the batch on axis 0."""
    inputs, targets = batch
    adapter = BatchFirst(model, inputs)
    targets, flat = adapter.to_front(targets, adapter.size)
    return adapter, adapter.loss(loss_fn, flat), (pytree.tree_map(_swapped, inputs), targets)


def _has_samples(leaf: Any, size: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size


def _has_axis_1(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 1


def _swapped(leaf: Any) -> Any:
    return leaf.transpose(0, 1) if _has_axis_1(leaf) else leaf


def _restored(tree: Any, flat: list[bool]) -> Any:
    leaves, spec = pytree.tree_flatten(tree)
    swapped = [_swapped(leaf) for leaf in leaves]
    restored = [leaf.flatten(0, 1) if is_flat else leaf for leaf, is_flat in zip(swapped, flat, strict=True)]
    return pytree.tree_unflatten(restored, spec)
