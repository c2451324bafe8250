"""Contexts for the computation of gradients, norms and sums: without autocast, and with products in full float32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

_NO_CHANGE = contextlib.nullcontext()


def without_autocast() -> contextlib.AbstractContextManager[object]:
    """Returns a context without autocast, which would round gradients, norms and sums in the backward pass."""
    if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        return _NO_CHANGE
    stack = contextlib.ExitStack()
    for device_type in ("cpu", "cuda"):
        stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Disables TF32 and bfloat16 in float32 products, and restores the settings of the user on exit.

    The norm of a gradient and the clipped sum are computed by different products. TF32 rounds each operand to 11 bits,
    so the norm of a clipped gradient could exceed the clipping norm by a factor of 1.001.
    """
    settings = _lower_precision_settings()
    for setter, exact, _ in settings:
        setter(exact)
    try:
        yield
    finally:
        for setter, _, before in settings:
            setter(before)


def _lower_precision_settings() -> list[tuple[Callable[[Any], None], Any, Any]]:
    """Returns the setter, exact value and current value of each setting that allows less precision than float32."""
    backends: Any = torch.backends
    try:
        matmul, conv = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:  # the user chose the precision by operation, which is possible since torch 2.9
        operations = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
        settings = [(partial(setattr, op, "fp32_precision"), "ieee", op.fp32_precision) for op in operations]
        return [setting for setting in settings if setting[2] in {"tf32", "bf16"}]
    lowered: list[tuple[Callable[[Any], None], Any, Any]] = []
    if matmul != "highest":
        lowered.append((torch.set_float32_matmul_precision, "highest", matmul))
    if conv:
        lowered.append((partial(setattr, backends.cudnn, "allow_tf32"), False, True))
    return lowered
