"""Tables of `accounting`."""

from __future__ import annotations

import collections
import statistics
from typing import Any

from .accounting_settings import Setting

MAX_EXCESS = 1e-3  # relative; settings at which ours exceeds the truth by more are listed
_ROUNDING = 1e-12  # relative, of a truth
_EPSILON_EVERY_STEP = "dpengine pld"

Row = dict[str, Any]


def report(results: dict[str, Any], truths: Row) -> str:
    """Returns all tables for which there are results."""
    settings = truths["settings"]
    tools = [tool for tool, found in results.items() if "settings" in found]
    judged = {tool: judge(results[tool]["settings"], settings) for tool in tools}
    parts = [references(truths), soundness(judged), costs(judged), by_class(judged, settings), misses(judged)]
    parts += [failures(judged), every_step(results), calibration(results)]
    missing = [f"{tool}: {found['missing']}" for tool, found in results.items() if "missing" in found]
    return "\n\n".join([*(part for part in parts if part), *missing])


def judge(answers: dict[str, Row], settings: list[Row]) -> list[Row]:
    """Returns the results of a tool together with the truths."""
    judged = []
    for row in settings:
        key = Setting.from_json(row).key
        if key not in answers:
            continue
        one = {**answers[key], "setting": row}
        truth, doubt = row["epsilon"], row["error"] + _ROUNDING * row["epsilon"]
        if "upper" in one:
            one["excess"] = one["upper"] / truth - 1
            one["below"] = one["upper"] < truth - doubt
            if one["lower"] is not None:
                one["above"] = one["lower"] > truth + doubt
                one["loose"] = 1 - max(0.0, one["lower"]) / truth
        judged.append(one)
    return judged


def references(truths: Row) -> str:
    """Describes the sources of the truths, and the settings that were dropped."""
    methods = collections.Counter(row["reference"] for row in truths["settings"])
    worst = {
        method: max(r["error"] / r["epsilon"] for r in truths["settings"] if r["reference"] == method)
        for method in methods
    }
    why = collections.Counter(row["why"] for row in truths["dropped"])
    rows = [[method, str(number), f"{worst[method]:.0e}"] for method, number in methods.most_common()]
    off = [abs(row["float64_off"]) for row in truths["settings"] if "float64_off" in row]
    lines = [table(["method", "settings", "largest relative error"], rows)]
    if off:
        lines.append(
            f"The float64 errors of the {len(off)} contour integrals that were recomputed in 30 digits were at most "
            f"{max(off):.0e} of epsilon (median {statistics.median(off):.0e})."
        )
    lines.append("Dropped: " + "; ".join(f"{number} {name}" for name, number in why.most_common()) + ".")
    return "\n\n".join(lines)


def soundness(judged: dict[str, list[Row]]) -> str:
    """Counts the results of each tool below the truth, and shows the excess of the others."""
    head = ["tool", "settings", "not applied", "failed or ∞", "**below the truth**", "lower bound above it"]
    head += ["excess, median", "95 %", "largest", "lower bound short by, median", "95 %", "largest"]
    rows = []
    for tool, ones in judged.items():
        done = [one for one in ones if "excess" in one]
        excess, loose = [one["excess"] for one in done], [one["loose"] for one in done if "loose" in one]
        counts = [len(ones), sum("not applied" in one for one in ones), sum("failed" in one for one in ones)]
        counts.append(sum(one["below"] for one in done))
        above = str(sum(one.get("above", False) for one in done)) if loose else "-"
        rows.append([tool, *map(str, counts), above, *spread(excess, ".1e"), *spread(loose, ".1e")])
    return table(head, rows)


def costs(judged: dict[str, list[Row]]) -> str:
    """Shows the processor time and memory of one epsilon without cached results."""
    head = ["tool", "CPU s, median", "95 %", "largest", "peak MiB, median", "95 %", "largest"]
    rows = []
    for tool, ones in judged.items():
        applied = [one for one in ones if "not applied" not in one]
        seconds, mib = [one["seconds"] for one in applied], [one["mib"] for one in applied]
        rows.append([tool, *spread(seconds, ".3f"), *spread(mib, ".0f")])
    return table(head, rows)


def by_class(judged: dict[str, list[Row]], settings: list[Row]) -> str:
    """Shows for each class and tool the largest excess, and the numbers of failures and of results below the truth."""
    numbers = collections.Counter(row["class"] for row in settings)
    rows = []
    for name, number in numbers.items():
        cells = [name, str(number)]
        for ones in judged.values():
            mine = [one for one in ones if one["setting"]["class"] == name]
            excess = [one["excess"] for one in mine if "excess" in one]
            failed, below = sum("failed" in one for one in mine), sum(one.get("below", False) for one in mine)
            notes = (f", {failed} failed" if failed else "") + (f", **{below} below**" if below else "")
            cells.append((f"{max(excess):.0e}" if excess else "-") + notes)
        rows.append(cells)
    return table(["class, largest excess", "settings", *judged], rows)


def misses(judged: dict[str, list[Row]]) -> str:
    """Lists all settings at which ours is below the truth, fails, or is more than ``MAX_EXCESS`` above."""
    rows = []
    for tool, ones in judged.items():
        if not tool.startswith("dpengine pld"):
            continue
        for one in ones:
            if "failed" in one:
                result = one["failed"]
            elif one["below"] or one["excess"] > MAX_EXCESS:
                result = f"excess {one['excess']:.1e}"
            elif one.get("above"):
                result = f"lower bound above by {-one['loose']:.1e}"
            else:
                continue
            rows.append([tool, str(Setting.from_json(one["setting"])), f"{one['setting']['epsilon']:.6g}", result])
    listed = table(["tool", "setting", "epsilon", "result"], rows)
    return (
        listed if rows else f"`pld` never fails, is never below the truth, and never more than {MAX_EXCESS:g} above it."
    )


def failures(judged: dict[str, list[Row]]) -> str:
    """Counts the errors of each tool."""
    rows = []
    for tool, ones in judged.items():
        why = collections.Counter(one["failed"].split(":")[0] for one in ones if "failed" in one)
        rows += [[tool, reason, str(number)] for reason, number in why.most_common()]
    return table(["tool", "fails with", "settings"], rows) if rows else ""


def every_step(results: dict[str, Any]) -> str:
    """Shows the cost of epsilon after every step; for other tools than ours, of epsilon after the last step."""
    from .accounting import EVERY, EVERY_STEPS

    if not any("every" in found for found in results.values()):
        return ""
    head = ["tool"] + [f"q={run['rate']:.3g}, σ={run['sigma']:g}, δ={run['delta']:g}" for run in EVERY]
    rows = []
    for tool, found in results.items():
        cells = [
            one.get("failed") or f"ε={one['upper']:.5g}: {millis(one['seconds'], tool, EVERY_STEPS)}"
            for one in found.get("every", [])
        ]
        if cells:
            rows.append([tool, *cells])
    return table(head, rows)


def millis(seconds: float, tool: str, steps: int) -> str:
    """Describes the time for one epsilon."""
    if tool != _EPSILON_EVERY_STEP:
        return f"{seconds * 1e3:.0f} ms, once"
    return f"{seconds / steps * 1e3:.3f} ms each, {seconds:.0f} s in total"


def calibration(results: dict[str, Any]) -> str:
    """Shows the time to calibrate the noise."""
    rows = []
    for tool, found in results.items():
        done = [one for one in found.get("noise", []) if "not applied" not in one]
        good = [one["seconds"] for one in done if "noise" in one]
        if good:
            first = ", ".join(f"{one['noise']:.5f}" if "noise" in one else "failed" for one in done[:3])
            rows.append([tool, str(len(done)), *spread(good, ".3f"), first])
    return table(["calibration", "targets", "CPU s, median", "95 %", "largest", "noise of the first 3"], rows)


def spread(values: list[float], form: str) -> list[str]:
    """Formats the median, the 95 % quantile and the maximum."""
    if not values:
        return ["-"] * 3
    ranked = sorted(values)
    figures = statistics.median(ranked), ranked[min(len(ranked) - 1, round(0.95 * (len(ranked) - 1)))], ranked[-1]
    return [format(value, form) for value in figures]


def table(head: list[str], rows: list[list[str]]) -> str:
    """Formats a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
