"""Analyzes the source code of a loop to find out whether a number selects a branch or reaches the loss."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import re
import sys
from collections.abc import Set
from types import FrameType

from .torch_calls import ERROR_TESTS

Span = tuple[tuple[int, int], tuple[int, int]]  # line and column of the start and of the end

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def changes_no_loss(frame: FrameType) -> bool:
    """Returns True if a frame's current call is in a condition whose branches only raise errors or log values."""
    return _is_harmless(frame.f_code.co_filename, _call_of(frame))


@functools.lru_cache(maxsize=1024)
def _is_harmless(path: str, call: Span) -> bool:
    # Python 3.11 gives a jump the position of the entire statement, later versions that of the condition.
    nodes = _nodes(path)
    return any(_only_reports(node, nodes) and (_span(node) == call or _covers(_test(node), call)) for node in nodes)


def number_is_tested(frame: FrameType, *, array: bool) -> bool:
    """Returns True if a condition uses the result of a frame's current call, directly or through a variable.

    The condition must be in the same loop or function. Tests for NaN or infinity, conditions whose branches only raise
    errors or log values, and comparisons of the entries of an ``array`` do not count.
    """
    return _tests(frame.f_code.co_filename, _call_of(frame), array)


@functools.lru_cache(maxsize=1024)
def _tests(path: str, call: Span, array: bool) -> bool:
    nodes = _nodes(path)
    scope = max((_span(node) for node in nodes if isinstance(node, _SCOPES) and _covers(node, call)), default=None)
    nodes = [node for node in nodes if scope is None or (scope[0] <= _span(node)[0] and _span(node)[1] <= scope[1])]
    named = {ast.unparse(target) for node in nodes if _covers(node, call) for target in _targets(node)}
    harmless = [_test(node) for node in nodes if _only_reports(node, _nodes(path), named)]
    harmless += [node for node in nodes if isinstance(node, ast.Call) and _name(node.func) == "exp"]  # a perplexity
    tests = [test for node in nodes if (test := _test(node)) is not None and not ERROR_TESTS & _names(test)]
    tests = [test for test in tests if not any(_covers(node, _span(test)) for node in harmless)]
    if any(_covers(test, call) for test in tests):
        return True
    return any(named & _values(test) for test in tests if not (array and isinstance(test, ast.Compare)))


def reaches_loss(frame: FrameType) -> str | None:
    """Follows the result of a frame's current call through the assignments of its function.

    Numbers of single samples, such as ``int(y[i])``, and calls in a ``lambda`` are not followed.

    Returns:
        "differentiated" if ``backward`` is called on a value computed from the result. "returned" if the function does
        not call ``backward`` and its first return value is computed from the result. Otherwise None.
    """
    return _reaches(frame.f_code.co_filename, _call_of(frame))


def function_of(frame: FrameType) -> str:
    """Returns the file and the name of the function of a frame. Comprehensions count as part of their function."""
    name = re.sub(r"(\.<locals>\.<(listcomp|setcomp|dictcomp|genexpr)>)+$", "", frame.f_code.co_qualname)
    return f"{frame.f_code.co_filename}:{name}"


@functools.lru_cache(maxsize=1024)
def _reaches(path: str, call: Span) -> str | None:
    nodes = _nodes(path)
    functions = [node for node in nodes if isinstance(node, _FUNCTIONS) and _covers(node, call)]
    scope = max(functions, key=lambda node: _span(node)[0], default=None)
    nodes = nodes if scope is None else [node for node in nodes if _covers(scope, _span(node))]
    read = [node for node in nodes if isinstance(node, ast.Call) and _span(node) == call]
    if isinstance(scope, ast.Lambda) or any(isinstance(_source(node), ast.Subscript) for node in read):
        return None
    if any(isinstance(node, ast.Call) and _name(node.func) in ERROR_TESTS and _covers(node, call) for node in nodes):
        return None
    assigned = [(value, _texts(target)) for node in nodes for value, target in _assignments(node)]
    variables: set[str] = set()  # variables that depend on the number
    for _ in assigned:  # repeats until no variable is added
        more = {
            text for value, texts in assigned if _covers(value, call) or variables & _reads(value) for text in texts
        }
        if more <= variables:
            break
        variables |= more
    calls = [node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    losses = [function.value for function in calls if function.attr == "backward"]
    use = "differentiated" if losses else "returned"
    if not losses:
        returned = [node.value for node in nodes if isinstance(node, ast.Return) and node.value is not None]
        losses = [value.elts[0] if isinstance(value, ast.Tuple) and value.elts else value for value in returned]
    values = [loss for loss in losses if not isinstance(loss, ast.Dict)]
    return use if any(_covers(loss, call) or variables & _reads(loss) for loss in values) else None


def _source(read: ast.Call) -> ast.expr | None:
    """Returns the tensor of ``tensor.item()`` or ``int(tensor)``."""
    if read.args:
        return read.args[0]
    return read.func.value if isinstance(read.func, ast.Attribute) else None


def _assignments(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Returns the assigned values of a node, each with its target."""
    if isinstance(node, ast.AugAssign):
        return [(node.value, node.target)]
    if isinstance(node, (ast.For, ast.comprehension)):
        return [(node.iter, node.target)]
    value, assignments = getattr(node, "value", None), []
    for target in node.targets if isinstance(node, ast.Assign) else _targets(node):
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            assignments += list(zip(value.elts, target.elts, strict=True))
        elif value is not None:
            assignments.append((value, target))
    return assignments


def _texts(target: ast.expr) -> set[str]:
    """Returns the source texts of the variables in a target. A tensor or list stands for each of its entries."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return {text for part in target.elts for text in _texts(part)}
    return {ast.unparse(target.value if isinstance(target, ast.Subscript) and _is_entry(target) else target)}


def _reads(node: ast.AST) -> set[str]:
    """Returns the source texts of the values in an expression. A tensor or list also stands for each of its entries."""
    entries = (part for part in ast.walk(node) if isinstance(part, ast.Subscript) and _is_entry(part))
    return _values(node) | {ast.unparse(entry.value) for entry in entries}


def _is_entry(item: ast.Subscript) -> bool:
    """Returns True for an entry of a tensor or list; False for an item of a dict with a string key."""
    return not (isinstance(item.slice, ast.Constant) and isinstance(item.slice.value, str))


def _call_of(frame: FrameType) -> Span:
    """Returns the source position of a frame's current call; that of the line if columns are not available."""
    positions = itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    first, last, begin, end = next(positions)
    if first is None or last is None or begin is None or end is None:
        return (frame.f_lineno, sys.maxsize), (frame.f_lineno, -1)  # every node of the line contains this span
    return (first, begin), (last, end)


def _span(node: ast.expr | ast.stmt) -> Span:
    return (node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)


def _covers(node: ast.expr | ast.stmt | None, part: Span) -> bool:
    return node is not None and _span(node)[0] <= part[0] and part[1] <= _span(node)[1]


def _test(node: ast.AST) -> ast.expr | None:
    """Returns the condition of a branch, or an expression that maps many numbers to one value; else None."""
    if isinstance(node, (ast.Compare, ast.BoolOp)) or (isinstance(node, ast.Call) and _is_bound(node)):
        return node
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.FloorDiv, ast.Mod)):
        return None if isinstance(node.left, ast.Constant) else node  # a constant on the left is a format string
    if isinstance(node, ast.Match):
        return node.subject
    return node.test if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)) else None


def _is_bound(node: ast.Call) -> bool:
    """Returns True if a call bounds a number. A call that avoids division by zero, ``max(1, n)``, does not count."""
    name = _name(node.func)
    avoids_zero = name == "max" and any(isinstance(arg, ast.Constant) and arg.value in (0, 1) for arg in node.args)
    return name in ("min", "max", "clip", "clamp", "range") and not avoids_zero


def _only_reports(node: ast.expr | ast.stmt, nodes: list[ast.expr | ast.stmt], named: Set[str] = frozenset()) -> bool:
    """Returns True if a branch of a statement raises an error that is not caught, or all branches only log values.

    A branch logs values if it only calls functions and stores numbers that its condition tests, such as the best loss.

    Args:
        node: The statement.
        nodes: All nodes of the file.
        named: Variables that hold the number.
    """
    branches = [branch for branch in (node.body, node.orelse) if branch] if isinstance(node, ast.If) else []
    if isinstance(node, ast.Assert) or any(isinstance(branch[-1], ast.Raise) for branch in branches):
        return not any(_catches(other, node) for other in nodes)
    tested = _values(node.test) if isinstance(node, ast.If) else set()
    return bool(branches) and all(_logs(part, tested, named) for branch in branches for part in branch)


def _logs(statement: ast.stmt, tested: Set[str], named: Set[str]) -> bool:
    if isinstance(statement, ast.Assign):
        value = statement.value
        reads = isinstance(value, ast.Call) and bool({"item", "float", "int"} & _names(value.func))
        targets = {ast.unparse(target) for target in statement.targets}
        return targets <= tested if reads else ast.unparse(value) in named and targets <= tested - named
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    )


def _catches(outer: ast.AST, node: ast.stmt | ast.expr) -> bool:
    """Returns True if the statement ``outer`` catches errors of ``node`` and continues."""
    if isinstance(outer, ast.With):
        return _covers(outer, _span(node)) and any("suppress" in _names(item.context_expr) for item in outer.items)
    if not isinstance(outer, ast.Try) or not any(_covers(statement, _span(node)) for statement in outer.body):
        return False
    handlers = (h for h in outer.handlers if h.type is None or "KeyboardInterrupt" not in _names(h.type))
    return any(not isinstance(handler.body[-1], ast.Raise) for handler in handlers)


def _targets(node: ast.AST) -> list[ast.expr]:
    """Returns the targets of an assignment. Augmented assignments, such as sums over batches, do not count."""
    if isinstance(node, ast.Assign):
        parts = (target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target] for target in node.targets)
        return [target for targets in parts for target in targets]
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.NamedExpr)) else []


def _values(node: ast.AST) -> set[str]:
    """Returns the variables, attributes and items in an expression, without the objects that own them."""
    values = [part for part in ast.walk(node) if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript))]
    owners = {id(part.value) for part in values if not isinstance(part, ast.Name)}
    return {ast.unparse(part) for part in values if id(part) not in owners}


def _name(function: ast.expr) -> str | None:
    return getattr(function, "id", None) or getattr(function, "attr", None)


def _names(node: ast.AST) -> set[str]:
    parts = list(ast.walk(node))
    return {part.id for part in parts if isinstance(part, ast.Name)} | {
        part.attr for part in parts if isinstance(part, ast.Attribute)
    }


@functools.lru_cache(maxsize=16)
def _nodes(path: str) -> list[ast.expr | ast.stmt]:
    """Returns the nodes of a file; an empty list if its source is not available, as in an interactive session."""
    try:
        nodes = ast.walk(ast.parse("".join(linecache.getlines(path))))
    except SyntaxError:
        return []
    return [node for node in nodes if isinstance(node, (ast.expr, ast.stmt))]
