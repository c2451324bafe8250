"""One-run privacy audit of our own engine: bounds stay below the claim, and planted bugs are detected."""

import dataclasses
import json
import math

import inside
import numpy as np
import pytest
import torch
from auditing.runs import CLASSES, FEATURES, ROWS, halve_noise, losses, made, rows, trained
from torch.utils.data import TensorDataset

from dpengine import PrivacyEngine
from dpengine.accounting import epsilon_of_mu
from dpengine.auditing import AuditReport, one_run
from dpengine.auditing.verdict import VERDICTS
from dpengine.clipping import Flat
from dpengine.engine import restrict_to_optimizer
from dpengine.errors import UnknownParameterError
from dpengine.noise import BandMF

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")


def audit(*, steps=40, canaries=400, kind="gradient", data=None, examples=None, seed=0, alpha=0.05, **options):
    more = {"loss": losses, "examples": examples} if kind == "input" else {}
    if "noise_multiplier" not in options:
        options = {"target_epsilon": 4.0, "steps": steps, **options}
    make, train = made(**options), trained(steps)
    return one_run(make, train, data or rows(), canaries=canaries, kind=kind, seed=seed, alpha=alpha, **more)


@pytest.mark.one_in(2, "noise", others="slow")
@pytest.mark.parametrize("noise", [None, BandMF(num_bands=4)], ids=["dp-sgd", "band-mf"])
def test_our_own_engine_passes(noise):
    report = audit(noise=noise)
    assert report.verdict == "pass"
    assert report.claimed == pytest.approx(4, rel=1e-3)
    assert 0.5 * report.claimed < report.bound <= report.claimed
    assert report.n == 400 and report.seed == 0 and report.cost > 0
    assert report.details["releases"] == 40
    assert report.details["bounds"]["f_dp"] > report.details["bounds"]["epsilon_delta"] > 0


@pytest.mark.one_in(2, "noise", others="slow")
@pytest.mark.parametrize("noise", [None, BandMF(num_bands=4)], ids=["dp-sgd", "band-mf"])
def test_pb_1_half_of_the_noise_is_a_violation(monkeypatch, noise):
    halve_noise(monkeypatch)
    report = audit(noise=noise)
    assert report.verdict == "violation" and report.bound > report.claimed


@pytest.mark.slow
def test_pb_13_each_layer_clipped_at_the_threshold_of_all_is_a_violation(monkeypatch):
    monkeypatch.setattr(Flat, "group_of", lambda self, names: list(range(len(names))))
    monkeypatch.setattr("dpengine.clipping.flat.check_norms", lambda *given: None)
    report = audit(canaries=300, width=256, noise_multiplier=1.0)
    assert report.details["shift"] > 1.2
    assert report.verdict == "violation"


def test_a_claim_that_is_too_low_is_refuted_by_guesses(monkeypatch):
    # The Gaussian form trusts the ledger's rate and steps; guesses do not.
    monkeypatch.setattr(PrivacyEngine, "get_epsilon", lambda self, delta: 0.5)
    report = audit(sample_rate=1.0, steps=4, noise_multiplier=0.5)
    assert report.details["bounds"]["epsilon_delta"] > 0.5
    assert report.p < 0.01 and report.verdict == "violation"


def test_an_audit_of_a_run_without_noise_is_inconclusive():
    report = audit(noise_multiplier=0.0, steps=5)
    assert report.verdict == "inconclusive" and report.claimed == math.inf and report.p is None
    assert report.exit_code == 2


def test_an_audit_of_shuffled_batches_is_inconclusive():
    report = audit(noise_multiplier=1.0, sampling="shuffle", steps=5)
    assert report.verdict == "inconclusive" and report.claimed is None


def test_the_unsampled_bound_is_that_of_the_gaussian_curve():
    report = audit(sample_rate=1.0, steps=4, noise_multiplier=1.0)
    assert report.claimed == pytest.approx(epsilon_of_mu(2.0, 1e-5), rel=1e-3)  # mu = sqrt(4) / 1
    assert report.bound <= report.claimed


@pytest.mark.slow
def test_pb_1_examples_memorized_by_a_model_without_noise_are_a_violation(monkeypatch):
    halve_noise(monkeypatch, 1e-3)
    generator = torch.Generator().manual_seed(5)
    wrong = TensorDataset(
        torch.randn(200, FEATURES, generator=generator), torch.randint(0, CLASSES, (200,), generator=generator)
    )
    heard = {"kind": "input", "canaries": 200, "examples": wrong, "sample_rate": 1.0, "lr": 20.0, "steps": 100}
    report = audit(**heard, width=512, target_epsilon=0.2, max_grad_norm=1.0)
    assert set(report.details["bounds"]) == {"epsilon_delta", "f_dp"}
    assert report.verdict == "violation"


def test_input_canaries_default_to_examples_of_the_data_set():
    seen = []
    make, train = made(noise_multiplier=1.0), trained(3)

    def make_and_look(dataset):
        seen.append(len(dataset))
        return make(dataset)

    report = one_run(make_and_look, train, rows(), canaries=30, kind="input", loss=losses, seed=1)
    assert seen == [ROWS] and report.verdict == "pass" and report.details["kind"] == "input"


def test_equal_seeds_have_equal_coins_and_unseeded_audits_differ():
    one, again = audit(steps=3, noise_multiplier=1.0), audit(steps=3, noise_multiplier=1.0)
    assert one.details == again.details
    others = [audit(steps=3, noise_multiplier=1.0, seed=None) for _ in range(2)]
    assert others[0].seed is None and others[0].details["shift"] != others[1].details["shift"]


def test_several_numbers_of_guesses_share_alpha():
    make, train = made(noise_multiplier=0.5, sample_rate=1.0), trained(4)
    few = one_run(make, train, rows(), canaries=400, guesses=20, seed=0)
    both = one_run(make, train, rows(), canaries=400, guesses=(20, 50), seed=0, alpha=0.1)
    assert both.details["guesses"][0] == few.details["guesses"][0]
    assert both.details["bounds"]["epsilon_delta"] >= few.details["bounds"]["epsilon_delta"] > 0


def test_the_model_trains_unchanged_after_the_audit():
    parts = []

    def make(dataset):
        parts.extend(made(noise_multiplier=1.0)(dataset))
        return tuple(parts)

    one_run(make, trained(3), rows(), canaries=40, seed=0)
    engine, _, optimizer, _ = parts
    assert inside.gradients_formed_by(engine)[1]
    assert not optimizer._optimizer_step_pre_hooks
    trained(6)(*parts)
    assert engine.ledger.steps == 6


WRONG = {
    "kind": ({"kind": "white"}, "Choose one of: 'gradient', 'input'"),
    "canaries": ({"canaries": 5}, "at least 20"),
    "bool": ({"canaries": True}, "at least 20"),
    "alpha": ({"alpha": 1.0}, "strictly between 0 and 1"),
    "loss": ({"kind": "input"}, "Pass loss="),
    "examples": ({"examples": rows(50)}, "examples= requires kind='input'"),
    "rows": ({"kind": "input", "canaries": 200, "loss": losses}, "200, but there are 100 examples"),
    "guesses": ({"guesses": 300}, "half of the canaries"),
    "no guesses": ({"guesses": ()}, "half of the canaries"),
    "shape": ({"kind": "input", "canaries": 30, "loss": lambda model, batch: losses(model, batch).mean()}, "shape ()"),
}


@pytest.mark.parametrize("arguments,message", WRONG.values(), ids=WRONG.keys())
def test_invalid_arguments_are_rejected(arguments, message):
    settings = {"canaries": 40, "seed": 0, **arguments}
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        one_run(made(noise_multiplier=1.0), trained(2), rows(), **settings)


def _two_runs(dataset):
    parts = made(noise_multiplier=1.0)(dataset)
    return parts[0], *parts[0].make_private(*_fresh(dataset), noise_multiplier=1.0)


def _fresh(dataset):
    model = torch.nn.Linear(FEATURES, CLASSES)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader(dataset, batch_size=10)


def _restricted(dataset):
    model, _, loader = _fresh(dataset)
    engine = PrivacyEngine()
    private = engine.make_private(model, torch.optim.SGD([model.bias], lr=0.1), loader, noise_multiplier=1.0)
    restrict_to_optimizer(engine)
    return engine, *private


UNWATCHED = {
    "another data set": (lambda dataset: made(noise_multiplier=1.0)(rows()), "that make\\(\\) received has 140"),
    "two runs": (_two_runs, "exactly one run"),
    "nothing private": (lambda dataset: (PrivacyEngine(), *_fresh(dataset)), "exactly one run"),
    "ghost": (made(noise_multiplier=1.0, grad_sample_mode="ghost"), "Pass kind='input'"),
    "some parameters": (_restricted, "restrict_to_optimizer"),
    "units": (
        lambda dataset: made(noise_multiplier=1.0, privacy_unit=np.arange(len(dataset)) // 2)(dataset),
        "privacy_unit",
    ),
}


@pytest.mark.parametrize("make,message", UNWATCHED.values(), ids=UNWATCHED.keys())
def test_runs_that_cannot_be_watched_are_rejected(make, message):
    with pytest.raises(UnknownParameterError, match=message):
        one_run(make, trained(2), rows(), canaries=40, seed=0)


@pytest.mark.slow
def test_an_audited_run_is_not_compiled():
    report = one_run(made(noise_multiplier=1.0, compile="eager"), trained(2), rows(), canaries=40, seed=0)
    same = one_run(made(noise_multiplier=1.0), trained(2), rows(), canaries=40, seed=0)
    assert dataclasses.replace(report, cost=0.0) == dataclasses.replace(same, cost=0.0)


def report(verdict, **more):
    return AuditReport("DC", 0.75, 100, verdict, **more)


def test_the_json_has_every_field_and_no_infinity():
    found = json.loads(report("pass", bound=1.5, claimed=math.inf, seed=3, details={"a": [math.nan, 2]}).to_json())
    assert found["claimed"] == "inf" and found["details"] == {"a": [None, 2]}
    for name in ("detector", "statistic", "n", "p", "bound", "verdict", "seed", "cost"):
        assert name in found
    assert (found["detector"], found["statistic"], found["n"], found["bound"], found["seed"]) == (
        "DC",
        0.75,
        100,
        1.5,
        3,
    )


def test_exit_codes_are_0_for_a_pass_1_for_a_violation_2_for_neither():
    assert [report(verdict).exit_code for verdict in ("pass", "violation", "inconclusive")] == [0, 1, 2]


def test_a_pass_never_claims_that_a_run_is_private():
    for verdict in VERDICTS:
        text = str(report(verdict, bound=1.0, claimed=2.0, caveats=("Mind this.",)))
        assert "private" not in text and "Mind this." in text and "epsilon >= 1" in text and "epsilon = 2" in text
    assert "no violation found" in str(report("pass"))
    assert "refuted" in str(report("violation", p=1e-9)) and "1e-09" in str(report("violation", p=1e-9))


def test_a_verdict_that_has_no_meaning_is_rejected():
    with pytest.raises(ValueError, match="'pass', 'violation', 'inconclusive'"):
        report("private")
