"""Device properties for first guesses of costs."""

from __future__ import annotations

import functools

import torch

_HAS_OUT_DTYPE = hasattr(torch.ops.aten.bmm, "dtype")  # since torch 2.8
_FAST_IN_FLOAT64 = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)})  # CUDA capabilities; others take 16 to 64 times


def fast_in_float64(device: torch.device) -> bool:
    """Returns True if float64 takes about twice the time of float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) in _FAST_IN_FLOAT64
    return device.type == "cpu"


@functools.lru_cache
def memory_for(device: torch.device, on_cpu: int, *, most: int = 2**30) -> int:
    """Bytes to use at a time: ``on_cpu``, which suits the caches, on the CPU.

    An accelerator works on as much as it can at once, since each kernel that is launched costs time: a 32nd of its
    memory, and ``most`` at most.
    """
    if device.type == "cpu":
        return on_cpu
    if device.type != "cuda":
        return max(on_cpu, 2**28)
    return min(most, torch.cuda.get_device_properties(device).total_memory // 32)


def launches_kernels(device: torch.device) -> bool:
    """Returns True if each operation has a fixed cost, so that parameters are processed together."""
    return device.type != "cpu"


def multiplies_bfloat16(device: torch.device) -> bool:
    """Returns True if products of bfloat16 matrices can be float32. See note [bfloat16 products] of `linear`."""
    if device.type != "cuda" or torch.version.hip is not None or not _HAS_OUT_DTYPE:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def operations_per_byte(device: torch.device) -> float:
    """Floating point operations of a good matrix product in the time in which one byte comes from memory."""
    return 7.0 if device.type == "cpu" else 100.0


def operations_per_second(device: torch.device) -> float:
    """Floating point operations of a good matrix product, float32."""
    return 1e11 if device.type == "cpu" else 1e13
