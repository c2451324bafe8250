"""Small runs through ``dpengine.compat.opacus`` in one or several processes, for tests that the results are equal."""

import dataclasses
import warnings
from typing import Any

import torch
import torch.distributed as dist
from spread_runs import difference, whole_weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine.compat import opacus
from dpengine.compat.opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from dpengine.compat.opacus.utils.batch_memory_manager import BatchMemoryManager
from dpengine.compat.opacus.utils.fsdp_utils import FSDP2Wrapper

ROWS, WIDTH, CLASSES = 48, 4, 3
BOUNDS = [0.3, 0.2, 0.4, 0.1]  # of the network's parameters


@dataclasses.dataclass(frozen=True)
class Run:
    """Arguments of ``make_private``, and the wrapper of the model.

    Attributes:
        wrapper: A key of ``WRAPPERS``; one process has none.
        mode: ``grad_sample_mode``. One process has ``"ghost"`` or ``"hooks"``.
        clipping: As for ``make_private``.
        batch: Expected batch size over all processes.
        physical: Largest physical batch of a process.
        steps: Number of logical batches.
        skips_empty: True if a process without samples skips forward and backward.
        more: Other arguments of ``make_private``.
    """

    wrapper: str = "dpddp"
    mode: str = "hooks"
    clipping: str = "flat"
    batch: int = 8
    physical: int | None = None
    steps: int = 4
    skips_empty: bool = False
    more: tuple[tuple[str, Any], ...] = ()


def network() -> nn.Module:
    """Returns two layers with the same weights at each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def data() -> TensorDataset:
    """Returns points and their classes."""
    generator = seeded(3)
    return TensorDataset(
        torch.randn(ROWS, WIDTH, generator=generator), torch.randint(0, CLASSES, (ROWS,), generator=generator)
    )


def seeded(seed: int) -> torch.Generator:
    """Returns a new seeded generator."""
    return torch.Generator().manual_seed(seed)


def make_private_with_sgd(model: nn.Module, data_loader: DataLoader[Any], *, engine: Any = None, **asked: Any) -> Any:
    """Makes a model private with plain SGD, by default with a new engine."""
    settings = {"noise_multiplier": 0.8, "max_grad_norm": 0.5} | asked
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = engine or opacus.PrivacyEngine()
    return engine.make_private(module=model, optimizer=optimizer, data_loader=data_loader, **settings)


def tensor_parallel(model: nn.Module) -> nn.Module:
    """Splits both layers into two shards; with four processes, each shard has two replicas."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "split"))
    return parallelize_module(model, mesh["split"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def hybrid(model: nn.Module) -> nn.Module:
    """Shards over two processes, and replicates over the others."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replica", "shard"))
    return FSDP2Wrapper(model, mesh=mesh)


WRAPPERS: dict[str, Any] = {
    "dpddp": DifferentiallyPrivateDistributedDataParallel,
    "ddp": nn.parallel.DistributedDataParallel,
    "fsdp": FSDP2Wrapper,
    "hybrid": hybrid,
    "tp": tensor_parallel,
}


class StartedRun:
    """Run in this process, alone or together with other processes."""

    def __init__(self, run: Run, *, loader: DataLoader[Any] | None = None, noise_seed: int = 1):
        self.run, self.plain = run, network()
        mode = "ghost" if "ghost" in run.mode else "hooks"
        if dist.is_initialized():
            self.plain, mode = WRAPPERS[run.wrapper](self.plain), run.mode
        if loader is None:
            loader = DataLoader(data(), batch_size=run.batch, generator=seeded(2))
        self.engine = opacus.PrivacyEngine(accountant="rdp")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made, self.optimizer, *criterion, self.loader = self.engine.make_private(
                module=self.plain,
                optimizer=torch.optim.SGD(self.plain.parameters(), lr=0.5, momentum=0.9),
                data_loader=loader,
                noise_multiplier=0.8,
                max_grad_norm=BOUNDS if run.clipping == "per_layer" else 0.5,
                clipping=run.clipping,
                grad_sample_mode=mode,
                noise_generator=seeded(noise_seed),
                **dict(run.more),
            )
        self.hooks = made
        self.model = made if isinstance(made, nn.Module) else self.plain
        reduction = dict(run.more).get("loss_reduction", "mean")
        self.criterion = criterion[0] if criterion else nn.CrossEntropyLoss(reduction=reduction)
        self.sizes: list[int] = []  # number of samples in each chunk

    def train(self) -> dict[str, Any]:
        """Trains for the steps of the run, and returns the result."""
        if self.run.physical is None:
            return self.train_on(self.loader)
        size = self.run.physical
        with BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=size, optimizer=self.optimizer
        ) as chunks:
            return self.train_on(chunks)

    def train_on(self, loader: Any) -> dict[str, Any]:
        """Trains on the given loader, and returns the result."""
        taken = 0
        while taken < self.run.steps:
            for x, y in loader:
                self.optimizer.zero_grad()
                if len(x) or not self.run.skips_empty:
                    self.criterion(self.model(x), y).backward()
                self.optimizer.step()
                self.sizes.append(len(x))
                taken += not self.optimizer.step_was_skipped
                if taken == self.run.steps:
                    break
        return self.result()

    def result(self) -> dict[str, Any]:
        """Returns the values that must be the same on all processes, and those that may differ."""
        public = (self.engine.get_epsilon(1e-5), self.engine.accountant.history, self.optimizer.max_grad_norm)
        return {"weights": whole_weights(self.plain), "public": public, "sizes": self.sizes}


def train_all(runs: list[Run]) -> list[dict[str, Any]]:
    """Trains several runs in sequence."""
    return [StartedRun(run).train() for run in runs]


def assert_run_of_one_process(of_ranks: list[dict[str, Any]], alone: dict[str, Any], case: object) -> None:
    """Asserts that all ranks have identical weights, equal to those of one process."""
    for one in of_ranks:
        assert isinstance(one, dict), one
        assert all(torch.equal(w, of_ranks[0]["weights"][name]) for name, w in one["weights"].items()), case
        assert one["public"] == alone["public"], case
    assert difference(without_prefixes(of_ranks[0]["weights"]), without_prefixes(alone["weights"])) < 1e-6, case


def without_prefixes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the entries without the prefixes of wrappers, sorted by name."""
    found = {name.replace("module.", ""): weight for name, weight in weights.items()}
    return dict(sorted(found.items()))
