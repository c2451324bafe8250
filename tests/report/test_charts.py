import re

import pytest

from dpengine.report.charts import Axis, Line, line_chart


@pytest.mark.parametrize("high", [1e-4, 0.37, 1.0, 2.24, 480, 30_000])
def test_an_axis_has_two_to_six_round_ticks_inside_its_range(high):
    ticks = Axis("x", 0.0, high, str).ticks()
    assert 2 <= len(ticks) <= 6
    assert ticks[0] == 0.0
    assert ticks[-1] <= high * (1 + 1e-9)
    assert float(f"{ticks[1]:.0e}") == pytest.approx(ticks[1])


def test_the_corners_of_the_range_are_the_corners_of_the_frame():
    axis = Axis("x", 0.0, 2.0, str)
    svg = line_chart("t", axis, axis, [Line(((0.0, 0.0), (2.0, 2.0)), "line", "end")])
    (points,) = re.findall(r'<polyline class="line" points="([^"]*)"', svg)
    assert points == "76.0,252.0 496.0,18.0"
    assert ">end</text>" in svg
    assert svg.startswith("<svg") and svg.endswith("</svg>")
