"""Layers to draw, by the number of axes of their inputs: ``(draw, shape of a sample) -> module``."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from generated.draws import Draw
from generated.modules import (
    Apply,
    Attend,
    Beside,
    Both,
    ByFunction,
    ChannelScale,
    First,
    LowRank,
    Packed,
    Polynomial,
    Positions,
    SqueezeExcite,
    Steps,
    Swapped,
    Symmetric,
    Token,
)
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, weight_norm

Shape = tuple[int, ...]
Make = Callable[[Draw, Shape], nn.Module]
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.ReLU(inplace=True),
    "leaky-relu": lambda: nn.LeakyReLU(0.1, inplace=True),
    "elu": lambda: nn.ELU(inplace=True),
    "silu": lambda: nn.SiLU(inplace=True),
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "dropout": lambda: nn.Dropout(0.0),
    "dropout-in-place": lambda: nn.Dropout(0.0, inplace=True),
}
NORM_EPS = (1e-5, 0.1)


def linear(draw, shape):
    return nn.Linear(shape[-1], draw.width(), bias=draw.chance(0.7))


def same_linear(draw, shape):
    return nn.Linear(shape[-1], shape[-1], bias=draw.chance(0.7))


def activated(draw, shape):
    return nn.Sequential(linear(draw, shape), draw.named(ACTIVATIONS)())


def layer_norm(draw, shape):
    over = shape if draw.chance(0.3) else shape[-1:]
    return nn.LayerNorm(over, eps=draw.pick(NORM_EPS), bias=draw.chance(0.7))


def rms_norm(draw, shape):
    return nn.RMSNorm(shape if draw.chance(0.3) else shape[-1:], eps=draw.pick((None, 0.1)))


def prelu(draw, shape):
    return nn.PReLU(draw.pick((1, shape[0])))


def group_norm(draw, shape):
    spots = math.prod(shape[1:])
    groups = [g for g in range(1, shape[0] + 1) if shape[0] % g == 0 and shape[0] // g * spots >= 3]
    return nn.GroupNorm(draw.pick(groups), shape[0], eps=draw.pick(NORM_EPS)) if groups else layer_norm(draw, shape)


def instance_norm(kind):
    def make(draw, shape):
        if math.prod(shape[1:]) == 1:  # torch raises for this shape
            return group_norm(draw, shape)
        return kind(shape[0], affine=True, eps=draw.pick(NORM_EPS))

    return make


def symmetric(layer):
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


WAYS = {"symmetric": symmetric, "orthogonal": orthogonal, "weight-norm": weight_norm}


def parametrized(draw, shape):
    layer = same_linear(draw, shape)
    return draw.named(WAYS)(layer)


EVERY: dict[str, Make] = {
    "linear": linear,
    "activated": activated,
    "layer-norm": layer_norm,
    "rms-norm": rms_norm,
    "prelu": prelu,
    "polynomial": lambda draw, shape: Polynomial(shape[-1]),
    "low-rank": lambda draw, shape: LowRank(shape[-1], draw.whole(1, 3)),
    "by-function": lambda draw, shape: ByFunction(shape[-1], draw.width()),
    "parametrized": parametrized,
}
FLAT: dict[str, Make] = {
    **EVERY,
    "bilinear": lambda draw, shape: Both(nn.Bilinear(shape[-1], shape[-1], draw.whole(2, 5), bias=draw.chance(0.5))),
    "beside": lambda draw, shape: Beside(shape[-1], draw.width()),
}


def bag(draw, shape):
    size = 7
    mode = draw.pick(("sum", "mean", "max"))
    index = Apply("to indices", _indices(size))
    return nn.Sequential(index, nn.EmbeddingBag(size, draw.width(), mode=mode, padding_idx=draw.pick((None, 2))))


def looked_up(draw, shape):
    size = 7
    layer = nn.Embedding(size, draw.width(), padding_idx=draw.pick((None, 1)), sparse=draw.chance(0.2))
    return nn.Sequential(Apply("to indices", _indices(size)), layer)


def _indices(size: int):
    return lambda x: (x.detach().double() * 4).round().long().remainder(size)


def conv1d(draw, shape):
    channels = shape[-1]
    groups = draw.divisor(channels)
    kernel, dilation = draw.whole(1, min(3, shape[0])), 1
    mode = draw.pick(("zeros", "zeros", "circular", "replicate"))
    padding = "same" if draw.chance(0.5) else kernel // 2
    out = groups * draw.whole(1, 3)
    return Swapped(
        nn.Conv1d(
            channels, out, kernel, padding=padding, dilation=dilation, groups=groups, bias=draw.chance(0.6),
            padding_mode=mode,
        )
    )  # fmt: skip


RUNS = {"padded": First, "packed": Packed}


def recurrent(kind):
    def make(draw, shape):
        settings = {"num_layers": draw.pick((1, 1, 2)), "bidirectional": draw.chance(0.3), "bias": draw.chance(0.8)}
        hidden = draw.whole(2, 5)
        if kind is nn.LSTM and hidden > 2 and draw.chance(0.2):
            settings["proj_size"] = hidden - 1
        layer = kind(shape[-1], hidden, batch_first=True, **settings)
        return draw.named(RUNS)(layer)

    return make


def attention(draw, shape):
    heads = draw.divisor(shape[-1])
    extra = {"bias": draw.chance(0.7), "add_bias_kv": draw.chance(0.2), "add_zero_attn": draw.chance(0.2)}
    if draw.chance(0.2):
        extra |= {"kdim": shape[-1], "vdim": shape[-1]}
    return Attend(nn.MultiheadAttention(shape[-1], heads, batch_first=True, **extra), draw.chance(0.3))


def transformer(kind):
    def make(draw, shape):
        settings = {"norm_first": draw.chance(0.5), "activation": draw.pick(("relu", "gelu")), "batch_first": True}
        layer = kind(shape[-1], draw.divisor(shape[-1]), 6, dropout=0.0, **settings)
        if kind is nn.TransformerDecoderLayer:
            return Both(layer)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False) if draw.chance(0.2) else layer

    return make


SEQUENCE: dict[str, Make] = {
    **FLAT,
    "conv1d": conv1d,
    "conv-transpose1d": lambda draw, shape: Swapped(nn.ConvTranspose1d(shape[-1], draw.whole(2, 4), 3, padding=1)),
    "instance-norm1d": lambda draw, shape: Swapped(instance_norm(nn.InstanceNorm1d)(draw, shape[::-1])),
    "channel-group-norm": lambda draw, shape: Swapped(group_norm(draw, shape[::-1])),
    "rnn": recurrent(nn.RNN),
    "lstm": recurrent(nn.LSTM),
    "gru": recurrent(nn.GRU),
    "gru-cell": lambda draw, shape: Steps(nn.GRUCell(shape[-1], draw.whole(2, 4))),
    "lstm-cell": lambda draw, shape: Steps(nn.LSTMCell(shape[-1], draw.whole(2, 4))),
    "rnn-cell": lambda draw, shape: Steps(nn.RNNCell(shape[-1], draw.whole(2, 4))),
    "attention": attention,
    "encoder-layer": transformer(nn.TransformerEncoderLayer),
    "decoder-layer": transformer(nn.TransformerDecoderLayer),
    "positions": lambda draw, shape: Positions(nn.Embedding(shape[0], shape[1]), draw.pick((1, 2))),
    "token": lambda draw, shape: Token(shape[-1]),
}


def conv2d(draw, shape):
    channels = shape[0]
    groups = draw.divisor(channels, most=8)
    kernel = draw.pick(((3, 3), (1, 1), (2, 3), (3, 1)))
    kernel = tuple(min(k, n) for k, n in zip(kernel, shape[1:], strict=True))
    settings = {"padding": "same", "dilation": draw.pick((1, 2))} if draw.chance(0.3) else {"padding": 1}
    if settings["padding"] == 1:
        settings["stride"] = draw.pick((1, 1, (2, 1))) if min(shape[1:]) > 3 else 1
    mode = draw.pick(("zeros", "zeros", "reflect", "circular"))
    mode = "zeros" if min(shape[1:]) < 4 else mode
    out = groups * draw.whole(1, 3)
    return nn.Conv2d(channels, out, kernel, groups=groups, bias=draw.chance(0.6), padding_mode=mode, **settings)


IMAGE: dict[str, Make] = {
    **EVERY,
    "conv2d": conv2d,
    "conv2d-same": lambda draw, shape: nn.Conv2d(shape[0], shape[0], 3, padding=1),
    "conv2d-activated": lambda draw, shape: nn.Sequential(conv2d(draw, shape), draw.named(ACTIVATIONS)()),
    "conv-transpose2d": lambda draw, shape: nn.ConvTranspose2d(shape[0], draw.whole(2, 4), 3, padding=1),
    "group-norm": group_norm,
    "instance-norm2d": instance_norm(nn.InstanceNorm2d),
    "channel-scale": lambda draw, shape: ChannelScale(shape[0]),
    "squeeze-excite": lambda draw, shape: SqueezeExcite(shape[0]),
    "pooled": lambda draw, shape: nn.AvgPool2d(2, 1) if min(shape[1:]) > 2 else nn.Identity(),
    "max-pooled": lambda draw, shape: nn.MaxPool2d(2, 1) if min(shape[1:]) > 2 else nn.Identity(),
}
VOLUME: dict[str, Make] = {
    "linear": linear,
    "conv3d": lambda draw, shape: nn.Conv3d(shape[0], draw.whole(2, 4), draw.pick((1, (1, 2, 2), 3)), padding=1),
    "conv3d-same": lambda draw, shape: nn.Conv3d(shape[0], shape[0], 3, padding="same", groups=draw.divisor(shape[0])),
    "conv-transpose3d": lambda draw, shape: nn.ConvTranspose3d(shape[0], draw.whole(2, 4), 3, padding=1),
    "group-norm": group_norm,
    "instance-norm3d": instance_norm(nn.InstanceNorm3d),
    "prelu": prelu,
    "layer-norm": layer_norm,
}
VECTOR: dict[str, Make] = {**FLAT, "group-norm": group_norm, "looked-up": looked_up, "bag": bag}
LAYERS: dict[int, dict[str, Make]] = {1: VECTOR, 2: SEQUENCE, 3: IMAGE, 4: VOLUME}  # by the number of axes of a sample


def entry(draw: Draw, tokens: int) -> nn.Module:
    """Returns an embedding of indices below ``tokens``."""
    return nn.Embedding(tokens, draw.width(), padding_idx=draw.pick((None, 0)))


def shape_after(module: nn.Module, shape: Shape) -> Shape:
    """Returns the shape of a sample after a module."""
    with torch.no_grad():
        return tuple(module(torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))).shape[1:])
