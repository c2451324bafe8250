import re
from pathlib import Path

import pytest

from dpengine.accounting import Charge, GaussianEvent, NonPrivateEvent, PoissonGaussianEvent, Relation, UnclaimedEvent
from dpengine.report import PrivacyReport, statement
from dpengine.report.assumptions import assumptions

GUARANTEES = Path(__file__).resolve().parents[2] / "docs" / "guarantees.md"
BARE_EPSILON = re.compile(r"(ε|epsilon)\s*(=|≤|:|of)?\s*\d", re.IGNORECASE)


def flat(text):
    """The statement without its line breaks."""
    return " ".join(text.split())


def test_a_statement_contains_every_required_field(make_facts):
    text = flat(statement(make_facts("full-batch")))
    # sqrt(9) / 4 is a mu of 0.75: epsilon 3.14680 at 1e-5, advantage 29.234 %.
    for part in (
        "(ε = 3.15, δ = 1e-05)",
        "central differential privacy",
        "Unit: one training example.",
        "zero-out",
        "their number is public (5,003)",
        "μ-GDP 0.75 (exact)",
        "membership advantage ≤ 29.3 %",
        "accountant 'pld' of dpengine 0.",
        "clipping flat (max_norm=0.5)",
        "noise multiplier 1.5",
        "9 steps charged of 200 planned; target ε = 2.5",
        "hyper-parameters",
        "accuracy on test",
        "training loss",
        "pre-training",
    ):
        assert part in text, part


@pytest.mark.hazard("D4")
def test_statement_and_guarantees_exclude_preprocessing_fitted_to_the_data(make_facts):
    assert "preprocessing that was fitted to rows" in flat(statement(make_facts()))
    not_covered = GUARANTEES.read_text(encoding="utf-8").split("**Not covered.**")[1].split("##")[0]
    assert "for preprocessing" in " ".join(not_covered.split())


def test_every_assumption_is_in_the_statement_with_its_verdict(any_facts):
    text = flat(statement(any_facts))
    for item in assumptions(any_facts):
        assert flat(f"[{item.holds}] {item.name}: {item.evidence}.") in text


@pytest.mark.parametrize(
    ("relation", "words"),
    [
        (
            Relation.ADD_OR_REMOVE_ONE,
            "one has one person more than the other (add or remove one); their number is private.",
        ),
        (Relation.ZERO_OUT, "one person of the first contributes nothing in the second (zero-out)"),
        (Relation.REPLACE_ONE, "they differ in one person (replace one)"),
    ],
)
def test_relation_and_unit_are_in_words(make_facts, relation, words):
    text = flat(statement(make_facts(relation=relation, unit="person")))
    assert words in text
    assert "privacy for each person" in text
    assert "several rows" not in text


def test_a_shuffled_run_never_shows_a_bare_epsilon(make_facts):
    facts = make_facts("shuffled")
    report = PrivacyReport(facts)
    for text in (statement(facts), repr(report), report.to_markdown(), report.to_html()):
        assert "not claimed: Poisson assumption not met" in flat(text)
        assert not BARE_EPSILON.search(text), BARE_EPSILON.search(text)
    assert report.to_dict()["guarantee"]["epsilon"] is None
    assert report.to_dict()["profile"] == []


@pytest.mark.parametrize(
    "history",
    [
        (),
        (Charge(PoissonGaussianEvent(0.02, 1.5), 9),),
        (Charge(PoissonGaussianEvent(0.02, 1.5), 9), Charge(UnclaimedEvent("shuffled"), 1)),
    ],
)
def test_holds_whatever_the_history_of_a_shuffled_run(make_facts, history):
    text = statement(make_facts("shuffled", history=history))
    assert text.startswith("ε not claimed: Poisson assumption not met")


def test_one_shuffled_step_in_a_poisson_run_removes_the_epsilon(make_facts):
    history = (Charge(PoissonGaussianEvent(0.02, 1.5), 9), Charge(UnclaimedEvent("shuffled"), 1))
    assert statement(make_facts(history=history)).startswith("ε not claimed: Poisson assumption not met (shuffled)")


def test_a_shuffled_run_shows_its_bound_under_another_name(make_facts):
    text = flat(statement(make_facts("shuffled")))
    assert "no amplification: 4.09 at δ = 1e-05" in text  # two Gaussians of 1.5: mu 0.9428, epsilon 4.08923
    assert "no amplification" not in statement(make_facts("shuffled", unamplified=()))


@pytest.mark.parametrize(
    "changes",
    [
        {"variant": "not-private"},
        {"variant": "not-private", "history": ()},
        {"history": (Charge(GaussianEvent(1.0), 4), Charge(NonPrivateEvent(), 1))},
    ],
)
def test_without_noise_epsilon_is_infinite_and_the_run_not_private(make_facts, changes):
    facts = make_facts(**changes)
    report = PrivacyReport(facts)
    for text in (statement(facts), repr(report), report.to_markdown(), report.to_html()):
        assert "NOT PRIVATE" in text
        assert "∞" in text
        assert not BARE_EPSILON.search(text.replace("target ε = 2.5", ""))
    assert report.to_dict()["guarantee"]["epsilon"] == "inf"


def test_every_epsilon_of_a_seeded_run_is_stamped(make_facts):
    facts = make_facts("seeded")
    report = PrivacyReport(facts)
    for text in (statement(facts).splitlines()[0], repr(report)):
        assert text.rstrip(")").endswith("[INSECURE_SEED] [generator: not cryptographic]")
    assert report.to_html().count("INSECURE_SEED") >= 4
    assert report.to_dict()["run"]["seed_policy"] == "INSECURE_SEED"
    assert "as long as the seed of the noise stays secret" in flat(report.to_markdown())


def test_a_failed_assumption_is_shown_with_the_epsilon(make_facts):
    assert "[ASSUMPTION NOT MET]" in statement(make_facts(loss_checked=False)).splitlines()[0]


def test_no_charges_cost_zero(make_facts):
    assert "(ε = 0.00, δ = 1e-05)" in statement(make_facts("not-started"))


def test_a_private_size_is_not_shown(make_facts):
    report = PrivacyReport(make_facts("add-or-remove"))
    for text in (str(report), report.to_json(), report.to_markdown(), report.to_html()):
        assert "5003" not in text
        assert "5,003" not in text


def test_more_exclusions_of_the_user_are_listed(make_facts):
    assert "- the tokenizer" in statement(make_facts(excludes=("the tokenizer",)))


def test_lines_fit_a_terminal(any_facts):
    assert max(map(len, statement(any_facts).splitlines()[1:])) <= 100


def test_an_infinite_epsilon_is_never_without_its_stamp(make_facts):
    facts = make_facts(
        history=(Charge(PoissonGaussianEvent(0.02, 1e-200), 3),), plan=make_facts().plan | {"noise_multiplier": 1e-200}
    )
    report = PrivacyReport(facts)
    for text in (repr(report), str(report), report.to_markdown().replace("\\", ""), report.to_html()):
        assert "NOT PRIVATE" in text
    assert "<li>NOT PRIVATE</li>" in report.to_html()


# Batches that the training loop draws


def test_a_declared_rate_is_stated_as_declared_by_the_user(make_facts):
    facts = make_facts("declared")
    text, ordinary = flat(statement(facts)), flat(statement(make_facts()))
    assert text.split(" Setting")[0] == ordinary.split(" Setting")[0]
    assert "(ε = " in text and "not claimed" not in text
    assert "batches of the training loop, declared rate 0.02" in text
    assert "the rate 0.02 was declared by the user; dpengine drew no batch" in text
    assert "batches that the training loop did not draw as declared" in text
    assert "if the training loop drew the batches as declared" in PrivacyReport(facts).to_markdown()
    assert "declared" not in ordinary


def test_other_rates_of_the_ledger_are_listed_next_to_the_declared_one(make_facts):
    history = tuple(Charge(PoissonGaussianEvent(rate, 1.5), 1) for rate in (0.02, 0.04))
    assert "declared by the user; dpengine drew no batch; the ledger has 0.02, 0.04" in flat(
        statement(make_facts("declared", history=history))
    )


@pytest.mark.parametrize("variant", ["external", "external-not-started"])
def test_without_a_declared_rate_no_epsilon_is_claimed_and_no_rate_is_shown(make_facts, variant):
    text = flat(statement(make_facts(variant)))
    assert text.startswith("ε not claimed: the training loop drew the batches, and no sampling rate was declared")
    assert (
        text.count("the training loop drew the batches, and no sampling rate was declared") == 2
    )  # the assumption, too
    assert "batches of the training loop, noise multiplier" in text
    assert PrivacyReport(make_facts(variant)).to_dict()["mechanism"]["sample_rate"] is None
    assert BARE_EPSILON.search(text) is None


@pytest.mark.parametrize("variant", ["external", "declared"])
def test_an_unknown_number_of_examples_is_not_stated_as_zero(make_facts, variant):
    assert "their number is public." in flat(statement(make_facts(variant, num_examples=0)))
    assert "public (0)" in flat(statement(make_facts(num_examples=0)))
