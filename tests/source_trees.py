"""Syntax trees of source files."""

import ast
import gc


def tree_of(text: str) -> ast.Module:
    """Returns the syntax tree of a module. Garbage collection is off, since it would dominate the run time."""
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()
