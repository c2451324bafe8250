"""Wrappers and optimizers that a script creates without an engine, in several processes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compat.spread_runs import BOUNDS, assert_run_of_one_process, data, network, seeded
from launch import launched
from spread_runs import difference, whole_weights
from torch import nn

from dpengine.compat.opacus.accountants import RDPAccountant
from dpengine.compat.opacus.data_loader import DPDataLoader
from dpengine.compat.opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from dpengine.compat.opacus.distributed import average_gradients
from dpengine.compat.opacus.grad_sample import (
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
    GradSampleModuleFastGradientClippingFSDP,
    GradSampleModuleNoOp,
)
from dpengine.compat.opacus.optimizers import (
    AdaClipDPOptimizer,
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    DPOptimizer,
    DPPerLayerOptimizer,
    FSDPOptimizerFastGradientClipping,
    SimpleDistributedPerLayerOptimizer,
)
from dpengine.compat.opacus.optimizers.ddp_perlayeroptimizer import DistributedPerLayerOptimizer
from dpengine.compat.opacus.utils.batch_memory_manager import BatchMemoryManager
from dpengine.compat.opacus.utils.fsdp_utils import FSDP2Wrapper
from dpengine.errors import MechanismMismatchError, MissingGradientError

DDP = nn.parallel.DistributedDataParallel


def mark_inside(mark: Callable[[nn.Module], nn.Module], wrapper: Any = GradSampleModule) -> Callable[[nn.Module], Any]:
    """Returns a function that puts the distributed wrapper around the model, and ``wrapper`` around both."""
    return lambda model: wrapper(mark(model))


MARKED_INSIDE = mark_inside(DPDDP)


def mark_outside(mark: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], Any]:
    """Returns a function that puts the distributed wrapper around the wrapped model."""
    return lambda model: mark(GradSampleModule(model))


def step(optimizer: Any, model: nn.Module) -> None:
    """Calls the optimizer's step."""
    optimizer.step()


def step_with_average(optimizer: Any, model: nn.Module) -> None:
    """Runs a step in parts, as scripts with a single-process optimizer do."""
    if optimizer.pre_step():
        average_gradients(model)
        optimizer.original_optimizer.step()


def step_in_parts(optimizer: Any, model: nn.Module) -> None:
    """Runs a step in the parts that Opacus has."""
    if optimizer.pre_step():
        optimizer.reduce_gradients()
        optimizer.original_optimizer.step()


@dataclasses.dataclass(frozen=True)
class Case:
    """A combination of wrappers, optimizer and step in a script."""

    wrap: Callable[[nn.Module], Any] = MARKED_INSIDE
    kind: type[DPOptimizer] = DistributedDPOptimizer
    step: Callable[[Any, nn.Module], None] = step
    rows: int = 8  # size of a batch over all processes
    chunks: int = 1
    seeds: bool = False  # each process has another noise seed


CASES = {
    "marked inside": Case(),
    "torch's own mark": Case(mark_inside(DDP)),
    "no mark": Case(GradSampleModule),
    "marked outside": Case(mark_outside(DPDDP)),
    "torch's own mark outside": Case(mark_outside(DDP)),
    "an optimizer for one process": Case(kind=DPOptimizer, step=step_with_average),
    "in parts": Case(step=step_in_parts),
    "averaged once more": Case(step=step_with_average),
    "one process without rows": Case(rows=1),
    "in chunks": Case(chunks=2),
    "other seeds": Case(seeds=True),
    "per layer": Case(kind=SimpleDistributedPerLayerOptimizer),
    "per layer, no mark": Case(GradSampleModule, DistributedPerLayerOptimizer),
    "ghost": Case(
        mark_inside(DDP, GradSampleModuleFastGradientClipping), DistributedDPOptimizerFastGradientClipping, chunks=2
    ),
    "sharded": Case(
        mark_inside(FSDP2Wrapper, GradSampleModuleFastGradientClippingFSDP), FSDPOptimizerFastGradientClipping
    ),
}


def private_sgd(kind: type[DPOptimizer], model: nn.Module, *, momentum: float = 0.0, **settings: Any) -> DPOptimizer:
    """Returns a private optimizer for batches of 8 samples over all processes."""
    size = 8 / dist.get_world_size() if dist.is_initialized() else 8.0
    defaults = {"noise_multiplier": 0.8, "max_grad_norm": 0.5, "expected_batch_size": size, "generator": seeded(1)}
    return kind(torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum), **defaults | settings)


def train_case(case: Case) -> dict[str, Any]:
    """Trains three steps over a shard of each batch; over all of it in one process."""
    model = network()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    wrapper = case.wrap(model) if ranks > 1 else GradSampleModule(model)
    per_layer = issubclass(case.kind, DPPerLayerOptimizer)
    alone: type[DPOptimizer] = DPPerLayerOptimizer if per_layer else DPOptimizer
    kind, accountant = case.kind if ranks > 1 else alone, RDPAccountant()
    bounds, generator = BOUNDS if per_layer else 0.5, seeded(1 + case.seeds * rank)
    optimizer = private_sgd(kind, model, momentum=0.9, max_grad_norm=bounds, generator=generator)
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=1 / 6))
    points, classes = data().tensors
    for at in range(3):
        batch = slice(8 * at, 8 * at + case.rows)
        for number, (x, y) in enumerate(zip(*(t[batch].chunk(case.chunks) for t in (points, classes)), strict=True)):
            optimizer.zero_grad()
            F.cross_entropy(wrapper(x[rank::ranks]), y[rank::ranks]).backward()
            if case.chunks > 1:
                optimizer.signal_skip_step(number < case.chunks - 1)
            (case.step if ranks > 1 else step)(optimizer, model)
    public = (accountant.get_epsilon(1e-5), accountant.history, len(optimizer.params))
    return {"weights": whole_weights(model), "public": public}


def all_cases() -> dict[str, dict[str, Any]]:
    """Runs all of ``CASES`` in sequence."""
    return {name: train_case(case) for name, case in CASES.items()}


def test_manual_optimizers_give_the_weights_of_one_process_over_all_samples():
    found = launched(2, all_cases)
    assert all(isinstance(one, dict) for one in found), found
    for name, case in CASES.items():
        assert_run_of_one_process([one[name] for one in found], train_case(case), name)


def train_with_manager(in_chunks):
    """Trains on logical batches, in chunks if ``in_chunks``."""
    torch.manual_seed(5)
    spread = dist.is_initialized()
    model = network()
    wrapper = GradSampleModule(DPDDP(model) if spread else model)
    optimizer = private_sgd(DistributedDPOptimizer if spread else DPOptimizer, model)
    released = []
    optimizer.attach_step_hook(released.append)
    loader = DPDataLoader(data(), sample_rate=1 / 6, distributed=spread, generator=seeded(2))
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer) as chunks:
        sizes = []
        for x, y in chunks if in_chunks else loader:
            optimizer.zero_grad()
            F.cross_entropy(wrapper(x), y).backward()
            optimizer.step()
            sizes.append(len(x))
    return {"weights": whole_weights(model), "public": (len(released), optimizer.max_grad_norm)}, sizes


@pytest.mark.slow
def test_the_memory_manager_takes_one_step_for_the_chunks_of_a_manual_loader():
    whole, _ = train_with_manager(False)
    alone, sizes = train_with_manager(True)
    assert alone["public"][0] == whole["public"][0] == 6 < len(sizes) and max(sizes) == 2
    assert difference(alone["weights"], whole["weights"]) < 1e-6
    found = launched(2, train_with_manager, True)
    assert_run_of_one_process([one for one, _ in found], alone, "manager")
    assert [len(of_rank) for _, of_rank in found] == [len(found[0][1])] * 2


def train_on_written_gradients():
    """Runs steps on per-sample gradients that the user wrote."""
    model = network()
    wrapper = GradSampleModuleNoOp(DPDDP(model) if dist.is_initialized() else model)
    kind, ranks = (DistributedDPOptimizer, 2) if dist.is_initialized() else (DPOptimizer, 1)
    optimizer = private_sgd(kind, wrapper)
    rank = dist.get_rank() if dist.is_initialized() else 0
    for parameter in model.parameters():
        parameter.grad_sample = torch.randn(8, *parameter.shape, generator=seeded(7))[rank::ranks]
    optimizer.step()
    return {"weights": whole_weights(model), "public": optimizer.expected_batch_size * ranks}


def test_manually_written_gradients_are_summed_over_processes():
    assert_run_of_one_process(launched(2, train_on_written_gradients), train_on_written_gradients(), "no_op")


def averages():
    rank = dist.get_rank()
    model = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(4)])
    model[3].requires_grad_(False)
    if rank == 0:
        model[0].weight.grad = torch.tensor([[1.0, 2.0]])
    model[1].weight.grad = torch.tensor([[3.0, rank]])
    average_gradients(model)
    return [layer.weight.grad for layer in model]


def test_average_gradients_divides_by_all_processes_also_where_some_have_no_gradient():
    for first, second, *others in launched(2, averages, seconds=10.0):
        assert first.tolist() == [[0.5, 1.0]] and second.tolist() == [[3.0, 0.5]] and others == [None, None]


def train_from_other_weights(case):
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(4, 3)
    wrapper = GradSampleModule(DPDDP(model) if case == "no backward" else model)
    optimizer = DistributedDPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5), noise_multiplier=0.8, max_grad_norm=0.5, expected_batch_size=4
    )
    for at in range(2):
        optimizer.zero_grad()
        if case != "no backward" or dist.get_rank() == 0 or at == 0:
            wrapper(torch.ones(4, 4)).square().sum(dim=1).mean().backward()
        optimizer.step()


def test_processes_that_begin_with_other_weights_are_rejected_at_the_first_step():
    for one in launched(2, train_from_other_weights, "weights", seconds=10.0):
        assert isinstance(one, MechanismMismatchError) and "'weight' differs between rank" in str(one)


def test_a_manual_step_without_a_backward_pass_raises_and_the_other_processes_do_not_hang():
    other_error, error = launched(2, train_from_other_weights, "no backward", seconds=20.0)
    assert isinstance(error, MissingGradientError) and isinstance(other_error, RuntimeError)


def broadcast_state():
    torch.manual_seed(dist.get_rank())
    model = nn.BatchNorm1d(3)
    nn.init.normal_(model.weight)
    nn.init.normal_(model.running_mean)
    wrapper = DPDDP(model)
    return [t.detach().clone() for t in (*wrapper.parameters(), *wrapper.buffers())]


def test_the_distributed_wrapper_broadcasts_weights_and_buffers_of_rank_0():
    one, other = launched(2, broadcast_state)
    assert len(one) == 5 and all(map(torch.equal, one, other))


def train_adaptive():
    model = network()
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    wrapper = GradSampleModule(DPDDP(model) if ranks > 1 else model)
    settings = {"target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "unclipped_num_std": 1.0}
    optimizer = private_sgd(AdaClipDPOptimizer, model, **settings, max_clipbound=10.0, min_clipbound=0.01)
    points, classes = data().tensors
    norms = []
    for at in range(4):
        optimizer.zero_grad()
        x, y = (t[8 * at : 8 * at + 8][rank::ranks] for t in (points, classes))
        F.cross_entropy(wrapper(x), y).backward()
        optimizer.step()
        norms.append(optimizer.max_grad_norm)
    return {"weights": whole_weights(model), "public": norms}


def test_an_adaptive_threshold_follows_the_counts_of_all_processes():
    alone = train_adaptive()
    assert len(set(alone["public"])) == 4
    assert_run_of_one_process(launched(2, train_adaptive), alone, "adaptive")
