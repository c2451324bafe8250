"""Engines with a ledger file charge it before each release and read the charges of earlier runs."""

import gc
import itertools
import json
import os

import pytest
import torch
import torch.nn.functional as F
from ledger_runs import Run, data
from torch import nn

from dpengine import PrivacyEngine, checkpoint
from dpengine.accounting import epsilon_of
from dpengine.accounting.ledger import steps_of
from dpengine.errors import CalibrationError, LedgerError
from dpengine.ledger_file import read
from dpengine.noise import BandMF
from dpengine.plan import DPSGDConfig


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "run.ledger"


def counts(path):
    return [(charge.kind, charge.count) for charge in read(path).history]


@pytest.mark.hazard("A11")
def test_the_next_run_starts_with_the_charges_of_the_previous_run(path):
    first = Run(path).train(5).gone()
    second = Run(path)
    assert second.engine.ledger.steps == 5 and second.engine.epsilon == first.engine.epsilon
    second.train(3)
    assert second.engine.ledger.steps == 8 and steps_of(read(path).history) == 8
    assert second.engine.epsilon > first.engine.epsilon


@pytest.mark.hazard("A11")
def test_engines_of_one_process_share_the_charges_of_one_file(path, recwarn):
    first, second = Run(path).train(2), Run(path).train(3)
    assert first.engine.ledger is second.engine.ledger and first.engine.ledger.steps == 5
    assert first.engine.epsilon == second.engine.epsilon
    assert not [one for one in recwarn if "Another engine" in str(one.message)]


def test_a_run_that_outlives_its_engine_continues_to_charge(path):
    run = Run(path).train(1)
    run.engine = None
    gc.collect()
    run.train(2)
    assert steps_of(read(path).history) == 3


def test_epsilon_follows_from_the_file(path):
    run = Run(path, reserve=4, noise=BandMF(num_bands=2), steps=9).train(7).gone()
    assert epsilon_of(read(path).history, 1e-3) == run.engine.epsilon


@pytest.mark.hazard("L5")
def test_a_charge_is_on_disk_before_the_weights_change(path):
    run = Run(path)
    seen, step = [], torch.optim.SGD.step

    def look(optimizer, closure=None):
        seen.append(steps_of(read(path).history))
        return step(optimizer, closure)

    type(run.optimizer).dp_base.step, original = look, type(run.optimizer).dp_base.step
    try:
        run.train(3)
    finally:
        torch.optim.SGD.step = original
    assert seen == [1, 2, 3]


@pytest.mark.filterwarnings("ignore:.*DPE006")
def test_all_batches_of_a_step_are_charged_to_the_file(path):
    run = Run(path)
    for x, y in itertools.islice(run.loader, 2):
        F.cross_entropy(run.model(x), y).backward()
    run.optimizer.step()
    assert counts(path) == [("release", 2)]
    assert run.engine.ledger.steps == 2


@pytest.mark.parametrize("ended", ["gone", "died"])
def test_steps_are_reserved_and_settled_unless_the_process_dies(path, ended):
    run = Run(path, reserve=10).train(13)
    assert steps_of(read(path).history) == 20 and next(iter(read(path).runs.values())).reserved == 10
    getattr(run, ended)()
    assert counts(path) == (
        [("release", 10), ("release", 3)] if ended == "gone" else [("release", 10), ("release", 10)]
    )
    assert Run(path).engine.ledger.steps == (13 if ended == "gone" else 20)


def test_discarded_batches_are_taken_from_the_reservation_and_reported(path):
    run = Run(path, reserve=10)
    for _ in itertools.islice(run.loader, 2):  # no backward pass: both are discarded when the model is detached
        pass
    run.train(3)
    run.engine.detach(run.model)
    assert sum(count for kind, count in counts(path) if kind == "void") == 2
    assert sum(count for kind, count in counts(path) if kind == "release") == 3
    assert next(iter(read(path).runs.values())).closed


def test_a_reservation_never_exceeds_the_budget(path):
    run = Run(path, reserve=1000, target_epsilon=3.0, steps=7).train(3).died()
    assert steps_of(read(path).history) == 7
    assert epsilon_of(read(path).history, 1e-3) <= 3.0
    assert run.engine.ledger.steps == 3


def test_a_reservation_never_exceeds_a_budget_without_planned_steps(path):
    Run(path, reserve=50, target_epsilon=3.0, steps=20, on_budget="stop").train(20).gone()
    assert epsilon_of(read(path).history, 1e-3) <= 3.0
    assert Run(path, noise_multiplier=4.0, reserve=50).train(30).died()
    assert steps_of(read(path).history) == 20 + 50


def test_a_reservation_never_exceeds_the_budget_after_a_change_of_the_plan(path):
    run = Run(path, reserve=1000, target_epsilon=3.0, steps=20)
    run.optimizer.noise_multiplier /= 1.5
    run.train(2).died()
    assert 2 < steps_of(read(path).history) < 20
    assert epsilon_of(read(path).history, 1e-3) <= 3.0


@pytest.mark.slow
def test_a_new_run_gets_the_remaining_budget_of_the_file(path):
    first = Run(path, target_epsilon=3.0, steps=10).train(10).gone()
    second = Run(path, target_epsilon=3.5, steps=10).train(10)
    noise = [run.engine.describe()["noise_multiplier"] for run in (first, second)]
    assert noise[1] > noise[0] and 3.4 < second.engine.epsilon <= 3.5
    second.gone()
    with pytest.raises(CalibrationError):
        Run(path, target_epsilon=3.0, steps=10)


def test_an_interrupted_run_continues_under_its_budget(path, tmp_path):
    first = Run(path, target_epsilon=3.0, steps=10, reserve=3).train(4)
    checkpoint.save(tmp_path / "saved", first.engine)
    first.train(3).died()
    assert steps_of(read(path).history) == 9
    second = Run(path, target_epsilon=3.0, steps=10, reserve=3)
    assert second.engine.describe()["noise_multiplier"] == first.engine.describe()["noise_multiplier"]
    checkpoint.load(tmp_path / "saved", second.engine)
    assert second.engine.ledger.steps == 9  # counted once, those after the checkpoint too
    second.train(10)
    assert second.engine.ledger.steps == 10 and second.engine.epsilon <= 3.0  # then the loader ends
    assert steps_of(read(path).history) == 10


def test_an_interrupted_run_by_a_plan_is_continued_to_its_end(path, tmp_path):
    config = DPSGDConfig(iterations=10, sampling_prob=1 / 3, noise_multiplier=1.0, num_examples=60)
    settings = {"noise_multiplier": None, "plan": config}
    first = Run(path, **settings).train(4)
    checkpoint.save(tmp_path / "saved", first.engine)
    first.train(3).died()
    second = Run(path, **settings)
    checkpoint.load(tmp_path / "saved", second.engine)
    second.train(20)
    assert second.loader.position == 10 and second.engine.ledger.steps == 7 + 6


@pytest.mark.hazard("P1")
def test_a_file_that_ends_before_the_checkpoint_is_rejected(path, tmp_path):
    first = Run(path).train(2)
    older = path.read_bytes()
    checkpoint.save(tmp_path / "saved", first.train(2).engine)
    first.gone()
    path.write_bytes(older)
    second = Run(path)
    before = second.model.weight.detach().clone()
    with pytest.raises(LedgerError, match="lacks charges"):
        checkpoint.load(tmp_path / "saved", second.engine)
    assert torch.equal(second.model.weight, before)


@pytest.mark.hazard("P1")
def test_a_checkpoint_next_to_a_file_is_not_loaded_without_it(path, tmp_path):
    checkpoint.save(tmp_path / "saved", Run(path).train(2).engine)
    with pytest.raises(LedgerError, match="PrivacyEngine"):
        checkpoint.load(tmp_path / "saved", Run(None).engine)


@pytest.mark.slow
def test_charges_in_memory_are_written_when_they_are_loaded(path, tmp_path):
    in_memory = Run(None).train(4)
    engine = PrivacyEngine(ledger=path)
    engine.load_state_dict(json.loads(json.dumps(in_memory.engine.state_dict())))
    assert engine.ledger.steps == 4 and steps_of(read(path).history) == 4
    other = Run(path, sample_rate=0.3, expected_batch_size=20).train(1)
    assert "Adjacency: zero-out" in str(other.engine.report())  # no constants were declared elsewhere
    engine.load_state_dict(engine.state_dict())  # the file has it already
    assert engine.ledger.steps == 5 == steps_of(read(path).history)


@pytest.mark.hazard("P1")
def test_a_missing_ledger_file_is_not_replaced_by_a_new_one(path, tmp_path):
    first = Run(path).train(2)
    checkpoint.save(tmp_path / "saved", first.engine)
    first.train(5).gone()
    path.unlink()
    second = Run(path)
    with pytest.raises(LedgerError, match="another ledger file"):
        checkpoint.load(tmp_path / "saved", second.engine)


@pytest.mark.slow
def test_the_report_says_that_later_releases_may_be_missing_unless_the_file_has_them(path, tmp_path):
    in_memory, on_disk = Run(None).train(2), Run(path).train(2)
    checkpoint.save(tmp_path / "in_memory", in_memory.engine)
    checkpoint.save(tmp_path / "on_disk", on_disk.engine)
    on_disk.gone()
    for name, missing in (("on_disk", False), ("in_memory", True)):
        run = Run(path)
        checkpoint.load(tmp_path / name, run.engine)
        assert ("if they came after it" in " ".join(str(run.engine.report()).split())) == missing
        run.gone()


def test_an_engine_created_earlier_sees_the_charges_of_a_later_run(path):
    early = PrivacyEngine(ledger=path)
    run = Run(path).train(3)
    assert early.ledger.steps == 3 and early.get_epsilon(1e-3) == run.engine.epsilon


def test_a_later_relation_applies_to_all_runs(path):
    first = Run(path, sample_rate=0.3, expected_batch_size=20).train(1)
    Run(path).train(1)
    assert "Adjacency: zero-out" in str(first.engine.report())


def test_the_noise_multiplier_survives_two_crashes(path, tmp_path):
    settings = {"target_epsilon": 3.0, "steps": 10}
    first = Run(path, **settings).train(4)
    checkpoint.save(tmp_path / "saved", first.engine)
    first.died()
    for _ in range(2):
        again = Run(path, **settings)
        assert again.engine.describe()["noise_multiplier"] == first.engine.describe()["noise_multiplier"]
        checkpoint.load(tmp_path / "saved", again.engine)
        again.train(1).died()
        Run(path, target_epsilon=4.0, steps=10).died()  # it made no step


def test_a_run_of_another_unit_is_rejected(path):
    Run(path).train(1).gone()
    model = nn.Linear(4, 3)
    engine = PrivacyEngine(ledger=path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(LedgerError, match="costs cannot be added"):
        engine.make_private(
            model, optimizer, data(), noise_multiplier=1.0, privacy_unit=torch.arange(60) // 2, target_delta=1e-3
        )
    F.cross_entropy(model(torch.ones(1, 4)), torch.tensor([0])).backward()
    assert model.weight.grad is not None  # nothing was attached


@pytest.mark.slow
def test_the_relation_is_the_one_that_holds_for_all_runs_of_the_file(path):
    Run(path, sample_rate=0.3, expected_batch_size=20).train(1).gone()
    declared = Run(path, sample_rate=0.3, expected_batch_size=20).train(1)
    assert "Adjacency: add-or-remove-one" in str(declared.engine.report())
    declared.gone()
    Run(path).train(1).gone()
    assert "Adjacency: zero-out" in str(Run(path, sample_rate=0.3, expected_batch_size=20).train(1).engine.report())


@pytest.mark.slow
def test_the_report_says_whether_the_ledger_is_on_disk(path):
    line = "[yes] Each charge is on disk before the result of its step is released"
    assert line in str(Run(path).train(1).engine.report())
    assert line not in str(Run(None).train(1).engine.report())


def test_the_file_holds_no_private_values(path):
    Run(path, sample_rate=0.3, expected_batch_size=20).train(4).gone()
    text = path.read_text()
    for word in (os.uname().nodename, os.path.expanduser("~"), str(path.parent), "num_examples", '"rows"'):
        assert word not in text
    assert text.count("date") == 1  # and no time of a step


@pytest.mark.parametrize("reserve", [0, -1, 1001, 1.0, True, "1"])
def test_an_invalid_reservation_is_rejected(path, reserve):
    with pytest.raises(ValueError, match="reserve_steps"):
        PrivacyEngine(ledger=path, reserve_steps=reserve)
    assert not path.exists()


def test_contradicting_arguments_are_rejected(tmp_path):
    with pytest.raises(ValueError, match="needs a ledger file"):
        PrivacyEngine(reserve_steps=10)
    with pytest.raises(TypeError, match="path"):
        PrivacyEngine(ledger=3)
    with pytest.raises(LedgerError, match="cannot be read"):
        PrivacyEngine(ledger=tmp_path)
