"""Models parallelized over processes by PyTorch, for private and ordinary steps."""

from __future__ import annotations

import itertools
import json
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
PRIVATE, ORDINARY = "private", "ordinary"


class Block(nn.Module):
    """Causal transformer layer. Features of each head are contiguous in ``qkv``, so it can be split by heads."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch_size, time, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch_size, time, -1, 3, self.size).permute(3, 0, 2, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch_size, time, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """Language model."""

    def __init__(self, words: int, width: int, depth: int, heads: int):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.embedding(ids)))).transpose(1, 2)


class Layer(nn.Module):
    """Linear layer followed by ReLU."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Perceptron(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, *widths: int):
        super().__init__()
        *inner, last = itertools.pairwise(widths)
        self.layers = nn.Sequential(*[Layer(*sizes) for sizes in inner])
        self.head = nn.Linear(*last)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


@dataclass(frozen=True)
class Cell:
    """Model and its batches.

    Attributes:
        make: Builds the model.
        batch: Returns ``(inputs, targets)`` with the given number of samples.
        batch_size: Number of samples of a process.
        title: Description.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    batch_size: int
    title: str


def _sentences(words: int, time: int) -> Callable[[int], Batch]:
    return lambda size: (torch.randint(0, words, (size, time)), torch.randint(0, words, (size, time)))


def _perceptron(*widths: int, batch_size: int) -> Cell:
    return Cell(
        lambda: Perceptron(*widths),
        lambda count: (torch.randn(count, widths[0]), torch.randint(0, widths[-1], (count,))),
        batch_size,
        "-".join(map(str, widths)),
    )


CELLS = {
    "transformer": Cell(
        lambda: LanguageModel(4000, 256, 4, 4), _sentences(4000, 64), 16, "4 layers of width 256, 4,000 words, T=64"
    ),
    "perceptron": _perceptron(784, 2048, 2048, 2048, 10, batch_size=128),
    "tiny": _perceptron(8, 8, 8, batch_size=4),
}
TOPOLOGIES = {"ddp": 2, "fsdp2": 2, "tensor parallel": 2, "hybrid": 4}
"""Kinds of parallelism, with the number of processes."""


def wrapped(model: nn.Module, topology: str) -> nn.Module:
    """Returns the model, parallelized by a topology; unchanged for ``"one"``."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    if topology == "one":
        return model
    if topology == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    ranks = dist.get_world_size()
    if topology == "tensor parallel":
        return parallelize_module(model, init_device_mesh("cpu", (ranks,)), split(model))
    shape, names = ((ranks,), ("shard",)) if topology == "fsdp2" else ((2, ranks // 2), ("replica", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def split(model: nn.Module) -> dict[str, Any]:
    """Returns the tensor-parallel plan: layers split along their outputs, and layers split along their inputs."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if isinstance(model, Perceptron):
        styles = (ColwiseParallel, RowwiseParallel)
        plan: dict[str, Any] = {f"layers.{i}.linear": styles[i % 2]() for i in range(len(model.layers))}
        return {**plan, "head": styles[len(model.layers) % 2]()}
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for name, _ in model.named_modules():
        if name.endswith((".qkv", ".up")):
            plan[name] = ColwiseParallel()
        elif name.endswith((".out", ".down")):
            plan[name] = RowwiseParallel()
    return plan


def stepping(cell: Cell, topology: str, kind: str, **options: Any) -> Callable[[], None]:
    """Returns a function that makes one step. Weights and batch are the same for both kinds.

    ``batch_returner`` replaces the loader, as in ``benchmarks.contenders``.

    Args:
        cell: The model.
        topology: Key of ``TOPOLOGIES``, or ``"one"``.
        kind: ``PRIVATE`` or ``ORDINARY``.
        options: Other arguments of ``make_private``.

    Returns:
        The function.
    """
    is_replicated = topology == "tensor parallel"  # its processes have the same samples
    torch.manual_seed(0)
    model = wrapped(cell.make(), topology)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1 if is_replicated else 1 + _rank())
    inputs, targets = cell.batch(cell.batch_size)

    def ordinary() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    if kind == ORDINARY:
        return ordinary
    from benchmarks.contenders import batch_returner
    from dpengine import PrivacyEngine

    logical = cell.batch_size * (1 if is_replicated or topology == "one" else dist.get_world_size())
    data = torch.utils.data.TensorDataset(torch.zeros(100 * logical, 1))
    engine = PrivacyEngine()
    loader = torch.utils.data.DataLoader(data, batch_size=logical)
    engine.make_private(model, optimizer, loader, noise_multiplier=1.0, max_grad_norm=1.0, **options)
    return_batch = batch_returner(engine, cell.batch_size)

    def private() -> None:
        return_batch()
        ordinary()

    return private


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def launched(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Returns the result of ``function(*args)`` in each of several new gloo processes with one thread, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_process, args=(ranks, folder, function, args), nprocs=ranks)
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(ranks)]


def _process(rank: int, ranks: int, folder: str, function: Callable[..., Any], args: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    result = function(*args)
    (Path(folder) / str(rank)).write_text(json.dumps(result))
    dist.destroy_process_group()
