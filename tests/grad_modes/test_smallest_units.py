"""Mode ``auto``: the smallest parts of a model that no rule of a layer covers run each sample alone."""

import copy
import inspect
import pickle
import re
import warnings

import pytest
import torch
from inside_parts import share_units
from reference import clipped_sum, flat_norms, per_sample_gradients
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint as checkpoints
from torch.utils.data import DataLoader, TensorDataset

from dpengine import Flat, PerSampleGradientClipper, PrivacyEngine, checkpoint
from dpengine.errors import PrivacyError, PrivacyWarning

SAMPLES, LENGTH, WIDTH = 5, 4, 6
WEIGHTS = torch.tensor([0.1, 0.5, 1.0, 2.0, 4.0], dtype=torch.float64)


class Attention(nn.Module):
    """Attention with a bias that depends on the distance, and is shared by all samples and blocks."""

    def __init__(self, has_table):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(9, 1) if has_table else None

    def forward(self, hidden, bias=None):
        if bias is None:
            place = torch.arange(hidden.shape[1])
            bias = self.table((place[None] - place[:, None]).clamp(-4, 4) + 4).squeeze(-1).cumsum(-1)
        weights = (self.query(hidden) @ self.key(hidden).mT + bias).softmax(-1)
        return hidden + weights @ hidden, bias


class Stack(nn.Module):
    """Blocks that share the bias of the first."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Attention(True), Attention(False)])

    def forward(self, hidden):
        bias = None
        for block in self.blocks:
            hidden, bias = block(hidden, bias)
        return hidden


class ClassToken(nn.Module):
    """Puts a learned vector before each sequence, and adds positions."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(WIDTH))
        self.features, self.positions = nn.Linear(WIDTH, WIDTH), nn.Embedding(LENGTH + 1, WIDTH)
        self.register_buffer("places", torch.arange(LENGTH + 1)[None])

    def forward(self, hidden):
        tokens = self.token.expand(len(hidden), 1, -1)
        return torch.cat([tokens, self.features(hidden)], dim=1) + self.positions(self.places)


class Experts(nn.Module):
    """Sends each token of the batch to one of several layers."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden):
        tokens = hidden.reshape(-1, WIDTH)
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            (mine,) = (chosen == number).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, mine, (weight[mine, None] * expert(tokens[mine])).to(mixed.dtype))
        return mixed.view(hidden.shape)


class Windows(nn.Module):
    """Folds windows of each sample into the batch axis."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))

    def forward(self, hidden):
        return self.inside(hidden.reshape(-1, 2, WIDTH)).cumsum(1).view(hidden.shape)


class SharedFeatures(nn.Module):
    """Gives a layer features that all samples share."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, WIDTH)
        self.register_buffer("places", torch.randn(1, LENGTH, 3))

    def forward(self, hidden):
        return hidden * self.layer(self.places)


class Flattens(nn.Module):
    """Gives a layer all tokens of the batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return self.layer(hidden.flatten(0, 1)).view(hidden.shape).sin()


class AsManyPlaces(nn.Module):
    """Takes weighted means of each sequence, by a table with as many rows of places as the batch has samples."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 1)
        self.register_buffer("places", torch.randint(9, (SAMPLES, LENGTH)))

    def forward(self, hidden):
        return (self.table(self.places).squeeze(-1).softmax(-1) @ hidden).sum(1)


class OwnParameter(nn.Module):
    """Uses a parameter in a way that is not followed, in a module that has other layers."""

    def __init__(self):
        super().__init__()
        self.mix, self.layer = nn.Parameter(torch.randn(LENGTH, LENGTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return self.mix.softmax(-1) @ self.layer(hidden)


class TokenAndPositions(nn.Module):
    """Puts a learned vector before each sequence and adds a table, as vision transformers do."""

    def __init__(self):
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 5, WIDTH))
        self.features = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        hidden = torch.cat([self.token.expand(len(hidden), -1, -1), self.features(hidden)], dim=1)
        return hidden + self.positions[:, : hidden.shape[1]]


class LearnedTemperature(nn.Module):
    """Multiplies scores by the exponential of a parameter, as CLIP does."""

    def __init__(self):
        super().__init__()
        self.log_scale, self.query = nn.Parameter(torch.tensor(0.5)), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return (self.log_scale.exp() * self.query(hidden) @ hidden.mT).softmax(-1) @ hidden


class ScalesInDict(nn.Module):
    """Scales the output of a frozen layer by a parameter in a ParameterDict, as IA3 does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.scales = nn.ParameterDict({"default": nn.Parameter(torch.rand(WIDTH))})

    def forward(self, hidden):
        return self.layer(hidden) * self.scales["default"]


class SequenceFirst(nn.Module):
    """Calls a layer with the sequence on axis 0."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden):
        output = self.layer(hidden.transpose(0, 1))
        return (output[0] if isinstance(output, tuple) else output).transpose(0, 1)


class ShiftedWindows(nn.Module):
    """Attention in windows that are shifted and folded into the batch axis, with a table of biases, as in Swin."""

    def __init__(self):
        super().__init__()
        self.pairs, self.table = nn.Linear(WIDTH, 2 * WIDTH), nn.Parameter(torch.randn(3))
        self.register_buffer("distances", torch.tensor([[1, 2], [0, 1]]))

    def forward(self, hidden):
        windows = hidden.roll(1, dims=1).reshape(-1, 2, WIDTH)
        query, key = self.pairs(windows).chunk(2, dim=-1)
        weights = (query @ key.mT + self.table[self.distances]).softmax(-1)
        return (weights @ windows).reshape(hidden.shape).roll(-1, dims=1)


class Recomputed(nn.Module):
    """A part whose activations are formed again in the backward pass."""

    def __init__(self, part, use_reentrant):
        super().__init__()
        self.inner, self.use_reentrant = part, use_reentrant

    def forward(self, hidden):
        return checkpoints.checkpoint(self.inner, hidden, use_reentrant=self.use_reentrant)


class FlattensAround(nn.Module):
    """Gives a recomputed part all tokens of the batch, with gradients of the tokens also."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.recomputed = Recomputed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), use_reentrant)

    def forward(self, hidden):
        return self.recomputed(self.layer(hidden.flatten(0, 1))).view(hidden.shape)


class Inside(nn.Module):
    """Holds a part in a list, so that the name of the part has three parts."""

    def __init__(self, part):
        super().__init__()
        self.parts = nn.ModuleList([part])

    def forward(self, hidden):
        return self.parts[0](hidden).tanh()


class Model(nn.Module):
    """A part between layers that have rules."""

    def __init__(self, part):
        super().__init__()
        self.words, self.part, self.head = nn.Embedding(11, WIDTH), part, nn.Linear(WIDTH, 3)

    def forward(self, words):
        return self.head(self.part(self.words(words)))


class TiedHead(nn.Module):
    """The last layer is a function of the parameter of the first."""

    def __init__(self):
        super().__init__()
        self.words, self.hidden = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, words):
        return F.linear(self.hidden(self.words(words)).sin(), self.words.weight)


class Shares(nn.Module):
    """A layer is called by two parts that need the fallback, and by the model."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.one, self.two = Flattens(), Flattens()
        self.layer = self.two.layer = self.one.layer

    def forward(self, words):
        hidden = self.one(self.words(words))
        return self.layer(hidden) + self.two(hidden)


CASES = {
    "relative positions": (lambda: Model(Stack()), ["part"]),
    "class token": (lambda: Model(ClassToken()), ["part"]),
    "experts": (lambda: Model(Experts()), ["part"]),
    "windows": (lambda: Model(Windows()), ["part"]),
    "shifted windows": (lambda: Model(ShiftedWindows()), ["part"]),
    "token and positions": (lambda: Model(TokenAndPositions()), []),
    "learned temperature": (lambda: Model(LearnedTemperature()), []),
    "scales in a dict": (lambda: Model(ScalesInDict()), ["part"]),
    "sequence-first recurrent": (lambda: Model(SequenceFirst(nn.GRU(WIDTH, WIDTH))), []),
    "sequence-first attention": (
        lambda: Model(SequenceFirst(nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0))),
        ["part"],
    ),
    "flattened": (lambda: Model(Inside(Flattens())), ["part.parts.0"]),
    "shared features": (lambda: Model(SharedFeatures()), ["part"]),
    "as many places as samples": (lambda: Model(AsManyPlaces()), ["part"]),
    "own parameter": (lambda: Model(Inside(OwnParameter())), ["part.parts.0"]),
    "tied head": (TiedHead, [""]),
    "a layer of two units": (Shares, ["one", "two"]),
    "inside a checkpoint": (lambda: Model(Recomputed(OwnParameter(), False)), ["part.inner"]),
    "inside a reentrant checkpoint": (lambda: Model(Recomputed(OwnParameter(), True)), ["part.inner"]),
    "around a checkpoint": (lambda: Model(FlattensAround(False)), ["part"]),
    "around a reentrant checkpoint": (lambda: Model(FlattensAround(True)), ["part"]),
}


def words(length=LENGTH, samples=SAMPLES):
    return {"words": torch.randint(11, (samples, length))}


def weighted_loss(output, weights):
    return (output.flatten(1).sin().sum(1) * weights).sum()


def units_in(seen):
    """Names of the units in the notices, in order."""
    texts = [str(one.message) for one in seen if "[DPE028]" in str(one.message)]
    return sorted(re.search(r"through (?:'(.*?)'|the model) \(", text).group(1) or "" for text in texts)


def for_loop(model):
    """A copy for the loop over samples, which cannot run reentrant checkpoints."""
    model = copy.deepcopy(model)
    for part in model.modules():
        if isinstance(part, Recomputed):
            part.use_reentrant = False
    return model


def assert_clipped(model, found_by, inputs, weights=WEIGHTS):
    """Compares a step with a loop over samples on a copy."""
    gradients = per_sample_gradients(for_loop(model), weighted_loss, inputs, weights)
    model.zero_grad()
    weighted_loss(model(**inputs), weights).backward()
    found_by.clip_and_accumulate()
    found_by.pre_step()
    truth = clipped_sum(gradients, found_by.norm_clipper.max_norm)
    found = torch.cat([model.get_parameter(name).grad.flatten() for name in truth])
    expected = torch.cat([one.flatten() for one in truth.values()])
    assert (found - expected).norm() < 1e-5 * expected.norm()


def clipper(model, inputs):
    """A clipper with a clipping norm between those of the samples."""
    gradients = per_sample_gradients(for_loop(model), weighted_loss, inputs, WEIGHTS)
    return PerSampleGradientClipper(model, Flat(flat_norms(gradients).median().item()), loss_reduction="sum")


@pytest.mark.one_in(2, "name", others="slow")
@pytest.mark.parametrize("name", CASES)
def test_the_smallest_part_is_a_unit_and_the_sum_is_that_of_a_loop_over_samples(name):
    make, expected = CASES[name]
    model = make().double()
    clipped = clipper(model, words())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert_clipped(model, clipped, words())
    assert units_in(seen) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_clipped(model, clipped, words())


@pytest.mark.one_in(4, "autocast", "name", others="slow")
@pytest.mark.filterwarnings("ignore:.*DPE028")
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", CASES)
def test_the_sum_over_two_backward_passes_is_that_of_a_loop_over_samples(name, autocast):
    model, inputs, weights = CASES[name][0](), words(), WEIGHTS.float()
    gradients = per_sample_gradients(for_loop(model).double(), weighted_loss, inputs, WEIGHTS)
    max_norm = flat_norms(gradients).median().item()
    clipped = PerSampleGradientClipper(model, Flat(max_norm), loss_reduction="sum")
    for part in (slice(0, 2), slice(2, SAMPLES)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(inputs["words"][part])
        weighted_loss(output.float(), weights[part]).backward()
        clipped.clip_and_accumulate()
    clipped.pre_step()
    truth = clipped_sum(gradients, max_norm)
    found = torch.cat([model.get_parameter(name).grad.flatten() for name in truth])
    expected = torch.cat([one.flatten() for one in truth.values()])
    assert (found - expected).norm() < (0.05 if autocast else 1e-5) * expected.norm()


@pytest.mark.filterwarnings("ignore:.*DPE028")
@pytest.mark.parametrize("name", ["relative positions", "windows", "flattened"])
def test_a_batch_as_long_as_its_sequences_does_not_hide_an_axis(name):
    model = CASES[name][0]().double()
    clipped = clipper(model, words(length=4))
    for length in (6, 4):
        assert_clipped(model, clipped, words(length, samples=length), torch.rand(length).double() + 0.1)


@pytest.mark.one_in(3, "name", others="slow")
@pytest.mark.filterwarnings("ignore:.*DPE028")
@pytest.mark.parametrize("name", CASES)
def test_a_first_batch_without_samples_adds_nothing_and_leaves_the_choice_open(name):
    make, expected = CASES[name]
    model = make().double()
    clipped = clipper(model, words())
    for _ in range(2):
        weighted_loss(model(**words(samples=0)), WEIGHTS[:0]).backward()
        clipped.clip_and_accumulate()
        clipped.pre_step()
        assert not any(p.grad.any() for p in model.parameters() if p.requires_grad)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert_clipped(model, clipped, words())
    assert units_in(seen) == expected


@pytest.mark.filterwarnings("ignore:.*DPE028")
def test_a_first_batch_of_one_sample_leaves_the_choice_open():
    model = Model(SharedFeatures()).double()
    clipped = clipper(model, words())
    assert_clipped(model, clipped, words(samples=1), WEIGHTS[:1])
    assert_clipped(model, clipped, words())


@pytest.mark.filterwarnings("ignore:.*weight_norm", "ignore:.*DPE028")
def test_a_weight_that_a_hook_computes_has_the_gradient_of_one_that_is_parametrized():
    grads = []
    for weight_norm in (nn.utils.weight_norm, nn.utils.parametrizations.weight_norm):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 3))
        weight_norm(model[1])
        clipped = PerSampleGradientClipper(model, Flat(0.5), loss_reduction="sum")
        weighted_loss(model(words()["words"]), WEIGHTS.float()).backward()
        clipped.clip_and_accumulate()
        clipped.pre_step()
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*grads)


class DrawsAndFlattens(nn.Module):
    """Multiplies by a dropout mask, or by one that is given, and flattens."""

    def __init__(self):
        super().__init__()
        self.inside, self.masks = Flattens(), None

    def forward(self, hidden, masks=None):
        masks = F.dropout(torch.ones_like(hidden), 0.5) if masks is None else masks
        flat = (self.inside.layer(hidden.flatten(0, 1)) * masks.flatten(0, 1)).sin()
        return flat.view(hidden.shape), masks


class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.part, self.head = nn.Embedding(11, WIDTH), DrawsAndFlattens(), nn.Linear(WIDTH, 3)

    def forward(self, words, masks=None):
        hidden, masks = self.part(self.words(words), masks)
        return self.head(hidden), masks


@pytest.mark.filterwarnings("ignore:.*DPE028")
def test_a_unit_is_clipped_with_the_random_numbers_that_the_loss_saw():
    model = WithDropout().double()
    clipped = PerSampleGradientClipper(model, Flat(1.0), loss_reduction="sum")
    for _ in range(2):
        inputs = words()
        model.zero_grad()
        output, masks = model(**inputs)
        given = {**inputs, "masks": masks.detach()}
        gradients = per_sample_gradients(copy.deepcopy(model), lambda o, w: weighted_loss(o[0], w), given, WEIGHTS)
        weighted_loss(output, WEIGHTS).backward()
        clipped.clip_and_accumulate()
        clipped.pre_step()
        truth = clipped_sum(gradients, 1.0)
        found = torch.cat([model.get_parameter(name).grad.flatten() for name in truth])
        expected = torch.cat([one.flatten() for one in truth.values()])
        assert (found - expected).norm() < 1e-5 * expected.norm()


class Centres(nn.Module):
    """Mixes the samples of a batch, in a module that no rule covers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return self.layer((hidden - hidden.mean(0)).flatten(0, 1)).view(hidden.shape)


@pytest.mark.parametrize(
    ("part", "code"),
    [(lambda: Centres(), "DPE018"), (lambda: nn.Sequential(Centres(), Flattens()), "DPE018")],
    ids=["alone", "beside one that a unit accepts"],
)
def test_a_part_that_mixes_samples_is_rejected_by_the_error_of_its_layer(part, code):
    model = Model(part()).double()
    clipped = PerSampleGradientClipper(model, Flat(1.0), loss_reduction="sum")
    with warnings.catch_warnings(record=True) as seen, pytest.raises(PrivacyError, match=code):
        weighted_loss(model(**words()), WEIGHTS).backward()
        clipped.clip_and_accumulate()
    assert units_in(seen) == []


def test_the_notice_says_which_part_why_and_what_it_costs():
    model = Model(Inside(Flattens()))
    PerSampleGradientClipper(model, Flat(1.0), loss_reduction="sum")
    with pytest.warns(PrivacyWarning, match="DPE028") as seen:
        model(**words())
    (text,) = [str(one.message) for one in seen]
    assert "'part.parts.0' (Flattens)" in text
    assert "axis 0 of the output of 'part.parts.0.layer' is not the batch" in text
    assert "another forward and backward pass" in text
    size = sum(p.numel() for p in model.part.parameters()) * 4 / 2**20
    assert f"{size:.3g} MiB for the gradients of each sample" in text
    assert str(SAMPLES) not in text.replace(f"{size:.3g}", "")  # the size of a batch is private


@pytest.mark.filterwarnings("ignore:.*DPE028")
def test_the_choice_changes_no_state_and_the_hooks_leave_the_model_as_it_was():
    model = WithDropout()
    clipped = PerSampleGradientClipper(model, Flat(1.0), loss_reduction="sum")
    assert list(inspect.signature(model.forward).parameters) == ["words", "masks"]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert "forward" not in vars(other)
    inputs, masks, states = words(), [], []
    for _ in range(2):  # the units are chosen in the first pass
        torch.manual_seed(1)
        masks.append(model(**inputs)[1])
        states.append(torch.get_rng_state())
    assert torch.equal(*masks) and torch.equal(*states)
    clipped.detach()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_of_plain_layers_runs_once():
    model, calls = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)), []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    PerSampleGradientClipper(model, Flat(1.0), loss_reduction="sum")
    model(torch.randn(SAMPLES, WIDTH))
    assert len(calls) == 1


def private_run(model):
    tokens = torch.randint(11, (64, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:] % 3), batch_size=16)
    optimizer, engine = torch.optim.SGD(model.parameters(), lr=0.1), PrivacyEngine(seed=7)
    return engine, *engine.make_private(model, optimizer, loader, noise_multiplier=1.0, max_grad_norm=1.0)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]).mT, batch[1]).backward()
    optimizer.step()


def fails(*_):
    raise AssertionError("units were chosen again")


@pytest.mark.filterwarnings("ignore:.*DPE028")
@pytest.mark.parametrize("make", [Flattens, lambda: Recomputed(OwnParameter(), True)], ids=["flattened", "recomputed"])
def test_a_resumed_run_has_the_units_of_the_saved_one(tmp_path, monkeypatch, make):
    engine, model, optimizer, loader = private_run(Model(make()))
    step(model, optimizer, next(iter(loader)))
    checkpoint.save(tmp_path / "run", engine)
    step(model, optimizer, next(iter(loader)))

    again, other, its_optimizer, its_loader = private_run(Model(make()))
    checkpoint.load(tmp_path / "run", again)
    monkeypatch.setattr("dpengine.independence.choose_units._Trial.obstacles", fails)
    step(other, its_optimizer, next(iter(its_loader)))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.filterwarnings("ignore:.*DPE028")
def test_processes_get_the_units_of_all():
    model = Model(nn.Sequential(Flattens(), Inside(OwnParameter())))
    units = share_units(model, words(), others=[("part.1",), None])
    assert units == ("part.0", "part.1.parts.0")  # a process has not chosen yet
    assert share_units(model, words(), others=[("part.1",), ()]) == ("part.0", "part.1")
