"""The tables of `accounting`."""

from __future__ import annotations

import collections
import statistics
from typing import Any

from .accounting_settings import Setting

FAR = 1e-3  # what ours exceeds the truth by, at most, or is listed
_ROUNDING = 1e-12  # of a truth
_EPSILON_EVERY_STEP = "dpengine pld"

Row = dict[str, Any]


def report(results: dict[str, Any], truths: Row) -> str:
    """All tables that there are results for."""
    settings = truths["settings"]
    tools = [tool for tool, found in results.items() if "settings" in found]
    judged = {tool: judge(results[tool]["settings"], settings) for tool in tools}
    parts = [references(truths), soundness(judged), costs(judged), by_class(judged, settings), misses(judged)]
    parts += [failures(judged), every_step(results), calibration(results)]
    missing = [f"{tool}: {found['missing']}" for tool, found in results.items() if "missing" in found]
    return "\n\n".join([*(part for part in parts if part), *missing])


def judge(answers: dict[str, Row], settings: list[Row]) -> list[Row]:
    """Each answer beside the truth."""
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
    ways = collections.Counter(row["reference"] for row in truths["settings"])
    worst = {way: max(r["error"] / r["epsilon"] for r in truths["settings"] if r["reference"] == way) for way in ways}
    why = collections.Counter(row["why"] for row in truths["dropped"])
    rows = [[way, str(number), f"{worst[way]:.0e}"] for way, number in ways.most_common()]
    off = [abs(row["float64_off"]) for row in truths["settings"] if "float64_off" in row]
    lines = [table(["truth by", "settings", "largest relative error"], rows)]
    if off:
        lines.append(
            f"The {len(off)} contour integrals that were done again in 30 digits had been off by at most "
            f"{max(off):.0e} of epsilon in float64 (median {statistics.median(off):.0e})."
        )
    lines.append("Dropped: " + "; ".join(f"{number} {name}" for name, number in why.most_common()) + ".")
    return "\n\n".join(lines)


def soundness(judged: dict[str, list[Row]]) -> str:
    """Lists the tools below the truth, and their distance above it."""
    head = ["tool", "asked", "not applied", "failed or ∞", "**below the truth**", "lower bound above it"]
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
    """Processor time and memory of a fresh question."""
    head = ["tool", "CPU s, median", "95 %", "largest", "peak MiB, median", "95 %", "largest"]
    rows = []
    for tool, ones in judged.items():
        there = [one for one in ones if "not applied" not in one]
        seconds, mib = [one["seconds"] for one in there], [one["mib"] for one in there]
        rows.append([tool, *spread(seconds, ".3f"), *spread(mib, ".0f")])
    return table(head, rows)


def by_class(judged: dict[str, list[Row]], settings: list[Row]) -> str:
    """Number of settings; for each tool, the largest excess, how many failed and how many are below the truth."""
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
    """Every setting at which ours is below the truth, fails, or is far above."""
    rows = []
    for tool, ones in judged.items():
        if not tool.startswith("dpengine pld"):
            continue
        for one in ones:
            if "failed" in one:
                said = one["failed"]
            elif one["below"] or one["excess"] > FAR:
                said = f"excess {one['excess']:.1e}"
            elif one.get("above"):
                said = f"lower bound above by {-one['loose']:.1e}"
            else:
                continue
            rows.append([tool, str(Setting.from_json(one["setting"])), f"{one['setting']['epsilon']:.6g}", said])
    listed = table(["tool", "setting", "epsilon", "what"], rows)
    return listed if rows else f"`pld` is nowhere below the truth, fails nowhere, and exceeds it by {FAR:g} nowhere."


def failures(judged: dict[str, list[Row]]) -> str:
    """Lists the errors of tools."""
    rows = []
    for tool, ones in judged.items():
        why = collections.Counter(one["failed"].split(":")[0] for one in ones if "failed" in one)
        rows += [[tool, reason, str(number)] for reason, number in why.most_common()]
    return table(["tool", "fails with", "settings"], rows) if rows else ""


def every_step(results: dict[str, Any]) -> str:
    """Ours after every step; others once."""
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
    """A loop's share of one question, or the one question."""
    if tool != _EPSILON_EVERY_STEP:
        return f"{seconds * 1e3:.0f} ms, once"
    return f"{seconds / steps * 1e3:.3f} ms each, {seconds:.0f} s in all"


def calibration(results: dict[str, Any]) -> str:
    """Time to find the noise."""
    rows = []
    for tool, found in results.items():
        done = [one for one in found.get("noise", []) if "not applied" not in one]
        good = [one["seconds"] for one in done if "noise" in one]
        if good:
            first = ", ".join(f"{one['noise']:.5f}" if "noise" in one else "failed" for one in done[:3])
            rows.append([tool, str(len(done)), *spread(good, ".3f"), first])
    return table(["calibration", "targets", "CPU s, median", "95 %", "largest", "noise of the first 3"], rows)


def spread(values: list[float], form: str) -> list[str]:
    """Median, 95 % and largest."""
    if not values:
        return ["-"] * 3
    ranked = sorted(values)
    chosen = statistics.median(ranked), ranked[min(len(ranked) - 1, round(0.95 * (len(ranked) - 1)))], ranked[-1]
    return [format(value, form) for value in chosen]


def table(head: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
