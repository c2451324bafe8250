"""Checkpoints that do not fit the run, or are damaged, raise and change nothing."""

import json

import pytest
import torch
import torch.nn.functional as F
from checkpoint.runs import ROWS, Run, loader
from plans import PLANS
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine, checkpoint
from dpengine.checkpoint.folder import join_tensors
from dpengine.errors import (
    BatchStateError,
    CorruptFileError,
    InvalidBudgetError,
    MechanismMismatchError,
)
from dpengine.noise import BandMF


def assert_load_raises(run, folder, error, message):
    """Asserts that the load raises and leaves the run unchanged."""
    before = run.weights
    with pytest.raises(error, match=message):
        run.resumed(folder)
    assert torch.equal(run.weights, before) and run.engine.ledger.steps == 0


@pytest.mark.one_in(3, "settings", others="slow")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"noise_multiplier": 1.1}, "noise multiplier"),
        ({"max_grad_norm": 2.0}, "clipping"),
        ({"data": loader(rows=100)}, "sampling"),
        ({"noise": BandMF(num_bands=2)}, "noise"),
        ({"model": nn.Sequential(nn.Linear(4, 3))}, "parameters"),
        ({"model": nn.Linear(4, 3, bias=False)}, "parameters"),
        ({"sample_rate": 0.25, "expected_batch_size": 31}, "divisor"),
        ({"plan": PLANS["band-mf"]}, "sampling"),
        ({"sample_rate": 0.25, "expected_batch_size": 30}, "relation"),
        ({"loss_reduction": "sum"}, "loss_reduction, divisor"),
        ({"privacy_unit": torch.arange(ROWS) // 2}, "privacy unit"),
        ({"noise_multiplier": None, "target_epsilon": 2.0}, "noise multiplier"),
        ({"seed": 3}, "seed"),
        ({"optimizer": torch.optim.SGD}, "optimizer"),
        ({"optimizer": lambda parameters, lr: torch.optim.Adam(list(parameters)[::-1], lr=lr)}, "optimizer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_checkpoint_of_another_run_is_rejected(tmp_path, settings, says):
    Run().train(2).saved(tmp_path / "run")
    other = Run(**settings)
    assert_load_raises(other, tmp_path / "run", MechanismMismatchError, rf"DPE023.*{says}")
    other.train(1)


class RandomExamples(torch.utils.data.Dataset):
    """Data set whose examples differ at each read."""

    def __init__(self):
        self.rows = loader().dataset

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        x, y = self.rows[index]
        return x + torch.cat([torch.rand(4), torch.zeros(1)]), y


def other_rows(change):
    x, y = loader().dataset.tensors
    return DataLoader(TensorDataset(*change(x.clone(), y.clone())), batch_size=30)


OTHER_ROWS = {
    "another value": lambda x, y: (x + (torch.arange(ROWS) >= ROWS // 2).unsqueeze(1), y),
    "another order": lambda x, y: (x.roll(1, 0), y.roll(1, 0)),
    "another label": lambda x, y: (x, (y + 1) % 3),
    "another type": lambda x, y: (x.double(), y),
}


@pytest.mark.parametrize("change", OTHER_ROWS)
@pytest.mark.hazard("D6")
def test_another_data_set_of_the_same_length_is_rejected(tmp_path, change):
    Run().train(2).saved(tmp_path / "run")
    other = Run(data=other_rows(OTHER_ROWS[change]))
    says = r"DPE023.*data set differs from that of the checkpoint"
    assert_load_raises(other, tmp_path / "run", MechanismMismatchError, says)
    assert Run(data=other_rows(lambda x, y: (x, y))).resumed(tmp_path / "run").train(1).loader.position == 3


@pytest.mark.hazard("D6")
def test_examples_that_differ_at_each_read_are_not_compared(tmp_path):
    Run(data=DataLoader(RandomExamples(), batch_size=30)).train(2).saved(tmp_path / "run")
    other = Run(data=DataLoader(RandomExamples(), batch_size=30))
    random = torch.get_rng_state()
    assert other.resumed(tmp_path / "run").loader.position == 2
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.hazard("D6")
def test_example_fingerprints_are_keyed_and_stay_in_the_private_folder(tmp_path):
    first, second = Run().train(1).saved(tmp_path / "one"), Run().train(1).saved(tmp_path / "two")
    found = []
    for name in ("one", "two"):
        with safe_open(tmp_path / name / "private" / "run.safetensors", framework="pt") as file:
            state = dict(
                join_tensors(json.loads(file.metadata()["state"]), {k: file.get_tensor(k) for k in file.keys()})
            )
        digests = state["examples"]
        assert len(digests) == 16 and len(set(digests)) == 16 and None not in digests
        public = [path for path in (tmp_path / name).iterdir() if path.is_file()]
        assert public and not any(digest.encode() in path.read_bytes() for path in public for digest in digests)
        found.append(digests)
    assert not set(found[0]) & set(found[1])  # the same examples, under two keys
    assert first.engine.ledger.steps == second.engine.ledger.steps == 1


def test_different_buffers_are_rejected(tmp_path):
    class Scaled(nn.Linear):
        def __init__(self, size):
            super().__init__(4, 3)
            self.register_buffer("scale", torch.ones(size))

    Run(model=Scaled(1)).train(1).saved(tmp_path / "run")
    with pytest.raises(MechanismMismatchError, match=r"another model.*scale"):
        Run(model=Scaled(2)).resumed(tmp_path / "run")


def test_different_units_and_steps_are_rejected(tmp_path):
    settings = {"noise": BandMF(num_bands=2), "steps": 8, "epochs": None}
    Run(**settings, privacy_unit=torch.arange(ROWS) // 2).train(1).saved(tmp_path / "units")
    with pytest.raises(MechanismMismatchError, match="privacy unit"):
        Run(**settings, privacy_unit=torch.arange(ROWS) % 60).resumed(tmp_path / "units")
    Run(**settings).train(1).saved(tmp_path / "steps")
    with pytest.raises(MechanismMismatchError, match="iterations"):
        Run(**{**settings, "steps": 9}).resumed(tmp_path / "steps")


def test_a_load_that_fails_changes_nothing(tmp_path):
    Run().train(2).saved(tmp_path / "run")
    other = Run()
    before = other.weights

    def fail(*arguments):
        raise RuntimeError("not this one")

    hook = other.model.register_load_state_dict_post_hook(fail)
    with pytest.raises(RuntimeError, match="not this one"):
        other.resumed(tmp_path / "run")
    hook.remove()
    assert other.engine.ledger.steps == 0 and other.optimizer.state_dict()["state"] == {}
    damaged = other.engine.load_state_dict
    other.engine.load_state_dict = fail
    with pytest.raises(RuntimeError, match="not this one"):
        other.resumed(tmp_path / "run")
    other.engine.load_state_dict = damaged
    assert other.optimizer.state_dict()["state"] == {} and torch.equal(other.weights, before)
    other.resumed(tmp_path / "run")
    assert other.engine.ledger.steps == 2 and not torch.equal(other.weights, before)
    with pytest.raises(BatchStateError, match="was already loaded"):
        other.resumed(tmp_path / "run")


def test_extra_state_that_is_not_a_tensor_is_named(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(TypeError, match="'_extra_state' in the model's state is not a tensor"):
        Run(model=Extra(4, 3)).saved(tmp_path / "run")


def test_saving_with_a_pending_batch_raises(tmp_path):
    run = Run()
    x, y = next(iter(run.loader))
    with pytest.raises(BatchStateError, match=r"DPE022.*between two steps"):
        run.saved(tmp_path / "run")
    F.cross_entropy(run.model(x[:, :4]), y).backward()
    with pytest.raises(BatchStateError, match="between two steps"):
        run.saved(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    run.optimizer.step()
    run.saved(tmp_path / "run")


def test_loading_into_a_started_run_raises(tmp_path):
    run = Run().train(1).saved(tmp_path / "run")
    with pytest.raises(BatchStateError, match=r"make_private, then load"):
        run.resumed(tmp_path / "run")


def test_an_engine_has_one_run(tmp_path):
    with pytest.raises(InvalidBudgetError, match=r"this engine has 0\. Call make_private"):
        checkpoint.save(tmp_path / "run", PrivacyEngine())
    run = Run()
    model = nn.Linear(4, 3)
    run.engine.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader(), noise_multiplier=1.0, target_delta=1e-3
    )
    with pytest.raises(InvalidBudgetError, match="this engine has 2"):
        run.saved(tmp_path / "run")
    run.engine.detach(model)
    run.saved(tmp_path / "run")


def test_a_missing_folder_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        Run().resumed(tmp_path / "none")


@pytest.mark.one_in(4, "name", "damage", others="slow")
@pytest.mark.one_in(2, "name", "damage")
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "privacy_state.json",
                                  "private/run.safetensors", "private/seals.json"])  # fmt: skip
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "empty"])
@pytest.mark.hazard("P5")
def test_damage_is_detected_before_anything_changes(tmp_path, name, damage):
    Run().train(2).saved(tmp_path / "run")
    path = tmp_path / "run" / name
    data = path.read_bytes()
    place = len(data) // 2
    flipped = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    changed = {"missing": None, "cut": data[:-7], "flipped": flipped, "empty": b""}[damage]
    path.unlink() if changed is None else path.write_bytes(changed)
    other = Run()
    assert_load_raises(other, tmp_path / "run", CorruptFileError, "DPE024")
    assert other.optimizer.state_dict()["state"] == {}


@pytest.mark.hazard("P1")
def test_files_of_two_checkpoints_do_not_mix(tmp_path):
    run = Run().train(2).saved(tmp_path / "a").train(2).saved(tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").write_bytes((tmp_path / "a" / "model.safetensors").read_bytes())
    with pytest.raises(CorruptFileError, match="changed after it was saved"):
        Run().resumed(tmp_path / "b")
    assert run.engine.ledger.steps == 4
