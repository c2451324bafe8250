"""``dpengine report`` makes the report again, the same, from what a run left behind."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.cli import main


@pytest.fixture
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


def test_the_report_is_the_same_as_that_of_the_run(engine, tmp_path, capsys):
    report = engine.report(data={"name": "rows"}, utility={"metric": "accuracy", "value": 0.5, "split": "test"})
    report.save(tmp_path / "first")
    state = engine.state_dict() | {"facts": report.facts.state_dict()}
    assert main(["report", str(write_state(tmp_path / "run", state))]) == 0
    out = capsys.readouterr().out
    assert str(report) in out
    for path in (tmp_path / "first").iterdir():
        assert (tmp_path / "run" / path.name).read_text(encoding="utf-8") == path.read_text(encoding="utf-8")
        assert path.name in out


def test_the_state_of_an_engine_alone_gives_the_same_epsilon(engine, tmp_path, capsys):
    assert main(["report", str(write_state(tmp_path / "run", engine.state_dict())), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["guarantee"]["epsilon"] == pytest.approx(engine.epsilon, rel=1e-6)
    assert report["mechanism"]["noise_multiplier"] == 2.0
    assert report["mechanism"]["steps"] == 6


def test_it_writes_elsewhere_on_request(engine, tmp_path):
    folder = write_state(tmp_path / "run", engine.state_dict())
    assert main(["report", str(folder), "--out", str(tmp_path / "elsewhere")]) == 0
    assert (tmp_path / "elsewhere" / "privacy_report.html").exists()
    assert [path.name for path in folder.iterdir()] == ["privacy_state.json"]


def test_the_state_of_a_run_can_still_be_loaded_by_an_engine(engine):
    state = json.loads(json.dumps(engine.state_dict() | {"facts": engine.report().facts.state_dict()}))
    other = PrivacyEngine()
    other.load_state_dict(state)
    assert other.get_epsilon(1e-3) == engine.get_epsilon(1e-3)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"facts": {"schema": 99}}', '{"ledger": {"schema": 7}, "delta": 1e-5, "accountant": "pld"}'],
    ids=["empty", "cut", "a-list", "nothing", "other-schema", "other-ledger"],
)
def test_a_damaged_state_gives_1_and_a_message(tmp_path, capsys, text):
    (tmp_path / "privacy_state.json").write_text(text, encoding="utf-8")
    assert main(["report", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert "privacy_state.json" in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["privacy_state.json"]
