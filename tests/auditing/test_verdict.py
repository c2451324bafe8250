"""The report of an audit: plain JSON, a code to leave with, and words that claim no more than was found."""

import json
import math

import pytest

from dpengine.auditing import AuditReport
from dpengine.auditing.verdict import VERDICTS


def report(verdict, **more):
    return AuditReport("DC", 0.75, 100, verdict, **more)


def test_the_json_has_every_field_and_no_infinity():
    found = json.loads(report("pass", bound=1.5, claimed=math.inf, seed=3, details={"a": [math.nan, 2]}).to_json())
    assert found["claimed"] == "inf" and found["details"] == {"a": [None, 2]}
    for name in ("detector", "statistic", "n", "p", "bound", "verdict", "seed", "cost"):
        assert name in found
    assert (found["detector"], found["statistic"], found["n"], found["bound"], found["seed"]) == (
        "DC",
        0.75,
        100,
        1.5,
        3,
    )


def test_exit_codes_are_0_for_a_pass_1_for_a_violation_2_for_neither():
    assert [report(verdict).exit_code for verdict in ("pass", "violation", "inconclusive")] == [0, 1, 2]


def test_a_pass_says_that_nothing_was_found_and_never_that_a_run_is_private():
    for verdict in VERDICTS:
        text = str(report(verdict, bound=1.0, claimed=2.0, caveats=("Mind this.",)))
        assert "private" not in text and "Mind this." in text and "epsilon >= 1" in text and "epsilon = 2" in text
    assert "no violation found" in str(report("pass"))
    assert "refuted" in str(report("violation", p=1e-9)) and "1e-09" in str(report("violation", p=1e-9))


def test_a_verdict_that_has_no_meaning_is_refused():
    with pytest.raises(ValueError, match="'pass', 'violation', 'inconclusive'"):
        report("private")
