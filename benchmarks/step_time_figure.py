"""Draws the figure of step times in the README from RESULTS.md: ``python -m benchmarks.step_time_figure``."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.table import pyplot

RESULTS = Path(__file__).with_name("RESULTS.md")
FIGURE = Path(__file__).with_name("step_time.svg")

DESCRIPTIONS = {
    "mlp": "MLP",
    "mlp-1024": "MLP",
    "cnn": "small CNN",
    "wrn": "Wide ResNet 16-4",
    "vit": "vision transformer",
    "bert": "BERT-mini",
    "gpt": "GPT-mini, tied head",
    "lstm": "LSTM",
    "embedding": "embedding classifier",
    "lora": "BERT-mini, LoRA",
    "bitfit": "BERT-mini, BitFit",
    "bert-per-layer": "BERT-mini, per-layer clipping",
    "fallback": "custom layer",
}
NON_PRIVATE, DPENGINE, OPACUS = "#555555", "#0b6e5f", "#c4622d"


@dataclass(frozen=True)
class StepTime:
    """Step time of one model, as a ratio to the non-private step.

    Attributes:
        cell: Name of the benchmark cell.
        batch_size: Number of samples in a batch.
        dpengine: Ratio of dpengine in its default mode.
        opacus: Ratio of the fastest mode of Opacus that runs the same mechanism; None if there is none.
        opacus_mode: Name of that mode; empty if there is none.
    """

    cell: str
    batch_size: int
    dpengine: float
    opacus: float | None
    opacus_mode: str

    @property
    def label(self) -> str:
        """Returns the name of the model and its batch size."""
        return f"{DESCRIPTIONS.get(self.cell, self.cell)}  (batch {self.batch_size})"


def step_times(text: str) -> list[StepTime]:
    """Reads the two tables of step times.

    Args:
        text: The content of RESULTS.md.

    Returns:
        One entry for each cell, in the order of the table.

    Raises:
        ValueError: If a table is missing.
    """  # noqa: DOC502 - raised by _table
    ours = _table(text, "cell")
    peers = _table(text, "ratio")
    found = []
    for cell, row in ours.items():
        opacus = {
            name.removeprefix("opacus "): float(value)
            for name, value in peers.get(cell, {}).items()
            if name.startswith("opacus ") and re.fullmatch(r"[\d.]+", value)  # "-": not timed; "*": another mechanism
        }
        mode = min(opacus, key=lambda name: opacus[name]) if opacus else ""
        found.append(StepTime(cell, int(row["B"]), float(row["**auto**"]), opacus.get(mode), mode))
    return found


def _table(text: str, first_column: str) -> dict[str, dict[str, str]]:
    """Returns the rows of the first table whose first column has this title, by their first entry."""
    lines = text.splitlines()
    start = next((k for k, line in enumerate(lines) if line.startswith(f"| {first_column} |")), None)
    if start is None:
        raise ValueError(f"{RESULTS.name} has no table whose first column is {first_column!r}.")
    titles = _entries(lines[start])
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        entries = _entries(line)
        rows[entries[0]] = dict(zip(titles, entries, strict=True))
    return rows


def _entries(line: str) -> list[str]:
    return [entry.strip() for entry in line.strip().strip("|").split("|")]


def machine(text: str) -> str:
    """Describes the machine and the versions of the measurement, as stated in RESULTS.md.

    Args:
        text: The content of RESULTS.md.

    Returns:
        A phrase for a caption.

    Raises:
        ValueError: If one of them is missing.
    """
    section = " ".join(text.split("\n## Steps\n")[1].split("\n## ")[0].split())
    cores, threads = re.search(r"(\d+) CPU cores", section), re.search(r"(\d+) threads", section)
    torch, opacus = re.search(r"torch ([\d.]*\d)", section), re.search(r"Opacus ([\d.]*\d)", section)
    if not (cores and threads and torch and opacus):
        raise ValueError(f"The section 'Steps' of {RESULTS.name} does not name the machine and the versions.")
    return (
        f"{cores[1]} virtual CPU cores (x86-64), {threads[1]} threads, torch {torch[1]}, Opacus {opacus[1]}, "
        "float32, SGD"
    )


def caption(text: str) -> str:
    """Returns the caption of the figure: medians, the cells in which Opacus is faster, machine and versions.

    Args:
        text: The content of RESULTS.md.

    Returns:
        Text with all figures taken from the tables.
    """
    times = step_times(text)
    both = [(time.dpengine, time.opacus, time.cell) for time in times if time.opacus is not None]
    ours, theirs = (statistics.median(values) for values in list(zip(*both, strict=True))[:2])
    faster = [
        f"{DESCRIPTIONS.get(cell, cell).replace(', ', ' with ')} ({theirs:.2f} against {ours:.2f})"
        for ours, theirs, cell in both
        if theirs < ours
    ]
    return (
        f"Step time relative to non-private training (1.00); log scale. Median over the {len(both)} models that both "
        f"libraries ran: dpengine {ours:.2f}, Opacus in its fastest mode {theirs:.2f}. "
        f"Opacus is faster for {' and '.join(faster) or 'none'}. Measured on {machine(text)}."
    )


def draw(times: list[StepTime], path: Path) -> None:
    """Draws two bars for each model, from the non-private step on: dpengine, and Opacus in its fastest mode.

    Args:
        times: The step times, from the first row to the last.
        path: Path of the SVG file.
    """
    plt = pyplot()
    plt.rcParams["svg.hashsalt"] = "dpengine"  # the same figures give the same file
    figure, axes = plt.subplots(figsize=(8.4, 0.44 * len(times) + 1.2), layout="constrained")
    for row, time in enumerate(times):
        _bar(axes, row - 0.19, time.dpengine, DPENGINE, label=None if row else "dpengine")
        if time.opacus is None:
            axes.text(1.03, row + 0.19, "no comparable run", color="#888888", fontsize=8, va="center")
        else:
            label = None if row else "Opacus, fastest mode"
            _bar(axes, row + 0.19, time.opacus, OPACUS, label=label, note=f"({time.opacus_mode})")
    axes.axvline(1.0, color=NON_PRIVATE, linewidth=1.4, label="non-private step")
    axes.set_xscale("log")
    axes.set_xlim(0.97, 1.9 * max(value for time in times for value in (time.dpengine, time.opacus or 0.0)))
    ticks = [1, 2, 4, 8, 16, 32]
    axes.set_xticks(ticks, [f"{tick}×" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(times)), [time.label for time in times])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(times) - 0.45, -0.55)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("time of a private step / time of a non-private step")
    axes.legend(loc="upper right", frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _bar(axes: Any, y: float, value: float, color: str, *, label: str | None, note: str = "") -> None:
    axes.barh(y, value - 1.0, 0.36, left=1.0, color=color, label=label)
    text = f"{value:.2f}" if value < 10 else f"{value:.0f}"
    end = (max(value, 1.0), y)
    axes.annotate(
        f"{text} {note}".rstrip(), end, (4, 0), textcoords="offset points", va="center", color=color, fontsize=8
    )


def main() -> None:
    """Draws the figure and prints its caption."""
    text = RESULTS.read_text(encoding="utf-8")
    draw(step_times(text), FIGURE)
    print(caption(text))


if __name__ == "__main__":
    main()
