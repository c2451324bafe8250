"""Plans of any sampling scheme, noise and clipping policy."""

import pytest
from recipes import recipe, train
from torch import nn, optim, randn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.accounting import PoissonParticipation
from dpengine.clipping import PerLayer
from dpengine.errors import AccountingRefusedError, InvalidBudgetError
from dpengine.noise import BLT, BandedInverse, BandMF
from dpengine.plan import BandedInverseConfig, BandMFConfig, BLTConfig, DPSGDConfig, Plan
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
def test_a_plan_costs_what_the_config_of_the_same_parts_costs(plan, config):
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
def test_json_holds_every_scheme_and_noise(sampling):
    for noise in (None, BandMF(num_bands=2, momentum=0.5), BLT(num_buffers=1), BandedInverse(num_bands=2)):
        plan = Plan(sampling=sampling, noise=noise, noise_multiplier=1.5, **RUN)
        assert Plan.from_json(plan.to_json()) == plan


def test_json_does_not_hold_parts_from_outside():
    plan = Plan(sampling=recipe("Bernoulli")(0.25), **RUN)
    assert plan.describe()["batches"] == "own: Bernoulli"
    with pytest.raises(ValueError, match="sampling is a Bernoulli, which cannot be stored as JSON"):
        plan.to_json()


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        (
            {"sampling": FixedBatchSampling(batch_size=5), "num_examples": None},
            AccountingRefusedError,
            "pass num_examples=",
        ),
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
def test_parts_without_an_analysis_are_refused(fields, error, says):
    with pytest.raises(error, match=says):
        Plan(**(RUN | fields)).calibrate(epsilon=1.0, delta=1e-5)


def test_a_loop_without_the_engine_cannot_use_a_policy():
    plan = Plan(sampling=POISSON, clipping=PerLayer([0.5, 0.5]), noise_multiplier=1.0, **RUN)
    with pytest.raises(ValueError, match="clips to l2_clip_norm"):
        plan.make()


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        (
            CyclicPoissonSampling(sampling_prob=0.5, cycle_length=2),
            "sampling_prob=0.4.*, or the loader with batch_size=15",
        ),
        (FixedBatchSampling(batch_size=15), "Create the loader with batch_size=15"),
        (BMinSepSampling(sampling_prob=0.5, min_separation=2), "Create the loader with batch_size=20"),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_a_loader_of_another_batch_size_is_refused_with_that_of_the_plan(sampling, says):
    plan = Plan(iterations=8, sampling=sampling, num_examples=60, normalize_by=12, noise_multiplier=1.0)
    model = nn.Linear(5, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(randn(60, 5), (randn(60) > 0).long())
    with pytest.raises(InvalidBudgetError, match=says):
        PrivacyEngine().make_private(model, optimizer, DataLoader(data, batch_size=12), plan=plan, target_delta=1e-3)
    size = int(says.rsplit("=", 1)[1])
    PrivacyEngine().make_private(model, optimizer, DataLoader(data, batch_size=size), plan=plan, target_delta=1e-3)


def test_the_cost_is_that_of_the_participation_which_draws_state():
    class Halves(recipe("Bernoulli")):
        """Half of the examples in each batch, and a scheme that states less for an unknown number of examples."""

        def over(self, num_examples):
            return Halves(0.5, num_examples)

        def participation(self):
            return PoissonParticipation(self.rate)

    plan = Plan(sampling=Halves(0.1), noise_multiplier=2.0, **RUN)
    assert plan.epsilon(1e-5) == Plan(sampling=recipe("Bernoulli")(0.5), noise_multiplier=2.0, **RUN).epsilon(1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("noise", [None, recipe("Decaying")()], ids=["independent", "own"])
def test_the_engine_runs_a_plan_of_parts_from_outside(noise):
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
