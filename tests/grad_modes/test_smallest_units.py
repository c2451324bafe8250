"""Mode ``auto``: the smallest parts of a model that no rule of a layer covers run each sample alone."""

import copy
import inspect
import pickle
import re
import warnings

import pytest
import torch
from case_models import Parts
from inside_parts import share_units
from oracle import assert_clips_as_loop, assert_sum_is_that_of_loop, clipper_at_median
from reference import per_sample_gradients
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


def blocks():
    """Blocks that share the bias of the first."""

    def run(m, hidden):
        hidden, bias = m.one(hidden)
        return m.two(hidden, bias)[0]

    return Parts(run, one=Attention(True), two=Attention(False))


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


def windows():
    """Folds windows of each sample into the batch axis."""
    run = lambda m, hidden: m.inside(hidden.reshape(-1, 2, WIDTH)).cumsum(1).view(hidden.shape)  # noqa: E731
    return Parts(run, inside=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)))


def shared_features():
    """Gives a layer features that all samples share."""
    m = Parts(lambda m, hidden: hidden * m.layer(m.places), layer=nn.Linear(3, WIDTH))
    m.register_buffer("places", torch.randn(1, LENGTH, 3))
    return m


class Flattens(nn.Module):
    """Gives a layer all tokens of the batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return self.layer(hidden.flatten(0, 1)).view(hidden.shape).sin()


def as_many_places():
    """Takes weighted means of each sequence, by a table with as many rows of places as the batch has samples."""
    run = lambda m, hidden: (m.table(m.places).squeeze(-1).softmax(-1) @ hidden).sum(1)  # noqa: E731
    m = Parts(run, table=nn.Embedding(9, 1))
    m.register_buffer("places", torch.randint(9, (SAMPLES, LENGTH)))
    return m


def own_parameter():
    """Uses a parameter in a way that is not followed, in a module that has other layers."""
    run = lambda m, hidden: m.mix.softmax(-1) @ m.layer(hidden)  # noqa: E731
    return Parts(run, mix=nn.Parameter(torch.randn(LENGTH, LENGTH)), layer=nn.Linear(WIDTH, WIDTH))


def token_and_positions():
    """Puts a learned vector before each sequence and adds a table, as vision transformers do."""

    def run(m, hidden):
        hidden = torch.cat([m.token.expand(len(hidden), -1, -1), m.features(hidden)], dim=1)
        return hidden + m.positions[:, : hidden.shape[1]]

    tables = {"token": nn.Parameter(torch.randn(1, 1, WIDTH)), "positions": nn.Parameter(torch.randn(1, 5, WIDTH))}
    return Parts(run, **tables, features=nn.Linear(WIDTH, WIDTH))


def learned_temperature():
    """Multiplies scores by the exponential of a parameter, as CLIP does."""
    run = lambda m, hidden: (m.log_scale.exp() * m.query(hidden) @ hidden.mT).softmax(-1) @ hidden  # noqa: E731
    return Parts(run, log_scale=nn.Parameter(torch.tensor(0.5)), query=nn.Linear(WIDTH, WIDTH))


def scales_in_dict():
    """Scales the output of a frozen layer by a parameter in a ParameterDict, as IA3 does."""
    run = lambda m, hidden: m.layer(hidden) * m.scales["default"]  # noqa: E731
    return Parts(
        run,
        layer=nn.Linear(WIDTH, WIDTH).requires_grad_(False),
        scales=nn.ParameterDict({"default": nn.Parameter(torch.rand(WIDTH))}),
    )


def sequence_first(layer):
    """Calls a layer with the sequence on axis 0."""

    def run(m, hidden):
        output = m.layer(hidden.transpose(0, 1))
        return (output[0] if isinstance(output, tuple) else output).transpose(0, 1)

    return Parts(run, layer=layer)


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


def flattens_around(use_reentrant):
    """Gives a recomputed part all tokens of the batch, with gradients of the tokens also."""
    run = lambda m, hidden: m.recomputed(m.layer(hidden.flatten(0, 1))).view(hidden.shape)  # noqa: E731
    return Parts(
        run,
        layer=nn.Linear(WIDTH, WIDTH),
        recomputed=Recomputed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), use_reentrant),
    )


def in_list(part):
    """Holds a part in a list, so that the name of the part has three parts."""
    return Parts(lambda m, hidden: m.parts[0](hidden).tanh(), parts=nn.ModuleList([part]))


def between_layers(part):
    """A part between layers that have rules."""
    run = lambda m, words: m.head(m.part(m.words(words)))  # noqa: E731
    return Parts(run, words=nn.Embedding(11, WIDTH), part=part, head=nn.Linear(WIDTH, 3))


def tied_head():
    """The last layer is a function of the parameter of the first."""
    run = lambda m, words: F.linear(m.hidden(m.words(words)).sin(), m.words.weight)  # noqa: E731
    return Parts(run, words=nn.Embedding(11, WIDTH), hidden=nn.Linear(WIDTH, WIDTH))


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
    "relative positions": (lambda: between_layers(blocks()), ["part"]),
    "class token": (lambda: between_layers(ClassToken()), ["part"]),
    "experts": (lambda: between_layers(Experts()), ["part"]),
    "windows": (lambda: between_layers(windows()), ["part"]),
    "shifted windows": (lambda: between_layers(ShiftedWindows()), ["part"]),
    "token and positions": (lambda: between_layers(token_and_positions()), []),
    "learned temperature": (lambda: between_layers(learned_temperature()), []),
    "scales in a dict": (lambda: between_layers(scales_in_dict()), ["part"]),
    "sequence-first recurrent": (lambda: between_layers(sequence_first(nn.GRU(WIDTH, WIDTH))), []),
    "sequence-first attention": (
        lambda: between_layers(sequence_first(nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0))),
        ["part"],
    ),
    "flattened": (lambda: between_layers(in_list(Flattens())), ["part.parts.0"]),
    "shared features": (lambda: between_layers(shared_features()), ["part"]),
    "as many places as samples": (lambda: between_layers(as_many_places()), ["part"]),
    "own parameter": (lambda: between_layers(in_list(own_parameter())), ["part.parts.0"]),
    "tied head": (tied_head, [""]),
    "a layer of two units": (Shares, ["one", "two"]),
    "inside a checkpoint": (lambda: between_layers(Recomputed(own_parameter(), False)), ["part.inner"]),
    "inside a reentrant checkpoint": (lambda: between_layers(Recomputed(own_parameter(), True)), ["part.inner"]),
    "around a checkpoint": (lambda: between_layers(flattens_around(False)), ["part"]),
    "around a reentrant checkpoint": (lambda: between_layers(flattens_around(True)), ["part"]),
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
    assert_clips_as_loop(found_by, gradients)


def clipper(model, inputs):
    return clipper_at_median(model, per_sample_gradients(for_loop(model), weighted_loss, inputs, WEIGHTS))


def unit_clipper(model, max_norm=1.0):
    return PerSampleGradientClipper(model, Flat(max_norm), loss_reduction="sum")


def units_of_first_pass(model, clipped):
    """Names of the units that a notice states at the first pass over samples."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert_clipped(model, clipped, words())
    return units_in(seen)


@pytest.mark.one_in(2, "name", others="slow")
@pytest.mark.parametrize("name", CASES)
def test_the_smallest_part_is_a_unit_and_the_sum_is_that_of_a_loop_over_samples(name):
    make, expected = CASES[name]
    model = make().double()
    clipped = clipper(model, words())
    assert units_of_first_pass(model, clipped) == expected
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
    clipped = clipper_at_median(model, gradients)
    for part in (slice(0, 2), slice(2, SAMPLES)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(inputs["words"][part])
        weighted_loss(output.float(), weights[part]).backward()
        clipped.clip_and_accumulate()
    assert_sum_is_that_of_loop(clipped, gradients, bound=0.05 if autocast else 1e-5)


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
    assert units_of_first_pass(model, clipped) == expected


@pytest.mark.filterwarnings("ignore:.*DPE028")
def test_a_first_batch_of_one_sample_leaves_the_choice_open():
    model = between_layers(shared_features()).double()
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
        clipped = unit_clipper(model, 0.5)
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
    clipped = unit_clipper(model)
    for _ in range(2):
        inputs = words()
        model.zero_grad()
        output, masks = model(**inputs)
        given = {**inputs, "masks": masks.detach()}
        gradients = per_sample_gradients(copy.deepcopy(model), lambda o, w: weighted_loss(o[0], w), given, WEIGHTS)
        weighted_loss(output, WEIGHTS).backward()
        assert_clips_as_loop(clipped, gradients)


def centres():
    """Mixes the samples of a batch, in a module that no rule covers."""
    run = lambda m, hidden: m.layer((hidden - hidden.mean(0)).flatten(0, 1)).view(hidden.shape)  # noqa: E731
    return Parts(run, layer=nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("others", [(), (Flattens,)], ids=["single", "beside one that a unit accepts"])
def test_a_part_that_mixes_samples_is_rejected_by_the_error_of_its_layer(others):
    model = between_layers(nn.Sequential(centres(), *(make() for make in others))).double()
    clipped = unit_clipper(model)
    with warnings.catch_warnings(record=True) as seen, pytest.raises(PrivacyError, match="DPE018"):
        weighted_loss(model(**words()), WEIGHTS).backward()
        clipped.clip_and_accumulate()
    assert units_in(seen) == []


def test_the_notice_says_which_part_why_and_what_it_costs():
    model = between_layers(in_list(Flattens()))
    unit_clipper(model)
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
    clipped = unit_clipper(model)
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
    unit_clipper(model)
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
@pytest.mark.parametrize("make", [Flattens, lambda: Recomputed(own_parameter(), True)], ids=["flattened", "recomputed"])
def test_a_resumed_run_has_the_units_of_the_saved_one(tmp_path, monkeypatch, make):
    engine, model, optimizer, loader = private_run(between_layers(make()))
    step(model, optimizer, next(iter(loader)))
    checkpoint.save(tmp_path / "run", engine)
    step(model, optimizer, next(iter(loader)))

    again, other, its_optimizer, its_loader = private_run(between_layers(make()))
    checkpoint.load(tmp_path / "run", again)
    monkeypatch.setattr("dpengine.independence.choose_units._Trial.obstacles", fails)
    step(other, its_optimizer, next(iter(its_loader)))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.filterwarnings("ignore:.*DPE028")
def test_processes_get_the_units_of_all():
    model = between_layers(nn.Sequential(Flattens(), in_list(own_parameter())))
    units = share_units(model, words(), others=[("part.1",), None])
    assert units == ("part.0", "part.1.parts.0")  # a process has not chosen yet
    assert share_units(model, words(), others=[("part.1",), ()]) == ("part.0", "part.1")
