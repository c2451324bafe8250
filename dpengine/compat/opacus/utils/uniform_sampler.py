"""Batch samplers that use the engine's Poisson sampling."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from dpengine.distributed.ranks import Ranks
from dpengine.errors import keyword_hints
from dpengine.noise.source import NoiseSource
from dpengine.sampling.choose_scheme import batches_per_epoch
from dpengine.sampling.poisson import PoissonDraws
from dpengine.sampling.scheme import checked_integer


@keyword_hints
class UniformWithReplacementSampler(Sampler[list[int]]):
    """Sampler of Poisson batches, which include each example independently. Batches may be empty.

    Args:
        num_samples: Size of the data set, at least 1.
        sample_rate: Probability of each example, in (0, 1].
        generator: Generator of the seed of each epoch. The seed reveals the batches. None uses random numbers of the
            operating system.
        steps: Number of batches in an epoch; by default ``1 / sample_rate``, rounded down.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        sample_rate: float,
        generator: torch.Generator | None = None,
        steps: int | None = None,
    ):
        self.num_samples = checked_integer(type(self).__name__, "num_samples", num_samples, at_least=1)
        self.sample_rate = sample_rate
        self.generator = generator
        self.steps = batches_per_epoch(sample_rate, drop_last=True) if steps is None else steps
        _draws(self.num_samples, sample_rate, self.steps)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        yield from _batches(_draws(self.num_samples, self.sample_rate, self.steps), self.generator)


@keyword_hints
class DistributedUniformWithReplacementSampler(Sampler[list[int]]):
    """Sampler of Poisson batches of this process, from its share of the data set.

    All processes have the same number of batches, which may be empty. The shares are disjoint, and their sizes differ
    by at most one.

    Args:
        total_size: Size of the data set, at least 1.
        sample_rate: Probability of each example, in (0, 1].
        shuffle: Whether ``set_epoch`` reassigns the data to processes.
        shuffle_seed: Seed of the assignment; the same on all processes.
        steps: Number of batches in an epoch; by default ``1 / sample_rate``, rounded down.
        generator: Generator of the seed of each epoch. Processes with equal generators draw independently.
    """

    def __init__(
        self,
        *,
        total_size: int,
        sample_rate: float,
        shuffle: bool = True,
        shuffle_seed: int = 0,
        steps: int | None = None,
        generator: torch.Generator | None = None,
    ):
        ranks = Ranks.of(None)
        self.total_size = checked_integer(type(self).__name__, "total_size", total_size, at_least=1)
        self.sample_rate = sample_rate
        self.generator = generator
        self.num_replicas, self.rank = ranks.size, ranks.rank
        self.epoch = 0
        self.shuffle = shuffle
        self.shuffle_seed = shuffle_seed
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))
        self.num_batches = batches_per_epoch(sample_rate, drop_last=True) if steps is None else steps
        _draws(self.num_samples, sample_rate, self.num_batches)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        share = self._share()
        draws = _draws(self.num_samples, self.sample_rate, self.num_batches)
        for batch in _batches(draws, self.generator, part=self.rank):
            yield [share[i] for i in batch]

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that selects the assignment of data; the same on all processes."""
        self.epoch = epoch

    def _share(self) -> list[int]:
        """Returns the examples of this process. The assignment is public, so its seed may be known."""
        order = torch.arange(self.total_size)
        if self.shuffle:
            order = torch.randperm(
                self.total_size, generator=torch.Generator().manual_seed(self.shuffle_seed + self.epoch)
            )
        return order[self.rank :: self.num_replicas].tolist()


def _draws(num_samples: int, sample_rate: float, steps: int) -> PoissonDraws:
    # Only the optimizer uses the last argument, which divides sums.
    return PoissonDraws(num_samples, sample_rate, steps, sample_rate * max(num_samples, 1))


def _batches(draws: PoissonDraws, generator: torch.Generator | None, *, part: int = 0) -> Iterator[list[int]]:
    """Yields the batches of one epoch. Parts with equal generators draw independently."""
    source = NoiseSource.fresh() if generator is None else NoiseSource.seeded(_seed(generator))
    domain = f"batch {part}"
    for step in range(draws.steps_per_epoch):
        # A request has fewer than 2**32 blocks, so requests of one step do not overlap.
        indices = draws.draw(
            step, lambda count, *, step, block: source.words(count, domain=domain, step=step, block=block << 32)
        )
        yield indices.tolist()


def _seed(generator: torch.Generator) -> int:
    """Draws a 63-bit seed from a generator."""
    return int(torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator))
