"""Defects of Opacus: accountants, secure noise, precision, adaptive clipping, custom clipping policies."""

import copy
import math
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import inside
import pytest
import torch
import torch.nn.functional as F
from opacus_defects.apis import (
    BOUND,
    COMPAT_APIS,
    DEFAULT_APIS,
    LAYER_APIS,
    assert_equal,
    fixed_loader,
    largest_contribution,
    opacus,
    true_sum,
    with_apis,
    with_few_apis,
)
from opacus_defects.small import CLASSES, CRITERION, FEATURES, ROWS, mlp
from opacus_defects.small import normal_batch as batch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.accounting import Relation, calibrate, epsilon, epsilon_bounds
from dpengine.clipping import AbstractClip
from dpengine.clipping.policy import SLACK
from dpengine.errors import AccountingRefusedError, InvalidBudgetError, ScaledGradientError

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012:dpengine.PrivacyWarning")


RUNS = [  # noise multiplier, rate, steps, delta: small data, little noise, long runs, epsilon far above 100
    (1.0, 0.1, 20, 0.05),
    (0.6, 1.0, 5, 0.05),
    (0.4, 0.5, 100, 1e-3),
    (0.05, 0.01, 10, 1e-5),
    (20.0, 1e-4, 10**5, 1e-9),
    (0.3, 0.9, 200, 1e-5),
]


@pytest.mark.slow
@pytest.mark.one_in(2, "run")
@pytest.mark.parametrize("run", RUNS, ids=str)
@pytest.mark.hazard("O43")
def test_prv_gives_an_upper_bound_or_names_another_accountant(run):
    sigma, rate, steps, delta = run
    settings = {"noise_multiplier": sigma, "sample_rate": rate, "steps": steps, "delta": delta}
    lower = epsilon_bounds(**settings)[0]
    try:
        found = epsilon(**settings, accountant="prv")
    except AccountingRefusedError as refusal:
        assert "pld" in str(refusal) or "rdp" in str(refusal)
        found = epsilon(**settings)
    assert math.isfinite(found) and found >= lower - 1e-9


def noise_of(api_options, *, compat):
    """Returns ``p.grad`` after a step with noise and no gradient, in units of its standard deviation."""
    model = nn.Linear(100, 200, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(4, 100)
    if compat:
        engine = opacus().PrivacyEngine(**api_options)
        private, optimizer, loader = engine.make_private(
            module=model, optimizer=optimizer, data_loader=fixed_loader(4), noise_multiplier=2.0, max_grad_norm=1.0,
            poisson_sampling=False,
        )  # fmt: skip
    else:
        private, optimizer, loader = PrivacyEngine(**api_options).make_private(
            model, optimizer, fixed_loader(4), noise_multiplier=2.0, max_grad_norm=1.0
        )
    for _ in loader:
        optimizer.zero_grad()
        (0 * private(x)).sum(dim=1).mean().backward()
        optimizer.step()
    return model.weight.grad.flatten() * 4 / 2.0


@pytest.mark.parametrize("compat", [False, True], ids=["default", "compat"])
@pytest.mark.hazard("O44")
def test_secure_noise_is_one_flag_and_cannot_be_seeded(compat, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchcsprng", None)  # importing it would raise
    flag = {"secure_mode": True} if compat else {"secure_rng": True}
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(noise_of(flag, compat=compat))
    assert not torch.equal(*found)
    for noise in found:
        assert stats.kstest(noise.double().numpy(), "norm").pvalue > 1e-6
    assert abs(stats.pearsonr(*[noise.numpy() for noise in found]).statistic) < 6 / math.sqrt(len(found[0]))


@pytest.mark.gpu
@pytest.mark.hazard("O44")
def test_secure_noise_for_an_accelerator():
    model = nn.Linear(100, 200, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = PrivacyEngine(secure_rng=True)
    _, optimizer, loader = engine.make_private(model, optimizer, fixed_loader(4), noise_multiplier=2.0)
    for _ in loader:
        optimizer.zero_grad()
        (0 * model(torch.ones(4, 100, device="cuda"))).sum(dim=1).mean().backward()
        optimizer.step()
    assert stats.kstest((model.weight.grad.flatten() * 2).double().cpu().numpy(), "norm").pvalue > 1e-6


class Autocast(nn.Module):
    """Runs a model under bfloat16 autocast."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x).float()


@pytest.mark.slow
@with_few_apis(LAYER_APIS)
@pytest.mark.hazard("O45")
def test_under_autocast_no_sample_exceeds_the_clipping_norm(api):
    model, rows, criterion = Autocast(mlp()), batch(scale=3.0), nn.CrossEntropyLoss(reduction="sum")

    def sum_of(*rows):  # sums losses: in a mean, removing a sample changes the rounding of the others
        found = api.clipped_sum(model, criterion, rows, 0.1, loss_reduction="sum")
        return found if api.compat else {name: value / len(rows[1]) for name, value in found.items()}

    assert largest_contribution(sum_of, rows) <= 0.1 * BOUND
    truth = true_sum(model.inner, CRITERION, rows, 0.1)
    assert_equal(sum_of(*rows), {f"inner.{name}": value for name, value in truth.items()}, rtol=0.1)  # 8 bits


@with_few_apis(LAYER_APIS)
@pytest.mark.hazard("O45")
def test_a_model_in_bfloat16_is_clipped_by_norms_in_float32(api):
    x, y = batch(64)
    torch.manual_seed(1)
    wide = nn.Sequential(nn.Linear(FEATURES, 300), nn.Tanh(), nn.Linear(300, CLASSES)).to(torch.bfloat16)
    rows = (x.bfloat16(), y)
    assert_equal(api.clipped_sum(wide, CRITERION, rows, 0.01), true_sum(wide, CRITERION, rows, 0.01), rtol=0.03)
    # The same sample twice, clipped: norms in bfloat16 would be off by up to 2 ** -8, the sum is rounded once.
    twice = api.clipped_sum(wide, CRITERION, (rows[0][[0, 0]], y[[0, 0]]), 0.01)
    length = torch.cat([value.flatten() for value in twice.values()]).norm()
    assert float(length) == pytest.approx(0.02, rel=1e-3)


@with_few_apis(LAYER_APIS)
@pytest.mark.hazard("O45")
def test_a_scaler_that_is_unknown_is_rejected_with_the_remedy(api):
    private, (x, y) = api.open(mlp(), fixed_loader(ROWS), criterion=CRITERION), batch()
    scaler = torch.amp.GradScaler("cpu")
    for _ in private.loader:
        private.optimizer.zero_grad()
        scaler.scale(CRITERION(private.model(x), y)).backward()
        with pytest.raises(ScaledGradientError, match="grad_scaler=scaler"):
            scaler.step(private.optimizer)


@pytest.mark.parametrize("multiplier", [0.01, 1, 3.7])
@with_few_apis(DEFAULT_APIS)
@pytest.mark.hazard("O50")
def test_adaptive_clipping_has_defaults_and_accepts_empty_batches(api, multiplier):
    model, sizes = mlp(), []
    x, y = batch(8)
    private = api.open(
        model, fixed_loader(8, batch_size=1), criterion=CRITERION, clipping="adaptive", noise_multiplier=multiplier
    )
    for (rows,) in private.loader:
        sizes.append(inside.samples_now(private.engine))
        private.step(x[rows], y[rows])
    assert 0 in sizes and max(sizes) > 0
    assert private.engine.ledger.steps == len(sizes)
    norm = private.engine.describe()["clipping"]["norm"]
    assert 0 < norm < math.inf and norm != 1.0
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.hazard("O50")
def test_a_multiplier_beyond_the_count_is_rejected_and_the_remedy_works():
    with pytest.raises(InvalidBudgetError, match=r"Try count_noise_multiplier=125") as seen:
        DEFAULT_APIS[0].open(mlp(), fixed_loader(ROWS), clipping="adaptive", noise_multiplier=25.0)
    assert "count_noise_multiplier above 12.5" in str(seen.value)


@pytest.mark.parametrize("multiplier", [0.5, 1])
@with_few_apis([api for api in COMPAT_APIS if api.mode != "ghost" and not api.writes])
@pytest.mark.hazard("O50")
def test_adaptive_clipping_of_compat_has_defaults_and_accepts_empty_batches(api, multiplier):
    model, sizes = mlp(), []
    x, y = batch(8)
    settings = {"target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "unclipped_num_std": 5.0}
    settings |= {"max_clipbound": 1e8, "min_clipbound": 1e-3, "noise_multiplier": multiplier, "clipping": "adaptive"}
    loader = fixed_loader(8, batch_size=1)
    private = api.open(model, loader, criterion=CRITERION, poisson=api.mode != "ew", **settings)
    while 0 not in sizes and len(sizes) < 400:
        for (rows,) in private.loader:
            sizes.append(len(rows))
            private.step(x[rows], y[rows])
        if api.mode == "ew":
            break
    assert 0 < private.optimizer.max_grad_norm < 1e8 and private.optimizer.max_grad_norm != 1.0
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.hazard("O64")
def test_describe_states_noise_divisor_and_epsilon_in_one_screen():
    model = mlp()
    engine = PrivacyEngine(seed=0)
    data = DataLoader(TensorDataset(*batch(40)), batch_size=8)
    settings = {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 2, "max_grad_norm": 0.5}
    _, optimizer, loader = engine.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data, **settings)
    for x, y in loader:
        optimizer.zero_grad()
        CRITERION(model(x), y).backward()
        optimizer.step()
    description = engine.describe()
    assert description["sample_rate"] == 0.2 and description["expected_batch_size"] == 8
    assert description["planned_steps"] == 10 and description["steps"] == 5
    assert description["relation"] == Relation.ZERO_OUT.value
    sigma = calibrate(target_epsilon=3.0, target_delta=1e-3, sample_rate=0.2, steps=10)
    assert description["noise_multiplier"] == pytest.approx(sigma, rel=1e-3)
    assert description["noise_std_of_sum"] == pytest.approx(0.5 * sigma, rel=1e-3)
    assert description["noise_std_of_mean"] == description["noise_std_of_sum"] / 8
    shown = "\n".join(f"{name}: {value}" for name, value in description.items())
    assert sum(len(textwrap.wrap(line, 80)) for line in shown.splitlines()) <= 24


class HalfClip(AbstractClip):
    """User-defined policy with the factor bound / (norm + bound), so that all norms are below ``bound``."""

    def __init__(self, bound: float):
        self.bound = bound

    @property
    def bounds(self) -> tuple[float, ...]:
        return (self.bound,)

    def group_of(self, names: Sequence[str]) -> list[int]:
        return [0] * len(names)

    def factors(self, norms_BK: Tensor) -> Tensor:
        return self.bound * (1 - SLACK) / (norms_BK + self.bound)

    def describe(self) -> dict[str, Any]:
        return {"policy": "half", "bound": self.bound}


@with_few_apis(DEFAULT_APIS)
@pytest.mark.hazard("O65")
def test_a_clipping_policy_of_a_user_sets_factors_and_noise(api):
    model, rows, bound = mlp(), batch(), 0.3
    options = {"clipping": HalfClip(bound), "max_grad_norm": None}
    private = api.open(copy.deepcopy(model), fixed_loader(ROWS), criterion=CRITERION, **options)
    found = private.run(*rows)
    truth = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for i in range(ROWS):
        one = copy.deepcopy(model).double()
        F.cross_entropy(one(rows[0][i : i + 1].double()), rows[1][i : i + 1]).backward()
        norm = torch.cat([p.grad.flatten() for p in one.parameters()]).norm()
        for name, p in one.named_parameters():
            truth[name] += p.grad * bound * (1 - SLACK) / (norm + bound)
    assert_equal(found, truth)
    noisy = api.open(mlp(), fixed_loader(ROWS), noise_multiplier=2.0, **options).engine.describe()
    assert noisy["sensitivity"] == bound and noisy["noise_std_of_sum"] == 2.0 * bound
    assert noisy["clipping"] == {"policy": "half", "bound": bound}


@with_apis(DEFAULT_APIS[:1])
@pytest.mark.hazard("O65")
def test_a_clipping_policy_without_bounds_raises(api):
    class ClipWithoutBounds(AbstractClip):
        def group_of(self, names):
            return [0] * len(names)

        def factors(self, norms_BK):
            return torch.ones_like(norms_BK)

        def describe(self):
            return {}

    with pytest.raises(TypeError, match="bounds"):
        api.open(mlp(), fixed_loader(ROWS), clipping=ClipWithoutBounds(), max_grad_norm=None)
