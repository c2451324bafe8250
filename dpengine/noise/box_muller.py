"""64-bit words -> standard normals in float64, by Box and Muller.

Words ``i`` and ``i + h`` of a chunk of ``2h`` give elements ``i`` and ``i + h``. As signed numbers v and w they make a
uniform u = |v + 1/2| / 2**63 and an angle t = pi w / 2**63, hence ``sqrt(-2 ln u) * (sin t, cos t)``. So the largest
value is 9.42; a generator that draws float32 uniforms, as torch does on the CPU, stops at 5.77: a floor under delta.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

# A chunk is what one thread draws at a time. torch splits work of more than 2**15 elements over its own threads, which
# must not happen inside ours; with less work in each call, threads wait for the interpreter lock more often.
HALF = 2**15
CHUNK = 2 * HALF
LARGEST_NORMAL = math.sqrt(2 * 64 * math.log(2))  # at u = 2**-64

# Vectorised code takes many elements at a time and may leave the rest to scalar code, whose last bits differ. In
# aligned buffers whole grains never reach the scalar code, so a value does not depend on how many are drawn with it.
_GRAIN = 512
_ALIGNMENT = 64
_SCALE = 2.0**-63


class ChunkScratch:
    """Buffers for one thread."""

    def __init__(self) -> None:
        self.words = _aligned(CHUNK).view(np.uint64)
        self.radius = _aligned(HALF)


def chunk_normals(
    fill: Callable[[int, np.ndarray], None], low: int, high: int, std: float, scratch: ChunkScratch
) -> np.ndarray:
    """Elements ``low`` to ``high`` of one chunk, times ``std``.

    Args:
        fill: ``fill(first, out)`` writes the chunk's words from number ``first`` on, a multiple of 8.
        low: First element.
        high: One past the last element, at most ``CHUNK``.
        std: Standard deviation.
        scratch: Buffers of this thread.

    Returns:
        A float64 view into ``scratch``. Each value depends on its own two words only, not on ``low`` and ``high``.
    """
    first, last = _pairs(low, high)
    if last - first == HALF:
        fill(0, scratch.words)
    else:
        fill(first, scratch.words[first:last])
        fill(HALF + first, scratch.words[HALF + first : HALF + last])
    # Tensors are made anew for each call: one made under inference mode could not be written to outside it.
    words = torch.from_numpy(scratch.words.view(np.int64))
    normals = torch.from_numpy(scratch.words.view(np.float64))  # words are overwritten as soon as they have been read
    radius = torch.from_numpy(scratch.radius)[first:last]
    radius_from_words_(radius.copy_(words[first:last])).mul_(std)
    angle = normals[first:last].copy_(words[HALF + first : HALF + last]).mul_(math.pi * _SCALE)
    if high > HALF:
        torch.cos(angle, out=normals[HALF + first : HALF + last]).mul_(radius)
    if low < HALF:
        angle.sin_().mul_(radius)
    return scratch.words.view(np.float64)[low:high]


def normals_from_words(words: Tensor) -> Tensor:
    """The same map for a chunk of any even length and on any device with float64.

    Args:
        words: ``(2h,)`` int64 of uniform bits.

    Returns:
        ``(2h,)`` float64 standard normals.
    """
    first, second = words.chunk(2)
    radius = radius_from_words_(first.to(torch.float64))
    angle = second.to(torch.float64).mul_(math.pi * _SCALE)
    return torch.cat((torch.sin(angle).mul_(radius), torch.cos(angle).mul_(radius)))


def radius_from_words_(words: Tensor) -> Tensor:
    """Signed 64-bit numbers, held in float64 -> lengths of two-dimensional normals, in place."""
    return words.add_(0.5).abs_().mul_(_SCALE).log_().mul_(-2).sqrt_()


def _pairs(low: int, high: int) -> tuple[int, int]:
    """The range of pairs that elements ``low`` to ``high`` need, widened to whole grains."""
    if high <= HALF:
        first, last = low, high
    elif low >= HALF:
        first, last = low - HALF, high - HALF
    else:
        return 0, HALF
    return first // _GRAIN * _GRAIN, -(-last // _GRAIN) * _GRAIN


def _aligned(count: int) -> np.ndarray:
    """Room for float64 numbers, from a multiple of ``_ALIGNMENT`` bytes on."""
    raw = np.empty(8 * count + _ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % _ALIGNMENT
    return raw[skip : skip + 8 * count].view(np.float64)
