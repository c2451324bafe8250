"""Defects of Opacus: models that are made private and detached repeatedly, saved, copied and resumed."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from opacus_defects.apis import (
    ALL_APIS,
    COMPAT_APIS,
    SLACK,
    assert_equal,
    fixed_loader,
    opacus,
    true_sum,
    with_few_apis,
)
from opacus_defects.small import CLASSES, CRITERION, ROWS, mlp, open_run
from opacus_defects.small import normal_batch as batch
from opacus_runs import arguments
from reference import clipped_sum, flat_norms, per_sample_gradients
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012:dpengine.PrivacyWarning")


def traces(model):
    """Returns everything that a private run could leave on a model and its parameters."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = [hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).values()]
    own = [(type(m), sorted(vars(m))) for m in model.modules()]
    return hooks, own, [(type(p), sorted(vars(p)), bool(p._backward_hooks)) for p in model.parameters()]


@pytest.mark.hazard("O47")
def test_attaching_and_detaching_ten_times_leaves_no_hooks_and_charges_every_step():
    model, rows, found = mlp(), batch(), []
    before, never_private = traces(model), copy.deepcopy(model)
    engine = PrivacyEngine(seed=0)
    for _ in range(10):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loader = fixed_loader(ROWS)
        _, optimizer, private = engine.make_private(model, optimizer, loader, noise_multiplier=0.0)
        for _ in private:
            optimizer.zero_grad()
            CRITERION(model(rows[0]), rows[1]).backward()
            optimizer.step()
        found.append({name: p.grad.double() * ROWS for name, p in model.named_parameters()})
        engine.detach(model)
        model.zero_grad()
        assert traces(model) == before
    for one in found:
        assert_equal(one, true_sum(never_private, CRITERION, rows))
    assert engine.ledger.steps == 10


@pytest.mark.parametrize("functorch", [False, True])
@pytest.mark.hazard("O47")
def test_wrapping_ten_times_in_compat_leaves_nothing(functorch):
    model, (x, y) = mlp(), batch()
    before = traces(model)
    truth = {
        name: torch.stack([row[name] for row in per_sample_gradients(model, CRITERION, (x,), y)])
        for name, _ in model.named_parameters()
    }
    for _ in range(10):
        wrapper = opacus().GradSampleModule(model, force_functorch=functorch)
        CRITERION(wrapper(x), y).backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad_sample.double(), truth[name], rtol=1e-4, atol=1e-5)
        assert wrapper.to_standard_module() is model
        model.zero_grad()
        assert traces(model) == before
        assert not any(hasattr(p, "grad_sample") for p in model.parameters())


@pytest.mark.hazard("O47")
def test_a_wrapper_is_made_private_repeatedly_in_compat_and_engines_compose():
    model, (x, y) = mlp(), batch(20)
    wrapper, accountants = model, []
    for _ in range(3):  # rounds of a federated loop, each with its own engine
        engine = opacus().PrivacyEngine(accountant="rdp")
        plain = DataLoader(TensorDataset(x, y), batch_size=5)
        wrapper, optimizer, loader = engine.make_private(**arguments(wrapper, data_loader=plain, noise_multiplier=2.0))
        if accountants:
            engine.accountant.load_state_dict(accountants[-1])
        for inputs, targets in loader:
            optimizer.zero_grad()
            CRITERION(wrapper(inputs), targets).backward()
            optimizer.step()
        accountants.append(engine.accountant.state_dict())
    assert wrapper._module is model
    ((sigma, rate, steps),) = engine.accountant.history
    assert (sigma, rate, steps) == (2.0, pytest.approx(0.25), 12)


WRAPPER_APIS = [api for api in COMPAT_APIS if not api.id.endswith("unwrapped")]


@with_few_apis(WRAPPER_APIS)
@pytest.mark.hazard("O48")
def test_both_spellings_of_keys_load(api):
    private, plain = open_run(api), mlp()
    bare = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
    for state in (bare, {f"_module.{name}": value + 1 for name, value in bare.items()}):
        private.module.load_state_dict(state, strict=True)
        assert list(private.module.state_dict()) == [f"_module.{name}" for name in bare]
        for name, value in private.bare.state_dict().items():
            assert torch.equal(value, state.get(name, state.get(f"_module.{name}")))
    with pytest.raises(RuntimeError, match="Missing key"):
        private.module.load_state_dict({"_module.0.weight": bare["0.weight"]}, strict=True)


@with_few_apis([api for api in ALL_APIS if api not in WRAPPER_APIS])
@pytest.mark.hazard("O48")
def test_keys_are_those_of_the_users_model(api):
    private, plain = open_run(api), mlp()
    for name, value in plain.state_dict().items():
        plain.state_dict()[name].copy_(torch.randn_like(value))
    private.model.load_state_dict(plain.state_dict(), strict=True)
    assert list(private.model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(private.model.state_dict(), strict=True)
    torch.testing.assert_close(private.model(batch()[0]), plain(batch()[0]))


class CustomLayer(nn.Module):
    """Layer that uses the functional fallback."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, x):
        return torch.sin(x @ self.weight)


def through_torch_save(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "save": through_torch_save}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@with_few_apis(ALL_APIS, always={"default-auto", "compat-hooks"})
@pytest.mark.hazard("O48")
def test_a_copy_of_a_private_model_runs_forward_and_backward(api, make_copy):
    private, (x, y) = open_run(api, nn.Sequential(mlp(), CustomLayer())), batch()
    for _ in private.loader:
        private.step(x, y)
    other = make_copy(private.model)
    other.zero_grad()
    private.optimizer.zero_grad()
    torch.testing.assert_close(other(x), private.model(x))
    F.cross_entropy(other(x), y).backward()
    prefix = "_module." if api.compat and not api.id.endswith("unwrapped") else ""
    truth = per_sample_gradients(private.bare, CRITERION, (x,), y)
    if prefix and api.mode == "ghost":
        torch.testing.assert_close(other.per_sample_gradient_norms.double(), flat_norms(truth), rtol=1e-4, atol=1e-6)
    for name, p in other.named_parameters():
        rows = torch.stack([row[name.removeprefix(prefix)] for row in truth])
        if prefix and api.mode not in ("ghost", "no_op"):
            torch.testing.assert_close(p.grad_sample.double(), rows, rtol=1e-4, atol=1e-5)
        elif not prefix or api.mode == "no_op":  # a copy without an engine is an ordinary model
            torch.testing.assert_close(p.grad.double(), rows.mean(dim=0), rtol=1e-4, atol=1e-5)
    for _ in private.loader:  # the original continues to train
        private.step(x, y)
    assert_equal(private.sum(), clipped_sum(truth, 1 - SLACK))


@with_few_apis(COMPAT_APIS, always={"compat-hooks"})
@pytest.mark.hazard("O48")
def test_a_checkpoint_of_compat_is_resumed(api, tmp_path):
    first, second = open_run(api, noise_multiplier=1.0), open_run(api, noise_multiplier=1.0)
    rows = batch()
    for _ in first.loader:
        first.step(*rows)
    module = first.module if api.id.endswith("wrapped") is False else first.bare
    first.engine.save_checkpoint(
        path=tmp_path / "state.pt", module=module, optimizer=first.optimizer, checkpoint_dict={"epoch": 3}
    )
    other = second.module if module is first.module else second.bare
    loaded = second.engine.load_checkpoint(path=tmp_path / "state.pt", module=other, optimizer=second.optimizer)
    assert loaded["epoch"] == 3
    assert second.engine.accountant.history == first.engine.accountant.history
    for name, value in first.bare.state_dict().items():
        assert torch.equal(value, second.bare.state_dict()[name])
