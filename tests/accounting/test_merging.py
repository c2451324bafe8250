"""Histories with many distinct events: merged against unmerged epsilon, and the sketches that choose tilts."""

import numpy as np
import pytest

from dpengine.accounting import Charge, PoissonGaussianEvent, bounds_of, composition
from dpengine.accounting.composition import MAX_DISTINCT, compose
from dpengine.accounting.merging import ReleaseKinds, mean_release, split_into_cells
from dpengine.accounting.tilted_pld.loss_grid import sketch
from dpengine.accounting.tilted_pld.loss_pairs import Direction, LossPair
from dpengine.accounting.tilted_pld.tilt import sketches

RNG = np.random.default_rng(3)


def charges(rates, sigmas):
    return [
        Charge(PoissonGaussianEvent(float(rate), float(sigma)))
        for rate, sigma in zip(np.broadcast_to(rates, len(sigmas)), sigmas, strict=True)
    ]


NOISES = charges(0.01, np.geomspace(0.6, 4, 200))
BOTH = charges(np.geomspace(1e-4, 0.05, 80), RNG.uniform(0.6, 4, 80))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("history", "most", "loss"), [pytest.param(NOISES, MAX_DISTINCT, 1e-4, marks=pytest.mark.nightly), (BOTH, 15, 4e-3)]
)
def test_merging_costs_little_and_the_estimate_less(history, most, loss, monkeypatch):
    monkeypatch.setattr(composition, "MAX_DISTINCT", most)
    lower, estimate, upper = bounds_of(history, 1e-5)
    monkeypatch.setattr(composition, "MAX_DISTINCT", len(history))
    least, truth, exact = bounds_of(history, 1e-5)
    assert lower <= truth
    assert (1 - loss) * least < lower < estimate < upper < (1 + loss) * exact
    assert exact < upper
    assert estimate == pytest.approx(truth, rel=loss / 50)


@pytest.mark.slow
def test_with_thousands_of_kinds_the_bounds_differ_by_a_few_per_cent():
    history = charges(np.geomspace(1e-4, 0.05, 5000), np.random.default_rng(0).uniform(0.6, 4, 5000))
    lower, estimate, upper = bounds_of(history, 1e-5)
    # 5.7773 by 256 cells, whose bounds are 5.681 and 5.909.
    assert 0.945 * estimate < lower < upper < 1.075 * estimate
    assert estimate == pytest.approx(5.7773, rel=5e-4)


def test_epsilon_is_invariant_to_order_and_earlier_queries():
    shuffled = [BOTH[place] for place in np.random.default_rng(1).permutation(len(BOTH))]
    found = []
    for history in (BOTH, shuffled, BOTH):
        composition._limited.cache_clear()
        found.append([composition._limited(compose(history), 30, above) for above in (True, False, None)])
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_epsilon_grows_with_the_history_up_to_the_merging_error(monkeypatch):
    monkeypatch.setattr(composition, "MAX_DISTINCT", 24)
    history = charges(0.01, np.geomspace(4, 0.6, 80))
    found = np.array([bounds_of(history[:length], 1e-5) for length in (24, 25, 26, 40, 41, 79, 80)])
    assert np.all(found[1:, 2] > 0.999 * found[:-1, 2])
    assert np.all(np.diff(found[:, 1]) > 0)
    assert np.all(found[1:, 2] > found[:-1, 0])


EXTREME = ReleaseKinds(
    10.0 ** RNG.uniform(-300, 0, 400), 10.0 ** RNG.uniform(-200, 160, 400), np.floor(10.0 ** RNG.uniform(0, 12, 400))
)
ORDINARY = ReleaseKinds(10.0 ** RNG.uniform(-5, 0, 400), 10.0 ** RNG.uniform(-1, 2, 400), np.ones(400))


@pytest.mark.parametrize("above", [True, False])
@pytest.mark.parametrize("kinds", [EXTREME, ORDINARY], ids=["extreme", "ordinary"])
def test_each_kind_is_in_one_cell_and_on_the_right_side_of_its_corner(kinds, above):
    found, sign = split_into_cells(kinds, 60, above=above), 1 if above else -1
    assert len(found) == 60
    assert sorted(np.concatenate(found)) == list(range(400))
    for cell in found:
        rate, sigma = kinds.corner(cell, above=above)
        assert np.all(sign * rate >= sign * kinds.rates[cell])
        assert np.all(sign * sigma <= sign * kinds.noise[cell])
        rate, sigma = mean_release(kinds, cell)
        assert kinds.rates[cell].min() * (1 - 1e-12) <= rate <= kinds.rates[cell].max() * (1 + 1e-12)
        assert kinds.noise[cell].min() * (1 - 1e-12) <= sigma <= kinds.noise[cell].max() * (1 + 1e-12)


@pytest.mark.parametrize("count", [2, 399, 400])
def test_the_number_of_cells_is_the_requested_one(count):
    assert len(split_into_cells(ORDINARY, count, above=True)) == count


def test_batched_sketches_equal_single_sketches():
    first, second, third = (LossPair(q, s, Direction.REMOVE) for q, s in ((0.01, 0.8), (0.2, 3.0), (1.0, 5.0)))
    mixtures, counts, tail, points = [((0.3, first), (0.7, second)), ((1.0, third),)], [7, 30], 1e-9, 301
    together = sketches(mixtures, counts, tail, points)
    raised = together.raised((0.0, 2.0), 1e-4)
    for tilt in (-3.0, 0.0, 2.5):
        moment = lifted_moment = mean = variance = squares = 0.0
        for mixture, count in zip(mixtures, counts, strict=True):
            seen = [(weight, sketch(pair, tail, points)) for weight, pair in mixture]
            floors = [one.raised(one.floor((0.0, 2.0), 1e-4)) for _, one in seen]
            losses, masses = (
                np.concatenate(parts)
                for parts in zip(*((one.losses, weight * np.exp(one.log_masses)) for weight, one in seen), strict=True)
            )
            tilted = masses * np.exp(tilt * losses)
            moment += count * np.log(tilted.sum())
            lifted_moment += count * np.log(
                sum(
                    weight * np.exp(one.log_masses + tilt * one.losses).sum()
                    for (weight, _), one in zip(seen, floors, strict=True)
                )
            )
            one_mean = tilted @ losses / tilted.sum()
            mean += count * one_mean
            variance += count * (tilted @ (losses - one_mean) ** 2) / tilted.sum()
            squares += count * (masses @ losses**2) / masses.sum()
        assert together.log_moments(np.array([1.0, tilt]))[1] == pytest.approx(moment, rel=1e-12, abs=1e-12)
        assert raised.log_moments(np.array([tilt]))[0] == pytest.approx(lifted_moment, rel=1e-12, abs=1e-12)
        assert together.moments(tilt) == pytest.approx((mean, variance), rel=1e-12)
        assert together.squares() == pytest.approx(squares, rel=1e-12)
