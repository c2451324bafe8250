"""Reads in the source of a loop whether a value of a tensor chooses a branch, and what the branch does."""

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
    """Returns True if the call of a frame is in a condition, of which a branch only raises an error or notes values."""
    return _is_harmless(frame.f_code.co_filename, _call_of(frame))


@functools.lru_cache(maxsize=1024)
def _is_harmless(path: str, call: Span) -> bool:
    # Python 3.11 gives a jump the place of the whole statement, later versions that of the condition.
    nodes = _nodes(path)
    return any(_only_reports(node, nodes) and (_span(node) == call or _holds(_test(node), call)) for node in nodes)


def tests_number(frame: FrameType, *, array: bool) -> bool:
    """Returns True if the result of the call of a frame is tested, or gets a name that the same loop or function tests.

    Tests for NaN or infinity do not count, nor tests of which a branch only raises an error or notes values, nor
    comparisons of the entries of an ``array``.
    """
    return _tests(frame.f_code.co_filename, _call_of(frame), array)


@functools.lru_cache(maxsize=1024)
def _tests(path: str, call: Span, array: bool) -> bool:
    nodes = _nodes(path)
    scope = max((_span(node) for node in nodes if isinstance(node, _SCOPES) and _holds(node, call)), default=None)
    nodes = [node for node in nodes if scope is None or (scope[0] <= _span(node)[0] and _span(node)[1] <= scope[1])]
    named = {ast.unparse(target) for node in nodes if _holds(node, call) for target in _targets(node)}
    harmless = [_test(node) for node in nodes if _only_reports(node, _nodes(path), named)]
    harmless += [node for node in nodes if isinstance(node, ast.Call) and _name(node.func) == "exp"]  # a perplexity
    tests = [test for node in nodes if (test := _test(node)) is not None and not ERROR_TESTS & _names(test)]
    tests = [test for test in tests if not any(_holds(one, _span(test)) for one in harmless)]
    if any(_holds(test, call) for test in tests):
        return True
    return any(named & _values(test) for test in tests if not (array and isinstance(test, ast.Compare)))


def reaches_loss(frame: FrameType) -> str | None:
    """Returns where a number that the call of a frame returns goes to, by the assignments of its function.

    Numbers of single samples, as ``int(y[i])``, are left out, and so are expressions without a name (``lambda``).

    Returns:
        "differentiated" if ``backward`` is called on it, "returned" if it is the first value that a function without
        such a call returns; else None.
    """
    return _reaches(frame.f_code.co_filename, _call_of(frame))


def function_of(frame: FrameType) -> str:
    """Returns the file and the name of the function of a frame, also if it is inside a comprehension."""
    name = re.sub(r"(\.<locals>\.<(listcomp|setcomp|dictcomp|genexpr)>)+$", "", frame.f_code.co_qualname)
    return f"{frame.f_code.co_filename}:{name}"


@functools.lru_cache(maxsize=1024)
def _reaches(path: str, call: Span) -> str | None:
    nodes = _nodes(path)
    functions = [node for node in nodes if isinstance(node, _FUNCTIONS) and _holds(node, call)]
    scope = max(functions, key=lambda node: _span(node)[0], default=None)
    nodes = nodes if scope is None else [node for node in nodes if _holds(scope, _span(node))]
    read = [node for node in nodes if isinstance(node, ast.Call) and _span(node) == call]
    if isinstance(scope, ast.Lambda) or any(isinstance(_source(node), ast.Subscript) for node in read):
        return None
    if any(isinstance(node, ast.Call) and _name(node.func) in ERROR_TESTS and _holds(node, call) for node in nodes):
        return None
    assigned = [(value, _texts(target)) for node in nodes for value, target in _assignments(node)]
    found: set[str] = set()
    for _ in assigned:  # until nothing is added
        more = {text for value, texts in assigned if _holds(value, call) or found & _reads(value) for text in texts}
        if more <= found:
            break
        found |= more
    calls = [node.func for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    losses = [function.value for function in calls if function.attr == "backward"]
    place = "differentiated" if losses else "returned"
    if not losses:
        returned = [node.value for node in nodes if isinstance(node, ast.Return) and node.value is not None]
        losses = [value.elts[0] if isinstance(value, ast.Tuple) and value.elts else value for value in returned]
    values = [loss for loss in losses if not isinstance(loss, ast.Dict)]
    return place if any(_holds(loss, call) or found & _reads(loss) for loss in values) else None


def _source(read: ast.Call) -> ast.expr | None:
    """Returns the tensor of ``tensor.item()`` or ``int(tensor)``."""
    if read.args:
        return read.args[0]
    return read.func.value if isinstance(read.func, ast.Attribute) else None


def _assignments(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Returns each value that a node assigns, with its target."""
    if isinstance(node, ast.AugAssign):
        return [(node.value, node.target)]
    if isinstance(node, (ast.For, ast.comprehension)):
        return [(node.iter, node.target)]
    value, found = getattr(node, "value", None), []
    for target in node.targets if isinstance(node, ast.Assign) else _targets(node):
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            found += list(zip(value.elts, target.elts, strict=True))
        elif value is not None:
            found.append((value, target))
    return found


def _texts(target: ast.expr) -> set[str]:
    """Returns the texts of a target; an entry of a tensor or list is the whole."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return {text for part in target.elts for text in _texts(part)}
    return {ast.unparse(target.value if isinstance(target, ast.Subscript) and _is_entry(target) else target)}


def _reads(node: ast.AST) -> set[str]:
    """Returns the variables, attributes and items in an expression, and the wholes of entries."""
    entries = (one for one in ast.walk(node) if isinstance(one, ast.Subscript) and _is_entry(one))
    return _values(node) | {ast.unparse(one.value) for one in entries}


def _is_entry(item: ast.Subscript) -> bool:
    """Returns True for an item of a tensor or list, whose index is not a text."""
    return not (isinstance(item.slice, ast.Constant) and isinstance(item.slice.value, str))


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
    """Returns the condition of a node: that of a branch, or an expression that has the same value for many numbers."""
    if isinstance(node, (ast.Compare, ast.BoolOp)) or (isinstance(node, ast.Call) and _is_bound(node)):
        return node
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.FloorDiv, ast.Mod)):
        return None if isinstance(node.left, ast.Constant) else node  # a text that is formatted
    if isinstance(node, ast.Match):
        return node.subject
    return node.test if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)) else None


def _is_bound(node: ast.Call) -> bool:
    """Returns True if a call bounds a number, other than to divide by it, as ``max(1, n)`` does."""
    name = _name(node.func)
    divides = name == "max" and any(isinstance(arg, ast.Constant) and arg.value in (0, 1) for arg in node.args)
    return name in ("min", "max", "clip", "clamp", "range") and not divides


def _only_reports(node: ast.expr | ast.stmt, nodes: list[ast.expr | ast.stmt], named: Set[str] = frozenset()) -> bool:
    """Returns True if a branch of a statement only raises an error that nothing around it catches, or notes values.

    It notes values if it only calls functions, and keeps a number that it tests, as the best loss so far.

    Args:
        node: The statement.
        nodes: All nodes of the file.
        named: Names of the number.
    """
    branches = [branch for branch in (node.body, node.orelse) if branch] if isinstance(node, ast.If) else []
    if isinstance(node, ast.Assert) or any(isinstance(branch[-1], ast.Raise) for branch in branches):
        return not any(_catches(other, node) for other in nodes)
    tested = _values(node.test) if isinstance(node, ast.If) else set()
    return bool(branches) and all(_notes(part, tested, named) for branch in branches for part in branch)


def _notes(statement: ast.stmt, tested: Set[str], named: Set[str]) -> bool:
    if isinstance(statement, ast.Assign):
        value = statement.value
        reads = isinstance(value, ast.Call) and bool({"item", "float", "int"} & _names(value.func))
        kept = {ast.unparse(target) for target in statement.targets}
        return kept <= tested if reads else ast.unparse(value) in named and kept <= tested - named
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    )


def _catches(outer: ast.AST, node: ast.stmt | ast.expr) -> bool:
    """Returns True if a statement catches an error of another one, and continues."""
    if isinstance(outer, ast.With):
        return _holds(outer, _span(node)) and any("suppress" in _names(item.context_expr) for item in outer.items)
    if not isinstance(outer, ast.Try) or not any(_holds(one, _span(node)) for one in outer.body):
        return False
    handlers = (one for one in outer.handlers if one.type is None or "KeyboardInterrupt" not in _names(one.type))
    return any(not isinstance(one.body[-1], ast.Raise) for one in handlers)


def _targets(node: ast.AST) -> list[ast.expr]:
    """Returns what a statement assigns to. A sum over batches is left out."""
    if isinstance(node, ast.Assign):
        parts = (one.elts if isinstance(one, (ast.Tuple, ast.List)) else [one] for one in node.targets)
        return [target for some in parts for target in some]
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.NamedExpr)) else []


def _values(node: ast.AST) -> set[str]:
    """Returns the variables, attributes and items in an expression, without the objects that they belong to."""
    values = [one for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute, ast.Subscript))]
    owners = {id(one.value) for one in values if not isinstance(one, ast.Name)}
    return {ast.unparse(one) for one in values if id(one) not in owners}


def _name(function: ast.expr) -> str | None:
    return getattr(function, "id", None) or getattr(function, "attr", None)


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
