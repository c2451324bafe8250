"""Models with parts that no rule of a layer covers, between layers that have rules."""

import torch
from case_models import Parts
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint as checkpoints

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
    """Computes weighted means of each sequence with a table that has as many rows as the batch has samples."""
    run = lambda m, hidden: (m.table(m.places).squeeze(-1).softmax(-1) @ hidden).sum(1)  # noqa: E731
    m = Parts(run, table=nn.Embedding(9, 1))
    m.register_buffer("places", torch.randint(9, (SAMPLES, LENGTH)))
    return m


def own_parameter():
    """Uses a parameter in an operation that is not tracked, next to another layer."""
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
