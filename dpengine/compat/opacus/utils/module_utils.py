"""Trainable parts of modules, and equality of state dicts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


def has_trainable_params(module: nn.Module) -> bool:
    """Returns whether the module itself owns a parameter that requires gradients."""
    return requires_grad(module)


def parametrized_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields dotted name and module of each module that owns parameters, frozen ones included."""
    return ((name, one) for name, one in module.named_modules() if any(True for _ in one.parameters(recurse=False)))


def trainable_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields dotted name and module of each module that owns a parameter that requires gradients."""
    return ((name, one) for name, one in module.named_modules() if has_trainable_params(one))


def trainable_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields dotted name and parameter of each one that requires gradients; a tied one once."""
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def requires_grad(module: nn.Module, *, recurse: bool = False) -> bool:
    """Returns whether a parameter of the module, or with ``recurse`` of a module inside, requires gradients."""
    return any(parameter.requires_grad for parameter in module.parameters(recurse))


def clone_module(module: nn.Module) -> nn.Module:
    """Returns a deep copy, on the same device; its class need not be importable."""
    return copy.deepcopy(module)


def get_submodule(module: nn.Module, target: str) -> nn.Module:
    """Returns the module of a dotted name, which is the module itself for an empty name."""
    return module.get_submodule(target)


def are_state_dict_equal(sd1: Mapping[str, Any], sd2: Mapping[str, Any]) -> bool:
    """Returns whether two states have the same keys and equal values, floating-point ones within rounding."""
    return sd1.keys() == sd2.keys() and all(_equal(value, sd2[key]) for key, value in sd1.items())


def _equal(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return type(one) is type(other) and bool(one == other)
    if one.shape != other.shape:
        return False
    if one.is_floating_point() and other.is_floating_point():
        return torch.allclose(one, other.to(one))
    return torch.equal(one, other.to(one.device))
