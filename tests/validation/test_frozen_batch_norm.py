"""Frozen batch norm: accepted in eval mode, where it normalizes each sample by constants."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpengine
from dpengine.capture.model_state import preserve_modes
from dpengine.compat.opacus import PrivacyEngine as CompatEngine
from dpengine.errors import PrivacyError, UnsupportedLayerError
from dpengine.validation import check_loss

ROWS, BATCH, CHANNELS, CLASSES, NORM = 48, 12, 4, 3, 0.05
pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012", "ignore:Full backward hook")


def pretrained(*, frozen: bool = True) -> nn.Sequential:
    """Returns a model with running statistics, in train mode except for its batch norm."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, CHANNELS, 3), nn.BatchNorm2d(CHANNELS), nn.ReLU(), nn.Flatten(), nn.Linear(CHANNELS * 4, CLASSES)
    )
    with torch.no_grad():
        for _ in range(3):
            model(3 * torch.randn(16, 2, 4, 4) + 1)
    model[1].requires_grad_(not frozen).eval()
    return model


def rows() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(ROWS, 2, 4, 4), torch.randint(0, CLASSES, (ROWS,)))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def through_default(model, mode):
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    engine = dpengine.PrivacyEngine(seed=0)
    return engine.make_private(
        model, optimizer, DataLoader(rows(), BATCH), noise_multiplier=0.0, max_grad_norm=NORM, grad_sample_mode=mode
    )


def through_compat(model, mode):
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    parts = CompatEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(rows(), BATCH),
        noise_multiplier=0.0,
        max_grad_norm=NORM,
        grad_sample_mode=mode,
        noise_generator=torch.Generator().manual_seed(0),
    )
    return parts[0], parts[1], parts[-1]


APIS = [(through_default, mode) for mode in ("auto", "hooks", "functorch", "ew", "ghost")] + [
    (through_compat, mode) for mode in ("hooks", "functorch", "ew", "ghost")
]
apis = pytest.mark.parametrize(("api", "mode"), APIS, ids=[f"{d.__name__[8:]}-{m}" for d, m in APIS])
both = pytest.mark.parametrize("api", [through_default, through_compat])


def clipped_sum(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    """Returns the clipped sum, computed one sample at a time."""
    total = [torch.zeros_like(p) for p in trained(model)]
    for i in range(len(inputs)):
        grads = torch.autograd.grad(F.cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1]), trained(model))
        factor = (NORM / torch.stack([g.norm() for g in grads]).norm()).clamp(max=1)
        total = [t + factor * g for t, g in zip(total, grads, strict=True)]
    return total


def assert_clipped_sum(api, mode, *, frozen):
    model, optimizer, loader = api(pretrained(frozen=frozen), mode)
    inputs, targets = next(iter(loader))
    assert len(inputs) > 2
    expected = clipped_sum(pretrained(frozen=frozen), inputs, targets)
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    torch.testing.assert_close([p.grad * BATCH for p in trained(model)], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.one_in(4, "mode", others="slow")
@pytest.mark.one_in(2, "mode")
@apis
def test_a_batch_norm_that_was_frozen_in_eval_mode_trains_the_rest(api, mode):
    assert_clipped_sum(api, mode, frozen=True)


@pytest.mark.parametrize("mode", ["auto", "hooks", "ghost"])
def test_a_batch_norm_in_eval_mode_may_train_its_scale_and_shift(mode):
    assert_clipped_sum(through_default, mode, frozen=False)


def into_train_mode(model):
    model.train()


def without_momentum(model):  # no buffer is updated, so the check of buffers cannot detect it
    model[1].momentum = 0.0
    model.train()


def without_statistics(model):
    model[1].running_mean = model[1].running_var = None


@pytest.mark.one_in(3, "change", "api")
@pytest.mark.parametrize("change", [into_train_mode, without_momentum, without_statistics])
@apis
def test_a_batch_norm_that_would_use_the_batch_is_rejected_in_the_forward_pass(api, mode, change):
    model, optimizer, loader = api(pretrained(), mode)
    bare = getattr(model, "_module", model)
    change(bare)
    kept = {name: tensor.clone() for name, tensor in bare.state_dict().items()}
    inputs, _ = next(iter(loader))
    with pytest.raises(
        UnsupportedLayerError, match=r"1 \(BatchNorm2d\).*get_submodule\('1'\)\.eval\(\).*dpengine\.fix"
    ):
        model(inputs)
    optimizer.zero_grad()
    with pytest.raises(PrivacyError):
        optimizer.step()
    torch.testing.assert_close(dict(bare.state_dict()), kept, rtol=0, atol=0)


@both
def test_running_statistics_are_not_updated_under_no_grad(api):
    model, _, loader = api(pretrained(), "hooks")
    bare = getattr(model, "_module", model)
    model.train()
    before = bare[1].running_mean.clone()
    with torch.no_grad(), pytest.raises(UnsupportedLayerError, match="train mode"):
        model(next(iter(loader))[0])
    with torch.no_grad(), pytest.raises(UnsupportedLayerError, match="train mode"):
        bare[1](torch.randn(3, CHANNELS, 2, 2))  # a direct call of the submodule
    assert torch.equal(bare[1].running_mean, before)


@both
def test_training_continues_after_batch_norm_returns_to_eval_mode(api):
    model, optimizer, loader = api(pretrained(), "hooks")
    steps = 0
    for _ in range(2):
        model.train()
        getattr(model, "_module", model)[1].eval()
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            steps += 1
        model.eval()
        model(rows()[:5][0])
    assert steps == 2 * ROWS // BATCH


@both
def test_batch_norm_is_rejected_if_the_whole_model_is_in_eval_mode(api):
    with pytest.raises(
        UnsupportedLayerError, match=r"1 \(BatchNorm2d\) mixes the samples.*after each model\.train\(\)"
    ):
        api(pretrained().eval(), "hooks")


def test_batch_norm_may_train_after_detach():
    model = pretrained()
    engine = dpengine.PrivacyEngine()
    optimizer = torch.optim.SGD(trained(model), lr=0.1)
    engine.make_private(model, optimizer, DataLoader(rows(), BATCH), noise_multiplier=1.0)
    engine.detach(model)
    assert model.train()(rows()[:5][0]).shape == (5, CLASSES)


def test_check_with_a_batch_accepts_frozen_batch_norm_and_keeps_eval_mode():
    model = pretrained()
    batch = rows()[:6]
    assert dpengine.check(model, F.cross_entropy, batch).ok
    check_loss(model, F.cross_entropy, batch)
    assert [m.training for m in model] == [True, False, True, True, True]
    assert model.training


def test_fix_keeps_batch_norm_in_eval_mode():
    mended, changes = dpengine.fix(pretrained())
    assert type(mended[1]) is nn.BatchNorm2d
    assert not mended[1].training
    assert changes == []
    mended, _ = dpengine.fix(pretrained().eval())
    assert type(mended[1]) is nn.GroupNorm


def test_train_mode_of_each_submodule_is_restored():
    model = pretrained()
    with preserve_modes(model):
        model.eval()
    assert [m.training for m in model.modules()] == [True, True, False, True, True, True]
