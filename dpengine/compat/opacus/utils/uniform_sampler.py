"""Batch samplers: each example joins each batch with one probability, drawn by the engine's Poisson sampling."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

from dpengine.distributed.ranks import Ranks
from dpengine.errors import suggests_names
from dpengine.noise.source import NoiseSource
from dpengine.sampling.choose_scheme import batches_in_a_pass
from dpengine.sampling.poisson import PoissonSampling
from dpengine.sampling.scheme import whole_number


@suggests_names
class UniformWithReplacementSampler(Sampler[list[int]]):
    """Batches of indices, each with every example on its own with probability ``sample_rate``; some may be empty.

    Args:
        num_samples: Size of the data set, at least 1.
        sample_rate: The probability, in (0, 1].
        generator: Says which batches come: it is read once for each pass, so the next pass has others. Whoever knows
            its seed knows the batches. None for the operating system's randomness.
        steps: Batches in a pass; None for as many as go over the data once.

    Raises:
        ValueError: If a number is out of its range.
        TypeError: If it is none.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        sample_rate: float,
        generator: torch.Generator | None = None,
        steps: int | None = None,
    ):
        self.num_samples = whole_number(type(self).__name__, "num_samples", num_samples, at_least=1)
        self.sample_rate = sample_rate
        self.generator = generator
        self.steps = batches_in_a_pass(sample_rate, drop_last=True) if steps is None else steps
        _strategy(self.num_samples, sample_rate, self.steps)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        yield from _batches(_strategy(self.num_samples, self.sample_rate, self.steps), self.generator)


@suggests_names
class DistributedUniformWithReplacementSampler(Sampler[list[int]]):
    """The batches of this process, from its share of the data. Every process makes the same number of steps.

    The shares are disjoint and no two differ in size by more than one. Empty batches are handed out too.

    Args:
        total_size: Size of the data set, at least 1.
        sample_rate: The probability with which an example joins a batch, in (0, 1].
        shuffle: Whether the data are dealt out anew when ``set_epoch`` is called.
        shuffle_seed: Of the dealing; the same on all processes.
        steps: Batches in a pass; None for as many as go over the data once.
        generator: As for ``UniformWithReplacementSampler``; processes may pass equal ones and draw apart.

    Raises:
        ValueError: If a number is out of its range, or there is no process group.
        TypeError: If it is no number.
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
        self.total_size = whole_number(type(self).__name__, "total_size", total_size, at_least=1)
        self.sample_rate = sample_rate
        self.generator = generator
        self.num_replicas, self.rank = ranks.size, ranks.rank
        self.epoch = 0
        self.shuffle = shuffle
        self.shuffle_seed = shuffle_seed
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))
        self.num_batches = batches_in_a_pass(sample_rate, drop_last=True) if steps is None else steps
        _strategy(self.num_samples, sample_rate, self.num_batches)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        share = self._share()
        strategy = _strategy(self.num_samples, self.sample_rate, self.num_batches)
        for batch in _batches(strategy, self.generator, part=self.rank):
            yield [share[place] for place in batch]

    def set_epoch(self, epoch: int) -> None:
        """Says for which epoch the data are dealt out, on all processes alike."""
        self.epoch = epoch

    def _share(self) -> list[int]:
        """The examples of this process. How they are dealt out is public, so the seed may be known."""
        dealt = torch.arange(self.total_size)
        if self.shuffle:
            dealt = torch.randperm(
                self.total_size, generator=torch.Generator().manual_seed(self.shuffle_seed + self.epoch)
            )
        return dealt[self.rank :: self.num_replicas].tolist()


def _strategy(num_samples: int, sample_rate: float, steps: int) -> PoissonSampling:
    # The last argument divides sums, which is the optimizer's business and not that of a sampler.
    return PoissonSampling(num_samples, sample_rate, steps, sample_rate * max(num_samples, 1))


def _batches(strategy: PoissonSampling, generator: torch.Generator | None, *, part: int = 0) -> Iterator[list[int]]:
    """The batches of one pass. Parts with equal generators draw independently of each other."""
    source = NoiseSource.fresh() if generator is None else NoiseSource.seeded(_seed(generator))
    domain = f"batch {part}"
    for step in range(strategy.steps_per_epoch):
        # A request is less than 2**32 of the source's blocks long, so the next one of the step does not repeat it.
        indices = strategy.draw(
            step, lambda count, *, step, block: source.words(count, domain=domain, step=step, block=block << 32)
        )
        yield indices.tolist()


def _seed(generator: torch.Generator) -> int:
    """63 bits that follow from the state of a generator, which moves on."""
    return int(torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator))
