import pytest

from dpengine.cli.screen import WIDTH, columns, line, strong, table


def test_a_table_is_framed_and_aligned():
    assert table(("run", "ε"), [("private", "0.50"), ("x", "∞")], "<^").splitlines() == [
        "┌─────────┬──────┐",
        "│   run   │  ε   │",
        "├─────────┼──────┤",
        "│ private │ 0.50 │",
        "│ x       │  ∞   │",
        "└─────────┴──────┘",
    ]


def test_a_line_has_its_figure_at_the_right_edge():
    text = line("training", "6.1 s")
    assert len(text) == WIDTH
    assert text.startswith("training ")
    assert text.endswith(" 6.1 s")


def test_a_long_line_keeps_its_figure():
    assert line("x" * WIDTH, "6.1 s") == "x" * WIDTH + "  6.1 s"
    assert line("alone") == "alone"


def test_columns_line_up_and_leave_no_blanks_at_the_end():
    assert columns([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc  d"


@pytest.mark.parametrize(
    ("terminal", "environment", "bold"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (True, {"NO_COLOR": ""}, True),  # an empty value does not count, says no-color.org
    ],
)
def test_emphasis_is_for_terminals_that_want_it(monkeypatch, terminal, environment, bold):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    assert strong("x") == ("\033[1mx\033[0m" if bold else "x")
