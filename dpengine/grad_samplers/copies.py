"""Runs a module with other parameters and buffers than its own, such as copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call, vjp

from dpengine.capture.record import ForwardCall


def run_with(module: nn.Module, tensors: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
    """Runs a module with other parameters and buffers, by the names of ``named_parameters`` and ``named_buffers``.

    ``torch.func.functional_call`` with ``tie_weights=True`` does not restore the tensors of a module that has several
    names.
    """
    first_names: dict[Tensor, str] = {}
    replacements = {}
    for prefix, part in module.named_modules():
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                dotted = f"{prefix}.{name}" if prefix else name
                if (first_name := first_names.setdefault(tensor, dotted)) in tensors:
                    replacements[dotted] = tensors[first_name]
    return functional_call(module, replacements, args, kwargs, tie_weights=False)


class Copies(nn.Module):
    """Runs a module without its hooks, on copies of its parameters and buffers, and stores pullbacks."""

    def __init__(self, call: ForwardCall):
        super().__init__()
        self.layer = call.layer
        self.call = call
        self.pullbacks: list[Any] = []
        self.parameter_copies, self.buffer_copies = (
            {name: tensor.detach().clone() for name, tensor in named}
            for named in (self.named_parameters(), self.named_buffers())
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = list(self.buffers())
        output = self.call.forward(*args, **kwargs)
        if any(now is not then for now, then in zip(self.buffers(), before, strict=True)):
            raise RuntimeError("The module replaced a buffer.")  # `torch.func` raises for writes in place
        return output

    def run(self, one: Callable[..., list[Tensor]], tensors: list[Tensor]) -> list[Tensor]:
        """Returns ``one(tensors, forward)``, and stores the pullback of its floating-point tensors."""

        def outputs_of(parameters: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            tensors_by_name = {**parameters, **self.buffer_copies}
            outputs = one(tensors, lambda *args, **kwargs: run_with(self, tensors_by_name, args, kwargs))
            return [output for output in outputs if output.is_floating_point()], outputs

        pulled: Any = vjp(outputs_of, self.parameter_copies, has_aux=True)
        _, pull, outputs = pulled
        self.pullbacks.append(pull)
        return outputs
