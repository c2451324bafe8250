"""Public laws of batches: fixed before the data are seen, and drawn with ``law.batch_iterator(num_examples, rng)``."""

from dpengine.sampling import Partition

from .balls_in_bins import BallsInBinsSampling
from .cyclic_poisson import CyclicPoissonSampling
from .fixed_size import FixedBatchSampling, FixedSizeStrategy
from .law import AbstractBatchSelection, Batches, BatchSampler
from .min_separation import BMinSepSampling
from .multi_owner import MultiOwnerGraph, MultiOwnerSelection, greedy_contribution_bound
from .multi_owner_separation import MultiOwnerMinSepSampling, MultiOwnerSchedule
from .padding import PADDING, pad_to_multiple_of, split_and_pad_global_batch
from .random_allocation import RandomAllocationSampling
from .streams import KeyedWords, words_from
from .truncation import cut_probability, suggest_cap
from .users import UserSelectionStrategy

__all__ = [
    "PADDING",
    "AbstractBatchSelection",
    "BMinSepSampling",
    "BallsInBinsSampling",
    "BatchSampler",
    "Batches",
    "CyclicPoissonSampling",
    "FixedBatchSampling",
    "FixedSizeStrategy",
    "KeyedWords",
    "MultiOwnerGraph",
    "MultiOwnerMinSepSampling",
    "MultiOwnerSchedule",
    "MultiOwnerSelection",
    "Partition",
    "RandomAllocationSampling",
    "UserSelectionStrategy",
    "cut_probability",
    "greedy_contribution_bound",
    "pad_to_multiple_of",
    "split_and_pad_global_batch",
    "suggest_cap",
    "words_from",
]
