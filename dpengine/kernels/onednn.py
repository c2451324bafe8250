"""Products of float32 matrices by oneDNN, for processors on which the default library of torch is slower."""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .library import traced

_MIN_OPERATIONS = 1e7  # of the product of two matrices, below which the call takes longer than it saves


@functools.cache
def faster_linear() -> Callable[..., Tensor] | None:
    """Returns the linear operation of oneDNN if it is faster than ``torch.mm``, else None.

    On x86, torch multiplies matrices with MKL. On processors of AMD, MKL takes 1.3 to 2 times as long as oneDNN, with
    which torch computes convolutions. The choice depends on the processor only, so that runs are reproducible.
    """
    linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if linear is None or not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return None
    return linear if "AuthenticAMD" in _processor() else None


def _processor() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return platform.processor()


def is_faster(left: Tensor, right: Tensor) -> bool:
    """Returns True if `product` is faster than torch for these tensors ``(..., M, K)`` and ``(..., K, N)``."""
    if left.dtype is not torch.float32 or not left.is_cpu or traced(left) or faster_linear() is None:
        return False
    return 2 * math.prod(left.shape[-2:]) * right.shape[-1] >= _MIN_OPERATIONS


def product(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """Returns the product ``(M, N)`` of two matrices, if `is_faster` returns True."""
    linear = faster_linear()
    assert linear is not None
    return linear(left_MK, right_KN.t(), None, "none", [], "")
