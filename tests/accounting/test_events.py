import ast
import json
import math
from pathlib import Path

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

import dpengine.accounting as accounting
from dpengine.accounting import (
    GaussianEvent,
    NonPrivateEvent,
    PoissonGaussianEvent,
    UnclaimedEvent,
    release_event,
    to_dp_accounting,
)
from dpengine.accounting.events import event_from_state, event_to_state
from dpengine.errors import AccountingRefusedError, InvalidBudgetError, LedgerError

EVENTS = [GaussianEvent(1.1), PoissonGaussianEvent(0.1, 0.7), NonPrivateEvent(), UnclaimedEvent("shuffled")]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_survive_json(event):
    assert event_from_state(json.loads(json.dumps(event_to_state(event)))) == event


@pytest.mark.parametrize("sigma", [-1.0, math.nan, math.inf, "1", True, None])
def test_noise_multiplier_must_be_finite_and_not_negative(sigma):
    with pytest.raises(InvalidBudgetError, match="noise_multiplier="):
        GaussianEvent(sigma)
    with pytest.raises(InvalidBudgetError, match="noise_multiplier="):
        PoissonGaussianEvent(0.5, sigma)


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.0000001, math.nan, math.inf, "0.1", True])
def test_sample_rate_must_lie_in_zero_one(rate):
    with pytest.raises(InvalidBudgetError, match="sample_rate="):
        PoissonGaussianEvent(rate, 1.0)
    with pytest.raises(InvalidBudgetError, match="sample_rate="):
        release_event(noise_multiplier=1.0, sample_rate=rate)


def test_a_release_is_stated_in_its_simplest_form():
    assert release_event(noise_multiplier=0, sample_rate=0.5) == NonPrivateEvent()
    assert release_event(noise_multiplier=2, sample_rate=1) == GaussianEvent(2.0)
    assert release_event(noise_multiplier=2, sample_rate=0.5) == PoissonGaussianEvent(0.5, 2.0)


@pytest.mark.parametrize(
    "state",
    [{"type": "laplace"}, {}, {"type": "gaussian", "sigma": 1.0}, {"type": "gaussian"}, None, [], {"type": []}, 3],
)
def test_a_damaged_event_is_refused(state):
    with pytest.raises(LedgerError):
        event_from_state(state)


def test_dp_accounting_reads_our_events():
    accountant = PLDAccountant()
    accountant.compose(to_dp_accounting(PoissonGaussianEvent(0.05, 2.0), 100))
    accountant.compose(to_dp_accounting(GaussianEvent(20.0), 5))
    history = (accounting.Charge(PoissonGaussianEvent(0.05, 2.0), 100), accounting.Charge(GaussianEvent(20.0), 5))
    assert accounting.epsilon_of(history, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-4)
    assert to_dp_accounting(GaussianEvent(0.0)) == dp_accounting.NonPrivateDpEvent()
    with pytest.raises(AccountingRefusedError, match="shuffled"):
        to_dp_accounting(UnclaimedEvent("shuffled"))


def test_accounting_never_imports_torch():
    for file in Path(accounting.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = (
                [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "") or ""]
            )
            assert not any(name.split(".")[0] == "torch" for name in names), file
