"""Noise: sums -> noisy sums, from randomness that is addressed and never repeats."""

from .band_mf import BandMF
from .correlated import CorrelatedNoise, Recurrence, mechanism_for
from .gaussian import GaussianNoise
from .keyed_streams import DEFAULT_KIND, native_normals
from .mechanism import AbstractNoise, check_release
from .recurrences import banded_inverse, banded_toeplitz, blt, dense, independent, lambda_cgd
from .source import NoiseSource

__all__ = [
    "DEFAULT_KIND",
    "AbstractNoise",
    "BandMF",
    "CorrelatedNoise",
    "GaussianNoise",
    "NoiseSource",
    "Recurrence",
    "banded_inverse",
    "banded_toeplitz",
    "blt",
    "check_release",
    "dense",
    "independent",
    "lambda_cgd",
    "mechanism_for",
    "native_normals",
]
