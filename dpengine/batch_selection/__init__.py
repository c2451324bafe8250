"""Sampling schemes for loops without the engine: ``scheme.batch_iterator(num_examples, rng)``."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from dpengine.sampling.cyclic import Partition as Partition

    from .allocation import BallsInBinsSampling as BallsInBinsSampling
    from .allocation import RandomAllocationSampling as RandomAllocationSampling
    from .cyclic_poisson import CyclicPoissonSampling as CyclicPoissonSampling
    from .fixed_size import FixedBatchSampling as FixedBatchSampling
    from .min_separation import BMinSepSampling as BMinSepSampling
    from .multi_owner import MultiOwnerGraph as MultiOwnerGraph
    from .multi_owner import MultiOwnerMinSepSampling as MultiOwnerMinSepSampling
    from .multi_owner import MultiOwnerSchedule as MultiOwnerSchedule
    from .multi_owner import MultiOwnerSelection as MultiOwnerSelection
    from .multi_owner import greedy_contribution_bound as greedy_contribution_bound
    from .padding import PADDING as PADDING
    from .padding import pad_to_multiple_of as pad_to_multiple_of
    from .padding import split_and_pad_global_batch as split_and_pad_global_batch
    from .scheme import AbstractBatchSelection as AbstractBatchSelection
    from .scheme import Batches as Batches
    from .scheme import BatchSampler as BatchSampler
    from .truncation import cut_probability as cut_probability
    from .truncation import suggest_cap as suggest_cap
    from .users import UserSelectionStrategy as UserSelectionStrategy
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            ".sampling.cyclic": ["Partition"],
            "allocation": ["BallsInBinsSampling", "RandomAllocationSampling"],
            "cyclic_poisson": ["CyclicPoissonSampling"],
            "fixed_size": ["FixedBatchSampling"],
            "min_separation": ["BMinSepSampling"],
            "multi_owner": [
                "MultiOwnerGraph",
                "MultiOwnerMinSepSampling",
                "MultiOwnerSchedule",
                "MultiOwnerSelection",
                "greedy_contribution_bound",
            ],
            "padding": ["PADDING", "pad_to_multiple_of", "split_and_pad_global_batch"],
            "scheme": ["AbstractBatchSelection", "BatchSampler", "Batches"],
            "truncation": ["cut_probability", "suggest_cap"],
            "users": ["UserSelectionStrategy"],
        },
    )
