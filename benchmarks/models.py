"""The benchmark's cells: a model, a batch and a loss each, with the sizes that the design documents name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Cell:
    """One benchmark cell.

    Attributes:
        make: Builds the model.
        batch: Makes ``(inputs, targets)`` for so many rows.
        rows: Rows of a batch.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    rows: int


class Block(nn.Module):
    """A pre-activation residual block with group norm."""

    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(16, inside), nn.GroupNorm(16, outside)
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.skip = nn.Conv2d(inside, outside, 1, stride, bias=False) if inside != outside else nn.Identity()

    def forward(self, x):
        out = F.relu(self.norm1(x))
        skipped = self.skip(out if isinstance(self.skip, nn.Conv2d) else x)
        return self.conv2(F.relu(self.norm2(self.conv1(out)))) + skipped


def wide_resnet() -> nn.Module:
    """WRN-16-4 with group norm, for 32 x 32 images."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False)]
    inside = 16
    for outside, stride in ((64, 1), (128, 2), (256, 2)):
        layers += [Block(inside, outside, stride), Block(outside, outside, 1)]
        inside = outside
    tail = [nn.GroupNorm(16, 256), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)]
    return nn.Sequential(*layers, *tail)


class EncoderLayer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, time, width)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """A small BERT-like classifier."""

    def __init__(self, words: int = 8000, width: int = 256, depth: int = 4, heads: int = 4, time: int = 128):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(time, width)
        self.layers = nn.Sequential(*[EncoderLayer(width, heads) for _ in range(depth)])
        self.head = nn.Linear(width, 2)

    def forward(self, ids):
        places = torch.arange(ids.shape[1]).expand(ids.shape)
        return self.head(self.layers(self.words(ids) + self.places(places)).mean(dim=1))


class Recurrent(nn.Module):
    """An LSTM classifier over vectors."""

    def __init__(self, width: int = 256):
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def mlp() -> nn.Module:
    """784-1024-1024-10."""
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def cnn() -> nn.Module:
    """The 26,010-parameter tanh network that is usual for MNIST under privacy."""
    return nn.Sequential(
        *[nn.Conv2d(1, 16, 8, 2, 3), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.Tanh()],
        *[nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)],
    )


def _images(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda rows: (torch.randn(rows, *shape), torch.randint(0, 10, (rows,)))


CELLS = {
    "mlp": Cell(mlp, _images(784), 256),
    "cnn": Cell(cnn, _images(1, 28, 28), 256),
    "wrn": Cell(wide_resnet, _images(3, 32, 32), 16),
    "transformer": Cell(Encoder, lambda rows: (torch.randint(0, 8000, (rows, 128)), torch.randint(0, 2, (rows,))), 16),
    "lstm": Cell(Recurrent, _images(64, 256), 32),
}
