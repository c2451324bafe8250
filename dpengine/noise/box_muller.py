"""64-bit words -> standard normals in float64, by Box and Muller.

Words come in blocks of ``2 * APART``; words ``i`` and ``i + APART`` of a block give elements ``i`` and ``i + APART``.
As signed numbers v and w they make a uniform u = |v + 1/2| / 2**63 and an angle t = pi w / 2**63, hence
``sqrt(-2 ln u) * (sin t, cos t)``. So the largest value is 9.42; a generator that draws float32 uniforms, as torch does
on the CPU, stops at 5.77: a floor under delta.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

# Long enough for vectorised code, which may leave the end of a row to scalar code with other last bits: rows that are
# aligned and a multiple of its width have no such end. Short enough that few elements need few words.
APART = 512
BLOCK = 2 * APART

# What one thread draws at a time. torch splits work of more than 2**15 elements over its own threads, which must not
# happen inside ours; with less work in each call, threads wait for the interpreter lock more often.
CHUNK = 2**16
LARGEST_NORMAL = math.sqrt(2 * 64 * math.log(2))  # at u = 2**-64

_ALIGNMENT = 64  # bytes
_SCALE = 2.0**-63


class ChunkScratch:
    """Buffers for one thread."""

    def __init__(self) -> None:
        self.words = _aligned(CHUNK).view(np.uint64)
        self.radius = _aligned(CHUNK // 2)


def chunk_normals(
    fill: Callable[[int, np.ndarray], None], low: int, high: int, std: float, scratch: ChunkScratch
) -> np.ndarray:
    """Elements ``low`` to ``high`` of one chunk, times ``std``.

    Args:
        fill: ``fill(first, out)`` writes the chunk's words from number ``first`` on, a multiple of ``BLOCK``.
        low: First element.
        high: One past the last element, at most ``CHUNK``.
        std: Standard deviation.
        scratch: Buffers of this thread.

    Returns:
        A float64 view into ``scratch``. Each value depends on its own two words only, not on ``low`` and ``high``.
    """
    first = low // BLOCK * BLOCK
    flat = scratch.words[: -(-(high - first) // BLOCK) * BLOCK]
    fill(first, flat)
    words = flat.view(np.int64).reshape(-1, 2, APART)
    normals = flat.view(np.float64).reshape(-1, 2, APART)  # each word is overwritten once it was read
    radius, angle = scratch.radius[: len(flat) // 2].reshape(-1, APART), normals[:, 0]
    # NumPy has the lower cost per call, torch the faster log, sin and cos.
    np.add(words[:, 0], 0.5, out=radius)
    np.abs(radius, out=radius)
    np.multiply(radius, _SCALE, out=radius)
    torch.from_numpy(radius).log_()
    np.multiply(radius, -2.0, out=radius)
    np.sqrt(radius, out=radius)
    np.multiply(radius, std, out=radius)
    np.multiply(words[:, 1], math.pi * _SCALE, out=angle)
    torch.cos(torch.from_numpy(angle), out=torch.from_numpy(normals[:, 1]))
    torch.from_numpy(angle).sin_()
    np.multiply(normals, radius[:, None], out=normals)
    return flat.view(np.float64)[low - first : high - first]


def normals_from_words(words: Tensor) -> Tensor:
    """The same map on any device with float64.

    Args:
        words: ``(n,)`` int64 of uniform bits, n a multiple of ``BLOCK``.

    Returns:
        ``(n,)`` float64 standard normals.
    """
    first, second = words.view(-1, 2, APART).to(torch.float64).unbind(dim=1)
    radius = first.add_(0.5).abs_().mul_(_SCALE).log_().mul_(-2).sqrt_()
    angle = second.mul_(math.pi * _SCALE)
    return torch.stack((torch.sin(angle).mul_(radius), torch.cos(angle).mul_(radius)), dim=1).view(-1)


def _aligned(count: int) -> np.ndarray:
    """Room for float64 numbers, from a multiple of ``_ALIGNMENT`` bytes on."""
    raw = np.empty(8 * count + _ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % _ALIGNMENT
    return raw[skip : skip + 8 * count].view(np.float64)
