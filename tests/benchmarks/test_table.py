"""Tables of known results, and the reference file of the accounting benchmark."""

import json
import random

import pytest

from benchmarks import accounting_table, table
from benchmarks.accounting_settings import CLASSES, PATH, Setting, candidates
from dpengine.accounting import Charge, bounds_of
from dpengine.accounting.events import Relation, release_event


def row(median, **more):
    return {"median_ms": median, "min_ms": median, "iqr_ms": 0.5, "steps": 20, "ratio": median / 10.0, **more}


def cell(results, **more):
    empty = {"rows": 8, "goals": [], "gate": {}, "failed": {}, "labels": {}, "memory": {}}
    return {**empty, "results": results, **more}


def goal(target, stretch=None, against="plain"):
    return {"target": target, "stretch": stretch, "against": against}


def only(found):
    return {"cells": {"one": found}}


PEERS = {"plain": row(10.0), "dpengine auto": row(12.6), "opacus ew": row(18.0), "opake": row(15.0)}


def test_the_summary_shows_the_fastest_peer_and_the_percentage_by_which_the_target_is_missed():
    line = table.summary(only(cell(PEERS, goals=[goal(1.2, 1.1)]))).splitlines()[-1]
    assert line == "| one | 8 | 10.0 | 1.26 | - | - | - | - | opake 1.50 | 0.84 | 1.20 (1.10) | 5 % |"


@pytest.mark.parametrize(
    "aim, outcome",
    [
        (goal(1.3, 1.2), "met"),
        (goal(1.4, 1.3), "met, stretch too"),
        (goal(0.8, against="opacus"), "met"),
        (goal(0.5, against="opacus"), "40 %"),
        (goal(0.5, against="jax"), "no time"),
    ],
)
def test_the_summary_shows_whether_a_goal_is_met(aim, outcome):
    line = table.summary(only(cell(PEERS, goals=[aim]))).splitlines()[-1]
    assert line.endswith(f" | {outcome} |")


def test_labeled_and_non_private_contenders_are_excluded_from_the_fastest_peer():
    found = cell({**PEERS, "jax plain": row(5.0)}, labels={"opake": "does something else"})
    assert table.fastest(found) == "opacus ew"
    assert table.fastest(found, "opake") is None
    assert "\\* one: opake does something else." in table.report(only(found))
    assert "| one | 1.80 | 1.50\\* |" in table.report(only(found))


def test_a_cell_in_which_dpengine_was_not_timed_shows_no_time():
    found = cell({"plain": row(10.0)}, goals=[goal(1.2)], failed={"dpengine auto": "deviates by 1e-1"})
    assert table.summary(only(found)).splitlines()[-1].endswith("| - | - | 1.20 | no time |")
    assert "| dpengine auto | one | deviates by 1e-1 |" in table.failures(only(found))


def test_memory_is_a_ratio_to_the_ordinary_step():
    held = {"plain": {"first": 50.0, "later": 40.0}, "dpengine auto": {"first": 100.0, "later": 44.0}, "opake": None}
    lines = table.memory(only(cell(PEERS, memory=held))).splitlines()
    assert lines[-1] == "| one | 50 / 40 | 2.00 / 1.10 | - | - |"


def test_the_detail_table_has_a_line_per_contender():
    found = cell(
        {**PEERS, "jax-privacy": row(30.0, own_ratio=1.5)}, gate={"opake": {"deviation": 2e-7, "overshoot": None}}
    )
    text = table.detail(only(found))
    assert "| one | 8 | opake | 1.50 | 15.0 | 15.0 | 0.5 | 20 | - | - | 2e-07 | - |" in text
    assert "| jax-privacy | 3.00 (1.50 to its own) |" in text


def test_later_files_replace_the_cells_of_earlier_ones():
    first = {"threads": 2, "cells": {"one": cell({"plain": row(1.0)}), "two": cell(PEERS)}}
    whole = table.merged([first, only(cell({"plain": row(3.0)}))])
    assert list(whole["cells"]) == ["one", "two"]
    assert whole["cells"]["one"]["results"]["plain"]["median_ms"] == 3.0
    assert whole["threads"] == 2


def test_the_chart_is_written_as_svg(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "ratios.svg"
    table.plot(only(cell(PEERS, goals=[goal(1.2)])), str(path))
    assert "<svg" in path.read_text()


TRUTHS = json.loads(PATH.read_text())
ROWS = TRUTHS["settings"]


def test_the_file_of_reference_epsilons_is_well_formed():
    assert len(ROWS) >= 300
    assert {row["class"] for row in ROWS} == set(CLASSES)
    assert len({Setting.from_json(row).key for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert 1e-3 <= row["epsilon"] <= 1e3
        assert 0 < row["error"] <= 1e-5 * row["epsilon"]
        assert row["reference"] in ("closed form", "contour", "contour, 30 digits", "convolution")
        assert all(0 < rate <= 1 and sigma > 0 and steps >= 1 for rate, sigma, steps in row["kinds"])
        assert 0 < row["delta"] < 1
    assert sum("digits" in row["reference"] or row["reference"] == "closed form" for row in ROWS) >= 100


@pytest.mark.parametrize("name", CLASSES)
def test_settings_are_candidates_of_their_class(name):
    drawn = candidates(name)
    for row in [*TRUTHS["settings"], *TRUTHS["dropped"]]:
        if row["class"] == name:
            one = Setting.from_json(row)
            assert row in TRUTHS["dropped"] or any(each.key == one.key for each in drawn)


@pytest.mark.slow
@pytest.mark.one_in(2, "row")
@pytest.mark.parametrize("row", random.Random(5).sample(ROWS, 10), ids=lambda row: str(Setting.from_json(row)))
def test_dpengine_bounds_contain_the_reference_epsilon_and_are_tight(row):
    setting, doubt = Setting.from_json(row), row["error"] + 1e-12 * row["epsilon"]
    history = tuple(Charge(release_event(noise_multiplier=s, sample_rate=q), n) for q, s, n in setting.kinds)
    lower, _, upper = bounds_of(history, setting.delta, relation=Relation(setting.relation))
    assert lower <= row["epsilon"] + doubt
    assert row["epsilon"] - doubt <= upper <= row["epsilon"] * (1 + 1e-3)


def test_underestimates_overestimates_and_failures_are_counted_separately():
    settings = [{"kinds": [[1.0, sigma, 1]], "delta": 1e-5, "relation": "add_remove"} for sigma in (1.0, 2.0, 3.0)]
    settings = [{**row, "epsilon": 2.0, "error": 1e-9, "class": "one"} for row in settings]
    results = [{"lower": 1.9, "upper": 2.0 - 2e-9}, {"lower": 2.1, "upper": 2.2}, {"failed": "OSError: no"}]
    answers = {Setting.from_json(row).key: one for row, one in zip(settings, results, strict=True)}
    below, above, failed = accounting_table.judge(answers, settings)
    assert below["below"] and not below["above"]
    assert not above["below"] and above["above"] and above["excess"] == pytest.approx(0.1)
    judged = {"dpengine pld": [below, above, failed]}
    assert accounting_table.misses(judged).count("\n") == 4
    assert accounting_table.soundness(judged).splitlines()[-1].startswith("| dpengine pld | 3 | 0 | 1 | 1 | 1 |")
