"""State dicts equal those of a model that is not private, and copies are not private."""

import copy
import io
import pickle
import pickletools
import zipfile

import pytest
import torch
import torch.nn.functional as F
from loops import (
    CLASSES,
    FEATURES,
    assert_same_gradients,
    every_mode,
    exact_gradients,
    examples,
    first_batch,
    gradients_of,
    make_loop,
    mlp,
    state_of,
    train,
)
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012")


class Recurrent(nn.Module):
    """Model with layers that batch-first layers replace while it is private, and with its own parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.ones(4))
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, inputs):
        hidden = self.rnn(inputs.unsqueeze(1))[0]
        return self.head(self.mix(hidden, hidden, hidden)[0][:, 0] * self.scale)


every_model = pytest.mark.parametrize("make_model", [mlp, Recurrent])


def load_model(buffer):
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    return load_model(file)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": by_torch_save}


@every_model
def test_the_state_is_that_of_a_plain_model(make_model, tmp_path):
    loop = make_loop(make_model(), noise_multiplier=1.0)
    train(loop)
    assert list(loop.model.state_dict()) == list(make_model().state_dict())
    torch.save(loop.model.state_dict(), tmp_path / "model.pt")
    save_file(loop.model.state_dict(), tmp_path / "model.safetensors")
    inputs = examples().tensors[0]
    for state in (torch.load(tmp_path / "model.pt", weights_only=True), load_file(tmp_path / "model.safetensors")):
        plain = make_model()
        plain.load_state_dict(state, strict=True)
        torch.testing.assert_close(plain.eval()(inputs), loop.model.eval()(inputs))


@every_model
def test_a_state_loads_into_a_private_model(make_model):
    torch.manual_seed(8)
    other = {name: torch.randn_like(value) for name, value in make_model().state_dict().items()}
    loop = make_loop(make_model())
    loop.model.load_state_dict(other, strict=True)
    batch = first_batch(loop.loader)
    with exact_gradients(loop, batch):
        loop.step(*batch)


@pytest.mark.one_in(6, "mode", "make_model", "make_copy", others="slow")
@pytest.mark.one_in(3, "mode", "make_model", "make_copy")
@every_mode
@every_model
@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
def test_copies_of_a_private_model_are_inert(make_copy, make_model, mode):
    loop = make_loop(make_model(), noise_multiplier=1.0, grad_sample_mode=mode)
    batches = iter(loop.loader)
    loop.step(*next(batches))
    other = make_copy(loop.model)
    inputs, targets = examples().tensors
    plain = make_model()
    plain.load_state_dict(state_of(loop.model))
    for one in (other, plain):
        one.zero_grad()
        F.cross_entropy(one(inputs), targets).backward()
    truth = {name: p.grad.double() for name, p in plain.named_parameters()}
    assert_same_gradients(gradients_of(other), truth)
    assert loop.engine.ledger.steps == 1
    loop.step(*next(batches))  # and the original keeps training
    assert loop.engine.ledger.steps == 2


def test_a_copy_holds_nothing_of_the_engine():
    loop = make_loop(noise_multiplier=1.0)
    loop.backward(*first_batch(loop.loader))
    size = len(pickle.dumps(loop.model))
    loop.engine.detach(loop.model)
    assert size < len(pickle.dumps(loop.model)) + 4000  # names of inert hooks only: no buffer, key or ledger
    memo = {}
    copy.deepcopy(make_loop().model, memo)
    kinds = {type(thing).__name__ for thing in memo.values()}
    assert not kinds & {"Capture", "PrivateStep", "PassClipper", "NoiseSource", "Ledger", "PrivacyEngine"}


@every_model
def test_a_copy_can_be_made_private_itself(make_model):
    first = make_loop(make_model())
    loop = make_loop(copy.deepcopy(first.model), engine=first.engine)
    batch = first_batch(loop.loader)
    with exact_gradients(loop, batch):
        loop.step(*batch)
    assert all(p.grad is None for p in first.model.parameters())


@every_model
def test_averaged_models_track_a_private_model(make_model):
    loop = make_loop(make_model(), noise_multiplier=1.0)
    averaged = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    truth = None
    for batch in loop.loader:
        loop.step(*batch)
        averaged.update_parameters(loop.model)
        now = state_of(loop.model)
        truth = now if truth is None else {name: 0.5 * truth[name] + 0.5 * value for name, value in now.items()}
    for name, value in averaged.module.state_dict().items():
        torch.testing.assert_close(value, truth[name])
    averaged.module(examples().tensors[0]).sum().backward()
    assert all(p.grad is not None for p in averaged.module.parameters())


class Sequences(nn.Module):
    """Model that gets all kinds of hooks: for one input, replaced layers, batch norm, and its own parameter."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4).eval())
        self.rnns = nn.ModuleList([nn.LSTM(4, 4, batch_first=True), nn.GRU(4, 4, batch_first=True), nn.RNN(4, 4)])
        self.cells = nn.ModuleList([nn.LSTMCell(4, 4), nn.GRUCell(4, 4), nn.RNNCell(4, 4, nonlinearity="relu")])
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.last, self.scale = nn.Linear(4, CLASSES), nn.Parameter(torch.ones(CLASSES))

    def forward(self, inputs):
        steps = self.rnns[1](self.rnns[0](self.first(inputs).unsqueeze(1))[0])[0]
        steps = self.attention(steps, steps, steps)[0]
        return self.last(self.cells[1](steps[:, 0])) * self.scale


def globals_of(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    with zipfile.ZipFile(buffer) as file:
        data = next(file.read(name) for name in file.namelist() if name.endswith("data.pkl"))
    return {arg for op, arg, _ in pickletools.genops(data) if op.name == "GLOBAL"}, buffer


def test_a_saved_model_and_a_copy_hold_nothing_of_the_engine():
    model = Sequences()
    model.rnns[2].requires_grad_(False)
    model.cells[0].requires_grad_(False)
    model.cells[2].requires_grad_(False)
    model.last.register_forward_hook(print)
    plain, before = globals_of(model)[0], {name: sorted(vars(m)) for name, m in model.named_modules()}
    make_loop(model, unused_parameters="zero")
    random = torch.get_rng_state()
    saved, buffer = globals_of(model)
    assert saved == plain
    copies = (copy.deepcopy(model), load_model(buffer))
    assert torch.equal(random, torch.get_rng_state())
    for copied in copies:
        assert {name: sorted(vars(m)) for name, m in copied.named_modules()} == before
        assert type(copied.rnns[0]) is nn.LSTM and type(model.rnns[0]) is not nn.LSTM
        assert list(copied.last._forward_hooks.values()) == [print]
        assert not copied._forward_hooks and not copied._forward_pre_hooks
        copied.last._forward_hooks.clear()
        model.last._forward_hooks.clear()
        x = torch.randn(3, FEATURES)
        with torch.no_grad():
            torch.testing.assert_close(copied(x), model(x))
        model.last.register_forward_hook(print)


def test_a_saved_model_loads_with_weights_only_and_safe_globals():
    loop = make_loop()
    _, buffer = globals_of(loop.model)
    buffer.seek(0)
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.Tanh, set]):
        found = torch.load(buffer, weights_only=True)
    for name, value in found.state_dict().items():
        assert torch.equal(value, loop.model.state_dict()[name])


def test_a_model_is_saved_whole_between_detach_and_a_second_run():
    loop = make_loop()
    loop.engine.detach(loop.model)
    assert all("__reduce_ex__" not in vars(module) for module in loop.model.modules())
    make_loop(loop.model)
    assert globals_of(loop.model)[0] == globals_of(mlp())[0]
