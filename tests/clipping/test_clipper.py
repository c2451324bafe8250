"""The clipper on its own, as its specification reads: any number of minibatches, then the average in ``.grad``."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from oracle import SLACK, relative_error
from reference import per_sample_gradients
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
    rows = per_sample_gradients(model, lambda o, t: F.cross_entropy(o, t), (inputs,), targets)
    norms = [float(torch.cat([g.flatten() for g in row.values()]).norm()) for row in rows]
    factors = [min(1.0, (1 - SLACK) * bound / norm) for norm in norms]
    total = {n: sum(f * row[n] for f, row in zip(factors, rows, strict=True)) for n in rows[0]}
    return total, max(norms)


@pytest.mark.one_in(3, "mode", others="slow")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mode", ["auto", "hooks", "functorch", "ew", "ghost"])
def test_unequal_minibatches_give_the_average_over_all_samples(reduction, mode):
    model = model_of()
    inputs, targets = data()
    clipper = PerSampleGradientClipper(model, Flat(0.4), loss_reduction=reduction, grad_sample_mode=mode)
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
    norms = [float(torch.cat([g.flatten() for g in row.values()]).norm()) for row in rows]
    factors = [(1 - SLACK) * 5.0 / (norm + 0.01) for norm in norms]
    assert max(factors) > 2
    total = {name: sum(f * row[name] for f, row in zip(factors, rows, strict=True)) for name in rows[0]}
    assert relative_error({name: p.grad * len(rows) for name, p in model.named_parameters()}, total) < 1e-9


class Folded(nn.Module):
    """Cuts each row into two before its second layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(3, 2)

    def forward(self, inputs):
        return self.second(self.first(inputs).view(-1, 3)).view(len(inputs), -1)


def test_layers_that_see_other_numbers_of_rows_are_refused_by_name():
    model = Folded().double()
    clipper = PerSampleGradientClipper(model, Flat(0.4), grad_sample_mode="hooks")
    inputs, targets = data(4)
    F.cross_entropy(model(inputs), targets).backward()
    with pytest.raises(BatchMismatchError, match=r"DPE018.*'(first|second)' saw [48] rows and layer '(first|second)'"):
        clipper.clip_and_accumulate()


class FoldedAgain(nn.Module):
    """Runs one layer on rows, and on halves of rows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, inputs):
        padded = F.pad(inputs, (0, 2))
        return self.layer(padded[:, :3]) + self.layer(padded.view(-1, 3)).view(len(inputs), 2, 3).sum(1)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_a_layer_that_sees_other_numbers_of_rows_is_refused_by_name(mode):
    model = FoldedAgain().double()
    clipper = PerSampleGradientClipper(model, Flat(0.4), grad_sample_mode=mode)
    inputs, targets = data(4)
    with pytest.raises(BatchMismatchError, match=r"DPE018.*'layer[^']*' saw [48] rows and layer 'layer"):
        F.cross_entropy(model(inputs), targets).backward()
        clipper.clip_and_accumulate()


def test_a_second_round_starts_from_nothing():
    model = model_of()
    inputs, targets = data(4)
    clipper = PerSampleGradientClipper(model, Flat(0.4))
    found = []
    for _ in range(2):
        model.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
        found.append([p.grad.clone() for p in model.parameters()])
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_batch_first_false_takes_the_batch_from_the_second_axis():
    torch.manual_seed(2)
    embedding, head = nn.Embedding(7, 4).double(), nn.Linear(4, 3).double()

    class TimeMajor(nn.Module):
        def __init__(self, axis):
            super().__init__()
            self.embedding, self.head, self.axis = embedding, head, axis

        def forward(self, ids):
            return self.head(self.embedding(ids)).mean(dim=self.axis)

    ids, targets = torch.randint(0, 7, (5, 3)), torch.tensor([0, 1, 2])
    model = TimeMajor(0)
    rowwise = copy.deepcopy(TimeMajor(1))
    clipper = PerSampleGradientClipper(model, Flat(0.2), batch_first=False)
    F.cross_entropy(model(ids), targets).backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    total, _ = truth_of_ids(rowwise, ids.T, targets)
    assert relative_error({n: p.grad * 3 for n, p in model.named_parameters()}, total) < 1e-9


def truth_of_ids(model, ids, targets):
    rows = per_sample_gradients(model, lambda o, t: F.cross_entropy(o, t), (ids,), targets)
    norms = [float(torch.cat([g.flatten() for g in row.values()]).norm()) for row in rows]
    factors = [min(1.0, (1 - SLACK) * 0.2 / norm) for norm in norms]
    return {n: sum(f * row[n] for f, row in zip(factors, rows, strict=True)) for n in rows[0]}, norms


def test_per_layer_gives_every_threshold():
    model = model_of()
    inputs, targets = data(4)
    clipper = PerSampleGradientClipper(model, PerLayer([0.1, 0.3]))
    F.cross_entropy(model(inputs), targets).backward()
    clipper.clip_and_accumulate()
    threshold, _ = clipper.pre_step()
    assert threshold == [0.1, 0.3]


def test_an_empty_minibatch_counts_nothing():
    model = model_of()
    inputs, targets = data(4)
    clipper = PerSampleGradientClipper(model, Flat(0.4))
    for part in (slice(0, 4), slice(4, 4)):
        F.cross_entropy(model(inputs[part]), targets[part]).backward()
        clipper.clip_and_accumulate()
    clipper.pre_step()
    total, _ = truth(model, inputs, targets, 0.4)
    assert relative_error({n: p.grad * 4 for n, p in model.named_parameters()}, total) < 1e-9


def test_calls_out_of_order_say_what_is_missing():
    model = model_of()
    inputs, targets = data(4)
    clipper = PerSampleGradientClipper(model, Flat(0.4))
    with pytest.raises(BatchStateError, match=r"DPE022.*Run forward in train mode and backward first"):
        clipper.clip_and_accumulate()
    with pytest.raises(BatchStateError, match=r"DPE022.*Call clip_and_accumulate\(\) first"):
        clipper.pre_step()
    F.cross_entropy(model(inputs), targets).backward()
    with pytest.raises(BatchStateError, match=r"DPE022.*Call clip_and_accumulate\(\) after every backward"):
        F.cross_entropy(model(inputs), targets).backward()


def test_an_unknown_reduction_or_mode_is_refused_before_hooks_go_on():
    model = model_of()
    with pytest.raises(ValueError, match="loss_reduction='avg'"):
        PerSampleGradientClipper(model, Flat(0.4), loss_reduction="avg")
    with pytest.raises(ValueError, match=r"grad_sample_mode='magic'.*'auto'"):
        PerSampleGradientClipper(model, Flat(0.4), grad_sample_mode="magic")
    assert not any(m._forward_hooks for m in model.modules())


def test_recurrent_and_attention_layers_need_no_preparation():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)
            self.attention = nn.MultiheadAttention(5, 1, batch_first=True)

        def forward(self, x):
            states = self.lstm(x)[0]
            return self.head(self.attention(states, states, states)[0][:, -1])

    torch.manual_seed(3)
    model = Both().double()
    inputs, targets = torch.randn(4, 6, 4).double(), torch.tensor([0, 1, 2, 0])
    total, _ = truth(copy.deepcopy(model), inputs, targets, 0.4)
    clipper = PerSampleGradientClipper(model, Flat(0.4))
    F.cross_entropy(model(inputs), targets).backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    assert relative_error({n: p.grad * 4 for n, p in model.named_parameters()}, total) < 1e-9
    clipper.detach()
    assert type(model.lstm) is nn.LSTM and type(model.attention) is nn.MultiheadAttention


def test_a_parameter_used_outside_its_layer_is_refused():
    model = model_of()
    inputs, targets = data(4)
    clipper = PerSampleGradientClipper(model, Flat(0.4))
    (F.cross_entropy(model(inputs), targets) + model[0].weight.square().sum()).backward()
    with pytest.raises(MissingGradientError, match=r"'0.weight'"):
        clipper.clip_and_accumulate()


def test_ghost_mode_refuses_to_join_the_norms_of_forward_passes_from_before_the_last_backward():
    model = model_of()
    clipper = PerSampleGradientClipper(model, Flat(0.4), grad_sample_mode="ghost")
    inputs, targets = data(4)
    losses = [F.cross_entropy(model(inputs + shift), targets) for shift in range(3)]
    losses[2].backward()
    clipper.clip_and_accumulate()
    with pytest.raises(UnsupportedLayerError, match=r"DPE001.*reached a second time in one backward pass"):
        (losses[0] + losses[1]).backward()


@pytest.mark.parametrize("wrong", [1.0, "flat", Flat, None], ids=repr)
def test_what_is_no_policy_is_refused_at_once(wrong):
    model = model_of()
    with pytest.raises(TypeError, match=rf"norm_clipper={re.escape(repr(wrong))} .*dpengine\.Flat\(1\.0\)"):
        PerSampleGradientClipper(model, wrong)
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(
    "policy", [PerLayer([0.1, 0.2, 0.3]), Groups({"0": 1.0}), Groups({"": 1.0, "9": 1.0})], ids=repr
)
def test_a_policy_that_does_not_fit_is_refused_before_hooks_go_on(policy):
    model = model_of()
    with pytest.raises(ValueError, match=r"3 clipping norms for 2 layers|\['2.weight', '2.bias'\]|\['9'\]"):
        PerSampleGradientClipper(model, policy)
    assert not any(m._forward_hooks for m in model.modules())


def test_a_policy_need_not_speak_of_frozen_parameters():
    model = model_of()
    model[2].requires_grad_(False)
    PerSampleGradientClipper(model, Groups({"0": 1.0}))


def test_a_frozen_module_is_refused_at_once():
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
def test_what_is_no_module_is_named(wrap, got):
    with pytest.raises(TypeError, match=rf"module is .*{got}; pass an instance of torch\.nn\.Module"):
        wrap(NO_MODULES[got])


def test_a_pass_that_fails_while_it_is_summed_leaves_nothing_of_itself():
    """A model that mixes rows is found out when its pass is in the sums already."""

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.mixes = nn.Linear(4, 3), False

        def forward(self, x):
            out = self.layer(x)
            return out.cumsum(dim=0) if self.mixes else out

    model = Mixing().double()
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
    model, (inputs, targets) = model_of(), data()
    clipper = PerSampleGradientClipper(model, Flat(0.5))
    first = F.cross_entropy(model(inputs), targets)
    reached = inputs.clone().requires_grad_()
    reached.register_hook(lambda grad: 1 / 0)
    second = F.cross_entropy(model(reached), targets)
    first.backward()
    with pytest.raises(ZeroDivisionError):
        second.backward()
    with pytest.raises(BatchStateError):
        clipper.clip_and_accumulate()
