"""The Python of docs/from_opacus.md runs as it stands, in order, and its two scripts differ by the one rule."""

import re
import warnings
from pathlib import Path

import pytest
from migrated import SCRIPTS, written_for_opacus

PAGE = Path(__file__).resolve().parents[1] / "docs" / "from_opacus.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
BEFORE = [block for block in BLOCKS if re.search(r"^from opacus\b", block, flags=re.MULTILINE)]
AFTER = [block for block in BLOCKS if block not in BEFORE]


@pytest.fixture(scope="module")
def after_the_page():
    """What its blocks leave behind, but for the one that needs Opacus; a reader should see no warning."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for block in AFTER:
            line = TEXT[: TEXT.index(block)].count("\n")
            exec(compile("\n" * line + block, str(PAGE), "exec"), namespace)  # errors then name the line of the page
    return namespace


def test_the_script_before_is_the_script_after_by_the_rule():
    assert len(BEFORE) == 1
    assert written_for_opacus(AFTER[1]) == BEFORE[0]


def test_the_page_runs_and_both_ways_spend_about_the_same(after_the_page):
    theirs, ours = after_the_page["privacy_engine"].get_epsilon(1e-5), after_the_page["engine"].get_epsilon(1e-5)
    assert 0 < after_the_page["spent"](after_the_page["history"], 1e-5) <= theirs < 1.01 * ours


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT)
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []


def test_names_of_dpengine_on_the_page_exist(after_the_page):
    import dpengine

    names = set(re.findall(r"`dpengine\.(\w+)\(", TEXT))
    assert names
    assert names <= set(dpengine.__all__)


def test_the_page_counts_the_scripts():
    assert f"The {['no', 'one', 'two', 'three', 'four', 'five', 'six', 'seven'][len(SCRIPTS)]} scripts of" in TEXT
