"""Per-sample gradients that are formed when somebody looks at them, and else never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpengine.errors import MissingGradientError

# What is known without forming anything.
_KNOWN = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__} | {
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf")
}


class OnDemand(Tensor):
    """A tensor whose values are formed by the first operation on it. Operations work on the values, and return them."""

    form: Callable[[], Tensor] | None
    formed: Tensor | None

    @staticmethod
    def __new__(
        cls, form: Callable[[], Tensor], shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> OnDemand:
        """A tensor without memory."""
        made: OnDemand = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]
        made.form, made.formed = form, None
        return made

    @property
    def value(self) -> Tensor:
        """The values; a MissingGradientError if they were used up before anybody looked."""
        if self.formed is None:
            if self.form is None:
                raise MissingGradientError(
                    "This per-sample gradient was clipped and summed without ever being formed.",
                    fix="Read p.grad_sample between loss.backward() and optimizer.step().",
                )
            self.formed, self.form = self.form(), None
        return self.formed

    @property
    def untouched(self) -> bool:
        """Whether nobody has looked, so that nobody can have changed anything."""
        return self.formed is None

    def use_up(self) -> None:
        """The records that it would be formed of are about to go. What was formed stays."""
        self.form = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The values; None where they were used up before anybody looked: a model is saved with its parameters."""
        if self.formed is None and self.form is None:
            return type(None), ()
        return self.value.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Does what was asked with the values."""
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(OnDemand, lambda one: one.value, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """The same, for calls that come from elsewhere than Python."""
        args, kwargs = pytree.tree_map_only(OnDemand, lambda one: one.value, (args, kwargs or {}))
        return func(*args, **kwargs)
