"""Products of float32 tensors in float32, whatever shortcuts the user allowed for the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 or bfloat16 inside float32 products; what the user set is back afterwards.

    The norm of a gradient and the clipped sum come from different products. TF32 rounds each operand to 11 bits, so
    that the sum could exceed by one part in a thousand what the norm said.
    """
    lowered = [(owner, name, old) for owner, name, exact in _SETTINGS if (old := getattr(owner, name)) not in exact]
    for owner, name, _ in lowered:
        setattr(owner, name, _EXACT[name][0])
    try:
        yield
    finally:
        for owner, name, old in lowered:
            setattr(owner, name, old)


_EXACT: dict[str, tuple[Any, ...]] = {"fp32_precision": ("ieee", "none"), "allow_tf32": (False,)}


def _settings() -> list[tuple[Any, str, tuple[Any, ...]]]:
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):  # before torch 2.9
        return [(owner, "allow_tf32", _EXACT["allow_tf32"]) for owner in (backends.cuda.matmul, backends.cudnn)]
    operations = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    return [(owner, "fp32_precision", _EXACT["fp32_precision"]) for owner in operations]


_SETTINGS = _settings()
