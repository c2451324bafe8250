"""``dpengine audit one-run``: a verdict, and the exit code that goes with it."""

import json

import pytest
from auditing.runs import halve_noise

from dpengine.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")
QUICK = ["audit", "one-run", "--canaries", "300", "--steps", "30", "--seed", "0"]


def test_our_own_engine_passes_with_code_0_and_no_word_of_being_private(capsys):
    assert main(QUICK) == 0
    out = capsys.readouterr().out
    assert "no violation found" in out and "claimed: epsilon = 4" in out
    assert " is private" not in out


@pytest.mark.slow
def test_the_json_has_the_bound_next_to_the_claim(capsys):
    assert main([*QUICK, "--noise-multiplier", "1.5", "--sample-rate", "0.05", "--delta", "1e-6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["detector"], found["verdict"], found["n"], found["seed"]) == ("DC", "pass", 300, 0)
    assert 0 < found["bound"] <= found["claimed"]
    assert found["details"]["delta"] == 1e-6 and found["details"]["steps"] == 30


@pytest.mark.slow
def test_half_of_the_noise_is_a_violation_with_code_1(capsys, monkeypatch):
    halve_noise(monkeypatch)
    assert main(QUICK) == 1
    assert "VIOLATION" in capsys.readouterr().out


@pytest.mark.slow
def test_no_claim_is_inconclusive_with_code_2(capsys):
    assert main([*QUICK, "--noise-multiplier", "0"]) == 2
    assert "inconclusive" in capsys.readouterr().out


@pytest.mark.one_in(2, "options", others="slow")
@pytest.mark.parametrize(
    "options,message",
    [(["--canaries", "5"], "at least 20"), (["--kind", "input", "--canaries", "40000"], "canaries=40000")],
    ids=["few", "more than examples"],
)
def test_a_wrong_call_gives_2_and_a_message(capsys, options, message):
    assert main([*QUICK, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_rows_with_flipped_labels_are_canaries_too(capsys):
    assert main([*QUICK, "--kind", "input", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["details"]["kind"] == "input" and set(found["details"]["bounds"]) == {"epsilon_delta", "f_dp"}
