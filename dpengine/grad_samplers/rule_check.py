"""Compares what registered rules return with a loop over samples, in the first batches of each layer, of two sizes."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture.record import LayerCall
from dpengine.distributed.layer_parts import layer_type
from dpengine.errors import ExtensionError, notice
from dpengine.kernels.library import traced
from dpengine.kernels.precision import full_precision

from .functional import samples_alone

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-3}  # of the norm; float32 may be TF32
_HALF_PRECISION = 0.05
_AT_ANOTHER_SIZE = 8  # samples that are compared in a later batch
_SIZES = 2  # batch sizes at which each layer is compared, besides 1
_MOST_CALLS = 32  # compared while the gradients of a parameter are all zero, as at the start of LoRA
_LEAST_SAMPLES, _MOST_SAMPLES, _MOST_ELEMENTS = 4, 64, 2**26  # compared in a batch; elements of their gradients


@dataclass(eq=False)
class _Open:
    """Parameters of a layer that no compared sample had a gradient of, calls left to compare, and sizes compared."""

    names: set[str]
    calls: int = _MOST_CALLS
    sizes: set[int] = field(default_factory=set)


@dataclass(eq=False)
class RuleCheck:
    """Check of one registered rule.

    Attributes:
        kind: ``"grad"`` if the rule returns gradients ``(B, *param.shape)``, ``"norm"`` for their norms ``(B,)``.
        settled: Layers that need no further check.
    """

    kind: str
    settled: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    _open: weakref.WeakKeyDictionary[nn.Module, _Open] = field(default_factory=weakref.WeakKeyDictionary)

    def compare(self, call: LayerCall, found: Mapping[nn.Parameter, Any]) -> None:
        """Raises ExtensionError if the results of a rule differ from those of a loop over some samples."""
        layer, count = call.layer, call.batch_size
        open_ = self._open.get(layer)
        if _paused or (open_ is not None and not open_.names and count in open_.sizes):
            return
        own = {name: p for name, p in layer._parameters.items() if p is not None and p.requires_grad and p in found}
        if not count or not own or not all(self._has_rows(found[p], p, count) for p in own.values()):
            return  # what has another shape or type is rejected later
        if any(map(traced, found.values())) or layer_type(layer) is not type(layer):  # a sharded layer
            return
        numel = sum(parameter.numel() for parameter in own.values())
        most = _MOST_SAMPLES if open_ is None or open_.names or open_.sizes == {1} else _AT_ANOTHER_SIZE
        chosen = min(count, max(_LEAST_SAMPLES, min(most, _MOST_ELEMENTS // max(1, numel))))
        samples = torch.linspace(0, count - 1, chosen).round().long().tolist()
        compared: dict[str, list[tuple[float, ...]]] = {name: [] for name in own}
        try:
            with full_precision():
                for sample, truth in samples_alone(call, samples):
                    for name, parameter in own.items():
                        norms = self._norms(found[parameter][sample], truth[name])
                        compared[name].append((*norms, _rounding(call, sample)))
        except Exception as error:  # there is no list of what a layer may do
            self._warn_unknown(call, error)
            return
        open_ = self._open.setdefault(layer, _Open(set(own)))
        open_.sizes.add(count)
        for name, parameter in own.items():
            tolerance = _TOLERANCE.get(found[parameter].dtype, _HALF_PRECISION)
            if self._check(call, name, torch.tensor(compared[name], dtype=torch.float64), tolerance):
                open_.names.discard(name)
        open_.calls -= 1
        if not open_.calls or (not open_.names and len(open_.sizes - {1}) >= _SIZES):
            self.settled.add(layer)
            del self._open[layer]

    def _has_rows(self, value: Any, parameter: nn.Parameter, count: int) -> bool:
        shape = (count, *parameter.shape) if self.kind == "grad" else (count,)
        return isinstance(value, Tensor) and value.is_floating_point() and tuple(value.shape) == shape

    def _norms(self, found: Tensor, truth: Tensor) -> tuple[float, float, float]:
        """Returns the norm of the true gradient, that of the given one, and the norm of their difference."""
        norm = float(truth.double().norm())
        if self.kind == "norm":
            return norm, float(found), abs(float(found) - norm)
        return norm, float(found.double().norm()), float((found.double() - truth.double()).norm())

    def _check(self, call: LayerCall, name: str, compared_S4: Tensor, tolerance: float) -> bool:
        """Compares the gradients of one parameter. Returns True if one of them is above rounding."""
        finite_S = compared_S4.isfinite().all(dim=1)  # other samples are dropped
        norm_S, given_S, error_S, rounding_S = compared_S4[finite_S].unbind(dim=1)
        if not (norm_S > 50 * rounding_S).any():
            return False
        scale_S = norm_S + 0.01 * norm_S.max()  # a gradient near zero may have lost digits
        if not (error_S <= tolerance * scale_S + rounding_S).all():
            self._raise(call, name, (given_S / norm_S)[norm_S > 0], error_S / scale_S)
        return True

    def _raise(self, call: LayerCall, name: str, factors: Tensor, errors: Tensor) -> NoReturn:
        kind, factor = type(call.layer).__name__, float(factors.median())
        what = {"grad": "gradients", "norm": "norms"}[self.kind]
        differ = f"differ by up to {float(errors.max()):.0%} from"
        if bool(((factors - factor).abs() <= 0.01 * factor).all()) and abs(factor - 1) > 0.01:
            differ = f"are {_times(factor, call.batch_size)} as large as"
        where = f"'{call.name}.{name}'" if call.name else repr(name)
        raise ExtensionError(
            f"The {self.kind} sampler registered for {kind} is wrong: its {what} of parameter {where} {differ} those "
            "of a loop over samples.",
            fix="Return for each sample what autograd gives for a batch of that sample alone, or remove the "
            "registration: then torch.func is used. A factor of the batch size is a matter of own_loss=.",
        )

    def _warn_unknown(self, call: LayerCall, error: Exception) -> None:
        self.settled.add(call.layer)
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        notice(
            "DPE012",
            f"The {self.kind} sampler registered for {type(call.layer).__name__} was not compared with a loop over "
            f"samples, because '{call.name}' does not run on single samples: {reason}. Clipping is as sound as the "
            "sampler.",
            of=call.layer,
            key=self.kind,
        )


@contextlib.contextmanager
def without_rule_checks() -> Iterator[None]:
    """Accepts what rules return in the context, which compares it in another way."""
    _paused.append(None)
    try:
        yield
    finally:
        _paused.pop()


_paused: list[None] = []  # one entry for each context


def _rounding(call: LayerCall, sample: int) -> float:
    """Estimates the rounding error of a gradient whose parts cancel."""

    def norm_of(tree: Any) -> float:
        leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return math.hypot(*(float(leaf[sample].double().norm()) for leaf in leaves if has_batch_axis(leaf)))

    def has_batch_axis(leaf: Tensor) -> bool:
        return leaf.dim() > 0 and leaf.shape[0] == call.batch_size

    grads = [leaf for leaf in pytree.tree_leaves(call.grad_output) if isinstance(leaf, Tensor)]
    return 16 * torch.finfo(grads[0].dtype).eps * norm_of(call.grad_output) * (1 + norm_of((call.inputs, call.kwargs)))


def _times(factor: float, count: int) -> str:
    """Returns a factor in words. The batch size is not shown, because it is private."""
    if abs(factor * count - 1) <= 0.01 or abs(factor / count - 1) <= 0.01:
        return "the batch size times" if factor > 1 else "one over the batch size times"
    return f"{factor:.3g} times"
