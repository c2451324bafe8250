"""``dpengine audit``: exit code 0 if no violation was found, 1 if there is one, 2 if the result is inconclusive."""

import json
import sys

import pytest
from auditing.runs import halve_noise
from mutations.bugs import BUGS
from mutations.planted import planted

from dpengine.cli.main import main

MODULE = """
import torch
from dpengine.auditing import small

make = small()

def mixing():
    subject = small()()
    model = torch.nn.Sequential(torch.nn.Linear(6, 3), Centred())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return subject._replace(model=model, optimizer=optimizer)

class Centred(torch.nn.Module):
    def forward(self, inputs):
        return inputs - inputs.mean(dim=0)

def nothing():
    print("called")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "trainings_to_audit.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *sys.path])
    yield "trainings_to_audit"
    sys.modules.pop("trainings_to_audit", None)


def test_correct_subjects_exit_with_0_and_claim_no_privacy(capsys, module):
    assert main(["audit", "quick", f"{module}:make", "--only", "DI", "DL"]) == 0
    out = capsys.readouterr().out
    assert "No violation was found." in out and "private" not in out


def test_a_model_that_mixes_samples_exits_with_1(capsys, module):
    assert main(["audit", "quick", f"{module}:mixing", "--only", "DI", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["verdict"] == "violation" and answer["findings"][0]["detector"] == "DI"


def test_unreadable_subjects_exit_with_2(capsys, module):
    assert main(["audit", "quick", f"{module}:nothing"]) == 2
    assert "(model, optimizer, loader, loss_of)" in capsys.readouterr().err
    assert main(["audit", "quick", "--only", "DX"]) == 2
    assert main(["audit", "replay", f"{module}:nothing", "--pairs", "1"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["replay", "--pairs", "2"], ["noise", "--coords", "3e4"], ["sampler", "--draws", "200"]], ids=str
)
def test_a_sample_size_can_be_passed(capsys, arguments):
    assert main(["audit", *arguments, "--json", "--seed", "3"]) == 0
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["seed"] == 3 and finding["verdict"] == "pass"


def test_a_wrong_sampler_exits_with_1(capsys):
    with planted(BUGS["PB-26"]):
        assert main(["audit", "sampler", "--draws", "400"]) == 1
    assert "VIOLATION" in capsys.readouterr().out


pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")
QUICK = ["audit", "one-run", "--canaries", "300", "--steps", "30", "--seed", "0"]


def test_our_own_engine_exits_with_0_and_claims_no_privacy(capsys):
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
def test_half_of_the_noise_exits_with_1(capsys, monkeypatch):
    halve_noise(monkeypatch)
    assert main(QUICK) == 1
    assert "VIOLATION" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_without_a_claim_exits_with_2(capsys):
    assert main([*QUICK, "--noise-multiplier", "0"]) == 2
    assert "inconclusive" in capsys.readouterr().out


@pytest.mark.one_in(2, "options", others="slow")
@pytest.mark.parametrize(
    "options,message",
    [(["--canaries", "5"], "at least 20"), (["--kind", "input", "--canaries", "40000"], "canaries=40000")],
    ids=["few", "more than examples"],
)
def test_a_usage_error_exits_with_2_and_a_message(capsys, options, message):
    assert main([*QUICK, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_examples_with_flipped_labels_can_be_canaries(capsys):
    assert main([*QUICK, "--kind", "input", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["details"]["kind"] == "input" and set(found["details"]["bounds"]) == {"epsilon_delta", "f_dp"}
