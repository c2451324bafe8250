"""Writes ``p.grad``, and detects gradients that other code wrote there."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from dpengine.distributed.topology import Topology
from dpengine.errors import notice

_dtype = operator.attrgetter("dtype")


@dataclass(eq=False)
class GradWriter:
    """Writes the gradients of a step to ``p.grad``, and detects changes of ``p.grad`` by other code.

    Attributes:
        topology: Placement of the model on ranks. Converts local parts of gradients to the gradients of parameters.
        released: Gradients of the last step by parameter. Empty after ``zero_grad``.
    """

    topology: Topology
    released: Mapping[nn.Parameter, Tensor] = field(default_factory=dict)
    _versions: list[int] = field(default_factory=list)  # in-place version counters of the gradients in `released`
    # Gradients in ``p.grad`` after the last ``zero_grad``, and their version counters.
    _cleared: dict[nn.Parameter, tuple[Tensor, int]] = field(default_factory=dict)

    def write(self, grads: Mapping[nn.Parameter, Tensor]) -> None:
        """Writes noisy sums to ``p.grad``. Copies them only if the parameter has another dtype."""
        if not all(map(operator.is_, map(_dtype, grads), map(_dtype, grads.values()))):
            grads = {parameter: grad.to(parameter.dtype) for parameter, grad in grads.items()}
        gradient = self.topology.layout.gradient
        if gradient is not None:
            grads = {parameter: gradient(parameter, grad) for parameter, grad in grads.items()}
        self.record(grads)
        for parameter, grad in grads.items():
            current = parameter.grad
            if current is not None and self._was_changed(parameter, current):
                notice(
                    "DPE015",
                    "p.grad was changed between backward and step. This has no effect on the private update. Remove "
                    "clip_grad_norm_() and clip_grad_value_() from the loop, and pass max_grad_norm= to make_private. "
                    "In a trainer: TrainingArguments(max_grad_norm=0) of transformers, "
                    "Trainer(gradient_clip_val=None) of Lightning.",
                    of=self,
                )
            parameter.grad = grad

    def record(self, grads: Mapping[nn.Parameter, Tensor]) -> None:
        """Records the gradients of the last step."""
        self.released, self._versions = grads, [grad._version for grad in grads.values()]

    def zero_grad(self, parameters: Iterable[nn.Parameter]) -> None:
        """Records that the user cleared the gradients of ``parameters``."""
        self.record({})
        self._cleared = {p: (p.grad, p.grad._version) for p in parameters if p.grad is not None}

    def forget(self) -> None:
        """Forgets all gradients, at the end of the run."""
        self.record({})
        self._cleared = {}

    @property
    def stale(self) -> bool:
        """True if a gradient of the last step is still in ``p.grad``, because ``zero_grad`` was not called."""
        written = zip(self.released.items(), self._versions, strict=True)
        return any(p.grad is grad and grad._version == version for (p, grad), version in written)

    def _was_changed(self, parameter: nn.Parameter, grad: Tensor) -> bool:
        """Returns True if other code wrote to ``p.grad`` after ``zero_grad`` cleared it."""
        if parameter in self._cleared and self._cleared[parameter][0] is grad:
            return self._cleared[parameter][1] != grad._version
        # model.zero_grad(set_to_none=False) writes zeros and does not call `zero_grad` above
        return bool(self.topology.layout.local(grad).any())
