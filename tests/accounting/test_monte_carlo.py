"""Runs without a closed form: simulated losses, verified deltas, and composition with other events.

Statistical tests state how many standard errors they allow. Their seeds are fixed.
"""

import itertools
import math

import numpy as np
import pytest

from dpengine.accounting import (
    Charge,
    GaussianEvent,
    PoissonGaussianEvent,
    Relation,
    SampledMatrixEvent,
    delta_of,
    epsilon_of,
    monte_carlo_epsilon,
    verify,
)
from dpengine.accounting.composition import compose
from dpengine.accounting.monte_carlo import losses, tally
from dpengine.accounting.monte_carlo.verified import threshold_for, verified_delta
from dpengine.errors import AccountingRefusedError

from .simulated_runs import BANDS, DENSE, SCHEMES, run


def matrix_of(event):
    if event.columns:
        return np.array(event.columns).T
    found = np.zeros((event.steps, event.steps))
    for i in range(event.steps):
        for k, value in enumerate(event.coefficients[: event.steps - i]):
            found[i + k, i] = value
    return found


def patterns(event):
    """All participation patterns with their probabilities, by the definition of each scheme."""
    steps, b, p = event.steps, event.cycle_length, event.sample_rate
    if event.scheme != "b-min-sep":
        for group in range(b):
            own = range(group, steps, b)
            for taken in itertools.product([0, 1], repeat=len(own)):
                u = np.zeros(steps)
                u[list(own)] = taken
                chance = math.prod(p if one else 1 - p for one in taken) / b
                if chance:
                    yield chance, u
        return

    def walk(t, rest, chance, u):
        if chance == 0:
            return
        if t == steps:
            yield chance, np.array(u, dtype=float)
        elif rest:
            yield from walk(t + 1, rest - 1, chance, [*u, 0])
        else:
            yield from walk(t + 1, 0, chance * (1 - p), [*u, 0])
            yield from walk(t + 1, b - 1, chance * p, [*u, 1])

    if not event.warm_start:
        yield from walk(0, 0, 1.0, [])
        return
    yield from walk(0, 0, 1 / (1 + (b - 1) * p), [])
    for last in range(1, b):  # chosen so many steps before the first one
        yield from walk(0, b - last, p / (1 + (b - 1) * p), [])


def brute_force(event, outputs):
    strategy = matrix_of(event)
    sigma = event.noise_multiplier * np.linalg.norm(strategy, axis=0).max()
    total = 0
    for chance, u in patterns(event):
        moved = strategy @ u
        total = total + chance * np.exp((2 * moved @ outputs - moved @ moved) / (2 * sigma**2))
    return np.log(total)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "bins"])
@pytest.mark.parametrize("steps", [1, 5, 7])
@pytest.mark.parametrize("dense", [False, True])
def test_losses_are_those_of_all_patterns_enumerated(scheme, steps, dense):
    columns = tuple(column[:steps] for column in DENSE[:steps])
    event = run(scheme, steps=steps, sigma=0.8, coefficients=BANDS[:steps], columns=columns if dense else ())
    outputs = np.random.default_rng(steps).normal(size=(steps, 50), scale=2.0) + 0.5
    np.testing.assert_allclose(losses.loss_sampler(event).log_ratio(outputs.copy()), brute_force(event, outputs), 1e-10)


@pytest.mark.parametrize(("steps", "apart"), [(7, 3), (7, 7), (3, 5), (6, 1)])
@pytest.mark.parametrize("coefficients", [(), (1.0,), (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.1)], ids=len)
def test_losses_of_bins_are_those_of_all_bins_though_outputs_are_drawn_in_their_span(steps, apart, coefficients):
    columns = () if coefficients else tuple(column[:steps] for column in DENSE[:steps])
    event = run("bins", steps=steps, apart=apart, sigma=0.8, coefficients=coefficients[:steps], columns=columns)
    sampler = losses.loss_sampler(event)
    assert sampler.rows == min(steps, apart)
    drawn = np.zeros((sampler.rows, 400))
    sampler.add_participations(np.random.default_rng(0), drawn)
    theirs = np.unique(drawn.round(12), axis=1)
    theirs = theirs[:, np.argsort(np.linalg.norm(theirs, axis=0))]  # norms differ, or columns do not overlap
    ours = np.unique(np.array([matrix_of(event) @ u for _, u in patterns(event)]).T.round(12), axis=1)
    ours = ours[:, np.argsort(np.linalg.norm(ours, axis=0))]
    assert theirs.shape[1] == ours.shape[1]
    weights = np.random.default_rng(1).normal(size=(ours.shape[1], 50))
    np.testing.assert_allclose(sampler.log_ratio(theirs @ weights), brute_force(event, ours @ weights), 1e-8, 1e-8)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.hazard("S11")
def test_likelihood_ratios_have_mean_one(scheme, dense):
    event = run(scheme, columns=DENSE if dense else ())
    remove, add = losses.loss_sampler(event).draw(40_000, seed=5)
    for ratios in (np.exp(-add), np.exp(-remove)):  # E_Q[dP/dQ], E_P[dQ/dP]: within four standard errors
        assert abs(ratios.mean() - 1) < 4 * ratios.std() / math.sqrt(len(ratios))
        assert ratios.std() > 0.1


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "bins"])
def test_participations_follow_their_distribution(scheme):
    event = run(scheme, steps=6, coefficients=(1.0,))
    chances = {tuple(u): 0.0 for _, u in patterns(event)}
    for chance, u in patterns(event):
        chances[tuple(u)] += chance
    drawn = np.zeros((6, 20_000))
    losses.loss_sampler(event).add_participations(np.random.default_rng(3), drawn)
    found, counts = np.unique(drawn, axis=1, return_counts=True)
    assert {tuple(u) for u in found.T} <= set(chances)
    for u, count in zip(found.T, counts, strict=True):  # each within five standard errors
        chance = chances[tuple(u)]
        assert abs(count / 20_000 - chance) <= 5 * math.sqrt(chance * (1 - chance) / 20_000)
    assert sum(chances[tuple(u)] for u in found.T) > 0.99


@pytest.mark.slow
@pytest.mark.one_in(3, "scheme", "epsilon")
@pytest.mark.parametrize("scheme", ["cyclic", "cold", "warm"])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.5])
def test_without_bands_the_estimate_is_the_delta_of_sampled_gaussians(scheme, epsilon):
    event = run(scheme, apart=1, steps=20, coefficients=(1.0,))
    drawn = tally.simulation(event, 100_000, 7)
    truth = delta_of((Charge(PoissonGaussianEvent(0.4, 2.0), 20),), epsilon)
    error = math.sqrt(truth * (1 - truth) / 100_000)  # binomial standard error
    assert abs(drawn.estimate(epsilon, tally.no_release) - truth) < 4 * error + 2e-4 * truth


def test_losses_are_rounded_up_by_a_small_amount():
    drawn = np.random.default_rng(0).normal(size=1000)
    found = tally.tally(drawn)
    exact = np.maximum(0, -np.expm1(0.3 - drawn)).mean()
    assert exact <= found.estimate(0.3, tally.no_release) <= exact * (1 + 1e-3)
    assert found.values[-1] >= drawn.max() and found.shares.sum() == pytest.approx(1)
    assert tally.tally(np.full(3, 0.5)).estimate(0.0, tally.no_release) >= -math.expm1(-0.5)


@pytest.mark.parametrize(("threshold", "samples"), [(1e-6, 10**7), (3e-3, 10**4), (0.2, 50), (0.0, 1000), (1e-9, 100)])
def test_the_verified_delta_is_the_least_of_a_direct_search(threshold, samples):
    found = verified_delta(threshold, samples)
    best = 1.0
    for a in np.concatenate([np.geomspace(1e-9, 0.999999, 40_001), np.linspace(1e-6, 0.999999, 10_001)]):
        if a > threshold:
            entropy = (threshold * math.log(threshold / a) if threshold else 0.0) + (1 - threshold) * (
                math.log1p(-threshold) - math.log1p(-a)
            )
            best = min(best, a + (1 - a) * math.exp(-samples * entropy))
    assert threshold < found <= 1
    assert found == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize(("delta", "samples"), [(1e-5, 2_500_000), (1e-5, 10**8), (1e-2, 10_000), (0.3, 1000)])
def test_the_threshold_is_the_largest_that_verifies_a_delta(delta, samples):
    found = threshold_for(delta, samples)
    assert 0 < found < delta
    assert verified_delta(found, samples) <= delta < verified_delta(found * 1.001, samples)


def test_too_few_samples_raise_and_the_error_states_the_verifiable_delta():
    with pytest.raises(AccountingRefusedError, match=r"smallest verifiable delta is about 0\.0026"):
        threshold_for(1e-5, 10_000)
    with pytest.raises(AccountingRefusedError, match=r"smallest verifiable delta is about 0\.0026"):
        threshold_for(0.0024, 10_000)
    assert threshold_for(0.0025, 10_000) > 0


@pytest.mark.slow
def test_a_wrong_claim_is_accepted_no_more_often_than_stated():
    event = run("cyclic", steps=4, apart=2, coefficients=(1.0, 0.5), sigma=1.0)
    truth = tally.simulation(event, 400_000, 1).estimate(1.0, tally.no_release)
    samples, threshold, times = 40, truth * 0.55, 600
    accepted = sum(
        verify(event, 1.0, threshold=threshold, samples=samples, seed=seed).accepted for seed in range(times)
    )
    entropy = threshold * math.log(threshold / truth) + (1 - threshold) * math.log((1 - threshold) / (1 - truth))
    bound = math.exp(-samples * entropy)
    error = math.sqrt(bound * (1 - bound) / times)
    assert 0 < accepted / times < bound + 3 * error
    # Published only if accepted, the run's delta is this:
    assert accepted / times * truth < verified_delta(threshold, samples)


@pytest.mark.slow
def test_the_sweep_ends_above_the_truth_as_often_as_stated():
    event = run("cold", apart=1, steps=5, coefficients=(1.0,), sigma=1.5)
    truth = epsilon_of((Charge(PoissonGaussianEvent(0.4, 1.5), 5),), 0.05)
    found = [monte_carlo_epsilon(event, 0.05, samples=2000, seed=seed).epsilon for seed in range(100)]
    assert sum(value < truth for value in found) <= 5  # expected: fewer than 100 * 0.05
    assert np.median(found) < 1.3 * truth


def test_a_claim_states_its_parameters():
    event = run("warm")
    claim = monte_carlo_epsilon(event, 1e-2, samples=20_000, seed=3)
    assert (claim.accepted, claim.samples, claim.seed) == (True, 20_000, 3)
    assert claim.estimate <= claim.threshold == threshold_for(1e-2, 20_000)
    assert claim.delta == verified_delta(claim.threshold, 20_000) <= 1e-2
    again = {"threshold": claim.threshold, "samples": 20_000}
    assert verify(event, claim.epsilon, **again, seed=3) == claim
    assert not verify(event, claim.epsilon * 0.999, **again, seed=3).accepted
    assert not verify(event, claim.epsilon * 0.5, **again, seed=4).accepted


def test_one_seed_gives_one_answer_and_another_seed_another():
    event = run("cyclic")
    tally.simulation.cache_clear()
    first = monte_carlo_epsilon(event, 1e-2, samples=5000, seed=1)
    tally.simulation.cache_clear()
    assert monte_carlo_epsilon(event, 1e-2, samples=5000, seed=1) == first
    assert monte_carlo_epsilon(event, 1e-2, samples=5000, seed=2).epsilon != first.epsilon


def test_samples_do_not_repeat_from_chunk_to_chunk(monkeypatch):
    monkeypatch.setattr(losses, "_CHUNK", 7 * 64)
    remove, add = losses.loss_sampler(run("cold")).draw(1000, seed=0)
    assert len(np.unique(add)) == 1000 and len(np.unique(remove)) == 1000


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_multiple_of_the_strategy_is_the_same_run(scheme):
    one, same = (run(scheme, coefficients=tuple(s * c for c in BANDS)) for s in (1.0, 8.0))
    found = [monte_carlo_epsilon(event, 1e-2, samples=5000, seed=1).epsilon for event in (one, same)]
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_columns_that_make_a_toeplitz_strategy_are_the_same_run():
    event = run("warm")
    dense = run("warm", columns=tuple(map(tuple, matrix_of(event).T)))
    found = [monte_carlo_epsilon(one, 1e-2, samples=5000, seed=1).epsilon for one in (event, dense)]
    assert found[0] == found[1] and (event.bands, dense.bands) == (3, 3)


GAUSSIAN = SampledMatrixEvent(2.0, "balls-in-bins", 1, 1, (1.0,))  # one bin: every example is included


@pytest.mark.parametrize("others", [(), (Charge(GaussianEvent(1.5)),)], ids=["single", "composed"])
def test_a_run_composes_with_other_releases(others):
    drawn = tally.simulation(GAUSSIAN, 200_000, 3)
    history = compose((*others, Charge(GAUSSIAN)))
    curve, _ = tally.curve_of(history, Relation.ADD_OR_REMOVE_ONE, 1e-9)
    for epsilon in (0.0, 0.7, 2.0):
        truth = delta_of((*others, Charge(GaussianEvent(2.0))), epsilon)
        assert abs(drawn.estimate(epsilon, curve) - truth) < 4 * math.sqrt(truth / 200_000) + 0.02 * truth


@pytest.mark.parametrize(
    "rest",
    [
        (Charge(GaussianEvent(0.7)),),
        pytest.param((Charge(PoissonGaussianEvent(0.1, 1.0), 20),), marks=pytest.mark.slow),
    ],
    ids=["gaussian", "sampled"],
)
def test_the_curve_of_other_events_is_a_close_upper_bound(rest):
    composition = compose((*rest, Charge(GAUSSIAN)))
    curve, end = tally.curve_of(composition, Relation.ADD_OR_REMOVE_ONE, 1e-8)
    for epsilon in (0.0, 0.013, 0.4 * end, 0.95 * end):
        truth = delta_of(rest, epsilon)
        assert truth * (1 - 1e-9) <= curve(np.array([epsilon]))[0] <= truth * 1.1
        below = 1 - math.exp(-epsilon) * (1 - truth)
        assert below - 1e-12 <= curve(np.array([-epsilon]))[0] <= below + 0.1 * truth
    assert curve(np.array([end + 1]))[0] == 1e-8
    assert np.all(np.diff(curve(np.linspace(-5, end + 1, 999))) <= 1e-12)


@pytest.mark.one_in(2, "scheme")
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["bins", "cyclic", "cold", "warm"])
def test_likelihood_ratios_of_long_runs_have_mean_one(scheme):
    event = run(scheme, sigma=6.0, apart=8, steps=50, coefficients=tuple(1 / math.sqrt(1 + k) for k in range(8)))
    _, add = losses.loss_sampler(event).draw(2_000_000, seed=11)
    ratios = np.exp(-add)
    assert abs(ratios.mean() - 1) < 4 * ratios.std() / math.sqrt(len(ratios))
