"""Reads in the source of a loop whether a value of a tensor chooses a branch, and whether a branch raises an error."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import sys
from types import FrameType

from .torch_calls import ERROR_TESTS

Span = tuple[tuple[int, int], tuple[int, int]]  # line and column of the start and of the end

_SCOPES = (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def raises_at(frame: FrameType) -> bool:
    """Returns True if the call of a frame is in a condition, and one of the two branches only raises an error."""
    return _raises(frame.f_code.co_filename, _call_of(frame))


@functools.lru_cache(maxsize=1024)
def _raises(path: str, call: Span) -> bool:
    # Python 3.11 gives a jump the place of the whole statement, later versions that of the condition.
    nodes = _nodes(path)
    return any(_may_raise(node) and (_span(node) == call or _holds(_test(node), call)) for node in nodes)


def tests_number(frame: FrameType) -> bool:
    """Returns True if the result of the call of a frame is tested, or gets a name that the same loop or function tests.

    Tests for NaN or infinity do not count, nor tests of which one branch only raises an error.
    """
    return _tests(frame.f_code.co_filename, _call_of(frame))


@functools.lru_cache(maxsize=1024)
def _tests(path: str, call: Span) -> bool:
    nodes = _nodes(path)
    scope = max((_span(node) for node in nodes if isinstance(node, _SCOPES) and _holds(node, call)), default=None)
    nodes = [node for node in nodes if scope is None or (scope[0] <= _span(node)[0] and _span(node)[1] <= scope[1])]
    errors = [_test(node) for node in nodes if _may_raise(node)]
    tests = [test for node in nodes if (test := _test(node)) is not None and not ERROR_TESTS & _names(test)]
    tests = [test for test in tests if not any(_holds(error, _span(test)) for error in errors)]
    names = {name for node in nodes if _holds(node, call) for target in _targets(node) for name in _names(target)}
    return any(_holds(test, call) or names & _names(test) for test in tests)


def _call_of(frame: FrameType) -> Span:
    """Returns where the call is that a frame runs; its whole line if Python did not keep its columns."""
    positions = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    first, last, begin, end = next(positions)
    if first is None or last is None or begin is None or end is None:
        return (frame.f_lineno, sys.maxsize), (frame.f_lineno, -1)  # in every node of the line
    return (first, begin), (last, end)


def _span(node: ast.expr | ast.stmt) -> Span:
    return (node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)


def _holds(node: ast.expr | ast.stmt | None, part: Span) -> bool:
    return node is not None and _span(node)[0] <= part[0] and part[1] <= _span(node)[1]


def _test(node: ast.AST) -> ast.expr | None:
    """Returns the condition of a node; a comparison is one."""
    if isinstance(node, ast.Compare):
        return node
    return node.test if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)) else None


def _may_raise(node: ast.AST) -> bool:
    """Returns True if one of the branches of a statement only raises an error."""
    branches = (node.body, node.orelse) if isinstance(node, ast.If) else ()
    return isinstance(node, ast.Assert) or any(isinstance(branch[-1], ast.Raise) for branch in branches if branch)


def _targets(node: ast.AST) -> list[ast.expr]:
    """Returns what a statement assigns to. A sum over batches is left out."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.NamedExpr)) else []


def _names(node: ast.AST) -> set[str]:
    parts = list(ast.walk(node))
    return {part.id for part in parts if isinstance(part, ast.Name)} | {
        part.attr for part in parts if isinstance(part, ast.Attribute)
    }


@functools.lru_cache(maxsize=16)
def _nodes(path: str) -> list[ast.expr | ast.stmt]:
    """Returns the nodes of a file; none if its source cannot be read, as that of an interactive session."""
    try:
        nodes = ast.walk(ast.parse("".join(linecache.getlines(path))))
    except SyntaxError:
        return []
    return [node for node in nodes if isinstance(node, (ast.expr, ast.stmt))]
