"""``dpengine report`` and ``dpengine ledger``: reports and epsilon from the files of a run."""

import json

import pytest
import torch
from ledger_runs import Run
from loops import make_loop
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.accounting import Charge, GaussianEvent, PoissonGaussianEvent, Relation, epsilon_of
from dpengine.cli.main import main
from dpengine.report import AccountingFacts, PrivacyReport, RunFacts


@pytest.fixture(scope="module")
def engine():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    data = TensorDataset(torch.randn(60, 4), torch.randint(0, 2, (60,)))
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(data, batch_size=10),
        noise_multiplier=2.0,
        target_delta=1e-3,
    )
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return engine


def write_state(folder, state):
    folder.mkdir(exist_ok=True)
    (folder / "privacy_state.json").write_text(json.dumps(state), encoding="utf-8")
    return folder


@pytest.mark.slow
def test_the_state_of_an_engine_gives_the_same_epsilon(engine, tmp_path, capsys):
    assert main(["report", str(write_state(tmp_path / "run", engine.state_dict())), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["guarantee"]["epsilon"] == pytest.approx(engine.epsilon, rel=1e-6)
    assert report["mechanism"]["noise_multiplier"] == 2.0
    assert report["mechanism"]["steps"] == 6


def test_out_selects_the_output_folder(engine, tmp_path):
    folder = write_state(tmp_path / "run", engine.state_dict())
    assert main(["report", str(folder), "--out", str(tmp_path / "elsewhere")]) == 0
    assert (tmp_path / "elsewhere" / "privacy_report.html").exists()
    assert [path.name for path in folder.iterdir()] == ["privacy_state.json"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"ledger": {"schema": 7}, "delta": 1e-5, "accountant": "pld"}'],
    ids=["empty", "truncated", "a-list", "nothing", "other-ledger"],
)
def test_a_damaged_state_exits_with_2_and_a_message(tmp_path, capsys, text):
    (tmp_path / "privacy_state.json").write_text(text, encoding="utf-8")
    assert main(["report", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "privacy_state.json" in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["privacy_state.json"]


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A folder with the three files of a report, and no state."""
    folder = tmp_path_factory.mktemp("reported")
    history = (Charge(GaussianEvent(4.0), 9),)  # a closed form, and quick
    facts = RunFacts(
        {"noise_multiplier": 4.0}, AccountingFacts(history, 1e-3, Relation.ZERO_OUT), excludes=("the moon",)
    )
    PrivacyReport(facts).save(folder)
    return folder


@pytest.mark.parametrize("renamed", [None, "of-model-7.json"])
def test_the_files_of_a_report_are_rebuilt_from_its_json(reported, tmp_path, capsys, renamed):
    name = renamed or "privacy_report.json"
    (tmp_path / name).write_bytes((reported / "privacy_report.json").read_bytes())
    assert main(["report", str(tmp_path / name if renamed else tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "-differential privacy for each training example" in out
    for path in reported.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
        assert path.name in out


def test_json_prints_the_bytes_of_the_file(reported, tmp_path, capsys):
    assert main(["report", str(reported / "privacy_report.json"), "--out", str(tmp_path), "--json"]) == 0
    assert capsys.readouterr().out == (reported / "privacy_report.json").read_text(encoding="utf-8")


def test_of_both_files_the_report_is_read_unless_the_state_is_named(engine, reported, tmp_path, capsys):
    folder = write_state(tmp_path / "run", engine.state_dict())
    report = (reported / "privacy_report.json").read_text(encoding="utf-8")
    (folder / "privacy_report.json").write_text(report, encoding="utf-8")
    for path, steps in ((folder, 9), (folder / "privacy_state.json", 6)):
        assert main(["report", str(path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["mechanism"]["steps"] == steps


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text[:700], "truncated"),
        (lambda text: text.replace('"schema_version": 2', '"schema_version": 3'), "upgrade"),
        (lambda text: text.replace("the moon", "nothing"), "not a signature"),
        (lambda text: text.replace('"delta": 0.001', '"delta": NaN'), "NaN"),
    ],
    ids=["truncated", "newer", "edited", "nan"],
)
def test_a_modified_report_exits_with_2_and_writes_nothing(reported, tmp_path, capsys, spoil, message):
    text = (reported / "privacy_report.json").read_text(encoding="utf-8")
    (tmp_path / "privacy_report.json").write_text(spoil(text), encoding="utf-8")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dpengine: [DPE024] ") and "privacy_report.json: " in err and message in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["privacy_report.json"]


def test_a_folder_that_cannot_be_created_exits_with_1_and_a_message(reported, tmp_path, capsys):
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert main(["report", str(reported), "--out", str(tmp_path / "file" / "below")]) == 1
    assert "file" in capsys.readouterr().err


def test_a_file_as_output_folder_is_rejected(reported, tmp_path, capsys):
    (tmp_path / "file").write_text("kept", encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(reported), "--out", str(tmp_path / "file")])
    assert "pass a folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text(encoding="utf-8") == "kept"


@pytest.mark.parametrize(
    ("samplings", "sampling", "others"),
    [
        (["poisson"], "poisson", None),
        (["external-poisson"], "external-poisson", None),
        (["external-poisson", "poisson"], "poisson", ["external-poisson"]),
        (None, "poisson", ["unknown"]),
    ],
)
def test_the_sampling_of_an_engine_state_is_not_guessed(engine, tmp_path, capsys, samplings, sampling, others):
    state = engine.state_dict()
    assert [origin["sampling"] for origin in state.pop("origins")] == ["poisson"]
    state |= {} if samplings is None else {"samplings": samplings}
    assert main(["report", str(write_state(tmp_path / "run", state)), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["mechanism"]["sampling"], report["mechanism"].get("other_samplings")) == (sampling, others)
    (light,) = [one for one in report["accounting"]["assumptions"] if "Poisson" in one["name"]]
    assert light["holds"] == ("yes" if samplings == ["poisson"] else "not checked")


def test_the_relation_of_an_engine_state_is_not_guessed(tmp_path, capsys):
    engine = PrivacyEngine()
    constants = {"sample_rate": 0.2, "expected_batch_size": 4, "target_delta": 1e-3}
    make_loop(engine=engine, noise_multiplier=1.5, **constants)
    for state, relation in ((engine.state_dict(), "add-or-remove-one"), (engine.state_dict(), "zero-out")):
        if relation == "zero-out":
            del state["origins"]
        assert main(["report", str(write_state(tmp_path / relation, state)), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["guarantee"]["adjacency"] == relation


def test_the_noise_of_an_engine_state_is_in_the_report(engine, tmp_path, capsys):
    assert main(["report", str(write_state(tmp_path / "run", engine.state_dict())), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["seed_policy"] == "operating-system entropy"


def test_the_unit_of_an_engine_state_is_in_the_report(tmp_path, capsys):
    engine = make_loop(noise_multiplier=1.5, privacy_unit=torch.arange(24) // 2).engine
    assert main(["report", str(write_state(tmp_path / "run", engine.state_dict())), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["guarantee"]["unit"] == "user"


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


def test_show_lists_the_runs_and_the_status_of_their_steps(path, capsys):
    code, out, _ = printed(capsys, "ledger", "show", path)
    head, first, second = out.splitlines()
    assert code == 0 and head.split()[:4] == ["run", "began", "noise", "rate"]
    assert first.split()[2:] == ["1", "0.33333", "6", "0", "0", "detached"]
    assert second.split()[2:7] == ["2", "0.33333", "0", "0", "4"]
    code, out, _ = printed(capsys, "ledger", "show", path, "--json")
    assert [run["reserved"] for run in json.loads(out)["runs"]] == [0, 4]


def test_verify_detects_a_modified_file(path, capsys):
    code, out, _ = printed(capsys, "ledger", "verify", path)
    assert code == 0 and "10 steps charged" in out and json.loads(path.read_text().splitlines()[-1])["hash"] in out
    path.write_bytes(path.read_bytes().replace(b'"count":4', b'"count":1', 1))
    code, out, err = printed(capsys, "ledger", "verify", path)
    assert code == 1 and not out and "was edited" in err


def test_total_is_the_epsilon_of_all_charges(path, capsys):
    _, out, _ = printed(capsys, "ledger", "total", path, "--json", "--delta", "1e-4")
    rate = json.loads(path.read_text().splitlines()[2])["event"]["sample_rate"]
    charges = [Charge(PoissonGaussianEvent(rate, sigma), count) for sigma, count in ((1.0, 6), (2.0, 4))]
    found = json.loads(out)
    assert found["epsilon"] == epsilon_of(charges, 1e-4, accountant="pld")
    assert (found["steps"], found["reserved"], found["relation"]) == (10, 4, "zero-out")
    _, out, _ = printed(capsys, "ledger", "total", path)
    assert "10 steps charged in 2 runs" in out and "4 of these steps were reserved" in out and "δ = 0.001" in out


@pytest.mark.hazard("A11")
def test_several_files_are_composed_and_duplicates_are_rejected(path, tmp_path, capsys):
    other = tmp_path / "other.ledger"
    Run(other).train(3).gone()
    single = json.loads(printed(capsys, "ledger", "total", path, "--json")[1])["epsilon"]
    both = json.loads(printed(capsys, "ledger", "total", path, other, "--json")[1])
    assert both["epsilon"] > single and both["steps"] == 13
    copy = tmp_path / "copy.ledger"
    copy.write_bytes(path.read_bytes())
    code, _, err = printed(capsys, "ledger", "total", path, copy)
    assert code == 2 and "twice" in err


def test_files_of_different_units_are_rejected(path, tmp_path, capsys):
    Run(tmp_path / "units.ledger", privacy_unit=torch.arange(60) // 2).train(1).gone()
    code, _, err = printed(capsys, "ledger", "total", path, tmp_path / "units.ledger")
    assert code == 2 and "different units" in err


@pytest.mark.parametrize("action", ["show", "verify", "total"])
def test_an_invalid_ledger_is_rejected(tmp_path, capsys, action):
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "empty").write_text("")
    for name, code in (("text", 1), ("empty", 2), ("none", 2), (".", 2)):
        found, out, err = printed(capsys, "ledger", action, tmp_path / name)
        assert found == code and not out and "Traceback" not in err
