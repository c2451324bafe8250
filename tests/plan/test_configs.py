"""Configs: accepted values, epsilon and JSON round trips."""

import dataclasses
import itertools
import json
import math

import dp_accounting
import numpy as np
import pytest
from plan.configs import CONFIGS, noisy

from dpengine.accounting import Charge, GaussianEvent, Relation, epsilon_of
from dpengine.noise.correlated import add_row
from dpengine.noise.sensitivity import sq_sensitivity
from dpengine.noise.toeplitz import matrix, toeplitz_inverse
from dpengine.plan import (
    BandedInverseConfig,
    BandMFConfig,
    BandMFExecutionPlanConfig,
    DPSGDConfig,
    PerformanceFlags,
)
from dpengine.sampling import CyclicPoissonSampling, FixedBatchSampling, Partition


def test_the_reference_value_of_dp_sgd():
    config = BandMFConfig.default(num_bands=1, iterations=1000, sampling_prob=0.1).calibrate(epsilon=1.0, delta=1e-5)
    assert config.noise_multiplier == pytest.approx(11.86561, rel=1e-4)
    assert config.epsilon(1e-5) <= 1.0
    same = DPSGDConfig(iterations=1000, sampling_prob=0.1).calibrate(epsilon=1.0, delta=1e-5)
    assert same.noise_multiplier == config.noise_multiplier


@pytest.mark.parametrize("iterations, bands, loss", [(64, 4, 10.501447), (1000, 8, 69.749930)])
def test_the_error_of_the_best_strategy(iterations, bands, loss):
    config = BandMFConfig.default(
        num_bands=bands, iterations=iterations, expected_participations=1.0, noise_multiplier=1.0
    )
    assert config.rmse**2 == pytest.approx(loss, rel=1e-6)


def test_rmse_matches_the_inverse_strategy_matrix():
    for column_normalize in (False, True):
        config = BandMFConfig(
            iterations=7, strategy=(3.0, 1.0, 0.5), column_normalize=column_normalize, noise_multiplier=2.0,
            expected_participations=2.0,
        )  # fmt: skip
        s = matrix(np.array(config.strategy), 7)
        s = s / np.linalg.norm(s, axis=0) if column_normalize else s / np.linalg.norm(s[:, 0])
        errors = np.tril(np.ones((7, 7))) @ np.linalg.inv(s)
        assert config.rmse == pytest.approx(2.0 * math.sqrt(np.square(errors).sum(axis=1).mean()) / 2.0, rel=1e-12)


@pytest.mark.one_in(10, "name", others="slow")
@pytest.mark.one_in(2, "name")
@pytest.mark.parametrize("name", CONFIGS)
def test_calibration_meets_the_target(name):
    config = CONFIGS[name]
    found = config.calibrate(epsilon=3.0, delta=1e-5, tol=1e-3)
    assert config.noise_multiplier is None
    assert 3.0 * 0.99 < found.epsilon(1e-5) <= 3.0
    assert dataclasses.replace(found, noise_multiplier=None) == config
    assert config.calibrate(epsilon=math.inf, delta=1e-5).noise_multiplier == 0.0


@pytest.mark.slow
@pytest.mark.one_in(12, "name", others="slow")
@pytest.mark.one_in(3, "name")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_library_agrees(name):
    config = noisy(CONFIGS[name])
    relation = {
        Relation.ADD_OR_REMOVE_ONE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        Relation.ZERO_OUT: dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
        Relation.REPLACE_ONE: dp_accounting.NeighboringRelation.REPLACE_ONE,
    }[config.relation]
    if config.relation is Relation.REPLACE_ONE:
        accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
    else:
        accountant = dp_accounting.pld.PLDAccountant(relation)
    accountant.compose(config.dp_event())
    theirs = accountant.get_epsilon(1e-5)
    if config.relation is Relation.REPLACE_ONE:
        assert 0.5 * theirs < config.epsilon(1e-5) < theirs
        assert config.epsilon(1e-5, accountant="dp_accounting_rdp") == pytest.approx(theirs, rel=1e-12)
    else:
        assert config.epsilon(1e-5) == pytest.approx(theirs, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp-sgd", "band-mf", "blt"])
def test_calibration_by_an_accountant_of_the_library(name):
    found = CONFIGS[name].calibrate(
        epsilon=2.0, delta=1e-5, tol=1e-3, accountant=lambda relation: dp_accounting.rdp.RdpAccountant(None, relation)
    )
    own = CONFIGS[name].calibrate(epsilon=2.0, delta=1e-5, accountant="rdp")
    assert found.noise_multiplier == pytest.approx(own.noise_multiplier, rel=0.05)
    assert found.epsilon(1e-5) <= 2.0


@pytest.mark.parametrize("name", CONFIGS)
def test_json_gives_an_equal_config(name):
    config = noisy(CONFIGS[name], 1 / 3)
    text = config.to_json()
    again = type(config).from_json(text)
    assert again == config
    assert again.to_json() == text
    assert config.make().to_json() == text
    assert json.loads(text)["config"] == type(config).__name__


def test_the_long_name_of_band_mf():
    assert BandMFExecutionPlanConfig is BandMFConfig
    text = noisy(CONFIGS["band-mf"]).to_json().replace('"BandMFConfig"', '"BandMFExecutionPlanConfig"')
    assert BandMFConfig.from_json(text) == noisy(CONFIGS["band-mf"])


@pytest.mark.parametrize("name", CONFIGS)
def test_without_noise_multiplier_there_is_no_plan(name):
    config = CONFIGS[name]
    for ask in (config.make, config.dp_event, lambda: config.epsilon(1e-5)):
        with pytest.raises(ValueError, match=r"noise_multiplier is not set. Call calibrate"):
            ask()


@pytest.mark.parametrize("name", CONFIGS)
def test_plans_are_frozen_and_have_a_description(name):
    plan = noisy(CONFIGS[name]).make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.neighboring_relation = None
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.config.iterations = 3
    said = plan.describe()
    json.dumps(said)
    assert said["noise_multiplier"] == 1.3
    assert said["relation"] == plan.neighboring_relation.value
    assert said["batches"] == plan.batch_selection_strategy.name
    assert said["stddev"] == plan.stddev


def test_the_declared_constants_decide_relation_and_partition():
    private, public = CONFIGS["band-mf"], CONFIGS["band-mf, public"]
    assert private.relation is Relation.ADD_OR_REMOVE_ONE
    assert private.sampling_scheme.partition_type is Partition.INDEPENDENT
    assert public.relation is Relation.ZERO_OUT
    assert public.sampling_scheme.partition_type is Partition.EQUAL_SPLIT
    assert CONFIGS["fixed"].relation is Relation.REPLACE_ONE
    assert CONFIGS["fixed"].sampling_scheme == FixedBatchSampling(batch_size=50, iterations=100)
    assert CONFIGS["truncated"].sampling_scheme == CyclicPoissonSampling(
        sampling_prob=0.1, iterations=20, truncated_batch_size=160
    )


def test_a_multiple_of_the_strategy_is_the_same_mechanism():
    one = noisy(CONFIGS["band-mf, public"])
    other = dataclasses.replace(one, strategy=tuple(7 * value for value in one.strategy))
    assert other.rmse == pytest.approx(one.rmse, rel=1e-12)
    assert other.epsilon(1e-5) == one.epsilon(1e-5)
    assert other.make().stddev == pytest.approx(one.make().stddev, rel=1e-12)
    assert np.allclose(rows_of(one.recurrence, 8), rows_of(other.recurrence, 8), rtol=1e-12)


def rows_of(recurrence, size):
    """``S^-1`` of a recurrence, from the weights of its fresh noise rows."""
    import torch

    basis = torch.eye(size, dtype=torch.float64)
    state, rows = torch.zeros(recurrence.num_kept, size, dtype=torch.float64), []
    for t in range(size):
        out = torch.zeros(size, dtype=torch.float64)
        add_row(recurrence, t, lambda to, weight, step: to.add_(basis[step], alpha=weight), state, out)
        rows.append(out)
    return torch.stack(rows).numpy()


@pytest.mark.parametrize("name", CONFIGS)
def test_performance_flags_do_not_change_the_mechanism(name):
    import torch

    config = noisy(CONFIGS[name])
    plain = config.make()
    other = config.make(PerformanceFlags(dtype=torch.float64, noise_seed=3, microbatch_size=2, keep_batch_dim=False))
    assert plain.stddev == other.stddev
    assert plain.dp_event == other.dp_event
    assert plain.batch_selection_strategy == other.batch_selection_strategy
    assert plain.epsilon(1e-5) == other.epsilon(1e-5)


@pytest.mark.parametrize(
    "rescale, clip, by", [(True, 3.0, 1.0), (False, 3.0, 1.0), (False, 3.0, 4.0), (True, 2.0, 5.0)]
)
def test_the_standard_deviation_is_noise_times_sensitivity(rescale, clip, by):
    config = DPSGDConfig(
        iterations=3, noise_multiplier=2.0, l2_clip_norm=clip, rescale_to_unit_norm=rescale, normalize_by=by
    )
    plan = config.make()
    bound = plan.clipped_grad(lambda p, x: (p * x).sum()).sensitivity(Relation.ZERO_OUT)
    assert plan.stddev == pytest.approx(2.0 * bound, rel=1e-12)
    assert config.sensitivity == pytest.approx(bound, rel=1e-12)


def test_clipping_options_fixed_by_the_plan_are_rejected():
    plan = noisy(CONFIGS["dp-sgd"]).make()
    with pytest.raises(TypeError, match="the plan fixes l2_clip_norm, normalize_by"):
        plan.clipped_grad(lambda p, x: p, l2_clip_norm=3.0, normalize_by=2.0)
    for option in ({"grid_scale": 1000.0}, {"nan_safe": False}):
        with pytest.raises(TypeError, match="the plan fixes"):
            plan.clipped_grad(lambda p, x: p, **option)


@pytest.mark.one_in(4, "name", others="slow")
@pytest.mark.one_in(2, "name")
@pytest.mark.parametrize("name", CONFIGS)
def test_epsilon_of_the_first_steps(name):
    config = noisy(CONFIGS[name])
    values = [config.epsilon(1e-5, step) for step in (0, 1, config.iterations // 2, config.iterations)]
    assert values[0] == 0.0
    assert values == sorted(values)
    assert values[-1] == config.epsilon(1e-5) == config.make().epsilon(1e-5)
    for step in (-1, config.iterations + 1):
        with pytest.raises(ValueError, match="step"):
            config.epsilon(1e-5, step)


def test_epsilon_is_constant_within_a_cycle():
    config = noisy(CONFIGS["band-mf"])
    assert len({config.epsilon(1e-5, step) for step in (5, 6, 7, 8)}) == 1
    assert config.epsilon(1e-5, 9) > config.epsilon(1e-5, 8)
    one = dataclasses.replace(noisy(CONFIGS["dp-sgd"]), sampling_prob=0.3, expected_participations=None, iterations=16)
    assert config.epsilon(1e-5) == pytest.approx(one.epsilon(1e-5), rel=1e-9)


@pytest.mark.parametrize("name, strategy", [
    ("blt", lambda config: np.linalg.inv(rows_of(config.recurrence, config.iterations))),
    ("inverse", lambda config: matrix(toeplitz_inverse(config.coefficients, config.iterations), config.iterations)),
])  # fmt: skip
def test_noise_over_all_steps_has_the_sensitivity_of_its_matrix(name, strategy):
    config = dataclasses.replace(noisy(CONFIGS[name]), iterations=9, cycle_length=3)
    s = strategy(config)
    for steps in range(1, 10):
        block = np.abs(s[:steps, :steps].T @ s[:steps, :steps])
        worst = max(
            block[np.ix_(chosen, chosen)].sum()
            for count in range(1, 4)
            for chosen in itertools.combinations(range(steps), count)
            if all(b - a >= 3 for a, b in itertools.pairwise(chosen))
        )
        exact = math.sqrt(worst) / np.linalg.norm(s[:, 0]) / 1.3
        claimed = math.sqrt(config.event(1.3).precision(steps))
        assert claimed >= exact * (1 - 1e-9)
        if steps % 3 == 0:
            assert claimed == pytest.approx(exact, rel=0.02)
            assert sq_sensitivity(s[:steps, :steps], 3) >= worst * (1 - 1e-9)


def test_truncating_batches_raises_epsilon():
    def epsilon(cut):
        config = DPSGDConfig(
            iterations=20, sampling_prob=0.1, truncated_batch_size=cut, num_examples=1000, noise_multiplier=1.0
        )
        return config.epsilon(1e-5)

    uncut = dataclasses.replace(
        CONFIGS["truncated"], truncated_batch_size=None, noise_multiplier=1.0
    ).epsilon(1e-5)  # fmt: skip
    assert epsilon(400) == pytest.approx(uncut, rel=1e-2)
    assert epsilon(110) > 1.2 * uncut


def test_fixed_size_batches_have_twice_the_sensitivity():
    config = noisy(CONFIGS["fixed"])
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.SampledWithoutReplacementDpEvent(1000, 50, dp_accounting.GaussianDpEvent(0.65))
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, 100))
    assert config.epsilon(1e-5) < accountant.get_epsilon(1e-5)
    full_batch = DPSGDConfig(iterations=1, fixed_batch_size=50, num_examples=50, noise_multiplier=2.0)
    assert full_batch.epsilon(1e-5) == pytest.approx(epsilon_of((Charge(GaussianEvent(1.0)),), 1e-5), rel=1e-9)


def test_sampling_prob_and_expected_participations_are_equivalent():
    by_rate = BandMFConfig(iterations=20, strategy=(1.0, 0.5), sampling_prob=0.2)
    by_count = BandMFConfig(iterations=20, strategy=(1.0, 0.5), expected_participations=2.0)
    assert by_rate == by_count
    assert (by_rate.sampling_prob, by_rate.expected_participations) == (0.2, 2.0)
    assert BandMFConfig(iterations=20, strategy=(1.0, 0.5), sampling_prob=0.2, expected_participations=2.0) == by_rate
    full_batch = BandMFConfig(iterations=5, strategy=(1.0, 0.5))
    assert (full_batch.sampling_prob, full_batch.expected_participations) == (1.0, 2.5)


@pytest.mark.parametrize("size", [1e-162, 1e-300, 1e90])
def test_scaling_a_strategy_does_not_change_the_mechanism(size):
    base = [3.0] + [1.5] * 100
    one, other = (
        BandMFConfig(iterations=101, strategy=tuple(factor * value for value in base), noise_multiplier=1.0)
        for factor in (1.0, size)
    )
    assert np.allclose(rows_of(one.recurrence, 5), rows_of(other.recurrence, 5), rtol=1e-9)
    inverses = [
        BandedInverseConfig(
            iterations=20, cycle_length=5, coefficients=(factor, -0.5 * factor), noise_multiplier=1.0
        ).make().stddev
        for factor in (1.0, size)
    ]  # fmt: skip
    assert inverses[0] == pytest.approx(inverses[1], rel=1e-12)


def test_precision_of_the_blt_event_grows_linearly_with_steps():
    event = dataclasses.replace(CONFIGS["blt"], noise_multiplier=1.0).event(1.0, "run")
    assert event.precision(120) == pytest.approx(2 * event.precision(60))
    assert event.precision(61) > event.precision(60)


def test_sampling_probabilities_of_zero_and_one_are_accepted():
    assert DPSGDConfig(iterations=5, sampling_prob=0.0, noise_multiplier=1.0).epsilon(1e-5) < 1e-3
    odd = BandMFConfig(iterations=5, strategy=(1.0, 0.5), sampling_prob=1.0, noise_multiplier=1.0)
    three = DPSGDConfig(iterations=3, noise_multiplier=1.0)
    assert odd.epsilon(1e-5) == pytest.approx(three.epsilon(1e-5), rel=1e-9)
