"""Sampling schemes under the module name of JAX Privacy. Use them as ``scheme.batch_iterator(num_examples, rng)``."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from dpengine.sampling.allocation import BallsInBinsSampling as BallsInBinsSampling
    from dpengine.sampling.allocation import RandomAllocationSampling as RandomAllocationSampling
    from dpengine.sampling.cyclic import CyclicPoissonSampling as CyclicPoissonSampling
    from dpengine.sampling.cyclic import Partition as Partition
    from dpengine.sampling.fixed_size import FixedBatchSampling as FixedBatchSampling
    from dpengine.sampling.min_separation import BMinSepSampling as BMinSepSampling
    from dpengine.sampling.multi_owner import MultiOwnerGraph as MultiOwnerGraph
    from dpengine.sampling.multi_owner import MultiOwnerMinSepSampling as MultiOwnerMinSepSampling
    from dpengine.sampling.multi_owner import MultiOwnerSchedule as MultiOwnerSchedule
    from dpengine.sampling.multi_owner import MultiOwnerSelection as MultiOwnerSelection
    from dpengine.sampling.multi_owner import greedy_contribution_bound as greedy_contribution_bound
    from dpengine.sampling.padding import PADDING as PADDING
    from dpengine.sampling.padding import pad_to_multiple_of as pad_to_multiple_of
    from dpengine.sampling.padding import split_and_pad_global_batch as split_and_pad_global_batch
    from dpengine.sampling.scheme import Batches as Batches
    from dpengine.sampling.scheme import BatchSampler as BatchSampler
    from dpengine.sampling.scheme import SamplingScheme as SamplingScheme
    from dpengine.sampling.truncation import cut_probability as cut_probability
    from dpengine.sampling.truncation import suggest_cap as suggest_cap
    from dpengine.sampling.users import UserSelectionStrategy as UserSelectionStrategy
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            ".sampling.allocation": ["BallsInBinsSampling", "RandomAllocationSampling"],
            ".sampling.cyclic": ["CyclicPoissonSampling", "Partition"],
            ".sampling.fixed_size": ["FixedBatchSampling"],
            ".sampling.min_separation": ["BMinSepSampling"],
            ".sampling.multi_owner": [
                "MultiOwnerGraph",
                "MultiOwnerMinSepSampling",
                "MultiOwnerSchedule",
                "MultiOwnerSelection",
                "greedy_contribution_bound",
            ],
            ".sampling.padding": ["PADDING", "pad_to_multiple_of", "split_and_pad_global_batch"],
            ".sampling.scheme": ["BatchSampler", "Batches", "SamplingScheme"],
            ".sampling.truncation": ["cut_probability", "suggest_cap"],
            ".sampling.users": ["UserSelectionStrategy"],
        },
    )
