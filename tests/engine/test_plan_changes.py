"""Changes of the plan during a run: clipping, noise and ledger change together between two steps."""

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


def epoch_plan(steps_per_epoch=4, *, claims=True, **changed):
    sampling = (Claimed if claims else ShuffleDraws)(4 * steps_per_epoch, 4)
    return Plan(sampling, Flat(1.0), 1.0, 4.0, Relation.ZERO_OUT, **{"run": "r"} | changed)


# Per-epoch accounting


def test_an_epoch_costs_one_release_over_all_examples():
    event = epoch_plan().event()
    assert (event.sample_rate, event.noise_multiplier, event.cycle_length) == (1.0, 1.0, 4)
    assert [event.cycles(steps) for steps in (1, 4, 5, 8, 9)] == [1, 1, 2, 2, 3]
    assert epoch_plan().event(3) == event  # each example is in at most one of three batches of an epoch


def test_batches_may_be_merged_within_an_epoch_and_not_across_epochs():
    assert epoch_plan().why_not_merged([4, 5, 7]) == ""
    assert "two passes" in epoch_plan().why_not_merged([3, 4])
    assert Plan(PoissonDraws(16, 0.25, 4, 4.0), Flat(1.0), 1.0, 4.0, Relation.ZERO_OUT).why_not_merged([3, 4]) == ""


def test_the_rest_of_an_epoch_is_charged_separately_from_the_following_epochs():
    changed = epoch_plan().changed(6, noise_multiplier=2.0)
    assert changed.noise_multiplier == 2.0
    names = [changed.at_step(6).run, changed.at_step(7).run, changed.at_step(8).run]
    assert names == ["r@6", "r@6", "r@8"]
    assert changed.at_step(8).at_step(12).run == "r@8"
    assert epoch_plan().changed(8).at_step(12).run == "r@8"


@pytest.mark.parametrize("first, expected", [(0, "r"), (4, "r"), (6, "r@6")])
def test_a_run_that_begins_within_an_epoch_accounts_for_the_rest_separately(first, expected):
    assert epoch_plan().at_step(first, first=True).run == expected
    assert epoch_plan(claims=False).at_step(first, first=True).run == expected


def test_shuffled_batches_have_no_epsilon_and_state_the_cost_of_an_epoch():
    event = epoch_plan(claims=False).event()
    assert isinstance(event, UnclaimedEvent)
    assert event.unamplified == epoch_plan().event()
    assert epoch_plan(claims=False).event(2).unamplified is None  # the batches may be in different epochs
    sampling = ShuffleDraws(16, 4)
    private_size = Plan(sampling, Flat(1.0), 1.0, 4.0, Relation.ADD_OR_REMOVE_ONE)
    assert private_size.event().unamplified is None  # removing an example changes all batches


def test_only_plans_by_epoch_are_renamed():
    plan = Plan(PoissonDraws(16, 0.25, 4, 4.0), Flat(1.0), 1.0, 4.0, Relation.ZERO_OUT, run="r")
    assert plan.changed(3, noise_multiplier=2.0).run == "r"


@pytest.mark.parametrize("wrong", [{"noise_multiplier": -1.0}, {"expected_batch_size": 0.0}])
def test_invalid_changes_of_a_plan_are_rejected(wrong):
    with pytest.raises(InvalidBudgetError):
        epoch_plan().changed(3, **wrong)


# Policies with another clipping norm


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
def test_resized_returns_the_policy_with_another_clipping_norm(policy):
    other = policy.resized(0.5)
    assert type(other) is type(policy)
    assert other.max_grad_norm == pytest.approx(0.5)
    assert other.sensitivity() == pytest.approx(0.5)
    ratio = 0.5 / policy.max_grad_norm
    assert [b * ratio for b in policy.bounds] == pytest.approx(list(other.bounds))
    with pytest.raises(InvalidBudgetError):
        policy.resized(-1.0)


def test_a_custom_policy_without_resized_is_rejected():
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


def test_a_resized_adaptive_policy_drops_the_observed_norms():
    policy = Adaptive(1.0, learning_rate=1.0, count_noise_multiplier=1e-12)
    policy.observe(torch.full((50, 1), 0.1))
    policies = [policy.resized(1.0), Adaptive(1.0, learning_rate=1.0, count_noise_multiplier=1e-12)]
    for each_policy in policies:
        each_policy.finish_step(NoiseSource.seeded(0), 0, 50.0)
    assert policies[0].max_grad_norm == pytest.approx(policies[1].max_grad_norm)


# Changes during a run


def started(**options):
    return make_loop(**({"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options))


def test_a_change_before_the_first_batch_takes_effect_immediately():
    engine = started().engine
    inside.change_plan(engine, noise_multiplier=3.0, clipping=Flat(2.0))
    state = inside.state(engine)
    assert state.noise_std == 6.0
    assert state.clipping_norm_in_force == 2.0


def test_a_change_during_accumulation_takes_effect_after_the_step():
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


def test_the_next_step_draws_its_noise_from_the_new_source():
    engine = started().engine
    assert inside.draw_from(engine, NoiseSource.seeded(7))
    assert inside.noise_source(engine).insecure_seed
