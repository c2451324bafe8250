"""docs/errors.md has a section for every code, under the anchor that the error names, and for no other."""

import ast
import functools
import re
from pathlib import Path

import pytest
from source_trees import tree_of

from dpengine import errors

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "errors.md"
CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.PrivacyError) and value is not errors.PrivacyError
]


def sections() -> dict[str, str]:
    """The text under each heading. GitHub and Sphinx make the anchor of a heading by lower case."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {heading.strip(): text for heading, text in zip(parts[1::2], parts[2::2], strict=True)}


@functools.cache
def codes_of_notices() -> set[str]:
    """First arguments of all calls of ``notice``, read from the source."""
    found = set()
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "dpengine").rglob("*.py")]
    for text in texts:
        for node in ast.walk(tree_of(text)) if "notice(" in text else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "notice":
                found.add(ast.literal_eval(node.args[0]))
    return found


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_names_the_anchor_of_its_section(kind):
    file, anchor = kind("x").docs.split("#")
    assert ROOT / file == PAGE
    assert sections()[anchor.upper()].lstrip().startswith(f"**{kind.__name__}")


def test_every_notice_has_a_section_that_speaks_of_a_warning():
    assert len(codes_of_notices()) >= 3
    for code in codes_of_notices():
        assert re.search(r"\bwarning\b", sections()[code], flags=re.IGNORECASE), code


def test_no_section_is_left_over():
    assert set(sections()) == {kind.code for kind in CLASSES} | codes_of_notices()


def test_sections_are_in_order_and_say_something():
    assert list(sections()) == sorted(sections())
    assert [code for code, text in sections().items() if len(text.split()) < 15] == []


def test_the_python_of_the_page_is_python():
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        compile(block, str(PAGE), "exec")


def test_the_page_does_not_name_what_is_not_there():
    text = PAGE.read_text(encoding="utf-8")
    public = set(re.findall(r"\bdpengine\.(\w+)\(", text))
    assert public
    assert public <= set(__import__("dpengine").__all__)
