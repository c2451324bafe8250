"""The history is a list, and the ledger behind it never forgets."""

import copy
import pickle

import pytest

from dpengine.accounting import CyclicGaussianEvent, Ledger, PoissonGaussianEvent, UnclaimedEvent
from dpengine.compat.opacus.accountants import RDPAccountant, create_accountant

EVENT = PoissonGaussianEvent(0.1, 1.0)


@pytest.fixture
def accountant():
    made = create_accountant("rdp")
    made.history = [(1.0, 0.1, 3), (2.0, 0.1, 1)]
    return made


def steps(accountant):
    return accountant.ledger.steps


def test_equal_neighbours_are_merged():
    accountant = create_accountant("prv")
    for sigma in (1.0, 1.0, 2.0, 1.0):
        accountant.step(noise_multiplier=sigma, sample_rate=0.1)
    assert accountant.history == [(1.0, 0.1, 2), (2.0, 0.1, 1), (1.0, 0.1, 1)]
    assert len(accountant) == 3
    assert isinstance(accountant.history, list)


def test_what_an_engine_charges_shows_at_once():
    ledger, accountant = Ledger(), create_accountant("gdp")
    accountant.ledger = ledger
    history = accountant.history
    ledger.charge(EVENT, count=2)
    ledger.charge(EVENT, kind="void")  # given up, which may depend on the data
    assert history == [(1.0, 0.1, 3)]
    assert accountant.history is history
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert ledger.steps == 4


def test_a_ledger_must_be_one(accountant):
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


def test_pop_returns_the_entry_and_an_empty_list_refuses_it(accountant):
    assert accountant.history.pop() == (2.0, 0.1, 1)
    accountant.history.clear()
    with pytest.raises(IndexError):
        accountant.history.pop()


@pytest.mark.parametrize(
    "entry", [(1.0, 0.1), 1.0, "abc", (1.0, 2.0, 1), (-1.0, 0.1, 1), (1.0, 0.1, -1), (1.0, 0.1, 1.5)]
)
def test_what_is_no_entry_is_refused_and_nothing_changes(accountant, entry):
    before = accountant.history.copy()
    with pytest.raises(ValueError, match=r"."):
        accountant.history.extend([(9.0, 0.1, 1), entry])
    with pytest.raises(ValueError, match=r"."):
        accountant.history = [entry]
    assert accountant.history == before


def test_a_new_history_leaves_the_engine_alone_and_what_it_charges_later_is_added():
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


def test_entries_that_are_put_back_keep_what_they_stand_for():
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


def test_a_subclass_may_keep_the_history_as_scripts_do():
    class Doubling(RDPAccountant):
        def step(self, *, noise_multiplier, sample_rate):
            last = self.history.pop() if self.history else (noise_multiplier, sample_rate, 0)
            self.history.append((*last[:2], last[2] + 2))

    accountant = Doubling()
    for _ in range(3):
        accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert accountant.history == [(1.0, 0.1, 6)]
