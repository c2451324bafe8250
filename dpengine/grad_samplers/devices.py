"""Properties of devices, which cost estimates and sizes of temporary memory depend on."""

from __future__ import annotations

import functools

import torch

_HAS_OUT_DTYPE = hasattr(torch.ops.aten.bmm, "dtype")  # since torch 2.8
# CUDA compute capabilities. On all other GPUs, float64 takes 16 to 64 times as long as float32.
_FAST_IN_FLOAT64 = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)})


def fast_in_float64(device: torch.device) -> bool:
    """Returns True if float64 takes only about twice as long as float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) in _FAST_IN_FLOAT64
    return device.type == "cpu"


@functools.lru_cache
def memory_for(device: torch.device, on_cpu: int, *, most: int = 2**30) -> int:
    """Returns the number of bytes of temporary memory to use at a time.

    On the CPU this is ``on_cpu``, which should fit the caches. On a GPU it is 1/32 of the memory, at most ``most``,
    because fewer kernel launches take less time.
    """
    if device.type == "cpu":
        return on_cpu
    if device.type != "cuda":
        return max(on_cpu, 2**28)
    return min(most, torch.cuda.get_device_properties(device).total_memory // 32)


def launches_kernels(device: torch.device) -> bool:
    """Returns True if each operation has a fixed launch cost, so that parameters should be processed together."""
    return device.type != "cpu"


def multiplies_bfloat16(device: torch.device) -> bool:
    """Returns True if products of bfloat16 matrices can be float32. See note [bfloat16 products] of `bfloat16`."""
    if device.type != "cuda" or torch.version.hip is not None or not _HAS_OUT_DTYPE:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def operations_per_byte(device: torch.device) -> float:
    """Returns the number of operations that a fast matrix product executes in the time to load one byte."""
    return 7.0 if device.type == "cpu" else 100.0


def operations_per_second(device: torch.device) -> float:
    """Returns the number of floating point operations per second of a fast float32 matrix product."""
    return 1e11 if device.type == "cpu" else 1e13
