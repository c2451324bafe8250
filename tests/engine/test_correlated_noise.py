"""Runs with noise correlated across steps, through ``make_private``."""

import itertools

import inside
import numpy as np
import pytest
import torch
from inside_parts import accounted_rate
from loops import BATCH, MAX_NORM, ROWS, examples, make_loop, mlp, same_state, state_of, train, unchanged
from torch.utils.data import DataLoader

from dpengine import Adaptive, PrivacyEngine
from dpengine.accounting import Charge, MatrixGaussianEvent, PoissonGaussianEvent, Relation, calibration, epsilon_of
from dpengine.errors import BatchStateError, BudgetExceeded, InvalidBudgetError
from dpengine.noise import BLT, BandedInverse, BandMF
from dpengine.noise.optimize import optimize_scheduled, scheduled_loss
from dpengine.plan import BandedInverseConfig, BLTConfig
from dpengine.sampling.cyclic import CyclicDraws, Partition

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012", "ignore:.*DPE006")
BANDS, STEPS, DELTA = 3, 10, 1e-3
NOISE = BandMF(num_bands=BANDS)


def banded_loop(**options):
    options = {"noise": NOISE, "steps": STEPS, "noise_multiplier": 1.0, **options}
    return make_loop(**options)


def test_run_with_correlated_noise_ends_after_its_planned_steps():
    loop = banded_loop()
    before = state_of(loop.model)
    scheme = inside.sampling(loop.engine)
    assert isinstance(scheme, CyclicDraws) and scheme.partition is Partition.EQUAL_SPLIT
    assert scheme.sample_rate == pytest.approx(BANDS * BATCH / ROWS)
    assert scheme.expected_batch_size == BATCH and inside.state(loop.engine).relation is Relation.ZERO_OUT
    assert train(loop, epochs=5) == STEPS
    assert not same_state(before, state_of(loop.model))


def test_noise_of_a_run_equals_the_product_with_the_inverse_strategy_matrix():
    """Recovers the noise as the difference of two runs of one seed that differ only in the noise."""
    released = {}
    for sigma in (1e-9, 1.0):
        loop = banded_loop(noise_multiplier=sigma, make_optimizer=lambda p: torch.optim.SGD(p, lr=1e-12))
        rows = []
        for _ in range(3):
            for batch in loop.loader:
                loop.step(*batch)
                rows.append(torch.cat([p.grad.flatten() for p in loop.model.parameters()]).double())
        released[sigma] = torch.stack(rows)
    noise = (released[1.0] - released[1e-9]).numpy() * BATCH / MAX_NORM
    source, strategy = inside.noise_source(loop.engine), np.array(inside.state(loop.engine).noise["strategy"])
    fresh = torch.stack(
        [source.normal_(torch.empty(noise.shape[1], dtype=torch.float64), domain="noise", step=t) for t in range(STEPS)]
    )
    whole = sum(np.eye(STEPS, k=-k) * c for k, c in enumerate(strategy))
    np.testing.assert_allclose(noise, np.linalg.solve(whole, fresh.numpy()), atol=1e-4)


def test_epsilon_is_available_at_any_step():
    loop = banded_loop()
    rate = accounted_rate(inside.sampling(loop.engine).sample_rate)
    assert loop.engine.get_epsilon(DELTA) == 0
    taken = 0
    for batch in loop.loader:
        loop.step(*batch)
        taken += 1
        charges = (Charge(PoissonGaussianEvent(rate, 1.0), -(-taken // BANDS)),)
        assert loop.engine.get_epsilon(DELTA) == epsilon_of(charges, DELTA, relation=Relation.ZERO_OUT)
    assert "BandMF" in str(loop.engine.report()) and loop.engine.describe()["correlated_noise"]["bands"] == BANDS


def test_planned_steps_stay_within_the_target():
    loop = banded_loop(noise_multiplier=None, target_epsilon=2.0, target_delta=DELTA)
    rate = accounted_rate(inside.sampling(loop.engine).sample_rate)
    found = calibration(target_epsilon=2.0, target_delta=DELTA, sample_rate=rate, steps=-(-STEPS // BANDS))
    assert inside.state(loop.engine).noise_multiplier == found.noise_multiplier
    assert train(loop, epochs=3) == STEPS
    assert 1.99 < loop.engine.get_epsilon(DELTA) <= 2.0


def test_a_second_run_adds_to_the_first():
    engine = PrivacyEngine(seed=0)
    for _ in range(2):
        loop = banded_loop(engine=engine, steps=BANDS)
        train(loop, epochs=1)
        engine.detach(loop.model)
    rate = accounted_rate(inside.sampling(loop.engine).sample_rate)
    assert engine.get_epsilon(DELTA) == epsilon_of((Charge(PoissonGaussianEvent(rate, 1.0), 2),), DELTA)


def test_with_constants_groups_are_independent_and_the_size_stays_private():
    loop = banded_loop(sample_rate=0.25, expected_batch_size=6.0, target_delta=DELTA)
    assert inside.sampling(loop.engine).partition is Partition.INDEPENDENT
    assert inside.state(loop.engine).relation is Relation.ADD_OR_REMOVE_ONE
    assert train(loop, epochs=3) == STEPS


def test_large_batches_in_chunks_and_discarded_ones_keep_their_rows():
    loop = banded_loop(physical_batch_size=2)
    for number, batch in enumerate(iter(loop.loader)):
        if number == 1 and len(batch[-1]):
            loop.optimizer.zero_grad()  # the batch is discarded before its backward pass
            continue
        loop.step(*batch)
    assert loop.engine.ledger.steps <= STEPS


def test_more_steps_than_planned_are_rejected():
    loop = banded_loop(steps=BANDS)
    assert train(loop, epochs=3) == BANDS
    with pytest.raises(BudgetExceeded, match="planned for 3 steps"):
        inside.return_batch(loop.engine, BANDS, 2)


def test_two_batches_in_one_step_are_rejected():
    loop = banded_loop()
    batches = iter(loop.loader)
    for _ in range(2):
        loop.backward(*next(batches))
    with pytest.raises(BatchStateError, match="correlated noise needs one sampled batch"):
        loop.optimizer.step()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"steps": None}, InvalidBudgetError, "needs the length of training"),
        ({"noise": BandMF(num_bands=5)}, InvalidBudgetError, r"5 bands need batches of at most 1/5.*1/4"),
        ({"noise": BandMF(num_bands=4), "steps": 3}, InvalidBudgetError, "more bands than the 3 planned steps"),
        ({"noise": 16}, TypeError, "noise is a int"),
        ({"sampling": "shuffle"}, InvalidBudgetError, "does not support sampling='shuffle'"),
        ({"clipping": Adaptive()}, InvalidBudgetError, "constant clipping norm"),
    ],
)
def test_impossible_banded_plans_are_rejected_with_the_numbers(options, error, message):
    model = mlp()
    with unchanged(model), pytest.raises(error, match=message):
        banded_loop(model=model, **options)


def test_a_run_without_noise_is_not_private():
    loop = banded_loop(noise_multiplier=0.0)
    train(loop, epochs=3)
    assert loop.engine.get_epsilon(DELTA) == float("inf")


@pytest.mark.nightly
def test_the_total_noise_of_a_run_has_a_lower_variance():
    """The sum of the noise over the run, of 40 runs with 43 weights: its variance is 0.6 of the usual one."""
    variances = {}
    for name, noise in (("independent", None), ("banded", NOISE)):
        totals = []
        for seed in range(40):
            loop = banded_loop(seed=seed, noise=noise, make_optimizer=lambda p: torch.optim.SGD(p, lr=1e-12))
            quiet = banded_loop(seed=seed, noise=noise, noise_multiplier=1e-9)
            noisy, plain = (gradient_total(one) for one in (loop, quiet))
            totals.append(noisy - plain)
        variances[name] = float(torch.stack(totals).var())
    assert variances["banded"] < 0.8 * variances["independent"]


def gradient_total(loop):
    """Returns the sum over all steps of the plan of ``p.grad``."""
    loop.optimizer.param_groups[0]["lr"] = 1e-12
    batches = itertools.chain.from_iterable(iter(loop.loader) for _ in range(5))
    total = 0
    for batch in itertools.islice(batches, STEPS):
        loop.step(*batch)
        total = total + torch.cat([p.grad.flatten() for p in loop.model.parameters()])
    return total


# Cyclic noise over the whole run


LONG = {"blt": BLT(num_buffers=2), "inverse": BandedInverse(num_bands=3)}


@pytest.mark.parametrize("name", LONG)
def test_groups_of_a_batch_are_cyclic(name):
    loop = banded_loop(noise=LONG[name])
    scheme = inside.sampling(loop.engine)
    assert scheme.sample_rate == 1 and scheme.cycle_length == ROWS // BATCH
    assert inside.state(loop.engine).relation is Relation.ZERO_OUT and inside.divisor(loop.engine) == BATCH
    assert inside.divisor(loop.engine, mean=False) == 1
    assert train(loop, epochs=5) == STEPS
    claim = inside.event(loop.engine)
    assert isinstance(claim, MatrixGaussianEvent) and loop.engine.ledger.history == (Charge(claim, STEPS),)
    assert {"blt": "BLT", "inverse": "banded inverse"}[name] in str(loop.engine.report())


def test_skipped_cyclic_steps_are_charged():
    """The examples of a step depend on its number, so a run with skipped steps costs as much as a complete one."""
    loop = banded_loop(noise=BLT())
    loop.step(*next(iter(loop.loader)))
    loop.loader.load_state_dict({"position": 4})
    loop.step(*next(iter(loop.loader)))
    assert loop.charges == [("release", 1), ("void", 3), ("release", 1)]


def test_epochs_are_counted_in_groups():
    data = torch.utils.data.TensorDataset(torch.randn(201, 5), torch.randint(0, 3, (201,)))
    loop = banded_loop(noise=BLT(), dataset=data, batch_size=20, steps=None, epochs=2)
    assert (
        len(loop.loader) == inside.sampling(loop.engine).cycle_length == 10
    )  # not 11: the last batch does not form a separate group
    assert inside.state(loop.engine).iterations == inside.planned_steps_of(loop.engine) == 20
    assert inside.divisor(loop.engine) == pytest.approx(20.1, abs=0.2)


@pytest.mark.parametrize("name", LONG)
def test_noise_in_cycles_is_that_of_the_config(name):
    shared = {"iterations": STEPS, "cycle_length": ROWS // BATCH, "num_examples": ROWS, "noise_multiplier": 1.0}
    config = {
        "blt": lambda: BLTConfig.default(num_buffers=2, **shared),
        "inverse": lambda: BandedInverseConfig.default(num_bands=3, **shared),
    }[name]()
    engine = banded_loop(noise=LONG[name], max_grad_norm=0.5).engine
    assert inside.state(engine).noise_std == pytest.approx(0.5 * config.recurrence.column_norm)
    assert inside.event(engine).sq_sensitivities == config.event(1.0).sq_sensitivities
    assert inside.state(engine).noise == config.recurrence.description


@pytest.mark.parametrize("name", LONG)
def test_cyclic_plan_stays_within_the_target(name):
    loop = banded_loop(noise=LONG[name], noise_multiplier=None, target_epsilon=2.0, target_delta=DELTA)
    assert train(loop, epochs=5) == STEPS
    assert 2.0 * (1 - 1e-4) < loop.engine.epsilon <= 2.0


def test_earlier_charges_count_in_cyclic_calibration():
    loop = banded_loop(noise=None, noise_multiplier=3.0, target_delta=DELTA)
    first = train(loop, epochs=1)
    loop.engine.detach(loop.model)
    alone = banded_loop(noise=BLT(), noise_multiplier=None, target_epsilon=2.0, target_delta=DELTA).optimizer
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(examples(), batch_size=BATCH)
    loop.engine.make_private(model, optimizer, data, noise=BLT(), steps=STEPS, target_epsilon=2.0, target_delta=DELTA)
    assert first and optimizer.noise_multiplier > alone.noise_multiplier * 1.01


def test_declared_constants_set_the_relation_groups_and_divisor():
    constants = {"sample_rate": 0.25, "expected_batch_size": 6.0, "target_delta": DELTA}
    engine = banded_loop(noise=BLT(), **constants).engine
    relation, scheme = inside.state(engine).relation, inside.sampling(engine)
    assert relation is Relation.ADD_OR_REMOVE_ONE and scheme.partition is Partition.INDEPENDENT
    assert scheme.cycle_length == 4 and inside.divisor(engine) == 6.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 10}, r"Batches of 10 do not divide them: 2 groups would have 12 each.*batch_size=12 or 8"),
        ({"steps": None}, r"noise=BLT\(\.\.\.\) needs the length of training"),
        ({"sampling": "shuffle"}, "does not support sampling='shuffle'"),
        ({"clipping": Adaptive(), "max_grad_norm": None}, "needs a constant clipping norm"),
    ],
)
def test_impossible_cyclic_plans_are_rejected(options, message):
    with pytest.raises(InvalidBudgetError, match=message):
        banded_loop(noise=BLT(), **options)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: BLT(num_buffers=16), ValueError, "at most 15, got 16"),
        (lambda: BLT(num_buffers=True), TypeError, "whole number, got True"),
        (lambda: BandedInverse(num_bands=0), ValueError, "at least 1, got 0"),
        (lambda: BandedInverse(num_bands=2.0), TypeError, "whole number"),
        (lambda: banded_loop(noise="blt"), TypeError, r"pass noise=BandMF\(num_bands=16\), BLT\(\)"),
    ],
)
def test_invalid_noise_arguments_are_rejected(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_schedule_uses_its_optimal_strategy():
    rates = np.linspace(1.0, 0.0, STEPS)
    loop = banded_loop(noise=BandMF(num_bands=BANDS, momentum=0.9, learning_rates=rates))
    noise = inside.state(loop.engine).noise
    best = optimize_scheduled(STEPS, BANDS, rates=rates, momentum=0.9)
    np.testing.assert_allclose(noise["strategy"], best)
    plain = BandMF(num_bands=BANDS, momentum=0.9).recurrence(STEPS).description["strategy"]
    losses = [scheduled_loss(column, rates=rates, momentum=0.9) for column in (best, plain, [1.0])]
    assert losses[0] < losses[1] < losses[2]
    gain = noise["error_of_independent_noise_over_this"]
    assert gain == pytest.approx((losses[2] / losses[0]) ** 0.5)


@pytest.mark.parametrize("rates, loss", [([], "mean"), ([0.0, 1.0], "mean"), ([1.0, -1.0], "mean"), ([1.0], "max")])
@pytest.mark.hazard("S12")
def test_bad_schedules_are_rejected(rates, loss):
    with pytest.raises(ValueError, match="learning_rates must be finite"):
        BandMF(num_bands=2, learning_rates=rates, loss=loss)


@pytest.mark.hazard("S12")
def test_schedule_must_cover_the_whole_run():
    with pytest.raises(ValueError, match="9 learning_rates for 10 steps"):
        banded_loop(noise=BandMF(num_bands=BANDS, learning_rates=[1.0] * 9))
