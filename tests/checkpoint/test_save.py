"""A run that is saved and gone on with is the run that its plan says, and draws nothing twice."""

import itertools
import stat

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plans import CONFIGS, DRAWS, PLANS, STEPS, Still, agrees, covariance, expected_covariance
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import Adaptive, PrivacyEngine, checkpoint
from dpengine.checkpoint.tensor_file import from_bytes
from dpengine.errors import CorruptFileError, InvalidBudgetError, MechanismMismatchError, TicketError
from dpengine.noise import BandMF

ROWS = 120


def loader(rows=ROWS, batch_size=30):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 4, generator=generator)
    numbered = torch.cat([x, torch.arange(rows).unsqueeze(1)], dim=1)
    return DataLoader(TensorDataset(numbered, torch.randint(0, 3, (rows,), generator=generator)), batch_size=batch_size)


class Run:
    """An engine with its run, trained some steps at a time; keeps which examples took part in which step."""

    def __init__(self, *, seed=None, model=None, data=None, optimizer=torch.optim.Adam, **settings):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3) if model is None else model
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.engine = PrivacyEngine(seed=seed)
        if "plan" not in settings:
            settings = {"noise_multiplier": 1.0, "epochs": 4, **settings}
        _, _, self.loader = self.engine.make_private(
            self.model, self.optimizer, loader() if data is None else data, target_delta=1e-3, **settings
        )
        self.batches = []

    def train(self, steps):
        while steps > 0:
            for x, y in itertools.islice(self.loader, steps):
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(x[:, :4]), y).backward()
                self.optimizer.step()
                self.batches.append(set(x[:, 4].int().tolist()))
                steps -= 1
        return self

    def saved(self, folder):
        checkpoint.save(folder, self.engine)
        return self

    def resumed(self, folder):
        checkpoint.load(folder, self.engine)
        return self

    @property
    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def test_everything_goes_on_where_it_was(tmp_path):
    first = Run().train(5).saved(tmp_path / "run")
    second = Run().resumed(tmp_path / "run")
    assert torch.equal(first.weights, second.weights)
    assert second.loader.position == 5
    for kept, loaded in zip(
        first.optimizer.state_dict()["state"].values(), second.optimizer.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(torch.as_tensor(kept[name]), torch.as_tensor(loaded[name])) for name in kept)
    assert second.train(5).engine.epsilon == pytest.approx(Run().train(10).engine.epsilon, rel=1e-12)
    assert second.engine.ledger.steps == 10


def test_what_comes_after_is_drawn_afresh(tmp_path):
    first = Run().train(3).saved(tmp_path / "run").train(2)
    others = [Run().resumed(tmp_path / "run").train(2) for _ in range(2)]
    runs = [first.batches[3:], *(run.batches for run in others)]
    assert all(a != b for a, b in itertools.combinations(runs, 2))
    assert len({run.weights.sum().item() for run in (first, *others)}) == 3


def test_a_run_may_be_saved_again_before_its_next_step(tmp_path):
    Run().train(3).saved(tmp_path / "run")
    Run().resumed(tmp_path / "run").saved(tmp_path / "run")
    assert Run().resumed(tmp_path / "run").train(1).loader.position == 4


def test_a_seed_repeats_what_comes_after(tmp_path):
    first = Run(seed=1).train(3).saved(tmp_path / "run").train(2)
    a, b = (Run(seed=1).resumed(tmp_path / "run").train(2) for _ in range(2))
    assert torch.equal(a.weights, b.weights)
    assert not torch.equal(a.weights, first.weights)  # noise of the first life, over other batches


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("at", [1, 3, 6])
def test_noise_goes_on_as_one_matrix(tmp_path, name, at):
    config = CONFIGS[name]
    steps = []

    def still():
        data = DataLoader(TensorDataset(torch.zeros(40, 1)), batch_size=10 if name in ("blt", "banded inverse") else 40)
        model = Still()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine = PrivacyEngine(seed=5)
        cycles = {"banded": 3, "column-normalised": 3}.get(name)
        data = DataLoader(TensorDataset(torch.zeros(42, 1)), batch_size=14) if cycles else data
        return engine, *engine.make_private(model, optimizer, data, plan=config, target_delta=1e-5)

    def train(model, optimizer, batches, count):
        while count > 0:
            for (x,) in itertools.islice(batches, count):
                before = model.weight.detach().clone()
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
                steps.append((before - model.weight.detach()).double().numpy())
                count -= 1

    engine, *parts = still()
    train(*parts, at)
    checkpoint.save(tmp_path / "run", engine)
    engine, *parts = still()
    checkpoint.load(tmp_path / "run", engine)
    train(*parts, STEPS - at)
    assert engine.epsilon == pytest.approx(config.epsilon(1e-5), rel=1e-9)  # one run, and not two
    found, expected = covariance(np.stack(steps)), expected_covariance(config, 1.0)
    assert agrees(found, expected, DRAWS).all()
    if name != "independent":
        restarted = expected.copy()
        restarted[at:, :at] = restarted[:at, at:] = 0
        assert not agrees(found, restarted, DRAWS).all()


def test_groups_stay_as_they_were_drawn(tmp_path):
    settings = {"noise": BandMF(num_bands=2), "steps": 8, "epochs": None}
    first = Run(data=loader(batch_size=60), **settings).train(3).saved(tmp_path / "run")
    second = Run(data=loader(batch_size=60), **settings).resumed(tmp_path / "run").train(5)
    batches = first.batches + second.batches
    even, odd = set().union(*batches[::2]), set().union(*batches[1::2])
    assert even.isdisjoint(odd)
    assert len(even) == len(odd) == ROWS // 2  # the whole group takes part at this rate


def test_the_threshold_of_adaptive_clipping_goes_on(tmp_path):
    first = Run(clipping=Adaptive()).train(5).saved(tmp_path / "run")
    second = Run(clipping=Adaptive()).resumed(tmp_path / "run")
    moved = first.engine.describe()["clipping"]["norm"]
    assert moved != Adaptive().bounds[0]
    assert second.engine.describe()["clipping"]["norm"] == moved


def test_tied_weights_are_stored_once(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.b(self.a(x)))

    torch.manual_seed(1)
    first = Run(model=Tied()).train(2).saved(tmp_path / "run")
    stored, _ = from_bytes((tmp_path / "run" / "model.safetensors").read_bytes(), "model")
    assert "b.weight" not in stored
    assert torch.equal(Run(model=Tied()).resumed(tmp_path / "run").weights, first.weights)


def test_the_key_is_in_the_private_folder_alone(tmp_path):
    run = Run().train(2).saved(tmp_path / "run")
    key = run.engine.runs[0].release.source.secret_state()["key"]
    holding = [p.name for p in (tmp_path / "run").rglob("*") if p.is_file() and key.encode() in p.read_bytes()]
    assert holding == ["run.safetensors"]
    private = tmp_path / "run" / "private"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in private.iterdir()} == {0o600}


def test_a_plain_model_loads_the_weights(tmp_path):
    run = Run().train(2).saved(tmp_path / "run")
    tensors, metadata = from_bytes((tmp_path / "run" / "model.safetensors").read_bytes(), "model")
    plain = nn.Linear(4, 3)
    plain.load_state_dict(tensors)
    assert torch.equal(plain.weight, run.model.weight)
    assert metadata == {"format": "pt"}


# What is refused


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"noise_multiplier": 1.1}, "noise_multiplier"),
        ({"max_grad_norm": 2.0}, "clipping"),
        ({"data": loader(rows=100)}, "sampling"),
        ({"noise": BandMF(num_bands=2)}, "noise"),
        ({"model": nn.Sequential(nn.Linear(4, 3))}, "parameters"),
        ({"model": nn.Linear(4, 3, bias=False)}, "parameters"),
        ({"sample_rate": 0.25, "expected_batch_size": 31}, "divisor"),
        ({"plan": PLANS["band-mf"]}, "sampling"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_run_is_refused(tmp_path, settings, says):
    Run().train(2).saved(tmp_path / "run")
    other = Run(**settings)
    before = other.weights
    with pytest.raises(MechanismMismatchError, match=rf"DPE023.*{says}"):
        other.resumed(tmp_path / "run")
    assert torch.equal(other.weights, before)
    assert other.engine.ledger.steps == 0
    other.train(1)


def test_other_buffers_are_refused(tmp_path):
    class Scaled(nn.Linear):
        def __init__(self, size):
            super().__init__(4, 3)
            self.register_buffer("scale", torch.ones(size))

    Run(model=Scaled(1)).train(1).saved(tmp_path / "run")
    with pytest.raises(MechanismMismatchError, match=r"another model.*scale"):
        Run(model=Scaled(2)).resumed(tmp_path / "run")


def test_another_optimizer_is_refused(tmp_path):
    Run().train(1).saved(tmp_path / "run")
    torch.manual_seed(0)
    other = Run(optimizer=lambda parameters, lr: torch.optim.SGD([{"params": [p]} for p in parameters], lr=lr))
    with pytest.raises(ValueError, match="parameter group"):
        other.resumed(tmp_path / "run")
    assert other.engine.ledger.steps == 0


def test_a_batch_at_hand_is_not_saved(tmp_path):
    run = Run()
    x, y = next(iter(run.loader))
    with pytest.raises(TicketError, match=r"DPE022.*between two steps"):
        run.saved(tmp_path / "run")
    F.cross_entropy(run.model(x[:, :4]), y).backward()
    with pytest.raises(TicketError, match="between two steps"):
        run.saved(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    run.optimizer.step()
    run.saved(tmp_path / "run")


def test_a_run_that_has_begun_does_not_load(tmp_path):
    run = Run().train(1).saved(tmp_path / "run")
    with pytest.raises(TicketError, match=r"make_private, then load"):
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


def test_nothing_is_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        Run().resumed(tmp_path / "none")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "privacy_state.json",
                                  "private/run.safetensors", "private/seals.json"])  # fmt: skip
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "empty"])
def test_damage_is_seen_before_anything_changes(tmp_path, name, damage):
    Run().train(2).saved(tmp_path / "run")
    path = tmp_path / "run" / name
    data = path.read_bytes()
    place = len(data) // 2
    flipped = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    changed = {"missing": None, "cut": data[:-7], "flipped": flipped, "empty": b""}[damage]
    path.unlink() if changed is None else path.write_bytes(changed)
    other = Run()
    before = other.weights
    with pytest.raises(CorruptFileError, match="DPE024"):
        other.resumed(tmp_path / "run")
    assert torch.equal(other.weights, before)
    assert other.engine.ledger.steps == 0
    assert other.optimizer.state_dict()["state"] == {}


def test_files_of_two_checkpoints_do_not_mix(tmp_path):
    run = Run().train(2).saved(tmp_path / "a").train(2).saved(tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").write_bytes((tmp_path / "a" / "model.safetensors").read_bytes())
    with pytest.raises(CorruptFileError, match="not as it was saved"):
        Run().resumed(tmp_path / "b")
    assert run.engine.ledger.steps == 4
