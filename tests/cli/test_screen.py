import pytest

from dpengine.cli.screen import columns, strong


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
