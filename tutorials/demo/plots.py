"""Plots the trade-off between epsilon and quality."""

from __future__ import annotations

import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpengine.accounting.rounding import round_up, round_up_delta
from dpengine.errors import MissingDependencyError

_INK, _SOFT, _RULE, _ACCENT = "#1d1c1a", "#66635c", "#e2dfd6", "#0b6b5e"
_MIN_SPAN = 0.04  # minimum range of the axis of an accuracy


@dataclass(frozen=True)
class TrainedRun:
    """One trained model, as a point of the trade-off.

    Attributes:
        epsilon: Privacy cost: infinity for a run without privacy, and 0 without data, such as the majority class.
        score: Value of the metric.
        seed: Identifies repetitions of one setting.
        delta: Delta of ``epsilon``. Not needed if epsilon is 0 or infinite.
    """

    epsilon: float
    score: float
    seed: int = 0
    delta: float | None = None


def tradeoff(
    runs: Iterable[TrainedRun],
    path: str | os.PathLike[str],
    *,
    metric: str = "accuracy",
    title: str = "",
    percent: bool = True,
) -> list[Path]:
    """Plots quality over epsilon: each seed as a dot, each epsilon as mean and standard deviation over its seeds.

    Runs without privacy are a dashed line, and runs without data a dotted line. The title states delta and the number
    of seeds. Raises ValueError if private runs have different deltas, because they cannot share an axis.
    """
    scores, delta = _grouped(runs)
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import PercentFormatter
    except ImportError as error:
        raise MissingDependencyError("matplotlib is needed for plots:", fix="pip install 'dpengine[plots]'") from error
    # A separate figure and default settings do not depend on the state of pyplot and the user's style.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rc("svg", fonttype="none", hashsalt="dpengine")  # keeps text as text, and makes files reproducible
        figure = Figure(figsize=(6.4, 4.2), layout="constrained", facecolor="white")
        _draw(figure.add_subplot(), scores, metric, percent)
        if percent:
            figure.axes[0].yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=1, symbol=" %"))
        lead = f"{title}: " if title else ""
        figure.suptitle(f"{lead}{metric} by ε", x=0.02, ha="left", color=_INK, fontsize=12, fontweight="bold")
        figure.axes[0].set_title(_subtitle(scores, delta), loc="left", color=_SOFT, fontsize=9)
        png, svg = (Path(path).with_suffix(suffix) for suffix in (".png", ".svg"))
        png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, dpi=180, metadata={"Software": None})
        figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return [png, svg]


def _grouped(runs: Iterable[TrainedRun]) -> tuple[dict[float, list[float]], float]:
    groups: defaultdict[str, list[TrainedRun]] = defaultdict(list)
    deltas: set[float | None] = set()
    for run in runs:
        if not run.epsilon >= 0:
            raise ValueError(f"plots.tradeoff: epsilon={run.epsilon!r} is not a number of at least 0.")
        # The epsilons of one setting differ only by the tolerance of the calibration.
        groups[format(run.epsilon, ".4g")].append(run)
        if 0 < run.epsilon < math.inf:
            deltas.add(run.delta)
    delta = min(deltas, key=str, default=None)
    if delta is None or len(deltas) > 1:
        shown = ", ".join(sorted(map(str, deltas))) or "no private run"
        raise ValueError(
            f"plots.tradeoff: private runs must share one delta, got {shown}. Make one plot for each delta."
        )
    scores = {max(run.epsilon for run in group): [run.score for run in group] for group in groups.values()}
    return dict(sorted(scores.items())), delta


def _draw(axes: Any, scores: Mapping[float, list[float]], metric: str, percent: bool) -> None:
    private = {eps: values for eps, values in scores.items() if 0 < eps < math.inf}
    means = [statistics.fmean(values) for values in private.values()]
    deviations = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in private.values()]
    for eps, values in private.items():
        axes.plot([eps] * len(values), values, "o", color=_ACCENT, alpha=0.3, markersize=4, markeredgewidth=0)
    axes.errorbar(
        list(private), means, yerr=deviations, color=_ACCENT, marker="o", markersize=6, capsize=3, linewidth=1.6
    )
    for (eps, values), mean, deviation in zip(private.items(), means, deviations, strict=True):
        lowest = min([*values, mean - deviation])  # below all marks
        text = {"textcoords": "offset points", "ha": "center", "va": "top", "color": _INK, "fontsize": 9}
        axes.annotate(_score(mean, percent), (eps, lowest), (0, -9), **text)
    for eps, name, style in ((math.inf, "non-private", "--"), (0.0, "no data", ":")):
        if eps in scores:
            mean = statistics.fmean(scores[eps])
            axes.axhline(mean, color=_SOFT, linestyle=style, linewidth=1.2)
            text = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "color": _SOFT, "fontsize": 9}
            axes.annotate(f"{name}\n{_score(mean, percent)}", (1.0, mean), (6, 0), va="center", **text)
    axes.set_xscale("log")
    axes.set_xticks(list(private), [round_up(eps).rstrip("0").rstrip(".") for eps in private])
    axes.minorticks_off()
    axes.margins(x=0.12, y=0.22)
    low, high = axes.get_ylim()
    if percent and high - low < _MIN_SPAN:  # a smaller range would exaggerate differences between seeds
        middle = (low + high) / 2
        axes.set_ylim(middle - _MIN_SPAN / 2, middle + _MIN_SPAN / 2)
    axes.set_xlabel("ε (log scale; smaller is more private)", color=_SOFT)
    axes.set_ylabel(metric, color=_SOFT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_SOFT)
    axes.tick_params(colors=_SOFT)
    axes.grid(axis="y", color=_RULE, linewidth=0.8)
    axes.set_axisbelow(True)


def _score(value: float, percent: bool) -> str:
    return f"{100 * value:.1f} %" if percent else f"{value:.4g}"


def _subtitle(scores: Mapping[float, list[float]], delta: float) -> str:
    counts = {len(values) for eps, values in scores.items() if 0 < eps < math.inf}
    low, high = min(counts), max(counts)
    seeds = f"{low}" if low == high else f"{low} to {high}"
    spread = ", mean ± standard deviation" if high > 1 else ""
    return f"δ = {round_up_delta(delta)} · {seeds} seed{'s' if high > 1 else ''}{spread}"
