"""What all wrappers and all sets of hooks have in common."""

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

from .waiting_passes import WaitingPasses

_waiting_of: Any = WeakTensorKeyDictionary()  # the backward passes of each parameter, weakly
_SPREAD = (DistributedDataParallel, DifferentiallyPrivateDistributedDataParallel, FSDPModule)


def waiting_of(parameter: nn.Parameter) -> WaitingPasses | None:
    """The backward passes over the model of a parameter, while its hooks are attached."""
    found = _waiting_of.get(parameter)
    return None if found is None else found()


def is_spread(module: nn.Module) -> bool:
    """Whether a model is marked as one that several processes train."""
    return isinstance(module, _SPREAD)


def _topology_for(module: nn.Module) -> Topology:
    """How a model is spread, if it shows that it is: without a mark, each process trains one of its own."""
    is_split = any(map(is_dtensor, module.parameters()))
    return topology_of(module) if is_split or is_spread(module) else SINGLE


class AbstractGradSampleHooks(ABC):
    """Leaves ``p.grad_sample`` on the trainable parameters of a model, from hooks on it.

    Args:
        m: The model. It is not copied.
        batch_first: Whether axis 0 of the inputs is the batch; else axis 1.
        loss_reduction: ``"mean"`` or ``"sum"``: what the loss does over rows.
    """

    mode: ClassVar[str] = "hooks"  # of the engine
    shows: ClassVar[bool] = True  # whether p.grad_sample is there between backward and step

    _module: nn.Module

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean"):
        self._module = m
        self.batch_first = batch_first
        self.loss_reduction = loss_reduction
        self.grad_accumulation_hook = None
        self.grad_accumulation_allowed = True
        self._waiting: WaitingPasses | None = None

    def _watch(self, mode: str) -> None:
        """Puts the hooks on."""
        layout: dict[str, Any] = {"batch_first": self.batch_first, "loss_reduction": self.loss_reduction}
        layout["topology"] = _topology_for(self._module)
        waiting = WaitingPasses(unwrapped(self._module), mode=mode, shows=self.shows, **layout)
        waiting.attach()
        waiting.allows_accumulation = self.grad_accumulation_allowed
        self._waiting = waiting
        for parameter in waiting.parameters.values():
            _waiting_of[parameter] = weakref.ref(waiting)

    @property
    def _topology(self) -> Topology:
        """Who holds what of the model, where several processes train it."""
        return _topology_for(self._module) if self._waiting is None else self._waiting.clipper.topology

    def set_grad_sample_to_none(self) -> None:
        """Sets ``p.grad_sample`` to None: what was not clipped yet is dropped."""
        if self._waiting is not None:
            self._waiting.clear()

    def del_grad_sample(self) -> None:
        """Deletes ``p.grad_sample`` from all parameters."""
        self.set_grad_sample_to_none()
        for parameter in self._module.parameters():
            if hasattr(parameter, "grad_sample"):
                del parameter.grad_sample

    def forbid_grad_accumulation(self) -> None:
        """From now on a second backward pass before the optimizer's step raises a ValueError."""
        self._allow(False)

    def allow_grad_accumulation(self) -> None:
        """From now on several backward passes may go into one step."""
        self._allow(True)

    def _allow(self, allowed: bool) -> None:
        self.grad_accumulation_allowed = allowed
        if self._waiting is not None:
            self._waiting.allows_accumulation = allowed

    @abstractmethod
    def remove_hooks(self) -> None:
        """Takes the hooks off."""

    def _unwatch(self) -> None:
        if self._waiting is not None:
            self._waiting.detach()
            for parameter in self._module.parameters():
                _waiting_of.pop(parameter, None)
            self._waiting = None

    def cleanup(self) -> None:
        """Takes the hooks off, and everything that was put on the parameters."""
        self.remove_hooks()
        for parameter in self._module.parameters():
            for name in ("grad_sample", "summed_grad"):
                if hasattr(parameter, name):
                    delattr(parameter, name)


class AbstractGradSampleModule(nn.Module, AbstractGradSampleHooks, ABC):
    """The same as a module around the model, which is its ``_module``: keys of ``state_dict`` begin with that name.

    Args:
        m: As in ``AbstractGradSampleHooks``.
        batch_first: As there.
        loss_reduction: As there.
    """

    def __init__(self, m: nn.Module, *, batch_first: bool = True, loss_reduction: str = "mean"):
        nn.Module.__init__(self)
        AbstractGradSampleHooks.__init__(self, m, batch_first=batch_first, loss_reduction=loss_reduction)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        return self._module(*args, **kwargs)

    def __getattr__(self, item: str) -> Any:
        own = getattr(type(self), item, None)
        if isinstance(own, property) and own.fget is not None:
            return own.fget(self)  # it raised an AttributeError of its own, and says here why
        try:
            return super().__getattr__(item)
        except AttributeError as missing:
            module = self.__dict__.get("_modules", {}).get("_module")
            if module is None or item.startswith("__"):  # Python looks for these on the class: model[0] is an error
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
        """Takes keys with and without ``_module.``."""
        own = {key if key.startswith("_module.") else f"_module.{key}": value for key, value in state_dict.items()}
        return super().load_state_dict(own, *args, **kwargs)

    def to_standard_module(self) -> nn.Module:
        """The model, with everything taken off."""
        self.cleanup()
        return self._module

    def _settings(self) -> dict[str, Any]:
        """The arguments that make a wrapper like this one."""
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
    """A wrapper like another one, with hooks of its own."""
    made = kind(module, **settings)
    made.training = left["training"]
    made._allow(left["grad_accumulation_allowed"])
    return made
