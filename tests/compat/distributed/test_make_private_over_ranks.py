"""Several processes of a script for Opacus train one private run, equal to one process over all samples."""

import dataclasses
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from compat.spread_runs import Run, StartedRun, assert_run_of_one_process, make_private_with_sgd, network, train_all
from launch import launched
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine.compat import opacus
from dpengine.compat.opacus.optimizers import (
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    DPOptimizerFastGradientClipping,
    FSDPOptimizerFastGradientClipping,
    SimpleDistributedPerLayerOptimizer,
)
from dpengine.errors import MechanismMismatchError

RUNS = [
    Run("dpddp", "hooks"),
    Run("ddp", "ghost"),
    Run("ddp", "ew", "per_layer"),
    Run("ddp", "hooks", physical=2),
    Run("dpddp", "ghost", "adaptive", physical=2),
    Run("dpddp", "hooks", batch=1),  # most batches of a process are empty
    Run("dpddp", "ew", batch=1, skips_empty=True),
    Run("ddp", "ghost", batch=1, more=(("rand_on_empty", True),)),
    Run("dpddp", "hooks", more=(("poisson_sampling", False),)),
    Run("ddp", "hooks", more=(("wrap_model", False),)),
    Run("ddp", "ew", more=(("loss_reduction", "sum"),)),
    Run("fsdp", "ghost_fsdp", physical=2),
    Run("fsdp", "ghost_fsdp", batch=1),
    Run("tp", "ghost_tp"),
    Run("tp", "ghost_tp", batch=1, physical=2),
]
MORE_RUNS = [
    Run(wrapper, mode, clipping, batch=batch, physical=physical, steps=8)
    for wrapper, modes in {
        "dpddp": ("hooks", "functorch", "ew", "ghost"),
        "ddp": ("hooks", "functorch", "ew", "ghost"),
        "fsdp": ("hooks", "ghost", "ghost_fsdp"),
        "tp": ("ghost_tp",),
    }.items()
    for mode in modes
    for clipping in ("flat", "per_layer", "adaptive")
    for batch, physical in ((8, None), (8, 3), (1, None))
] + [Run("fsdp", "ghost_fsdp", more=(("wrap_model", False),)), Run("tp", "ghost_tp", more=(("wrap_model", False),))]
ON_FOUR = [
    Run("dpddp", "hooks"),
    Run("ddp", "ghost", "per_layer", batch=2),
    Run("hybrid", "ghost_fsdp"),
    Run("hybrid", "ghost_fsdp", batch=1),
    Run("tp", "ghost_tp"),
    Run("tp", "ghost_tp", batch=2, physical=2),
]


def compare(runs, ranks):
    found = launched(ranks, train_all, runs)
    assert all(isinstance(one, list) for one in found), found
    for i, run in enumerate(runs):
        of_ranks = [one[i] for one in found]
        assert_run_of_one_process(of_ranks, train_all([run])[0], run)
        splits = 2 if run.wrapper == "tp" else 1  # ranks with shards of a layer have the same samples
        assert all(one["sizes"] == of_ranks[i // splits * splits]["sizes"] for i, one in enumerate(of_ranks))
        if run.batch == 1 and not run.more and ranks > splits:
            assert any(0 in one["sizes"] for one in of_ranks), run


@pytest.mark.slow
@pytest.mark.hazard("O54")
def test_two_processes_give_the_weights_and_epsilon_of_one():
    compare(RUNS, 2)


@pytest.mark.slow
@pytest.mark.hazard("O54")
def test_every_mode_with_every_clipping_gives_the_weights_and_epsilon_of_one_process():
    compare(MORE_RUNS, 2)


@pytest.mark.slow
def test_four_processes_in_replicas_shards_and_splits_give_the_weights_and_epsilon_of_one():
    compare(ON_FOUR, 4)


def count_steps():
    torch.manual_seed(dist.get_rank())  # scripts often give each process its own seed
    rows = TensorDataset(torch.arange(40.0).view(-1, 1), torch.arange(40))
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 2))
    engine = opacus.PrivacyEngine(accountant="rdp")
    model, optimizer, loader = make_private_with_sgd(model, DataLoader(rows, batch_size=1), engine=engine)
    steps, seen = 0, []
    for x, y in loader:
        optimizer.zero_grad()
        model(x).square().sum(dim=1).mean().backward()
        optimizer.step()
        steps += 1
        seen.append(y.tolist())
    return steps, seen, [p.detach().clone() for p in model.parameters()], engine.accountant.history[0][2]


@pytest.mark.hazard("O20")
def test_each_process_makes_all_steps_including_empty_ones_and_no_example_is_in_two_processes():
    (steps, seen, weights, charged), (steps2, seen2, weights2, charged2) = launched(2, count_steps)
    assert steps == steps2 == charged == charged2 == 40
    assert [] in seen and [] in seen2 and seen != seen2
    assert not any(set(one) & set(other) for one, other in zip(seen, seen2, strict=True))
    assert all(map(torch.equal, weights, weights2))


RUNS_TO_INSPECT = [
    Run("dpddp"),
    Run("ddp", "ew", "per_layer"),
    Run("ddp", "ghost"),
    Run("fsdp", "ghost_fsdp"),
    Run("tp", "ghost_tp"),
]


def optimizer_attributes():
    found = {}
    for run in RUNS_TO_INSPECT:
        one = StartedRun(run).optimizer
        one.zero_grad()
        place = (getattr(one, "rank", None), getattr(one, "world_size", None))
        has = hasattr(one, "reduce_gradients") and one.reduce_gradients() is None
        found[run.wrapper, run.mode] = (type(one), place, one.expected_batch_size, has)
    return found


def test_optimizers_have_the_rank_and_the_batch_size_of_their_process():
    for rank, found in enumerate(launched(2, optimizer_attributes)):
        assert found == {
            ("dpddp", "hooks"): (DistributedDPOptimizer, (rank, 2), 4.0, True),
            ("ddp", "ew"): (SimpleDistributedPerLayerOptimizer, (rank, 2), 4.0, True),
            ("ddp", "ghost"): (DistributedDPOptimizerFastGradientClipping, (rank, 2), 4.0, True),
            ("fsdp", "ghost_fsdp"): (FSDPOptimizerFastGradientClipping, (rank, 2), 4.0, True),
            # Both have all rows of a batch, and parts of each layer.
            ("tp", "ghost_tp"): (DPOptimizerFastGradientClipping, (None, None), 8.0, False),
        }


def layer_dtypes():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    opacus.utils.fsdp_utils.FSDP2Wrapper(model, mp_policy=narrow, opacus_high_precision_layers=[nn.LayerNorm])
    outputs = []
    for layer in model:
        layer.register_forward_hook(lambda layer, inputs, output: outputs.append(output.dtype))
    plain = DataLoader(TensorDataset(torch.ones(24, 4), torch.zeros(24, dtype=torch.int64)), batch_size=8)
    made, optimizer, criterion, loader = make_private_with_sgd(model, plain, grad_sample_mode="ghost_fsdp")
    before = [p.full_tensor().clone() for p in model.parameters()]
    x, y = next(iter(loader))
    optimizer.zero_grad()
    criterion(made(x), y).backward()
    optimizer.step()
    changed = [not torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before, strict=True)]
    return outputs[:4], all(changed)


@pytest.mark.slow
def test_high_precision_layers_keep_their_dtype_under_mixed_precision():
    narrow, wide = torch.bfloat16, torch.float32
    assert launched(2, layer_dtypes) == [([narrow, wide, wide, narrow], True)] * 2


def noise_of_a_sum(wrapper):
    torch.manual_seed(0)
    model = wrapper(nn.Linear(200, 100))
    plain = DataLoader(TensorDataset(torch.ones(20, 200)), batch_size=10)
    made, optimizer, loader = make_private_with_sgd(model, plain, noise_multiplier=2.0, max_grad_norm=3.0)
    (x,) = next(iter(loader))
    (0 * made(x)).sum(dim=1).mean().backward()
    optimizer.step()
    return torch.cat([p.grad.flatten() for p in model.parameters()]) * 10


@pytest.mark.one_in(2, "name", others="slow")
@pytest.mark.parametrize("name", ["dpddp", "ddp"])
@pytest.mark.hazard("O54")
def test_the_noise_of_a_sum_over_processes_is_that_of_one_and_the_same_on_all(name):
    one, other = launched(2, noise_of_a_sum, WRAPPER[name])
    assert torch.equal(one, other)
    # 20,100 normal draws: their standard deviation is within 5 standard errors of 0.5 %, except with probability 1e-6.
    assert abs(float(one.std()) / (2.0 * 3.0) - 1) < 5 * (2 * len(one)) ** -0.5


WRAPPER = {
    "dpddp": opacus.distributed.DifferentiallyPrivateDistributedDataParallel,
    "ddp": nn.parallel.DistributedDataParallel,
}


def ones():
    return DataLoader(TensorDataset(torch.ones(24, 4)), batch_size=8)


def train_separate_models():
    """Trains separate models, in processes whose models are not wrapped as distributed."""
    torch.manual_seed(dist.get_rank())
    engine, model = opacus.PrivacyEngine(accountant="rdp"), nn.Linear(4, 3)
    made, optimizer, loader = make_private_with_sgd(model, ones(), engine=engine)
    for (x,) in loader if dist.get_rank() == 0 else ():
        optimizer.zero_grad()
        made(x).square().sum(dim=1).mean().backward()
        optimizer.step()
    return len(engine.accountant)


def test_processes_with_unmarked_models_train_independently():
    assert launched(2, train_separate_models, seconds=5.0) == [1, 0]


def skip_a_batch(skips):
    made = StartedRun(Run())
    for step, (x, y) in enumerate(made.loader):
        if step == 1 and dist.get_rank() == 0 and skips:
            continue
        made.optimizer.zero_grad()
        made.criterion(made.model(x), y).backward()
        made.optimizer.step()
    return True


def test_a_batch_that_one_process_skips_raises_in_all_processes_and_blocks_none():
    assert launched(2, skip_a_batch, False, seconds=10.0) == [True, True]
    assert all(isinstance(one, MechanismMismatchError) for one in launched(2, skip_a_batch, True, seconds=10.0))


def request_other_clipping():
    make_private_with_sgd(WRAPPER["ddp"](network()), ones(), max_grad_norm=1.0 + dist.get_rank())


def test_processes_that_request_different_clipping_norms_are_rejected_in_make_private():
    for one in launched(2, request_other_clipping, seconds=10.0):
        assert isinstance(one, MechanismMismatchError) and "1.0" in str(one) and "2.0" in str(one)


def resume_run(path, alone_path):
    path = path if dist.is_initialized() else alone_path
    first = StartedRun(Run(steps=6))
    first.train()
    if not dist.is_initialized() or dist.get_rank() == 0:
        first.engine.save_checkpoint(
            path=path, module=first.model, optimizer=first.optimizer, checkpoint_dict={"epoch": 1}
        )
    if dist.is_initialized():
        dist.barrier()
    second = StartedRun(dataclasses.replace(first.run, steps=3))
    left = second.engine.load_checkpoint(path=path, module=second.model, optimizer=second.optimizer)
    assert left["epoch"] == 1
    assert second.engine.get_epsilon(1e-5) == first.engine.get_epsilon(1e-5)
    return second.train()


@pytest.mark.slow
def test_all_processes_resume_from_the_checkpoint_that_one_of_them_wrote():
    with tempfile.TemporaryDirectory() as folder:
        paths = (os.path.join(folder, "ranks"), os.path.join(folder, "alone"))
        found = launched(2, resume_run, *paths)
        alone = resume_run(*paths)
    assert_run_of_one_process(found, alone, "checkpoint")
    assert alone["public"][1][0][2] == 9
