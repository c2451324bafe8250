"""Small wrappers of layers, and layers without a grad sampler."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Inner(nn.Module):
    """Base class of modules with one child."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner


class First(Inner):
    """Returns the first of several outputs."""

    def forward(self, x):
        return self.inner(x)[0]


class Both(Inner):
    """Passes its input twice: to a bilinear layer, or as the target and the memory of a decoder."""

    def forward(self, x):
        return self.inner(x, x)


class Attend(Inner):
    """Self attention."""

    def __init__(self, inner: nn.Module, need_weights: bool):
        super().__init__(inner)
        self.need_weights = need_weights

    def forward(self, x):
        return self.inner(x, x, x, need_weights=self.need_weights)[0]


class Swapped(Inner):
    """Runs a layer on its input with the last two axes exchanged."""

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Steps(Inner):
    """A recurrent cell, step by step."""

    def forward(self, x):
        state, seen = None, []
        for t in range(x.shape[1]):
            state = self.inner(x[:, t], state)
            seen.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(seen, dim=1)


class Packed(Inner):
    """A recurrent layer on packed samples whose lengths depend on their data."""

    def forward(self, x):
        lengths = 1 + (x[:, 0, 0].detach() > 0).long() * (x.shape[1] - 1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, _ = self.inner(packed)
        return nn.utils.rnn.pad_packed_sequence(output, batch_first=True, total_length=x.shape[1])[0]


class Positions(Inner):
    """Adds position embeddings that all samples share."""

    def __init__(self, inner: nn.Module, axes: int):
        super().__init__(inner)
        self.axes = axes

    def forward(self, x):
        places = torch.arange(x.shape[1])
        return x + self.inner(places if self.axes == 1 else places.unsqueeze(0))


class Residual(Inner):
    """Adds the input to the output of a module."""

    def forward(self, x):
        return x + self.inner(x)


class ResidualInPlace(Inner):
    """Adds the input to the output of a module in place."""

    def forward(self, x):
        y = self.inner(x).clone()
        y += x
        return y


class Gated(Inner):
    """Multiplies the input by a gate computed from it."""

    def forward(self, x):
        return x * torch.sigmoid(self.inner(x))


class Twice(Inner):
    """A module used twice."""

    def forward(self, x):
        return self.inner(torch.tanh(self.inner(x)))


class Concat(nn.Module):
    """Concatenates branches along the feature axis."""

    def __init__(self, branches: list[nn.Module], dim: int):
        super().__init__()
        self.branches, self.dim = nn.ModuleList(branches), dim

    def forward(self, x):
        return torch.cat([branch(x) for branch in self.branches], dim=self.dim)


class Named(nn.Module):
    """Children in a dict, added up in the order of their use."""

    def __init__(self, children: dict[str, nn.Module]):
        super().__init__()
        self.parts = nn.ModuleDict(children)

    def forward(self, x):
        return self.parts["right"](x) - self.parts["left"](x)


class Checkpointed(Inner):
    """A block whose activations are formed again in the backward pass, unless ``plain``."""

    plain = False

    def __init__(self, inner: nn.Module, use_reentrant: bool):
        super().__init__(inner)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        if self.plain:
            return self.inner(x)
        if self.use_reentrant and not x.requires_grad:  # else torch itself gives no gradient
            x = x.detach().requires_grad_()
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)

    def extra_repr(self):
        return f"use_reentrant={self.use_reentrant}"


class Cast(Inner):
    """A block of another precision."""

    def forward(self, x):
        return self.inner(x.to(next(self.inner.parameters()).dtype)).to(x.dtype)

    def extra_repr(self):
        return str(next(self.inner.parameters()).dtype)


class Polynomial(nn.Module):
    """A layer without a grad sampler."""

    def __init__(self, width: int):
        super().__init__()
        self.coefficients = nn.Parameter(0.5 * torch.randn(3, width))
        self.power = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = torch.tanh(x)
        mean = x.mean(dim=-1, keepdim=True)
        return self.coefficients[0] + self.coefficients[1] * x + self.coefficients[2] * x**2 + self.power * mean


class LowRank(nn.Module):
    """Multiplies the input by two parameters of low rank."""

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(width, rank)), nn.Parameter(torch.randn(rank, width) / width)

    def forward(self, x):
        return x @ self.down @ self.up


class ByFunction(nn.Module):
    """A dense layer by ``F.linear``, without children."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(out, width) / width**0.5), nn.Parameter(torch.randn(out))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Beside(nn.Module):
    """A child and direct parameters: a scale, a shift, and a packed projection that is used in slices."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(1, width))
        self.packed = nn.Parameter(torch.randn(2 * out, out) / out**0.5)
        self.inner = nn.Linear(width, out)

    def forward(self, x):
        shift = self.shift if x.dim() == 2 else self.shift[0]
        x = self.inner(x * (1 + self.scale) + shift)
        half = len(self.packed) // 2
        return F.linear(x, self.packed[:half]) * torch.sigmoid(F.linear(x, self.packed[half:]))


class Token(nn.Module):
    """A class token in front of a sequence, and a child."""

    def __init__(self, width: int):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return self.inner(torch.cat([self.token.expand(len(x), -1, -1), x], dim=1))


class ChannelScale(nn.Module):
    """A convolution and a scale of its channels."""

    def __init__(self, channels: int):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(channels, 1, 1))
        self.inner = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.scale * self.inner(x)


class SqueezeExcite(nn.Module):
    """Scales channels by a gate computed from their means."""

    def __init__(self, channels: int):
        super().__init__()
        self.gate = nn.Linear(channels, channels)

    def forward(self, x):
        return x * torch.sigmoid(self.gate(x.mean(dim=(2, 3))))[:, :, None, None]


class Symmetric(nn.Module):
    """A parametrization: a square matrix, or any other tensor, computed from another."""

    def forward(self, weight):
        return (weight + weight.mT) / 2 if weight.shape[-1] == weight.shape[-2] else torch.tanh(weight)


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, name: str, function):
        super().__init__()
        self.name, self.function = name, function

    def forward(self, x):
        return self.function(x)

    def extra_repr(self):
        return self.name
