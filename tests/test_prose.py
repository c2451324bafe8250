"""Docstrings of the package begin with a verb or a noun, and do not use phrases that a reader stumbles over."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "dpengine"
FILES = sorted(PACKAGE.rglob("*.py"))
CLAUSE = re.compile(r"(As|How|If|Of|That|What|When|Where|Whether|Which|Who|Why)\b")
PHRASES = re.compile(
    r"\b(as far as is known|as there\.|at hand|gives? up|given up|hands? out|handed out|hangs? on|hangs? together|"
    r"hears? of|in turn|nobody|shall|somebody|takes? part|takes? turns|thaw\w*|told of|what (is|was) spent)\b",
    re.IGNORECASE,
)


def docstrings(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if doc := ast.get_docstring(node):
                yield getattr(node, "name", "module"), doc


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_prose(path):
    text = path.read_text(encoding="utf-8")
    assert [name for name, doc in docstrings(text) if CLAUSE.match(doc)] == []
    assert [line.strip() for line in text.splitlines() if PHRASES.search(line)] == []


def test_the_rules_are_seen_to_fail():
    text = '''def f():\n    """What was spent."""\n'''
    assert [name for name, doc in docstrings(text) if CLAUSE.match(doc)] == ["f"]
    assert PHRASES.search(text)
