"""Loaders and samplers in several processes: each gets a share of every batch, and all get equally many batches."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist
from compat.spread_runs import Run, StartedRun, assert_run_of_one_process, data, make_private_with_sgd, network, seeded
from launch import launched
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from dpengine.compat.opacus.data_loader import DPDataLoader
from dpengine.compat.opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from dpengine.errors import SamplingError

ROWS = 40


def numbers(rows=ROWS):
    """Returns examples whose values are their indices."""
    return TensorDataset(torch.arange(rows))


def draw_batches(seeds):
    generator = None if seeds is None else seeded(seeds[dist.get_rank()] if dist.is_initialized() else seeds[0])
    loader = DPDataLoader(numbers(), sample_rate=1 / 20, distributed=dist.is_initialized(), generator=generator)
    found = [batch.tolist() for (batch,) in loader]
    assert len(found) == len(loader) == 20
    return found


@pytest.mark.parametrize("seeds", [(3, 3), (3, 4), None], ids=["one seed", "a seed for each", "no seed"])
def test_manual_loaders_divide_each_batch_over_processes(seeds):
    one, other = launched(2, draw_batches, seeds)
    together = [sorted(a + b) for a, b in zip(one, other, strict=True)]
    assert all(len(set(batch)) == len(batch) for batch in together)
    assert all(abs(len(a) - len(b)) <= 1 for a, b in zip(one, other, strict=True))
    assert len({tuple(batch) for batch in together}) > 1
    if seeds:
        assert together == draw_batches(seeds)


def test_a_loader_for_several_processes_requires_a_process_group():
    with pytest.raises(ValueError, match="init_process_group"):
        DPDataLoader(numbers(), sample_rate=0.5, distributed=True)


def run_with_shards(run, shuffle, batch):
    """Trains with a loader over a shard of the data in each process, or over all data in a single process."""
    rows = data()
    if dist.is_initialized():
        sampler = DistributedSampler(rows, shuffle=shuffle)
        loader = DataLoader(rows, batch_size=batch // 2, sampler=sampler, generator=seeded(2 + dist.get_rank()))
        made = StartedRun(run, loader=loader, noise_seed=1 + dist.get_rank())
    else:
        made = StartedRun(run, loader=DataLoader(rows, batch_size=batch, shuffle=shuffle, generator=seeded(2)))
    if not dict(run.more).get("poisson_sampling", True) and dist.is_initialized():
        made.loader.sampler.set_epoch(1)  # as scripts do
    return made.train(), len(made.loader), made.optimizer.expected_batch_size


@pytest.mark.one_in(2, "poisson", "wrapper", others="slow")
@pytest.mark.parametrize("poisson", [True, False])
@pytest.mark.parametrize("wrapper", ["dpddp", "fsdp"])
def test_a_distributed_sampler_has_the_batch_size_of_each_process(poisson, wrapper):
    run = Run(wrapper, steps=7, more=(("poisson_sampling", poisson),))
    found = launched(2, run_with_shards, run, False, 8)
    alone, batches, size = run_with_shards(run, False, 8)
    assert batches == 6 and size == 8.0
    for one, batches, size in found:
        assert (batches, size) == (6, 4.0)
        assert_run_of_one_process([one], alone, run)


def shuffled_passes():
    """Returns the examples that each process has in two shuffled passes."""
    model, rows = DPDDP(nn.Embedding(ROWS, 2)), numbers()
    plain = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows))
    made, optimizer, loader = make_private_with_sgd(model, plain, poisson_sampling=False)
    found = []
    for _ in range(2):
        found.append([])
        for (x,) in loader:
            optimizer.zero_grad()
            made(x).sum(dim=1).mean().backward()
            optimizer.step()
            found[-1].append(x.tolist())
    return found


def test_without_poisson_sampling_each_example_is_in_one_process_per_pass():
    one, other = launched(2, shuffled_passes)
    for mine, others in zip(one, other, strict=True):
        assert [len(batch) for batch in mine] == [len(batch) for batch in others] == [4] * 5
        assert sorted(chain(*mine, *others)) == list(range(ROWS))
    assert one[0] != one[1]


def error_for_wrong_replicas():
    rows = data()
    loader = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, num_replicas=3, rank=0))
    with pytest.raises(SamplingError, match=r"num_replicas=3.* 2 processes") as caught:
        StartedRun(Run(), loader=loader)
    made = StartedRun(Run())  # the rejected call left nothing on the model
    return str(caught.value), made.train()["sizes"]


def test_a_distributed_sampler_of_another_number_of_processes_is_rejected():
    for message, sizes in launched(2, error_for_wrong_replicas):
        assert "DataLoader(dataset, batch_size=..., shuffle=True)" in message and len(sizes) == 4


def test_a_distributed_sampler_is_rejected_for_a_model_that_is_not_marked():
    rows, model = data(), network()
    loader = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows, num_replicas=2, rank=0))
    with pytest.raises(SamplingError, match="DistributedSampler"):
        make_private_with_sgd(model, loader)
    assert type(loader.sampler) is DistributedSampler
