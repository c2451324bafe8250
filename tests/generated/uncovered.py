"""Modules that rules of single layers do not cover, though the samples of a batch stay independent.

Mode ``auto`` runs the samples of such a part alone where it must, and mode ``whole_model`` always. The other modes may
reject it. All but the class tokens keep the shape of the signal: ``(draw, shape of a row) -> module``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from generated.draws import Draw
from generated.layers_of import shape_after
from generated.modules import Checkpointed, Gated, Inner, Residual, Twice
from torch import nn

Shape = tuple[int, ...]
Make = Callable[[Draw, Shape], nn.Module]


class RelativeAttention(nn.Module):
    """Attention with a learned bias by distance, which all samples and later blocks share."""

    def __init__(self, width: int, heads: int, *, has_table: bool):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.table = nn.Embedding(9, heads) if has_table else None

    def forward(self, x, bias=None):
        if bias is None:
            place = torch.arange(x.shape[1])
            bias = self.table((place[None] - place[:, None]).clamp(-4, 4) + 4).permute(2, 0, 1).unsqueeze(0)
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        weights = (q @ k.mT + bias.to(q.dtype)).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2), bias


class RelativeStack(nn.Module):
    """Blocks of attention that share the bias of the first."""

    def __init__(self, width: int, heads: int, blocks: int):
        super().__init__()
        self.blocks = nn.ModuleList([RelativeAttention(width, heads, has_table=i == 0) for i in range(blocks)])
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        bias = None
        for block in self.blocks:
            change, bias = block(self.norm(x), bias)
            x = x + change
        return x


class ClassToken(nn.Module):
    """A class token and positions that are broadcast over the batch, beside a child."""

    def __init__(self, length: int, width: int, kind: str):
        super().__init__()
        self.kind = kind
        self.token = nn.Parameter(torch.randn(width) if kind == "vector" else torch.randn(1, 1, width))
        self.features = nn.Linear(width, width)
        self.positions = nn.Parameter(torch.randn(1, length + 1, width)) if kind == "parameter" else None
        self.places = None if kind == "parameter" else nn.Embedding(length + 1, width)
        self.register_buffer("numbers", torch.arange(length + 1).unsqueeze(0))

    def forward(self, x):
        token = self.token.expand(len(x), 1, -1)
        x = torch.cat([token, self.features(x)], dim=1)
        return x + (self.positions if self.places is None else self.places(self.numbers))

    def extra_repr(self):
        return self.kind


class Temperature(nn.Module):
    """Products of two projections divided by a learned temperature."""

    def __init__(self, width: int, *, logarithm: bool):
        super().__init__()
        self.logarithm = logarithm
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        scale = self.temperature.exp() if self.logarithm else 1 / (1 + self.temperature.square())
        left, right = (F.normalize(side(x), dim=-1, eps=0.1) for side in (self.left, self.right))
        return x * torch.sigmoid(scale * (left * right).sum(-1, keepdim=True))


class OwnMatrix(nn.Module):
    """Multiplies features by a matrix of the module itself, after a child."""

    def __init__(self, length: int, width: int):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(length, length))
        self.gain = nn.Parameter(torch.randn(width))
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return torch.einsum("st,btf->bsf", self.mix.softmax(-1), self.inner(x)) * self.gain.tanh()


class Flattened(Inner):
    """Flattens the positions of all samples into the batch axis."""

    def forward(self, x):
        return self.inner(x.reshape(-1, x.shape[-1])).reshape(x.shape)


class Folded(Inner):
    """Folds windows along the first position axis into the batch axis, after a roll by ``shift`` positions."""

    def __init__(self, inner: nn.Module, window: int, shift: int):
        super().__init__(inner)
        self.window, self.shift = window, shift

    def forward(self, x):
        moved = x.roll(-self.shift, 1)
        windows = moved.reshape(-1, self.window, *x.shape[2:])
        return self.inner(windows).reshape(x.shape).roll(self.shift, 1)

    def extra_repr(self):
        return f"window={self.window}, shift={self.shift}"


class FoldedImage(Inner):
    """Folds square windows of an image into the batch axis, as sequences."""

    def __init__(self, inner: nn.Module, window: int):
        super().__init__(inner)
        self.window = window

    def forward(self, x):
        rows, channels, height, width = x.shape
        side = self.window
        parts = x.reshape(rows, channels, height // side, side, width // side, side)
        windows = parts.permute(0, 2, 4, 3, 5, 1).reshape(-1, side * side, channels)
        parts = self.inner(windows).reshape(rows, height // side, width // side, side, side, channels)
        return parts.permute(0, 5, 1, 3, 2, 4).reshape(x.shape)


class WindowAttention(nn.Module):
    """Attention inside windows with a table of biases, one for each pair of positions."""

    def __init__(self, places: int, width: int):
        super().__init__()
        self.packed = nn.Linear(width, 3 * width)
        self.table = nn.Parameter(torch.randn(places, places))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        q, k, v = self.packed(x).chunk(3, dim=-1)
        return self.norm(x + (q @ k.mT + self.table).softmax(-1) @ v)


class Experts(nn.Module):
    """Routes each position to the best of several layers."""

    def __init__(self, width: int, best: int):
        super().__init__()
        self.best = best
        self.gate = nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(rows).softmax(-1).topk(self.best, dim=-1)
        mixed = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mine, rank = (chosen == number).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, mine, weights[mine, rank, None] * expert(rows[mine]))
        return mixed.reshape(x.shape)

    def extra_repr(self):
        return f"best={self.best}"


class StackedExperts(nn.Module):
    """Routes each position to the best of several layers, whose weights are one parameter."""

    def __init__(self, width: int):
        super().__init__()
        self.gate = nn.Linear(width, 3, bias=False)
        self.experts = nn.Parameter(torch.randn(3, width, width) / math.sqrt(width))

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(rows).softmax(-1).max(-1, keepdim=True)
        mask = F.one_hot(chosen.squeeze(-1), 3).to(rows.dtype)
        return (weights * torch.einsum("ne,nf,efo->no", mask, rows, self.experts)).reshape(x.shape)


class ByTable(nn.Module):
    """A dense layer with the weight of another module, which is not its child."""

    def __init__(self, owner: nn.Module):
        super().__init__()
        self._owner = (owner,)

    def forward(self, x):
        return F.linear(x, self._owner[0].weight)


class Normalized(Inner):
    """Cosines between the signal and the rows of a child's weight."""

    def forward(self, x):
        weight = F.normalize(self.inner.weight, dim=-1)
        return self.inner(x) + F.linear(F.normalize(x, dim=-1, eps=0.1), weight)


class SharedTable(nn.Module):
    """A table of distances whose rows several blocks project by their own layers."""

    def __init__(self, width: int):
        super().__init__()
        self.table = nn.Embedding(7, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x):
        rows = self.norm(self.table.weight)
        place = torch.arange(x.shape[1])
        index = (place[None] - place[:, None]).clamp(-3, 3) + 3
        for block in self.blocks:
            scores = (block(x) @ block(rows).mT).gather(-1, index.expand(len(x), -1, -1))
            x = x + scores.softmax(-1) @ x
        return x


class Scaled(nn.Module):
    """A layer whose output is scaled by a vector of its parent."""

    def __init__(self, width: int):
        super().__init__()
        self.vectors = nn.ParameterDict({"default": nn.Parameter(torch.randn(1, width))})
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return self.inner(x) * self.vectors["default"].flatten()


class SharedMatrices(nn.Module):
    """Layers that are changed by fixed random matrices, which they share, and by one vector each."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.inside = nn.ParameterList(nn.Parameter(torch.randn(rank)) for _ in range(2))
        self.outside = nn.ParameterList(nn.Parameter(torch.randn(width)) for _ in range(2))
        self.register_buffer("down", torch.randn(rank, width) / math.sqrt(width))
        self.register_buffer("up", torch.randn(width, rank))

    def forward(self, x):
        for layer, inside, outside in zip(self.layers, self.inside, self.outside, strict=True):
            change = outside * F.linear(inside * F.linear(x, self.down), self.up)
            x = torch.tanh(layer(x) + change)
        return x


class Scan(nn.Module):
    """A state that decays by a learned table, step by step, with the weight of a child used by a function."""

    def __init__(self, width: int, states: int):
        super().__init__()
        self.decay = nn.Parameter(torch.randn(width, states))
        self.skip = nn.Parameter(torch.randn(width))
        self.step, self.mix = nn.Linear(width, width), nn.Linear(width, 2 * states, bias=False)
        self.register_buffer("first", torch.zeros(width, states))

    def forward(self, x):
        steps = F.softplus(x @ self.step.weight.mT + self.step.bias)
        enter, leave = self.mix(x).chunk(2, dim=-1)
        state, seen = self.first.to(x.dtype).expand(len(x), -1, -1), []
        for t in range(x.shape[1]):
            kept = torch.exp(-steps[:, t, :, None] * self.decay.exp())
            state = kept * state + steps[:, t, :, None] * enter[:, t, None] * x[:, t, :, None]
            seen.append((state * leave[:, t, None]).sum(-1))
        return torch.stack(seen, dim=1) + self.skip * x


class Prompt(nn.Module):
    """Entries of a whole table before each sequence, removed after a layer that mixes positions."""

    def __init__(self, length: int, width: int):
        super().__init__()
        self.table = nn.Embedding(2, width)
        self.inner = nn.Linear(length + 2, length + 2)

    def forward(self, x):
        prompt = self.table.weight.unsqueeze(0).expand(len(x), -1, -1)
        return self.inner(torch.cat([prompt, x], dim=1).mT).mT[:, 2:]


class TimeFirst(Inner):
    """A layer with time on axis 0, in a batch-first model."""

    def forward(self, x):
        x = x.transpose(0, 1)
        out = self.inner(x, x, x) if isinstance(self.inner, nn.MultiheadAttention) else self.inner(x)
        return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)


class Lent(nn.Module):
    """A layer and its transpose with the same weight."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.back = ByTable(self.inner)

    def forward(self, x):
        return self.back(torch.tanh(self.inner(x)))


def relative_stack(draw, shape):
    return RelativeStack(shape[-1], draw.divisor(shape[-1]), draw.whole(1, 3))


def class_token(draw, shape):
    return ClassToken(*shape, draw.pick(("parameter", "table", "vector")))


def flattened(draw, shape):
    width = shape[-1]
    inner = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width))
    return Flattened(inner[: draw.whole(1, 4)])


def windows(draw, shape):
    window = draw.divisor(shape[0])
    with_bias = len(shape) == 2 and draw.chance(0.5)
    inner = WindowAttention(window, shape[-1]) if with_bias else nn.Linear(shape[-1], shape[-1])
    return Folded(inner, window, draw.whole(0, window - 1))


def windows_of_image(draw, shape):
    window = draw.divisor(math.gcd(*shape[1:]))
    return FoldedImage(WindowAttention(window * window, shape[0]), window)


def experts(draw, shape):
    return Experts(shape[-1], draw.whole(1, 2)) if draw.chance(0.6) else StackedExperts(shape[-1])


def time_first(draw, shape):
    width = shape[-1]
    kinds = {
        "lstm": lambda: nn.LSTM(width, width),
        "gru": lambda: nn.GRU(width, width),
        "attention": lambda: nn.MultiheadAttention(width, draw.divisor(width)),
        "encoder": lambda: nn.TransformerEncoderLayer(width, draw.divisor(width), 6, dropout=0.0, activation="gelu"),
    }
    return TimeFirst(kinds[draw.pick(sorted(kinds))]())


def hooked_norm(draw, shape):
    """Weight normalization by a hook before each forward pass."""
    return nn.utils.weight_norm(nn.Linear(shape[-1], shape[-1]))


EVERY: dict[str, Make] = {
    "temperature": lambda draw, shape: Temperature(shape[-1], logarithm=draw.chance(0.5)),
    "routed": experts,
    "scaled": lambda draw, shape: Scaled(shape[-1]),
    "shared-matrices": lambda draw, shape: SharedMatrices(shape[-1], draw.whole(1, 3)),
    "normalized": lambda draw, shape: Normalized(nn.Linear(shape[-1], shape[-1])),
    "lent": lambda draw, shape: Lent(shape[-1]),
    "hooked-norm": hooked_norm,
}
UNCOVERED: dict[int, dict[str, Make]] = {  # by the number of axes of a sample
    1: EVERY,
    2: {
        **EVERY,
        "relative-stack": relative_stack,
        "class-token": class_token,
        "own-matrix": lambda draw, shape: OwnMatrix(*shape),
        "flattened": flattened,
        "windows": windows,
        "shared-table": lambda draw, shape: SharedTable(shape[-1]),
        "scan": lambda draw, shape: Scan(shape[-1], draw.whole(1, 3)),
        "prompt": lambda draw, shape: Prompt(*shape),
        "time-first": time_first,
    },
    3: {**EVERY, "flattened": flattened, "windows": windows, "windows-of-image": windows_of_image},
    4: {**EVERY, "flattened": flattened},
}
AROUND: dict[str, Callable[[Draw, nn.Module], nn.Module]] = {
    "alone": lambda draw, part: part,
    "residual": lambda draw, part: Residual(part),
    "gated": lambda draw, part: Gated(part),
    "twice": lambda draw, part: Twice(part),
    "checkpoint": lambda draw, part: Checkpointed(part, use_reentrant=draw.chance(0.3)),
    "listed": lambda draw, part: nn.Sequential(nn.Sequential(part), nn.Tanh()),
}


def uncovered(draw: Draw, shape: Shape) -> nn.Module:
    """Returns an uncovered module, sometimes inside a block."""
    part = draw.named(UNCOVERED[len(shape)])(draw, shape)
    around = draw.pick(sorted(AROUND)) if shape_after(part, shape) == shape else "alone"
    draw.used.append(f"around-{around}")
    return AROUND[around](draw, part)
