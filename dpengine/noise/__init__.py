"""Noise: sums -> noisy sums, from randomness that is addressed and never repeats."""

from .gaussian import GaussianNoise
from .keyed_streams import DEFAULT_KIND, native_normals
from .mechanism import AbstractNoise, check_release
from .source import NoiseSource

__all__ = ["DEFAULT_KIND", "AbstractNoise", "GaussianNoise", "NoiseSource", "check_release", "native_normals"]
