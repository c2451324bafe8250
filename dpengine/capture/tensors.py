"""Traversal of nested containers of tensors. Common containers are handled without pytree, which is slower."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributions import Distribution
from torch.utils import _pytree as pytree

from dpengine.kernels.library import traced

_NO_TENSORS = frozenset({int, float, bool, str, type(None)})


def tensors_in(tree: Any) -> list[Tensor]:
    """Returns all tensors in nested containers, in order."""
    tensors: list[Tensor] = []
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Tensor):
            tensors.append(node)
        elif type(node) is tuple or type(node) is list:
            nodes.extend(reversed(node))
        elif type(node) is dict:
            nodes.extend(reversed(node.values()))
        elif type(node) not in _NO_TENSORS:
            tensors += [leaf for leaf in pytree.tree_leaves(node) if isinstance(leaf, Tensor)]
    return tensors


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Applies a function to all tensors in nested containers, in order."""
    if isinstance(tree, Tensor):
        return function(tree)
    if type(tree) is tuple or type(tree) is list:
        return type(tree)([map_tensors(function, node) for node in tree])
    if type(tree) is dict:
        return {key: map_tensors(function, node) for key, node in tree.items()}
    return tree if type(tree) in _NO_TENSORS else pytree.tree_map_only(Tensor, function, tree)


def elements_key(tensor: Tensor) -> object:
    """Returns a key that is equal for views of the same elements."""
    address = tensor.untyped_storage()._cdata if traced(tensor) else tensor.data_ptr()
    return address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def tensors_in_outputs(output: Any) -> list[Tensor]:
    """Returns the tensors of a model's output in order, including those in fields of objects.

    Fields of objects inside other objects are not searched, except for distributions that wrap other distributions.
    """
    if isinstance(output, Tensor):
        return [output]
    tensors: list[Tensor] = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Distribution):
            tensors += tensors_in_outputs(vars(leaf))
        else:
            tensors += tensors_in(leaf) or tensors_in(_content(leaf))
    return tensors


def map_outputs(function: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Applies a function to the tensors of an output, in order. Copies objects that hold tensors."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if isinstance(leaf, Distribution):
            copied = copy.copy(leaf)
            vars(copied).update(map_outputs(function, vars(leaf)))
            return copied
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
    """Returns the fields of an object, and its items if its class derives from dict."""
    fields = getattr(leaf, "__dict__", {})
    return dict(fields) if isinstance(fields, dict) else {}, dict(leaf) if isinstance(leaf, dict) else {}
