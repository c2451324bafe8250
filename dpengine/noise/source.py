"""Where private randomness comes from: a secret key, and pure functions of (key, domain, incarnation, step, index).

Nothing here has a hidden position. Asking twice for one address gives the same values, whatever the chunking, the
number of threads or the order of the calls; that is what lets a resumed run, a shard or a correlated mechanism
regenerate noise. It also means that two uses of one address cancel: who asks must never use one (domain, step, index)
for two releases.
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

from .box_muller import GROUP, LARGEST_NORMAL, normals_from_words
from .chacha20 import WORDS_PER_BLOCK
from .keyed_streams import DEFAULT_KIND, SECURE_KIND, stream_kind

_KEY_BYTES = 32
_LIMIT = 2**64  # of steps, blocks and incarnations: addresses are 64-bit and never wrap
_PER_THREAD = 2**14  # normals that are worth waking a thread for
_DEVICE_CHUNK = 2**21  # elements of one seed on an accelerator: 16 MiB of words
_CHUNKS_AT_ONCE = 8  # that become normals together: each kernel costs time
_GENERATOR_DEVICES = ("cuda",)  # draw with torch's generator there; any other device receives what the CPU drew


@final
class NoiseSource:
    """A root key, and the random words and normals that follow from it.

    On the CPU words come from a keyed stream (``keyed_streams.STREAM_KINDS``); on CUDA from torch's Philox generator,
    keyed for each step and chunk with 128 bits that follow from the key, which is not cryptographic. Normals are
    computed in float64 from 64-bit words everywhere. The global generators of torch, NumPy and Python are neither read
    nor advanced.

    The object is for the process that made it: after a fork its copy refuses to draw. It cannot be copied or pickled,
    and its ``repr`` does not show the key.

    Args:
        key: 32 secret bytes. ``NoiseSource.fresh()`` takes them from the operating system.
        kind: A name in ``STREAM_KINDS``; or ``"secure"``, which draws for every device on the CPU, with chacha20.
        incarnation: Which life of the run this is. A resumed run that may draw other batches must use a new one.
        insecure_seed: Whether the key follows from something that people can guess.
    """

    def __init__(self, key: bytes, *, kind: str = DEFAULT_KIND, incarnation: int = 0, insecure_seed: bool = False):
        if len(key) != _KEY_BYTES:
            raise ValueError(f"noise.NoiseSource: key must have {_KEY_BYTES} bytes, got {len(key)}. Use .fresh().")
        self._stream = stream_kind(kind)
        self._kind = kind
        self._key = bytearray(key)
        self._incarnation = _address("incarnation", incarnation)
        self._insecure_seed = insecure_seed
        self._pid = os.getpid()
        self._pool: ThreadPoolExecutor | None = None

    @classmethod
    def fresh(cls, kind: str = DEFAULT_KIND, *, incarnation: int = 0) -> NoiseSource:
        """A source with 256 bits of key from the operating system."""
        return cls(os.urandom(_KEY_BYTES), kind=kind, incarnation=incarnation)

    @classmethod
    def seeded(cls, seed: int, kind: str = DEFAULT_KIND, *, incarnation: int = 0) -> NoiseSource:
        """A source that repeats, for tests. Whoever knows or guesses the seed can subtract the noise.

        Args:
            seed: Any integer.
            kind: A name in ``STREAM_KINDS``.
            incarnation: As for the class.

        Returns:
            A source whose ``describe()`` says ``insecure_seed``.

        Raises:
            TypeError: If ``seed`` is not an integer.
        """
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"noise.NoiseSource.seeded: seed must be an int, got {type(seed).__name__}.")
        encoded = seed.to_bytes(seed.bit_length() // 8 + 1, "little", signed=True)
        key = hashlib.blake2b(encoded, digest_size=_KEY_BYTES, person=b"dpengine seed").digest()
        return cls(key, kind=kind, incarnation=incarnation, insecure_seed=True)

    @classmethod
    def from_secret_state(cls, state: Mapping[str, Any], *, incarnation: int | None = None) -> NoiseSource:
        """The source that ``secret_state`` described, in a given incarnation or the same one."""
        return cls(
            bytes.fromhex(state["key"]),
            kind=state["kind"],
            incarnation=state["incarnation"] if incarnation is None else incarnation,
            insecure_seed=state["insecure_seed"],
        )

    def secret_state(self) -> dict[str, Any]:
        """All that is needed to go on, **the key included**: for the operator's file, never for a released one."""
        return {
            "kind": self._kind,
            "key": self._open_key().hex(),
            "incarnation": self._incarnation,
            "insecure_seed": self._insecure_seed,
        }

    def describe(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        """What a report says about noise drawn for tensors on ``device``. Public."""
        on_device = self._draws_on(torch.device(device))
        return {
            "kind": "torch-philox" if on_device else "chacha20" if self._kind == SECURE_KIND else self._kind,
            "cryptographic": self._stream.cryptographic and not on_device,
            "insecure_seed": self._insecure_seed,
            "largest_normal": LARGEST_NORMAL,
        }

    @property
    def incarnation(self) -> int:
        """Which life of the run this is."""
        return self._incarnation

    @property
    def insecure_seed(self) -> bool:
        """Whether the key follows from a seed, which voids the guarantee against whoever knows it."""
        return self._insecure_seed

    def words(
        self, count: int, *, domain: str, step: int, block: int = 0, incarnation: int | None = None
    ) -> np.ndarray:
        """Uniform 64-bit words.

        Args:
            count: How many.
            domain: What they are for. Two purposes must have two domains.
            step: The step they belong to.
            block: Where to start, in blocks of 8 words.
            incarnation: The life of the run; None for the present one.

        Returns:
            ``(count,)`` uint64, a pure function of the arguments, the key and the incarnation.

        Raises:
            ValueError: If a number is negative or the address passes 2**64.
        """
        first, size = _address("block", block), _address("count", count)
        if first - (-size // WORDS_PER_BLOCK) > _LIMIT:
            raise ValueError(
                f"noise.NoiseSource.words: block {block} and count {count} pass the last block, 2**64 - 1."
            )
        out = np.empty(size, np.uint64)
        self._stream.fill(self._subkey(b"words", domain, step, incarnation), first, out)
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
        incarnation: int | None = None,
    ) -> Tensor:
        """Adds ``std`` times independent standard normals in place, then multiplies by ``scale``, in one pass.

        On the CPU the work is shared by ``torch.get_num_threads()`` threads; the values do not depend on their number,
        nor on whether native code draws them.

        Args:
            flat: Contiguous 1-D tensor, float32 or float64. Sums are formed in float64 and rounded once.
            std: Standard deviation, in units of ``flat``.
            domain: What the noise is for. Two purposes must have two domains.
            step: The release it belongs to. Two releases must have two steps.
            start: Index of ``flat[0]`` in the whole vector, where ``flat`` is one rank's or one device's slice of it.
            scale: What the noisy vector is multiplied by.
            rows: ``flat`` is so many rows of one length, of which each begins ``stride`` places after the one before in
                the whole vector: a rank's columns of a matrix, say.
            stride: See ``rows``.
            incarnation: The life of the run whose normals these are; None for the present one. An earlier one is for
                mechanisms that need noise again which was drawn before a resume.

        Returns:
            ``flat``.
        """
        subkey = self._subkey(b"normal", domain, step, incarnation)
        if rows == 1:
            return self._draw(flat, std, scale, subkey, start, overwrite=False)
        return self._draw_rows(flat, std, scale, subkey, start, rows, stride)

    def close(self) -> None:
        """Overwrites the key, as far as Python allows, and ends the threads. Drawing afterwards raises."""
        self._key[:] = bytes(len(self._key))
        self._key.clear()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def __repr__(self) -> str:
        seeded = ", INSECURE_SEED" if self._insecure_seed else ""
        return f"NoiseSource(kind={self._kind!r}, incarnation={self._incarnation}{seeded})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "noise.NoiseSource cannot be pickled or copied: two copies would give two releases the same noise. "
            "Save secret_state() to the operator's own file."
        )

    def _open_key(self) -> bytes:
        if os.getpid() != self._pid:
            raise PrivacyError(
                f"noise.NoiseSource was made in process {self._pid} and is used in its fork {os.getpid()}, where it "
                "would give the parent's noise a second time.",
                fix="Draw batches and noise in the main process, not in data loader workers or forked ranks.",
            )
        if not self._key:
            raise PrivacyError("noise.NoiseSource is closed.", fix="Make another with NoiseSource.fresh().")
        return bytes(self._key)

    def _subkey(self, use: bytes, domain: str, step: int, incarnation: int | None = None) -> bytes:
        # Fixed-width numbers come first, so no two addresses give one message. `use` keeps words and normals apart.
        life = self._incarnation if incarnation is None else _address("incarnation", incarnation)
        numbers = struct.pack("<QQ", life, _address("step", step))
        keyed = hashlib.blake2b(numbers, digest_size=_KEY_BYTES, key=self._open_key(), person=b"dpengine " + use)
        keyed.update(domain.encode())
        return keyed.digest()

    def _draw(self, tensor: Tensor, std: float, scale: float, subkey: bytes, start: int, *, overwrite: bool) -> Tensor:
        _check_drawable(tensor)
        start = _address("start", start)
        if start + tensor.numel() > _LIMIT:
            raise ValueError(f"noise.NoiseSource: start {start} and {tensor.numel()} elements pass 2**64.")
        flat = tensor.detach()
        if overwrite:
            flat.zero_()
        if flat.numel() == 0:
            return tensor
        if self._draws_on(flat.device):
            _add_on_device(flat, std, subkey, start)
            flat.mul_(scale)
        elif flat.device.type == "cpu":
            self._add_on_cpu(flat.numpy(), std, scale, subkey, start)
        else:
            drawn = torch.zeros(flat.numel(), dtype=flat.dtype, device="cpu")
            self._add_on_cpu(drawn.numpy(), std, 1.0, subkey, start)
            flat.add_(drawn.to(flat.device)).mul_(scale)
        return tensor

    def _draws_on(self, device: torch.device) -> bool:
        """Whether the device's own generator draws what is for it; else the CPU does, and it is copied there."""
        return device.type in _GENERATOR_DEVICES and self._kind != SECURE_KIND

    def _draw_rows(
        self, flat: Tensor, std: float, scale: float, subkey: bytes, start: int, rows: int, stride: int
    ) -> Tensor:
        length = flat.numel() // max(1, rows)
        if rows < 1 or rows * length != flat.numel() or stride < length:
            raise ValueError(
                f"noise.NoiseSource: {flat.numel()} elements are not {rows} rows that begin {stride} places apart."
            )
        span = (rows - 1) * stride + length
        if flat.device.type == "cpu" and self._stream.by_rows:
            _check_drawable(flat)
            start = _address("start", start)
            _address("start", start + span)
            threads = min(torch.get_num_threads(), -(-flat.numel() // _PER_THREAD))
            target = flat.detach().numpy()
            self._stream.add_normals_by_rows(subkey, start, std, scale, target, threads, rows=rows, stride=stride)
            return flat
        between = torch.zeros(span, dtype=flat.dtype, device=flat.device)
        self._draw(between, std, 1.0, subkey, start, overwrite=False)
        flat.detach().view(rows, length).add_(between.as_strided((rows, length), (stride, 1)))
        return flat.mul_(scale)

    def _add_on_cpu(self, target: np.ndarray, std: float, scale: float, subkey: bytes, start: int) -> None:
        """Shares the vector out to threads, this one included, cut between groups of normals."""
        add = self._stream.add_normals
        count = min(torch.get_num_threads(), -(-len(target) // _PER_THREAD))
        if self._stream.in_a_team:
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
            wait(futures)  # never leave a thread writing to a tensor that the caller believes finished
        for future in futures:
            future.result()


def _add_on_device(flat: Tensor, std: float, subkey: bytes, start: int) -> None:
    """One generator for each chunk, so that a slice of the vector needs its own chunks only."""
    generator, end = torch.Generator(device=flat.device), start + flat.numel()
    last = (end - 1) // _DEVICE_CHUNK
    for first in range(start // _DEVICE_CHUNK, last + 1, _CHUNKS_AT_ONCE):
        chunks = range(first, min(first + _CHUNKS_AT_ONCE, last + 1))
        base, stop = chunks.start * _DEVICE_CHUNK, chunks.stop * _DEVICE_CHUNK
        low, high = max(start, base), min(end, stop)
        noise = normals_from_words(_device_words(generator, subkey, chunks))[low - base : high - base]
        flat[low - start : high - start] += noise.mul_(std).to(flat.dtype)


def _device_words(generator: torch.Generator, subkey: bytes, chunks: range) -> Tensor:
    """Two streams, one over the other: seeds have 64 bits, of which two would be equal in a long run."""
    words, others = torch.empty(2, len(chunks), _DEVICE_CHUNK, dtype=torch.int64, device=generator.device)
    for i, chunk in enumerate(chunks):
        digest = hashlib.blake2b(chunk.to_bytes(8, "little"), digest_size=16, key=subkey).digest()
        for drawn, seed in ((words[i], digest[:8]), (others[i], digest[8:])):
            drawn.random_(-(2**63), None, generator=generator.manual_seed(int.from_bytes(seed, "little")))
    return words.bitwise_xor_(others).view(-1)


def _check_drawable(flat: Tensor) -> None:
    if flat.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"noise.NoiseSource: got a {flat.dtype} tensor. Narrower types absorb the noise; draw into float32 or "
            "float64 and cast after the release."
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
