"""Batches that the loader draws, and the accounted sample rate."""

import random
from fractions import Fraction

import inside
import pytest
import torch
from faults.neighbours import MODES, mlp, plain_step, private, release_of, tensors, truth_of
from faults.sampler_law import inclusion_counts, p_values
from inside_parts import planned_steps
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.errors import AccountingRefusedError
from dpengine.sampling.choose_scheme import draws_for

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")
ROWS, BATCH, DRAWS = 60, 6, 600


def private_loader(dataset, batch_size, *, seed=0, shuffle=True, **options):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine(seed=seed)
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)
    return engine, engine.make_private(model, optimizer, loader, **{"noise_multiplier": 1.0, **options})[2]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.hazard("S1")
def test_batches_are_poisson_with_and_without_shuffle(shuffle):
    found = inclusion_counts(private_loader(range(ROWS), BATCH, shuffle=shuffle)[1], DRAWS, ROWS)
    assert found.max() == 1
    assert min(p_values(found, BATCH / ROWS).values()) > 1e-4


@pytest.mark.slow
@pytest.mark.hazard("S1")
def test_shuffled_batches_fail_the_poisson_test_and_get_epsilon_raises():
    engine, loader = private_loader(range(ROWS), BATCH, sampling="shuffle")
    wrong = p_values(inclusion_counts(loader, DRAWS, ROWS), BATCH / ROWS)
    assert wrong["each"] < 1e-6 and wrong["batch_sizes"] < 1e-6
    with pytest.raises(AccountingRefusedError):
        engine.get_epsilon(1e-3)


def private_run(rows, batch_size, *, accountant="pld", **options):
    model = mlp()
    engine = PrivacyEngine(accountant, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*tensors(rows=rows)), batch_size=batch_size)
    return engine, *engine.make_private(model, optimizer, loader, **options)


@pytest.mark.hazard("S2")
def test_sampler_divisor_and_ledger_use_the_same_rate():
    choose = random.Random(0)
    for _ in range(30):
        rows = choose.randrange(1, 200)
        batch_size = choose.randrange(1, 60)
        engine, model, optimizer, loader = private_run(rows, batch_size, noise_multiplier=1.0)
        scheme, size = inside.sampling(engine), inside.state(engine).expected_batch_size
        plain_step(model, optimizer, *next(iter(loader)))
        (charge,) = engine.ledger.history
        assert inside.loader_draws_plan(engine, loader)
        assert scheme.sample_rate == min(1.0, batch_size / rows)
        assert size == scheme.expected_batch_size == min(batch_size, rows)
        accounted = getattr(charge.event, "sample_rate", 1.0)
        assert scheme.sample_rate <= accounted <= scheme.sample_rate * (1 + 1e-15) + 2**-59
        assert_divided_by(min(batch_size, rows), private_run(rows, batch_size, noise_multiplier=0.0))


def assert_divided_by(divisor, run):
    _, model, optimizer, loader = run
    batch = next(iter(loader))
    truth = truth_of(mlp(), batch) / divisor if len(batch[0]) else torch.zeros(())
    plain_step(model, optimizer, *batch)
    found = torch.cat([p.grad.flatten().double() for p in model.parameters()])
    assert float((found - truth).norm()) <= 1e-5 * float(truth.norm())


@pytest.mark.slow
@pytest.mark.hazard("S2")
def test_a_sampling_rate_ten_percent_too_high_fails_the_poisson_test():
    found = inclusion_counts(private_loader(range(ROWS), BATCH, sample_rate=1.1 * BATCH / ROWS)[1], 2000, ROWS)
    assert p_values(found, BATCH / ROWS)["total"] < 1e-6
    assert min(p_values(found, 1.1 * BATCH / ROWS).values()) > 1e-4


@pytest.mark.parametrize(
    "rate",
    [
        2.0**-40,
        1e-12,
        2.0**-9,
        2.0**-8,
        0.1,  # from here on, q + 2**-60 rounds to q in float64
        0.5,
        1 - 2.0**-30,
    ],
)
@pytest.mark.hazard("S3")
def test_the_accounted_rate_is_an_upper_bound_of_the_sampling_rate(rate):
    engine, _, _, _ = private(mlp(), tensors(), sample_rate=rate, noise_multiplier=1.0)
    accounted = inside.event(engine).sample_rate
    assert Fraction(accounted) >= Fraction(rate) + Fraction(1, 2**61)


@pytest.mark.hazard("S4")
def test_the_number_of_planned_steps_is_not_rounded_down():
    for rows in range(1, 5001):
        for batch_size in (1, 7, rows // 2 + 1):
            steps = draws_for(DataLoader(range(rows), batch_size=batch_size)).steps_per_epoch
            assert steps == -(-rows // batch_size)
            assert [planned_steps(epochs, None, steps) for epochs in (1, 3, 20)] == [
                steps,
                3 * steps,
                20 * steps,
            ]


@pytest.mark.parametrize(("rows", "batch_size", "epochs"), [(7, 3, 3), (49, 7, 2), (10, 10, 5)])
@pytest.mark.hazard("S4")
def test_epsilon_after_all_planned_epochs_is_within_the_target(rows, batch_size, epochs):
    engine, model, optimizer, loader = private_run(
        rows, batch_size, accountant="rdp", target_epsilon=3.0, target_delta=1e-3, epochs=epochs
    )
    steps = 0
    for _ in range(epochs):
        for batch in loader:
            plain_step(model, optimizer, *batch)
            steps += 1
    assert steps == epochs * -(-rows // batch_size) == engine.ledger.steps
    assert engine.epsilon <= 3.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.hazard("S5")
def test_an_empty_batch_adds_noise_and_is_charged(mode):
    engine, model, optimizer, loader = private(
        mlp(), tensors(), mode=mode, sample_rate=1 / 6, noise_multiplier=1.0, max_grad_norm=1e-6
    )
    sizes, grads = [], []
    for _ in range(4):
        for inputs, targets in loader:
            plain_step(model, optimizer, inputs, targets)
            sizes.append(inside.samples_now(engine))
            grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert 0 in sizes and max(sizes) > 0
    assert engine.ledger.steps == len(sizes) and {c.kind for c in engine.ledger.history} == {"release"}
    for grad in grads:  # 43 draws of standard deviation 1e-6
        assert 0.5e-6 < float(grad.std()) < 2e-6


@pytest.mark.hazard("S5")
def test_batches_are_poisson_if_most_are_empty():
    found = inclusion_counts(inside.without_placeholders(private_loader(range(10), 1)[1]), 1500, 10)
    assert (found.sum(1) == 0).mean() == pytest.approx(0.9**10, abs=0.06)
    assert min(p_values(found, 0.1).values()) > 1e-4


@pytest.mark.hazard("S12")
def test_rate_and_noise_are_constant_and_each_step_is_charged_as_drawn():
    """Compares the calls that draw batches and noise with the ledger."""
    engine, model, optimizer, loader = private(mlp(), tensors(), sample_rate=0.5, noise_multiplier=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with inside.drawn_batches(engine) as drawn, inside.drawn_noise(engine) as noises:
        for _ in range(4):
            for batch in loader:
                plain_step(model, optimizer, *batch)
                scheduler.step()
                assert inside.assignable_constants(engine) == []
    (charge,) = engine.ledger.history
    assert inside.loader_draws_plan(engine, loader)
    assert [step for step, _ in drawn] == [step for _, step, _, _ in noises] == list(range(charge.count))
    assert {std for *_, std in noises} == {charge.event.noise_multiplier * inside.policy(engine).sensitivity()}
    assert {rate for _, rate in drawn} == {0.5} and 0 <= charge.event.sample_rate - 0.5 <= 2**-53


def empty_tensors():
    return [t[:0] for t in tensors()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.hazard("S6")
def test_an_empty_batch_adds_nothing_to_the_sum(mode):
    example = tuple(t[0] for t in tensors())
    empty = release_of(mlp(), empty_tensors(), mode=mode, example_input=example)
    assert not empty.any()
    single = [release_of(mlp(), [t[row : row + 1] for t in tensors()], mode=mode) for row in (1, 3)]
    assert all(0 < float(one.norm()) <= 1 for one in single)


@pytest.mark.hazard("S5")
def test_the_ledger_history_does_not_depend_on_the_number_of_examples():
    def history(rows):
        data = [t[:rows] for t in tensors()]
        example = tuple(t[0] for t in tensors())
        engine, model, optimizer, loader = private(
            mlp(), data, sample_rate=0.3, noise_multiplier=1.0, example_input=example
        )
        for _ in range(3):
            for inputs, targets in loader:
                plain_step(model, optimizer, inputs, targets)
        return engine.ledger.history

    assert history(0) == history(1) == history(6)
