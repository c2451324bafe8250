"""Sensitivity of the clipped sum to one sample."""

import inside
import pytest
import torch
import torch.nn.functional as F
from case_models import model_of
from faults.neighbours import (
    CLASSES,
    FEATURES,
    MODES,
    ROUNDING,
    influence,
    mlp,
    plain_step,
    private,
    release_of,
    tensors,
    truth_of,
    unprobed,
    without,
)
from torch import nn

from dpengine import Adaptive, Automatic, Flat, Groups, PerLayer
from dpengine.errors import BatchMismatchError

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")
every_mode = pytest.mark.parametrize("mode", MODES)


@model_of(lambda: {"lstm": nn.LSTM(FEATURES, 4, 2, batch_first=True), "head": nn.Linear(4, CLASSES)})
def recurrent_model(m, inputs):
    return m.head(m.lstm(inputs)[0][:, -1])


@model_of(
    lambda: {
        "layer": nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.0, batch_first=True),
        "head": nn.Linear(FEATURES, CLASSES),
    }
)
def attentive_model(m, inputs):
    return m.head(m.layer(inputs).mean(dim=1))


class Tied(nn.Module):
    """Embedding of the signs of the inputs, tied to the output layer."""

    def __init__(self):
        super().__init__()
        self.entries, self.mix, self.out = nn.Embedding(CLASSES, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES, bias=False)
        self.out.weight = self.entries.weight

    def forward(self, inputs):
        return self.out(torch.tanh(self.mix(self.entries((inputs > 0).long()).mean(dim=1))))


def images():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, stride=2),
        nn.Flatten(), nn.Linear(16, CLASSES),
    )  # fmt: skip


ZOO = {
    "mlp": (mlp, ()),
    "images": (images, (2, 5, 5)),
    "recurrent": (recurrent_model, (3, FEATURES)),
    "attentive": (attentive_model, (3, FEATURES)),
    "tied": (Tied, ()),
}
every_model = pytest.mark.parametrize("name", ZOO)


def make(name, dtype=torch.float32):
    torch.manual_seed(0)
    model, shape = ZOO[name][0]().to(dtype), ZOO[name][1]
    inputs, targets = tensors(*shape)
    return model, (inputs.to(dtype), targets)


@pytest.mark.one_in(10, "mode", "name", others="slow")
@pytest.mark.one_in(5, "mode", "name")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float64, 1e-12)])
@every_model
@every_mode
@pytest.mark.hazard("C1", "C3")
def test_a_step_equals_a_loop_over_samples(mode, name, dtype, tolerance):
    model, data = make(name, dtype)
    truth = truth_of(model, data)
    assert float((release_of(model, data, mode=mode) - truth).norm() / truth.norm()) < tolerance


@pytest.mark.one_in(2, "mode", others="slow")
@pytest.mark.parametrize("max_norm", [0.01, 1.0, 7.0])
@every_mode
@pytest.mark.hazard("C2")
def test_max_grad_norm_clips_and_scales_the_noise(mode, max_norm):
    def step(model, optimizer, inputs, targets):
        optimizer.zero_grad()
        (100 * F.cross_entropy(model(inputs), targets)).backward()
        optimizer.step()

    data = [t[3:4] for t in tensors()]
    found = release_of(mlp(), data, step, mode=mode, max_grad_norm=max_norm)
    assert float(found.norm()) == pytest.approx(max_norm, rel=1e-5)
    engine, *_ = private(mlp(), data, mode=mode, max_grad_norm=max_norm, noise_multiplier=1.5)
    assert inside.state(engine).noise_std == 1.5 * max_norm
    assert engine.describe()["sensitivity"] == max_norm


POLICIES = {
    "flat": lambda: Flat(0.5),
    "per-layer": lambda: PerLayer(0.5),
    "per-layer-list": lambda: PerLayer([0.3, 0.4]),
    "automatic": lambda: Automatic(0.5),
    "adaptive": lambda: Adaptive(0.5),
    "groups": lambda: Groups({"0": 0.3, "": 0.4}),
}


@pytest.mark.one_in(6, "mode", "name", others="slow")
@pytest.mark.one_in(3, "mode", "name")
@pytest.mark.parametrize("name", POLICIES)
@every_mode
@pytest.mark.hazard("C4")
def test_no_sample_adds_more_than_the_sensitivity_of_its_policy(mode, name):
    options = {"mode": mode, "max_grad_norm": None}
    data = tensors()
    whole = release_of(mlp(), data, clipping=POLICIES[name](), **options)
    with unprobed():
        changes = [whole - release_of(mlp(), without(data, i), clipping=POLICIES[name](), **options) for i in range(6)]
    assert 0.2 < max(float(one.norm()) for one in changes) <= 0.5 * (1 + ROUNDING)
    engine, *_ = private(mlp(), data, clipping=POLICIES[name](), noise_multiplier=2.0, **options)
    joint = (2.0**-2 - 20.0**-2) ** -0.5 if name == "adaptive" else 2.0
    assert inside.state(engine).noise_std == pytest.approx(joint * 0.5)


@pytest.mark.hazard("C8")
def test_two_runs_with_one_policy_object_have_separate_clipping_norms():
    policy = Adaptive(0.5, learning_rate=1.0)
    options = {"clipping": policy, "max_grad_norm": None, "noise_multiplier": 1.0}
    one, two = (private(mlp(), tensors(), **options) for _ in range(2))
    inputs, targets = next(iter(one[3]))
    F.cross_entropy(one[1](inputs), targets).backward()  # clipped to 0.5
    plain_step(*two[1:3], *next(iter(two[3])))
    assert inside.state(one[0]).clipping_norm == 0.5  # what the noise will be scaled for


@pytest.mark.one_in(2, "mode", others="slow")
@pytest.mark.parametrize("chunks", [{}, {"physical_batch_size": 2}, {"accumulation_steps": 4}], ids=str)
@every_mode
@pytest.mark.hazard("C5")
def test_samples_are_clipped_one_by_one_in_physical_batches(mode, chunks):
    def step(model, optimizer, inputs, targets):
        if not optimizer.step_was_skipped:
            optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    model = mlp()
    truth = truth_of(model, tensors())
    found = release_of(model, tensors(), step, mode=mode, **chunks)
    assert float((found - truth).norm() / truth.norm()) < 1e-5


@pytest.mark.one_in(2, "mode", others="slow")
@every_mode
@pytest.mark.hazard("C7")
def test_copies_of_a_sample_are_rejected_and_their_mean_is_clipped_as_one(mode):
    def with_copies(model, optimizer, inputs, targets):
        plain_step(model, optimizer, torch.cat([inputs, inputs.flip(1)]), torch.cat([targets, targets]))

    with pytest.raises(BatchMismatchError, match=r"DPE018.*duplicated or merged"):
        release_of(mlp(), tensors(), with_copies, mode=mode)

    def with_their_mean(model, optimizer, inputs, targets):
        optimizer.zero_grad()
        both = torch.stack([inputs, inputs.flip(1)], dim=1)  # (B, 2, features): the copies are positions of one row
        F.cross_entropy(model(both).mean(dim=1), targets).backward()
        optimizer.step()

    assert influence(mlp(), tensors(), with_their_mean, mode=mode) <= 1 + ROUNDING


@pytest.mark.hazard("C8")
def test_one_sample_moves_sum_and_count_by_at_most_the_charged_sensitivity():
    sigma, sigma_b, norm = 2.0, 1.5, 0.5

    def joint(data):
        policy = Adaptive(norm, count_noise_multiplier=sigma_b)
        engine, model, _, loader = private(
            mlp(), data, clipping=policy, max_grad_norm=None, noise_multiplier=0.0, example_input=tuple(data[0][:1])
        )
        inputs, targets = next(iter(loader))
        F.cross_entropy(model(inputs), targets).backward()
        sums = torch.cat([total.flatten().double() for total in inside.clipped_sums(engine).values()])
        sigma_g = policy.gradient_noise_multiplier(sigma)
        return torch.cat([sums / (norm * sigma_g), torch.tensor([inside.unclipped_count(engine) / sigma_b])])

    whole = joint(tensors())
    moved = [float((whole - joint(without(tensors(), row))).norm()) for row in range(6)]
    assert 0.9 / sigma < max(moved) <= (1 + ROUNDING) / sigma


@pytest.mark.one_in(4, "mode", "dtype", others="slow")
@pytest.mark.one_in(2, "mode", "dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@every_mode
@pytest.mark.hazard("C9")
def test_no_clipped_gradient_exceeds_the_clipping_norm(mode, dtype):
    model = mlp().to(dtype)
    engine, model, *_ = private(model, tensors(), mode=mode, max_grad_norm=0.7)
    passes = inside.passes_of_run(engine)
    longest = 0.0
    for seed in range(40):
        torch.manual_seed(seed)
        inputs = (torch.randn(1, FEATURES) * 10 ** float(torch.rand(1) * 8 - 2)).to(dtype)
        F.cross_entropy(model(inputs).float(), torch.tensor([seed % CLASSES])).backward()
        passes.clip()
        longest = max(longest, float(torch.cat([t.flatten().double() for t in passes.totals().values()]).norm()))
        passes.discard()
    assert 0.69 < longest <= 0.7


@pytest.mark.one_in(4, "max_norm", "dtype", others="slow")
@pytest.mark.one_in(2, "max_norm", "dtype")
@pytest.mark.parametrize("max_norm", [0.1, 0.7, 1.0, 3e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.hazard("C9")
def test_none_of_a_million_factors_is_too_large_in_any_precision(dtype, max_norm):
    generator = torch.Generator().manual_seed(0)
    exponents = torch.rand(1_000_000, generator=generator, dtype=torch.float64) * 24 - 8
    norms_B = torch.cat([10**exponents, max_norm * (1 + torch.linspace(-1e-5, 1e-5, 1000).double())]).to(dtype)
    for policy in (Flat(max_norm), Automatic(max_norm), Adaptive(max_norm)):
        factors_B = policy.factors(norms_B.unsqueeze(1)).squeeze(1).to(dtype)
        assert (factors_B.double() * norms_B.double() <= max_norm).all()
        assert float((factors_B.double() * norms_B.double()).max()) > 0.99 * max_norm
