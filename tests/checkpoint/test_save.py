"""Resumed runs follow their plan and reuse no batches or noise."""

import contextlib
import itertools
import stat

import inside
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from checkpoint.runs import Run, loader
from plans import CONFIGS, DRAWS, STEPS, Still, agrees, covariance, expected_covariance
from recipes import recipe
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import Adaptive, PrivacyEngine, checkpoint
from dpengine.errors import (
    LedgerError,
    MechanismMismatchError,
    PrivacyError,
)
from dpengine.noise import BLT, BandedInverse, BandMF, NoiseSource
from dpengine.noise import source as noise_source
from dpengine.sampling import BMinSepSampling
from dpengine.sampling.custom_scheme import CustomDraws
from dpengine.sampling.cyclic import CyclicDraws
from dpengine.sampling.poisson import PoissonDraws
from dpengine.sampling.shuffle import ShuffleDraws


def test_a_resumed_run_has_its_weights_optimizer_and_position(tmp_path):
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


@pytest.mark.hazard("P2")
def test_batches_and_noise_after_a_resume_are_new(tmp_path):
    first = Run().train(3).saved(tmp_path / "run").train(2)
    others = [Run().resumed(tmp_path / "run").train(2) for _ in range(2)]
    runs = [first.batches[3:], *(run.batches for run in others)]
    assert all(a != b for a, b in itertools.combinations(runs, 2))
    assert len({run.weights.sum().item() for run in (first, *others)}) == 3


def test_a_run_may_be_saved_again_before_its_next_step(tmp_path):
    Run().train(3).saved(tmp_path / "run")
    Run().resumed(tmp_path / "run").saved(tmp_path / "run")
    assert Run().resumed(tmp_path / "run").train(1).loader.position == 4


@pytest.mark.parametrize("stop", [3, 4])  # before the end of an epoch, and at it
@pytest.mark.hazard("O48")
def test_a_seeded_run_repeats_its_steps_after_a_load(tmp_path, stop):
    first = Run(seed=1).train(stop).saved(tmp_path / "run").train(2)
    a, b = (Run(seed=1).resumed(tmp_path / "run").train(2) for _ in range(2))
    assert torch.equal(a.weights, b.weights)
    assert torch.equal(a.weights, first.weights)


@pytest.mark.parametrize("noise", [BandMF(num_bands=4), BLT(num_buffers=1), BandedInverse(num_bands=2)], ids=str)
def test_a_resumed_seeded_run_equals_an_uninterrupted_one(tmp_path, noise):
    settings = {"seed": 1, "noise": noise, "steps": 12, "epochs": None}
    first = Run(**settings).train(5).saved(tmp_path / "run").train(7)
    second = Run(**settings).resumed(tmp_path / "run").train(7)
    assert torch.equal(first.weights, second.weights)
    assert second.batches == first.batches[5:] and second.engine.epsilon == first.engine.epsilon


def still(name, engine=None):
    """A run whose weights change only by noise."""
    cycles = {"banded": 3, "column-normalised": 3}.get(
        name, 4 if name in ("blt", "banded inverse", "lambda-cgd") else 1
    )
    model = Still()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    data = DataLoader(TensorDataset(torch.zeros(12, 1)), batch_size=12 // cycles)
    engine = engine or PrivacyEngine(seed=5)
    return engine, *engine.make_private(model, optimizer, data, plan=CONFIGS[name], target_delta=1e-5)


def noise_of(run, count):
    """Returns the noise that was added to the weights in a number of steps."""
    _, model, optimizer, batches = run
    steps = []
    while len(steps) < count:
        for (x,) in itertools.islice(batches, count - len(steps)):
            before = model.weight.detach().clone()
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
            steps.append((before - model.weight.detach()).double().numpy())
    return steps


@pytest.mark.one_in(3, "name", "at")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.hazard("P3")
def test_noise_continues_as_one_matrix_with_nothing_released_since(tmp_path, name, at):
    first, second = still(name), still(name)
    steps = noise_of(first, at)
    checkpoint.save(tmp_path / "run", first[0])
    checkpoint.load(tmp_path / "run", second[0], nothing_released_since=True)
    steps += noise_of(second, STEPS - at)
    assert second[0].epsilon == pytest.approx(CONFIGS[name].epsilon(1e-5), rel=1e-9)  # one run, and not two
    expected = expected_covariance(CONFIGS[name], 1.0)
    assert agrees(covariance(np.stack(steps)), expected, DRAWS).all()


@pytest.mark.one_in(6, "name", "at", others="slow")
@pytest.mark.one_in(3, "name", "at")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.hazard("P2", "P3")
def test_noise_restarts_unless_nothing_released_since_is_passed(tmp_path, name, at, monkeypatch):
    monkeypatch.setattr(NoiseSource, "fresh", lambda kind: NoiseSource(bytes(range(32)), kind=kind))  # no seed
    monkeypatch.setattr("dpengine.checkpoint.run_state.secrets.randbits", lambda bits: 12345)
    first, second = still(name, PrivacyEngine()), still(name, PrivacyEngine())
    steps = noise_of(first, at)
    checkpoint.save(tmp_path / "run", first[0])
    checkpoint.load(tmp_path / "run", second[0])
    steps += noise_of(second, STEPS - at)
    whole = expected_covariance(CONFIGS[name], 1.0)
    expected = np.zeros_like(whole)
    expected[:at, :at] = whole[:at, :at]
    expected[at:, at:] = whole[: STEPS - at, : STEPS - at]
    assert agrees(covariance(np.stack(steps)), expected, DRAWS).all()
    events = {charge.event for charge in second[0].ledger.history}
    assert len(events) == (1 if name == "independent" else 2)
    assert second[0].epsilon >= CONFIGS[name].epsilon(1e-5) * (1 - 1e-9)


@pytest.mark.parametrize("noise", [BandMF(num_bands=4), BLT(num_buffers=1), BandedInverse(num_bands=2)], ids=str)
@pytest.mark.hazard("P2")
def test_each_branch_of_a_rolled_back_run_is_charged(tmp_path, noise):
    """An example included in every branch participates once per branch, as in a run of as many epochs."""
    settings = {"noise": noise, "steps": 12, "epochs": None}
    run = Run(**settings).train(1).saved(tmp_path / "run")
    once = run.engine.epsilon
    for _ in range(3):
        run.train(1)
        run.engine.detach(run.model)
        _, _, run.loader = run.engine.make_private(
            run.model, run.optimizer, loader(), target_delta=1e-3, noise_multiplier=1.0, noise=noise, steps=12
        )
        run.resumed(tmp_path / "run")
    run.train(1)
    rounds = [charge.event for charge in run.engine.ledger.history]
    assert len({event.run for event in rounds}) == 4
    assert run.engine.epsilon > 1.5 * once


@pytest.mark.hazard("P3")
def test_known_later_steps_prevent_continuing_as_one_matrix(tmp_path):
    settings = {"noise": BandMF(num_bands=2), "steps": 8, "epochs": None}
    first = Run(**settings).train(2).saved(tmp_path / "run").train(1)
    second = Run(**settings)
    second.engine.load_state_dict(first.engine.state_dict())
    with pytest.raises(LedgerError, match="charged steps of the loaded run"):
        second.resumed(tmp_path / "run", nothing_released_since=True)
    second.resumed(tmp_path / "run").train(1)
    assert second.engine.ledger.steps == 6


@pytest.mark.hazard("S11")
def test_groups_are_restored_with_nothing_released_since(tmp_path):
    settings = {"noise": BandMF(num_bands=2), "steps": 8, "epochs": None}
    first = Run(data=loader(batch_size=60), **settings).train(3).saved(tmp_path / "run")
    for options, apart in (({"nothing_released_since": True}, True), ({}, False)):
        second = Run(data=loader(batch_size=60), **settings).resumed(tmp_path / "run", **options).train(5)
        batches = first.batches + second.batches
        even, odd = set().union(*batches[::2]), set().union(*batches[1::2])
        assert even.isdisjoint(odd) == apart


@pytest.mark.parametrize("noise", [None, BandMF(num_bands=4)], ids=["independent", "banded"])
def test_samples_stay_separate_over_two_interruptions_without_steps_in_between(tmp_path, noise):
    scheme = BMinSepSampling(sampling_prob=0.9, min_separation=4)
    settings = {"sampling": scheme, "noise": noise, "steps": 20, "epochs": None}
    batches = []
    for number, steps in enumerate((6, 3, 7)):
        run = Run(seed=None, **settings)
        if number:
            run.resumed(tmp_path / f"{number}", nothing_released_since=True)
        batches += run.train(steps).saved(tmp_path / f"{number + 1}").batches
    for step, batch in enumerate(batches):
        assert batch.isdisjoint(set().union(*batches[step + 1 : step + 4]))
    (charge,) = run.engine.ledger.history  # one run, in which an example participates 4 times at most
    assert charge.event.cycles(charge.count) == 4


@pytest.mark.hazard("P3")
def test_another_matrix_is_not_continued(tmp_path):
    settings = {"steps": 8, "epochs": None}
    Run(noise=BandMF(num_bands=2, strategy=[1.0, 0.5]), **settings).train(2).saved(tmp_path / "run")
    other = Run(noise=BandMF(num_bands=2, strategy=[1.0, 0.50001]), **settings)
    with pytest.raises(MechanismMismatchError, match="cannot continue as one matrix"):
        other.resumed(tmp_path / "run", nothing_released_since=True)
    other.resumed(tmp_path / "run").train(1)


@pytest.fixture
def accelerator(monkeypatch):
    """Makes the CPU draw the noise of an accelerator while True is passed."""

    def install(drawn_there):
        monkeypatch.setattr(noise_source, "_GENERATOR_DEVICES", ("cpu",) if drawn_there else ("cuda",))

    return install


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("first", ["CPU", "accelerator", "not recorded"])
def test_a_matrix_that_generates_rows_again_continues_only_with_their_generator(
    tmp_path, accelerator, monkeypatch, first, seed
):
    settings = {"noise": BandedInverse(num_bands=2), "steps": 8, "epochs": None, "seed": seed}
    accelerator(first != "CPU")
    run = Run(**settings).train(2)
    if first == "not recorded":  # as an earlier version saved it
        monkeypatch.setattr(checkpoint.run_state, "state_of", _without_generators(checkpoint.run_state.state_of))
    run.saved(tmp_path / "run")
    accelerator(first != "accelerator")
    with pytest.raises(MechanismMismatchError, match="noise cannot continue as one matrix: its generator was"):
        Run(**settings).resumed(tmp_path / "run", nothing_released_since=True)
    if seed is None:
        Run(**settings).resumed(tmp_path / "run").train(1)  # the noise starts again
    if first != "not recorded":
        accelerator(first == "accelerator")
        Run(**settings).resumed(tmp_path / "run", nothing_released_since=True).train(1)


def _without_generators(state_of):
    def earlier(run):
        state = state_of(run)
        del state["noise"]["generators"]
        return state

    return earlier


@pytest.mark.parametrize("noise", [None, BandMF(num_bands=4), BLT(num_buffers=1)], ids=str)
def test_noise_with_stored_rows_continues_on_any_device(tmp_path, accelerator, noise):
    settings = {"noise": noise, "steps": 8, "epochs": None}
    accelerator(True)
    Run(**settings).train(2).saved(tmp_path / "run")
    accelerator(False)
    Run(**settings).resumed(tmp_path / "run", nothing_released_since=True).train(1)


def test_checkpoints_without_a_generator_continue_on_the_cpu(tmp_path, monkeypatch):
    settings = {"noise": BandedInverse(num_bands=2), "steps": 8, "epochs": None}
    state_of = checkpoint.run_state.state_of
    monkeypatch.setattr(checkpoint.run_state, "state_of", _without_generators(state_of))
    Run(**settings).train(2).saved(tmp_path / "run")
    Run(**settings).resumed(tmp_path / "run", nothing_released_since=True).train(1)


def test_a_model_that_moves_during_training_raises_where_noise_would_not_cancel(accelerator):
    for noise, refused in ((BandedInverse(num_bands=2), True), (BandMF(num_bands=2), False)):
        accelerator(False)
        run = Run(noise=noise, steps=8, epochs=None).train(2)
        accelerator(True)
        with pytest.raises(PrivacyError, match="different generator") if refused else contextlib.nullcontext():
            run.train(1)


@pytest.mark.slow
def test_a_resumed_target_keeps_the_saved_noise_multiplier(tmp_path):
    settings = {"noise_multiplier": None, "target_epsilon": 3.0, "epochs": 3}
    run = Run(**settings).train(4)
    run.engine.detach(run.model)
    settings |= {"target_epsilon": 5.0}
    run.model, engine = nn.Linear(4, 3), run.engine
    run.optimizer = torch.optim.Adam(run.model.parameters(), lr=0.01)
    _, _, run.loader = engine.make_private(run.model, run.optimizer, loader(), target_delta=1e-3, **settings)
    run.train(2).saved(tmp_path / "run")
    again = Run(**settings)
    assert again.engine.describe()["noise_multiplier"] != engine.describe()["noise_multiplier"]
    again.resumed(tmp_path / "run")
    assert again.engine.describe()["noise_multiplier"] == engine.describe()["noise_multiplier"]
    assert again.engine.epsilon == engine.epsilon
    again.train(10)
    assert 4.9 < again.engine.epsilon <= 5.0 and list(again.loader) == []


@pytest.mark.slow
@pytest.mark.parametrize("longer", [{"epochs": 20}, {"steps": 200, "epochs": None}], ids=["epochs", "steps"])
def test_a_resumed_run_with_more_planned_steps_meets_its_target(tmp_path, longer):
    settings = {"noise_multiplier": None, "target_epsilon": 3.0, "epochs": 2}
    Run(**settings).train(2).saved(tmp_path / "run")
    again = Run(**{**settings, **longer}).resumed(tmp_path / "run")
    while batches := list(itertools.islice(again.loader, 1)):
        x, y = batches[0]
        again.optimizer.zero_grad()
        F.cross_entropy(again.model(x[:, :4]), y).backward()
        again.optimizer.step()
    assert 2.9 < again.engine.epsilon <= 3.0


def test_a_scheduler_is_resumed(tmp_path):
    def scheduled():
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        run = Run(model=model, optimizer=lambda parameters, lr: optimizer, lr_scheduler=scheduler)
        return run, scheduler

    run, scheduler = scheduled()
    for _ in range(3):
        run.train(1)
        scheduler.step()
    run.saved(tmp_path / "run")
    again, other = scheduled()
    again.resumed(tmp_path / "run")
    assert other.last_epoch == 3 and again.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]
    with pytest.raises(MechanismMismatchError, match="lr_scheduler"):
        Run(optimizer=torch.optim.SGD).resumed(tmp_path / "run")


@pytest.mark.slow
def test_the_report_states_that_a_run_was_resumed(tmp_path):
    Run().train(1).saved(tmp_path / "run")
    assert "checkpoint" not in str(Run().train(1).engine.report())
    assert "after it and are not in this ledger" in str(Run().resumed(tmp_path / "run").engine.report())


def test_the_threshold_of_adaptive_clipping_is_resumed(tmp_path):
    first = Run(clipping=Adaptive()).train(5).saved(tmp_path / "run")
    second = Run(clipping=Adaptive()).resumed(tmp_path / "run")
    moved = first.engine.describe()["clipping"]["norm"]
    assert moved != Adaptive().bounds[0]
    assert second.engine.describe()["clipping"]["norm"] == moved


def test_tied_weights_are_stored_once(tmp_path):
    def tied():
        model = Parts(lambda m, x: m.head(m.b(m.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4), head=nn.Linear(4, 3))
        model.b.weight = model.a.weight
        return model

    torch.manual_seed(1)
    first = Run(model=tied()).train(2).saved(tmp_path / "run")
    stored = load_file(tmp_path / "run" / "model.safetensors")
    assert "b.weight" not in stored
    assert torch.equal(Run(model=tied()).resumed(tmp_path / "run").weights, first.weights)


@pytest.mark.hazard("N11", "P6")
def test_the_key_is_only_in_the_private_folder(tmp_path):
    run = Run().train(2).saved(tmp_path / "run")
    key = inside.noise_source(run.engine).secret_state()["key"]
    holding = [p.name for p in (tmp_path / "run").rglob("*") if p.is_file() and key.encode() in p.read_bytes()]
    assert holding == ["run.safetensors"]
    private = tmp_path / "run" / "private"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in private.iterdir()} == {0o600}


def test_a_plain_model_loads_the_weights(tmp_path):
    run = Run().train(2).saved(tmp_path / "run")
    plain = nn.Linear(4, 3)
    plain.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    assert torch.equal(plain.weight, run.model.weight)
    with safe_open(tmp_path / "run" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.filterwarnings("ignore:.*DPE012")
@pytest.mark.parametrize(
    ("kind", "former", "settings"),
    [
        (PoissonDraws, "PoissonSampling", {}),
        (ShuffleDraws, "ShuffleSampling", {"sampling": "shuffle"}),
        (CyclicDraws, "CyclicPoissonStrategy", {"noise": BandMF(num_bands=2)}),
        (CustomDraws, "OwnDraws", {"sampling": recipe("Bernoulli")(0.25)}),
    ],
)
def test_a_checkpoint_with_a_former_name_of_a_sampling_scheme_is_loaded(tmp_path, monkeypatch, kind, former, settings):
    as_now = kind.__repr__

    def as_before(draws):
        return as_now(draws).replace(kind.__name__, former).replace("class_name=", "name=")

    with monkeypatch.context() as earlier:
        earlier.setattr(kind, "__repr__", as_before)
        Run(**settings).train(2).saved(tmp_path)
    again = Run(**settings)
    checkpoint.load(tmp_path, again.engine)
    assert again.loader.position == 2
