"""Extensions that violate their declared properties raise an error before any release."""

import itertools

import inside
import numpy as np
import pytest
import torch
from recipes import STEPS, begun, recipe, train

from dpengine.accounting import (
    EpochParticipation,
    FixedSizeParticipation,
    PoissonParticipation,
    SeparatedParticipation,
    TruncatedParticipation,
)
from dpengine.errors import BatchStateError, ExtensionError, InvalidBudgetError
from dpengine.noise import BandMF, banded_toeplitz, dense
from dpengine.noise.custom_noise import recurrence_of, strategy_of
from dpengine.noise.sensitivity import cycle_sq_sensitivities_of, epochs_sq_sensitivity
from dpengine.sampling import BMinSepSampling, FixedBatchSampling
from dpengine.sampling.custom_scheme import check_draws

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")
Bernoulli, Decaying, Soft = recipe("Bernoulli"), recipe("Decaying"), recipe("Soft")


class Declared(Bernoulli):
    """Draws Poisson batches, and declares the given participation."""

    def __init__(self, rate, participation, num_examples=0):
        super().__init__(rate, num_examples)
        self.declared = participation

    def over(self, num_examples):
        return type(self)(self.rate, self.declared, num_examples)

    def participation(self):
        return self.declared


class Fixed(Declared):
    """Draws batches of fixed size."""

    def draw(self, step, words):
        size = round(self.rate * self.num_examples)
        return np.argsort(words(self.num_examples, step=step, block=0), kind="stable")[:size]


class Changing(Declared):
    """Draws another batch in each call, even for the same random words."""

    calls = 0

    def draw(self, step, words):
        Changing.calls += 1
        return super().draw(step + Changing.calls, words)


class Twice(Declared):
    """Draws the same example twice in a batch."""

    def draw(self, step, words):
        return np.array([3, 3])


class Same(Fixed):
    """Draws the same batch in each step."""

    def draw(self, step, words):
        return super().draw(0, words)


class Favored(Declared):
    """Includes one example in each batch."""

    def draw(self, step, words):
        return np.union1d([7], super().draw(step, words))


class Public(Declared):
    """Draws batches that depend on the step, but not on the random words."""

    def draw(self, step, words):
        return np.flatnonzero(np.random.default_rng(step).random(self.num_examples) < self.rate)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (Declared(0.25, PoissonParticipation(0.2)), r"examples were drawn instead of 5,760"),
        (Declared(0.25, PoissonParticipation(1.0, 4)), "not 4 steps apart"),
        (Fixed(0.25, PoissonParticipation(0.25)), "have a variance of 0 instead of 45"),
        (Declared(0.25, FixedSizeParticipation(60)), "batches have sizes"),
        (Declared(0.25, TruncatedParticipation(PoissonParticipation(0.25), 61)), r"a batch has \d+ examples"),
        (Declared(0.25, EpochParticipation(4)), "in two batches of one epoch"),
        (Declared(0.25, SeparatedParticipation(3)), "in batches that are 1 steps apart"),
        (Changing(0.25, PoissonParticipation(0.25)), "two different batches for the same step"),
        (Twice(0.25, PoissonParticipation(0.25)), "did not return distinct indices"),
        (Declared(0.25, "poisson"), "Return one of PoissonParticipation"),
        (Declared(0.25, TruncatedParticipation(PoissonParticipation(0.1), 240)), "drawn instead of 2,880"),
        (Same(0.25, FixedSizeParticipation(60)), "an example is in 120 batches instead of about 30"),
        (Favored(0.25, PoissonParticipation(0.25)), "an example is in 120 batches instead of about 30"),
        (Public(0.25, PoissonParticipation(0.25)), "the same batches for other words"),
    ],
)
def test_a_scheme_whose_draws_contradict_its_participation_is_rejected(scheme, message):
    with pytest.raises(ExtensionError, match=message):
        begun("BandMF", noise=None, sampling=scheme)


@pytest.mark.parametrize("size", [1, 60, 512])
def test_a_batch_may_be_larger_than_the_data_set_of_the_check(size):
    class Sized(Fixed):
        def draw(self, step, words):
            return np.argsort(words(self.num_examples, step=step, block=0))[:size]

    check_draws(Sized(0.25, FixedSizeParticipation(size)))


def test_batches_of_two_declared_epochs_cannot_share_a_step():
    class Epochs(Declared):
        def draw(self, step, words):
            return np.arange(self.num_examples).reshape(4, -1)[step % 4]

        def steps_per_epoch(self, num_examples):
            return 12  # a pass of the loader is three epochs

    scheme = Epochs(0.25, EpochParticipation(4, claimed=True))
    engine, model, optimizer, loader = begun("BandMF", noise=None, sampling=scheme)
    batches = iter(loader)
    for _ in range(5):
        inputs, targets = next(batches)
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    with pytest.raises(BatchStateError, match="two passes over the data"):
        optimizer.step()
    assert not any(charge.kind == "release" for charge in engine.ledger.history)


@pytest.mark.filterwarnings("ignore:.*DPE0")
@pytest.mark.parametrize("steps", [None, 9])
@pytest.mark.parametrize("noise", [None, BandMF(num_bands=3)], ids=["independent", "banded"])
def test_a_run_ends_after_the_iterations_of_its_scheme(noise, steps):
    scheme = BMinSepSampling(sampling_prob=0.25, min_separation=3, iterations=5)
    engine, model, _, loader = begun("BandMF", noise=noise, sampling=scheme, steps=steps)
    assert sum(1 for _ in itertools.chain(loader, loader, loader)) == 5
    engine.detach(model)  # charges the last batch
    assert engine.epsilon > 2.9 or steps


@pytest.mark.parametrize("factor", [2.0, 1.001])
def test_a_policy_that_exceeds_its_bound_is_rejected_at_the_first_batch(factor):
    class Loud(Soft):
        def factors(self, norms_BK):
            return factor * self.norm / norms_BK

    engine, model, optimizer, loader = begun("Soft", clipping=Loud(1.0))
    with pytest.raises(ExtensionError, match=r"Loud\.factors\(\) exceeds the bounds"):
        train(model, optimizer, loader, 1)
    assert not any(charge.kind == "release" for charge in engine.ledger.history)


def test_a_policy_cannot_lower_its_bound_after_a_batch_was_clipped():
    class Follows(Soft):
        def observe(self, norms_BK):
            self.norm = float(norms_BK.median()) / 100

    engine, model, optimizer, loader = begun("Soft", clipping=Follows(1.0))
    with pytest.raises(ExtensionError, match=r"bounds changed from \(1\.0,\) .* in finish_step"):
        train(model, optimizer, loader, 1)
    assert not any(charge.kind == "release" for charge in engine.ledger.history)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"bounds": ()}, r"bounds is \(\)"),
        ({"bounds": (-1.0,)}, "positive, finite number for each group"),
        ({"bounds": (float("inf"),)}, "positive, finite number for each group"),
        ({"group_of": lambda self, names: [0]}, r"group_of\(\) returned \[0\] for 6 names"),
        ({"group_of": lambda self, names: [-1] * len(names)}, "numbered from 0"),
    ],
)
def test_a_policy_without_usable_bounds_or_groups_is_rejected(members, message):
    with pytest.raises(ExtensionError, match=message):
        begun("Soft", clipping=type("Broken", (Soft,), members)(1.0))


def test_the_bound_of_all_groups_may_be_a_number():
    engine, *_ = begun("Soft", clipping=type("Number", (Soft,), {"bounds": 2.0})(1.0), noise_multiplier=3.0)
    assert engine.describe()["noise_std_of_sum"] == 6.0


def test_a_policy_cannot_lower_the_noise():
    class Quiet(Soft):
        def gradient_noise_multiplier(self, noise_multiplier):
            return noise_multiplier / 2

    with pytest.raises(ExtensionError, match="the noise would be too small"):
        begun("Soft", clipping=Quiet(1.0))


class Weights:
    """Correlated noise with the given weights."""

    size = None

    def __init__(self, row, kept=((), ())):
        self.row, self.kept = (lambda step: row), (lambda step: kept)


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (Weights(((0.0,), ())), "the first number of row"),
        (Weights(((1.0,), (0.5,))), "one weight, factor and gain"),
        (Weights((1.0, 0.5)), "Return finite numbers"),
        (Weights(((1.0, float("nan")), ())), "Return finite numbers"),
        (Weights(((1.0,), (-0.3,)), ((37.7,), (1.0,))), "cannot be computed accurately"),
        (dense(np.eye(5)), r"has 5 steps, but 12 steps are planned"),
        (BandMF(num_bands=6), "bands need batches of at most 1/6"),
    ],
)
def test_noise_without_an_analysis_is_rejected(noise, message):
    with pytest.raises(InvalidBudgetError, match=message):
        begun("BandMF", noise=noise)


@pytest.mark.parametrize("missing", ["over", "participation", "expected_batch_size", "steps_per_epoch"])
def test_a_scheme_that_lacks_a_member_is_rejected(missing):
    members = {name: getattr(Bernoulli, name) for name in dir(Bernoulli) if not name.startswith("__")}
    del members[missing]
    partial = type("Partial", (), members)()
    with pytest.raises(TypeError, match=f"sampling is a Partial; pass a sampling scheme. Missing: {missing}"):
        begun("BandMF", noise=None, sampling=partial)


def test_noise_over_a_scheme_without_an_analysis_is_rejected():
    with pytest.raises(InvalidBudgetError, match=r"no epsilon is claimed.*noise correlated over the whole run"):
        begun("Decaying", sampling=Bernoulli(0.25))
    engine, *_ = begun("BandMF", sampling=BMinSepSampling(sampling_prob=0.25, min_separation=3))
    assert "BandMF" in str(engine.report())


def test_batches_of_fixed_size_are_accounted_for_replaced_examples():
    engine, model, optimizer, loader = begun("BandMF", noise=None, sampling=FixedBatchSampling(batch_size=12))
    train(model, optimizer, loader, STEPS)
    assert 2.9 < engine.epsilon <= 3.0
    assert "replace" in str(engine.report())


# The strategy matrix of custom noise


def test_noise_with_more_bands_than_groups_has_the_sensitivity_of_its_epochs():
    engine, *_ = begun("BandMF", noise=banded_toeplitz([1.0, 0.5, 0.3, 0.2, 0.1, 0.1]), noise_multiplier=2.0)
    event = inside.event(engine)
    strategy = sum(np.eye(STEPS, k=-lag) * value for lag, value in enumerate([1.0, 0.5, 0.3, 0.2, 0.1, 0.1]))
    expected = epochs_sq_sensitivity(strategy, STEPS // 4) / np.square(strategy).sum(axis=0).max() / 4
    assert event.cycle_length == 4 and event.precision(STEPS) == pytest.approx(expected, rel=1e-12)


def test_noise_that_float32_would_round_away_is_rejected():
    growing = Weights(((1.0,), (1.0,)), ((0.5,), (1.0,)))  # each row is 1.5 times the one before
    assert recurrence_of(growing, 20).column_norm < 2
    with pytest.raises(InvalidBudgetError, match=r"The noise of step 29 is .* times its fresh row"):
        recurrence_of(growing, 30)


def test_later_changes_do_not_affect_the_analyzed_weights():
    noise = Decaying()
    noise.name = "mine"
    found = recurrence_of(noise, 4)
    noise.share = 0.5
    assert list(found.row(3)[1]) == [-0.05]
    again = recurrence_of(noise, 4)
    assert found.name != again.name and found.name.startswith("mine-")  # a checkpoint compares the names


@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_the_strategy_is_the_inverse_of_the_noise(steps):
    strategy = strategy_of(recurrence_of(Decaying(), steps), steps)
    expected = np.eye(steps)
    for t in range(steps):
        expected[t, :t] = 0.05 * 0.9 ** (t - 1 - np.arange(t))
    np.testing.assert_allclose(strategy, expected / np.linalg.norm(expected, axis=0).max(), atol=1e-12)


@pytest.mark.parametrize("column_normalized_steps", [None, 12])
def test_built_in_noise_has_the_analysis_of_custom_noise(column_normalized_steps):
    built_in = banded_toeplitz([1.0, 0.5, 0.25], column_normalized_steps=column_normalized_steps)
    found = recurrence_of(built_in, STEPS)
    assert found.correlation.bands == 3
    norm = 1.0 if column_normalized_steps else np.linalg.norm([1.0, 0.5, 0.25])
    assert found.column_norm == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize(("size", "cycle"), [(12, 3), (12, 4), (12, 12), (30, 5)])
def test_the_sensitivity_is_the_maximum_over_all_positions_in_the_cycle(size, cycle):
    generator = np.random.default_rng(size + cycle)
    strategy = np.tril(generator.uniform(-0.5, 0.5, (size, size))) + 2 * np.eye(size)
    found = cycle_sq_sensitivities_of(strategy, cycle)
    largest = np.square(strategy).sum(axis=0).max()
    assert found[-1] * largest >= epochs_sq_sensitivity(strategy, size // cycle) * (1 - 1e-12)
    assert list(found) == sorted(found)
    ends = range(cycle, size + 1, cycle)
    expected = [epochs_sq_sensitivity(strategy[:end, :end], end // cycle) / largest for end in ends]
    np.testing.assert_allclose(found, np.maximum.accumulate(expected), rtol=1e-12)


class Shuffled:
    """Splits a permutation of the examples into batches; the length of an epoch follows from their number."""

    def __init__(self, batch_size, num_examples=0, shift=0):
        self.batch_size, self.num_examples, self.shift = batch_size, num_examples, shift

    def over(self, num_examples):
        return Shuffled(self.batch_size, num_examples, self.shift)

    def draw(self, step, words):
        epoch, place = divmod(step, self.steps_per_epoch(self.num_examples))
        order = np.argsort(words(self.num_examples, step=epoch, block=0), kind="stable")
        return order[place * self.batch_size :][: self.batch_size]

    def participation(self):
        return EpochParticipation(self.steps_per_epoch(self.num_examples) + self.shift, claimed=True)

    def expected_batch_size(self, num_examples):
        return min(self.batch_size, num_examples)

    def steps_per_epoch(self, num_examples):
        return -(-num_examples // self.batch_size)


def test_the_length_of_an_epoch_may_depend_on_the_number_of_examples():
    engine, model, optimizer, loader = begun("BandMF", noise=None, sampling=Shuffled(12), steps=8)
    train(model, optimizer, loader, 8)
    (event,) = {charge.event for charge in engine.ledger.history}
    assert event.cycle_length == 4 and event.cycles(8) == 2
    assert 2.9 < engine.epsilon <= 3.0
    with pytest.raises(ExtensionError, match="in two batches of one epoch"):
        begun("BandMF", noise=None, sampling=Shuffled(12, shift=1), steps=8)


class Unequal(Declared):
    """Two groups, of which the first has two thirds of the examples."""

    def draw(self, step, words):
        return np.flatnonzero((np.arange(self.num_examples) % 3 == 0) == step % 2)


@pytest.mark.parametrize("truncated", [False, True])
def test_groups_of_another_size_than_declared_are_rejected(truncated):
    groups = PoissonParticipation(1.0, 2, equal_groups=True)
    declared = TruncatedParticipation(groups, 200) if truncated else groups
    with pytest.raises(ExtensionError, match="a group has 160 examples, more than an equal share of 120"):
        begun("BandMF", noise=None, sampling=Unequal(1.0, declared))


def test_a_policy_that_changes_its_bounds_does_not_fit_correlated_noise():
    class Changing(Soft):
        has_constant_bounds = False

    with pytest.raises(InvalidBudgetError, match="needs a constant clipping norm"):
        begun("Decaying", clipping=Changing(1.0))
