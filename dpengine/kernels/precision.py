"""Contexts in which gradients, norms and sums are computed: no autocast, and products in full float32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

_NOTHING = contextlib.nullcontext()


def without_autocast() -> contextlib.AbstractContextManager[object]:
    """Returns a context without autocast, which would round gradients, norms and sums where backward runs inside it."""
    if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        return _NOTHING
    stack = contextlib.ExitStack()
    for device_type in ("cpu", "cuda"):
        stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Switches TF32 and bfloat16 inside float32 products off, and restores the settings of the user afterwards.

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
    """Returns a setter, the exact value and the present value of each setting that allows less than float32."""
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
