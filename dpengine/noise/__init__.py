"""Noise mechanisms, sources of reproducible randomness, and strategies for correlated noise."""

from typing import TYPE_CHECKING

from dpengine import lazy_exports

if TYPE_CHECKING:
    from .band_mf import BandMF as BandMF
    from .blt_and_banded_inverse import BLT as BLT
    from .blt_and_banded_inverse import BandedInverse as BandedInverse
    from .buffered import blt_column as blt_column
    from .buffered import optimize_blt as optimize_blt
    from .correlated import CorrelatedNoise as CorrelatedNoise
    from .correlated import CorrelatedRows as CorrelatedRows
    from .correlated import Recurrence as Recurrence
    from .discrete import add_discrete_normal_ as add_discrete_normal_
    from .mechanism import AbstractNoise as AbstractNoise
    from .mechanism import GaussianNoise as GaussianNoise
    from .optimize import optimize_banded as optimize_banded
    from .optimize import optimize_banded_inverse as optimize_banded_inverse
    from .recurrences import banded_inverse as banded_inverse
    from .recurrences import banded_toeplitz as banded_toeplitz
    from .recurrences import blt as blt
    from .recurrences import dense as dense
    from .recurrences import lambda_cgd as lambda_cgd
    from .sensitivity import epochs_sq_sensitivity as epochs_sq_sensitivity
    from .sensitivity import sq_sensitivity as sq_sensitivity
    from .sensitivity import toeplitz_sq_sensitivity as toeplitz_sq_sensitivity
    from .source import NoiseSource as NoiseSource
    from .toeplitz import toeplitz_inverse as toeplitz_inverse
    from .transform import NoiseState as NoiseState
    from .transform import NoiseTransform as NoiseTransform
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "band_mf": ["BandMF"],
            "buffered": ["blt_column", "optimize_blt"],
            "correlated": ["CorrelatedNoise", "CorrelatedRows", "Recurrence"],
            "discrete": ["add_discrete_normal_"],
            "mechanism": ["AbstractNoise", "GaussianNoise"],
            "optimize": ["optimize_banded", "optimize_banded_inverse"],
            "recurrences": ["banded_inverse", "banded_toeplitz", "blt", "dense", "lambda_cgd"],
            "sensitivity": ["epochs_sq_sensitivity", "sq_sensitivity", "toeplitz_sq_sensitivity"],
            "blt_and_banded_inverse": ["BLT", "BandedInverse"],
            "source": ["NoiseSource"],
            "toeplitz": ["toeplitz_inverse"],
            "transform": ["NoiseState", "NoiseTransform"],
        },
    )
