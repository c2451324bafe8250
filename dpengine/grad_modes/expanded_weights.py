"""Grad mode that uses PyTorch's ExpandedWeights, and ordinary capture for layers that it does not support."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils._expanded_weights.expanded_weights_impl import ExpandedWeight

from dpengine.capture.record import LayerCall, Use
from dpengine.capture.watch import Watch

from .bookkeep import BookKeeping
from .choose_method import KeepAll
from .flat_buffer import Sums
from .method import Choice
from .strategy import AbstractGradients

EXPANDED = frozenset({nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm, nn.GroupNorm})


class ExpandedWeights(AbstractGradients):
    """Replaces parameters by ``ExpandedWeight`` copies, whose backward stores per-sample gradients in the copy."""

    def __init__(self) -> None:
        self._inner = BookKeeping(KeepAll())
        # Each copy with its ExpandedWeight, which lives as long as the graph of its forward pass.
        self._copies: list[tuple[Use, Tensor, weakref.ref[Tensor]]] = []

    def swap(
        self, watch: Watch, real: Mapping[str, nn.Parameter], inputs: Sequence[Tensor], rows: int | None
    ) -> Mapping[str, Tensor] | None:
        """Returns expanded copies of a layer's parameters; None if ExpandedWeights does not support the call."""
        module = watch.module
        supported = type(module) in EXPANDED and len(real) == len(list(module.parameters(recurse=False)))
        if not supported or not rows or torch.is_autocast_enabled("cpu") or not _supports_call(module, inputs):
            return None
        swapped: dict[str, Tensor] = {}
        for name, parameter in real.items():
            copy = parameter.detach().requires_grad_()
            use = Use(parameter, f"{watch.name}.{name}" if watch.name else name)
            swapped[name] = ExpandedWeight(copy, rows, "sum")
            self._copies.append((use, copy, weakref.ref(swapped[name])))
        return swapped

    def backward_ended(self) -> None:
        for use, copy, _ in self._copies:
            grad = _gradient(copy)
            if grad is not None:
                self._inner.receive_rows(use, grad)
        self._forget_used()

    def _forget_used(self) -> None:
        # A copy without a gradient may belong to a forward pass whose backward pass is still to come.
        self._copies = [entry for entry in self._copies if _gradient(entry[1]) is None and entry[2]() is not None]

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        self._inner.receive(call, uses, rule)

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        self._inner.receive_rows(use, grad)

    @property
    def rows(self) -> Mapping[str, int]:
        self.backward_ended()
        return self._inner.rows

    @property
    def parameters(self) -> Mapping[nn.Parameter, str]:
        return self._inner.parameters

    @property
    def choices(self) -> Sequence[Choice]:
        return self._inner.choices

    def sq_norms(self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float) -> Tensor:
        return self._inner.sq_norms(groups, num_groups, scale)

    def drop(self, rows_B: Tensor) -> None:
        self._inner.drop(rows_B)

    def add_sums(self, groups: Mapping[nn.Parameter, int], weights_BK: Tensor, scale: float, into: Sums) -> None:
        self._inner.add_sums(groups, weights_BK, scale, into)

    def clear(self) -> None:
        self._inner.clear()
        self._forget_used()


def _gradient(copy: Tensor) -> Tensor | None:
    return getattr(copy, "grad_sample", None)


def _supports_call(module: nn.Module, inputs: Sequence[Tensor]) -> bool:
    """Returns True if ExpandedWeights has no known error for this call.

    In torch 2.13 it requires contiguous inputs of convolutions, supports neither other padding modes nor dilation in
    3-D, and computes a gradient for the padding entry of an embedding.
    """
    if isinstance(module, nn.Embedding):
        return module.padding_idx is None and all(t.dim() > 1 for t in inputs)
    if not all(t.is_contiguous() and t.dim() > 1 for t in inputs):
        return False
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return module.padding_mode == "zeros" and (module.dilation == (1,) * len(module.dilation))
    return True
