"""Utilities with the interface of Opacus."""

from . import module_utils, packed_sequences, tensor_utils, uniform_sampler

__all__ = ["module_utils", "packed_sequences", "tensor_utils", "uniform_sampler"]
