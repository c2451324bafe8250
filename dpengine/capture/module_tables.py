"""Cached list of the children, parameters and buffers of a model's modules, refreshed if one of them has changed."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from torch import nn

from dpengine.distributed.topology import SINGLE, Topology


class ModuleTables:
    """The tables ``_modules``, ``_parameters`` and ``_buffers`` of all modules of a model.

    A step reads them several times, and a walk over all modules takes longer than running one layer. The tables are
    therefore compared with those of the last walk, entry by entry, without a loop in Python.

    Attributes:
        modules: The modules by dotted name.
        version: Number of walks so far.

    Args:
        model: The model.
        topology: Placement of the model on processes.
    """

    def __init__(self, model: nn.Module, topology: Topology = SINGLE):
        self.modules: Mapping[str, nn.Module] = {}
        self.version = 0
        self._model = model
        self._topology = topology
        self._tables: list[list[dict[str, Any]]] = []  # tables of tensors, tables of children
        self._contents: list[tuple[list[str], list[Any]]] = []  # names and values in these tables
        self._named: tuple[int, Mapping[str, nn.Parameter]] = (0, {})  # version of the walk, parameters
        self.refresh()

    def refresh(self) -> None:
        """Lists the modules again if an entry of a table has changed."""
        if self.version and self.unchanged():
            return
        self.modules = dict(self._model.named_modules())
        modules = self.modules.values()
        self._tables = [[t for m in modules for t in (m._parameters, m._buffers)], [m._modules for m in modules]]
        self._contents = [_contents(tables) for tables in self._tables]
        self.version += 1

    def unchanged(self, *, children: bool = True) -> bool:
        """Returns True if the tables are as they were at the last walk. ``children=False`` ignores tables of children.

        Returns False if parameters are sharded, because modules hold unsharded parameters during forward and backward.
        """
        if self._topology.slots:
            return False
        for tables, (names, values) in list(zip(self._tables, self._contents, strict=True))[: 2 if children else 1]:
            current_names, current_values = _contents(tables)
            if current_names != names or not all(map(operator.is_, current_values, values)):
                return False
        return True

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Returns the parameters that the optimizer holds, by dotted name. The result is cached until the next walk."""
        if self._named[0] != self.version:
            self._named = self.version, self._topology.parameters(self._model)
        return self._named[1]

    def tensors(self) -> Iterator[tuple[dict[str, Any], str, str]]:
        """Yields the table of each tensor that is not sharded, its name in the table, and its dotted name."""
        for prefix, module in self.modules.items():
            for table in (module._buffers, module._parameters):
                for name in table:
                    if (module, name) not in self._topology.slots:
                        yield table, name, f"{prefix}.{name}" if prefix else name


def _contents(tables: list[dict[str, Any]]) -> tuple[list[str], list[Any]]:
    """Returns the names and values of tables, without a loop over them in Python."""
    filled = list(filter(None, tables))
    return list(chain.from_iterable(filled)), list(chain.from_iterable(map(dict.values, filled)))
