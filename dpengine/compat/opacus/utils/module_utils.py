"""Trainable parts of modules, and equality of state dicts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


def has_trainable_params(module: nn.Module) -> bool:
    """Returns True if the module itself owns a parameter that requires gradients."""
    return requires_grad(module)


def parametrized_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields dotted name and module of each module that owns parameters, frozen ones included."""
    return ((name, part) for name, part in module.named_modules() if any(True for _ in part.parameters(recurse=False)))


def trainable_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields dotted name and module of each module that owns a parameter that requires gradients."""
    return ((name, part) for name, part in module.named_modules() if has_trainable_params(part))


def trainable_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields dotted name and parameter of each parameter that requires gradients. Tied parameters occur once."""
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def requires_grad(module: nn.Module, *, recurse: bool = False) -> bool:
    """Returns True if a parameter of the module, or with ``recurse`` of a submodule, requires gradients."""
    return any(parameter.requires_grad for parameter in module.parameters(recurse))


def clone_module(module: nn.Module) -> nn.Module:
    """Returns a deep copy, on the same device; its class need not be importable."""
    return copy.deepcopy(module)


def get_submodule(module: nn.Module, target: str) -> nn.Module:
    """Returns the submodule with a dotted name; the module itself for an empty name."""
    return module.get_submodule(target)


def are_state_dict_equal(sd1: Mapping[str, Any], sd2: Mapping[str, Any]) -> bool:
    """Returns True if two states have the same keys and equal values, floating-point ones within rounding."""
    return sd1.keys() == sd2.keys() and all(_equal(value, sd2[key]) for key, value in sd1.items())


def _equal(a: Any, b: Any) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return type(a) is type(b) and bool(a == b)
    if a.shape != b.shape:
        return False
    if a.is_floating_point() and b.is_floating_point():
        return torch.allclose(a, b.to(a))
    return torch.equal(a, b.to(a.device))
