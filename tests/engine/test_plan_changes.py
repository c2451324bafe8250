"""A plan that changes in the middle of a run: clip, noise and ledger go over together, between two releases."""

import inside
import pytest
import torch
from inside_parts import Plan
from loops import make_loop

from dpengine.accounting import Relation, UnclaimedEvent
from dpengine.accounting.run_events import EpochParticipation
from dpengine.clipping import AbstractClip, Adaptive, Automatic, Flat, Groups, PerLayer
from dpengine.errors import InvalidBudgetError
from dpengine.noise import NoiseSource
from dpengine.sampling.poisson import PoissonDraws
from dpengine.sampling.shuffle import ShuffleDraws


class Claimed(ShuffleDraws):
    @property
    def participation(self):
        return EpochParticipation(self.steps_per_epoch, claimed=True)


def passes(spe=4, *, claims=True, **changed):
    sampling = (Claimed if claims else ShuffleDraws)(4 * spe, 4)
    return Plan(sampling, Flat(1.0), 1.0, 4.0, Relation.ZERO_OUT, **{"run": "r"} | changed)


# Passes as releases


def test_a_pass_costs_one_release_of_everybody():
    event = passes().event()
    assert (event.sample_rate, event.noise_multiplier, event.cycle_length) == (1.0, 1.0, 4)
    assert [event.cycles(steps) for steps in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]
    assert passes().event(3) == event  # each row is in one of them


def test_batches_of_one_pass_may_make_one_release_and_of_two_may_not():
    assert passes().why_not_merged([4, 5, 7]) == ""
    assert "two passes" in passes().why_not_merged([3, 4])
    assert Plan(PoissonDraws(16, 0.25, 4, 4.0), Flat(1.0), 1.0, 4.0, Relation.ZERO_OUT).why_not_merged([3, 4]) == ""


def test_the_rest_of_a_pass_is_charged_separately_and_whole_passes_follow():
    changed = passes().changed(6, noise_multiplier=2.0)
    assert changed.noise_multiplier == 2.0
    names = [changed.at_step(6).run, changed.at_step(7).run, changed.at_step(8).run]
    assert names == ["r@6", "r@6", "r@8"]
    assert changed.at_step(8).at_step(12).run == "r@8"
    assert passes().changed(8).at_step(12).run == "r@8"


@pytest.mark.parametrize("first, expected", [(0, "r"), (4, "r"), (6, "r@6")])
def test_a_run_that_begins_within_a_pass_accounts_for_the_rest_separately(first, expected):
    assert passes().at_step(first, first=True).run == expected
    assert passes(claims=False).at_step(first, first=True).run == expected


def test_shuffled_batches_claim_nothing_and_know_what_a_pass_costs():
    event = passes(claims=False).event()
    assert isinstance(event, UnclaimedEvent)
    assert event.unamplified == passes().event()
    assert passes(claims=False).event(2).unamplified is None  # they may be of two passes
    sampling = ShuffleDraws(16, 4)
    private_size = Plan(sampling, Flat(1.0), 1.0, 4.0, Relation.ADD_OR_REMOVE_ONE)
    assert private_size.event().unamplified is None  # an example less changes all batches


def test_only_plans_of_passes_are_renamed():
    plan = Plan(PoissonDraws(16, 0.25, 4, 4.0), Flat(1.0), 1.0, 4.0, Relation.ZERO_OUT, run="r")
    assert plan.changed(3, noise_multiplier=2.0).run == "r"


@pytest.mark.parametrize("wrong", [{"noise_multiplier": -1.0}, {"expected_batch_size": 0.0}])
def test_a_plan_cannot_change_to_one_that_no_run_could_keep(wrong):
    with pytest.raises(InvalidBudgetError):
        passes().changed(3, **wrong)


# Policies of another size


@pytest.mark.parametrize(
    "policy",
    [
        Flat(2.0),
        PerLayer(2.0),
        PerLayer([1.0, 3.0]),
        Groups({"0": 1.0, "2": 2.0}),
        Automatic(2.0, 0.1),
        Adaptive(2.0, max_norm=50.0),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_every_policy_can_be_had_with_another_norm(policy):
    other = policy.resized(0.5)
    assert type(other) is type(policy)
    assert other.max_grad_norm == pytest.approx(0.5)
    assert other.sensitivity() == pytest.approx(0.5)
    ratio = 0.5 / policy.max_grad_norm
    assert [b * ratio for b in policy.bounds] == pytest.approx(list(other.bounds))
    with pytest.raises(InvalidBudgetError):
        policy.resized(-1.0)


def test_a_policy_that_cannot_says_so():
    class Own(AbstractClip):
        bounds = (1.0,)

        def group_of(self, names):
            return [0] * len(names)

        def factors(self, norms_BK):
            return torch.zeros_like(norms_BK)

        def describe(self):
            return {}

    with pytest.raises(InvalidBudgetError, match="resized"):
        Own().resized(2.0)


def test_what_an_adaptive_policy_observed_stays_with_the_release_it_belongs_to():
    policy = Adaptive(1.0, learning_rate=1.0, count_noise_multiplier=1e-12)
    policy.observe(torch.full((50, 1), 0.1))
    moved = [policy.resized(1.0), Adaptive(1.0, learning_rate=1.0, count_noise_multiplier=1e-12)]
    for one in moved:
        one.finish_step(NoiseSource.seeded(0), 0, 50.0)
    assert moved[0].max_grad_norm == pytest.approx(moved[1].max_grad_norm)


# Through a run


def started(**asked):
    loop = make_loop(**({"noise_multiplier": 1.0, "max_grad_norm": 1.0} | asked))
    return loop


def test_a_change_before_the_first_batch_holds_at_once():
    engine = started().engine
    inside.change_plan(engine, noise_multiplier=3.0, clipping=Flat(2.0))
    state = inside.state(engine)
    assert state.noise_std == 6.0
    assert state.clipping_norm_in_force == 2.0


def test_a_change_waits_as_long_as_clipped_gradients_do_and_then_all_holds_together():
    loop = started(physical_batch_size=2)
    charged = []
    for chunk, (inputs, targets) in enumerate(loop.loader):
        loop.optimizer.zero_grad()
        if len(inputs):
            torch.nn.functional.cross_entropy(loop.model(inputs), targets).backward()
        if chunk == 0 and not inside.state(loop.engine).clean:
            inside.change_plan(loop.engine, noise_multiplier=3.0, clipping=Flat(2.0))
            state = inside.state(loop.engine)
            assert state.noise_std == state.clipping_norm_in_force == 1.0
            assert state.asked_noise_std == 6.0
            with pytest.raises(InvalidBudgetError):
                inside.change_plan(loop.engine, noise_multiplier=-1.0)
            assert inside.state(loop.engine).asked_noise_std == 6.0
        before = inside.state(loop.engine)
        loop.optimizer.step()
        after = inside.state(loop.engine)
        if after.released > before.released:
            charged.append((before.noise_std, after.clipping_norm_in_force))
        if len(charged) == 3:
            break
    assert charged == [(1.0, 2.0), (6.0, 2.0), (6.0, 2.0)]
    assert [(c.event.noise_multiplier, c.count) for c in inside.charges(loop.engine)] == [(1.0, 1), (3.0, 2)]


def test_noise_from_another_source_is_drawn_from_the_next_release_on():
    engine = started().engine
    assert inside.draw_from(engine, NoiseSource.seeded(7))
    assert inside.noise_source(engine).insecure_seed
