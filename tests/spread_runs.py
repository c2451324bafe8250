"""Small private runs on one process or several, for tests that both give the same result."""

from dataclasses import dataclass
from typing import Any

import inside
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from dpengine import GradSampleModule, PrivacyEngine
from dpengine.engine import restrict_to_optimizer
from dpengine.noise import BandedInverse, BandMF

VOCABULARY, WIDTH, LENGTH, ROWS = 11, 8, 5, 96


class Block(nn.Module):
    """A residual block of a layer norm and two linear layers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


class Adapted(nn.Module):
    """A frozen linear layer plus a trainable low-rank adapter."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.frozen = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 2, bias=False)
        self.up = nn.Linear(2, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Words(nn.Module):
    """Predicts each next word: embedding, blocks, and a head that may be tied to the embedding."""

    def __init__(self, *, tied: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain() -> nn.Module:
    """All parameters are trainable."""
    return Words()


def tied() -> nn.Module:
    """The head and the embedding share a weight."""
    return Words(tied=True)


def frozen() -> nn.Module:
    """The embedding and a part of a block are frozen."""
    model = Words()
    model.embedding.requires_grad_(False)
    model.blocks[0].inner.requires_grad_(False)
    return model


def adapted() -> nn.Module:
    """Frozen layers with low-rank adapters."""
    model = Words().requires_grad_(False)
    for block in model.blocks:
        block.inner = Adapted(block.inner)
        block.outer = Adapted(block.outer)
    return model


class Flattened(nn.Module):
    """Flattens tokens into the batch axis, so that the engine must run single samples through the block."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x.flatten(0, 1)).view(x.shape)


def flattened() -> nn.Module:
    """One block runs on a batch of tokens."""
    model = Words()
    model.blocks[1] = Flattened(model.blocks[1])
    return model


class Recomputed(nn.Module):
    """Recomputes the activations of a block in the backward pass."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def recomputed() -> nn.Module:
    """The block that runs on a batch of tokens is inside a checkpoint."""
    model = flattened()
    model.blocks[1] = Recomputed(model.blocks[1])
    return model


MODELS = {
    "plain": plain,
    "tied": tied,
    "frozen": frozen,
    "adapted": adapted,
    "flattened": flattened,
    "recomputed": recomputed,
}
NOISE: dict[str, Any] = {
    "gaussian": lambda: {},
    "bandmf": lambda: {"noise": BandMF(num_bands=4), "steps": 20},
    "inverse": lambda: {"noise": BandedInverse(num_bands=4), "steps": 20},
}


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        model: A key of ``MODELS``.
        noise: A key of ``NOISE``.
        clipping: As for ``make_private``.
        batch: Expected number of samples of a batch over all processes.
        physical: Physical batch size of a process.
        skips_empty: True if a process without samples skips forward and backward, but not the step.
        more: Further arguments of ``make_private``.
    """

    model: str = "plain"
    noise: str = "gaussian"
    clipping: str = "flat"
    batch: int = 12
    physical: int | None = None
    skips_empty: bool = False
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The parameter id."""
        return "-".join(str(part) for part in (self.model, self.noise, self.clipping, self.batch, self.physical))


def data() -> TensorDataset:
    """Returns sentences of a fixed length."""
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return TensorDataset(words[:, :-1], words[:, 1:])


def wrapped(model: nn.Module, topology: str) -> nn.Module:
    """Wraps or shards the model for a topology; ``"data"`` leaves it unchanged."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if topology.startswith("tp"):
        return split(model, ranks // 2, topology)
    if topology == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if topology in ("fsdp", "hybrid"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        shape, names = ((ranks,), ("shard",)) if topology == "fsdp" else ((2, ranks // 2), ("replica", "shard"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def split(model: nn.Module, others: int, topology: str) -> nn.Module:
    """Splits each layer over two ranks; the other mesh dimension has ``others`` replicas or shards of each part."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (others, 2), mesh_dim_names=("data", "split"))
    tied = model.head.weight is model.embedding.weight
    plan: dict[str, Any] = {"head": ColwiseParallel(output_layouts=Replicate())}
    entries, features = RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())
    plan["embedding"] = features if topology == "tp_features" else entries
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name.endswith("inner"):
            plan[name] = ColwiseParallel()
        elif type(module) is nn.Linear and name.endswith("outer"):
            plan[name] = RowwiseParallel()
    parallelize_module(model, mesh["split"], plan)
    if tied:
        model.head.weight = model.embedding.weight
    if topology == "tp_fsdp":
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return model


class Spread:
    """A private run of a case, on a single process or on one rank of several."""

    def __init__(self, case: Case, topology: str = "data", *, seed: int | None = 1, optimizer: str = "SGD"):
        torch.manual_seed(0)
        model = wrapped(MODELS[case.model](), topology)
        settings: dict[str, Any] = {"lr": 0.3, "momentum": 0.9} if optimizer == "SGD" else {"lr": 0.03}
        optimizer = getattr(torch.optim, optimizer)([p for p in model.parameters() if p.requires_grad], **settings)
        self.case, self.engine = case, PrivacyEngine(seed=seed)
        self.empty = 0  # chunks without samples on this rank
        self.model, self.optimizer, self.loader = self.engine.make_private(
            model,
            optimizer,
            DataLoader(data(), batch_size=case.batch, shuffle=True),
            noise_multiplier=0.8,
            max_grad_norm=0.7,
            clipping=case.clipping,
            physical_batch_size=case.physical,
            **NOISE[case.noise](),
            **dict(case.more),
        )

    def train(self, steps: int) -> "Spread":
        """Trains for some steps."""
        taken = 0
        while taken < steps:
            for words, following in self.loader:
                self.optimizer.zero_grad()
                size = inside.samples_now(self.engine)
                if size or not self.case.skips_empty:
                    F.cross_entropy(self.model(words).flatten(0, 1), following.flatten()).backward()
                self.optimizer.step()
                self.empty += size == 0
                taken += not self.optimizer.step_was_skipped
                if taken == steps:
                    break
        return self

    def result(self) -> dict[str, Any]:
        """Returns all weights, epsilon, and the number of chunks without samples on this rank."""
        weights = whole_weights(self.model)
        return {"weights": weights, "epsilon": self.engine.get_epsilon(1e-5), "empty": self.empty}


def trained(case: Case, topology: str = "data", *, seed: int = 1, steps: int = 20) -> dict[str, Any]:
    """Returns the result of training for some steps."""
    return Spread(case, topology, seed=seed).train(steps).result()


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns the full tensor of each parameter, by its name in the unwrapped model."""
    named = model.module.named_parameters() if hasattr(model, "module") else model.named_parameters()
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for name, p in named}


def all_trained(cases: list[Case], topology: str, steps: int = 20) -> list[dict[str, Any]]:
    """Returns the results of several consecutive runs."""
    return [trained(case, topology, steps=steps) for case in cases]


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Returns the relative difference of all weights from the expected ones."""
    a, b = (torch.cat([w.flatten() for w in weights.values()]) for weights in (found, expected))
    return float((a - b).norm() / b.norm())


def restricted() -> None:
    """Makes a run private that is restricted to some of its parameters."""
    torch.manual_seed(0)
    model, engine = wrapped(plain(), "data"), PrivacyEngine(seed=1)
    optimizer = torch.optim.SGD(list(model.parameters())[:2], lr=0.1)
    engine.make_private(model, optimizer, DataLoader(data(), batch_size=12), noise_multiplier=1.0)
    restrict_to_optimizer(engine)


def recorded(*, outside: bool, inside: bool) -> None:
    """Makes a GradSampleModule private, with DistributedDataParallel around it, in it, or both."""
    torch.manual_seed(0)
    model: nn.Module = GradSampleModule(DistributedDataParallel(plain()) if inside else plain())
    model = DistributedDataParallel(model) if outside else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data(), batch_size=12)
    PrivacyEngine(seed=1).make_private(model, optimizer, loader, noise_multiplier=1.0)
