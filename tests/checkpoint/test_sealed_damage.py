"""Checkpoints changed and sealed again, or of other versions, load or raise a typed error.

``version_2`` was written by ``stored_run().train(3).saved(folder)``, of the first version that had these files.
"""

import hashlib
import json
import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from faults.broken_files import damage_tree
from safetensors import safe_open
from safetensors.torch import save_file

from dpengine.checkpoint import layout
from dpengine.errors import CorruptFileError, PrivacyError
from dpengine.noise import BandMF

from .test_save import Run

PUBLIC, SEALS = "privacy_state.json", "private/seals.json"
STATES = {"private/run.safetensors": ["state"], "optimizer.safetensors": ["state", "of"]}


STORED = sorted(Path(__file__).parent.glob("version_*"))


class Sealed:
    """Checkpoint files with one value replaced."""

    def __init__(self, folder):
        self.folder, self.metadata, self.tensors = folder, {}, {}
        self.whole = {name: (folder / name).read_bytes() for name in [PUBLIC, SEALS, *STATES]}
        for name in STATES:
            with safe_open(folder / name, framework="pt") as file:
                self.tensors[name] = {key: file.get_tensor(key) for key in file.keys()}
                self.metadata[name] = dict(file.metadata())

    def change(self, choose):
        for name, data in self.whole.items():
            (self.folder / name).write_bytes(data)
        name = choose.choice([PUBLIC, *STATES])
        if name == PUBLIC:
            changed = damage_tree(choose, {"all": json.loads(self.whole[PUBLIC])}).get("all")
            (self.folder / PUBLIC).write_text(json.dumps(changed))
        else:
            key = choose.choice(STATES[name])
            changed = damage_tree(choose, {"all": json.loads(self.metadata[name][key])}).get("all")
            save_file(self.tensors[name], self.folder / name, {**self.metadata[name], key: json.dumps(changed)})
        self.seal(name)

    def seal(self, name):
        seals = json.loads(self.whole[SEALS])
        seals[name] = hashlib.sha256((self.folder / name).read_bytes()).hexdigest()
        (self.folder / SEALS).write_text(json.dumps(seals))


def attack(folder, count):
    """Returns the number of files that could be read."""
    Run().train(2).saved(folder)
    sealed, choose, read = Sealed(folder), random.Random(0), 0
    fresh = Run().weights
    for _ in range(count):
        sealed.change(choose)
        run = Run()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                run.resumed(folder)
                read += 1
            except PrivacyError:
                assert torch.equal(run.weights, fresh) and run.engine.ledger.steps == 0
                assert run.loader.position == 0 and not run.optimizer.state_dict()["state"]
    return read


@pytest.mark.slow
@pytest.mark.hazard("P5")
def test_a_thousand_files_that_were_changed_and_sealed_again_are_rejected_or_read(tmp_path):
    assert attack(tmp_path / "run", 1000) < 600


@pytest.mark.parametrize("version", ["1", "99", '"2"', "null", "true"])
@pytest.mark.hazard("P7")
def test_a_checkpoint_of_a_version_that_is_not_known_is_rejected_by_its_number(tmp_path, version):
    folder, name = tmp_path / "run", "private/run.safetensors"
    Run().train(1).saved(folder)
    sealed = Sealed(folder)
    state = sealed.metadata[name]["state"]
    other = state.replace('["version", 2]', f'["version", {version}]')
    assert other != state
    save_file(sealed.tensors[name], folder / name, {"state": other})
    sealed.seal(name)
    run = Run()
    with pytest.raises(CorruptFileError, match=r"DPE024.*has version .*this release reads 2"):
        run.resumed(folder)
    assert run.engine.ledger.steps == 0


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def stored_run():
    """Returns a seeded run (so the key is not secret) with a stateful optimizer and noise matrix."""
    return Run(seed=1, optimizer=momentum, noise=BandMF(num_bands=2, strategy=(1.0, 0.5)))


@pytest.mark.parametrize("folder", STORED, ids=lambda folder: folder.name)
@pytest.mark.parametrize("nothing_released_since", [True, False])
@pytest.mark.hazard("P7")
def test_stored_checkpoints_of_each_version_are_resumed(tmp_path, folder, nothing_released_since):
    shutil.copytree(folder, tmp_path / "run")
    first = stored_run().train(3)
    run = stored_run().resumed(tmp_path / "run", nothing_released_since=nothing_released_since)
    torch.testing.assert_close(run.weights, first.weights)
    assert run.loader.position == run.engine.ledger.steps == 3
    spent = run.engine.epsilon
    assert run.train(2).engine.epsilon >= spent == pytest.approx(first.engine.epsilon, rel=1e-9)


@pytest.mark.hazard("P7")
def test_each_version_that_can_be_read_has_a_stored_checkpoint():
    assert f"version_{layout.VERSION}" in [folder.name for folder in STORED]
