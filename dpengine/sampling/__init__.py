"""Sampling schemes, the private loader, and units of privacy."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .check import example_numbers as example_numbers
    from .cyclic import Partition as Partition
    from .external import ExternalBatches as ExternalBatches
    from .poisson import PoissonSampling as PoissonSampling
    from .scheme import AbstractBatchStrategy as AbstractBatchStrategy
    from .shuffle import ShuffleSampling as ShuffleSampling
    from .units import UnitIds as UnitIds
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "check": ["example_numbers"],
            "cyclic": ["Partition"],
            "external": ["ExternalBatches"],
            "poisson": ["PoissonSampling"],
            "scheme": ["AbstractBatchStrategy"],
            "shuffle": ["ShuffleSampling"],
            "units": ["UnitIds"],
        },
    )
