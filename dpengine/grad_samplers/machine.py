"""What a device is good at, roughly: for first guesses, and for the precision that costs little."""

from __future__ import annotations

import torch

_FAST_IN_FLOAT64 = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)})  # CUDA capabilities; others take 16 to 64 times


def fast_in_float64(device: torch.device) -> bool:
    """Whether float64 takes about twice the time of float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) in _FAST_IN_FLOAT64
    return device.type == "cpu"


def operations_per_byte(device: torch.device) -> float:
    """Floating point operations of a good matrix product in the time in which one byte comes from memory."""
    return 7.0 if device.type == "cpu" else 100.0


def operations_per_second(device: torch.device) -> float:
    """Floating point operations of a good matrix product, float32."""
    return 1e11 if device.type == "cpu" else 1e13
