"""The ChaCha20 keystream with a 64-bit block counter. NumPy code and the libcrypto of the system return equal bytes.

The core is that of RFC 8439. The last four words of the state are the block number (two words, as in Bernstein's
original layout) and the nonce (two words). A key and a nonce are therefore sufficient for 2**64 blocks of 64 bytes.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

WORDS_PER_BLOCK = 8  # 64-bit words in one 64-byte block

Fill = Callable[[bytes, int, int, np.ndarray], None]

_CONSTANTS = struct.unpack("<4I", b"expand 32-byte k")
_LANES = 2**12  # blocks computed at once: enough to hide the overhead of NumPy calls, and few enough for the cache
_LIBRARIES = {  # versioned names only: macOS terminates a process that opens its unversioned libcrypto
    "linux": ("libcrypto.so.3", "libcrypto.so.1.1"),
    "win32": ("libcrypto-3-x64.dll", "libcrypto-3.dll", "libcrypto-3-arm64.dll"),
}


def fill_keystream(key: bytes, nonce: int, block: int, out: np.ndarray) -> None:
    """Fills ``out`` with keystream words by the fastest backend that passes its self-test.

    Word i of ``out`` is word ``i % 8`` of block ``block + i // 8``.
    """
    backend()(key, nonce, block, out)


@functools.cache
def backend() -> Fill:
    """Returns ``fill_with_libcrypto`` if its bytes equal those of ``fill_with_numpy``; else ``fill_with_numpy``."""
    if _libcrypto() is None:
        return fill_with_numpy
    key, expected, got = bytes(range(32)), np.empty(99, np.uint64), np.empty(99, np.uint64)
    for nonce, block in ((0, 0), (2**64 - 59, 2**32 - 5), (7, 2**63 + 1)):  # the second crosses a 32-bit counter
        fill_with_numpy(key, nonce, block, expected)
        try:
            fill_with_libcrypto(key, nonce, block, got)
        except OSError:
            return fill_with_numpy
        if not np.array_equal(expected, got):
            return fill_with_numpy
    return fill_with_libcrypto


def fill_with_numpy(key: bytes, nonce: int, block: int, out: np.ndarray) -> None:
    """Computes ``fill_keystream`` in NumPy."""
    for start in range(0, len(out), _LANES * WORDS_PER_BLOCK):
        part = out[start : start + _LANES * WORDS_PER_BLOCK]
        blocks = -(-len(part) // WORDS_PER_BLOCK)
        stream = _blocks(key, nonce, block + start // WORDS_PER_BLOCK, blocks)
        part[:] = stream[: len(part)]


def fill_with_libcrypto(key: bytes, nonce: int, block: int, out: np.ndarray) -> None:
    """Computes ``fill_keystream`` by the EVP interface of OpenSSL, without the GIL."""
    library = _libcrypto()
    context = library.quick.EVP_CIPHER_CTX_new() if library else None
    if not library or not context:
        raise OSError("noise.chacha20: libcrypto returned no cipher context")
    out[:] = 0  # keystream = encryption of zeros, in place
    size, done, written = out.nbytes, 0, ctypes.c_int()
    initial = struct.pack("<QQ", block, nonce)
    try:
        accepted = library.quick.EVP_EncryptInit_ex(context, library.quick.EVP_chacha20(), None, key, initial)
        while accepted and done < size:
            part = min(size - done, 2**30)  # lengths are C ints
            pointer = out.ctypes.data + done
            accepted = library.long.EVP_EncryptUpdate(context, pointer, ctypes.byref(written), pointer, part)
            done += part
    finally:
        library.quick.EVP_CIPHER_CTX_free(context)  # also erases the key
    if not accepted:
        raise OSError("noise.chacha20: libcrypto rejected ChaCha20")


def _blocks(key: bytes, nonce: int, first: int, count: int) -> np.ndarray:
    """Returns the words of ``count`` blocks, ``(8 * count,)``."""
    counters = np.arange(count, dtype=np.uint64) + np.uint64(first)
    rows = np.empty((16, count), np.uint32)
    rows[:12] = np.array([*_CONSTANTS, *struct.unpack("<8I", key)], np.uint32)[:, None]
    rows[12], rows[13] = counters & np.uint64(0xFFFFFFFF), counters >> np.uint64(32)
    rows[14], rows[15] = nonce & 0xFFFFFFFF, nonce >> 32
    a, b, c, d = (rows[i : i + 4].copy() for i in (0, 4, 8, 12))
    scratch = np.empty_like(a)
    for _ in range(10):
        _quarter_rounds(a, b, c, d, scratch)  # the four columns at once
        b, c, d = b[[1, 2, 3, 0]], c[[2, 3, 0, 1]], d[[3, 0, 1, 2]]
        _quarter_rounds(a, b, c, d, scratch)  # the four diagonals
        b, c, d = b[[3, 0, 1, 2]], c[[2, 3, 0, 1]], d[[1, 2, 3, 0]]
    rows += np.concatenate((a, b, c, d))
    return np.ascontiguousarray(rows.T, dtype="<u4").reshape(-1).view("<u8")


def _quarter_rounds(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, scratch: np.ndarray) -> None:
    """Computes one quarter round on each column of four rows, in place."""
    for add_to, added, mixed, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        np.add(add_to, added, out=add_to)
        np.bitwise_xor(mixed, add_to, out=mixed)
        np.left_shift(mixed, np.uint32(bits), out=scratch)
        np.right_shift(mixed, np.uint32(32 - bits), out=mixed)
        np.bitwise_or(mixed, scratch, out=mixed)


class _Library(NamedTuple):
    """The library, opened twice: calls through ``long`` release the GIL, which takes longer than a short call."""

    quick: ctypes.CDLL
    long: ctypes.CDLL


@functools.cache
def _libcrypto() -> _Library | None:
    """Returns the library that hashlib is linked with, or a library of the system; None if there is none."""
    try:
        import _hashlib

        of_hashlib: tuple[str, ...] = (_hashlib.__file__,)
    except (ImportError, AttributeError):  # built without OpenSSL, or linked into the interpreter
        of_hashlib = ()
    pointer, number, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    for name in (*of_hashlib, *_LIBRARIES.get(sys.platform, ())):
        try:
            quick, long = ctypes.PyDLL(name), ctypes.CDLL(name)
            quick.EVP_chacha20.restype = quick.EVP_CIPHER_CTX_new.restype = pointer
            quick.EVP_CIPHER_CTX_free.argtypes = (pointer,)
            quick.EVP_EncryptInit_ex.argtypes = (pointer, pointer, pointer, text, text)
            long.EVP_EncryptUpdate.argtypes = (pointer, pointer, ctypes.POINTER(number), pointer, number)
        except (OSError, AttributeError):
            continue
        return _Library(quick, long)
    return None
