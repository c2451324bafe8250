"""Properties of each sampling scheme: inclusion probabilities, separation of participations, and resuming."""

import itertools
import json
import math
import random

import numpy as np
import pytest
from scipy import stats

from dpengine.sampling import (
    BallsInBinsSampling,
    BMinSepSampling,
    CyclicPoissonSampling,
    FixedBatchSampling,
    Partition,
    RandomAllocationSampling,
)
from dpengine.sampling.scheme import KeyedWords, words_from

SURE = 1e-4  # probability that a correct scheme fails a test

SCHEMES = {
    "poisson": CyclicPoissonSampling(sampling_prob=0.3, iterations=20),
    "cyclic": CyclicPoissonSampling(sampling_prob=0.4, iterations=20, cycle_length=4),
    "independent": CyclicPoissonSampling(
        sampling_prob=0.4, iterations=20, cycle_length=4, partition_type=Partition.INDEPENDENT
    ),
    "truncated": CyclicPoissonSampling(sampling_prob=0.3, iterations=20, truncated_batch_size=46),
    "balls": BallsInBinsSampling(iterations=20, cycle_length=5),
    "rest": BMinSepSampling(sampling_prob=0.3, iterations=20, min_separation=4),
    "cold": BMinSepSampling(sampling_prob=0.3, iterations=20, min_separation=4, warm_start=False),
    "rest, cut": BMinSepSampling(sampling_prob=0.5, iterations=20, min_separation=3, truncated_batch_size=34),
    "allocation": RandomAllocationSampling(participations=3, iterations=20),
    "fixed": FixedBatchSampling(batch_size=32, iterations=20),
    "fixed, again": FixedBatchSampling(batch_size=32, iterations=20, replace=True),
}
EXAMPLES, RUNS = 160, 150  # a quarter of the examples would save little time


def run(scheme, seed, examples=EXAMPLES):
    """Returns the participations, ``(iterations, examples)``, as counts."""
    table = np.zeros((scheme.iterations, examples), dtype=int)
    for step, batch in enumerate(scheme.batch_iterator(examples, np.random.default_rng(seed))):
        np.add.at(table[step], batch, 1)
    return table


@pytest.fixture(scope="module")
def runs():
    """Returns many runs of a scheme, computed once per module."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = np.stack([run(SCHEMES[name], seed) for seed in range(RUNS)])
        return made[name]

    return of


@pytest.mark.parametrize("name", SCHEMES)
def test_batches_are_sorted_indices(name):
    scheme = SCHEMES[name]
    batches = list(scheme.batch_iterator(EXAMPLES, np.random.default_rng(0)))
    assert len(batches) == scheme.iterations
    for batch in batches:
        assert batch.dtype == np.int64
        assert (np.diff(batch) >= (0 if "again" in name else 1)).all()
        assert ((batch >= 0) & (batch < EXAMPLES)).all()


@pytest.mark.parametrize("name", SCHEMES)
def test_resumed_run_draws_the_same_batches(name):
    scheme, words = SCHEMES[name], KeyedWords((1, 2))
    whole = [batch.tolist() for batch in scheme.batch_iterator(EXAMPLES, words)]
    first = scheme.batch_iterator(EXAMPLES, words)
    for _ in range(7):
        next(first)
    resumed = scheme.batch_iterator(EXAMPLES)  # has its own random key until the state is loaded
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert len(resumed) == 13
    assert [batch.tolist() for batch in resumed] == whole[7:]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_draw_is_a_function_of_its_step(name):
    scheme, words = SCHEMES[name], KeyedWords((3, 4))
    strategy = scheme.over(EXAMPLES)
    forwards = {step: strategy.draw(step, words).tolist() for step in range(6)}
    assert {step: strategy.draw(step, words).tolist() for step in (5, 2, 2, 0, 4, 1, 3)} == forwards
    assert strategy.draw(2, KeyedWords((3, 5))).tolist() != forwards[2] or name == "fixed"


@pytest.mark.parametrize("name", SCHEMES)
def test_other_randomness_gives_other_batches(name):
    assert (run(SCHEMES[name], 1) != run(SCHEMES[name], 2)).any()


RATES = {
    "poisson": 0.3,
    "cyclic": 0.4 / 4,
    "independent": 0.4 / 4,
    "balls": 1 / 5,
    "rest": 0.3 / (1 + 3 * 0.3),
    "allocation": 3 / 20,
    "fixed": 32 / 160,
    "fixed, again": 32 / 160,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RATES)
def test_inclusion_probability_is_equal_across_examples_and_steps(name, runs):
    rate, made = RATES[name], runs(name)
    draws, chance = (32, 1 / EXAMPLES) if "again" in name else (1, rate)
    counts, totals = made.sum(axis=0), made.sum(axis=1)  # summed over runs, summed over steps
    shrunk, degrees = {"fixed": ((EXAMPLES - 1) / EXAMPLES, EXAMPLES - 1), "fixed, again": (1, EXAMPLES - 1)}.get(
        name, (1, EXAMPLES)
    )
    z = (counts - rate * RUNS) / math.sqrt(rate * (1 - chance) * RUNS)
    for step in (0, 7, 19):  # one table per step, because the steps of a run are dependent
        assert SURE < stats.chi2.sf((z[step] ** 2).sum() * shrunk, degrees) < 1 - SURE
        assert stats.chi2.sf(z[step].sum() ** 2 / EXAMPLES, 1) > SURE
        of_one = stats.binom(RUNS * draws, chance)
        assert np.minimum(of_one.cdf(counts[step]), of_one.sf(counts[step] - 1)).min() > SURE / 2 / EXAMPLES
    if name in {"balls", "allocation"}:
        assert (totals == totals[0, 0]).all()
    else:
        z = (totals.mean(axis=0) - rate * made.shape[1]) / totals.std() * math.sqrt(RUNS)
        assert SURE < stats.chi2.sf((z**2).sum() * shrunk, degrees) < 1 - SURE


@pytest.mark.parametrize("name, p", [("poisson", 0.3), ("rest", 0.3 / 1.9), ("cold", None)])
def test_inclusions_of_different_examples_are_independent(name, p, runs):
    made = runs(name)[:, 9].astype(float)
    correlation = np.corrcoef(made.T)[np.triu_indices(EXAMPLES, 1)]
    z = correlation * math.sqrt(len(made))
    assert SURE < stats.chi2.sf((z**2).sum(), len(z)) < 1 - SURE
    if p is not None:
        sizes = made.sum(axis=1).astype(int)
        edges = stats.binom.ppf([0.1, 0.3, 0.5, 0.7, 0.9], EXAMPLES, p)
        bounds = [-1, *edges, EXAMPLES]
        expected = np.diff(stats.binom.cdf(bounds, EXAMPLES, p)) * len(sizes)
        counts = np.histogram(sizes, bins=np.asarray(bounds) + 0.5)[0]
        assert stats.chisquare(counts, expected).pvalue > SURE


@pytest.mark.slow
@pytest.mark.parametrize("name, cycle", [("cyclic", 4), ("independent", 4), ("balls", 5)])
def test_no_example_is_drawn_outside_its_group(name, cycle, runs):
    made = runs(name)[:50]
    for one in made:
        steps = [np.flatnonzero(one[:, i]) % cycle for i in range(EXAMPLES)]
        assert all(len(set(phases)) <= 1 for phases in steps)


def test_one_cycle_covers_each_example_of_a_group_once():
    everything = CyclicPoissonSampling(sampling_prob=1.0, iterations=4, cycle_length=4)
    assert (run(everything, 0).sum(axis=0) == 1).all()
    assert (run(everything, 0).sum(axis=1) == EXAMPLES // 4).all()
    balls = BallsInBinsSampling(iterations=5, cycle_length=5)
    assert (run(balls, 0).sum(axis=0) == 1).all()
    left = run(CyclicPoissonSampling(sampling_prob=1.0, iterations=3, cycle_length=3), 0)
    assert left.sum() == 159  # 160 mod 3 = 1 example is never included


@pytest.mark.slow
@pytest.mark.parametrize("name, gap", [("rest", 4), ("cold", 4), ("rest, cut", 3)])
@pytest.mark.hazard("S11")
def test_participations_respect_the_minimum_separation(name, gap, runs):
    made = runs(name)[:200]
    for lag in range(1, gap):
        assert not (made[:, lag:] & made[:, :-lag]).any()
    assert (made[:, gap:] & made[:, :-gap]).any()


def test_warm_start_has_the_stationary_distribution(runs):
    warm, cold = runs("rest").sum(axis=2).mean(axis=0), runs("cold").sum(axis=2).mean(axis=0)
    expected = EXAMPLES * 0.3 / 1.9
    error = 4 * math.sqrt(expected / RUNS)
    assert np.abs(warm - expected).max() < error
    assert cold[0] == pytest.approx(48, abs=1.6)


def test_b_min_sep_with_probability_one_equals_balls_in_bins():
    made = np.stack([run(BMinSepSampling(sampling_prob=1.0, iterations=12, min_separation=4), s) for s in range(400)])
    firsts = made.argmax(axis=1)
    assert (made[:, 4:] == made[:, :-4]).all()
    assert stats.chisquare(np.bincount(firsts.ravel(), minlength=4)).pvalue > SURE


@pytest.mark.slow
@pytest.mark.hazard("S9")
def test_a_truncated_batch_is_a_uniform_subset(runs):
    made, whole = runs("truncated"), runs("poisson")
    assert made.sum(axis=2).max() == 46
    assert (made <= whole).all()  # both use the same random words
    cut = whole.sum(axis=2) > 46
    assert (made.sum(axis=2) == np.minimum(whole.sum(axis=2), 46)).all()
    share = made[cut].sum(axis=0) / whole[cut].sum(axis=0)
    z = (share - share.mean()) / np.sqrt(share.mean() * (1 - share.mean()) / whole[cut].sum(axis=0))
    assert SURE < stats.chi2.sf((z**2).sum(), EXAMPLES - 1) < 1 - SURE


def test_random_allocations_have_fixed_size_and_are_uniform(runs):
    made = runs("allocation")
    assert (made.sum(axis=1) == 3).all()
    triples = made[:, :, :4].transpose(0, 2, 1).reshape(-1, 20) @ np.array([1 << i for i in range(20)])
    small = np.stack([run(RandomAllocationSampling(participations=2, iterations=4), s, 30) for s in range(300)])
    patterns = small.transpose(0, 2, 1).reshape(-1, 4) @ np.array([1, 2, 4, 8])
    counts = [np.sum(patterns == (1 << a) + (1 << b)) for a, b in itertools.combinations(range(4), 2)]
    assert sum(counts) == len(patterns)
    assert stats.chisquare(counts).pvalue > SURE
    assert len(set(triples.tolist())) > 400


def test_fixed_batches_are_uniform_subsets():
    scheme = FixedBatchSampling(batch_size=2, iterations=3000)
    counts = dict.fromkeys(itertools.combinations(range(5), 2), 0)
    for batch in scheme.batch_iterator(5, np.random.default_rng(0)):
        counts[tuple(batch.tolist())] += 1
    assert stats.chisquare(list(counts.values())).pvalue > SURE
    large = FixedBatchSampling(batch_size=3, iterations=2000)
    seen = np.concatenate(list(large.batch_iterator(1000, np.random.default_rng(1))))
    assert stats.chisquare(np.histogram(seen, bins=20, range=(0, 1000))[0]).pvalue > SURE


@pytest.mark.parametrize("name", ["poisson", "cyclic", "independent", "truncated", "rest", "fixed"])
def test_memory_does_not_grow_with_a_billion_examples(name):
    schemes = {
        "rest": BMinSepSampling(sampling_prob=1e-6, iterations=3, min_separation=3),
        "fixed": FixedBatchSampling(batch_size=1000, iterations=3),
        "truncated": CyclicPoissonSampling(sampling_prob=1e-6, iterations=3, truncated_batch_size=900),
        "poisson": CyclicPoissonSampling(sampling_prob=1e-6, iterations=3),
        "cyclic": CyclicPoissonSampling(sampling_prob=1e-5, iterations=3, cycle_length=10),
        "independent": CyclicPoissonSampling(
            sampling_prob=1e-5, iterations=3, cycle_length=10, partition_type=Partition.INDEPENDENT
        ),
    }
    sizes = [len(batch) for batch in schemes[name].batch_iterator(10**9)]
    assert all(700 < size < 1300 for size in sizes)


@pytest.mark.parametrize("name", SCHEMES)
def test_no_examples_give_empty_batches(name):
    if name == "fixed":
        with pytest.raises(ValueError, match="exceeds the 0 examples"):
            SCHEMES[name].over(0)
    elif name == "fixed, again":
        with pytest.raises(ValueError, match="0 examples"):
            SCHEMES[name].over(0)
    else:
        assert [len(batch) for batch in SCHEMES[name].batch_iterator(0)] == [0] * 20


def test_probability_zero_draws_no_example():
    for scheme in (
        CyclicPoissonSampling(sampling_prob=0.0, iterations=3),
        BMinSepSampling(sampling_prob=0.0, iterations=3, min_separation=2),
        RandomAllocationSampling(participations=0, iterations=3),
    ):
        assert not run(scheme, 0).any()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: CyclicPoissonSampling(sampling_prob=1.5, iterations=3), r"sampling_prob must be in \[0, 1\]"),
        (lambda: CyclicPoissonSampling(sampling_prob=math.nan, iterations=3), r"sampling_prob must be in \[0, 1\]"),
        (lambda: CyclicPoissonSampling(sampling_prob=0.5, iterations=-1), "iterations must be at least 0"),
        (lambda: CyclicPoissonSampling(sampling_prob=0.5, iterations=3, cycle_length=0), "cycle_length"),
        (lambda: CyclicPoissonSampling(sampling_prob=0.5, iterations=3, truncated_batch_size=-1), "truncated_"),
        (lambda: BallsInBinsSampling(iterations=3, cycle_length=0), "cycle_length must be at least 1"),
        (lambda: BMinSepSampling(sampling_prob=-0.1, iterations=3, min_separation=2), "sampling_prob"),
        (lambda: BMinSepSampling(sampling_prob=0.1, iterations=3, min_separation=0), "min_separation"),
        (lambda: RandomAllocationSampling(participations=4, iterations=3), "iterations must be at least 4"),
        (lambda: FixedBatchSampling(batch_size=-1, iterations=3), "batch_size"),
        (lambda: FixedBatchSampling(batch_size=9, iterations=3).over(8), "exceeds the 8 examples"),
        (lambda: SCHEMES["poisson"].batch_iterator(8).load_state_dict({"step": 21}), "step=21"),
    ],
)  # fmt: skip
def test_bad_numbers_are_rejected_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("iterations", [2.0, True, "3"])
def test_wrong_types_of_iterations_and_partition_type_are_rejected(iterations):
    with pytest.raises(TypeError, match="iterations must be a whole number"):
        CyclicPoissonSampling(sampling_prob=0.5, iterations=iterations)
    with pytest.raises(TypeError, match="partition_type"):
        CyclicPoissonSampling(sampling_prob=0.5, iterations=3, partition_type="equal")


@pytest.mark.parametrize(
    "rng",
    [None, np.random.default_rng(1), random.Random(1), random.SystemRandom()],
    ids=["none", "numpy", "python", "system"],
)
def test_rng_accepts_none_numpy_python_and_system_generators(rng):
    words = words_from(rng)
    drawn = words(10_000, step=3, block=1)
    assert stats.kstest(drawn / 2.0**64, "uniform").pvalue > SURE
    assert (words(10_000, step=3, block=1) == drawn).all()
    assert not (words(10_000, step=4, block=1) == drawn).any()
    assert not (words(10_000, step=3, block=2) == drawn).any()
    assert words_from(words) is words


def test_state_of_an_unkeyed_rng_loads_only_into_an_unkeyed_rng():
    words = KeyedWords((1, 2))
    stream = lambda count, *, step, block: words(count, step=step, block=block)  # noqa: E731
    scheme = SCHEMES["rest"]
    whole = [batch.tolist() for batch in scheme.batch_iterator(EXAMPLES, stream)]
    resumed = scheme.batch_iterator(EXAMPLES, stream)
    resumed.load_state_dict({"step": 9, "key": None, "kept": None})
    assert [batch.tolist() for batch in resumed] == whole[9:]
    with pytest.raises(ValueError, match="another type"):
        scheme.batch_iterator(EXAMPLES).load_state_dict({"step": 9, "key": None})


def test_integer_seed_is_rejected_as_rng():
    with pytest.raises(TypeError, match=r"rng is a int; pass None, a numpy\.random\.Generator"):
        SCHEMES["poisson"].batch_iterator(5, 0)


def test_a_loader_reads_the_same_batches():
    torch = pytest.importorskip("torch")
    scheme, words = SCHEMES["cyclic"], KeyedWords((5, 6))
    sampler = scheme.batch_sampler(EXAMPLES, words)
    assert len(sampler) == 20
    data = torch.arange(EXAMPLES)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, collate_fn=lambda rows: [int(r) for r in rows])
    assert list(loader) == [batch.tolist() for batch in scheme.batch_iterator(EXAMPLES, words)]
