"""Canaries in a run: an included canary adds the clipping norm along its direction, an excluded one adds nothing."""

import itertools

import inside
import numpy as np
import plans
import pytest
import torch
from auditing.runs import made, rows, trained
from reference import clipped_sum, per_sample_gradients
from scipy import stats
from torch.nn.functional import cross_entropy

from dpengine.auditing.audited_run import AuditedRun
from dpengine.auditing.canaries import (
    Canaries,
    Directions,
    Trace,
    log_likelihood_ratios,
    participation_means,
    strategy_of,
)
from dpengine.auditing.one_run_audit import add_canaries
from dpengine.errors import UnknownParameterError
from dpengine.noise import BandMF
from dpengine.noise.toeplitz import matrix

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012", "ignore:.*DPE018")
SLACK = 2.0**-20  # by which thresholds are lowered
COUNT, NORM = 40, 0.5


def watched(kind="gradient", *, steps=1, reduction="mean", sample_rate=1.0, noise=0.0, count=COUNT, **options):
    """The trace of a run, its coins, its canaries' directions, and the first release as one vector."""
    rng, grads = np.random.default_rng(0), []
    dataset, canaries = add_canaries(rows(), count, kind, None, rng)
    settings = {"noise_multiplier": noise, "max_grad_norm": NORM, "lr": 0.0, **options}
    parts = made(sample_rate=sample_rate, reduction=reduction, **settings)(dataset)
    directions = (lambda sizes: Directions(sizes, count, rng)) if kind == "gradient" else None
    run = AuditedRun(parts[0], canaries, directions)
    before = inside.gradients_formed_by(parts[0])

    def see(model):
        grads.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]))

    with run.inserted_canaries():
        trained(steps, reduction=reduction, see=see)(*parts)
    assert inside.gradients_formed_by(parts[0]) == before
    divisor = inside.divisor(parts[0], mean=reduction == "mean")
    return run, canaries, grads[0].numpy() * divisor, parts[1]


def sum_of(model, data):
    """The clipped sum of a loop over samples, as one vector."""
    inputs, labels = data
    gradients = per_sample_gradients(model, cross_entropy, (inputs,), labels)
    total = clipped_sum(gradients, (1 - SLACK) * NORM)
    return torch.cat([total[name].flatten() for name, _ in model.named_parameters()]).numpy()


@pytest.mark.parametrize(
    "options",
    [
        {}, {"reduction": "sum"}, {"physical_batch_size": 23}, {"grad_sample_mode": "hooks"},
        {"grad_sample_mode": "functorch"}, {"grad_sample_mode": "ew"},
    ],
    ids=["mean", "sum", "chunks", "hooks", "functorch", "ew"],
)  # fmt: skip
def test_a_gradient_canary_adds_its_direction_at_the_threshold_to_the_sum_of_the_other_samples(options):
    run, canaries, found, model = watched(**options)
    expected = sum_of(model, rows().tensors)
    directions = run._directions
    for canary in np.flatnonzero(canaries.coins):
        np.add.at(expected, directions.indices_MK[canary], (1 - SLACK) * NORM * directions.values_MK[canary])
    assert 5 < canaries.coins.sum() < COUNT - 5
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_the_trace_is_in_units_of_the_threshold():
    run, canaries, _, model = watched()
    trace = run.trace()
    others = run._directions.project(sum_of(model, rows().tensors)) / NORM
    assert trace.drawn_TM.all() and trace.releases_TM.shape == (1, COUNT)
    assert trace.releases_TM[0] - others == pytest.approx(canaries.coins * (1 - SLACK), abs=1e-4)


@pytest.mark.parametrize("mode", ["auto", "hooks", "functorch", "ew", "ghost"])
def test_an_input_canary_that_is_out_has_a_gradient_of_zero(mode):
    _, canaries, found, model = watched("input", grad_sample_mode=mode)
    out = np.isin(canaries.canary_of, np.flatnonzero(~canaries.coins))
    assert out.sum() == (~canaries.coins).sum() > 5
    expected = sum_of(model, [tensor[~out] for tensor in rows().tensors])
    everything = sum_of(model, rows().tensors)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.abs(found - everything).max() > 1e-2 * np.abs(expected).max()


def test_a_sample_without_a_finite_gradient_is_dropped_along_with_excluded_canaries():
    # A grad mode with a set of dropped samples must also drop the excluded canaries.
    data = rows()
    data.tensors[0][3] = float("nan")
    canaries_at = np.full(100, -1)
    canaries_at[10:50] = np.arange(40)
    canaries = Canaries(np.arange(40) % 2 == 0, canaries_at)
    parts = made(sample_rate=1.0, noise_multiplier=0.0, max_grad_norm=NORM, lr=0.0, grad_sample_mode="ghost")(data)
    run, grads = AuditedRun(parts[0], canaries, None), []
    with run.inserted_canaries():
        trained(1, see=lambda model: grads.extend(p.grad.flatten().double() for p in model.parameters()))(*parts)
    left = (canaries_at < 0) | (canaries_at % 2 == 0)
    left[3] = False
    expected = sum_of(parts[1], [tensor[left] for tensor in data.tensors])
    assert np.abs(torch.cat(grads).numpy() * 100 - expected).max() < 1e-5 * np.abs(expected).max()


def test_the_trace_records_the_draws_of_the_loader():
    run, canaries, _, _ = watched(steps=30, sample_rate=0.2, noise=1.0)
    drawn_TM = run.trace().drawn_TM
    for step in range(30):
        indices = np.array(inside.draw(run.run.loader, step), dtype=int)
        expected = np.zeros(COUNT, bool)
        expected[canaries.canary_of[indices][canaries.canary_of[indices] >= 0]] = True
        assert (drawn_TM[step] == expected).all()
    assert 0.1 < drawn_TM.mean() < 0.3


def test_directions_are_unit_vectors_with_disjoint_support():
    directions = Directions([30, 5, 200], 9, np.random.default_rng(1))
    dense = np.zeros((9, 235))
    np.put_along_axis(dense, directions.indices_MK, directions.values_MK, axis=1)
    assert dense @ dense.T == pytest.approx(np.eye(9))
    vector = np.random.default_rng(2).standard_normal(235)
    assert directions.project(vector) == pytest.approx(dense @ vector)
    parts = [
        directions.gradients(number, shape, np.array([4, -1, 7]), 3.0, torch.zeros(1, dtype=torch.float64))
        for number, shape in enumerate([(5, 6), (5,), (2, 100)])
    ]
    joined = torch.cat([part.flatten(1) for part in parts], dim=1).numpy()
    assert joined == pytest.approx(3.0 * np.stack([dense[4], np.zeros(235), dense[7]]))


def test_more_canaries_than_parameters_are_rejected():
    with pytest.raises(ValueError, match="Pass canaries=12 or less"):
        Directions([10, 2], 13, np.random.default_rng(0))


def test_the_trace_of_a_cyclic_run_records_its_groups():
    run, canaries, _, _ = watched(steps=12, sample_rate=0.2, noise=1.0)
    assert run.trace().first_steps_M is None
    rng = np.random.default_rng(0)
    dataset, canaries = add_canaries(rows(), COUNT, "gradient", None, rng)
    parts = made(sample_rate=0.2, noise_multiplier=1.0, steps=12, noise=BandMF(num_bands=3))(dataset)
    run = AuditedRun(parts[0], canaries, lambda sizes: Directions(sizes, COUNT, rng))
    with run.inserted_canaries():
        trained(12)(*parts)
    trace = run.trace()
    assert trace.cycle == 3 and set(np.unique(trace.first_steps_M)) <= {-1, 0, 1, 2}
    assert trace.drawn_TM.sum() > 50
    assert not (trace.drawn_TM & ~trace.possible_TM).any()
    assert np.abs(trace.strategy_TT - np.eye(12)).max() > 0.1


def test_parameters_that_change_are_rejected():
    rng = np.random.default_rng(0)
    dataset, canaries = add_canaries(rows(), COUNT, "gradient", None, rng)
    parts = made(sample_rate=1.0, noise_multiplier=1.0)(dataset)
    run = AuditedRun(parts[0], canaries, lambda sizes: Directions(sizes, COUNT, rng))
    parts[1][0].bias.requires_grad_(False)
    with run.inserted_canaries(), pytest.raises(UnknownParameterError, match="frozen, unfrozen or replaced since make"):
        trained(1)(*parts)


STEPS, SIGMA = 6, 1.3
STRATEGY = matrix([0.8, 0.6], STEPS)


def brute_force(releases_T, trace, canary):
    """Returns the log-ratio as a sum over all sets of steps that may include the canary."""
    rate, possible = trace.sample_rate, np.flatnonzero(trace.possible_TM[:, canary])
    strategy = np.eye(STEPS) if trace.strategy_TT is None else trace.strategy_TT
    noising = np.linalg.inv(strategy)
    covariance = SIGMA**2 * noising @ noising.T
    total = 0.0
    for chosen in itertools.product([False, True], repeat=len(possible)):
        shift = np.zeros(STEPS)
        shift[possible] = chosen
        chance = np.prod([rate if one else 1 - rate for one in chosen])
        total += chance * stats.multivariate_normal(shift, covariance).pdf(releases_T)
    return np.log(total / stats.multivariate_normal(np.zeros(STEPS), covariance).pdf(releases_T))


CASES = {
    "independent": {"sample_rate": 0.3},
    "all rows": {"sample_rate": 1.0},
    "in turns": {"sample_rate": 0.3, "first_steps_M": np.array([0, 1, 1, -1]), "cycle": 2, "strategy_TT": STRATEGY},
    "in turns, all rows": {
        "sample_rate": 1.0, "first_steps_M": np.array([0, 1, 1, -1]), "cycle": 2,
        "strategy_TT": matrix([0.7, 0.5, 0.3], STEPS),
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_scores_are_likelihood_ratios(case):
    releases_TM = np.random.default_rng(0).normal(0.5, 1.5, (STEPS, 4))
    trace = Trace(releases_TM, np.zeros((STEPS, 4), bool), SIGMA, **case)
    expected = [brute_force(releases_TM[:, canary], trace, canary) for canary in range(4)]
    assert log_likelihood_ratios(trace) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_run_without_noise_has_finite_scores():
    releases_TM = np.array([[1.0, 0.0]] * STEPS)
    trace = Trace(releases_TM, np.ones((STEPS, 2), bool), 0.0, 0.5)
    scores = log_likelihood_ratios(trace)
    assert np.isfinite(scores).all() and scores[0] > scores[1]


def test_participation_means_match_least_squares():
    rng = np.random.default_rng(1)
    drawn_TM = rng.random((STEPS, 3)) < 0.5
    drawn_TM[:, 2] = False
    releases_TM = rng.standard_normal((STEPS, 3))
    trace = Trace(releases_TM, drawn_TM, SIGMA, 0.5, strategy_TT=STRATEGY)
    means, weights = participation_means(trace)
    for canary in (0, 1):
        shape, white = STRATEGY @ drawn_TM[:, canary], STRATEGY @ releases_TM[:, canary]
        (expected,), _, _, _ = np.linalg.lstsq(shape[:, None], white, rcond=None)
        assert means[canary] == pytest.approx(expected) and weights[canary] == pytest.approx(shape @ shape)
    assert (means[2], weights[2]) == (0, 0)


@pytest.mark.parametrize("config", plans.CONFIGS.values(), ids=plans.CONFIGS.keys())
def test_the_strategy_of_a_run_matches_its_plan(config):
    found = strategy_of(config.recurrence, plans.STEPS)
    if config.recurrence is None:
        assert found is None
    else:
        assert found == pytest.approx(plans.strategy_of(config), abs=1e-9)
