"""Capture in common models and training loops: recorded calls, and cleanup."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from inside_parts import ClippedPasses
from oracle import assert_sums_of_loop, clip_by_loop, relative_error
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpengine.errors import BatchMismatchError, MissingGradientError, RepeatedBackwardError

ROWS = 5
MODES = ["auto", "hooks", "ghost"]


class Net(nn.Module):
    """Two blocks and a head; blocks may be checkpointed, the activation is in place."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)
        self.reentrant = reentrant

    def forward(self, x):
        x = F.relu_(self.first(x))
        if self.reentrant is None:
            return self.head(self.block(x))
        return self.head(checkpoint(self.block, x, use_reentrant=self.reentrant))


def batch(dtype=torch.float64, rows=ROWS, time=None):
    torch.manual_seed(0)
    shape = (rows, 4) if time is None else (rows, time, 4)
    return torch.randn(shape, dtype=dtype), torch.arange(rows) % 3


def begun(reentrant=None, **options):
    """A model, its clipped sums, and a batch."""
    model = Net(reentrant).double()
    return model, attached(model, **options), *batch()


def attached(model, mode="auto", **options):
    return ClippedPasses(model, mode=mode, **options)


def totals(sums):
    return {name: total.double() for name, total in sums.totals().items()}


def truth_of(model, inputs, targets):
    return clip_by_loop(model, (inputs,), lambda output, i: F.cross_entropy(output, targets[i]), len(targets))[0]


def assert_nothing_is_left(sums, model):
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert sums.is_idle()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.one_in(2, "mode", others="slow")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant-checkpoint"])
def test_in_place_activations_and_checkpoints_give_the_sums_of_a_loop(mode, reentrant):
    model, sums, inputs, targets = begun(reentrant, mode=mode)
    F.cross_entropy(model(inputs), targets).backward()
    assert_sums_of_loop(sums, _plain(model), (inputs,), targets)
    assert_nothing_is_left(sums, model)


def test_the_output_of_a_linear_layer_over_positions_may_be_changed_in_place():
    """It is a view, so that autograd reaches the layer by another node than that of the output."""
    torch.manual_seed(0)
    relu = nn.ReLU(inplace=True)
    model = nn.Sequential(nn.Linear(4, 5), relu, nn.Linear(5, 5), relu, nn.Flatten(), nn.Linear(15, 3)).double()
    inputs, targets = torch.randn(6, 3, 4).double(), torch.arange(6) % 3
    sums = attached(model, "auto")
    F.cross_entropy(model(inputs), targets).backward()
    assert_sums_of_loop(sums, copy.deepcopy(model), (inputs,), targets)


def _plain(model):
    model = copy.deepcopy(model)
    model.reentrant = None
    return model


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_end_of_backward_is_reported_once_and_after_every_layer(reentrant):
    model = Net(reentrant).double()
    seen = []
    sums = attached(model)
    sums.on_end(seen.append)
    inputs, targets = batch()
    F.cross_entropy(model(inputs), targets).backward()
    assert seen == [{"first", "block.0", "block.2", "head"}]


@pytest.mark.parametrize("mode", MODES)
def test_several_backward_passes_add_up(mode):
    model, sums, inputs, targets = begun(mode=mode)
    for part in (slice(0, 2), slice(2, 2), slice(2, 5)):
        F.cross_entropy(model(inputs[part]), targets[part]).backward()
        sums.clip()
    assert relative_error(totals(sums), truth_of(model, inputs, targets)) < 1e-9


@pytest.mark.parametrize("mode", MODES)
def test_frozen_parameters_are_excluded_until_they_are_unfrozen(mode):
    model = Net().double()
    model.block.requires_grad_(False)
    model.first.bias.requires_grad_(False)
    inputs, targets = batch()
    sums = attached(model, mode)
    for _ in range(2):
        F.cross_entropy(model(inputs), targets).backward()
        assert_sums_of_loop(sums, model, (inputs,), targets)
        sums.discard()
        model.requires_grad_(True)


@pytest.mark.parametrize("mode", MODES)
def test_eval_mode_and_no_grad_record_nothing(mode):
    model, sums, inputs, targets = begun(mode=mode)
    with torch.no_grad():
        model(inputs)
    model.eval()
    model(inputs)
    loss = F.cross_entropy(model(inputs), targets)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(g is not None for g in gradients)  # an ordinary model in eval mode
    assert not sums.pending()
    model.train()
    model(inputs)  # a forward pass for a log, without backward
    F.cross_entropy(model(inputs), targets).backward()
    assert_sums_of_loop(sums, model, (inputs,), targets)


@pytest.mark.parametrize("mode", MODES)
def test_autocast_gives_the_float32_sums_to_half_precision(mode):
    model = Net()
    inputs, targets = batch(torch.float32)
    sums = attached(model, mode)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    sums.clip(rows=ROWS)
    assert {total.dtype for total in sums.totals().values()} == {torch.float32}
    assert relative_error(totals(sums), truth_of(model, inputs, targets)) < 3e-2


class Two(nn.Module):
    """Takes a mapping, a tuple, and a keyword; its layers take several inputs and keywords; its output is a dict."""

    def __init__(self):
        super().__init__()
        self.both = nn.Bilinear(4, 3, 5)
        self.mix = nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, named, pair, *, scale):
        mixed = self.mix(input=self.both(named["a"], input2=pair[0]))
        return {"scores": self.head(mixed * scale), "other": None}


@pytest.mark.parametrize("mode", [*MODES, "functorch", "ew"])
def test_mapping_tuple_and_keyword_inputs_with_mapping_outputs_are_clipped(mode):
    torch.manual_seed(1)
    model = Two().double()
    inputs = ({"a": torch.randn(ROWS, 4).double()}, (torch.randn(ROWS, 3).double(), "text"))
    scale, targets = torch.rand(ROWS, 1).double(), torch.arange(ROWS) % 3
    sums = attached(model, mode)
    F.cross_entropy(model(*inputs, scale=scale)["scores"], targets).backward()
    sums.clip(rows=ROWS)
    run = lambda m, named, pair, scale: m.model(named, pair, scale=scale)["scores"]  # noqa: E731
    loss_of_row = lambda output, i: F.cross_entropy(output, targets[i])  # noqa: E731
    positional = Parts(run, model=copy.deepcopy(model))
    truth, _ = clip_by_loop(positional, (*inputs, scale), loss_of_row, ROWS)
    assert relative_error(totals(sums), {name.removeprefix("model."): t for name, t in truth.items()}) < 1e-9


@pytest.mark.parametrize("mode", MODES)
def test_time_major_models_clip_along_the_second_axis(mode):
    def mean_over(axis):
        run = lambda m, ids: m.head(torch.tanh(m.mix(m.embedding(ids))).mean(dim=axis))  # noqa: E731
        return Parts(run, embedding=nn.Embedding(7, 4), mix=nn.Linear(4, 5), head=nn.Linear(5, 3)).double()

    torch.manual_seed(2)
    model, rowwise = mean_over(0), mean_over(1)
    rowwise.load_state_dict(model.state_dict())
    ids, targets = torch.randint(0, 7, (6, ROWS)), torch.arange(ROWS) % 3
    sums = attached(model, mode, batch_first=False)
    F.cross_entropy(model(ids), targets).backward()
    assert sums.clip(rows=ROWS).samples == ROWS
    assert relative_error(totals(sums), truth_of(rowwise, ids.T, targets)) < 1e-9


@pytest.mark.one_in(2, "mode", others="slow")
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.hazard("L4")
def test_an_exception_leaves_a_clean_state(mode, where):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("in backward")

    class Fragile(Net):
        fail = None

        def forward(self, x):
            x = F.relu_(self.first(x))
            if self.fail == "forward":
                raise ArithmeticError("in forward")
            x = Failing.apply(x) if self.fail == "backward" else x
            return self.head(self.block(x))

    model = Fragile().double()
    inputs, targets = batch()
    sums = attached(model, mode)
    model.fail = where
    with pytest.raises(ArithmeticError):
        F.cross_entropy(model(inputs), targets).backward()
    model.fail = None
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    F.cross_entropy(model(inputs), targets).backward()
    assert_sums_of_loop(sums, model, (inputs,), targets)


def test_the_pass_after_an_interrupted_forward_is_exact():
    class Interrupted(Net):
        fail = True

        def forward(self, x):
            return super().forward(x)

    model = Interrupted().double()
    inputs, targets = batch()
    sums = attached(model)

    def interrupt(module, args):
        if Interrupted.fail:
            raise KeyboardInterrupt

    model.block[1].register_forward_pre_hook(interrupt)
    handle = model.block[0].register_forward_hook(lambda *a: interrupt(None, None), prepend=True)
    with pytest.raises(KeyboardInterrupt):
        model(inputs)
    Interrupted.fail = False
    handle.remove()
    F.cross_entropy(model(inputs), targets).backward()
    sums.clip(rows=ROWS)
    assert_nothing_is_left(sums, model)


def test_copies_are_not_captured_and_have_the_same_state_dict_keys():
    plain = Net().double()
    keys = list(plain.state_dict())
    sums = attached(plain)
    assert list(plain.state_dict()) == keys
    inputs, targets = batch()
    for other in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain)), torch.optim.swa_utils.AveragedModel(plain)):
        F.cross_entropy(other(inputs), targets).backward()
        assert all(p.grad is not None for p in other.parameters())  # autograd works as without capture
    assert not sums.pending() and not sums.leaks()
    sums.detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain.modules())
    assert not any(p._post_accumulate_grad_hooks for p in plain.parameters())


@pytest.mark.hazard("M5")
def test_a_weight_used_outside_its_layer_is_rejected_by_name():
    run = lambda m, ids: F.linear(m.mix(m.embedding(ids).mean(dim=1)), m.embedding.weight)  # noqa: E731
    model = Parts(run, embedding=nn.Embedding(7, 4), mix=nn.Linear(4, 4))
    sums = attached(model, mode="hooks")
    F.cross_entropy(model(torch.randint(0, 7, (ROWS, 3))), torch.arange(ROWS)).backward()
    with pytest.raises(MissingGradientError, match=r"DPE002.*'embedding.weight'.*grad_sample_mode='auto'"):
        sums.clip(rows=ROWS)
    assert_nothing_is_left(sums, model)


def two_inputs():
    """A layer with two inputs, which gets a tap."""
    return Parts(lambda m, inputs: m.pair(inputs, inputs.tanh()), pair=nn.Bilinear(4, 4, 3))


@pytest.mark.parametrize("mode", ["auto", "ghost"])
@pytest.mark.parametrize("net", [Net, two_inputs])
@pytest.mark.hazard("C6")
def test_a_second_backward_over_one_forward_is_rejected(mode, net):
    model = net().double()
    sums = attached(model, mode, probes=False)
    inputs, targets = batch()
    F.cross_entropy(model(inputs), targets).backward()  # the first pass is recorded for a probe
    sums.clip(rows=ROWS)
    output = model(inputs)
    F.cross_entropy(output, targets).backward(retain_graph=True)
    with pytest.raises(RepeatedBackwardError, match=r"DPE017.*\(loss_a \+ loss_b\)"):
        output.square().sum().backward()
    sums.discard()


@pytest.mark.parametrize("fold", [lambda x: x.flatten(0, 1), lambda x: x.transpose(0, 1)], ids=["folded", "time-first"])
@pytest.mark.hazard("M9")
def test_a_layer_without_the_batch_axis_is_rejected_by_name(fold):
    model = Parts(lambda m, x: m.inner(fold(x)).sum() + torch.zeros(len(x), 3), inner=nn.Linear(4, 3))
    sums = attached(model)
    inputs, targets = batch(torch.float32, time=7)
    F.cross_entropy(model(inputs), targets).backward()
    with pytest.raises(BatchMismatchError, match=r"DPE018.*'inner'.*grad_sample_mode='auto'"):
        sums.clip(rows=ROWS)


def test_a_model_called_twice_in_one_loss_is_clipped_as_one_sample():
    model, sums, inputs, targets = begun()
    (F.cross_entropy(model(inputs), targets) + model(2 * inputs).square().sum(dim=1).mean()).backward()
    sums.clip(rows=ROWS)
    both = Parts(lambda m, x: torch.cat([m.net(x), m.net(2 * x)], dim=1), net=copy.deepcopy(model))

    def loss_of_row(output, i):
        return F.cross_entropy(output[:, :3], targets[i]) + output[:, 3:].square().sum()

    truth, _ = clip_by_loop(both, (inputs,), loss_of_row, ROWS)
    assert relative_error(totals(sums), {name.removeprefix("net."): t for name, t in truth.items()}) < 1e-9


def test_user_hooks_and_in_place_changes_of_the_output_are_clipped_exactly():
    model = Net().double()
    model.head.register_forward_hook(lambda module, args, output: output * 2)
    inputs, targets = batch()
    sums = attached(model)
    output = model(inputs).mul_(0.5)
    F.cross_entropy(output, targets).backward()
    sums.clip(rows=ROWS)
    plain = Net().double()
    plain.load_state_dict(model.state_dict())
    assert relative_error(totals(sums), truth_of(plain, inputs, targets)) < 1e-9


@pytest.mark.hazard("M5")
def test_a_leak_is_found_also_when_the_model_is_in_eval_mode_by_then():
    model, sums, inputs, targets = begun()
    loss = F.cross_entropy(model(inputs), targets) + model.head.weight.square().sum()
    model.eval()
    loss.backward()
    with pytest.raises(MissingGradientError, match=r"'head.weight'"):
        sums.clip(rows=ROWS)


def test_a_backward_pass_in_eval_mode_does_not_affect_the_next_one():
    model, sums, inputs, targets = begun()
    model.eval()
    model(inputs).sum().backward()
    model.train()
    model.zero_grad()
    F.cross_entropy(model(inputs), targets).backward()
    assert_sums_of_loop(sums, model, (inputs,), targets)
