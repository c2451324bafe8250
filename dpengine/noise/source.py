"""Source of private randomness: pure functions of a secret key and an address (domain, nonce, step, index).

The source has no position. An address always has the same values, for any chunking, number of threads and order of
calls. A resumed run, a shard or a correlated mechanism can therefore regenerate noise, if its generator is the same
(see `NoiseSource.generator_on`). Noise at the same address cancels, so the caller must never use a (domain, step,
index) for two releases.
"""

from __future__ import annotations

import hashlib
import operator
import os
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NoReturn, final

import numpy as np
import torch
from torch import Tensor

from dpengine.errors import PrivacyError

from .box_muller import GROUP, LARGEST_NORMAL
from .chacha20 import WORDS_PER_BLOCK
from .keyed_streams import DEFAULT_KIND, SECURE_KIND, stream_kind
from .philox_normals import GENERATOR, add_normals

_KEY_BYTES = 32
_LIMIT = 2**64  # upper limit of steps, blocks and nonces: addresses are 64-bit and never wrap
_MIN_PER_THREAD = 2**14  # minimum number of normals per thread
_GENERATOR_DEVICES = ("cuda",)  # devices that generate their own noise; the CPU generates noise for others


@final
class NoiseSource:
    """Derives random words and normals from a secret key.

    On the CPU, words come from a keyed stream (``keyed_streams.STREAM_KINDS``). On CUDA, they come from Philox4x32-10,
    which is not cryptographic; 128 bits derived from the key are its key for each step (`philox_normals`). Normals are
    computed in float64 from 64-bit words on all devices. The global generators of torch, NumPy and Python are not used.

    The object can only be used in the process that created it and raises in a fork. It cannot be copied or pickled, and
    its ``repr`` does not show the key.

    Args:
        key: 32 secret bytes. ``NoiseSource.fresh()`` reads them from the operating system.
        kind: A name in ``STREAM_KINDS``; or ``"secure"``, which generates with chacha20 on the CPU for all devices.
        nonce: Noise nonce of the run. A resumed run must use a new one if it may sample other batches.
        insecure_seed: Whether the key is derived from a value that can be guessed.
    """

    def __init__(self, key: bytes, *, kind: str = DEFAULT_KIND, nonce: int = 0, insecure_seed: bool = False):
        if len(key) != _KEY_BYTES:
            raise ValueError(f"noise.NoiseSource: key must have {_KEY_BYTES} bytes, got {len(key)}. Use .fresh().")
        self._stream = stream_kind(kind)
        self._kind = kind
        self._key = bytearray(key)
        self._nonce = _address("nonce", nonce)
        self._insecure_seed = insecure_seed
        self._pid = os.getpid()
        self._pool: ThreadPoolExecutor | None = None

    @classmethod
    def fresh(cls, kind: str = DEFAULT_KIND, *, nonce: int = 0) -> NoiseSource:
        """Returns a source with a 256-bit key from the operating system."""
        return cls(os.urandom(_KEY_BYTES), kind=kind, nonce=nonce)

    @classmethod
    def seeded(cls, seed: int, kind: str = DEFAULT_KIND, *, nonce: int = 0) -> NoiseSource:
        """Returns a reproducible source, for tests. Anyone who knows or guesses the seed can subtract the noise.

        Args:
            seed: Any integer.
            kind: A name in ``STREAM_KINDS``.
            nonce: Noise nonce of the run.

        Returns:
            A source whose ``describe()`` has ``insecure_seed``.

        Raises:
            TypeError: If ``seed`` is not an integer.
        """
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"noise.NoiseSource.seeded: seed must be an int, got {type(seed).__name__}.")
        encoded = seed.to_bytes(seed.bit_length() // 8 + 1, "little", signed=True)
        key = hashlib.blake2b(encoded, digest_size=_KEY_BYTES, person=b"dpengine seed").digest()
        return cls(key, kind=kind, nonce=nonce, insecure_seed=True)

    @classmethod
    def from_secret_state(cls, state: Mapping[str, Any], *, nonce: int | None = None) -> NoiseSource:
        """Returns the source of a result of ``secret_state``, with the stored nonce or the given one."""
        return cls(
            bytes.fromhex(state["key"]),
            kind=state["kind"],
            nonce=state["incarnation"] if nonce is None else nonce,
            insecure_seed=state["insecure_seed"],
        )

    def secret_state(self) -> dict[str, Any]:
        """Returns the state for resuming, **with the key**. Store it in a private file only."""
        return {
            "kind": self._kind,
            "key": self._open_key().hex(),
            "incarnation": self._nonce,
            "insecure_seed": self._insecure_seed,
        }

    def describe(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Returns a public description of the noise for tensors on ``device``, for reports."""
        on_device = self._draws_on(torch.device(device))
        return {
            "kind": GENERATOR if on_device else "chacha20" if self._kind == SECURE_KIND else self._kind,
            "cryptographic": self._stream.cryptographic and not on_device,
            "insecure_seed": self._insecure_seed,
            "largest_normal": LARGEST_NORMAL,
        }

    def generator_on(self, device: torch.device) -> str:
        """Returns the name of the generator of normals for a device. Generators may differ in the values at an address.

        Args:
            device: Device of the tensor that gets the noise.

        Returns:
            ``"CPU"``, or the name of the generator of accelerators, whose values are the same on all accelerators.
        """
        return GENERATOR if self._draws_on(device) else "CPU"

    @property
    def nonce(self) -> int:
        """Noise nonce of the run."""
        return self._nonce

    @property
    def insecure_seed(self) -> bool:
        """True if the key is derived from a seed. There is then no guarantee against anyone who knows the seed."""
        return self._insecure_seed

    def words(self, count: int, *, domain: str, step: int, block: int = 0, nonce: int | None = None) -> np.ndarray:
        """Returns uniform 64-bit words.

        Args:
            count: Number of words.
            domain: Purpose of the words. Different purposes must have different domains.
            step: Step of the words.
            block: First block, in units of 8 words.
            nonce: Noise nonce; None for the current one.

        Returns:
            ``(count,)`` uint64, a pure function of the arguments, the key and the nonce.

        Raises:
            ValueError: If a number is negative, or the address exceeds 2**64.
        """
        first, size = _address("block", block), _address("count", count)
        if first - (-size // WORDS_PER_BLOCK) > _LIMIT:
            raise ValueError(
                f"noise.NoiseSource.words: block {block} and count {count} exceed the last block, 2**64 - 1."
            )
        out = np.empty(size, np.uint64)
        self._stream.fill(self._subkey(b"words", domain, step, nonce), first, out)
        return out

    def normal_(self, out: Tensor, *, domain: str, step: int, start: int = 0) -> Tensor:
        """Fills ``out`` with standard normals; the arguments are those of ``add_normal_``."""
        return self._draw(out, 1.0, 1.0, self._subkey(b"normal", domain, step), start, overwrite=True)

    def add_normal_(
        self,
        flat: Tensor,
        std: float,
        *,
        domain: str,
        step: int,
        start: int = 0,
        scale: float = 1.0,
        rows: int = 1,
        stride: int = 0,
        nonce: int | None = None,
    ) -> Tensor:
        """Adds ``std`` times independent standard normals in place, and multiplies by ``scale``, in one pass.

        On the CPU, ``torch.get_num_threads()`` threads share the work. The values do not depend on the number of
        threads or on the use of native code.

        Args:
            flat: Contiguous 1-D tensor, float32 or float64. Sums are formed in float64 and rounded once.
            std: Standard deviation, in units of ``flat``.
            domain: Purpose of the noise. Different purposes must have different domains.
            step: Step of the noise. Different releases must have different steps.
            start: Index of ``flat[0]`` in the complete vector, if ``flat`` is a slice of it on one rank or device.
            scale: Factor of the noisy vector.
            rows: Number of rows of equal length in ``flat``. The starts of adjacent rows are ``stride`` apart in the
                complete vector, for example if a rank holds some columns of a matrix.
            stride: See ``rows``.
            nonce: Noise nonce; None for the current one. An earlier one regenerates noise from before a resume.

        Returns:
            ``flat``.
        """
        subkey = self._subkey(b"normal", domain, step, nonce)
        if rows == 1:
            return self._draw(flat, std, scale, subkey, start, overwrite=False)
        return self._draw_rows(flat, std, scale, subkey, start, rows, stride)

    def close(self) -> None:
        """Overwrites the key as far as Python allows, and stops the threads. Later calls raise."""
        self._key[:] = bytes(len(self._key))
        self._key.clear()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def __repr__(self) -> str:
        seeded = ", INSECURE_SEED" if self._insecure_seed else ""
        return f"NoiseSource(kind={self._kind!r}, nonce={self._nonce}{seeded})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "noise.NoiseSource cannot be pickled or copied: two copies would generate the same noise for two releases. "
            "Store secret_state() in a private file instead."
        )

    def _open_key(self) -> bytes:
        if os.getpid() != self._pid:
            raise PrivacyError(
                f"noise.NoiseSource was created in process {self._pid} and is used in its fork {os.getpid()}, which "
                "would repeat the noise of the parent.",
                fix="Generate batches and noise in the main process, not in data loader workers or forked ranks.",
            )
        if not self._key:
            raise PrivacyError("noise.NoiseSource is closed.", fix="Create another one with NoiseSource.fresh().")
        return bytes(self._key)

    def _subkey(self, use: bytes, domain: str, step: int, nonce: int | None = None) -> bytes:
        # Fixed-width numbers come first, so addresses map to distinct messages. `use` separates words and normals.
        nonce = self._nonce if nonce is None else _address("nonce", nonce)
        numbers = struct.pack("<QQ", nonce, _address("step", step))
        keyed = hashlib.blake2b(numbers, digest_size=_KEY_BYTES, key=self._open_key(), person=b"dpengine " + use)
        keyed.update(domain.encode())
        return keyed.digest()

    def _draw(self, tensor: Tensor, std: float, scale: float, subkey: bytes, start: int, *, overwrite: bool) -> Tensor:
        _check_drawable(tensor)
        start = _address("start", start)
        if start + tensor.numel() > _LIMIT:
            raise ValueError(f"noise.NoiseSource: start {start} and {tensor.numel()} elements exceed 2**64.")
        flat = tensor.detach()
        if overwrite:
            flat.zero_()
        if flat.numel() == 0:
            return tensor
        if self._draws_on(flat.device):
            add_normals(flat, std, scale, subkey, start)
        elif flat.device.type == "cpu":
            self._add_on_cpu(flat.numpy(), std, scale, subkey, start)
        else:
            noise = torch.zeros(flat.numel(), dtype=flat.dtype, device="cpu")
            self._add_on_cpu(noise.numpy(), std, 1.0, subkey, start)
            flat.add_(noise.to(flat.device)).mul_(scale)
        return tensor

    def _draws_on(self, device: torch.device) -> bool:
        """Returns True if the device generates its own noise, False if the CPU does."""
        return device.type in _GENERATOR_DEVICES and self._kind != SECURE_KIND

    def _draw_rows(
        self, flat: Tensor, std: float, scale: float, subkey: bytes, start: int, rows: int, stride: int
    ) -> Tensor:
        length = flat.numel() // max(1, rows)
        if rows < 1 or rows * length != flat.numel() or stride < length:
            raise ValueError(
                f"noise.NoiseSource: {flat.numel()} elements do not form {rows} rows with a stride of {stride}."
            )
        span = (rows - 1) * stride + length
        if flat.device.type == "cpu" and self._stream.by_rows:
            _check_drawable(flat)
            start = _address("start", start)
            _address("start", start + span)
            threads = min(torch.get_num_threads(), -(-flat.numel() // _MIN_PER_THREAD))
            target = flat.detach().numpy()
            self._stream.add_normals_by_rows(subkey, start, std, scale, target, threads, rows=rows, stride=stride)
            return flat
        between = torch.zeros(span, dtype=flat.dtype, device=flat.device)
        self._draw(between, std, 1.0, subkey, start, overwrite=False)
        flat.detach().view(rows, length).add_(between.as_strided((rows, length), (stride, 1)))
        return flat.mul_(scale)

    def _add_on_cpu(self, target: np.ndarray, std: float, scale: float, subkey: bytes, start: int) -> None:
        """Distributes the vector over threads, including the current one. Parts end between groups of normals."""
        add = self._stream.add_normals
        count = min(torch.get_num_threads(), -(-len(target) // _MIN_PER_THREAD))
        if self._stream.uses_torch_threads:
            return add(subkey, start, std, scale, target, count)
        size = -(-len(target) // count // GROUP) * GROUP
        ends = [0, *(max(0, min(len(target), (start // GROUP * GROUP) + k * size - start)) for k in range(1, count))]
        parts = [slice(low, high) for low, high in zip(ends, [*ends[1:], len(target)], strict=True)]

        def add_part(part: slice) -> None:
            add(subkey, start + part.start, std, scale, target[part])

        if count == 1:
            return add_part(parts[0])
        self._pool = self._pool or ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="dpengine-noise")
        futures = [self._pool.submit(add_part, part) for part in parts[1:]]
        try:
            add_part(parts[0])
        finally:
            wait(futures)  # no thread may write to the tensor after the return
        for future in futures:
            future.result()


def _check_drawable(flat: Tensor) -> None:
    if flat.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"noise.NoiseSource: got a {flat.dtype} tensor. Rounding to narrower types absorbs noise. Use float32 or "
            "float64, and cast after the release."
        )
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(
            f"noise.NoiseSource: needs a contiguous 1-D tensor, got shape {tuple(flat.shape)} with strides "
            f"{flat.stride()}. Pass flat.view(-1) of one contiguous buffer."
        )


def _address(name: str, value: int) -> int:
    if isinstance(value, bool):
        raise TypeError(f"noise.NoiseSource: {name} must be an int, got a bool.")
    number = operator.index(value)
    if not 0 <= number < _LIMIT:
        raise ValueError(f"noise.NoiseSource: {name} must be in [0, 2**64), got {number}.")
    return number
