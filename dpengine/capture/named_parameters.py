"""The parameters of a model by name, which are listed anew when the model's structure has changed."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import nn

from dpengine.distributed.topology import Topology


class NamedParameters:
    """Lists the parameters of a model.

    A step asks for them several times, and a walk over the modules takes longer than a layer. So the tables of children
    and parameters of all modules are compared with those of the last walk, entry by entry.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._tables: list[dict[str, Any]] = []
        self._filled: list[dict[str, Any]] = []  # the tables that are not empty
        self._names: list[str] = []
        self._values: list[Any] = []
        self._found: Mapping[str, nn.Parameter] = {}

    def listed(self, topology: Topology) -> Mapping[str, nn.Parameter]:
        """Returns the parameters that the optimizer holds, by dotted name: the same object while nothing changes.

        In a topology whose modules show other parameters while they run, each call is a walk.
        """
        if topology.slots:
            return topology.parameters(self._model)
        if not self._tables or not self._unchanged():
            modules = list(self._model.modules())
            self._tables = [table for module in modules for table in (module._modules, module._parameters)]
            self._filled = [table for table in self._tables if table]
            self._names, self._values = self._contents()
            self._found = topology.parameters(self._model)
        return self._found

    def _unchanged(self) -> bool:
        if sum(map(len, self._tables)) != len(self._names):
            return False
        names, values = self._contents()
        return names == self._names and all(map(operator.is_, values, self._values))

    def _contents(self) -> tuple[list[str], list[Any]]:
        """Returns the names and the values of all tables, without a Python loop over them."""
        return list(chain.from_iterable(self._filled)), list(chain.from_iterable(map(dict.values, self._filled)))
