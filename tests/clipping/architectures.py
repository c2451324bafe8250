"""Random architectures, for hypothesis: reuse, tying, freezing, branches, odd shapes, many kinds of layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

ROWS = 4
VOCABULARY = 6


class Residual(nn.Module):
    """A branch around a layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Own(nn.Module):
    """A layer with its own scale and shift parameters and a child module."""

    def __init__(self, width):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(1, 1, width))
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return self.inner(x * self.scale) + self.shift


class Unknown(nn.Module):
    """A layer of a class without a registered rule."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.power = nn.Parameter(torch.randn(width)), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return torch.tanh(x) * self.weight + self.power * x.mean(dim=-1, keepdim=True)


class First(nn.Module):
    """Returns the first output of a layer with several outputs."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Attend(nn.Module):
    """Self attention."""

    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2 if width % 2 == 0 else 1, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Along(nn.Module):
    """A convolution over the time axis."""

    def __init__(self, width, groups):
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=width if groups else 1)

    def forward(self, x):
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


LAYERS = {
    "linear": lambda width: nn.Linear(width, width),
    "linear-without-bias": lambda width: nn.Linear(width, width, bias=False),
    "in-place": lambda width: nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True)),
    "layer-norm": lambda width: nn.LayerNorm(width),
    "rms-norm": lambda width: nn.RMSNorm(width),
    "prelu": lambda width: nn.PReLU(),
    "residual": lambda width: Residual(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())),
    "own-parameters": Own,
    "unknown": Unknown,
    "conv": lambda width: Along(width, groups=False),
    "depthwise": lambda width: Along(width, groups=True),
    "lstm": lambda width: First(nn.LSTM(width, width, batch_first=True)),
    "gru": lambda width: First(nn.GRU(width, width, batch_first=True)),
    "attention": Attend,
}


class Model(nn.Module):
    """An embedding or projection, a stack in which layers may be reused, and a head."""

    def __init__(self, plan):
        super().__init__()
        self.entry = nn.Embedding(VOCABULARY, plan.width) if plan.tokens else nn.Linear(3, plan.width)
        self.layers = nn.ModuleList(LAYERS[name](plan.width) for name in plan.layers)
        self.order = [*range(len(plan.layers)), *(i % len(plan.layers) for i in plan.again)]
        self.head = nn.Linear(plan.width, VOCABULARY)
        if plan.tied and plan.tokens:
            self.head.weight = self.entry.weight
        for i, parameter in enumerate(self.parameters()):
            parameter.requires_grad_(i not in plan.frozen)
        self.head.bias.requires_grad_(True)  # never all frozen

    def forward(self, x):
        x = self.entry(x)
        for i in self.order:
            x = torch.tanh(self.layers[i](x))
        return self.head(x)


def _per_token(output, x, reduce):
    targets = (torch.arange(output.shape[1]) % VOCABULARY).expand(output.shape[:2])
    each = F.cross_entropy(output.transpose(1, 2), targets, reduction="none").mean(dim=1)
    return each.mean() if reduce == "mean" else each.sum()


LOSSES = {
    "classes": lambda output, x, reduce: F.cross_entropy(
        output.mean(dim=1), torch.ones(len(output), dtype=torch.int64), reduction=reduce
    ),
    "column": lambda output, x, reduce: F.mse_loss(
        output.sum(dim=(1, 2)).unsqueeze(1), torch.ones(len(output), 1, dtype=output.dtype), reduction=reduce
    ),
    "tokens": _per_token,
}


@dataclass(frozen=True)
class Plan:
    """A random model, its data and its loss."""

    layers: list[str]
    again: list[int]
    width: int
    time: int
    tokens: bool
    tied: bool
    frozen: set[int]
    loss: str
    reduction: str
    size: float
    seed: int

    def build(self):
        """Returns the model in float64, and inputs of ``ROWS`` samples."""
        torch.manual_seed(self.seed)
        model = Model(self).double()
        if self.tokens:
            return model, torch.randint(0, VOCABULARY, (ROWS, self.time))
        return model, self.size * torch.randn(ROWS, self.time, 3, dtype=torch.float64)

    def loss_of(self, output):
        """The loss of a batch."""
        return LOSSES[self.loss](output, None, self.reduction)


def plans():
    """A strategy for plans."""
    return st.builds(
        Plan,
        layers=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4),
        again=st.lists(st.integers(0, 3), max_size=2),
        width=st.integers(1, 6),
        time=st.integers(1, 5),
        tokens=st.booleans(),
        tied=st.booleans(),
        frozen=st.sets(st.integers(0, 12), max_size=4),
        loss=st.sampled_from(sorted(LOSSES)),
        reduction=st.sampled_from(["mean", "sum"]),
        size=st.sampled_from([0.01, 1.0, 100.0]),
        seed=st.integers(0, 2**20),
    )
