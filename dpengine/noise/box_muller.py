"""Box-Muller transform of a keystream to standard normals in float64.

Normals are generated in groups of 512. A group uses 48 keystream blocks of 16 32-bit words, which fill a table: word
``w`` of blocks ``16 p`` to ``16 p + 15`` is row ``16 p + w``. Read row by row, the first two thirds of the table are
256 64-bit words v, and the last third is 256 32-bit words t. Each pair (v, t) yields elements ``i`` and ``i + 256``::

    u = (v + 1/2) / 2**64                          sqrt(-ln u) * (cos y + sin y), its sign the first bit of t
    y = (r + 1/2 - 2**29) / 2**29 * pi / 4         sqrt(-ln u) * (cos y - sin y), its sign the second bit of t

where r are the other 30 bits of t. A point of a quarter circle and two signs determine a point of the circle. The
largest normal is 9.49. Normals from float32 uniforms, such as those of torch on the CPU, are at most 5.77, which is a
lower limit of delta. The logarithm, sine and cosine are series of operations that every machine rounds equally. Their
error is at most 1e-10. Noise can therefore be regenerated on any machine, by native code or by Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from torch import Tensor

PAIRS = 256
GROUP = 2 * PAIRS  # number of normals in a group
WORDS_PER_GROUP = 3 * PAIRS // 2  # 64-bit words
BLOCKS_PER_GROUP = 48
LARGEST_NORMAL = math.sqrt(2 * 65 * math.log(2))  # at u = 2**-65

ROOT_BITS = 0x3FE6A09E667F3BCD  # bits of sqrt(1/2) in float64

_COLUMNS = 16
_GROUPS_AT_ONCE = 32  # a few kilobytes each, so that intermediate values fit into the cache
_ROOT, _ONE = np.uint64(ROOT_BITS), np.uint64(1 << 52)
_LN_2 = 0.6931471805599453
_LOGARITHM = [1 / 15, 1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3, 1.0]
_SINE = [-1 / 39916800, 1 / 362880, -1 / 5040, 1 / 120, -1 / 6]
_COSINE = [1 / 479001600, -1 / 3628800, 1 / 40320, -1 / 720, 1 / 24, -0.5, 1.0]

Fill = Callable[[int, np.ndarray], None]
Array = TypeVar("Array", np.ndarray, Tensor)  # float64


def add_normals(fill: Fill, first: int, std: float, scale: float, to: np.ndarray) -> None:
    """Computes ``to = (to + std * normals) * scale`` in float64, rounded once. ``to[0]`` gets normal number ``first``.

    ``fill(block, out)`` writes the keystream, beginning with a 64-byte block, into a ``uint64`` array.
    """
    done = 0
    while done < len(to):
        group, low = divmod(first + done, GROUP)
        groups = min(_GROUPS_AT_ONCE, -(-(low + len(to) - done) // GROUP))
        words = np.empty(groups * WORDS_PER_GROUP, np.uint64)
        fill(group * BLOCKS_PER_GROUP, words)
        normals = normals_of_keystream(words, std)[low : low + len(to) - done]
        part = to[done : done + len(normals)]
        np.multiply(np.add(part, normals, dtype=np.float64), scale, out=part, casting="same_kind")
        done += len(normals)


def normals_of_keystream(words: np.ndarray, std: float) -> np.ndarray:
    """Returns ``std`` times the normals of complete groups of keystream words (little-endian uint64), in float64."""
    table = words.astype("<u8", copy=False).view("<u4").reshape(-1, 3, _COLUMNS, 16)
    rows = np.ascontiguousarray(table.transpose(0, 1, 3, 2)).reshape(-1, 3 * PAIRS)
    v = np.ascontiguousarray(rows[:, : 2 * PAIRS]).view("<u8")
    t = rows[:, 2 * PAIRS :].astype(np.uint64)
    cosine, sine = cosine_and_sine((t & np.uint64(0x3FFFFFFF)).astype(np.float64))
    radius = _radius(v) * std
    normals = np.stack([(cosine + sine) * radius, (cosine - sine) * radius], axis=1)
    signs = np.stack([(t & np.uint64(1 << 31)) << np.uint64(32), (t & np.uint64(1 << 30)) << np.uint64(33)], axis=1)
    return (normals.view(np.uint64) ^ signs).view(np.float64).reshape(-1)


def _radius(v: np.ndarray) -> np.ndarray:
    """Returns ``sqrt(-ln((v + 1/2) / 2**64))``."""
    high, low = (v >> np.uint64(32)).astype(np.float64), (v & np.uint64(0xFFFFFFFF)).astype(np.float64)
    u = (high * 2.0**32 + low) + 0.5
    bits = u.view(np.uint64) - _ROOT  # u = m * 2**e, with m from sqrt(1/2) to sqrt(2)
    m = ((bits & (_ONE - np.uint64(1))) + _ROOT).view(np.float64)
    e = ((bits + _ONE) >> np.uint64(52)).astype(np.float64) - 65.0
    return np.sqrt(-logarithm(m, e))


def logarithm(m: Array, e: Array) -> Array:
    """Returns the logarithm of ``m * 2**e``, for m from sqrt(1/2) to sqrt(2)."""
    s = (m - 1.0) / (m + 1.0)  # ln m = 2 (s + s**3 / 3 + s**5 / 5 + ...)
    return e * _LN_2 + (s + s) * _series(_LOGARITHM, s * s)


def cosine_and_sine(r: Array) -> tuple[Array, Array]:
    """Returns the cosine and the sine of y, for a whole number r below 2**30."""
    y = (r - (2.0**29 - 0.5)) * (0.7853981633974483 / 2.0**29)
    q = y * y
    return _series(_COSINE, q), (_series(_SINE, q) * q) * y + y


def _series(coefficients: list[float], q: Array) -> Array:
    total = q * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        total *= q
        total += coefficient
    return total
