"""Noise: sums -> noisy sums, from randomness that is addressed and never repeats."""

from .gaussian import GaussianNoise
from .mechanism import AbstractNoise, check_release
from .source import NoiseSource

__all__ = ["AbstractNoise", "GaussianNoise", "NoiseSource", "check_release"]
