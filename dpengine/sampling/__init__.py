"""Sampling schemes, the private loader, and units of privacy."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .allocation import BallsInBinsSampling as BallsInBinsSampling
    from .allocation import RandomAllocationSampling as RandomAllocationSampling
    from .check import example_numbers as example_numbers
    from .cyclic import CyclicPoissonSampling as CyclicPoissonSampling
    from .cyclic import Partition as Partition
    from .external import ExternalBatches as ExternalBatches
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
    from .scheme import Batches as Batches
    from .scheme import BatchSampler as BatchSampler
    from .scheme import SamplingScheme as SamplingScheme
    from .shuffle import ShuffleSampling as ShuffleSampling
    from .truncation import cut_probability as cut_probability
    from .truncation import suggest_cap as suggest_cap
    from .units import UnitIds as UnitIds
    from .users import UserSelectionStrategy as UserSelectionStrategy
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "allocation": ["BallsInBinsSampling", "RandomAllocationSampling"],
            "check": ["example_numbers"],
            "cyclic": ["CyclicPoissonSampling", "Partition"],
            "external": ["ExternalBatches"],
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
            "scheme": ["BatchSampler", "Batches", "SamplingScheme"],
            "shuffle": ["ShuffleSampling"],
            "truncation": ["cut_probability", "suggest_cap"],
            "units": ["UnitIds"],
            "users": ["UserSelectionStrategy"],
        },
    )
