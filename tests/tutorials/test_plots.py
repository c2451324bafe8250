import math
import random
import re
import sys

import pytest

from dpengine.errors import MissingDependencyError
from tutorials.demo import plots
from tutorials.demo.plots import TrainedRun


def trained(seeds=5, delta=1e-5):
    draw = random.Random(0)
    runs = [
        TrainedRun(eps, mean + draw.gauss(0, 0.001), seed, delta)
        for eps, mean in ((0.49999, 0.8486), (1.0, 0.8493), (2.9999, 0.8497))
        for seed in range(seeds)
    ]
    return [*runs, TrainedRun(math.inf, 0.8513)]


def pixels(path):
    from matplotlib.image import imread

    return imread(path)


def test_a_png_and_an_svg_are_written_and_readable(tmp_path):
    png, svg = plots.tradeoff(trained(), tmp_path / "runs" / "tradeoff.png", title="Census")
    assert (png.name, svg.name) == ("tradeoff.png", "tradeoff.svg")
    image = pixels(png)
    assert image.shape[0] >= 700
    assert image.shape[1] >= 1000
    assert (image[0, 0, :3] == 1).all()  # opaque white background, readable on dark pages
    dark = (image[..., :3].mean(axis=-1) < 0.5).mean()
    assert 0.003 < dark < 0.2


def test_the_picture_states_seeds_delta_epsilons_and_the_non_private_line(tmp_path):
    _, svg = plots.tradeoff(trained(), tmp_path / "tradeoff")
    text = svg.read_text(encoding="utf-8")
    for part in (
        "δ = 1e-05",
        "5 seeds",
        "standard deviation",
        "log scale",
        ">0.5<",
        ">1<",
        ">3<",
        ">non-private<",
        ">85.1 %<",
    ):
        assert part in text, part
    assert "stroke-dasharray" in text


def test_accuracy_axis_has_a_minimum_range(tmp_path):
    _, svg = plots.tradeoff(trained(), tmp_path / "tradeoff")
    ticks = [float(tick) for tick in re.findall(r">([0-9.]+) %<", svg.read_text(encoding="utf-8"))]
    assert 83 <= min(ticks) <= 84.5 and 85.5 <= max(ticks) <= 87


@pytest.mark.slow
def test_label_states_the_number_or_range_of_seeds(tmp_path):
    _, svg = plots.tradeoff(trained(seeds=1), tmp_path / "one")
    assert "1 seed<" in svg.read_text(encoding="utf-8")
    _, svg = plots.tradeoff([*trained(), TrainedRun(1.0, 0.85, 9, 1e-5)], tmp_path / "two")
    assert "5 to 6 seeds" in svg.read_text(encoding="utf-8")


def test_seeds_of_one_setting_are_grouped_under_the_largest_epsilon(tmp_path):
    runs = [TrainedRun(1.00004, 0.8, 0, 1e-5), TrainedRun(0.99998, 0.9, 1, 1e-5)]
    _, svg = plots.tradeoff(runs, tmp_path / "tradeoff")
    text = svg.read_text(encoding="utf-8")
    assert "2 seeds" in text
    assert ">1.01<" in text


def test_run_without_data_is_drawn_as_a_line(tmp_path):
    _, svg = plots.tradeoff([*trained(), TrainedRun(0.0, 0.7638)], tmp_path / "tradeoff")
    text = svg.read_text(encoding="utf-8")
    assert ">no data<" in text and ">76.4 %<" in text


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([], "no private run"),
        ([TrainedRun(math.inf, 0.9)], "no private run"),
        ([TrainedRun(1.0, 0.9)], "got None"),
        (trained() + trained(delta=1e-6), "1e-05, 1e-06"),
        ([TrainedRun(math.nan, 0.9, delta=1e-5)], "epsilon=nan"),
        ([TrainedRun(-1.0, 0.9, delta=1e-5)], "epsilon=-1.0"),
    ],
)
def test_runs_that_share_no_axis_are_rejected(tmp_path, runs, message):
    with pytest.raises(ValueError, match=message):
        plots.tradeoff(runs, tmp_path / "tradeoff")


@pytest.mark.slow
def test_equal_runs_give_equal_plots(tmp_path):
    first, second = (plots.tradeoff(trained(), tmp_path / name) for name in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.slow
def test_the_users_style_is_neither_used_nor_changed(tmp_path):
    import matplotlib

    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30}):
        plots.tradeoff(trained(), tmp_path / "styled")
        assert matplotlib.rcParams["font.size"] == 30
    plots.tradeoff(trained(), tmp_path / "plain")
    assert (tmp_path / "styled.png").read_bytes() == (tmp_path / "plain.png").read_bytes()


def test_missing_matplotlib_raises_and_suggests_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"DPE020.*matplotlib.*pip install 'dpengine.plots.'"):
        plots.tradeoff(trained(), tmp_path / "tradeoff")
    assert list(tmp_path.iterdir()) == []
