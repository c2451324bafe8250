"""``make_private(plan=...)``: training follows the plan, and a plan that does not fit is rejected."""

import itertools
import math

import inside
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plans import CONFIGS, DRAWS, PLANS, ROWS, STEPS, Still, agrees, covariance, expected_covariance
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.errors import BatchStateError, BudgetExceeded, InvalidBudgetError
from dpengine.noise import BandMF
from dpengine.plan import BandMFConfig, DPSGDConfig
from dpengine.report import PrivacyReport


def loader(rows=ROWS, batch_size=30, width=4):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, width, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(0, 3, (rows,), generator=generator)), batch_size=batch_size)


def private(plan, model=None, data=None, *, engine=None, delta=1e-5, **settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 3) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = engine or PrivacyEngine(seed=7)
    data = loader() if data is None else data
    return engine, *engine.make_private(model, optimizer, data, plan=plan, target_delta=delta, **settings)


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


SIZED = {  # with the size of the largest batch
    "fixed": (DPSGDConfig(iterations=8, fixed_batch_size=30, noise_multiplier=1.0, num_examples=ROWS), 30),
    "truncated": (
        DPSGDConfig(iterations=8, sampling_prob=0.25, noise_multiplier=1.0, num_examples=ROWS, truncated_batch_size=31),
        31,
    ),
    "band-mf, truncated": (
        BandMFConfig(
            iterations=8, strategy=(1.0, 0.5), sampling_prob=0.5, noise_multiplier=1.0, num_examples=ROWS,
            truncated_batch_size=31,
        ),
        31,
    ),
}  # fmt: skip


@pytest.mark.one_in(4, "name", "made", others="slow")
@pytest.mark.one_in(2, "name", "made")
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("made", [False, True], ids=["config", "plan"])
def test_the_run_follows_the_plan(name, made):
    config = PLANS[name]
    engine, model, optimizer, batches = private(config.make() if made else config)
    steps, epochs = 0, 0
    while steps < config.iterations:
        assert epochs < 5
        for x, y in batches:
            step(model, optimizer, x, y)
            steps += 1
            assert engine.epsilon == pytest.approx(config.epsilon(1e-5, steps), rel=1e-9)
        epochs += 1
    assert list(batches) == []  # the run is over
    assert engine.ledger.steps == config.iterations
    said = engine.describe()
    assert said["noise_multiplier"] == 1.0
    assert said["relation"] == config.relation.value
    assert "epsilon" in str(engine.report()).lower() or "ε" in str(engine.report())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fixed", "truncated", "band-mf, truncated"])
def test_fixed_size_batches_are_drawn_charged_and_reported(name):
    config, largest = SIZED[name]
    engine, model, optimizer, batches = private(config)
    sizes = []
    while len(sizes) < config.iterations:
        for x, y in batches:
            step(model, optimizer, x, y)
            sizes.append(len(x))
            if len(sizes) % 20 == 1 or len(sizes) == config.iterations:
                assert engine.epsilon == config.epsilon(1e-5, len(sizes)) > 0
    assert max(sizes) == largest
    assert (min(sizes) == largest) == (name == "fixed")
    report = engine.report()
    (first, *_) = report.to_dict()["accounting"]["assumptions"]
    assert first["holds"] == "yes" and "subset" in first["name"]
    assert PrivacyReport.from_json(report.to_json()).to_html() == report.to_html()
    assert engine.ledger.steps == config.iterations


@pytest.mark.parametrize("name", PLANS)
def test_batches_have_the_stated_distribution(name):
    config = PLANS[name]
    engine, _, _, batches = private(config)
    cycle = config.sampling_scheme.cycle_length
    strategy = inside.sampling(engine)
    assert strategy.cycle_length == cycle
    assert strategy.sample_rate == config.sampling_scheme.sampling_prob
    assert strategy.partition is config.sampling_scheme.partition_type
    drawn = [x for epoch in range(8) for x, _ in batches]
    assert len(drawn) == 8
    for early, late in itertools.combinations(range(8), 2):
        if (late - early) % cycle:
            rows = {tuple(row.tolist()) for row in drawn[early]}
            assert not rows & {tuple(row.tolist()) for row in drawn[late]}


@pytest.mark.one_in(2, "name")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_optimizer_adds_the_noise_of_the_plan(name):
    config = CONFIGS[name]
    data = DataLoader(TensorDataset(torch.zeros(40, 1)), batch_size=40 // config.sampling_scheme.cycle_length)
    _, model, optimizer, batches = private(config, Still(), data)
    rows = []
    for (x,) in itertools.islice(itertools.chain.from_iterable(itertools.repeat(batches)), STEPS):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        rows.append(model.weight.grad.double().numpy().copy())
    assert agrees(covariance(np.stack(rows)), expected_covariance(config, 1.0), DRAWS).all()


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_match_the_functional_path(rescale, reduction):
    config = DPSGDConfig(
        iterations=3, sampling_prob=0.25, noise_multiplier=0.0, l2_clip_norm=0.4, rescale_to_unit_norm=rescale,
        normalize_by=8.0,
    )  # fmt: skip
    engine, model, optimizer, batches = private(config, loss_reduction=reduction)

    def loss(params, x, y):
        return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

    functional = config.make().clipped_grad(loss, batch_argnums=(1, 2))
    for x, y in batches:
        params = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction=reduction).backward()
        optimizer.step()
        with torch.no_grad(), inside.paused(engine):
            expected = functional(params, x, y)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-5, atol=1e-7)


def test_a_step_beyond_the_planned_steps_is_rejected():
    engine, *_ = private(PLANS["dp-sgd"])
    with pytest.raises(BudgetExceeded, match="planned for 8 steps"):
        inside.return_batch(engine, 8, 3)


def test_two_batches_in_one_step_of_a_plan_are_rejected():
    _, model, optimizer, batches = private(PLANS["dp-sgd"])
    for _, (x, y) in zip(range(2), batches, strict=False):
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(BatchStateError, match="plan needs one sampled batch in each step"):
        optimizer.step()


MISFITS = [
    ({"plan": DPSGDConfig(iterations=8, sampling_prob=0.5, noise_multiplier=1.0)}, r"batch size of 60.*size=30.*0\.25"),
    (
        {"plan": DPSGDConfig(iterations=8, sampling_prob=0.25, noise_multiplier=1.0, num_examples=100)},
        "num_examples=100, and the data set has 120",
    ),
    ({"plan": PLANS["dp-sgd"], "steps": 9}, "8 iterations, but .* request 9"),
    ({"plan": PLANS["dp-sgd"], "epochs": 3}, "8 iterations, but .* request 12"),
    ({"plan": PLANS["dp-sgd"], "noise_multiplier": 1.0}, "noise_multiplier cannot be combined with plan="),
    ({"plan": PLANS["dp-sgd"], "target_epsilon": 1.0, "max_grad_norm": 1.0}, "target_epsilon, max_grad_norm cannot"),
    ({"plan": PLANS["dp-sgd"], "noise": BandMF(num_bands=2)}, "noise cannot be combined"),
    ({"plan": PLANS["dp-sgd"], "clipping": "per_layer"}, "clipping cannot be combined"),
    ({"plan": PLANS["dp-sgd"], "sampling": "shuffle"}, "sampling cannot be combined"),
    (
        {"plan": PLANS["dp-sgd"], "sample_rate": 0.25, "expected_batch_size": 30},
        "sample_rate, expected_batch_size cannot",
    ),
    ({"plan": PLANS["dp-sgd"], "delta": None}, "keeps the number of examples private"),
]


@pytest.mark.parametrize("settings, message", MISFITS, ids=[message[:30] for _, message in MISFITS])
def test_a_plan_that_does_not_fit_is_rejected_with_the_numbers(settings, message):
    with pytest.raises(InvalidBudgetError, match=message):
        private(**settings)


def test_a_plan_without_noise_multiplier_is_rejected():
    with pytest.raises(ValueError, match="Call calibrate"):
        private(DPSGDConfig(iterations=8, sampling_prob=0.25))
    with pytest.raises(TypeError, match="plan is a float"):
        private(1.0)


def test_epochs_that_agree_with_the_plan_may_be_passed():
    engine, *_ = private(PLANS["dp-sgd"], epochs=2)
    assert inside.state(engine).iterations == 8


def test_a_public_dataset_size_determines_epochs_and_delta():
    engine, _, _, batches = private(PLANS["public"], delta=None)
    assert len(batches) == 4
    assert engine.delta == pytest.approx(ROWS**-1.1)
    _, _, _, whole = private(PLANS["band-mf"])
    assert len(whole) == 8  # one epoch is the whole run if the dataset size is private


def test_calibrated_plans_keep_their_target_in_training():
    config = BandMFConfig.default(num_bands=4, iterations=12, sampling_prob=1.0).calibrate(epsilon=2.0, delta=1e-5)
    engine, model, optimizer, batches = private(config)
    for x, y in batches:
        step(model, optimizer, x, y)
    assert 1.99 < engine.epsilon <= 2.0
    assert math.isfinite(engine.epsilon)


# Further arguments and checks


@pytest.mark.parametrize("name", ["band-mf", "blt"])
def test_skipped_steps_of_a_cyclic_plan_are_charged(name):
    """An example selected at steps 0, 4, 8, ... is included in each of them."""
    config = PLANS[name]
    engine, model, optimizer, batches = private(config)
    cycle = config.sampling_scheme.cycle_length
    for position in range(0, 8, cycle):
        batches.load_state_dict({"position": position})
        step(model, optimizer, *next(iter(batches)))
    assert engine.epsilon >= config.epsilon(1e-5, 8 - cycle + 1) * (1 - 1e-9)


def test_skipped_steps_of_a_poisson_plan_are_not_charged():
    engine, model, optimizer, batches = private(PLANS["dp-sgd"])
    for position in (0, 4):
        batches.load_state_dict({"position": position})
        step(model, optimizer, *next(iter(batches)))
    assert engine.ledger.steps == 2


def test_a_resumed_run_has_the_steps_that_are_left():
    config = PLANS["dp-sgd"]
    engine, model, optimizer, batches = private(config)
    for (x, y), _ in zip(batches, range(5), strict=False):
        step(model, optimizer, x, y)

    def resumed(state):
        later = PrivacyEngine(seed=8)
        later.load_state_dict(state)
        return private(config, engine=later)

    later, model, optimizer, batches = resumed(engine.state_dict())
    taken = [step(model, optimizer, x, y) for x, y in itertools.chain(batches, batches)]
    assert len(taken) == 3
    assert later.epsilon == pytest.approx(config.epsilon(1e-5), rel=1e-6)
    with pytest.raises(InvalidBudgetError, match="already has 8 steps"):
        resumed(later.state_dict())
