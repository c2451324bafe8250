"""Sampling schemes, the private loader, and units of privacy."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .batches import PrivateBatchSampler as PrivateBatchSampler
    from .cyclic import CyclicPoissonStrategy as CyclicPoissonStrategy
    from .poisson import PoissonSampling as PoissonSampling
    from .scheme import AbstractBatchStrategy as AbstractBatchStrategy
    from .shuffle import ShuffleSampling as ShuffleSampling
    from .subset import TruncatedStrategy as TruncatedStrategy
    from .units import UnitIds as UnitIds
    from .units import UnitStrategy as UnitStrategy
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "batches": ["PrivateBatchSampler"],
            "cyclic": ["CyclicPoissonStrategy"],
            "poisson": ["PoissonSampling"],
            "scheme": ["AbstractBatchStrategy"],
            "shuffle": ["ShuffleSampling"],
            "subset": ["TruncatedStrategy"],
            "units": ["UnitIds", "UnitStrategy"],
        },
    )
