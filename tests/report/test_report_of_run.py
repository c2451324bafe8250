"""Reports of real runs state the settings, sampling, generators and probes of each run."""

import re

import inside
import pytest
import torch
from loops import examples, make_loop
from torch import nn
from torch.utils.data import DataLoader
from two_devices import SECOND, TwoDevices, to_second

from dpengine import PrivacyEngine, check_loss, checkpoint
from dpengine.accounting import Charge, GaussianEvent, Relation, epsilon_of
from dpengine.accounting.origin import Origin
from dpengine.errors import AccountingRefusedError, LedgerError, PrivacyWarning
from dpengine.ledger_file.contents import read
from dpengine.noise.source import NoiseSource
from dpengine.report import PrivacyReport
from dpengine.report.all_runs import noise_of_all
from dpengine.report.assumptions import assumptions
from dpengine.sampling import ExternalBatches

DATA = {"name": "rows", "source": "here", "licence": "none", "sha256": {"a": "0" * 64}}


def trained(**options):
    loop = make_loop(**options)
    for inputs, targets in loop.loader:
        loop.step(inputs, targets)
    return loop


@pytest.mark.slow
@pytest.mark.one_in(3, "rate")
@pytest.mark.parametrize("rate", [0.01, 0.25, 0.9])
def test_the_poisson_sampling_assumption_holds_at_every_rate(rate):
    loop = trained(noise_multiplier=1.5, target_delta=1e-3, sample_rate=rate)
    lights = loop.engine.report().to_dict()["accounting"]["assumptions"]
    assert next(light for light in lights if "Poisson" in light["name"])["holds"] == "yes"


@pytest.mark.filterwarnings("ignore:.*DPE012")
def test_the_report_states_the_settings_of_the_run():
    loop = trained(noise_multiplier=1.5, target_delta=1e-3)
    facts = loop.engine.report().facts
    assert facts.plan == inside.described_plan(loop.engine)
    assert facts.plan.items() <= loop.engine.describe().items()
    assert facts.accounting.history == loop.engine.ledger.history
    assert facts.accounting.delta == 1e-3
    assert facts.accounting.relation is Relation.ZERO_OUT
    assert facts.accounting.accountant == loop.engine.accountant
    assert facts.dataset.num_examples == len(loop.loader.dataset)
    assert facts.accounting.target_epsilon is None
    assert facts.environment.device == "cpu"
    assert facts.environment.torch == torch.__version__
    assert facts.accounting.ledger_on_disk is False


def test_epsilon_of_the_report_is_that_of_the_engine():
    loop = trained(noise_multiplier=1.5, target_delta=1e-3)
    guarantee = loop.engine.report().to_dict()["guarantee"]
    assert guarantee["epsilon"] == loop.engine.epsilon
    assert guarantee["delta"] == loop.engine.delta
    assert guarantee["adjacency"] == "zero-out"


def test_the_target_and_the_plan_for_it_are_in_the_report():
    loop = trained(noise_multiplier=None, target_epsilon=4.0, target_delta=1e-3, steps=50)
    facts = loop.engine.report().facts
    assert (facts.accounting.target_epsilon, facts.accounting.planned_steps) == (4.0, 50)
    assert facts.steps == len(loop.loader)


def shuffled(steps, engine=None, **options):
    loop = make_loop(engine=engine, sampling="shuffle", noise_multiplier=1.5, **options)
    for _, (inputs, targets) in zip(range(steps), loop.loader, strict=False):
        loop.step(inputs, targets)
    return loop


@pytest.mark.hazard("S1")
def test_a_shuffled_run_shows_no_epsilon_and_a_bound_without_amplification(recwarn):
    loop = shuffled(3)
    report = loop.engine.report()
    assert report.to_dict()["guarantee"]["epsilon"] is None
    assert "ε not claimed: Poisson assumption not met" in str(report)
    bound = report.to_dict()["guarantee"]["epsilon_unamplified"]
    assert bound == pytest.approx(epsilon_of([Charge(GaussianEvent(1.5))], loop.engine.delta), rel=1e-9)
    assert "no amplification: " in str(report)
    assert PrivacyReport.from_json(report.to_json()).to_dict() == report.to_dict()
    with pytest.raises(AccountingRefusedError):
        _ = loop.engine.epsilon
    loop.loader.load_state_dict({"position": 2 * len(loop.loader)})  # skips the rest of a pass, and another one
    inputs, targets = next(iter(loop.loader))
    loop.step(inputs, targets)
    bound = loop.engine.report().to_dict()["guarantee"]["epsilon_unamplified"]
    assert bound == pytest.approx(epsilon_of([Charge(GaussianEvent(1.5), 3)], loop.engine.delta), rel=1e-9)


@pytest.mark.hazard("S1")
def test_without_the_charges_of_all_passes_there_is_no_bound(recwarn):
    data, other = examples(), PrivacyEngine()
    loop = shuffled(3, dataset=data)
    other.load_state_dict(loop.engine.state_dict())
    again = shuffled(3, engine=other, dataset=data)
    assert not any("Another engine" in str(warning.message) for warning in recwarn)
    assert again.engine.report().to_dict()["guarantee"]["epsilon_unamplified"] is None
    merged = make_loop(sampling="shuffle", noise_multiplier=1.5)
    merged.optimizer.zero_grad()
    for inputs, targets in merged.loader:
        torch.nn.functional.cross_entropy(merged.model(inputs), targets).backward()
    merged.optimizer.step()
    assert merged.engine.report().to_dict()["guarantee"]["epsilon_unamplified"] is None


def test_a_run_without_noise_is_not_private(recwarn):
    report = trained(noise_multiplier=0.0).engine.report()
    assert report.to_dict()["guarantee"]["epsilon"] == "inf"
    assert "NOT PRIVATE" in str(report)


@pytest.mark.slow
def test_declared_constants_select_the_add_or_remove_relation():
    constants = {"sample_rate": 0.2, "expected_batch_size": 4, "target_delta": 1e-3}
    report = trained(noise_multiplier=1.5, **constants).engine.report()
    assert report.facts.accounting.relation is Relation.ADD_OR_REMOVE_ONE
    assert report.facts.accounting.constants_declared is True
    assert report.to_dict()["data"]["n"] == {"value": None, "public": False}


def test_statements_of_the_user_are_in_the_report():
    engine = trained(noise_multiplier=1.5).engine
    utility = {"metric": "accuracy", "value": 0.8, "split": "test"}
    report = engine.report(data=DATA, utility=utility, excludes=("the moon",)).to_dict()
    assert report["data"]["source"] == "here"
    assert report["utility"] == utility
    assert "the moon" in report["coverage"]["excludes"]


def test_a_misspelt_argument_is_an_error():
    with pytest.raises(TypeError, match="utility"):
        trained(noise_multiplier=1.5).engine.report(utilty={})


def external_and_private(first, engine):
    """Charges one run with external batches and one with the private loader, the external one first or last."""
    data = examples()
    for external in (first, not first):
        if external:
            batches = ExternalBatches(4, num_examples=len(data), sample_rate=0.2)
            loop = make_loop(engine=engine, dataset=data, sampling=batches, noise_multiplier=1.5, target_delta=1e-3)
            loop.step(*data[:4])
        else:
            loop = make_loop(engine=engine, dataset=data, noise_multiplier=1.5, target_delta=1e-3)
            loop.step(*next(iter(loop.loader)))


def sampling_light(engine):
    (light,) = [one for one in engine.report().to_dict()["accounting"]["assumptions"] if "Poisson" in one["name"]]
    return light["holds"]


@pytest.mark.one_in(2, "on_disk", "first")
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("first", [True, False])
def test_a_declared_rate_of_any_run_is_in_the_report(tmp_path, first, on_disk):
    engine = PrivacyEngine(ledger=tmp_path / "run.ledger" if on_disk else None)
    external_and_private(first, engine)
    report = engine.report()
    assert report.facts.other_samplings == (("poisson",) if not first else ("external-poisson",))
    assert sampling_light(engine) == "not checked"
    text = " ".join(str(report).split())
    assert "declared by the user" in text and "that the training loop did not draw as declared" in text
    assert PrivacyReport.from_json(report.to_json()).to_dict() == report.to_dict()


def after_loading(state):
    other = PrivacyEngine()
    other.load_state_dict(state)
    make_loop(engine=other, noise_multiplier=1.5, target_delta=1e-3)
    return other


@pytest.mark.slow
def test_loaded_charges_keep_their_sampling_schemes_or_are_reported_as_unknown():
    engine = PrivacyEngine()
    external_and_private(True, engine)
    state = engine.state_dict()
    assert after_loading(state).report().facts.other_samplings == ("external-poisson",)
    state["samplings"] = sorted(
        {origin["sampling"] for origin in state.pop("origins")}
    )  # as earlier versions stored it
    assert after_loading(state).report().facts.other_samplings == ("external-poisson",)
    del state["samplings"]
    other = after_loading(state)
    assert other.report().facts.other_samplings == ("unknown",)
    assert sampling_light(other) == "not checked"
    plain = PrivacyEngine()
    loop = make_loop(engine=plain, noise_multiplier=1.5, target_delta=1e-3)
    loop.step(*next(iter(loop.loader)))
    resumed = after_loading(plain.state_dict())
    assert (resumed.report().facts.other_samplings, sampling_light(resumed)) == ((), "yes")


def test_a_ledger_file_keeps_the_sampling_schemes_of_its_runs_and_of_loaded_charges(tmp_path):
    external = PrivacyEngine()
    external_and_private(True, external)
    engine = PrivacyEngine(ledger=tmp_path / "run.ledger")
    engine.load_state_dict(external.state_dict())
    make_loop(engine=engine, noise_multiplier=1.5, target_delta=1e-3)
    assert engine.report().facts.other_samplings == ("external-poisson",)
    assert read(tmp_path / "run.ledger").history == list(engine.ledger.history)


@pytest.mark.parametrize(
    "wrong",
    [{"origins": None, "samplings": [1]}, {"origins": 1}, {"origins": [1]}]
    + [{"origins": [one]} for one in ({"sampling": 1}, {"relation": "near"}, {"relation": 1}, {"shoe_size": "42"})],
    ids=str,
)
def test_a_state_with_damaged_origins_is_rejected(wrong):
    with pytest.raises(LedgerError, match=r"samplings|origin"):
        PrivacyEngine().load_state_dict(PrivacyEngine().state_dict() | wrong)


# Facts that hold for all of several runs. The runs share an engine, a state or a ledger file.

CONSTANTS = {"sample_rate": 0.2, "expected_batch_size": 4}


@pytest.fixture(params=["engine", "state", "file", "loaded into a file"])
def two_runs(request, tmp_path):
    """Makes two runs, one after the other, each with one step, and returns the second. Only the first is seeded."""

    def one(engine, **options):
        loop = make_loop(engine=engine, **{"noise_multiplier": 1.5, "target_delta": 1e-3} | options)
        loop.step(*next(iter(loop.loader)))
        return loop

    def make(first, second, *, seed=None):
        if request.param == "engine" and seed is not None:
            pytest.skip("one engine has the same seed in all runs")
        shared = {"ledger": tmp_path / "run.ledger"} if request.param == "file" else {}
        loop = one(PrivacyEngine(seed=seed, **shared), **first)
        loop.engine.detach(loop.model)
        if request.param == "engine":
            return one(loop.engine, **second)
        shared = shared or ({"ledger": tmp_path / "other"} if request.param == "loaded into a file" else {})
        engine = PrivacyEngine(**shared)
        if request.param != "file":
            engine.load_state_dict(loop.engine.state_dict())
        return one(engine, **second)

    return make


@pytest.mark.one_in(4, "first", "second", others="slow")
@pytest.mark.one_in(2, "first", "second")
@pytest.mark.parametrize("first", [{}, CONSTANTS])
@pytest.mark.parametrize("second", [{}, CONSTANTS])
def test_a_report_states_the_relation_of_all_runs(two_runs, first, second):
    engine = two_runs(first, second).engine
    private = first == second == CONSTANTS
    report = engine.report().to_dict()
    assert report["guarantee"]["adjacency"] == ("add-or-remove-one" if private else "zero-out")
    assert report["run"]["constants_declared"] is private
    assert report["data"]["n"]["value"] == (None if second else 24)  # a run that was given constants never shows it
    assert report["guarantee"]["epsilon"] == engine.epsilon


def test_a_state_without_a_relation_makes_the_dataset_size_public():
    loop = trained(noise_multiplier=1.5, target_delta=1e-3, **CONSTANTS)
    state = loop.engine.state_dict()
    del state["origins"]
    other = PrivacyEngine()
    other.load_state_dict(state)
    make_loop(engine=other, noise_multiplier=1.5, target_delta=1e-3, **CONSTANTS)
    assert other.report().facts.accounting.relation is Relation.ZERO_OUT


def test_a_report_names_a_seed_of_an_earlier_run(two_runs):
    report = two_runs({}, {}, seed=1).engine.report()
    assert report.facts.noise["insecure_seed"] is True
    assert "[INSECURE_SEED]" in str(report)
    assert PrivacyReport.from_json(report.to_json()).to_dict() == report.to_dict()


@pytest.mark.parametrize("known", [True, False])
def test_a_report_names_each_generator_and_says_if_one_is_not_known(known):
    state = trained(noise_multiplier=1.5).engine.state_dict()
    (origin,) = state["origins"]
    loaded = {"kind": "torch-philox", "cryptographic": False, "insecure_seed": False} if known else {}
    state["origins"] = [{name: origin[name] for name in ("sampling", "relation")} | loaded]
    noise = after_loading(state).report().facts.noise
    assert noise["kind"] == ("chacha20, torch-philox" if known else "chacha20, unknown")
    assert noise.get("cryptographic") is (False if known else None)
    assert noise.get("insecure_seed") is (False if known else None)


@pytest.mark.parametrize(("generates", "kind"), [("meta", "chacha20"), ("cpu", "philox4x32-10")])
def test_a_report_names_the_generator_and_device_of_the_run_after_the_model_moved(monkeypatch, generates, kind):
    monkeypatch.setattr("dpengine.noise.source._GENERATOR_DEVICES", (generates,))
    loop = trained(noise_multiplier=1.5)
    loop.model.to("meta")
    facts = loop.engine.report().facts
    assert (facts.noise["kind"], facts.noise["cryptographic"]) == (kind, kind == "chacha20")
    assert facts.environment.device == "cpu"


def test_a_report_names_the_generators_of_all_devices_of_a_model(monkeypatch):
    monkeypatch.setattr("dpengine.noise.source._GENERATOR_DEVICES", (SECOND.type,))
    model, data = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), examples()
    to_second(model[1])
    with TwoDevices():
        engine = PrivacyEngine()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine.make_private(model, optimizer, DataLoader(data, 6), noise_multiplier=1.5)
        facts = engine.report().facts
    assert (facts.noise["kind"], facts.noise["cryptographic"]) == ("chacha20, philox4x32-10", False)
    assert facts.environment.device == "cpu, meta"
    assert noise_of_all([Origin(kind=facts.noise["kind"]), Origin(kind="chacha20")])["kind"] == facts.noise["kind"]


def test_a_report_names_the_seed_of_noise_that_was_drawn_before_the_source_changed():
    loop = trained(engine=PrivacyEngine(seed=1), noise_multiplier=1.5)
    inside.draw_from(loop.engine, NoiseSource.fresh())
    assert loop.engine.report().facts.noise["insecure_seed"] is True


def test_a_report_says_that_the_loss_was_probed_only_if_it_was_in_all_runs(two_runs):
    second = two_runs({}, {})
    check_loss(second.model, torch.nn.functional.cross_entropy, examples().tensors)
    assert second.engine.report().facts.loss_checked is None


def loss_assumption(engine):
    (item,) = [item for item in assumptions(engine.report().facts) if "loss" in item.name]
    return item.holds, item.evidence


def test_a_report_says_how_often_the_loss_was_probed_or_why_it_was_not():
    loop = make_loop(noise_multiplier=1.5)
    assert loss_assumption(loop.engine) == ("not checked", "the loss was not checked (no step was probed)")
    loop = trained(noise_multiplier=1.5)
    holds, evidence = loss_assumption(loop.engine)
    assert holds == "yes"
    assert re.fullmatch(r"no mixing of samples was seen in [1-9] probed steps?", evidence)
    check_loss(loop.model, torch.nn.functional.cross_entropy, examples().tensors)
    assert loss_assumption(loop.engine) == ("yes", f"check_loss or check_loop found no mixing of samples; {evidence}")
    assert "sound" not in str(loop.engine.report())


def test_a_report_says_why_the_loss_could_not_be_checked():
    loop = make_loop(noise_multiplier=1.5)
    for inputs, targets in loop.loader:
        factor = 1.0 if inputs[0].sum() > inputs[1].sum() else 2.0
        with pytest.warns(PrivacyWarning, match="takes a branch that depends on the batch"):
            (factor * torch.nn.functional.cross_entropy(loop.model(inputs), targets)).backward()
        break
    reason = "the loss was not checked (the loop takes a branch that depends on the batch)"
    assert loss_assumption(loop.engine) == ("not checked", reason)


def test_a_state_keeps_that_the_loss_was_probed():
    first = trained(noise_multiplier=1.5)
    check_loss(first.model, torch.nn.functional.cross_entropy, examples().tensors)
    assert first.engine.report().facts.loss_checked is True
    other = PrivacyEngine()
    other.load_state_dict(first.engine.state_dict())
    second = make_loop(engine=other, noise_multiplier=1.5)
    assert other.report().facts.loss_checked is None
    check_loss(second.model, torch.nn.functional.cross_entropy, examples().tensors)
    assert other.report().facts.loss_checked is True


def test_the_probe_of_a_run_with_a_ledger_file_is_in_its_report(tmp_path):
    loop = trained(engine=PrivacyEngine(ledger=tmp_path / "run.ledger"), noise_multiplier=1.5)
    check_loss(loop.model, torch.nn.functional.cross_entropy, examples().tensors)
    assert loop.engine.report().facts.loss_checked is True


def test_a_report_says_that_an_earlier_run_went_on_from_a_checkpoint(tmp_path):
    checkpoint.save(tmp_path / "run", trained(noise_multiplier=1.5).engine)
    resumed = make_loop(noise_multiplier=1.5)
    checkpoint.load(tmp_path / "run", resumed.engine)
    make_loop(engine=resumed.engine, noise_multiplier=1.5)
    for engine in (resumed.engine, after_loading(resumed.engine.state_dict())):
        assert "Releases of the process that saved the checkpoint" in " ".join(engine.report().facts.excludes)


def test_a_ledger_file_keeps_that_a_run_went_on_from_a_checkpoint_without_a_file(tmp_path):
    checkpoint.save(tmp_path / "run", trained(engine=PrivacyEngine(), noise_multiplier=1.5).engine)
    path = tmp_path / "run.ledger"
    resumed = make_loop(engine=PrivacyEngine(ledger=path), noise_multiplier=1.5)
    checkpoint.load(tmp_path / "run", resumed.engine)
    assert "Releases of the process that saved the checkpoint" in " ".join(resumed.engine.report().facts.excludes)
    resumed.engine.detach(resumed.model)
    later = make_loop(engine=PrivacyEngine(ledger=path), noise_multiplier=1.5)
    assert "Releases of the process that saved the checkpoint" in " ".join(later.engine.report().facts.excludes)


@pytest.mark.parametrize(
    ("number", "says"), [(1, ""), (2, "the network between the processes, and"), (None, "of loaded charges, if there")]
)
def test_a_report_says_that_several_processes_shared_an_earlier_run(number, says):
    state = trained(noise_multiplier=1.5).engine.state_dict()
    (origin,) = state["origins"]
    assert origin.pop("processes") == 1
    origin |= {} if number is None else {"processes": number}
    (found,) = after_loading(state).report().facts.excludes or [""]
    assert says in found and bool(says) == bool(found)


UNITS = {"privacy_unit": torch.arange(24) // 2}


@pytest.mark.parametrize(("first", "second"), [({}, UNITS), (UNITS, {})])
def test_runs_of_different_units_are_rejected(two_runs, first, second):
    with pytest.raises(LedgerError, match="'training example', others each 'user'"):
        two_runs(first, second)


def test_a_state_of_another_unit_is_rejected():
    state = trained(noise_multiplier=1.5, **UNITS).engine.state_dict()
    loop = make_loop(noise_multiplier=1.5)
    with pytest.raises(LedgerError, match="costs cannot be added"):
        loop.engine.load_state_dict(state)
    assert not loop.engine.ledger.history
    del state["origins"]  # as an earlier version stored it
    loop.engine.load_state_dict(state)
    assert any("another privacy unit" in sentence for sentence in loop.engine.report().facts.excludes)


def test_runs_of_one_unit_are_composed(two_runs):
    assert two_runs(UNITS, UNITS).engine.report().facts.accounting.unit == "user"
