"""Base classes of wrappers and of sets of hooks."""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from dpengine.compat.opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from dpengine.distributed.detect import topology_of, unwrapped
from dpengine.distributed.local_shards import is_dtensor
from dpengine.distributed.topology import SINGLE, Topology

from .pending_passes import PendingPasses

_passes_by_parameter: Any = WeakTensorKeyDictionary()  # weak references
_DISTRIBUTED = (DistributedDataParallel, DifferentiallyPrivateDistributedDataParallel, FSDPModule)


def pending_passes_of(parameter: nn.Parameter) -> PendingPasses | None:
    """Returns the pending passes of the model of a parameter; None if its hooks are not attached."""
    found = _passes_by_parameter.get(parameter)
    return None if found is None else found()


def is_distributed(module: nn.Module) -> bool:
    """Returns True if a model is wrapped for training by several processes."""
    return isinstance(module, _DISTRIBUTED)


def _topology_for(module: nn.Module) -> Topology:
    """Returns how a model is distributed; without a wrapper, each process trains its own model."""
    is_split = any(map(is_dtensor, module.parameters()))
    return topology_of(module) if is_split or is_distributed(module) else SINGLE


class AbstractGradSampleHooks(ABC):
    """Base class of hooks that write ``p.grad_sample`` of the trainable parameters of a model.

    Args:
        m: The model. It is not copied.
        batch_first: Whether axis 0 of the inputs is the batch; else axis 1.
        loss_reduction: Reduction of the loss over samples, ``"mean"`` or ``"sum"``.
    """

    mode: ClassVar[str] = "hooks"  # grad mode of the engine
    writes_grad_sample: ClassVar[bool] = True  # whether p.grad_sample is set between backward and step

    _module: nn.Module

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean"):
        self._module = m
        self.batch_first = batch_first
        self.loss_reduction = loss_reduction
        self.grad_accumulation_hook = None
        self.grad_accumulation_allowed = True
        self._pending_passes: PendingPasses | None = None

    def _attach(self, mode: str) -> None:
        """Attaches the hooks."""
        layout: dict[str, Any] = {"batch_first": self.batch_first, "loss_reduction": self.loss_reduction}
        layout["topology"] = _topology_for(self._module)
        passes = PendingPasses(unwrapped(self._module), mode=mode, writes_grad_sample=self.writes_grad_sample, **layout)
        passes.attach()
        passes.allows_accumulation = self.grad_accumulation_allowed
        self._pending_passes = passes
        for parameter in passes.parameters.values():
            _passes_by_parameter[parameter] = weakref.ref(passes)

    @property
    def _topology(self) -> Topology:
        """Distribution of the model over processes."""
        return _topology_for(self._module) if self._pending_passes is None else self._pending_passes.clipper.topology

    def set_grad_sample_to_none(self) -> None:
        """Sets ``p.grad_sample`` to None, which drops pending passes."""
        if self._pending_passes is not None:
            self._pending_passes.clear()

    def del_grad_sample(self) -> None:
        """Deletes ``p.grad_sample`` from all parameters."""
        self.set_grad_sample_to_none()
        for parameter in self._module.parameters():
            if hasattr(parameter, "grad_sample"):
                del parameter.grad_sample

    def forbid_grad_accumulation(self) -> None:
        """Makes a second backward pass before the optimizer's step raise a ValueError."""
        self._allow(False)

    def allow_grad_accumulation(self) -> None:
        """Allows several backward passes for one step."""
        self._allow(True)

    def _allow(self, allowed: bool) -> None:
        self.grad_accumulation_allowed = allowed
        if self._pending_passes is not None:
            self._pending_passes.allows_accumulation = allowed

    @abstractmethod
    def remove_hooks(self) -> None:
        """Removes the hooks."""

    def _detach(self) -> None:
        if self._pending_passes is not None:
            self._pending_passes.detach()
            for parameter in self._module.parameters():
                _passes_by_parameter.pop(parameter, None)
            self._pending_passes = None

    def cleanup(self) -> None:
        """Removes the hooks and all attributes that were set on parameters."""
        self.remove_hooks()
        for parameter in self._module.parameters():
            for name in ("grad_sample", "summed_grad"):
                if hasattr(parameter, name):
                    delattr(parameter, name)


class AbstractGradSampleModule(nn.Module, AbstractGradSampleHooks, ABC):
    """Wraps a model as its ``_module``, with the arguments of ``AbstractGradSampleHooks``."""

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean"):
        nn.Module.__init__(self)
        AbstractGradSampleHooks.__init__(self, m, batch_first=batch_first, loss_reduction=loss_reduction)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        return self._module(*args, **kwargs)

    def __getattr__(self, item: str) -> Any:
        own = getattr(type(self), item, None)
        if isinstance(own, property) and own.fget is not None:
            return own.fget(self)  # its own AttributeError must not be hidden
        try:
            return super().__getattr__(item)
        except AttributeError as missing:
            module = self.__dict__.get("_modules", {}).get("_module")
            if module is None or item.startswith("__"):  # Python looks them up on the class
                raise
            try:
                return dict(module.named_modules())[item] if "." in item else getattr(module, item)
            except (AttributeError, KeyError):
                raise missing from None

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clears ``p.grad`` and ``p.grad_sample``."""
        self.set_grad_sample_to_none()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads a state dict with or without the prefix ``_module.``."""
        own = {key if key.startswith("_module.") else f"_module.{key}": value for key, value in state_dict.items()}
        return super().load_state_dict(own, *args, **kwargs)

    def to_standard_module(self) -> nn.Module:
        """Removes the hooks and returns the model."""
        self.cleanup()
        return self._module

    def _settings(self) -> dict[str, Any]:
        """Returns the arguments of a copy."""
        return {"batch_first": self.batch_first, "loss_reduction": self.loss_reduction}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        other = _again(type(self), copy.deepcopy(self._module, memo), self._settings(), self._left_out())
        memo[id(self)] = other
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _again, (type(self), self._module, self._settings(), self._left_out())

    def _left_out(self) -> dict[str, Any]:
        return {"training": self.training, "grad_accumulation_allowed": self.grad_accumulation_allowed}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._module!r})"


def _again(kind: type[AbstractGradSampleModule], module: nn.Module, settings: dict[str, Any], left: Any) -> Any:
    """Returns a copy of a wrapper, with its own hooks."""
    wrapper = kind(module, **settings)
    wrapper.training = left["training"]
    wrapper._allow(left["grad_accumulation_allowed"])
    return wrapper
