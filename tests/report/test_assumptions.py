import pytest

from dpengine.accounting import Charge, PoissonGaussianEvent, Relation, UnclaimedEvent
from dpengine.report.assumptions import assumptions, stamps


def status(facts, word):
    (item,) = [item for item in assumptions(facts) if word in item.name]
    return item.holds, item.light


@pytest.mark.parametrize(
    ("word", "changes", "holds", "light"),
    [
        ("Poisson", {}, "yes", "green"),
        ("Poisson", {"variant": "shuffled"}, "no", "red"),
        ("Poisson", {"history": (Charge(PoissonGaussianEvent(0.01, 1.5), 9),)}, "not checked", "amber"),
        ("Poisson", {"variant": "not-started"}, "yes", "green"),
        ("Poisson", {"variant": "external"}, "no", "red"),
        ("Poisson", {"variant": "external-not-started"}, "no", "red"),
        ("Poisson", {"variant": "declared"}, "not checked", "amber"),
        ("Poisson", {"variant": "declared", "history": ()}, "not checked", "amber"),
        ("Poisson", {"variant": "declared", "history": (Charge(UnclaimedEvent("x"), 1),)}, "no", "red"),
        ("Poisson", {"variant": "declared-before"}, "not checked", "amber"),
        ("Poisson", {"variant": "loaded"}, "not checked", "amber"),
        ("Poisson", {"other_samplings": ("fixed-size",)}, "yes", "green"),
        ("divisor", {}, "yes", "green"),
        ("divisor", {"variant": "add-or-remove"}, "yes", "green"),
        ("divisor", {"relation": Relation.ADD_OR_REMOVE_ONE, "constants_declared": False}, "no", "red"),
        ("divisor", {"relation": Relation.ADD_OR_REMOVE_ONE}, "not checked", "amber"),
        ("loss", {}, "yes", "green"),
        ("loss", {"loss_checked": False}, "no", "red"),
        ("loss", {"loss_checked": None}, "not checked", "amber"),
        ("watched layer", {}, "yes", "green"),
        ("has noise", {}, "yes", "green"),
        ("has noise", {"variant": "not-private"}, "no", "red"),
        ("key of all noise", {}, "yes", "green"),
        ("key of all noise", {"variant": "seeded"}, "no", "red"),
        ("key of all noise", {"noise": {}}, "not checked", "amber"),
        ("generator", {}, "yes", "green"),
        ("generator", {"variant": "seeded"}, "no", "amber"),
        ("Floating point", {}, "not checked", "amber"),
        ("Floating point", {"noise": {"largest_normal": 5.77}, "delta": 1e-6}, "no", "red"),
        ("on disk", {}, "yes", "green"),
        ("on disk", {"ledger_on_disk": False}, "no", "amber"),
    ],
)
@pytest.mark.hazard("N9")
def test_each_assumption_has_the_expected_status(make_facts, word, changes, holds, light):
    assert status(make_facts(**changes), word) == (holds, light)


def test_every_assumption_has_evidence_of_one_line(any_facts):
    for item in assumptions(any_facts):
        assert item.evidence
        assert "\n" not in item.name + item.evidence
        assert not item.evidence.endswith(".")


def test_a_loss_that_was_not_checked_is_reported_as_unchecked(make_facts):
    (item,) = [item for item in assumptions(make_facts(loss_checked=None)) if "loss" in item.name]
    assert item.evidence.startswith("the loss was not checked; only")
    named = make_facts(loss_checked=None, loss_evidence="no step was probed")
    (item,) = [item for item in assumptions(named) if "loss" in item.name]
    assert item.evidence == "the loss was not checked (no step was probed)"


def test_an_ordinary_run_has_no_warning_stamp(make_facts):
    assert stamps(make_facts()) == ()
    assert stamps(make_facts(ledger_on_disk=False, loss_checked=None)) == ()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"variant": "not-private"}, ("NOT PRIVATE",)),
        ({"variant": "shuffled"}, ("NOT CLAIMED",)),
        ({"variant": "external"}, ("NOT CLAIMED",)),
        ({"variant": "declared"}, ()),
        ({"variant": "seeded"}, ("INSECURE_SEED", "generator: not cryptographic")),
        ({"loss_checked": False}, ("ASSUMPTION NOT MET",)),
        ({"variant": "not-private", "loss_checked": False}, ("NOT PRIVATE", "ASSUMPTION NOT MET")),
    ],
)
def test_failed_assumptions_are_stamped_worst_first(make_facts, changes, expected):
    assert stamps(make_facts(**changes)) == expected


def test_several_sampling_rates_are_listed_and_meet_the_assumption(make_facts):
    history = tuple(Charge(PoissonGaussianEvent(0.02 / k, 1.5), 1) for k in range(1, 8))
    (item,) = [item for item in assumptions(make_facts(history=history)) if "Poisson" in item.name]
    assert item.holds == "yes"
    assert "and 3 more" in item.evidence
