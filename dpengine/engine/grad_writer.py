"""Writes ``p.grad``, and distinguishes it from gradients that other code wrote there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn

from dpengine.distributed.topology import Topology
from dpengine.errors import notice

_Written = dict[nn.Parameter, tuple[Tensor, int]]


@dataclass(eq=False)
class GradWriter:
    """Writes the gradients of a step, and knows them as long as they are in ``p.grad`` unchanged.

    Attributes:
        topology: How a gradient is made of the part of it that is here.
        released: Gradients that were written, and their versions then.
    """

    topology: Topology
    released: _Written = field(default_factory=dict)
    _cleared: _Written = field(default_factory=dict)  # gradients as zero_grad left them

    def write(self, sums: dict[nn.Parameter, Tensor]) -> None:
        """Puts noisy sums into ``p.grad``, in the memory that they have where that has the right type."""
        self.released, gradient = {}, self.topology.layout.gradient
        for parameter, view in sums.items():
            grad = view if view.dtype is parameter.dtype else view.to(parameter.dtype)
            if gradient is not None:
                grad = gradient(parameter, grad)
            if parameter.grad is not None and self._was_changed(parameter, parameter.grad):
                notice(
                    "DPE015",
                    "p.grad was changed between backward and step; that has no effect on the private update. Use "
                    "max_grad_norm to clip, and set clipping outside the engine to None.",
                )
            parameter.grad = grad
            self.released[parameter] = (grad, grad._version)

    def zero_grad(self, parameters: Iterable[nn.Parameter]) -> None:
        """The user cleared the gradients."""
        self.released = {}
        self._cleared = {p: (p.grad, p.grad._version) for p in parameters if p.grad is not None}

    def forget(self) -> None:
        """The run is over."""
        self.released, self._cleared = {}, {}

    @property
    def stale(self) -> bool:
        """Whether a gradient of the last release is still there."""
        return any(p.grad is grad and grad._version == version for p, (grad, version) in self.released.items())

    def _was_changed(self, parameter: nn.Parameter, grad: Tensor) -> bool:
        """Returns True if other code wrote to ``p.grad`` after ``zero_grad`` cleared it."""
        if parameter in self._cleared and self._cleared[parameter][0] is grad:
            return self._cleared[parameter][1] != grad._version
        # model.zero_grad(set_to_none=False) leaves zeros, and does not tell
        return bool(self.topology.layout.local(grad).any())
