"""Small runs through ``dpengine.compat.opacus`` that one process or several take, for tests that they are the same."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
import torch.distributed as dist
from spread_runs import whole_weights
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine.compat import opacus
from dpengine.compat.opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from dpengine.compat.opacus.utils.batch_memory_manager import BatchMemoryManager
from dpengine.compat.opacus.utils.fsdp_utils import FSDP2Wrapper

ROWS, WIDTH, CLASSES = 48, 4, 3


@dataclasses.dataclass(frozen=True)
class Run:
    """What is asked of ``make_private``, and how the model is wrapped before.

    Attributes:
        wrapper: A key of ``WRAPPERS``; one process has none.
        mode: ``grad_sample_mode``.
        clipping: As there.
        batch: Expected rows of a batch, over all processes.
        physical: Most rows of a process at once.
        steps: Logical batches.
        skips_empty: Whether a process without rows leaves out forward and backward.
        poisson: As ``poisson_sampling``.
        more: Other arguments of ``make_private``.
    """

    wrapper: str = "dpddp"
    mode: str = "hooks"
    clipping: str = "flat"
    batch: int = 8
    physical: int | None = None
    steps: int = 4
    skips_empty: bool = False
    poisson: bool = True
    more: tuple[tuple[str, Any], ...] = ()


def network() -> nn.Module:
    """Two layers, without buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def data() -> TensorDataset:
    """Points in some classes."""
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(ROWS, WIDTH, generator=generator), torch.randint(0, CLASSES, (ROWS,), generator=generator)
    )


def tensor_parallel(model: nn.Module) -> nn.Module:
    """Both layers in parts, on all processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


WRAPPERS: dict[str, Any] = {
    "dpddp": DifferentiallyPrivateDistributedDataParallel,
    "ddp": nn.parallel.DistributedDataParallel,
    "fsdp": FSDP2Wrapper,
    "tp": tensor_parallel,
}


def seeded(seed: int) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


class Started:
    """A run that this process has begun, alone or with others."""

    def __init__(self, run: Run):
        self.run = run
        model = network()
        self.spread = dist.is_initialized()
        if self.spread:
            model = WRAPPERS[run.wrapper](model)
        self.plain = model
        mode = run.mode if self.spread else run.mode.split("_")[0].replace("no", "no_op")
        norm: Any = [0.3, 0.2, 0.4, 0.1] if run.clipping == "per_layer" else 0.5
        self.engine = opacus.PrivacyEngine()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model, self.optimizer, *criterion, self.loader = self.engine.make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
                data_loader=DataLoader(data(), batch_size=run.batch, generator=seeded(2)),
                noise_multiplier=0.8,
                max_grad_norm=norm,
                clipping=run.clipping,
                grad_sample_mode=mode,
                noise_generator=seeded(1),
                poisson_sampling=run.poisson,
                **dict(run.more),
            )
        self.criterion = criterion[0] if criterion else nn.CrossEntropyLoss()
        self.empty = 0
        if isinstance(self.model, opacus.grad_sample.AbstractGradSampleHooks) and not isinstance(self.model, nn.Module):
            self.hooks, self.model = self.model, self.plain

    def train(self) -> dict[str, Any]:
        """Trains, and tells of it."""
        manager = self.run.physical and BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=self.run.physical, optimizer=self.optimizer
        )
        loader = manager.__enter__() if manager else self.loader
        taken = 0
        while taken < self.run.steps:
            for x, y in loader:
                self.optimizer.zero_grad()
                self.empty += len(x) == 0
                if len(x) or not self.run.skips_empty:
                    self.criterion(self.model(x), y).backward()
                self.optimizer.step()
                taken += not self.optimizer.step_was_skipped
                if taken == self.run.steps:
                    break
        return {
            "weights": whole_weights(self.plain),
            "epsilon": self.engine.get_epsilon(1e-5),
            "empty": self.empty,
            "steps": taken,
            "norm": self.optimizer.max_grad_norm,
            "size": self.optimizer.expected_batch_size,
            "rank": (getattr(self.optimizer, "rank", 0), getattr(self.optimizer, "world_size", 1)),
            "class": type(self.optimizer).__name__,
            "model": type(self.model).__name__,
            "history": self.engine.accountant.history,
        }


def all_trained(runs: list[Run]) -> list[Any]:
    """Several runs, one after the other; what one raised instead of its answer."""
    found = []
    for run in runs:
        try:
            found.append(Started(run).train())
        except Exception as error:
            import traceback

            traceback.print_exc()
            found.append(error)
    return found
