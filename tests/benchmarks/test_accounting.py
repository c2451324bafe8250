"""The file of truths, and what the tables make of answers. That ours is sound is asked at a few settings here."""

import json
import random

import pytest

from benchmarks import accounting_table
from benchmarks.accounting_settings import CLASSES, PATH, Setting, candidates
from dpengine.accounting import Charge, bounds_of
from dpengine.accounting.events import Relation, release_event

TRUTHS = json.loads(PATH.read_text())
ROWS = TRUTHS["settings"]


def test_the_file_of_truths_is_well_formed():
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
def test_settings_are_candidates_of_their_class_in_order(name):
    drawn = candidates(name)
    for row in [*TRUTHS["settings"], *TRUTHS["dropped"]]:
        if row["class"] == name:
            one = Setting.from_json(row)
            assert row in TRUTHS["dropped"] or any(each.key == one.key for each in drawn)


@pytest.mark.slow
@pytest.mark.one_in(2, "row")
@pytest.mark.parametrize("row", random.Random(5).sample(ROWS, 10), ids=lambda row: str(Setting.from_json(row)))
def test_ours_is_sound_at_a_few_of_them(row):
    setting, doubt = Setting.from_json(row), row["error"] + 1e-12 * row["epsilon"]
    history = tuple(Charge(release_event(noise_multiplier=s, sample_rate=q), n) for q, s, n in setting.kinds)
    lower, _, upper = bounds_of(history, setting.delta, relation=Relation(setting.relation))
    assert lower <= row["epsilon"] + doubt
    assert row["epsilon"] - doubt <= upper <= row["epsilon"] * (1 + 1e-3)


def test_an_answer_below_the_truth_differs_from_one_above():
    settings = [{"kinds": [[1.0, sigma, 1]], "delta": 1e-5, "relation": "add_remove"} for sigma in (1.0, 2.0, 3.0)]
    settings = [{**row, "epsilon": 2.0, "error": 1e-9, "class": "one"} for row in settings]
    said = [{"lower": 1.9, "upper": 2.0 - 2e-9}, {"lower": 2.1, "upper": 2.2}, {"failed": "OSError: no"}]
    answers = {Setting.from_json(row).key: one for row, one in zip(settings, said, strict=True)}
    below, above, failed = accounting_table.judge(answers, settings)
    assert below["below"] and not below["above"]
    assert not above["below"] and above["above"] and above["excess"] == pytest.approx(0.1)
    judged = {"dpengine pld": [below, above, failed]}
    assert accounting_table.misses(judged).count("\n") == 4
    assert accounting_table.soundness(judged).splitlines()[-1].startswith("| dpengine pld | 3 | 0 | 1 | 1 | 1 |")
