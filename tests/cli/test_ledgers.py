"""``dpengine ledger``: epsilon follows from the files alone."""

import json

import pytest
import torch
from ledger_runs import Run

from dpengine.accounting import Charge, PoissonGaussianEvent, epsilon_of
from dpengine.cli.main import main


@pytest.fixture
def path(tmp_path):
    run = Run(tmp_path / "run.ledger", reserve=4).train(6)
    run.engine.detach(run.model)
    run.gone()
    Run(tmp_path / "run.ledger", noise_multiplier=2.0, reserve=4).train(2).died()
    return tmp_path / "run.ledger"


def printed(capsys, *argv):
    code = main([str(one) for one in argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_show_lists_the_runs_and_what_became_of_their_steps(path, capsys):
    code, out, _ = printed(capsys, "ledger", "show", path)
    head, first, second = out.splitlines()
    assert code == 0 and head.split()[:4] == ["run", "began", "noise", "rate"]
    assert first.split()[2:] == ["1", "0.33333", "6", "0", "0", "detached"]
    assert second.split()[2:7] == ["2", "0.33333", "0", "0", "4"]
    code, out, _ = printed(capsys, "ledger", "show", path, "--json")
    assert [run["reserved"] for run in json.loads(out)["runs"]] == [0, 4]


def test_verify_says_whether_a_file_is_as_it_was_written(path, capsys):
    code, out, _ = printed(capsys, "ledger", "verify", path)
    assert code == 0 and "10 steps charged" in out and json.loads(path.read_text().splitlines()[-1])["hash"] in out
    path.write_bytes(path.read_bytes().replace(b'"count":4', b'"count":1', 1))
    code, out, err = printed(capsys, "ledger", "verify", path)
    assert code == 1 and not out and "was edited" in err


def test_total_is_what_an_accountant_says_of_all_charges(path, capsys):
    _, out, _ = printed(capsys, "ledger", "total", path, "--json", "--delta", "1e-4")
    rate = json.loads(path.read_text().splitlines()[2])["event"]["sample_rate"]
    charges = [Charge(PoissonGaussianEvent(rate, sigma), count) for sigma, count in ((1.0, 6), (2.0, 4))]
    found = json.loads(out)
    assert found["epsilon"] == epsilon_of(charges, 1e-4, accountant="pld")
    assert (found["steps"], found["reserved"], found["relation"]) == (10, 4, "zero-out")
    _, out, _ = printed(capsys, "ledger", "total", path)
    assert "10 steps charged in 2 runs" in out and "4 of these steps were reserved" in out and "δ = 0.001" in out


@pytest.mark.hazard("A11")
def test_several_files_add_up_and_none_counts_twice(path, tmp_path, capsys):
    other = tmp_path / "other.ledger"
    Run(other).train(3).gone()
    alone = json.loads(printed(capsys, "ledger", "total", path, "--json")[1])["epsilon"]
    both = json.loads(printed(capsys, "ledger", "total", path, other, "--json")[1])
    assert both["epsilon"] > alone and both["steps"] == 13
    copy = tmp_path / "copy.ledger"
    copy.write_bytes(path.read_bytes())
    code, _, err = printed(capsys, "ledger", "total", path, copy)
    assert code == 2 and "twice" in err


def test_units_that_do_not_add_up_are_refused(path, tmp_path, capsys):
    Run(tmp_path / "units.ledger", privacy_unit=torch.arange(60) // 2).train(1).gone()
    code, _, err = printed(capsys, "ledger", "total", path, tmp_path / "units.ledger")
    assert code == 2 and "different units" in err


@pytest.mark.parametrize("action", ["show", "verify", "total"])
def test_what_is_no_ledger_is_refused(tmp_path, capsys, action):
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "empty").write_text("")
    for name, code in (("text", 1), ("empty", 2), ("none", 2), (".", 2)):
        found, out, err = printed(capsys, "ledger", action, tmp_path / name)
        assert found == code and not out and "Traceback" not in err
