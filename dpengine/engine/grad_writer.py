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
    """Writes the gradients of a step to ``p.grad``, and detects whether they are still there unchanged.

    Attributes:
        topology: How the model is distributed; turns local parts of gradients into gradients.
        released: Gradients of the last step with their versions, by parameter. Empty after ``zero_grad``.
    """

    topology: Topology
    released: _Written = field(default_factory=dict)
    _cleared: _Written = field(default_factory=dict)  # gradients in ``p.grad`` after the last ``zero_grad``

    def write(self, sums: dict[nn.Parameter, Tensor]) -> None:
        """Writes noisy sums to ``p.grad``. Copies them only if the parameter has another dtype."""
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
        """Records that the user cleared the gradients of ``parameters``."""
        self.released = {}
        self._cleared = {p: (p.grad, p.grad._version) for p in parameters if p.grad is not None}

    def forget(self) -> None:
        """Forgets all gradients, at the end of the run."""
        self.released, self._cleared = {}, {}

    @property
    def stale(self) -> bool:
        """True if a gradient of the last step is still in ``p.grad``: ``zero_grad`` was not called."""
        return any(p.grad is grad and grad._version == version for p, (grad, version) in self.released.items())

    def _was_changed(self, parameter: nn.Parameter, grad: Tensor) -> bool:
        """Returns True if other code wrote to ``p.grad`` after ``zero_grad`` cleared it."""
        if parameter in self._cleared and self._cleared[parameter][0] is grad:
            return self._cleared[parameter][1] != grad._version
        # model.zero_grad(set_to_none=False) writes zeros and does not call `zero_grad` above
        return bool(self.topology.layout.local(grad).any())
