"""Standard normals on accelerators, from the Philox4x32-10 generator. Every device computes the same values.

A 128-bit key determines the normals of a step: it gives the two key words of Philox, and the two high words of its
counter. The two low words are the number of a pair of normals. Each pair thus has its own address, and a slice of the
vector needs only its own pairs. Philox is not a cryptographic generator.

Normals are generated in groups of `GROUP`. Elements ``i`` and ``i + PAIRS`` of a group are a pair, computed by the
transform in `box_muller`. All floating-point operations are sums, products, quotients and square roots in float64,
which every device rounds equally. `philox_kernel` computes the same in one Triton kernel, which reads and writes each
element of the vector once. The torch code makes about a hundred passes over memory.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import contextlib
import functools
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from .box_muller import GROUP, PAIRS, ROOT_BITS, cosine_and_sine, logarithm

GENERATOR = "philox4x32-10"

_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_WORD, _ONE = (1 << 32) - 1, 1 << 52
_GROUPS_AT_ONCE = 2**11  # bounds the memory of the torch code to about 150 MiB

Key = tuple[int, int, int, int]
Add = Callable[[Tensor, float, float, Key, int], None]


def add_normals(flat: Tensor, std: float, scale: float, subkey: bytes, start: int) -> None:
    """Computes ``flat = (flat + std * normals) * scale`` in float64, rounded once, with ``start`` as first normal."""
    _fastest_on(flat.device)(flat, std, scale, struct.unpack("<4I", subkey[:16]), start)


@functools.cache
def _fastest_on(device: torch.device) -> Add:
    """Returns ``add_with_triton`` if it works and its results equal those of ``add_with_torch``; else the latter."""
    key = (1, 2**32 - 1, 2**31, 3)
    with contextlib.suppress(Exception):  # Triton, or a compiler that it needs, is missing
        from .philox_kernel import add_with_triton

        expected, got = torch.linspace(-1, 1, 3 * GROUP, dtype=torch.float64, device=device).repeat(2, 1)
        add_with_torch(expected, 1.5, 0.7, key, 2**40 + 100)
        add_with_triton(got, 1.5, 0.7, key, 2**40 + 100)
        if torch.equal(expected, got):
            return add_with_triton
    return add_with_torch


def add_with_torch(flat: Tensor, std: float, scale: float, key: Key, start: int) -> None:
    """Computes `add_normals` by operations of torch, on any device with float64."""
    end = start + flat.numel()
    for first in range(start // GROUP, -(-end // GROUP), _GROUPS_AT_ONCE):
        last = min(first + _GROUPS_AT_ONCE, -(-end // GROUP))
        base, low, high = first * GROUP, max(start, first * GROUP), min(end, last * GROUP)
        pairs = torch.arange(first * PAIRS, last * PAIRS, device=flat.device)
        words = philox((pairs & _WORD, (pairs >> 32) & _WORD, key[2], key[3]), key[:2])
        part = flat[low - start : high - start]
        part.copy_((part + _normals(words, std)[low - base : high - base]) * scale)


def philox(counter: tuple[Tensor | int, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Returns the four words of Philox4x32-10 for each counter, as int64 from 0 to 2**32 - 1."""
    a, b, c, d = (torch.as_tensor(word) for word in counter)
    for i in range(10):
        key_low, key_high = ((word + i * step) & _WORD for word, step in zip(key, _WEYL, strict=True))
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # the 64 bits of the products, as signed numbers
        a, b, c, d = (
            ((second >> 32) & _WORD) ^ b ^ key_low,
            second & _WORD,
            ((first >> 32) & _WORD) ^ d ^ key_high,
            first & _WORD,
        )
    return a, b, c, d


def _normals(words: tuple[Tensor, ...], std: float) -> Tensor:
    """Returns ``std`` times the normals of complete groups. The words are v (low, high) and t of `box_muller`."""
    low, high, angle, _ = words
    u = (high.double() * 2.0**32 + low.double()) + 0.5
    bits = u.view(torch.int64) - ROOT_BITS  # u = m * 2**e, with m from sqrt(1/2) to sqrt(2)
    m = ((bits & (_ONE - 1)) + ROOT_BITS).view(torch.float64)
    e = ((bits + _ONE) >> 52).double() - 65.0
    radius = torch.sqrt(-logarithm(m, e)) * std
    cosine, sine = cosine_and_sine((angle & 0x3FFFFFFF).double())
    first, second = (cosine + sine) * radius, (cosine - sine) * radius
    first, second = (torch.where((angle >> bit) & 1 > 0, -x, x) for bit, x in ((31, first), (30, second)))
    return torch.stack((first.view(-1, PAIRS), second.view(-1, PAIRS)), dim=1).view(-1)
