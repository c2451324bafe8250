"""A report says of a run what the parts of the run say of themselves."""

import inside
import pytest
import torch
from loops import examples, make_loop

from dpengine import PrivacyEngine
from dpengine.accounting import Charge, GaussianEvent, Relation, epsilon_of
from dpengine.errors import AccountingRefusedError
from dpengine.report import PrivacyReport, RunFacts

DATA = {"name": "rows", "source": "here", "licence": "none", "sha256": {"a": "0" * 64}}


def trained(**options):
    loop = make_loop(**options)
    for inputs, targets in loop.loader:
        loop.step(inputs, targets)
    return loop


@pytest.mark.parametrize("rate", [0.01, 0.25, 0.9])
def test_the_light_of_poisson_sampling_is_green_at_every_rate(rate):
    loop = trained(noise_multiplier=1.5, target_delta=1e-3, sample_rate=rate)
    lights = loop.engine.report().to_dict()["accounting"]["assumptions"]
    assert next(light for light in lights if "Poisson" in light["name"])["holds"] == "yes"


@pytest.mark.filterwarnings("ignore:.*DPE012")
def test_each_fact_is_that_of_the_run():
    loop = trained(noise_multiplier=1.5, target_delta=1e-3)
    facts = loop.engine.report().facts
    assert facts.plan == inside.described_plan(loop.engine)
    assert facts.plan.items() <= loop.engine.describe().items()
    assert facts.history == loop.engine.ledger.history
    assert facts.delta == 1e-3
    assert facts.relation is Relation.ZERO_OUT
    assert facts.accountant == loop.engine.accountant
    assert facts.num_examples == len(loop.loader.dataset)
    assert facts.target_epsilon is None
    assert facts.device == "cpu"
    assert facts.torch == torch.__version__
    assert facts.ledger_on_disk is False


def test_epsilon_of_the_report_is_that_of_the_engine():
    loop = trained(noise_multiplier=1.5, target_delta=1e-3)
    guarantee = loop.engine.report().to_dict()["guarantee"]
    assert guarantee["epsilon"] == loop.engine.epsilon
    assert guarantee["delta"] == loop.engine.delta
    assert guarantee["adjacency"] == "zero-out"


def test_the_target_and_the_plan_for_it_are_in_the_report():
    loop = trained(noise_multiplier=None, target_epsilon=4.0, target_delta=1e-3, steps=50)
    facts = loop.engine.report().facts
    assert (facts.target_epsilon, facts.planned_steps) == (4.0, 50)
    assert facts.steps == len(loop.loader)


def test_r1_a_shuffled_run_shows_no_epsilon(recwarn):
    loop = trained(sampling="shuffle", noise_multiplier=1.5)
    report = loop.engine.report()
    assert report.to_dict()["guarantee"]["epsilon"] is None
    assert "ε not claimed: Poisson assumption not met" in str(report)


def shuffled(steps, engine=None, **options):
    loop = make_loop(engine=engine, sampling="shuffle", noise_multiplier=1.5, **options)
    for _, (inputs, targets) in zip(range(steps), loop.loader, strict=False):
        loop.step(inputs, targets)
    return loop


def test_f_s1_a_shuffled_run_states_a_bound_without_amplification(recwarn):
    loop = shuffled(3)
    report = loop.engine.report()
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


def test_f_s1_without_the_charges_of_all_passes_there_is_no_bound(recwarn):
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


def test_r3_a_run_without_noise_is_not_private(recwarn):
    report = trained(noise_multiplier=0.0).engine.report()
    assert report.to_dict()["guarantee"]["epsilon"] == "inf"
    assert "NOT PRIVATE" in str(report)


def test_constants_that_were_given_make_it_add_or_remove():
    constants = {"sample_rate": 0.2, "expected_batch_size": 4, "target_delta": 1e-3}
    report = trained(noise_multiplier=1.5, **constants).engine.report()
    assert report.facts.relation is Relation.ADD_OR_REMOVE_ONE
    assert report.facts.constants_declared is True
    assert report.to_dict()["data"]["n"] == {"value": None, "public": False}


def test_what_the_user_says_is_in_the_report():
    engine = trained(noise_multiplier=1.5).engine
    utility = {"metric": "accuracy", "value": 0.8, "split": "test"}
    report = engine.report(data=DATA, utility=utility, excludes=("the moon",)).to_dict()
    assert report["data"]["source"] == "here"
    assert report["utility"] == utility
    assert "the moon" in report["coverage"]["excludes"]


def test_the_facts_survive_a_round_trip():
    facts = trained(noise_multiplier=1.5).engine.report(data=DATA).facts
    assert RunFacts.from_state(facts.state_dict()) == facts


def test_a_misspelt_argument_is_an_error():
    with pytest.raises(TypeError, match="utility"):
        trained(noise_multiplier=1.5).engine.report(utilty={})
