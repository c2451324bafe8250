from tutorials.demo.screen import WIDTH, line, table


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
