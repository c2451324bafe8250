"""Device properties for first guesses of costs, and matrix products at full precision."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

_HAS_OUT_DTYPE = hasattr(torch.ops.aten.bmm, "dtype")  # since torch 2.8
_FAST_IN_FLOAT64 = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)})  # CUDA capabilities; others take 16 to 64 times


def fast_in_float64(device: torch.device) -> bool:
    """Whether float64 takes about twice the time of float32."""
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


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 or bfloat16 inside float32 products; what the user set is back afterwards.

    The norm of a gradient and the clipped sum come from different products. TF32 rounds each operand to 11 bits, so
    that the sum could exceed by one part in a thousand what the norm said.
    """
    lowered = _lowered()
    for put, exact, _ in lowered:
        put(exact)
    try:
        yield
    finally:
        for put, _, before in lowered:
            put(before)


def _lowered() -> list[tuple[Callable[[Any], None], Any, Any]]:
    """For each setting that allows less: how to set it, its exact value, and its value now."""
    backends: Any = torch.backends
    try:
        matmul, conv = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:  # torch cannot say, since the user chose by operation, as one can since 2.9
        operations = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
        settings = [(partial(setattr, op, "fp32_precision"), "ieee", op.fp32_precision) for op in operations]
        return [setting for setting in settings if setting[2] in {"tf32", "bf16"}]
    found: list[tuple[Callable[[Any], None], Any, Any]] = []
    if matmul != "highest":
        found.append((torch.set_float32_matmul_precision, "highest", matmul))
    if conv:
        found.append((partial(setattr, backends.cudnn, "allow_tf32"), False, True))
    return found
