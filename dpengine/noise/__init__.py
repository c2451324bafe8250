"""Noise: sums -> noisy sums, from randomness that is addressed and never repeats."""

from .band_mf import BandMF
from .buffered import blt_column, optimize_blt
from .correlated import CorrelatedNoise, Recurrence, mechanism_for
from .gaussian import GaussianNoise
from .keyed_streams import DEFAULT_KIND, SECURE_KIND, native_normals
from .mechanism import AbstractNoise, check_release
from .optimize import optimize_banded, optimize_banded_inverse
from .recurrences import banded_inverse, banded_toeplitz, blt, checked_column, dense, independent, lambda_cgd
from .sensitivity import toeplitz_sq_sensitivity
from .share import add_noise, drawn_places
from .short_forms import BLT, BandedInverse
from .source import NoiseSource
from .toeplitz import column_norms
from .toeplitz import inverse as toeplitz_inverse
from .transform import NoiseState, NoiseTransform

__all__ = [
    "BLT",
    "DEFAULT_KIND",
    "SECURE_KIND",
    "AbstractNoise",
    "BandMF",
    "BandedInverse",
    "CorrelatedNoise",
    "GaussianNoise",
    "NoiseSource",
    "NoiseState",
    "NoiseTransform",
    "Recurrence",
    "add_noise",
    "banded_inverse",
    "banded_toeplitz",
    "blt",
    "blt_column",
    "check_release",
    "checked_column",
    "column_norms",
    "dense",
    "drawn_places",
    "independent",
    "lambda_cgd",
    "mechanism_for",
    "native_normals",
    "optimize_banded",
    "optimize_banded_inverse",
    "optimize_blt",
    "toeplitz_inverse",
    "toeplitz_sq_sensitivity",
]
