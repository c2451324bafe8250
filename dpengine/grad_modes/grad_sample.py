"""The attribute ``p.grad_sample``, and per-sample gradients that are formed on first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.errors import MissingGradientError, StaleGradientError

# Properties that do not need the values.
_METADATA = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__} | {
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf")
}


class OnDemand(Tensor):
    """Tensor whose values are formed by the first operation on it. Operations return plain tensors.

    ``form`` raises MissingGradientError or StaleGradientError if the gradients cannot be formed any more.

    Attributes:
        formed: The values; None until they are formed.
    """

    form: Callable[[], Tensor] | None
    formed: Tensor | None

    @staticmethod
    def __new__(
        cls, form: Callable[[], Tensor], shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> OnDemand:
        """Creates a tensor without memory."""
        tensor: OnDemand = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]
        tensor.form, tensor.formed = form, None
        return tensor

    @property
    def value(self) -> Tensor:
        """The values."""
        if self.formed is None:
            assert self.form is not None
            self.formed, self.form = self.form(), None
        return self.formed

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the values; None if they cannot be formed, because a model is pickled with its parameters."""
        try:
            return self.value.__reduce_ex__(protocol)
        except (MissingGradientError, StaleGradientError):
            return type(None), ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a torch function with the values."""
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(OnDemand, lambda tensor: tensor.value, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Calls an operation with the values, for calls that do not come from Python."""
        args, kwargs = pytree.tree_map_only(OnDemand, lambda tensor: tensor.value, (args, kwargs or {}))
        return func(*args, **kwargs)


def add_grad_sample(parameter: nn.Parameter, grad: Tensor) -> None:
    """Adds the gradients of one backward pass to ``parameter.grad_sample``."""
    existing = getattr(parameter, "grad_sample", None)
    if existing is None:
        parameter.grad_sample = grad  # type: ignore[attr-defined]
    else:
        earlier = existing if isinstance(existing, list) else [existing]
        parameter.grad_sample = [*earlier, grad]  # type: ignore[attr-defined]


def forget_grad_samples(parameters: Any) -> None:
    """Deletes ``grad_sample`` of all parameters."""
    for parameter in parameters:
        if hasattr(parameter, "grad_sample"):
            del parameter.grad_sample
