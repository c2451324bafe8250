"""The Python of the README runs as it stands: its blocks in order, in one namespace, as a reader would paste them."""

import re
import warnings
from pathlib import Path

import pytest

from dpengine import accounting

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def after_the_readme():
    """The namespace that its blocks leave behind; a warning is an error, since a reader should see none."""
    text = README.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for match in BLOCK.finditer(text):
            line = text[: match.start(1)].count("\n")
            code = compile("\n" * line + match[1], str(README), "exec")  # errors then name the line of the README
            exec(code, namespace)
    return namespace


def test_the_readme_has_the_loop_and_the_budget():
    blocks = BLOCK.findall(README.read_text(encoding="utf-8"))
    assert len(blocks) >= 2
    assert "noise_multiplier=" in blocks[0]
    assert "target_epsilon=" in blocks[1]


def test_the_readme_runs_and_stays_within_its_budget(after_the_readme):
    engine = after_the_readme["engine"]
    assert 2.9 < engine.get_epsilon(delta=1e-5) <= 3.0


def test_the_readme_names_no_file_that_is_not_there():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []


def test_the_history_of_two_charges_costs_what_the_readme_says(after_the_readme):
    history, both = after_the_readme["history"], after_the_readme["both"]
    assert len(history) == 2
    assert both == accounting.epsilon_of(history, 1e-5) > max(accounting.epsilon_of([one], 1e-5) for one in history)
    assert f"# {accounting.round_up(both, 4)}" in README.read_text(encoding="utf-8")
    assert f"# {accounting.round_up(accounting.epsilon(**after_the_readme['run'], delta=1e-5), 4)}" in README.read_text(
        encoding="utf-8"
    )
