"""``check`` with a batch: names the layer or loss that mixes samples, and accepts independent samples."""

import warnings

import inside
import pytest
import torch
import torch.nn.functional as F
from case_models import MODELS, Parts
from torch import nn

from dpengine import PrivacyEngine, check
from dpengine.errors import BatchDependentLossError, PrivacyWarning, UnsupportedLayerError
from dpengine.independence import copy_probe
from dpengine.validation import per_example

ROWS, WIDTH, CLASSES = 6, 4, 3


def inputs(*shape):
    return torch.randn(ROWS, *(shape or (WIDTH,)), generator=torch.Generator().manual_seed(2))


def targets(*shape):
    return torch.randint(0, CLASSES, (ROWS, *shape), generator=torch.Generator().manual_seed(3))


class Layer(nn.Module):
    """Linear layer followed by a function."""

    def __init__(self, function=torch.tanh):
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x):
        return self.function(self.linear(x))


class Remembers(nn.Module):
    """Adds a running average over all previous batches."""

    def __init__(self, *, buffer):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        if buffer:
            self.register_buffer("average", torch.zeros(WIDTH))
        else:
            self.average = torch.zeros(WIDTH)

    def forward(self, x):
        with torch.no_grad():
            now = self.average
            self.average = 0.9 * now + 0.1 * x.mean(dim=0)
        return self.linear(x) + now


def centres_and_calls():
    """Returns a model whose forward mixes samples between two layers."""

    def run(m, x):
        hidden = m.first(x)
        return m.second(hidden - hidden.mean(dim=0).detach())

    return Parts(run, first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, WIDTH))


class MixesOnTheWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (1 + x.mean())


def between(layer):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, CLASSES))


def cross_sample_attention(hidden):
    return (hidden @ hidden.T).softmax(dim=1) @ hidden


def third_sees_first(hidden):
    return torch.cat([hidden[:2], hidden[2:3] + hidden[:1], hidden[3:]])


def normalized_over_rows(hidden):
    return F.batch_norm(hidden, None, None, training=True)


MIXING = {
    "batch-norm": (lambda: between(nn.BatchNorm1d(WIDTH)), "1", "BatchNorm1d"),
    "functional-batch-norm": (lambda: between(Layer(normalized_over_rows)), "1", "Layer"),
    "cross-sample-attention": (lambda: between(Layer(cross_sample_attention)), "1", "Layer"),
    "softmax-over-rows": (lambda: between(Layer(lambda h: h + h.softmax(dim=0))), "1", "Layer"),
    "largest-of-the-batch": (lambda: between(Layer(lambda h: h / h.norm(dim=1).amax())), "1", "Layer"),
    "partner": (lambda: between(Layer(lambda h: h * h.flip(0))), "1", "Layer"),
    "one-row-sees-one-other": (lambda: between(Layer(third_sees_first)), "1", "Layer"),
    "between-two-calls": (lambda: between(centres_and_calls()), "1", "Parts"),
    "way-back": (lambda: between(Layer(MixesOnTheWayBack.apply)), "", "Sequential"),
    "a-buffer-that-remembers": (lambda: between(Remembers(buffer=True)), "1", "Remembers"),
    "an-attribute-that-remembers": (lambda: between(Remembers(buffer=False)), "1", "Remembers"),
    "running-statistics-alone": (lambda: between(nn.BatchNorm1d(WIDTH, affine=False)), "1", "BatchNorm1d"),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_first_layer_that_mixes_samples_is_named(name):
    make, where, kind = MIXING[name]
    report = check(make(), F.cross_entropy, (inputs(), targets()))
    assert [(one.name, one.type, one.part) for one in report.blocked] == [(where, kind, "layer")]
    with pytest.raises(UnsupportedLayerError, match=rf"DPE001.*{kind}"):
        report.raise_if_blocked()


def test_finding_locates_mixing_between_two_submodule_calls():
    (found,) = check(MIXING["between-two-calls"][0](), F.cross_entropy, (inputs(), targets())).blocked
    assert "in its own forward, before it calls '1.second'" in found.why


def test_state_across_batches_in_a_buffer_or_attribute_is_reported():
    batch = (inputs(), targets())
    (buffer,) = check(MIXING["a-buffer-that-remembers"][0](), F.cross_entropy, batch).blocked
    (attribute,) = check(MIXING["an-attribute-that-remembers"][0](), F.cross_entropy, batch).blocked
    assert "into its buffer 'average'" in buffer.why and "remembers the previous batch" in attribute.why


def token_mean(outputs, words):
    """Averages over all tokens of the batch except padding."""
    return F.cross_entropy(outputs.flatten(0, 1), words.flatten(), ignore_index=0)


def in_batch_negatives(outputs, _):
    """Contrastive loss with the other samples of the batch as negatives."""
    like = outputs @ outputs.T
    return F.cross_entropy(like, torch.arange(len(like)))


def batch_weights(outputs, classes):
    counts = torch.bincount(classes, minlength=CLASSES).clamp(min=1)
    return F.cross_entropy(outputs, classes, weight=1.0 / counts)


def third_and_fourth(outputs, classes):
    """Mixes only two samples of the batch."""
    return F.cross_entropy(outputs, classes) + (outputs[2:3] * outputs[3:4]).sum()


MIXING_LOSSES = {
    "token_mean": (token_mean, (5, WIDTH), (5,)),
    "in_batch_negatives": (in_batch_negatives, (), ()),
    "batch_weights": (batch_weights, (), ()),
    "third_and_fourth": (third_and_fourth, (), ()),
}


@pytest.mark.parametrize("name", MIXING_LOSSES)
def test_loss_that_mixes_samples_is_reported_and_its_remedy_works(name):
    loss_fn, of_inputs, of_targets = MIXING_LOSSES[name]
    batch, model = (inputs(*of_inputs), targets(*of_targets)), between(nn.Tanh())
    report = check(model, loss_fn, batch)
    (found,) = report.blocked
    assert (found.name, found.type, found.part) == ("", name, "loss") and "(loss)" in str(report)
    with pytest.raises(BatchDependentLossError, match=rf"DPE010.*The loss \({name}\).*per_example"):
        report.raise_if_blocked()
    if name == "token_mean":
        assert check(model, per_example(loss_fn), batch).ok


def test_a_sum_where_a_mean_is_declared_is_reported():
    batch = (inputs(), targets())
    loss_fn = nn.CrossEntropyLoss(reduction="sum")
    (found,) = check(between(nn.Tanh()), loss_fn, batch).blocked
    assert found.type == "CrossEntropyLoss" and "looks like a sum, expected a mean" in found.why
    assert check(between(nn.Tanh()), loss_fn, batch, loss_reduction="sum").ok


def test_a_layer_and_the_loss_are_both_named():
    report = check(between(Layer(cross_sample_attention)), in_batch_negatives, (inputs(), targets()))
    assert [one.part for one in report.blocked] == ["layer", "loss"]


class Counts(nn.Module):
    """Stores a counter of calls and the last attention weights, as many models do."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.positions, self.head = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        x = F.dropout(x + self.positions(torch.arange(5).expand(len(x), 5)), 0.3)
        mixed, self.last = self.attention(x, x, x, attn_mask=torch.ones(5, 5).triu(1).bool())
        return self.head(mixed.mean(dim=1))


class Trimmed(nn.Module):
    """Trims padding to the longest sequence, so shapes and dropout masks depend on the batch."""

    def __init__(self):
        super().__init__()
        self.entry, self.dropout, self.head = nn.Linear(WIDTH, 4), nn.Dropout(0.5), nn.Linear(4, CLASSES)

    def forward(self, x):
        lengths = 1 + (x[:, 0, 0].abs() * 10).long() % x.shape[1]
        hidden = self.dropout(self.entry(x[:, : int(lengths.max())]))
        real = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
        return self.head((hidden * real.unsqueeze(2)).sum(dim=1))


def sorted_rows():
    """Returns a model that reorders the samples internally."""

    def run(m, x):
        order = x[:, 0].argsort()
        return m.linear(x[order])[order.argsort()]

    return Parts(run, linear=nn.Linear(WIDTH, CLASSES))


def with_mask():
    """Returns a model with a shared input whose length equals the batch size by coincidence."""
    return Parts(lambda m, x, shared: m.linear(x) * shared.sum(), linear=nn.Linear(WIDTH, CLASSES))


APART = {
    "dropout": (lambda: between(nn.Dropout(0.5)), (inputs(),)),
    "layer-norm": (lambda: between(nn.LayerNorm(WIDTH)), (inputs(),)),
    "counts": (Counts, (inputs(5, WIDTH),)),
    "trimmed": (Trimmed, (inputs(5, WIDTH),)),
    "sorted": (sorted_rows, (inputs(),)),
    "mask-as-long-as-the-batch": (with_mask, (inputs(), torch.arange(float(ROWS)))),
    "half": (lambda: between(Layer()).bfloat16(), (inputs().bfloat16(),)),
}
OF_TABLE = {case.id: (case.make, case.inputs(ROWS, torch.float32)) for case in MODELS}


@pytest.mark.parametrize("name", APART)
def test_models_without_mixing_have_no_findings(name):
    assert_no_alarm(*APART[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TABLE)
def test_models_of_the_case_table_have_no_findings(name):
    assert_no_alarm(*OF_TABLE[name])


def assert_no_alarm(make, args):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyWarning)
        report = check(make(), F.cross_entropy, (args, targets()))
    assert report.ok, str(report)


def test_nondeterministic_model_gives_a_notice_and_is_not_blocked():
    numbers = iter(range(1, 100))
    with pytest.warns(PrivacyWarning, match="DPE012.*output changes when the model runs again"):
        assert check(between(Layer(lambda h: h * next(numbers))), F.cross_entropy, (inputs(), targets())).ok


def test_possible_embedding_bag_inputs_are_not_perturbed_and_reported():
    bags = Parts(lambda m, indices, offsets: m.bag(indices, offsets), bag=nn.EmbeddingBag(9, CLASSES, mode="sum"))
    offsets = torch.tensor([0, 2, 2, 5, 6, 9])
    with pytest.warns(PrivacyWarning, match=r"DPE012.*indices of bags"):
        assert check(bags, F.cross_entropy, ((torch.arange(9) % 5, offsets), targets())).ok


def test_the_model_and_the_generators_stay_as_they_are():
    model = between(Remembers(buffer=True)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    batch = (inputs(), targets())
    check(model, F.cross_entropy, batch)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state()) and not model.training
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert torch.equal(batch[0], inputs())


def test_checking_a_private_model_does_not_affect_its_run():
    model = between(Layer(cross_sample_attention))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs(), targets()), batch_size=3)
    engine = PrivacyEngine()
    engine.make_private(model, torch.optim.SGD(model.parameters(), 0.1), loader, noise_multiplier=1.0)
    assert [one.name for one in check(model, F.cross_entropy, (inputs(), targets())).blocked] == ["1"]
    assert engine.ledger.steps == 0 and inside.state(engine).stage == "idle"


WRONG = {
    "batch alone": (TypeError, "loss_fn is NoneType", {"batch": (inputs(), targets())}),
    "loss alone": (TypeError, "batch is NoneType", {"loss_fn": F.cross_entropy}),
    "one row": (ValueError, "batch size is 1", {"loss_fn": F.cross_entropy, "batch": (inputs()[:1], targets()[:1])}),
    "reduction": (
        ValueError, "loss_reduction='avg'",
        {"loss_fn": F.cross_entropy, "batch": (inputs(), targets()), "loss_reduction": "avg"},
    ),
    "no rows": (
        ValueError, "no output of the model has 3 samples",
        {"loss_fn": F.cross_entropy, "batch": (inputs(), targets()[:3])},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_are_no_batch_with_a_loss_are_rejected(name):
    kind, message, given = WRONG[name]
    with pytest.raises(kind, match=message):
        check(between(nn.Tanh()), **given)


@pytest.mark.parametrize("size", [2, 3, 8, 33])
def test_keep_masks_separate_every_ordered_pair_of_samples(size):
    sets = torch.stack(copy_probe.keep_masks(size))
    for one in range(size):
        for other in range(size):
            assert one == other or bool((sets[:, one] & ~sets[:, other]).any())
