"""One pass through a model as a function of tensors: what graphs are traced from, and compared with.

Axes: B rows, K groups of parameters that are clipped together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from dpengine.capture.capture import Capture
from dpengine.errors import BufferUpdateError, MissingGradientError
from dpengine.grad_modes.bookkeep import BookKeeping
from dpengine.grad_modes.choose_method import MethodTable
from dpengine.grad_modes.flat_buffer import Sums, wide
from dpengine.kernels.precision import without_autocast


@dataclass(frozen=True, eq=False)
class OnePass:
    """A pass over a model that capture watches.

    Attributes:
        capture: Its hooks are on the model, and report here while the pass runs.
        loss: The loss of a batch, from the batch's tensors.
        groups: The group of each trainable parameter.
        num_groups: How many there are.
    """

    capture: Capture
    loss: Callable[[Sequence[Tensor]], Tensor]
    groups: Mapping[nn.Parameter, int]
    num_groups: int
    took_part: list[nn.Parameter] = field(default_factory=list)  # in the last pass

    def state(self) -> list[Tensor]:
        """The model's parameters and buffers, each once."""
        return list(dict.fromkeys(table[name] for table, name in _places(self.capture.model)))

    def run(self, values: Sequence[Tensor], batch: Sequence[Tensor], weights_BK: Tensor) -> list[Tensor]:
        """Returns the loss, squared norms ``(B, K)``, and the weighted sum of each parameter in ``took_part``."""
        rows = batch[0].shape[0]
        state = self.state()
        stand_ins = {
            own: value.detach().requires_grad_(own.requires_grad) for own, value in zip(state, values, strict=True)
        }
        groups = {cast(nn.Parameter, stand_ins[parameter]): group for parameter, group in self.groups.items()}
        versions = {value: value._version for value in stand_ins.values()}
        mode = BookKeeping(MethodTable(timed=False))  # what is traced has no numbers to time
        trained = [stand_in for stand_in in stand_ins.values() if stand_in.requires_grad]
        with torch.enable_grad(), _standing_in(self.capture.model, stand_ins), self.capture.redirected(mode, rows):
            loss = self.loss([tensor.detach() for tensor in batch])
            self._refuse_written(versions)
            loss.backward(inputs=[self.capture.anchor, *trained])  # and into nothing of the user's
        self._refuse_leaks(stand_ins)
        with torch.no_grad(), without_autocast():
            sq_norms_BK = mode.sq_norms(groups, self.num_groups, 1.0)
            sums = _NewSums()
            mode.add_sums(groups, weights_BK, 1.0, sums)
        found = [(own, sums.totals.get(stand_in)) for own, stand_in in zip(self.groups, groups, strict=True)]
        self.took_part[:] = [own for own, total in found if total is not None]
        return [loss.detach(), sq_norms_BK, *(total for _, total in found if total is not None)]

    def _refuse_written(self, versions: Mapping[Tensor, int]) -> None:
        for name, buffer in self.capture.model.named_buffers():
            if buffer._version != versions.get(buffer):
                raise BufferUpdateError(
                    f"The forward pass writes into buffer '{name}', which a graph would do at every step, without "
                    "noise.",
                    fix="Call loss.backward() instead of the compiled pass.",
                )

    def _refuse_leaks(self, stand_ins: Mapping[Tensor, Tensor]) -> None:
        leaks = [name for name, own in self.capture.model.named_parameters() if stand_ins[own].grad is not None]
        if leaks:
            raise MissingGradientError(
                f"Autograd filled the gradient of '{leaks[0]}' directly: the parameter is used outside its layer.",
                fix="Call the layer itself, or freeze the parameter.",
            )


class _NewSums(Sums):
    """Sums in memory of their own."""

    def __init__(self) -> None:
        self.totals: dict[nn.Parameter, Tensor] = {}

    def add(self, parameter: nn.Parameter, total: Tensor, scale: float = 1.0) -> None:
        total = total.view(parameter.shape).to(wide(parameter.dtype))
        before = self.totals.get(parameter)
        self.totals[parameter] = total * scale if before is None else before + total * scale

    def fill(self, parameter: nn.Parameter, write: Callable[[Tensor, float], None]) -> None:
        before = self.totals.get(parameter)
        if before is None:
            before = torch.empty(parameter.shape, dtype=wide(parameter.dtype), device=parameter.device)
            self.totals[parameter] = before
            write(before, 0.0)
        else:
            write(before, 1.0)

    def complete(self, parameter: nn.Parameter) -> None:
        pass


def _places(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Returns the places at which modules hold parameters and buffers."""
    tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    return [(table, name) for table in tables for name, tensor in table.items() if tensor is not None]


@contextlib.contextmanager
def _standing_in(model: nn.Module, stand_ins: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Gives the model other parameters and buffers; afterwards its modules are what they were, all attributes too."""
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    tables = [(table, dict(table)) for module in model.modules() for table in (module._parameters, module._buffers)]
    try:
        for table, name in _places(model):
            table[name] = stand_ins[table[name]]
        yield
    finally:
        for now, then in [*attributes, *tables]:
            for name in now.keys() - then.keys():
                del now[name]
            now.update(then)
