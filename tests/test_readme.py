"""README.md and docs/: snippets run, links resolve, the README is short, and its figures are the stored ones."""

import re
from pathlib import Path

import pytest
from snippets import ROOT, Snippet, run, snippets_of

from benchmarks import step_time_figure

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
CHECKED_ELSEWHERE = {"docs/errors.md": "test_error_docs.py", "docs/from_opacus.md": "compat/test_from_opacus_page.py"}
SNIPPETS = [snippet for page in PAGES if page not in CHECKED_ELSEWHERE for snippet in snippets_of(page)]
SLOW = ("compile=True", "from lightning import")  # takes seconds
MOST_WORDS = 600


# The diff of the README: without and with what it adds, it is an ordinary loop and a private one.
SETUP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.accounting import round_up

model = nn.Linear(20, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(TensorDataset(torch.randn(256, 20), torch.randint(2, (256,))), batch_size=64)
loss_fn = nn.CrossEntropyLoss()
"""


def lines_of_the_diff(left_out: str) -> list[str]:
    (block,) = re.findall(r"^```diff\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    assert {line[0] for line in block.splitlines()} <= {"+", "-", " "}
    return [line[1:] for line in block.splitlines() if line[0] != left_out]


SIDES = [
    Snippet("README.md", 0, SETUP + "\n".join(lines_of_the_diff("+"))),
    Snippet("README.md", 0, SETUP + "\n".join([*lines_of_the_diff("-"), "assert engine.ledger.steps == 4"])),
]


def is_slow(snippet: Snippet) -> bool:
    return any(word in snippet.code for word in SLOW)


@pytest.fixture(scope="module")
def outcomes(request):
    """Runs the script of the README, and what else the chosen tests need."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    asked = {one.get(name) for one in params for name in ("snippet", "side")} | {*snippets_of("README.md")}
    return run([one for one in [*SNIPPETS, *SIDES] if not is_slow(one) and one in asked])


@pytest.mark.parametrize(
    "snippet",
    [
        pytest.param(one, marks=[] if one.page == "README.md" else pytest.mark.slow, id=one.id)
        for one in SNIPPETS
        if not is_slow(one)
    ],
)
def test_a_snippet_runs_in_its_own_process_without_a_warning(snippet, outcomes):
    assert outcomes[snippet].code == 0, outcomes[snippet].output


@pytest.mark.slow
@pytest.mark.parametrize("snippet", [s for s in SNIPPETS if is_slow(s)], ids=lambda s: s.id)
def test_a_slow_snippet_runs_in_its_own_process(snippet):
    if "lightning" in snippet.code:
        pytest.importorskip("lightning")
    outcome = run([snippet], warnings="default")[snippet]  # Lightning and Inductor use what torch deprecates
    assert outcome.code == 0, outcome.output
    assert "PrivacyWarning" not in outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES, ids=["before", "after"])
def test_both_sides_of_the_diff_run(side, outcomes):
    assert outcomes[side].code == 0, outcomes[side].output


def test_the_diff_and_the_script_are_those_of_the_quickstart(outcomes):
    (whole,) = snippets_of("README.md")
    assert f"`{outcomes[whole].output.strip()}`" in README
    assert whole.code == snippets_of("docs/quickstart.md")[0].code
    script = [line for line in snippets_of("docs/quickstart.md")[0].code.splitlines() if line]
    loop = [line for line in lines_of_the_diff("-") if not line.startswith("print(")]
    start = script.index(loop[0])
    assert script[start : start + len(loop)] == loop


def test_every_page_with_snippets_is_checked():
    pages = {page for page in PAGES if snippets_of(page)}
    assert pages == {snippet.page for snippet in SNIPPETS} | set(CHECKED_ELSEWHERE)
    assert all((ROOT / "tests" / file).exists() for file in CHECKED_ELSEWHERE.values())


# Figures


def test_the_ratios_of_the_figure_are_those_stored():
    drawn = re.findall(r"<!-- (\d+(?:\.\d+)?)(?: \((\w+)\))? -->", step_time_figure.FIGURE.read_text(encoding="utf-8"))
    stored = []
    for time in step_time_figure.step_times(RESULTS):
        for ratio, mode in ((time.dpengine, ""), (time.opacus, time.opacus_mode)):
            if ratio is not None:
                stored.append((f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}", mode))
    assert len(stored) >= 20
    assert drawn == stored, "run python -m benchmarks.step_time_figure"


def test_the_caption_of_the_readme_states_the_stored_figures():
    caption = step_time_figure.caption(RESULTS)
    assert caption in " ".join(README.split()), f"the caption is now: {caption}"
    assert f"for {len(step_time_figure.step_times(RESULTS))} models" in README


def test_a_mode_without_timing_or_with_another_mechanism_is_omitted():
    text = """
| cell | B | non-private ms | **auto** | hooks |
|---|---|---|---|---|
| one | 8 | 10.0 | 1.26 | - |
| two | 8 | 10.0 | 1.10 | 1.20 |

| ratio | opacus hooks | opacus ghost | opake |
|---|---|---|---|
| one | 2.50 | 11 | 1.01 |
| two | 1.05\\* | - | 1.02 |
"""
    one, two = step_time_figure.step_times(text)
    assert (one.dpengine, one.opacus, one.opacus_mode) == (1.26, 2.5, "hooks")
    assert (two.dpengine, two.opacus, two.opacus_mode) == (1.10, None, "")


@pytest.mark.slow
@pytest.mark.parametrize("snippet", snippets_of("docs/accounting.md"), ids=lambda s: s.id)
def test_the_epsilon_in_a_comment_of_the_accounting_page_is_the_one_printed(snippet, outcomes):
    (stated,) = re.findall(r"print\(.*\)  # ([\d.]+)$", snippet.code, flags=re.MULTILINE)
    assert outcomes[snippet].output == f"ε ≤ {stated}\n"


# Length and links


def words_of_prose(text: str) -> int:
    """Words outside of code blocks, tables, HTML tags and link targets. A word has a letter or a digit."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"<[^>]*>", "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return sum(any(character.isalnum() for character in word) for word in text.split())


def test_the_rule_for_counting_words():
    prose, table, code = (
        "# A title\n\nTwo [linked words](a b.md) — `code`.\n\n",
        "| no | table |\n",
        "```python\nno\n```\n",
    )
    text = f"{prose}{table}\n{code}<img src='no picture'>\n"
    assert words_of_prose(text) == 6


def test_the_readme_has_at_most_600_words_of_prose():
    assert words_of_prose(README) <= MOST_WORDS


def anchors(path: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/RESULTS.md"])
def test_relative_links_point_to_files_and_anchors(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)\s]+)\)", text) + re.findall(r'src="(?!https?:)([^"]+)"', text)
    broken = []
    for link in links:
        target, _, anchor = link.partition("#")
        path = ((ROOT / page).parent / target) if target else ROOT / page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    assert broken == []


def test_every_page_is_linked_from_the_readme():
    assert [page for page in PAGES[1:] if f"]({page})" not in README] == []
