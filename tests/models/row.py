"""A row of the table of models: how to build the model and a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Row:
    """A model of a library.

    Attributes:
        group: Heading of the table.
        name: The name that the table shows.
        make: Returns the model, with all dropout off.
        batch: ``(number of samples) -> inputs``; a dict of keyword inputs, or a tuple.
        outputs: Names of the outputs that the loss reads; by default the first of ``KNOWN_OUTPUTS``.
        library: The package.
        dtypes: Those in which the library can run the model.
    """

    group: str
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    library: str
    outputs: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = DTYPES


def without_dropout(model: nn.Module) -> nn.Module:
    """Turns off dropout and stochastic depth, because a loop over samples cannot repeat their draws."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0
        for name in ("drop_prob", "drop_rate"):  # stochastic depth, and functional dropout
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train()


def image(side: int, *, channels: int = 3, name: str | None = None):
    """Returns a function that makes images."""
    made = lambda rows: torch.randn(rows, channels, side, side)  # noqa: E731
    return (lambda rows: {name: made(rows)}) if name else (lambda rows: (made(rows),))
