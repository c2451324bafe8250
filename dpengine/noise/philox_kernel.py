"""Triton kernel that adds the normals of `philox_normals`. Imported on first use, because Triton is optional.

The kernel must be compiled without fused multiply-add, which would round differently. Triton passes Python floats as
float32, so the kernel gets the bits of float64 numbers as integers.
"""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from .box_muller import GROUP, PAIRS


@triton.jit(do_not_specialize=["count", "start", "first_group", "key", "key_above", "std_bits", "scale_bits"])
def add_kernel(
    flat,
    count: tl.int64,
    start: tl.int64,
    first_group: tl.int64,
    key: tl.int64,
    key_above: tl.int64,
    std_bits: tl.int64,
    scale_bits: tl.int64,
    pairs: tl.constexpr,
):
    """Adds the normals of one group."""
    std, scale = tl.cast(std_bits, tl.float64, bitcast=True), tl.cast(scale_bits, tl.float64, bitcast=True)
    group = first_group + tl.program_id(0)
    pair = tl.arange(0, pairs).to(tl.int64)
    number = group * pairs + pair
    above = key_above + pair * 0
    low, high, angle, _ = tl.philox(
        key, number.to(tl.uint32), (number >> 32).to(tl.uint32), above.to(tl.uint32), (above >> 32).to(tl.uint32)
    )
    u = (high.to(tl.float64) * 4294967296.0 + low.to(tl.float64)) + 0.5
    bits = u.to(tl.int64, bitcast=True) - 0x3FE6A09E667F3BCD
    m = ((bits & 0xFFFFFFFFFFFFF) + 0x3FE6A09E667F3BCD).to(tl.float64, bitcast=True)
    e = ((bits + 0x10000000000000) >> 52).to(tl.float64) - 65.0
    s = (m - 1.0) / (m + 1.0)
    q = s * s
    p = q * (1 / 15) + 1 / 13
    p = p * q + 1 / 11
    p = p * q + 1 / 9
    p = p * q + 1 / 7
    p = p * q + 1 / 5
    p = p * q + 1 / 3
    p = p * q + 1.0
    radius = tl.sqrt(-(e * 0.6931471805599453 + (s + s) * p)) * std
    y = ((angle & 0x3FFFFFFF).to(tl.float64) - 536870911.5) * (0.7853981633974483 / 536870912.0)
    q = y * y
    p = q * (-1 / 39916800) + 1 / 362880
    p = p * q + -1 / 5040
    p = p * q + 1 / 120
    p = p * q + -1 / 6
    sine = (p * q) * y + y
    p = q * (1 / 479001600) + -1 / 3628800
    p = p * q + 1 / 40320
    p = p * q + -1 / 720
    p = p * q + 1 / 24
    p = p * q + -0.5
    cosine = p * q + 1.0
    first, second = (cosine + sine) * radius, (cosine - sine) * radius
    index = group * (2 * pairs) - start + pair
    _add_to(flat, index, count, tl.where(((angle >> 31) & 1) > 0, -first, first), scale)
    _add_to(flat, index + pairs, count, tl.where(((angle >> 30) & 1) > 0, -second, second), scale)


@triton.jit
def _add_to(flat, index, count, normals, scale):
    inside = (index >= 0) & (index < count)
    current = tl.load(flat + index, mask=inside, other=0.0)
    tl.store(flat + index, ((current.to(tl.float64) + normals) * scale).to(current.dtype), mask=inside)


def add_with_triton(flat: Tensor, std: float, scale: float, key: tuple[int, int, int, int], start: int) -> None:
    """Computes `philox_normals.add_normals` by the Triton kernel."""
    first, end = start // GROUP, -(-(start + flat.numel()) // GROUP)
    key_bits, std_bits, scale_bits = struct.unpack("<qq", struct.pack("<4I", *key)), *map(_bits, (std, scale))
    with torch.cuda.device_of(flat):
        add_kernel[(end - first,)](
            flat, flat.numel(), start, first, *key_bits, std_bits, scale_bits, PAIRS, enable_fp_fusion=False
        )


def _bits(number: float) -> int:
    return struct.unpack("<q", struct.pack("<d", number))[0]
