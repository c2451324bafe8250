"""Planted bugs of clipping, of capture, and of the independence of samples."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpengine.auditing.subject import OPTIONS, Subject, cross_entropy, small, small_dataset
from dpengine.clipping.flat import Flat
from dpengine.clipping.per_layer import PerLayer
from dpengine.engine.pass_clipper import PassClipper
from dpengine.engine.step import PrivateStep
from dpengine.grad_modes.bookkeep import BookKeeping
from dpengine.grad_modes.entry import Entry
from dpengine.grad_modes.flat_buffer import FlatBuffer
from dpengine.grad_modes.rows import Units
from dpengine.grad_modes.stacks import Layout
from dpengine.independence.live_probe import IndependenceCheck

from .planted import Patch, Planted, module_of

_COPIES = 4
_ALONE = Patch(module_of(Layout), "MAX_COLUMNS", lambda most: 0)  # no gradients are computed together


def _normed(change: Callable[[nn.Parameter, str, Tensor], Tensor]) -> Patch:
    """Replaces squared norms by ``change(parameter, name, norms)``."""

    def wrong(each: Any) -> Any:
        @functools.wraps(each)
        def found(self: Any, rows: int) -> list[tuple[nn.Parameter, Tensor]]:
            return [(p, change(p, self._entries[p].use.name, norm_B)) for p, norm_B in each(self, rows)]

        return found

    return Patch(BookKeeping, "_each_sq_norm", wrong)


def _each_layer_at_c(factors: Any) -> Any:
    @functools.wraps(factors)
    def each(self: Any, norms_BK: Tensor) -> Tensor:
        return factors(self, norms_BK / math.sqrt(norms_BK.shape[1]))

    return each


def _no_row_is_clipped(factors: Any) -> Any:
    @functools.wraps(factors)
    def ones(self: Any, norms_BK: Tensor) -> Tensor:
        return (factors(self, norms_BK) > 0).to(norms_BK.dtype)

    return ones


def _mean_is_clipped(add: Any) -> Any:
    @functools.wraps(add)
    def added(mode: Any, policy: Any, buffer: Any, grouping: Any, **others: Any) -> Any:
        found = add(mode, policy, buffer, grouping, **others)
        sums = [total for _, total in buffer]
        norm = math.sqrt(sum(float(total.square().sum()) for total in sums))
        factor = min(1.0, policy.max_grad_norm * max(1, found.samples) / max(norm, 1e-30))
        for total in sums:
            total.mul_(factor)
        return found

    return added


def _pairs(units: Any) -> Any:
    def paired(self: Any) -> Units | None:
        samples = self.batches.samples
        if not samples:
            return None
        return Units(torch.arange(samples) // 2, (samples + 1) // 2, mean=False)

    return paired


def _one_layer_whole(add_sum: Any) -> Any:
    @functools.wraps(add_sum)
    def added(self: Any, weight_B: Tensor, scale: float, into: Any) -> None:
        whole = self.use.name == "2.weight"
        add_sum(self, (weight_B > 0).to(weight_B.dtype) if whole else weight_B, scale, into)

    return added


def _poison_kept(factors_within: Any) -> Any:
    @functools.wraps(factors_within)
    def within(bounds: Any, norms_BK: Tensor) -> Tensor:
        found = factors_within(bounds, norms_BK)
        return torch.where(norms_BK.isfinite(), found, torch.ones_like(found))

    return within


def _nothing(*_: Any, **__: Any) -> None:
    """Does nothing."""


def _of_nothing(original: Any) -> Any:
    return _nothing


def _always(value: Any) -> Callable[[Any], Any]:
    return lambda original: lambda *args, **kwargs: value


def _deaf(receive: Any) -> Any:
    @functools.wraps(receive)
    def received(self: Any, call: Any, uses: Any, rule: Any) -> None:
        if call.name != "2":
            receive(self, call, uses, rule)

    return received


def _deaf_to_tensor_calls(receive: Any) -> Any:
    @functools.wraps(receive)
    def received(self: Any, call: Any) -> None:
        if call.uses.name != "2":
            receive(self, call)

    return received


def _leaks_dropped(check: Any) -> Any:
    def dropped(self: Any) -> None:
        for parameter in self.capture.leaks:
            parameter.grad = None
        self.capture.leaks.clear()

    return dropped


class Centred(nn.Sequential):
    """Subtracts the mean of the batch from each sample."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self[0](inputs)
        return self[2](self[1](hidden - hidden.mean(dim=0)))


class Tied(nn.Sequential):
    """Uses the weight of a layer a second time, outside the layer."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self[0](inputs))
        return self[2](torch.tanh(F.linear(hidden, self[0].get_parameter("weight"))))


class TimeFirst(nn.Module):
    """A recurrent layer that processes the batch axis as time."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(6, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.recurrent(inputs.unsqueeze(1))[0][:, -1])


def _of(kind: Callable[[], nn.Module], **changes: Any) -> Callable[[], Subject]:
    def make() -> Subject:
        model = kind()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {**OPTIONS, **changes}
        return Subject(model, optimizer, DataLoader(small_dataset(), batch_size=6), cross_entropy, options)

    return make


def _three(kind: Callable[..., nn.Module], square: bool = False) -> Callable[[], nn.Module]:
    width = 6 if square else 8
    return lambda: kind(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


_NO_PROBE = Patch(IndependenceCheck, "run", _of_nothing)

BUGS = (
    Planted(
        "PB-11",
        "biases left out of the norm",
        ("DR", "DO"),
        (_ALONE, _normed(lambda p, name, norm_B: norm_B * (p.dim() > 1))),
    ),
    Planted(
        "PB-12",
        "one ghost norm wrong",
        ("DR", "DO"),
        (_ALONE, _normed(lambda p, name, norm_B: norm_B / (4 if name == "2.weight" else 1))),
        make=small({"grad_sample_mode": "ghost"}),
    ),
    Planted(
        "PB-13",
        "each layer clipped at C",
        ("DR", "DO"),
        (Patch(PerLayer, "factors", _each_layer_at_c),),
        make=small({"clipping": "per_layer"}),
    ),
    Planted(
        "PB-14",
        "the mean of the batch is clipped",
        ("DR", "DO"),
        (Patch(Flat, "factors", _no_row_is_clipped), Patch(module_of(PassClipper), "add_clipped", _mean_is_clipped)),
    ),
    Planted("PB-15", "pairs of rows are clipped together", ("DR", "DO"), (Patch(PrivateStep, "_units", _pairs),)),
    Planted("PB-16", "one layer is not clipped", ("DR", "DO"), (_ALONE, Patch(Entry, "add_sum", _one_layer_whole))),
    Planted(
        "PB-17",
        "a NaN gradient is not dropped",
        ("DR",),
        (
            Patch(module_of(Flat), "factors_within", _poison_kept),
            Patch(BookKeeping, "drop", _of_nothing),
            Patch(FlatBuffer, "is_finite", _always(True)),
        ),
    ),
    Planted(
        "PB-18",
        "norms underflow in half precision",
        ("DO",),
        (_ALONE, _normed(lambda p, name, norm_B: norm_B.half().double())),
    ),
    Planted("PB-19", "sums of a batch that was given up stay", ("DO",), (Patch(PassClipper, "zero", _of_nothing),)),
    Planted(
        "PB-36", "a model mixes samples, and the probe is off", ("DI", "DR"), (_NO_PROBE,), make=_of(_three(Centred))
    ),
    Planted(
        "PB-37",
        "a weight is used outside its layer",
        ("DO",),
        (Patch(PassClipper, "check_leaks", _leaks_dropped),),
        make=_of(_three(Tied, square=True), grad_sample_mode="hooks"),
    ),
    Planted(
        "PB-38",
        "the hook of a layer is dropped",
        ("DO",),
        (
            Patch(PassClipper, "receive", _deaf),
            Patch(PassClipper, "receive_tensor_call", _deaf_to_tensor_calls),
            Patch(PassClipper, "missing", _always([])),
        ),
        instead="a model that torch.compile changed is refused or compiled as a whole; a hook that is not heard stands "
        "for it",
    ),
    Planted(
        "PB-39",
        "examples of a unit are clipped one by one",
        ("DR", "DO"),
        (Patch(PrivateStep, "_units", _always(None)),),
        make=small({"privacy_unit": [row // _COPIES for row in range(40)], "unit_reduction": "sum"}),
    ),
    Planted(
        "PB-48",
        "the time axis is mistaken for the batch axis",
        ("DI", "DR"),
        (_NO_PROBE, Patch(PassClipper, "_check_samples", _of_nothing)),
        make=_of(TimeFirst),
    ),
)
