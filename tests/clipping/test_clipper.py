"""The clipper without an engine: any number of minibatches, then the average in ``.grad``."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from case_models import Parts
from oracle import SLACK, relative_error
from reference import clipped_sum, flat_norms, per_sample_gradients
from torch import nn

from dpengine import Automatic, Flat, GradSampleModule, Groups, PerLayer, PerSampleGradientClipper
from dpengine.errors import BatchMismatchError, BatchStateError, MissingGradientError, UnsupportedLayerError

SIZES = (4, 4, 3, 1)


def model_of(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)).to(dtype)


def data(rows=12):
    torch.manual_seed(1)
    return torch.randn(rows, 4).double(), torch.arange(rows) % 3


def truth(model, inputs, targets, bound):
    rows = per_sample_gradients(model, F.cross_entropy, (inputs,), targets)
    return clipped_sum(rows, (1 - SLACK) * bound), float(flat_norms(rows).max())


def begun(bound=0.4, rows=4, **options):
    """Returns a model, a batch, and a clipper of the model."""
    model = model_of()
    return model, *data(rows), PerSampleGradientClipper(model, Flat(bound), **options)


def assert_average_of_loop(clipper, model, plain, inputs, targets, bound=0.4):
    """Clips one backward pass, and compares its average with that of a loop over samples."""
    F.cross_entropy(model(inputs), targets).backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    rows = len(targets)
    total, _ = truth(plain, inputs.T if inputs.shape[0] != rows else inputs, targets, bound)
    assert relative_error({name: p.grad * rows for name, p in model.named_parameters()}, total) < 1e-9


@pytest.mark.one_in(3, "mode", others="slow")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", ["auto", "hooks", "functorch", "ew", "ghost"])
def test_unequal_minibatches_give_the_average_over_all_samples(reduction, mode):
    model, inputs, targets, clipper = begun(rows=12, loss_reduction=reduction, grad_sample_mode=mode)
    for part in zip(inputs.split(SIZES), targets.split(SIZES), strict=True):
        F.cross_entropy(model(part[0]), part[1], reduction=reduction).backward()
        clipper.clip_and_accumulate()
        assert all(p.grad is None for p in model.parameters())
    threshold, largest = clipper.pre_step()
    total, largest_truth = truth(model, inputs, targets, 0.4)
    divisor = sum(SIZES) if reduction == "mean" else 1
    found = {name: p.grad * divisor for name, p in model.named_parameters()}
    assert relative_error(found, total) < 1e-9
    assert threshold == 0.4
    assert largest == pytest.approx(largest_truth, rel=1e-9)


@pytest.mark.parametrize("mode", ["auto", "hooks", "functorch", "ew", "ghost"])
def test_automatic_clipping_enlarges_small_gradients(mode):
    model = model_of()
    inputs, targets = data()
    clipper = PerSampleGradientClipper(model, Automatic(5.0), grad_sample_mode=mode)
    F.cross_entropy(model(inputs), targets).backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    rows = per_sample_gradients(model, F.cross_entropy, (inputs,), targets)
    norms = flat_norms(rows).tolist()
    factors = [(1 - SLACK) * 5.0 / (norm + 0.01) for norm in norms]
    assert max(factors) > 2
    total = {name: sum(f * row[name] for f, row in zip(factors, rows, strict=True)) for name in rows[0]}
    assert relative_error({name: p.grad * len(rows) for name, p in model.named_parameters()}, total) < 1e-9


def folded():
    """Splits each sample into two before the second layer."""
    run = lambda m, inputs: m.second(m.first(inputs).view(-1, 3)).view(len(inputs), -1)  # noqa: E731
    return Parts(run, first=nn.Linear(4, 6), second=nn.Linear(3, 2))


def folded_again():
    """Runs one layer on samples, and on halves of samples."""

    def run(m, inputs):
        padded = F.pad(inputs, (0, 2))
        return m.layer(padded[:, :3]) + m.layer(padded.view(-1, 3)).view(len(inputs), 2, 3).sum(1)

    return Parts(run, layer=nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("make", "mode", "name"),
    [
        (folded, "hooks", "(first|second)"),
        *((folded_again, mode, "layer[^']*") for mode in ("hooks", "functorch", "ew")),
    ],
)
def test_layers_with_different_batch_sizes_raise_an_error_with_their_names(make, mode, name):
    model, (inputs, targets) = make().double(), data(4)
    clipper = PerSampleGradientClipper(model, Flat(0.4), grad_sample_mode=mode)
    with pytest.raises(BatchMismatchError, match=rf"DPE018.*'{name}' saw [48] rows and layer '{name}"):
        F.cross_entropy(model(inputs), targets).backward()
        clipper.clip_and_accumulate()


def test_a_second_average_starts_from_zero():
    model, inputs, targets, clipper = begun()
    for _ in range(2):
        model.zero_grad()
        assert_average_of_loop(clipper, model, model, inputs, targets)


def test_batch_first_false_takes_the_batch_from_the_second_axis():
    torch.manual_seed(2)
    layers = {"embedding": nn.Embedding(7, 4).double(), "head": nn.Linear(4, 3).double()}
    time_major, rowwise = (
        Parts(lambda m, ids, axis=axis: m.head(m.embedding(ids)).mean(dim=axis), **layers) for axis in (0, 1)
    )
    clipper = PerSampleGradientClipper(time_major, Flat(0.2), batch_first=False)
    ids, targets = torch.randint(0, 7, (5, 3)), torch.tensor([0, 1, 2])
    assert_average_of_loop(clipper, time_major, copy.deepcopy(rowwise), ids, targets, 0.2)


def test_pre_step_returns_the_thresholds_of_all_layers():
    model = model_of()
    inputs, targets = data(4)
    clipper = PerSampleGradientClipper(model, PerLayer([0.1, 0.3]))
    F.cross_entropy(model(inputs), targets).backward()
    clipper.clip_and_accumulate()
    threshold, _ = clipper.pre_step()
    assert threshold == [0.1, 0.3]


def test_an_empty_minibatch_counts_nothing():
    model, inputs, targets, clipper = begun()
    F.cross_entropy(model(inputs[:0]), targets[:0]).backward()
    clipper.clip_and_accumulate()
    assert_average_of_loop(clipper, model, model, inputs, targets)


def test_calls_out_of_order_raise_an_error_that_names_the_missing_call():
    model, inputs, targets, clipper = begun()
    with pytest.raises(BatchStateError, match=r"DPE022.*Run forward in train mode and backward first"):
        clipper.clip_and_accumulate()
    with pytest.raises(BatchStateError, match=r"DPE022.*Call clip_and_accumulate\(\) first"):
        clipper.pre_step()
    F.cross_entropy(model(inputs), targets).backward()
    with pytest.raises(BatchStateError, match=r"DPE022.*Call clip_and_accumulate\(\) after every backward"):
        F.cross_entropy(model(inputs), targets).backward()


@pytest.mark.parametrize(
    ("policy", "options", "error", "words"),
    [
        (Flat(0.4), {"loss_reduction": "avg"}, ValueError, "loss_reduction='avg'"),
        (Flat(0.4), {"grad_sample_mode": "magic"}, ValueError, r"grad_sample_mode='magic'.*'auto'"),
        (1.0, {}, TypeError, r"norm_clipper=1\.0 .*dpengine\.Flat\(1\.0\)"),
        ("flat", {}, TypeError, r"norm_clipper='flat' .*dpengine\.Flat\(1\.0\)"),
        (Flat, {}, TypeError, rf"norm_clipper={re.escape(repr(Flat))} .*dpengine\.Flat\(1\.0\)"),
        (None, {}, TypeError, r"norm_clipper=None .*dpengine\.Flat\(1\.0\)"),
        (PerLayer([0.1, 0.2, 0.3]), {}, ValueError, "3 clipping norms for 2 layers"),
        (Groups({"0": 1.0}), {}, ValueError, r"\['2.weight', '2.bias'\]"),
        (Groups({"": 1.0, "9": 1.0}), {}, ValueError, r"\['9'\]"),
    ],
)
def test_arguments_that_do_not_fit_raise_an_error_and_attach_no_hooks(policy, options, error, words):
    model = model_of()
    with pytest.raises(error, match=words):
        PerSampleGradientClipper(model, policy, **options)
    assert not any(m._forward_hooks for m in model.modules())


def test_recurrent_and_attention_layers_need_no_preparation():
    def run(m, x):
        states = m.lstm(x)[0]
        return m.head(m.attention(states, states, states)[0][:, -1])

    torch.manual_seed(3)
    layers = {"lstm": nn.LSTM(4, 5, batch_first=True), "head": nn.Linear(5, 3)}
    model = Parts(run, **layers, attention=nn.MultiheadAttention(5, 1, batch_first=True)).double()
    plain, clipper = copy.deepcopy(model), PerSampleGradientClipper(model, Flat(0.4))
    assert_average_of_loop(clipper, model, plain, torch.randn(4, 6, 4).double(), torch.tensor([0, 1, 2, 0]))
    clipper.detach()
    assert type(model.lstm) is nn.LSTM and type(model.attention) is nn.MultiheadAttention


def test_a_parameter_used_outside_its_layer_is_rejected():
    model, inputs, targets, clipper = begun()
    (F.cross_entropy(model(inputs), targets) + model[0].weight.square().sum()).backward()
    with pytest.raises(MissingGradientError, match=r"'0.weight'"):
        clipper.clip_and_accumulate()


def test_ghost_mode_rejects_joining_the_norms_of_forward_passes_from_before_the_last_backward():
    model, inputs, targets, clipper = begun(grad_sample_mode="ghost")
    losses = [F.cross_entropy(model(inputs + shift), targets) for shift in range(3)]
    losses[2].backward()
    clipper.clip_and_accumulate()
    with pytest.raises(UnsupportedLayerError, match=r"DPE001.*reached a second time in one backward pass"):
        (losses[0] + losses[1]).backward()


def test_a_policy_need_not_name_frozen_parameters():
    model = model_of()
    model[2].requires_grad_(False)
    PerSampleGradientClipper(model, Groups({"0": 1.0}))


def test_a_frozen_module_is_rejected():
    with pytest.raises(UnsupportedLayerError, match=r"DPE001.*no trainable parameter.*requires_grad_\(True\)"):
        PerSampleGradientClipper(model_of().requires_grad_(False), Flat(1.0))


NO_MODULES = {
    "NoneType": None,
    "Linear": nn.Linear,
    "SGD": torch.optim.SGD([nn.Parameter(torch.ones(1))]),
    "list": [nn.Linear(2, 2)],
}


@pytest.mark.parametrize("wrap", [lambda m: PerSampleGradientClipper(m, Flat(1.0)), GradSampleModule])
@pytest.mark.parametrize("got", NO_MODULES)
def test_arguments_that_are_not_modules_are_named_in_the_error(wrap, got):
    with pytest.raises(TypeError, match=rf"module is .*{got}; pass an instance of torch\.nn\.Module"):
        wrap(NO_MODULES[got])


def test_a_pass_that_fails_while_it_is_summed_is_discarded_completely():
    """A model that mixes samples is detected after its pass was added to the sums."""
    run = lambda m, x: m.layer(x).cumsum(dim=0) if m.mixes else m.layer(x)  # noqa: E731
    model = Parts(run, layer=nn.Linear(4, 3), mixes=False).double()
    inputs, _ = data(4)
    clipper = PerSampleGradientClipper(model, Flat(0.4))
    for _ in range(7):
        model(inputs).square().mean().backward()
        clipper.clip_and_accumulate()
    model.mixes = True
    model(inputs).square().mean().backward()  # the eighth pass is probed
    with pytest.raises(UnsupportedLayerError, match="samples of a batch independent"):
        clipper.clip_and_accumulate()
    with pytest.raises(BatchStateError, match="no gradients were accumulated"):
        clipper.pre_step()


def test_an_interrupted_pass_is_not_clipped_with_the_one_before():
    model, inputs, targets, clipper = begun()
    first = F.cross_entropy(model(inputs), targets)
    reached = inputs.clone().requires_grad_()
    reached.register_hook(lambda grad: 1 / 0)
    second = F.cross_entropy(model(reached), targets)
    first.backward()
    with pytest.raises(ZeroDivisionError):
        second.backward()
    with pytest.raises(BatchStateError):
        clipper.clip_and_accumulate()
