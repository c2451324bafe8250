"""What a forward pass returns, as people write it: tensors in tuples, lists and dicts, and in fields of objects."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from .tap import tensors_in


def tensors_in_outputs(output: Any) -> list[Tensor]:
    """The tensors, in order. Of objects inside objects nothing is seen."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(output):
        found += tensors_in(leaf) or tensors_in(_content(leaf))
    return found


def map_outputs(function: Callable[[Tensor], Tensor], output: Any) -> Any:
    """The output with the function applied to its tensors, in order; objects that hold some are copied."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        content = _content(leaf)
        if not tensors_in(content):
            return leaf
        fields, items = pytree.tree_map(lambda v: function(v) if isinstance(v, Tensor) else v, content)
        leaf = copy.copy(leaf)
        vars(leaf).update(fields)
        if isinstance(leaf, dict):
            leaf.update(items)
        return leaf

    return pytree.tree_map(of_leaf, output)


def _content(leaf: Any) -> tuple[dict[str, Any], dict[Any, Any]]:
    """The fields of an object, and the items of a dict that is more than a dict."""
    fields = getattr(leaf, "__dict__", {})
    return dict(fields) if isinstance(fields, dict) else {}, dict(leaf) if isinstance(leaf, dict) else {}
