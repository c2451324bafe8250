"""List of the modules that capture watches, and the granularity at which it follows their parameters."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.nn.utils import parametrize

from dpengine.layers.replacements import REPLACEMENTS, is_replacement_layer

if TYPE_CHECKING:
    from .capture import Capture


class Kind(enum.Enum):
    """Granularity at which capture follows the parameters of a module."""

    LAYER = "layer"  # a layer with one output tensor; each parameter has its own grad sampler
    UNIT = "unit"  # the module with all its submodules, with one joint sampler. Not a privacy unit
    OPERATIONS = "operations"  # each operation that uses a parameter of the module itself


@dataclass(frozen=True, eq=False)
class Watch:
    """Watched module.

    Attributes:
        name: Dotted name in the model.
        module: The module.
        kind: Granularity at which capture follows its parameters.
        rule: The grad samplers of the module, which capture passes to the grad mode.
        batch_first: True if calls have the batch on axis 0 even in a model with ``batch_first=False``, which holds for
            layers inside a batch-first replacement layer.
    """

    name: str
    module: nn.Module
    kind: Kind
    rule: Any = None
    batch_first: bool = False

    def slots(self) -> list[tuple[nn.Module, str, str]]:
        """Returns (owner, name in the owner, dotted name in the module) of every parameter that is followed."""
        if self.kind is not Kind.UNIT:
            return [(self.module, name, name) for name, p in self.module._parameters.items() if p is not None]
        return [
            (owner, name, f"{prefix}.{name}" if prefix else name)
            for prefix, owner in self.module.named_modules()
            for name, p in owner._parameters.items()
            if p is not None
        ]


class WatchChoice(Protocol):
    """Selects the units of a model during its first batches."""

    def __call__(self, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before every recorded forward pass of the model."""

    def use(self, capture: Capture, units: Collection[str]) -> None:
        """Watches the modules with these names as units, and ends the selection of units."""

    def share(self, capture: Capture) -> None:
        """Makes every process use the units of all processes. All processes call it at the end of a step."""


Lookup = Callable[[nn.Module], Any]


def watch_list(
    model: nn.Module,
    lookup: Lookup,
    unit_rule: Callable[[nn.Module], Any],
    *,
    by_operations: bool = True,
    units: Collection[str] = (),
) -> list[Watch]:
    """Returns the watches of all modules that own parameters. The modules named in ``units`` are one unit each.

    Includes frozen parameters: ``requires_grad`` is read in each call, so they may be unfrozen later.
    """
    watches: list[Watch] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, name: str, batch_first: bool) -> None:
        if module in seen:
            return
        seen.add(module)
        if name in units:
            watch: Watch | None = Watch(name, module, Kind.UNIT, unit_rule(module))
        else:
            watch = _watch(module, name, lookup, unit_rule, by_operations)
        if watch is not None:
            watches.append(replace(watch, batch_first=batch_first))
            if watch.kind is Kind.UNIT:  # a submodule that is also used outside the unit is visited on another path
                return
        for child_name, child in module.named_children():
            dotted = f"{name}.{child_name}" if name else child_name
            visit(child, dotted, type(module) in _REPLACED_TYPES or is_replacement_layer(module))

    visit(model, "", False)
    return watches


def _watch(
    module: nn.Module, name: str, lookup: Lookup, unit_rule: Callable[[nn.Module], Any], by_operations: bool
) -> Watch | None:
    if parametrize.is_parametrized(module):
        return Watch(name, module, Kind.UNIT, unit_rule(module))
    if not has_own_parameters(module):
        return None
    if type(module) in _REPLACED_TYPES:
        return Watch(name, module, Kind.OPERATIONS)
    rule = lookup(module)
    if rule is not None:
        return Watch(name, module, Kind.LAYER, rule)
    if is_replacement_layer(module):
        return Watch(name, module, Kind.OPERATIONS)
    if by_operations and any(has_own_parameters(child) or _is_dropout(child) for child in _submodules(module)):
        return Watch(name, module, Kind.OPERATIONS)
    return Watch(name, module, Kind.UNIT, unit_rule(module))


def _is_dropout(module: nn.Module) -> bool:
    """Returns True for active dropout. With it, a joint sampler would also run the forward pass sample by sample."""
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0


def has_own_parameters(module: nn.Module) -> bool:
    """Returns True if the module itself holds a parameter. Parameters of children do not count."""
    return any(p is not None for p in module._parameters.values())


def _submodules(module: nn.Module) -> Iterable[nn.Module]:
    return (m for m in module.modules() if m is not module)


_REPLACED_TYPES = REPLACEMENTS.keys() | set(REPLACEMENTS.values())
