"""Syntax trees of source files."""

import ast
import gc


def tree_of(text: str) -> ast.Module:
    """Returns the tree of a module. Garbage is not looked for meanwhile: it would take most of the time."""
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()
