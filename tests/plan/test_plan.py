"""Plans of any sampling scheme, noise and clipping policy."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from plans import CONFIGS, DRAWS, STEPS, agrees, covariance, expected_covariance
from recipes import recipe, train
from torch import nn, optim, randn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine, PrivacyWarning
from dpengine.accounting import PoissonParticipation, Relation
from dpengine.clipping import PerLayer
from dpengine.errors import AccountingRefusedError, InvalidBudgetError, PrivacyError, forget_notices
from dpengine.noise import BLT, BandedInverse, BandMF, NoiseTransform, banded_toeplitz, dense
from dpengine.plan import (
    BandedInverseConfig,
    BandMFConfig,
    BLTConfig,
    DPSGDConfig,
    NonPrivateConfig,
    PerformanceFlags,
    Plan,
)
from dpengine.sampling import (
    BallsInBinsSampling,
    BMinSepSampling,
    CyclicPoissonSampling,
    FixedBatchSampling,
    Partition,
    RandomAllocationSampling,
    ShuffleSampling,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")
RUN = {"iterations": 48, "num_examples": 800}
POISSON = CyclicPoissonSampling(sampling_prob=0.1)
CYCLIC = CyclicPoissonSampling(sampling_prob=0.4, cycle_length=4)
FIXED, HALVES = FixedBatchSampling(batch_size=5), CyclicPoissonSampling(sampling_prob=0.5, cycle_length=2)
PAIRS = [
    (Plan(sampling=POISSON, **RUN), DPSGDConfig(sampling_prob=0.1, **RUN)),
    (Plan(sampling=FixedBatchSampling(batch_size=80), **RUN), DPSGDConfig(fixed_batch_size=80, **RUN)),
    (
        Plan(sampling=CyclicPoissonSampling(sampling_prob=0.1, truncated_batch_size=110), **RUN),
        DPSGDConfig(sampling_prob=0.1, truncated_batch_size=110, **RUN),
    ),
    (
        Plan(sampling=CYCLIC, noise=BandMF(num_bands=4), **RUN),
        BandMFConfig.default(num_bands=4, sampling_prob=0.4, **RUN),
    ),
    (
        Plan(sampling=BallsInBinsSampling(cycle_length=12), noise=BLT(num_buffers=2), **RUN),
        BLTConfig.default(num_buffers=2, cycle_length=12, **RUN),
    ),
    (
        Plan(sampling=BallsInBinsSampling(cycle_length=12), noise=BandedInverse(num_bands=3), **RUN),
        BandedInverseConfig.default(num_bands=3, cycle_length=12, **RUN),
    ),
]


@pytest.mark.one_in(2, "plan")
@pytest.mark.parametrize(("plan", "config"), PAIRS)
def test_a_plan_has_the_epsilon_of_the_equivalent_config(plan, config):
    found, expected = plan.calibrate(epsilon=2.0, delta=1e-5), config.calibrate(epsilon=2.0, delta=1e-5)
    assert found.noise_multiplier == pytest.approx(expected.noise_multiplier, rel=1e-9)
    assert found.epsilon(1e-5, 20) == pytest.approx(expected.epsilon(1e-5, 20), rel=1e-9)
    assert found.relation is expected.relation and found.accountants == expected.accountants
    assert found.make().stddev == pytest.approx(expected.make().stddev, rel=1e-9)


@pytest.mark.parametrize(
    "sampling",
    [
        POISSON,
        CyclicPoissonSampling(sampling_prob=0.5, cycle_length=2, partition_type=Partition.INDEPENDENT),
        FixedBatchSampling(batch_size=5, iterations=48),
        ShuffleSampling(batch_size=5),
        BallsInBinsSampling(cycle_length=4),
        BMinSepSampling(sampling_prob=0.1, min_separation=3),
        RandomAllocationSampling(participations=3, iterations=48),
    ],
    ids=lambda scheme: scheme.name,
)
def test_json_round_trips_every_scheme_and_noise(sampling):
    for noise in (None, BandMF(num_bands=2, momentum=0.5), BLT(num_buffers=1), BandedInverse(num_bands=2)):
        plan = Plan(sampling=sampling, noise=noise, noise_multiplier=1.5, **RUN)
        assert Plan.from_json(plan.to_json()) == plan


def test_json_rejects_custom_parts():
    plan = Plan(sampling=recipe("Bernoulli")(0.25), **RUN)
    assert plan.describe()["batches"] == "own: Bernoulli"
    with pytest.raises(ValueError, match="sampling is a Bernoulli, which cannot be stored as JSON"):
        plan.to_json()


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"sampling": FIXED, "num_examples": None}, AccountingRefusedError, "pass num_examples="),
        ({"sampling": ShuffleSampling(batch_size=5)}, AccountingRefusedError, "Epsilon cannot be computed.*shuffle"),
        ({"sampling": CYCLIC, "noise": BandMF(num_bands=5)}, AccountingRefusedError, "No privacy analysis"),
        ({"sampling": CyclicPoissonSampling(sampling_prob=0.1, iterations=4)}, ValueError, "has iterations=4"),
        ({"sampling": 3}, TypeError, "sampling is a int; pass a sampling scheme"),
        ({"sampling": POISSON, "noise": 3}, TypeError, "noise is a int"),
        ({"sampling": POISSON, "clipping": 3}, TypeError, "clipping=3 is not a policy"),
        ({"sampling": FixedBatchSampling}, TypeError, "sampling is the class FixedBatchSampling; pass an instance"),
        ({"sampling": POISSON, "noise": BLT}, TypeError, "noise is the class BLT; pass an instance"),
        ({"sampling": POISSON, "clipping": "flat"}, TypeError, r"pass a policy, such as dpengine.Flat\(1.0\)"),
    ],
)
def test_parts_without_an_analysis_are_rejected(fields, error, says):
    with pytest.raises(error, match=says):
        Plan(**(RUN | fields)).calibrate(epsilon=1.0, delta=1e-5)


def test_a_loop_without_the_engine_cannot_use_a_policy():
    plan = Plan(sampling=POISSON, clipping=PerLayer([0.5, 0.5]), noise_multiplier=1.0, **RUN)
    with pytest.raises(ValueError, match="clips to l2_clip_norm"):
        plan.make()


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        (HALVES, "sampling_prob=0.4.*, or the loader with batch_size=15"),
        (FixedBatchSampling(batch_size=15), "Create the loader with batch_size=15"),
        (BMinSepSampling(sampling_prob=0.5, min_separation=2), "Create the loader with batch_size=20"),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_a_loader_of_another_batch_size_is_rejected_with_that_of_the_plan(sampling, says):
    plan = Plan(iterations=8, sampling=sampling, num_examples=60, normalize_by=12, noise_multiplier=1.0)
    model = nn.Linear(5, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(randn(60, 5), (randn(60) > 0).long())
    with pytest.raises(InvalidBudgetError, match=says):
        PrivacyEngine().make_private(model, optimizer, DataLoader(data, batch_size=12), plan=plan, target_delta=1e-3)
    size = int(says.rsplit("=", 1)[1])
    PrivacyEngine().make_private(model, optimizer, DataLoader(data, batch_size=size), plan=plan, target_delta=1e-3)


def test_epsilon_follows_from_the_participation_of_the_draws():
    class Halves(recipe("Bernoulli")):
        """Selects half of the examples, and states less participation for an unknown number of examples."""

        def over(self, num_examples):
            return Halves(0.5, num_examples)

        def participation(self):
            return PoissonParticipation(self.rate)

    plan = Plan(sampling=Halves(0.1), noise_multiplier=2.0, **RUN)
    assert plan.epsilon(1e-5) == Plan(sampling=recipe("Bernoulli")(0.5), noise_multiplier=2.0, **RUN).epsilon(1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [None, recipe("Decaying")()], ids=["independent", "custom"])
def test_the_engine_runs_a_plan_of_custom_parts(noise):
    sampling = recipe("Bernoulli")(0.25) if noise is None else BallsInBinsSampling(cycle_length=4)
    plan = Plan(
        iterations=8, sampling=sampling, noise=noise, clipping=recipe("Soft")(1.0), num_examples=48, normalize_by=12
    ).calibrate(epsilon=2.0, delta=1e-3)
    model = nn.Linear(5, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(randn(48, 5), (randn(48) > 0).long()), batch_size=12)
    engine = PrivacyEngine()
    train(*engine.make_private(model, optimizer, loader, plan=plan, target_delta=1e-3), 8)
    assert 1.99 < engine.epsilon <= 2.0
    assert "clipping Soft" in " ".join(str(engine.report()).split())


CONFIG = NonPrivateConfig(iterations=6, batch_size=5, normalize_by=5.0)


def test_a_non_private_plan_runs_as_any_plan_and_has_infinite_epsilon():
    plan = CONFIG.make()
    data = torch.randn(20, 3)
    gradient = plan.clipped_grad(lambda w, row: ((row * w).sum() - 3) ** 2)
    state = plan.noise_addition_transform.init(torch.zeros(3))
    for indices in plan.batch_selection_strategy.batch_iterator(20, np.random.default_rng(0)):
        assert len(indices) == 5
        weights = torch.randn(3, requires_grad=True)
        noisy, state = plan.noise_addition_transform.update(gradient(weights, data[indices]), state)
        ((data[indices] @ weights - 3) ** 2).mean().backward()
        torch.testing.assert_close(noisy, weights.grad)
    assert plan.stddev == 0 and plan.epsilon(1e-5) == math.inf and plan.epsilon(1e-5, 0) == 0
    assert "NonPrivate" in type(plan.dp_event).__name__


def test_a_non_private_plan_survives_json_and_describes_itself():
    assert NonPrivateConfig.from_json(CONFIG.to_json()) == CONFIG
    assert CONFIG.describe()["sensitivity"] == math.inf


def test_a_non_private_plan_cannot_be_calibrated():
    with pytest.raises(InvalidBudgetError, match=r"cannot meet epsilon=1.*Use DPSGDConfig"):
        CONFIG.calibrate(epsilon=1.0, delta=1e-5)
    assert CONFIG.calibrate(epsilon=math.inf, delta=1e-5) == CONFIG
    with pytest.raises(ValueError, match="noise_multiplier"):
        dataclasses.replace(CONFIG, noise_multiplier=1.0)


@pytest.mark.parametrize("fields", [{"batch_size": 0}, {"iterations": 0}, {"normalize_by": 0.0}])
def test_bad_fields_are_rejected(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        dataclasses.replace(CONFIG, **fields)


def test_the_engine_rejects_a_non_private_plan():
    model = nn.Linear(3, 1)
    optimizer, loader = optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(randn(20, 3)), batch_size=5)
    with pytest.raises(InvalidBudgetError):
        PrivacyEngine().make_private(model, optimizer, loader, plan=CONFIG, target_delta=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("ask", [lambda c: c.epsilon(1e-5), lambda c: c.calibrate(epsilon=5.0, delta=1e-5, tol=0.1)])
def test_a_small_truncation_size_warns_with_a_sufficient_one(ask):
    settings = {"iterations": 20, "sampling_prob": 0.1, "num_examples": 1000, "noise_multiplier": 1.0}
    forget_notices()
    with pytest.warns(PrivacyWarning, match=r"truncated_batch_size=120 truncates.*from (\d+) on") as seen:
        ask(DPSGDConfig(truncated_batch_size=120, **settings))
    enough = int(str(seen[0].message).split("from ")[1].split()[0])
    forget_notices()
    ask(DPSGDConfig(truncated_batch_size=enough, **settings))  # a warning would be an error
    with pytest.warns(PrivacyWarning):
        ask(DPSGDConfig(truncated_batch_size=enough - 1, **settings))


@pytest.mark.parametrize("name", CONFIGS)
def test_noise_has_the_covariance_of_the_plan(name):
    config = CONFIGS[name]
    plan = config.make(PerformanceFlags(noise_seed=1))
    sums = {"a": torch.zeros(DRAWS // 2, 1), "b": [torch.zeros(DRAWS // 2)]}
    state, rows = plan.noise_addition_transform.init(sums), []
    for _ in range(STEPS):
        noisy, state = plan.noise_addition_transform.update(sums, state)
        rows.append(torch.cat([noisy["a"].flatten(), noisy["b"][0]]).double().numpy())
    found = covariance(np.stack(rows))
    expected = expected_covariance(config, 1.0)  # contributions are rescaled to norm 1
    assert agrees(found, expected, DRAWS).all()
    assert not agrees(found, 1.1 * expected, DRAWS).all()
    if name == "column-normalised":
        assert not agrees(found, expected_covariance(CONFIGS["banded"], 1.0), DRAWS).all()


def test_noise_of_any_matrix_has_its_covariance():
    strategy = np.tril(np.random.default_rng(3).uniform(0.2, 1.0, (STEPS, STEPS))) + np.eye(STEPS)
    transform = NoiseTransform(1.5, dense(strategy), noise_seed=1)
    state, rows = transform.init(torch.zeros(DRAWS)), []
    for _ in range(STEPS):
        noisy, state = transform.update(torch.zeros(DRAWS), state)
        rows.append(noisy.double().numpy())
    noising = np.linalg.inv(strategy)
    expected = 1.5**2 * noising @ noising.T
    assert agrees(covariance(np.stack(rows)), expected, DRAWS).all()
    assert not agrees(covariance(np.stack(rows)), np.diag(np.diag(expected)), DRAWS).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_noise_ends_with_the_run(name):
    transform = CONFIGS[name].make().noise_addition_transform
    state = transform.init(torch.zeros(3))
    for _ in range(STEPS):
        _, state = transform.update(torch.zeros(3), state)
    with pytest.raises(PrivacyError, match=f"planned for {STEPS} steps"):
        transform.update(torch.zeros(3), state)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("stop", [0, 1, 5])
@pytest.mark.hazard("P3")
def test_resumed_noise_is_the_same_bit_by_bit(name, stop):
    transform = CONFIGS[name].make().noise_addition_transform
    sums = [torch.randn(7), torch.randn(2, 3, dtype=torch.float64)]
    state, kept, whole = transform.init(sums), None, []
    for step in range(STEPS):
        if step == stop:
            kept = state.state_dict()
        noisy, state = transform.update(sums, state)
        whole.append(noisy)
    resumed = transform.init(sums).resumed(kept, transform.recurrence)
    for step in range(stop, STEPS):
        noisy, resumed = transform.update(sums, resumed)
        assert all(torch.equal(a, b) for a, b in zip(noisy, whole[step], strict=True))


def test_two_runs_have_different_noise():
    transform = CONFIGS["banded"].make().noise_addition_transform
    one, other = (transform.update(torch.zeros(5), transform.init(torch.zeros(5)))[0] for _ in range(2))
    assert not torch.equal(one, other)
    seeded = CONFIGS["banded"].make(PerformanceFlags(noise_seed=4)).noise_addition_transform
    one, other = (seeded.update(torch.zeros(5), seeded.init(torch.zeros(5)))[0] for _ in range(2))
    assert torch.equal(one, other)


def test_a_state_is_used_once():
    transform = CONFIGS["independent"].make().noise_addition_transform
    state = transform.init(torch.zeros(5))
    transform.update(torch.zeros(5), state)
    with pytest.raises(PrivacyError, match="cancels in their difference"):
        transform.update(torch.zeros(5), state)


def test_sums_keep_their_dtype_and_structure():
    transform = NoiseTransform(0.5, banded_toeplitz((1.0, 0.5)))
    sums = {"x": torch.zeros(3, dtype=torch.bfloat16), "y": (torch.zeros(2, 2, dtype=torch.float64), torch.zeros(0))}
    noisy, _ = transform.update(sums, transform.init(sums))
    assert noisy["x"].dtype is torch.bfloat16
    assert noisy["y"][0].dtype is torch.float64
    assert noisy["y"][1].shape == (0,)
    assert noisy["x"].float().abs().min() > 0
    assert not sums["y"][0].any()


def test_other_shapes_are_rejected():
    transform = CONFIGS["independent"].make().noise_addition_transform
    with pytest.raises(ValueError, match="shapes, dtypes or devices of the sums differ"):
        transform.update(torch.zeros(4), transform.init(torch.zeros(5)))


@pytest.mark.parametrize("stddev", [-1.0, math.nan, math.inf])
def test_standard_deviations_are_finite(stddev):
    with pytest.raises(ValueError, match="stddev"):
        NoiseTransform(stddev)


@pytest.mark.slow
def test_a_training_loop_with_a_plan_converges():
    """Trains least squares with the batches, clipped sums and noise of a plan."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=generator)
    y = x @ torch.tensor([1.0, -2.0, 0.5])
    config = BandMFConfig.default(
        num_bands=4, iterations=200, sampling_prob=0.8, num_examples=400, normalize_by=80.0, noise_multiplier=0.5
    )
    plan = config.make(PerformanceFlags(noise_seed=0))
    gradient = plan.clipped_grad(lambda w, x, y: ((x @ w - y) ** 2).mean(), batch_argnums=(1, 2))
    w = torch.zeros(3)
    state, sizes = plan.noise_addition_transform.init(w), []
    for indices in plan.batch_selection_strategy.batch_iterator(400, np.random.default_rng(0)):
        sizes.append(len(indices))
        clipped = gradient(w, x[indices], y[indices])
        noisy, state = plan.noise_addition_transform.update(clipped, state)
        w = w - 0.1 * noisy
    assert plan.neighboring_relation is Relation.ZERO_OUT
    assert np.mean(sizes) == pytest.approx(80, abs=2)
    assert (w - torch.tensor([1.0, -2.0, 0.5])).norm() < 0.2
