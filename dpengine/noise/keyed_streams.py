"""Streams of 64-bit words that are generated from a secret key, and normals computed from them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpengine.kernels.library import native_library, thread_team

from .box_muller import add_normals
from .chacha20 import fill_keystream

DEFAULT_KIND = "chacha20"
SECURE_KIND = "secure"  # chacha20 on the CPU, for all devices


@dataclass(frozen=True)
class StreamKind:
    """Kind of stream, a pure function from (key, block) to words.

    Attributes:
        fill: ``fill(subkey, block, out)`` writes words to the contiguous ``uint64`` array ``out``, starting with the
            64-byte block ``block``. ``subkey`` has 32 bytes and must not be used for another purpose.
        cryptographic: Whether the words are believed to be indistinguishable from random words without the key.
        native: Whether native code may generate the normals, if it is built.
    """

    fill: Callable[[bytes, int, np.ndarray], None]
    cryptographic: bool
    native: bool = False

    @property
    def uses_torch_threads(self) -> bool:
        """True if ``add_normals`` uses the threads of torch."""
        return self.native and native_normals() is not None and thread_team() is not None

    @property
    def supports_rows(self) -> bool:
        """True if ``add_normals_by_rows`` is available."""
        return self.native and native_normals() is not None

    def add_normals(
        self, subkey: bytes, first: int, std: float, scale: float, to: np.ndarray, threads: int = 1
    ) -> None:
        """Computes ``to = (to + std * normals) * scale`` in place. ``to[0]`` gets number ``first`` of the normals."""
        library = native_normals() if self.native else None
        if library is None:
            add_normals(functools.partial(self.fill, subkey), first, std, scale, to)
        else:
            add_native_normals(library, subkey, first, std, scale, to, threads)

    def add_normals_by_rows(
        self,
        subkey: bytes,
        first: int,
        std: float,
        scale: float,
        to: np.ndarray,
        threads: int = 1,
        *,
        rows: int,
        stride: int,
    ) -> None:
        """Computes ``add_normals`` for several rows, whose first normals are ``stride`` apart. Requires native code."""
        add_native_normals(native_normals(), subkey, first, std, scale, to, threads, rows=rows, stride=stride)


@functools.cache
def native_normals() -> Any:
    """Returns the compiled library if its normals are bit-identical to those of the Python code; otherwise None."""
    library = native_library()
    if library is None:
        return None
    key, expected = bytes(range(32)), np.linspace(-1, 1, 3000)
    got = expected.copy()
    add_normals(functools.partial(_fill_chacha20, key), 2**40 + 500, 1.5, 0.7, expected)
    add_native_normals(library, key, 2**40 + 500, 1.5, 0.7, got)
    return library if np.array_equal(expected, got) else None


def add_native_normals(
    library: Any,
    key: bytes,
    first: int,
    std: float,
    scale: float,
    to: np.ndarray,
    threads: int = 1,
    *,
    rows: int = 1,
    stride: int = 0,
) -> None:
    """Computes ``add_normals`` with the ChaCha20 keystream of a key in the compiled library, on the threads of torch.

    ``to`` consists of ``rows`` rows of equal length, whose first normals are ``stride`` apart.
    """
    function = library.add_normals_f32 if to.dtype == np.float32 else library.add_normals_f64
    function(key, first, rows, len(to) // rows, stride, std, scale, to.ctypes.data, threads, thread_team())


def _fill_chacha20(subkey: bytes, block: int, out: np.ndarray) -> None:
    fill_keystream(subkey, 0, block, out)  # the subkey is used once, so the nonce is constant


def _fill_philox(subkey: bytes, block: int, out: np.ndarray) -> None:
    # Philox4x64 has a 128-bit key, and returns 4 words (half a block) for each value of its counter.
    key, counter = np.frombuffer(subkey, np.uint64, 2), np.zeros(4, np.uint64)
    counter[0], counter[1] = (2 * block) & (2**64 - 1), (2 * block) >> 64
    out[:] = np.random.Philox(key=key, counter=counter).random_raw(len(out))


# Measured per word on one thread (AVX-512): chacha20 1.7 ns through libcrypto and 34 ns in NumPy alone, philox 3.5 ns.
STREAM_KINDS = {
    "chacha20": StreamKind(_fill_chacha20, cryptographic=True, native=True),
    "philox": StreamKind(_fill_philox, cryptographic=False),
}


def stream_kind(name: str) -> StreamKind:
    """Returns the kind of stream with this name. Raises ValueError if there is none."""
    if name == SECURE_KIND:
        return STREAM_KINDS["chacha20"]
    if name not in STREAM_KINDS:
        raise ValueError(f"noise.NoiseSource: unknown kind {name!r}. Choose one of {sorted(STREAM_KINDS)}.")
    return STREAM_KINDS[name]
