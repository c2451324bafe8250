"""Prints results as Markdown tables, and draws a chart.

python -m benchmarks.table results.json more.json --plot ratios.svg
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterable
from typing import Any

from benchmarks.contenders import BASELINES, CONTENDERS, OUR_MODES

Results = dict[str, Any]
MAIN = "dpengine auto"


def merged(parts: Iterable[Results]) -> Results:
    """Merges files of results. If several files have a cell, the last one counts."""
    merged_results: Results = {}
    for part in parts:
        merged_results = {**merged_results, **part, "cells": {**merged_results.get("cells", {}), **part["cells"]}}
    return merged_results


def report(results: Results) -> str:
    """Returns all tables."""
    parts = [summary(results), peer_ratios(results), memory(results), failures(results)]
    return "\n\n".join(part for part in parts if part)


def summary(results: Results) -> str:
    """Returns a row for each cell: ratios of dpengine, the fastest sound peer, the target, and the excess over it."""
    lines = [
        f"| cell | B | non-private ms | {' | '.join(f'**{m}**' if m == 'auto' else m for m in OUR_MODES)} | "
        "fastest peer | auto / peer | target (stretch) | missed by |",
        "|" + "---|" * (len(OUR_MODES) + 7),
    ]
    for name, cell in results["cells"].items():
        rows = cell["results"]
        ours = [_ratio(rows.get(f"dpengine {mode}")) for mode in OUR_MODES]
        peer = fastest(cell)
        relative = _over(rows, MAIN, peer)
        cells = [
            *[name, str(cell["rows"]), f"{rows['plain']['median_ms']:.1f}" if "plain" in rows else "-"],
            *ours,
            "-" if peer is None else f"{peer} {_ratio(rows[peer])}",
            "-" if relative is None else f"{relative:.2f}",
            "; ".join(_goal(goal) for goal in cell["goals"]) or "-",
            "; ".join(_missed(cell, goal) for goal in cell["goals"]) or "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fastest(cell: Results, prefix: str = "") -> str | None:
    """Returns the fastest private, unlabelled contender of another library whose name starts with ``prefix``."""
    peers = [
        (row["median_ms"], name)
        for name, row in cell["results"].items()
        if name.startswith(prefix)
        and not name.startswith("dpengine ")
        and name not in BASELINES
        and name not in cell["labels"]
    ]
    return min(peers)[1] if peers else None


def detail(results: Results) -> str:
    """Returns a row for each contender of each cell."""
    lines = [
        "| cell | B | contender | ratio | median ms | min | IQR | steps | MiB first | later | deviation | overshoot |",
        "|" + "---|" * 12,
    ]
    for name, cell in results["cells"].items():
        for contender, row in cell["results"].items():
            usage, gate = cell["memory"].get(contender) or {}, cell["gate"].get(contender, {})
            mark = "*" if contender in cell["labels"] else ""
            own = f" ({row['own_ratio']:.2f} to its own)" if "own_ratio" in row else ""
            lines.append(
                f"| {name} | {cell['rows']} | {contender}{mark} | {_ratio(row)}{own} | {row['median_ms']:.1f} | "
                f"{row['min_ms']:.1f} | {row['iqr_ms']:.1f} | {row['steps']} | {_number(usage.get('first'), '.0f')} | "
                f"{_number(usage.get('later'), '.0f')} | {_number(gate.get('deviation'), '.0e')} | "
                f"{_number(gate.get('overshoot'), '.0e')} |"
            )
    return "\n".join(lines)


def peer_ratios(results: Results) -> str:
    """Returns each peer's ratio in each cell. A star marks a ratio that does not count, for the reason below."""
    names = _peers(results)
    if not names:
        return ""
    lines = [f"| ratio | {' | '.join(names)} |", "|" + "---|" * (len(names) + 1)]
    notes = {}
    for name, cell in results["cells"].items():
        marks = dict.fromkeys(cell["labels"], "\\*")
        ratios = [_ratio(cell["results"].get(contender)) + marks.get(contender, "") for contender in names]
        lines.append(f"| {name} | {' | '.join(ratios)} |")
        notes.update({(why, name): contender.split()[0] for contender, why in cell["labels"].items()})
    lines += ["", *[f"\\* {name}: {contender} {why}." for (why, name), contender in notes.items()]]
    return "\n".join(lines).rstrip()


def memory(results: Results) -> str:
    """Returns peak memory relative to the non-private step, in the first steps and in later ones."""
    measured = {name: cell for name, cell in results["cells"].items() if cell["memory"].get("plain")}
    names = [c for c in _all(measured.values()) if c not in BASELINES and not c.startswith("jax")]
    if not measured or not names:
        return ""
    head = ["memory, first / later steps", "non-private MiB", *names]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, cell in measured.items():
        base = cell["memory"]["plain"]
        shares = [
            f"{usage['first'] / base['first']:.2f} / {usage['later'] / base['later']:.2f}" if usage else "-"
            for usage in (cell["memory"].get(contender) for contender in names)
        ]
        lines.append(f"| {name} | {base['first']:.0f} / {base['later']:.0f} | {' | '.join(shares)} |")
    return "\n".join(lines)


def failures(results: Results) -> str:
    """Lists the contenders without a time, and the reasons."""
    lines = ["| no time | cells | why |", "|---|---|---|"]
    cells_of: dict[tuple[str, str], list[str]] = {}
    for name, cell in results["cells"].items():
        for contender, why in cell["failed"].items():
            cells_of.setdefault((contender, why), []).append(name)
    lines += [f"| {who} | {', '.join(where)} | {why.replace('|', '/')} |" for (who, why), where in cells_of.items()]
    lines += [f"| {who} | all | {why} |" for who, why in results.get("not_run", {}).items()]
    return "\n".join(lines) if len(lines) > 2 else ""


def pyplot() -> Any:
    """Returns ``matplotlib.pyplot`` with a backend for files. Raises ImportError if it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'dpengine[plots]'") from error
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def plot(results: Results, path: str) -> None:
    """Draws a bar chart of ratios on a logarithmic axis: dpengine and the fastest mode of each library."""
    plt = pyplot()
    libraries = list(dict.fromkeys(name.split()[0] for name in _peers(results)))
    cells = {name: cell for name, cell in results["cells"].items() if cell["results"]}
    figure, axes = plt.subplots(figsize=(max(6.0, 1.1 * len(cells)), 4.2), layout="constrained")
    width = 0.8 / (len(libraries) + 1)
    for number, library in enumerate(["dpengine", *libraries]):
        heights = [_height(cell, library) for cell in cells.values()]
        positions = [k + (number + 0.5) * width - 0.4 for k in range(len(cells))]
        axes.bar(positions, [max(h - 1, 0.0) for h in heights], width, bottom=1.0, label=library)
    for k, cell in enumerate(cells.values()):
        targets = [goal["target"] for goal in cell["goals"] if goal["against"] == "plain"]
        axes.hlines(targets, k - 0.4, k + 0.4, colors="black", linewidth=1, label="target" if k == 0 else None)
    axes.set_yscale("log")
    axes.set_xticks(range(len(cells)), list(cells), rotation=30, ha="right")
    axes.set_ylabel("time of a private step / ordinary step")
    axes.legend(fontsize="small", ncols=3)
    figure.savefig(path)
    plt.close(figure)


def _height(cell: Results, library: str) -> float:
    name = MAIN if library == "dpengine" else fastest(cell, library)
    return cell["results"][name]["ratio"] if name in cell["results"] else 1.0


def _peers(results: Results) -> list[str]:
    return [c for c in _all(results["cells"].values()) if c not in BASELINES and not c.startswith("dpengine ")]


def _all(cells: Iterable[Results]) -> list[str]:
    found = dict.fromkeys(contender for cell in cells for contender in cell["results"])
    return [*[name for name in CONTENDERS if name in found], *[name for name in found if name not in CONTENDERS]]


def _goal(goal: dict[str, Any]) -> str:
    stretch = f" ({goal['stretch']:.2f})" if goal["stretch"] is not None else ""
    against = "" if goal["against"] == "plain" else f" of {goal['against']}"
    return f"{goal['target']:.2f}{stretch}{against}"


def _missed(cell: Results, goal: dict[str, Any]) -> str:
    rows = cell["results"]
    other = "plain" if goal["against"] == "plain" else fastest(cell, goal["against"])
    reached = _over(rows, MAIN, other)
    if reached is None:
        return "no time"
    if reached <= goal["target"]:
        stretched = goal["stretch"] is not None and reached <= goal["stretch"]
        return "met, stretch too" if stretched else "met"
    return f"{100 * (reached / goal['target'] - 1):.0f} %"


def _over(rows: dict[str, dict[str, float]], first: str, second: str | None) -> float | None:
    if first not in rows or second not in rows:
        return None
    return rows[first]["median_ms"] / rows[second]["median_ms"]


def _ratio(row: dict[str, float] | None) -> str:
    return "-" if row is None else f"{row['ratio']:.{2 if row['ratio'] < 10 else 0}f}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main() -> None:
    """Prints the tables of some files of results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--plot")
    arguments = parser.parse_args()
    parts = []
    for path in arguments.files:
        with open(path) as file:
            parts.append(json.load(file))
    results = merged(parts)
    print(f"{report(results)}\n\n{detail(results)}")
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
