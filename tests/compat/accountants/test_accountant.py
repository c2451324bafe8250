"""The history of an accountant, its state dictionary, the optimizer hook, the registry, and custom accountants."""

import copy
import io
import math
import pickle
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch

from dpengine.accounting import CyclicGaussianEvent, Ledger, PoissonGaussianEvent, UnclaimedEvent
from dpengine.compat.opacus.accountants import (
    GaussianAccountant,
    IAccountant,
    PRVAccountant,
    RDPAccountant,
    create_accountant,
    register_accountant,
    registry,
)
from dpengine.compat.opacus.accountants.utils import get_noise_multiplier

EVENT = PoissonGaussianEvent(0.1, 1.0)


@pytest.fixture
def accountant():
    result = create_accountant("rdp")
    result.history = [(1.0, 0.1, 3), (2.0, 0.1, 1)]
    return result


def steps(accountant):
    return accountant.ledger.steps


def test_equal_consecutive_entries_are_merged():
    accountant = create_accountant("prv")
    for sigma in (1.0, 1.0, 2.0, 1.0):
        accountant.step(noise_multiplier=sigma, sample_rate=0.1)
    assert accountant.history == [(1.0, 0.1, 2), (2.0, 0.1, 1), (1.0, 0.1, 1)]
    assert len(accountant) == 3
    assert isinstance(accountant.history, list)


def test_the_history_shows_charges_of_the_engine_at_once():
    ledger, accountant = Ledger(), create_accountant("gdp")
    accountant.ledger = ledger
    history = accountant.history
    ledger.charge(EVENT, count=2)
    ledger.charge(EVENT, kind="void")  # discarded, which may depend on the data
    assert history == [(1.0, 0.1, 3)]
    assert accountant.history is history
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert ledger.steps == 4


def test_the_ledger_must_be_a_ledger(accountant):
    with pytest.raises(TypeError, match="Ledger"):
        accountant.ledger = []


CHANGES = {
    "append": (lambda h: h.append((3.0, 0.2, 5)), [(1.0, 0.1, 3), (2.0, 0.1, 1), (3.0, 0.2, 5)]),
    "append-equal": (lambda h: h.append((2.0, 0.1, 5)), [(1.0, 0.1, 3), (2.0, 0.1, 6)]),
    "extend": (lambda h: h.extend([(3.0, 0.2, 5)]), [(1.0, 0.1, 3), (2.0, 0.1, 1), (3.0, 0.2, 5)]),
    "insert": (lambda h: h.insert(0, (3.0, 0.2, 5)), [(3.0, 0.2, 5), (1.0, 0.1, 3), (2.0, 0.1, 1)]),
    "set": (lambda h: h.__setitem__(0, (3.0, 0.2, 5)), [(3.0, 0.2, 5), (2.0, 0.1, 1)]),
    "set-slice": (lambda h: h.__setitem__(slice(None), [(3.0, 0.2, 5)]), [(3.0, 0.2, 5)]),
    "delete": (lambda h: h.__delitem__(0), [(2.0, 0.1, 1)]),
    "remove": (lambda h: h.remove((1.0, 0.1, 3)), [(2.0, 0.1, 1)]),
    "pop": (lambda h: h.pop(), [(1.0, 0.1, 3)]),
    "clear": (lambda h: h.clear(), []),
    "reverse": (lambda h: h.reverse(), [(2.0, 0.1, 1), (1.0, 0.1, 3)]),
    "sort": (lambda h: h.sort(key=lambda entry: -entry[0]), [(2.0, 0.1, 1), (1.0, 0.1, 3)]),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
def test_changes_of_the_list_are_changes_of_the_ledger(accountant, change, expected):
    history = accountant.history
    change(history)
    assert history == accountant.history == expected
    fresh = create_accountant("rdp")
    fresh.history = expected
    assert accountant.ledger.history == fresh.ledger.history
    assert accountant.get_epsilon(1e-5) == fresh.get_epsilon(1e-5)


def test_every_method_that_changes_a_list_is_covered():
    ours = type(create_accountant("rdp").history)
    changing = {"append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"}
    changing |= {"__setitem__", "__delitem__", "__iadd__", "__imul__"}
    assert all(name in vars(ours) for name in changing)


def test_adding_in_place_adds(accountant):
    accountant.history += [(3.0, 0.2, 5)]
    assert accountant.history == [(1.0, 0.1, 3), (2.0, 0.1, 1), (3.0, 0.2, 5)]
    accountant.history *= 2
    assert steps(accountant) == 18


def test_pop_returns_the_entry_and_raises_for_an_empty_list(accountant):
    assert accountant.history.pop() == (2.0, 0.1, 1)
    accountant.history.clear()
    with pytest.raises(IndexError):
        accountant.history.pop()


@pytest.mark.parametrize(
    "entry", [(1.0, 0.1), 1.0, "abc", (1.0, 2.0, 1), (-1.0, 0.1, 1), (1.0, 0.1, -1), (1.0, 0.1, 1.5)]
)
def test_an_invalid_entry_is_rejected_and_nothing_changes(accountant, entry):
    before = accountant.history.copy()
    with pytest.raises(ValueError, match=r"."):
        accountant.history.extend([(9.0, 0.1, 1), entry])
    with pytest.raises(ValueError, match=r"."):
        accountant.history = [entry]
    assert accountant.history == before


def test_a_new_history_does_not_change_the_engine_and_its_later_charges_are_added():
    ledger, accountant = Ledger(), create_accountant("rdp")
    accountant.ledger = ledger
    ledger.charge(EVENT, count=5)
    accountant.history = [(4.0, 0.1, 2)]
    assert ledger.steps == 5
    ledger.charge(EVENT, count=2)
    ledger.charge(PoissonGaussianEvent(0.2, 1.0))
    assert accountant.history == [(4.0, 0.1, 2), (1.0, 0.1, 2), (1.0, 0.2, 1)]
    accountant.step(noise_multiplier=1.0, sample_rate=0.2)
    assert accountant.history[-1] == (1.0, 0.2, 2)
    assert ledger.steps == 9
    accountant.history = []
    assert accountant.history == []
    assert accountant.get_epsilon(1e-5) == 0.0
    ledger.charge(EVENT)
    assert accountant.history == [(1.0, 0.1, 1)]


def test_entries_that_are_put_back_keep_their_privacy_events():
    accountant = create_accountant("rdp")
    cyclic = CyclicGaussianEvent(0.1, 1.0, 5, "run")
    accountant.ledger.charge(cyclic, count=7)
    accountant.ledger.charge(UnclaimedEvent("no law"), count=1)
    assert accountant.history == [(1.0, 0.1, 7), (0.0, 1.0, 1)]
    accountant.history = accountant.history[:1]
    assert [charge.event for charge in accountant.ledger.history] == [cyclic]


def test_copies_are_plain_lists(accountant):
    accountant.ledger.charge(UnclaimedEvent("no law"))
    for copied in (copy.deepcopy(accountant.history), pickle.loads(pickle.dumps(accountant.history))):
        assert type(copied) is list
        assert {type(entry) for entry in copied} == {tuple}
        assert copied == accountant.history


def test_an_accountant_can_be_copied_and_pickled(accountant):
    for copied in (copy.deepcopy(accountant), pickle.loads(pickle.dumps(accountant))):
        copied.step(noise_multiplier=1.0, sample_rate=0.1)
        assert copied.history == [(1.0, 0.1, 3), (2.0, 0.1, 1), (1.0, 0.1, 1)]
        assert len(accountant) == 2


def test_a_subclass_may_edit_the_history_in_its_step():
    class DoublingAccountant(RDPAccountant):
        def step(self, *, noise_multiplier, sample_rate):
            last = self.history.pop() if self.history else (noise_multiplier, sample_rate, 0)
            self.history.append((*last[:2], last[2] + 2))

    accountant = DoublingAccountant()
    for _ in range(3):
        accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert accountant.history == [(1.0, 0.1, 6)]


MECHANISMS = {"rdp": RDPAccountant, "prv": PRVAccountant, "gdp": GaussianAccountant}
HISTORY = [(1.0, 0.1, 3), (2.0, 0.05, 7)]


def save_and_load(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_state_survives_save_and_load(mechanism):
    accountant = create_accountant(mechanism)
    accountant.history = HISTORY
    state = accountant.state_dict()
    assert dict(state) == {"history": HISTORY, "mechanism": mechanism}
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert state["history"] == HISTORY  # a copy
    other = create_accountant(mechanism)
    other.load_state_dict(save_and_load(state))
    assert other.history == HISTORY


def test_a_destination_is_filled_and_returned():
    destination = OrderedDict(mine=1)
    assert create_accountant("rdp").state_dict(destination) is destination
    assert list(destination) == ["mine", "history", "mechanism"]


def test_charges_that_triples_cannot_express_survive_save_and_load():
    accountant, other = create_accountant("prv"), create_accountant("prv")
    accountant.ledger.charge(CyclicGaussianEvent(0.1, 1.0, 50, "run"), count=60)
    other.load_state_dict(save_and_load(accountant.state_dict()))
    assert other.ledger.history == accountant.ledger.history
    assert other.get_epsilon(1e-5) == accountant.get_epsilon(1e-5)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "is empty"),
        ({}, "is empty"),
        ({"mechanism": "rdp"}, "has no 'history'"),
        ({"history": []}, "has no 'mechanism'"),
        ({"history": [], "mechanism": "prv"}, r"create_accountant\('prv'\)"),
        ({"history": [(1.0,)], "mechanism": "rdp"}, "triples"),
        ({"history": [], "mechanism": "rdp", "ledger": {"schema": 99}}, "cannot be read"),
    ],
)
def test_a_wrong_state_is_rejected_and_changes_nothing(state, message):
    accountant = create_accountant("rdp")
    accountant.history = HISTORY
    with pytest.raises(ValueError, match=message):
        accountant.load_state_dict(state)
    assert accountant.history == HISTORY


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_hook_counts_a_step_of_an_optimizer(mechanism):
    accountant = create_accountant(mechanism)
    hook = accountant.get_optimizer_hook_fn(sample_rate=0.1)
    optimizer = SimpleNamespace(noise_multiplier=1.5, accumulated_iterations=2)
    assert hook(optimizer) is None
    optimizer.noise_multiplier, optimizer.accumulated_iterations = torch.tensor(1.0), 10
    hook(optimizer)
    assert accountant.history == [(1.5, 0.2, 1), (1.0, 1.0, 1)]


def test_a_rate_that_is_above_one_by_rounding_counts_as_one():
    accountant = create_accountant("rdp")
    accountant.get_optimizer_hook_fn(0.1 + 2**-52)(SimpleNamespace(noise_multiplier=1.0, accumulated_iterations=10))
    assert accountant.history == [(1.0, 1.0, 1)]


@pytest.mark.parametrize(("mechanism", "kind"), MECHANISMS.items())
def test_create_accountant_builds_the_class_of_a_name(mechanism, kind):
    assert type(create_accountant(mechanism)) is kind
    assert kind.mechanism() == mechanism


def test_an_unknown_name_is_rejected_and_the_error_lists_the_known_names():
    with pytest.raises(ValueError, match="'rdp', 'gdp', 'prv'"):
        create_accountant("moments")


class CountingAccountant(IAccountant):
    """Custom accountant whose epsilon is the sum of steps divided by their noise multiplier."""

    def __init__(self):
        super().__init__()

    def step(self, *, noise_multiplier, sample_rate):
        self.history.append((noise_multiplier, sample_rate, 1))

    def get_epsilon(self, delta, *, scale=1.0):
        return scale * math.fsum(steps / sigma for sigma, _, steps in self.history)

    def __len__(self):
        return len(self.history)

    @classmethod
    def mechanism(cls):
        return "counting"


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.setattr(registry, "_ACCOUNTANTS", dict(registry._ACCOUNTANTS))
    register_accountant("counting", CountingAccountant)


@pytest.mark.usefixtures("counting")
def test_a_custom_accountant_works():
    accountant = create_accountant("counting")
    accountant.get_optimizer_hook_fn(0.1)(SimpleNamespace(noise_multiplier=2.0, accumulated_iterations=1))
    assert (len(accountant), accountant.get_epsilon(1e-5)) == (1, 0.5)
    other = create_accountant("counting")
    other.load_state_dict(accountant.state_dict())
    assert other.history == [(2.0, 0.1, 1)]


@pytest.mark.usefixtures("counting")
def test_calibration_uses_a_custom_accountant_with_its_keywords():
    found = get_noise_multiplier(
        target_epsilon=3.0, target_delta=1e-5, sample_rate=0.1, steps=60, accountant="counting", scale=2.0
    )
    assert 3.0 - 0.01 <= 2.0 * 60 / found <= 3.0


@pytest.mark.usefixtures("counting")
def test_registering_a_name_again_requires_force():
    with pytest.raises(ValueError, match="force=True"):
        register_accountant("rdp", CountingAccountant)
    assert create_accountant("rdp").mechanism() == "rdp"
    register_accountant("rdp", CountingAccountant, force=True)
    assert type(create_accountant("rdp")) is CountingAccountant


def test_the_abstract_accountant_cannot_be_created():
    with pytest.raises(TypeError, match="abstract"):
        IAccountant()
