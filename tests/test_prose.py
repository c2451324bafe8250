"""Docstrings begin with a verb or a noun. Neither the package, the pages nor the tutorials use certain phrases."""

import ast
import re
from pathlib import Path

from source_trees import tree_of

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "dpengine").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "tutorials").rglob("*.py"))]
CLAUSE = re.compile(r"(As|How|If|Of|That|What|When|Where|Whether|Which|Who|Why)\b")
MAYBE = re.compile(rf"[\"']\s*{CLAUSE.pattern}")  # a text that begins so
PHRASES = re.compile(
    r"\b(as far as is known|as there\.|at hand|gives? up|given up|hands? out|handed out|hangs? on|hangs? together|"
    r"hears? of|in turn|nobody|shall|somebody|takes? part|takes? turns|thaw\w*|told of|what (is|was) spent|"
    r"all the same|books|its like|next to nothing|the like|whoever)\b",
    re.IGNORECASE,
)


def docstrings(text):
    for node in ast.walk(tree_of(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if doc := ast.get_docstring(node):
                yield getattr(node, "name", "module"), doc


def test_docstrings_begin_with_a_verb_or_a_noun():
    paths = [path for part in ("dpengine", "tests", "tutorials", "benchmarks") for path in (ROOT / part).rglob("*.py")]
    texts = {path: text for path in paths if MAYBE.search(text := path.read_text("utf-8"))}  # no other needs a parser
    found = [(path, name) for path, text in texts.items() for name, doc in docstrings(text) if CLAUSE.match(doc)]
    assert found == []


def test_texts_use_the_terms_of_the_field():
    lines = [(path, line.strip()) for path in FILES + PAGES for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(str(path.relative_to(ROOT)), line) for path, line in lines if PHRASES.search(line)] == []


def test_the_rules_are_seen_to_fail():
    text = '''def f():\n    """What was spent."""\n'''
    assert MAYBE.search(text)
    assert [name for name, doc in docstrings(text) if CLAUSE.match(doc)] == ["f"]
    assert PHRASES.search(text)
