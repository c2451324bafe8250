"""Looks up the tests that the tables of this folder name."""

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


@functools.cache
def _functions_of(file: str) -> frozenset[str]:
    """Returns the names of the functions at the top level of a file, which is not imported."""
    body = ast.parse((TESTS / file).read_text(encoding="utf-8")).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef))


def missing_tests(node_ids: Iterable[str]) -> list[str]:
    """Returns the node ids whose file or function does not exist. Parameters in brackets are not checked."""
    missing = []
    for node_id in node_ids:
        file, _, test = node_id.partition("::")
        name = test.partition("[")[0]
        if not (name.startswith("test_") and (TESTS / file).is_file() and name in _functions_of(file)):
            missing.append(node_id)
    return missing
