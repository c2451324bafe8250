"""Renaming of parameters in the state dict of a module."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn


def filter_out_old_keys(self: Any, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any) -> dict[str, Any]:
    """State-dict hook of ``self``: returns the state dict without the old names of renamed parameters."""
    return {name: value for name, value in state_dict.items() if name not in self.old_to_new}


class RenameParamsMixin:
    """Mixin that renames parameters in the state dict of a module, at any depth of a model.

    It must precede ``nn.Module`` in the bases. The new name is also an attribute. ``named_parameters`` returns the old
    name.
    """

    old_to_new: Mapping[str, str] = MappingProxyType({})
    new_to_old: Mapping[str, str] = MappingProxyType({})

    def set_rename_map(self, rename_map: dict[str, str]) -> None:
        """Sets the state-dict name of each dotted parameter name. Raises ValueError if two are equal."""
        new_to_old = {new: old for old, new in rename_map.items()}
        if len(new_to_old) < len(rename_map):
            repeated = sorted({new for new in rename_map.values() if list(rename_map.values()).count(new) > 1})
            raise ValueError(f"set_rename_map: {', '.join(map(repr, repeated))} is the new name of several parameters.")
        self.old_to_new, self.new_to_old = dict(rename_map), new_to_old

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns ``nn.Module.state_dict`` under the new names."""
        destination = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        prefix = args[1] if len(args) > 1 else kwargs.get("prefix", "")
        for name in list(destination):  # removes and inserts each item, which preserves the order
            value = destination.pop(name)
            local_name = name.removeprefix(prefix) if name.startswith(prefix) else None
            destination[name if local_name is None else prefix + self.old_to_new.get(local_name, local_name)] = value
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Works as ``nn.Module.load_state_dict``, with the new names."""
        return super().load_state_dict(state_dict, strict=strict, assign=assign)  # type: ignore[misc]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        missing = rest[2]
        for old, new in self.old_to_new.items():
            if prefix + new in state_dict:
                state_dict[prefix + old] = state_dict.pop(prefix + new)
            elif prefix + old not in state_dict:
                missing.append(prefix + new)
                # The current value. Otherwise, the old name would also be reported as missing.
                state_dict[prefix + old] = self._by_name(old)
        super()._load_from_state_dict(state_dict, prefix, *rest)  # type: ignore[misc]

    def _by_name(self, name: str) -> torch.Tensor:
        owner, _, last = name.rpartition(".")
        found: torch.Tensor = getattr(nn.Module.get_submodule(self, owner), last)  # type: ignore[arg-type]
        return found

    def __getattr__(self, name: str) -> Any:
        if name in self.new_to_old:
            return self._by_name(self.new_to_old[name])
        return super().__getattr__(name)  # type: ignore[misc]
