"""Compares the results of registered rules with a loop over samples, in the first batches of each layer.

The comparison is made at two batch sizes, because a wrong rule may be right at one of them by chance.
"""

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

from .functional import single_sample_grads

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 5e-3}  # relative to the norm; float32 may be TF32
_HALF_PRECISION = 0.05
_SAMPLES_AT_OTHER_SIZE = 8  # samples that are compared at the second batch size
_NUM_BATCH_SIZES = 2  # batch sizes at which each layer is compared; batch size 1 does not count
_MAX_CALLS = 32  # calls that are compared if the gradients of a parameter are zero, as at the start of LoRA
_MIN_SAMPLES, _MAX_SAMPLES = 4, 64  # limits of the number of compared samples of a batch
_MAX_ELEMENTS = 2**26  # maximum number of elements of the gradients of the compared samples


@dataclass(eq=False)
class _Progress:
    """Progress of the check of a layer."""

    names: set[str]  # parameters whose gradient was zero in all compared samples
    calls: int = _MAX_CALLS  # remaining calls to compare
    sizes: set[int] = field(default_factory=set)  # batch sizes that were compared


@dataclass(eq=False)
class RuleCheck:
    """Check of one registered rule.

    Attributes:
        kind: ``"grad"`` if the rule returns gradients ``(B, *param.shape)``, ``"norm"`` for their norms ``(B,)``.
        settled: Layers that need no further check.
    """

    kind: str
    settled: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    _progress: weakref.WeakKeyDictionary[nn.Module, _Progress] = field(default_factory=weakref.WeakKeyDictionary)

    def compare(self, call: LayerCall, results: Mapping[nn.Parameter, Any]) -> None:
        """Raises ExtensionError if the results of a rule differ from those of a loop over samples of the batch."""
        layer, count = call.layer, call.batch_size
        progress = self._progress.get(layer)
        if _paused or (progress is not None and not progress.names and count in progress.sizes):
            return
        trainable = {name: p for name, p in layer._parameters.items() if p is not None and p.requires_grad}
        tested = {name: p for name, p in trainable.items() if p in results}
        if not count or not tested or not all(self._has_samples(results[p], p, count) for p in tested.values()):
            return  # results with a wrong shape or type are rejected later
        if any(map(traced, results.values())) or layer_type(layer) is not type(layer):  # a sharded layer
            return
        numel = sum(parameter.numel() for parameter in tested.values())
        is_first = progress is None or progress.names or progress.sizes == {1}
        max_samples = _MAX_SAMPLES if is_first else _SAMPLES_AT_OTHER_SIZE
        num_samples = min(count, max(_MIN_SAMPLES, min(max_samples, _MAX_ELEMENTS // max(1, numel))))
        samples = torch.linspace(0, count - 1, num_samples).round().long().tolist()
        compared: dict[str, list[tuple[float, ...]]] = {name: [] for name in tested}
        try:
            with full_precision():
                for sample, truth in single_sample_grads(call, samples):
                    for name, parameter in tested.items():
                        norms = self._norms(results[parameter][sample], truth[name])
                        compared[name].append((*norms, _rounding(call, sample)))
        except Exception as error:  # a layer may raise any error
            self._warn_unknown(call, error)
            return
        progress = self._progress.setdefault(layer, _Progress(set(tested)))
        progress.sizes.add(count)
        for name, parameter in tested.items():
            tolerance = _TOLERANCE.get(results[parameter].dtype, _HALF_PRECISION)
            if self._check(call, name, torch.tensor(compared[name], dtype=torch.float64), tolerance):
                progress.names.discard(name)
        progress.calls -= 1
        if not progress.calls or (not progress.names and len(progress.sizes - {1}) >= _NUM_BATCH_SIZES):
            self.settled.add(layer)
            del self._progress[layer]

    def _has_samples(self, value: Any, parameter: nn.Parameter, count: int) -> bool:
        """Returns True if a result has the expected shape for ``count`` samples."""
        shape = (count, *parameter.shape) if self.kind == "grad" else (count,)
        return isinstance(value, Tensor) and value.is_floating_point() and tuple(value.shape) == shape

    def _norms(self, result: Tensor, truth: Tensor) -> tuple[float, float, float]:
        """Returns the norm of the true gradient, the norm according to the rule, and the norm of the difference."""
        norm = float(truth.double().norm())
        if self.kind == "norm":
            return norm, float(result), abs(float(result) - norm)
        return norm, float(result.double().norm()), float((result.double() - truth.double()).norm())

    def _check(self, call: LayerCall, name: str, compared_S4: Tensor, tolerance: float) -> bool:
        """Compares the gradients of one parameter. Returns True if one of the gradients exceeds its rounding error."""
        finite_S = compared_S4.isfinite().all(dim=1)  # clipping drops the other samples
        norm_S, rule_norm_S, error_S, rounding_S = compared_S4[finite_S].unbind(dim=1)
        if not (norm_S > 50 * rounding_S).any():
            return False
        scale_S = norm_S + 0.01 * norm_S.max()  # small gradients may have larger relative rounding errors
        if not (error_S <= tolerance * scale_S + rounding_S).all():
            self._raise(call, name, (rule_norm_S / norm_S)[norm_S > 0], error_S / scale_S)
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
            fix="Return for each sample the gradient that autograd computes for a batch of that sample alone, or "
            "remove the registration to use torch.func. If they differ by the batch size, set own_loss=.",
        )

    def _warn_unknown(self, call: LayerCall, error: Exception) -> None:
        self.settled.add(call.layer)
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        notice(
            "DPE012",
            f"The {self.kind} sampler registered for {type(call.layer).__name__} was not compared with a loop over "
            f"samples, because '{call.name}' does not run on single samples: {reason}. The guarantee holds only if the "
            "sampler is correct.",
            of=call.layer,
            key=self.kind,
        )


@contextlib.contextmanager
def without_rule_checks() -> Iterator[None]:
    """Disables the check in the context, for callers that compare the results themselves."""
    _paused.append(None)
    try:
        yield
    finally:
        _paused.pop()


_paused: list[None] = []  # one entry for each active context


def _rounding(call: LayerCall, sample: int) -> float:
    """Estimates the rounding error of the gradient of a sample, whose terms may cancel."""

    def norm_of(tree: Any) -> float:
        leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return math.hypot(*(float(leaf[sample].double().norm()) for leaf in leaves if has_batch_axis(leaf)))

    def has_batch_axis(leaf: Tensor) -> bool:
        return leaf.dim() > 0 and leaf.shape[0] == call.batch_size

    grads = [leaf for leaf in pytree.tree_leaves(call.grad_output) if isinstance(leaf, Tensor)]
    return 16 * torch.finfo(grads[0].dtype).eps * norm_of(call.grad_output) * (1 + norm_of((call.inputs, call.kwargs)))


def _times(factor: float, count: int) -> str:
    """Formats a factor for an error message, without the batch size, which is private."""
    if abs(factor * count - 1) <= 0.01 or abs(factor / count - 1) <= 0.01:
        return "the batch size times" if factor > 1 else "one over the batch size times"
    return f"{factor:.3g} times"
