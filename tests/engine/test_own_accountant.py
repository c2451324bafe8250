"""Custom accountants: they compute the budget, observe charges, and are named in reports."""

import json
import math

import inside
import pytest
import torch
from loops import BATCH, first_batch, make_loop, train, unchanged

from dpengine import PrivacyEngine
from dpengine.accounting import Charge, Relation, delta_of, epsilon_of
from dpengine.cli.main import main
from dpengine.clipping import Adaptive
from dpengine.errors import (
    AccountingRefusedError,
    BudgetExceeded,
    CalibrationError,
    CorruptFileError,
    RepeatedBackwardError,
)
from dpengine.ledger_file import contents
from dpengine.noise import BLT, BandMF
from dpengine.report import PrivacyReport
from dpengine.report.reading import report_schema

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012", "ignore:.*DPE006")


class Own:
    """Default accountant times a factor; records the observed charges."""

    name = "own"

    def __init__(self, factor=1.0):
        self.factor, self.seen = factor, []

    __hash__ = None  # it keeps state

    def epsilon(self, history, delta, relation):
        return self.factor * epsilon_of(history, delta, "pld", relation)

    def delta(self, history, epsilon, relation):
        return delta_of(history, epsilon / self.factor, "pld", relation)

    def charged(self, charge):
        self.seen.append(charge)


class Plain:
    """Does not observe charges."""

    name, epsilon, delta, factor = "plain", Own.epsilon, Own.delta, 1.5


def own_loop(accountant, **options):
    options = {"target_delta": 1e-3} | options
    return make_loop(engine=PrivacyEngine(accountant, seed=0), **options)


def totals(charges):
    return [(charge.kind, charge.count) for charge in charges]


# Answers


def test_engine_uses_the_custom_accountant():
    own = Own(2.0)
    loop = own_loop(own, noise_multiplier=1.0)
    train(loop)
    engine = loop.engine
    builtin = epsilon_of(engine.ledger.totals, 1e-4, "pld", Relation.ZERO_OUT)
    assert engine.get_epsilon(1e-4) == 2.0 * builtin
    assert engine.epsilon == engine.spent.epsilon == engine.metrics()["privacy/epsilon"] == engine.get_epsilon(1e-3)
    assert engine.spent.accountant_used == "own"
    assert engine.spent.steps == 4


@pytest.mark.one_in(2, "noise", "make")
@pytest.mark.parametrize("noise", [None, BandMF(num_bands=2), BLT()], ids=["independent", "BandMF", "BLT"])
@pytest.mark.parametrize("make", [lambda: Own(1.5), Plain])
def test_calibration_and_loader_use_the_custom_accountant(make, noise):
    loop = own_loop(make(), target_epsilon=3.0, steps=8, noise=noise)
    own = loop.engine.accountant
    steps = train(loop, epochs=4)
    assert 8 <= steps < 16
    assert 2.0 < loop.engine.epsilon <= 3.0
    if noise is None:
        one_more = [*loop.engine.ledger.history, Charge(inside.event(loop.engine), 1)]
        assert epsilon_of(one_more, 1e-3, own, Relation.ZERO_OUT) > 3.0
        with pytest.raises(BudgetExceeded, match="DPE011"):
            loop.optimizer.step()
    assert list(loop.loader) == []


def test_the_noise_is_calibrated_to_the_events_of_the_run():
    class NoCycles(Own):
        """Bounds each cyclic step as if its batch contained all examples."""

        def epsilon(self, history, delta, relation):
            return sum(charge.count for charge in history if hasattr(charge.event, "cycle_length"))

    with pytest.raises(CalibrationError, match=r"in 8 steps; smallest reachable here: 8\.00"):
        own_loop(NoCycles(), target_epsilon=3.0, steps=8, noise=BandMF(num_bands=2))


def test_error_for_a_value_out_of_range_names_the_accountant():
    own = Own()
    loop = own_loop(own, noise_multiplier=1.0)
    train(loop)
    for factor, error in ((math.nan, ValueError), (-1.0, ValueError), (1j, TypeError)):
        own.factor = factor
        with pytest.raises(error, match="accountant 'own'"):
            _ = loop.engine.epsilon


def test_step_raises_without_an_update_if_the_accountant_fails():
    own = Own()
    loop = own_loop(own, target_epsilon=3.0, steps=8, on_budget="raise")
    batch = first_batch(loop.loader)
    loop.backward(*batch)
    own.factor = math.nan
    with unchanged(loop.model), pytest.raises(ValueError, match="accountant 'own'"):
        loop.optimizer.step()
    assert loop.engine.ledger.steps == 0
    own.factor = 1.0
    loop.optimizer.zero_grad()  # discards the batch, which is charged as a released one
    assert inside.state(loop.engine).zero
    train(loop)
    assert loop.engine.ledger.steps == 5


# Observation


def test_accountant_observes_released_and_discarded_batches():
    own = Own()
    loop = own_loop(own, noise_multiplier=1.0)
    batches = list(loop.loader)
    assert totals(own.seen) == [("void", 1)] * 3
    loop.step(*batches[-1])
    event = inside.event(loop.engine)
    assert own.seen[-1] == Charge(event, 1, "release")
    assert (event.noise_multiplier, event.sample_rate) == (1.0, pytest.approx(BATCH / 24))
    loop.optimizer.zero_grad()
    loop.backward(*first_batch(loop.loader))
    loop.engine.detach(loop.model)
    assert totals(own.seen)[-1] == ("void", 1)
    assert sum(charge.count for charge in own.seen) == loop.engine.ledger.steps


def test_accountant_observes_a_charge_before_the_update():
    own, seen = Own(), []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(len(own.seen))
            return super().step(closure)

    loop = own_loop(own, noise_multiplier=1.0, make_optimizer=lambda parameters: Watched(parameters, lr=0.1))
    train(loop)
    assert seen == [1, 2, 3, 4]


def test_accountant_observes_each_charge_once_across_runs():
    own = Own()
    engine = PrivacyEngine(own, seed=0)
    loops = [make_loop(engine=engine, noise_multiplier=sigma, target_delta=1e-3) for sigma in (1.0, 2.0)]
    engine.ledger.charge(inside.event(engine))
    for loop in loops:
        train(loop)
    assert totals(own.seen) == [("release", 1)] * 9
    assert {charge.event.noise_multiplier for charge in own.seen} == {1.0, 2.0}


@pytest.mark.parametrize("reserve", [1, 3])
def test_accountant_observes_the_charges_of_a_ledger_file(tmp_path, reserve):
    own = Own()
    options = {"ledger": tmp_path / "run.ledger", "reserve_steps": reserve, "seed": 0}
    engines = [PrivacyEngine(own, **options), PrivacyEngine(own, **options)]
    loops = [make_loop(engine=engine, noise_multiplier=1.0, target_delta=1e-3) for engine in engines]
    train(loops[0])
    train(loops[1])
    assert totals(own.seen) == [("release", 1)] * 8  # of both engines, each charge once
    assert engines[0].ledger.steps == 8
    for engine, loop in zip(engines, loops, strict=True):
        engine.detach(loop.model)
    written = contents.read(tmp_path / "run.ledger").history
    assert sum(charge.count for charge in written) == 8


@pytest.mark.parametrize("durable", [False, True], ids=["memory", "file"])
def test_an_observer_that_raises_discards_the_step_and_leaves_the_charge(tmp_path, durable):
    class Fails(Own):
        fails = True

        def charged(self, charge):
            super().charged(charge)
            if self.fails and charge.kind == "release":
                raise OSError("no line to the accountant")

    own = Fails()
    engine = PrivacyEngine(own, seed=0, ledger=tmp_path / "run.ledger" if durable else None)
    loop = make_loop(engine=engine, noise_multiplier=1.0, target_delta=1e-3, clipping=Adaptive(1.0))
    batch = first_batch(loop.loader)
    with unchanged(loop.model), pytest.raises(OSError, match="no line"):
        loop.step(*batch)
    assert inside.state(loop.engine).zero
    assert loop.charges == [("release", 1)]  # counted once
    assert engine.ledger.steps == sum(charge.count for charge in own.seen)
    charged = engine.ledger.steps
    own.fails = False
    assert train(loop) == 4
    assert engine.ledger.steps == charged + 4
    if durable:
        engine.detach(loop.model)
        written = contents.read(tmp_path / "run.ledger").history
        assert sum(charge.count for charge in written) == engine.ledger.steps


# State


def test_the_state_stores_the_name_and_loading_keeps_the_accountant_of_the_engine():
    own = Own(2.0)
    loop = own_loop(own, noise_multiplier=1.0)
    train(loop)
    state = json.loads(json.dumps(loop.engine.state_dict()))
    assert state["accountant"] == "own"
    for accountant, factor in ((other := Own(3.0), 3.0), ("pld", 1.0)):
        engine = PrivacyEngine(accountant)
        engine.load_state_dict(state)
        assert engine.accountant is accountant
        assert engine.get_epsilon(1e-3) == pytest.approx(factor / 2.0 * loop.engine.epsilon)
    assert other.seen == []  # loaded, not charged here


# Reports


@pytest.fixture
def report():
    loop = own_loop(Own(1.5), noise_multiplier=1.0)
    train(loop)
    return loop.engine.report()


@pytest.mark.slow
def test_report_marks_a_custom_accountant_as_not_verified(report):
    for text in (str(report), report.to_markdown(), report.to_html()):
        assert "computed by own, not verified" in " ".join(text.split())
        assert "accountant 'own' of dpengine" not in text
    assert "computed by own, not verified" in repr(report)
    document = report.to_dict()
    assert document["accounting"] | {"assumptions": []} == {
        "accountant": "own",
        "library": "user",
        "version": document["accounting"]["version"],
        "discretization": None,
        "assumptions": [],
    }
    accountants = report_schema()["properties"]["accounting"]["properties"]
    assert accountants["library"]["enum"] == ["dpengine", "user"]
    assert "Privacy cost by step" not in report.to_html()


def test_report_with_a_built_in_accountant_has_no_verification_notice():
    loop = own_loop("pld", noise_multiplier=1.0)
    train(loop)
    report = loop.engine.report()
    assert report.to_dict()["accounting"]["library"] == "dpengine"
    assert "not verified" not in str(report) + repr(report)


@pytest.mark.slow
def test_a_report_is_read_again_without_the_accountant(report, tmp_path):
    report.save(tmp_path)
    again = PrivacyReport.load(tmp_path)
    assert again.to_json() == report.to_json()
    assert (str(again), again.to_markdown(), again.to_html()) == (str(report), report.to_markdown(), report.to_html())
    assert again.facts.accounting.accountant == "own"


def edited(report, **changes):
    from dpengine.report.document import digest_of

    document = report.to_dict()
    for path, value in changes.items():
        part, key = path.split("__")
        document[part][key] = value
    return json.dumps(document | {"digest": digest_of(document)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"guarantee__epsilon": 0.01}, "guarantee.epsilon is 0.01, below"),
        ({"accounting__accountant": "pld"}, "the name 'pld' of a built-in one"),
        ({"accounting__library": "dpengine"}, "accountant='own' is not known"),
        ({"accounting__library": "other"}, 'accounting.library is "other"'),
        ({"mechanism__steps": 3}, "mechanism.steps is 3"),
        ({"coverage__covers": []}, "coverage.covers"),
    ],
)
def test_edited_report_of_a_custom_accountant_is_rejected(report, changes, message):
    with pytest.raises(CorruptFileError, match=message):
        PrivacyReport.from_json(edited(report, **changes))


def test_epsilon_below_the_lower_bound_is_not_reported(tmp_path):
    loop = own_loop(Own(0.5), noise_multiplier=1.0)
    train(loop)
    report = loop.engine.report()
    assert loop.engine.epsilon > 0
    assert report.to_dict()["guarantee"]["epsilon"] is None
    assert "ε not claimed: own gives guarantee.epsilon" in str(report)
    report.save(tmp_path)
    assert str(PrivacyReport.load(tmp_path)) == str(report)


def test_the_error_of_an_accountant_is_the_reason_in_a_report_without_epsilon():
    class Refuses(Own):
        def epsilon(self, history, delta, relation):
            raise AccountingRefusedError("own has no bound for such batches.")

    loop = own_loop(Refuses(), noise_multiplier=1.0)
    train(loop)
    assert "own has no bound for such batches" in " ".join(str(loop.engine.report()).split())
    assert "privacy/epsilon" not in loop.engine.metrics()


def test_command_line_reports_that_a_custom_accountant_is_unavailable(report, tmp_path, capsys):
    loop = own_loop(Own(1.5), noise_multiplier=1.0)
    (tmp_path / "privacy_state.json").write_text(json.dumps(loop.engine.state_dict()))
    assert main(["report", str(tmp_path)]) == 2
    assert "names the accountant 'own', which is not part of dpengine" in " ".join(capsys.readouterr().err.split())
    (tmp_path / "privacy_state.json").unlink()
    report.save(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    assert "computed by own, not verified" in " ".join(capsys.readouterr().out.split())


def failing_once(engine):
    """Returns a list; while it is not empty, observing a charge raises."""
    armed = []

    def observe(charge):
        if armed:
            armed.clear()
            raise OSError("no line to the accountant")

    engine.ledger.observe(observe)
    return armed


def test_a_batch_in_the_sums_is_not_clipped_again_after_the_loader_raised():
    loop = make_loop(noise_multiplier=1.0, target_delta=1e-3)
    armed, batches = failing_once(loop.engine), iter(loop.loader)
    loop.optimizer.zero_grad()
    batch = next(batches)
    loop.backward(*batch)
    next(batches)  # skipped
    armed.append(True)
    with pytest.raises(OSError, match="no line"):
        next(batches)
    assert inside.state(loop.engine).stage == "clipped"
    with pytest.raises(RepeatedBackwardError):
        loop.backward(*batch)


@pytest.mark.parametrize("fails", [False, True])
def test_the_step_of_a_batch_that_the_loader_did_not_return_counts_as_skipped(fails):
    """The released steps 0 and 3 belong to one group, which is included twice."""
    loop = make_loop(noise=BandMF(num_bands=3), noise_multiplier=1.0, steps=12, target_delta=1e-3)
    armed = failing_once(loop.engine)
    for number in range(4):
        loop.optimizer.zero_grad()
        try:
            batch = next(iter(loop.loader))
        except OSError:
            continue
        if number == 1:
            armed += [True] * fails
        elif number != 2:
            loop.backward(*batch)
            loop.optimizer.step()
    assert loop.loader.position == 4
    assert loop.engine.ledger.steps == 4
