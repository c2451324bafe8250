"""The replaced forward of layers: exact with hooks and threads of the user, and absent from copies."""

import copy
import itertools
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from inside_parts import ClippedPasses
from loops import make_loop
from oracle import clip_by_loop, relative_error
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpengine.errors import BatchStateError, PrivacyError, RepeatedBackwardError

ROWS = 5


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(*, positions=()):
    torch.manual_seed(1)
    return torch.randn(ROWS, *positions, 4, dtype=torch.float64), torch.arange(ROWS) % 3


def error_of(sums, truth_model, inputs, targets, forward=None):
    """Relative error of the clipped sums against a loop over samples of a plain model."""

    def loss(output, i):
        return F.cross_entropy(output, targets[i])

    sums.clip(rows=len(targets))
    found = {name: total.double() for name, total in sums.totals().items()}
    return relative_error(found, clip_by_loop(truth_model, (inputs,), loss, len(targets))[0])


class Scaled(nn.Module):
    """Scales the gradient of what a layer gives by a tensor hook, before or after an operation in place."""

    def __init__(self, when):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.when = nn.Linear(4, 6), nn.Linear(6, 3), when

    def forward(self, inputs):
        hidden = self.first(inputs)
        if self.when == "before" and hidden.requires_grad:
            hidden.register_hook(lambda grad: 3 * grad)
        hidden = F.relu_(hidden)
        if self.when == "after" and hidden.requires_grad:
            hidden.register_hook(lambda grad: 3 * grad)
        return self.head(hidden if hidden.dim() == 2 else hidden.mean(1))


@pytest.mark.parametrize(("when", "positions"), [("before", ()), ("after", ()), ("after", (2,))])
def test_tensor_hooks_of_the_user_change_the_gradient_that_is_captured(when, positions):
    model = Scaled(when).double()
    plain = copy.deepcopy(model)
    inputs, targets = batch(positions=positions)
    sums = ClippedPasses(model)
    F.cross_entropy(model(inputs), targets).backward()
    assert error_of(sums, plain, inputs, targets) < 1e-9


def test_a_second_backward_pass_that_ends_in_the_first_layer_it_reaches_discards_the_batch():
    loop = make_loop(noise_multiplier=1.0)
    for batch_of_loop in itertools.islice(loop.loader, 2):  # the first one is recorded for a probe
        inputs, targets = batch_of_loop
        loop.step(inputs, targets)
    inputs, targets = next(iter(loop.loader))
    loop.optimizer.zero_grad()
    loss = F.cross_entropy(loop.model(inputs), targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RepeatedBackwardError):
        loss.backward()
    with pytest.raises(BatchStateError):
        loop.optimizer.step()
    assert [charge.kind for charge in loop.engine.ledger.history][-1] == "void"


class NoGradient(torch.autograd.Function):
    """An identity that passes no gradient on."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_a_layer_whose_gradient_stops_behind_it_has_a_gradient_of_zero():
    model = net()
    model[3] = nn.Module()
    model[3].forward = NoGradient.apply
    sums = ClippedPasses(model, probes=False)
    inputs, targets = batch()
    F.cross_entropy(model(inputs), targets).backward()
    sums.clip(rows=ROWS)
    totals = sums.totals()
    assert not totals["2.weight"].any() and totals["4.weight"].any()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_layer_of_indices_whose_gradient_stops_behind_it_has_a_gradient_of_zero(mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(7, 4, mode=mode), nn.Module(), nn.Linear(4, 3))
    model[1].forward = NoGradient.apply
    sums = ClippedPasses(model, probes=False)
    F.cross_entropy(model(torch.randint(7, (ROWS, 2))), torch.arange(ROWS) % 3).backward()
    sums.clip(rows=ROWS)
    totals = sums.totals()
    assert not totals["0.weight"].any() and totals["2.weight"].any()


def test_an_input_that_is_changed_after_its_layer_is_rejected():
    model = net()
    ClippedPasses(model)
    inputs, targets = batch()
    loss = F.cross_entropy(model(inputs), targets)
    inputs.mul_(2)
    with pytest.raises(RuntimeError, match=r"layer '0'.*modified by an inplace operation"):
        loss.backward()


@pytest.fixture
def inputs_of_a_layer():
    """Returns a model, its clipped sums, and a list of weak references to the inputs of the third layer.

    They are recorded as outputs of the second layer, because a layer with a hook of the user runs in another way.
    """
    model, seen = net(), []
    model[1].register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    return model, ClippedPasses(model), seen


def test_inputs_are_not_held_once_their_gradient_has_arrived(inputs_of_a_layer):
    model, sums, seen = inputs_of_a_layer
    inputs, targets = batch()
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    sums.clip(rows=ROWS)
    assert seen[0]() is None
    assert loss.isfinite()  # the graph is still there


def test_inputs_inside_a_checkpoint_are_not_held(inputs_of_a_layer):
    model, sums, seen = inputs_of_a_layer
    inputs, targets = batch()
    output = checkpoint(model, inputs, use_reentrant=False)
    assert seen[0]() is None
    F.cross_entropy(output, targets).backward()
    plain = net()
    assert error_of(sums, plain, inputs, targets) < 1e-9


def test_flags_that_an_interrupt_left_are_restored_by_the_next_pass():
    model = net()
    plain = copy.deepcopy(model)
    sums = ClippedPasses(model)
    sums.interrupt_in_layer(model[0])
    assert not model[0].weight.requires_grad
    inputs, targets = batch()
    F.cross_entropy(model(inputs), targets).backward()
    assert model[0].weight.requires_grad
    assert error_of(sums, plain, inputs, targets) < 1e-9


def test_a_model_that_runs_in_two_threads_is_rejected():
    model = net()
    inside, leave = threading.Event(), threading.Event()

    def wait(*_):
        inside.set()
        leave.wait(10)

    ClippedPasses(model)
    inputs, _ = batch()
    original = F.linear

    def slow(*args):
        if threading.current_thread() is thread and not inside.is_set():
            wait()
        return original(*args)

    thread = threading.Thread(target=model, args=(inputs,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", slow)
        thread.start()
        inside.wait(10)
        with pytest.raises(PrivacyError, match=r"DPE001.*two threads"):
            model(inputs)
        leave.set()
        thread.join()
    assert all(p.requires_grad for p in model.parameters())


COPIES = {"copy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_a_copy_runs_its_own_layers_and_can_be_watched_itself(make):
    model = net()
    sums = ClippedPasses(model)
    other = make(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    inputs, targets = batch()
    plain = net()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(other(inputs), plain(inputs), rtol=0, atol=0)
    assert not sums.pending()
    of_copy = ClippedPasses(other)
    F.cross_entropy(other(inputs), targets).backward()
    assert error_of(of_copy, plain, inputs, targets) < 1e-9


@pytest.mark.slow
def test_a_saved_model_loads_without_dpengine(tmp_path):
    model = net()
    ClippedPasses(model)
    torch.save(model, tmp_path / "model.pt")
    program = (
        "import sys; sys.modules['dpengine'] = None\n"
        f"import torch; model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "print(model(torch.ones(1, 4, dtype=torch.float64)).sum().item())"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert float(found.stdout) == pytest.approx(float(net()(torch.ones(1, 4, dtype=torch.float64)).sum()))


def test_detach_leaves_a_forward_of_the_user():
    model = net()
    given = model[0].forward = lambda inputs: F.linear(inputs, model[0].weight, model[0].bias)
    sums = ClippedPasses(model)
    assert vars(model[0])["forward"] is not given and "forward" in vars(model[2])
    sums.detach()
    assert vars(model[0])["forward"] is given
    assert not any("forward" in vars(layer) for layer in model[1:])
