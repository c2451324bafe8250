"""State dictionaries, the optimizer hook, the registry, and accountants of users."""

import io
import math
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch

from dpengine.accounting import CyclicGaussianEvent
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

MECHANISMS = {"rdp": RDPAccountant, "prv": PRVAccountant, "gdp": GaussianAccountant}
HISTORY = [(1.0, 0.1, 3), (2.0, 0.05, 7)]


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_state_goes_round(mechanism):
    accountant = create_accountant(mechanism)
    accountant.history = HISTORY
    state = accountant.state_dict()
    assert dict(state) == {"history": HISTORY, "mechanism": mechanism}
    accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert state["history"] == HISTORY  # a copy
    other = create_accountant(mechanism)
    other.load_state_dict(through_a_file(state))
    assert other.history == HISTORY


def test_a_destination_is_filled_and_returned():
    destination = OrderedDict(mine=1)
    assert create_accountant("rdp").state_dict(destination) is destination
    assert list(destination) == ["mine", "history", "mechanism"]


def test_what_triples_do_not_say_goes_round_too():
    accountant, other = create_accountant("prv"), create_accountant("prv")
    accountant.ledger.charge(CyclicGaussianEvent(0.1, 1.0, 50, "run"), count=60)
    other.load_state_dict(through_a_file(accountant.state_dict()))
    assert other.ledger.history == accountant.ledger.history
    assert other.get_epsilon(1e-5) == accountant.get_epsilon(1e-5)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "holds nothing"),
        ({}, "holds nothing"),
        ({"mechanism": "rdp"}, "lacks 'history'"),
        ({"history": []}, "lacks 'mechanism'"),
        ({"history": [], "mechanism": "prv"}, r"create_accountant\('prv'\)"),
        ({"history": [(1.0,)], "mechanism": "rdp"}, "triples"),
        ({"history": [], "mechanism": "rdp", "ledger": {"schema": 99}}, "cannot be read"),
    ],
)
def test_a_wrong_state_is_refused_and_changes_nothing(state, message):
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
def test_names_make_their_classes(mechanism, kind):
    assert type(create_accountant(mechanism)) is kind
    assert kind.mechanism() == mechanism


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'rdp', 'gdp', 'prv'"):
        create_accountant("moments")


class Counting(IAccountant):
    """An accountant of a user: pure Gaussian, one unit of epsilon a step."""

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
    register_accountant("counting", Counting)


@pytest.mark.usefixtures("counting")
def test_an_accountant_of_a_user_works():
    accountant = create_accountant("counting")
    accountant.get_optimizer_hook_fn(0.1)(SimpleNamespace(noise_multiplier=2.0, accumulated_iterations=1))
    assert (len(accountant), accountant.get_epsilon(1e-5)) == (1, 0.5)
    other = create_accountant("counting")
    other.load_state_dict(accountant.state_dict())
    assert other.history == [(2.0, 0.1, 1)]


@pytest.mark.usefixtures("counting")
def test_noise_is_found_by_an_accountant_of_a_user_with_its_keywords():
    found = get_noise_multiplier(
        target_epsilon=3.0, target_delta=1e-5, sample_rate=0.1, steps=60, accountant="counting", scale=2.0
    )
    assert 3.0 - 0.01 <= 2.0 * 60 / found <= 3.0


@pytest.mark.usefixtures("counting")
def test_a_taken_name_needs_force():
    with pytest.raises(ValueError, match="force=True"):
        register_accountant("rdp", Counting)
    assert create_accountant("rdp").mechanism() == "rdp"
    register_accountant("rdp", Counting, force=True)
    assert type(create_accountant("rdp")) is Counting


def test_an_accountant_must_be_complete():
    with pytest.raises(TypeError, match="abstract"):
        IAccountant()
