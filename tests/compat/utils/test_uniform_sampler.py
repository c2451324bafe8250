"""Samplers under Opacus's names: the sampling scheme, the number of steps, and the source of randomness."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from dpengine.compat.opacus.utils import uniform_sampler
from dpengine.compat.opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from dpengine.sampling.choose_scheme import batches_per_epoch


def test_a_rate_of_one_over_n_makes_n_steps():
    for n in range(1, 2001):
        assert batches_per_epoch(1 / n, drop_last=True) == n == batches_per_epoch(1 / n, drop_last=False)
        assert len(UniformWithReplacementSampler(num_samples=7, sample_rate=1 / n)) == n


@pytest.mark.parametrize("rate, steps", [(0.3, 3), (0.64, 1), (0.25, 4), (1.0, 1), (64 / 60000, 937)])
def test_the_number_of_steps_is_the_inverse_rate_rounded_down(rate, steps):
    sampler = UniformWithReplacementSampler(num_samples=100, sample_rate=rate)
    assert len(sampler) == sampler.steps == steps == sum(1 for _ in sampler)


def test_each_example_is_sampled_independently_at_the_rate():
    rows, rate, steps = 40, 0.1, 4000
    sampler = UniformWithReplacementSampler(
        num_samples=rows, sample_rate=rate, steps=steps, generator=torch.Generator().manual_seed(1)
    )
    drawn = torch.zeros(steps, rows)
    for step, batch in enumerate(sampler):
        assert len(set(batch)) == len(batch)
        drawn[step, batch] = 1.0
    spread = math.sqrt(rate * (1 - rate) / steps)
    assert ((drawn.mean(0) - rate).abs() < 5.5 * spread).all()  # 40 draws beyond 5.5 sigmas: 2e-6
    sizes = drawn.sum(1)
    assert sizes.var().item() == pytest.approx(rows * rate * (1 - rate), rel=0.15)  # 15 % are 6.5 sigmas
    pairs = (drawn - rate).T @ (drawn - rate) / steps / (rate * (1 - rate))
    pairs.fill_diagonal_(0)
    assert pairs.abs().max() < 6.5 / math.sqrt(steps)  # 780 pairs


def test_one_state_of_a_generator_gives_the_same_batches_and_the_next_pass_others():
    def passes(seed):
        sampler = UniformWithReplacementSampler(
            num_samples=100, sample_rate=0.1, generator=torch.Generator().manual_seed(seed)
        )
        return list(sampler), list(sampler)

    first, second = passes(3)
    assert (first, second) == passes(3)
    assert first != second and passes(4)[0] != first


def test_without_a_generator_no_seed_repeats_the_batches():
    def batches():
        torch.manual_seed(0)
        return list(UniformWithReplacementSampler(num_samples=1000, sample_rate=0.1))

    assert batches() != batches()


def test_assigned_attributes_take_effect():
    generator = torch.Generator()
    sampler = UniformWithReplacementSampler(num_samples=50, sample_rate=0.1, generator=generator)
    assert (sampler.num_samples, sampler.sample_rate, sampler.generator, sampler.steps) == (50, 0.1, generator, 10)
    sampler.sample_rate, sampler.steps = 1.0, 2
    assert list(sampler) == [list(range(50))] * 2


def test_a_loader_accepts_the_sampler_as_its_batch_sampler():
    data = TensorDataset(torch.arange(20.0))
    loader = DataLoader(data, batch_sampler=UniformWithReplacementSampler(num_samples=20, sample_rate=1.0, steps=3))
    assert [batch[0].tolist() for batch in loader] == [list(range(20))] * 3


@pytest.mark.parametrize(
    "change", [{"num_samples": 0}, {"sample_rate": 0.0}, {"sample_rate": 1.5}, {"sample_rate": math.nan}, {"steps": -1}]
)
def test_numbers_out_of_range_are_rejected(change):
    with pytest.raises(ValueError):
        UniformWithReplacementSampler(**{"num_samples": 10, "sample_rate": 0.1, **change})


@pytest.fixture
def ranks(monkeypatch):
    """Creates the samplers of each of several processes."""

    def of(size, **options):
        found = []
        for rank in range(size):
            monkeypatch.setattr(dist, "get_world_size", lambda group=None: size)
            monkeypatch.setattr(dist, "get_rank", lambda group=None, rank=rank: rank)
            found.append(DistributedUniformWithReplacementSampler(**options))
        return found

    return of


@pytest.mark.parametrize("total", [1, 7, 12])
@pytest.mark.hazard("O20")
def test_every_process_makes_the_same_steps_from_a_share_of_its_own(ranks, total):
    samplers = ranks(3, total_size=total, sample_rate=0.05)
    batches = [list(sampler) for sampler in samplers]
    assert [len(mine) for mine in batches] == [20] * 3 == [len(sampler) for sampler in samplers]
    assert [] in batches[0]  # empty batches are steps too
    whole = ranks(3, total_size=total, sample_rate=1.0)
    shares = [next(iter(sampler)) for sampler in whole]
    assert sorted(itertools.chain(*shares)) == list(range(total))
    sizes = [sampler.num_samples for sampler in whole]
    assert sizes == [len(share) for share in shares] and max(sizes) - min(sizes) <= 1


def test_set_epoch_reshuffles_the_shards_identically_on_all_processes(ranks):
    samplers = ranks(2, total_size=30, sample_rate=1.0)
    first = [next(iter(sampler)) for sampler in samplers]
    for sampler in samplers:
        sampler.set_epoch(1)
    second = [next(iter(sampler)) for sampler in samplers]
    assert sorted(first[0]) != sorted(second[0])
    assert sorted(itertools.chain(*second)) == list(range(30))
    plain = ranks(2, total_size=6, sample_rate=1.0, shuffle=False)
    assert [next(iter(sampler)) for sampler in plain] == [[0, 2, 4], [1, 3, 5]]
    other = ranks(2, total_size=30, sample_rate=1.0, shuffle_seed=5)
    assert sorted(next(iter(other[0]))) != sorted(first[0])


def test_processes_with_equal_generators_draw_independently(ranks):
    samplers = ranks(2, total_size=2000, sample_rate=0.5, shuffle=False, steps=1)
    for sampler in samplers:
        sampler.generator = torch.Generator().manual_seed(0)
    first, second = ({place // 2 for place in next(iter(sampler))} for sampler in samplers)
    # Of 1000 places each is in both with probability 1/4; 5 sigmas are 68. Equal draws would share about 500.
    assert abs(len(first & second) - 250) < 68


def test_a_distributed_sampler_without_a_process_group_raises():
    with pytest.raises((ValueError, RuntimeError), match="process group"):
        DistributedUniformWithReplacementSampler(total_size=10, sample_rate=0.1)


def test_the_sampler_draws_through_the_engine(monkeypatch):
    asked = []

    class Watched(uniform_sampler.PoissonDraws):
        def draw(self, step, words):
            asked.append(step)
            return super().draw(step, words)

    monkeypatch.setattr(uniform_sampler, "PoissonDraws", Watched)
    list(UniformWithReplacementSampler(num_samples=10, sample_rate=0.5, steps=4))
    assert asked == [0, 1, 2, 3]
