"""Combinations of layers: ``(draw, shape of a sample, depth) -> module``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from generated.draws import Draw
from generated.layers_of import LAYERS, Shape, shape_after
from generated.modules import Apply, Cast, Checkpointed, Concat, Gated, Named, Residual, ResidualInPlace, Twice
from torch import nn

Build = Callable[[Draw, Shape, int], nn.Module]
LARGEST = 160  # elements of a sample


def layer(draw: Draw, shape: Shape, depth: int = 0) -> nn.Module:
    """Returns a layer that accepts this shape."""
    return draw.named(LAYERS[len(shape)])(draw, shape)


def chain(draw: Draw, shape: Shape, depth: int) -> nn.Module:
    """Returns a sequence of blocks."""
    parts: list[nn.Module] = []
    for _ in range(draw.whole(1, 3)):
        part = block(draw, shape, depth - 1)
        after = shape_after(part, shape)
        if torch.Size(after).numel() <= LARGEST:
            parts.append(part)
            shape = after
    return nn.Sequential(*parts)


def keeping(draw: Draw, shape: Shape, depth: int) -> nn.Module:
    """Returns a block whose output has the shape of its input."""
    for _ in range(6):
        found = block(draw, shape, depth - 1)
        if shape_after(found, shape) == shape:
            return found
    return nn.Linear(shape[-1], shape[-1])


def concat(draw: Draw, shape: Shape, depth: int) -> nn.Module:
    return Concat([keeping(draw, shape, depth) for _ in range(2)], dim=1 if len(shape) > 2 else -1)


def named(draw: Draw, shape: Shape, depth: int) -> nn.Module:
    return Named({side: keeping(draw, shape, depth) for side in ("left", "right")})


def shared(draw: Draw, shape: Shape, depth: int) -> nn.Module:
    """Returns a model that uses one module twice."""
    one = keeping(draw, shape, depth)
    return nn.Sequential(one, nn.Tanh(), one)


def tied(draw: Draw, shape: Shape, depth: int) -> nn.Module:
    """Returns two layers that share a weight but not a bias."""
    if len(shape) > 2 and draw.chance(0.5):
        kind = nn.Conv2d if len(shape) == 3 else nn.Conv3d
        one, other = (kind(shape[0], shape[0], 3, padding=1) for _ in range(2))
    else:
        one, other = (nn.Linear(shape[-1], shape[-1]) for _ in range(2))
    other.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), other)


def checkpointed(draw: Draw, shape: Shape, depth: int) -> nn.Module:
    return Checkpointed(chain(draw, shape, depth - 1), use_reentrant=draw.chance(0.5))


def cast(draw: Draw, shape: Shape, depth: int) -> nn.Module:
    """Returns a block that keeps float64 parameters."""
    inner = layer(draw, shape)
    return Cast(nn.Sequential(inner, nn.Linear(shape_after(inner, shape)[-1], shape[-1])))


def moved(draw: Draw, shape: Shape, depth: int) -> nn.Module:
    """Returns a module that changes the number of axes of its input."""
    name = draw.pick(sorted(MOVES[len(shape)]))
    draw.used.append(f"to-{name}")
    return MOVES[len(shape)][name](draw, shape)


def _split(draw: Draw, shape: Shape) -> nn.Module:
    divisors = [d for d in range(2, shape[0]) if shape[0] % d == 0]
    if not divisors:
        return nn.Unflatten(1, (1, shape[0]))
    size = draw.pick(divisors)
    return nn.Unflatten(1, (size, shape[0] // size))


MOVES: dict[int, dict[str, Callable[[Draw, Shape], nn.Module]]] = {
    1: {"sequence": _split},
    2: {
        "mean": lambda draw, shape: Apply("mean over time", lambda x: x.mean(dim=1)),
        "last": lambda draw, shape: Apply("last", lambda x: x[:, -1]),
        "flat": lambda draw, shape: nn.Flatten(),
        "image": lambda draw, shape: Apply("as one channel", lambda x: x.unsqueeze(1)),
    },
    3: {
        "mean": lambda draw, shape: Apply("mean over space", lambda x: x.mean(dim=(2, 3))),
        "flat": lambda draw, shape: nn.Flatten(),
        "patches": lambda draw, shape: Apply("patches", lambda x: x.flatten(2).transpose(1, 2)),
    },
    4: {
        "mean": lambda draw, shape: Apply("mean over space", lambda x: x.mean(dim=(2, 3, 4))),
        "image": lambda draw, shape: Apply("mean over depth", lambda x: x.mean(dim=2)),
    },
}

BLOCKS: dict[str, Build] = {
    "chain": chain,
    "residual": lambda draw, shape, depth: Residual(keeping(draw, shape, depth)),
    "residual-in-place": lambda draw, shape, depth: ResidualInPlace(keeping(draw, shape, depth)),
    "gated": lambda draw, shape, depth: Gated(keeping(draw, shape, depth)),
    "twice": lambda draw, shape, depth: Twice(keeping(draw, shape, depth)),
    "concat": concat,
    "named": named,
    "shared": shared,
    "tied": tied,
    "checkpointed": checkpointed,
    "cast": cast,
    "moved": moved,
}


def block(draw: Draw, shape: Shape, depth: int) -> nn.Module:
    """Returns a layer or, while depth remains, a block of blocks."""
    if depth <= 0 or draw.chance(0.5):
        return layer(draw, shape)
    return draw.named(BLOCKS)(draw, shape, depth)
