"""Runs a module with given parameters and buffers, and stores pullbacks: functions that compute its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call, vjp

from dpengine.capture.record import ForwardCall


def call_with_tensors(module: nn.Module, tensors: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
    """Calls a module with given parameters and buffers, by the names of ``named_parameters`` and ``named_buffers``.

    ``torch.func.functional_call`` with ``tie_weights=True`` is not used, because it does not restore a tensor that the
    module has under several names.
    """
    first_names: dict[Tensor, str] = {}
    replacements = {}
    for prefix, submodule in module.named_modules():
        for name, tensor in (*submodule._parameters.items(), *submodule._buffers.items()):
            if tensor is not None:
                dotted = f"{prefix}.{name}" if prefix else name
                if (first_name := first_names.setdefault(tensor, dotted)) in tensors:
                    replacements[dotted] = tensors[first_name]
    return functional_call(module, replacements, args, kwargs, tie_weights=False)


class PullbackModule(nn.Module):
    """Runs a module without its hooks, on copies of its parameters and buffers, and stores pullbacks.

    Attributes:
        layer: The module.
        call: The call of the module.
        pullbacks: The function that computes the gradients of each run.
        parameter_copies: Copies of the parameters, by name.
        buffer_copies: Copies of the buffers, by name.
    """

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
        buffers_before = list(self.buffers())
        output = self.call.forward(*args, **kwargs)
        if any(after is not before for after, before in zip(self.buffers(), buffers_before, strict=True)):
            raise RuntimeError("The module replaced a buffer.")  # `torch.func` raises for writes in place
        return output

    def run(self, run_sample: Callable[..., list[Tensor]], tensors: list[Tensor]) -> list[Tensor]:
        """Returns ``run_sample(tensors, forward)``, and stores the pullback of its floating-point outputs."""

        def outputs_of(parameters: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            tensors_by_name = {**parameters, **self.buffer_copies}
            outputs = run_sample(
                tensors, lambda *args, **kwargs: call_with_tensors(self, tensors_by_name, args, kwargs)
            )
            return [output for output in outputs if output.is_floating_point()], outputs

        vjp_result: Any = vjp(outputs_of, self.parameter_copies, has_aux=True)
        _, pullback, outputs = vjp_result
        self.pullbacks.append(pullback)
        return outputs
