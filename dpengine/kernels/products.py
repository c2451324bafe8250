"""Computes per-sample weight gradients and their norms by compiled code on the CPU.

`norms` and `sq_norms` accept all tensors, and use torch if there is no compiled code. All other functions accept only
tensors that `has_kernels` supports: float32 on the CPU.

Axes: B samples, T positions, F features, G groups, C channels of a group, K channels of ``narrow`` in a group.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .library import native_library, thread_team, traced

_COUNT, _POINTER = ctypes.c_uint64, ctypes.c_void_p
_ALIGNMENT = 64  # of work memory, in bytes
_MAX_FLOAT64_VALUES = 64  # up to this number of values per sample, float64 is faster than blocks in float32
_CPU_BLOCK = 64  # number of squares that are added in float32 before the result is added to a float64 sum
_MIN_BLOCK, _MAX_BLOCK = 256, 4096  # limits of this number on accelerators, which need longer blocks
_MIN_ACCURATE_NORM = 1e-12  # squares outside the range of float32 are negligible in norms between this and its inverse
_MAX_WORK_BYTES = 16 * 2**20  # work memory of a thread


def has_kernels(*tensors: Tensor) -> bool:
    """Returns True if there is compiled code for the tensors."""
    if native_library() is None:
        return False
    for t in tensors:  # all(...) would take twice as long
        if type(t) is not Tensor or t.dtype is not torch.float32 or not t.is_cpu or t.layout is not torch.strided:
            return False
        if t.is_neg():  # the memory holds the negated numbers
            return False
    return True


def sq_norms(grad: Tensor) -> Tensor:
    """Computes squared norms ``(B,)`` in float64.

    On accelerators, squares are added in float32 within blocks of at most 4096 and in float64 across blocks. The
    relative error is about 1e-6.
    """
    flat_BP = grad.flatten(1) if grad.dim() > 1 else grad.unsqueeze(1)
    if has_kernels(flat_BP):
        return native_sq_norms(flat_BP)
    if flat_BP.device.type == "cpu":
        return norms(flat_BP, 1).square()
    return blocked_sq_norms(flat_BP)


def blocked_sq_norms(flat_BP: Tensor) -> Tensor:
    """Computes squared norms of ``(B, P)`` by operations that are fast on an accelerator."""
    if flat_BP.dtype is torch.float64 or (flat_BP.shape[1] <= _MAX_FLOAT64_VALUES and flat_BP.device.type != "mps"):
        return torch.linalg.vector_norm(flat_BP, dim=1, dtype=torch.float64).square()
    block = _block(flat_BP.shape[1])
    if block is None:
        in_blocks = flat_BP.shape[1] // _MAX_BLOCK * _MAX_BLOCK
        return blocked_sq_norms(flat_BP[:, :in_blocks]) + blocked_sq_norms(flat_BP[:, in_blocks:])
    norms_BN = torch.linalg.vector_norm(flat_BP.unflatten(1, (-1, block)), dim=2).to(widest(flat_BP))
    return (norms_BN if norms_BN.shape[1] == 1 else torch.linalg.vector_norm(norms_BN, dim=1)).square().view(-1)


@functools.lru_cache(maxsize=10_000)
def _block(size: int) -> int | None:
    """Returns the largest block size that divides ``size``, for an accelerator; None if it is below the limit."""
    sizes = range(min(size, _MAX_BLOCK), min(size, _MIN_BLOCK) - 1, -1)
    return next((block for block in sizes if size % block == 0), None)


def norms(tensor: Tensor, dim: int) -> Tensor:
    """Returns norms along the last axis, which must be ``dim``, in float64 or the widest dtype of the device."""
    if has_kernels(tensor):
        return native_sq_norms(tensor).sqrt_()
    if tensor.dtype is not torch.float32 or tensor.device.type != "cpu" or traced(tensor):
        return torch.linalg.vector_norm(tensor, dim=dim, dtype=widest(tensor))
    # In torch, float64 takes ten times as long. In float32, squares of values below 1e-19 lose bits. This matters
    # only if the tensor has no larger values.
    tensor = tensor.contiguous()  # otherwise torch adds the squares one by one
    in_blocks = tensor.shape[-1] // _CPU_BLOCK * _CPU_BLOCK
    parts = [torch.linalg.vector_norm(tensor[..., in_blocks:], dim=dim).double().square()]
    if in_blocks:
        blocks = tensor[..., :in_blocks].unflatten(-1, (-1, _CPU_BLOCK))
        parts.append(torch.linalg.vector_norm(blocks, dim=-1).double().square().sum(dim=-1))
    result = sum(parts[1:], parts[0]).sqrt()
    inaccurate = ~((result > _MIN_ACCURATE_NORM) & (result < 1 / _MIN_ACCURATE_NORM))
    if inaccurate.any():
        result[inaccurate] = torch.linalg.vector_norm(tensor[inaccurate], dim=-1, dtype=torch.float64)
    return result


def widest(tensor: Tensor) -> torch.dtype:
    """Returns the dtype in which norms are computed: float64, except on MPS, which does not support it."""
    return tensor.dtype if tensor.device.type == "mps" else torch.float64


def native_sq_norms(tensor: Tensor) -> Tensor:
    """Returns the squared norms ``(...)`` of a tensor ``(..., F)`` in float64."""
    matrix = tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    if matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    result = matrix.new_empty(len(matrix), dtype=torch.float64)
    sizes = (*matrix.shape, matrix.stride(0))
    native_library().sq_norms_f32(*sizes, matrix.data_ptr(), result.data_ptr(), torch.get_num_threads(), thread_team())
    return result.view(tensor.shape[:-1])


def has_gram_kernel(length: int, factors: int) -> bool:
    """Returns True if there is compiled code for Gram matrices of this size, and each thread needs little memory."""
    return native_library() is not None and native_library().gram_work(length, factors) <= _MAX_WORK_BYTES


def gram_norms(factors: Sequence[Tensor], products: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Computes squared norms of sums over T of outer products from Gram matrices. See ``grad_samplers.gram``.

    Each product is a list of indices of its factors ``(B, T, F)``. Returns squared norms, and the sums of the norms of
    the terms, both ``(products, B)`` in float64.
    """
    batch_size, length, _ = factors[0].shape
    factor_fields = [number for t in factors for number in (t.data_ptr(), *t.stride(), t.shape[2])]
    product_fields = [number for indices in products for number in (len(indices), *indices)]
    sq_norm, rounding_scale = torch.empty(2, len(products), batch_size, dtype=torch.float64)
    work, threads = _work(native_library().gram_work(length, len(factors)), batch_size)
    native_library().gram_norms_f32(
        *(batch_size, length, len(factors), (_COUNT * len(factor_fields))(*factor_fields), len(products)),
        *((_COUNT * len(product_fields))(*product_fields), sq_norm.data_ptr(), rounding_scale.data_ptr()),
        _aligned(work),
        *(threads, thread_team()),
    )
    return sq_norm, rounding_scale


# ``struct outers`` of products.c, with the same field names
OUTERS = np.dtype(
    [(name, np.uint64) for name in ("rows", "groups", "channels")]
    + [(name, np.uint64, 3) for name in ("size", "kernel", "stride", "dilation", "positions")]
    + [(name, np.uint64) for name in ("wide", "narrow", "height")]
    + [(name, np.uint64) for name in ("row_stride", "group_stride", "channel_stride", "position_stride")]
    + [(name, np.uint64) for name in ("out", "out_row_stride", "sq_norm", "kind")]
    + [("eps", np.float64)]
)
_WINDOWS, _CENTERED, _SCALED, _ENTRIES = range(4)  # ``enum kind``


@dataclass(frozen=True, eq=False)
class Windows:
    """Correlation of two tensors in each sample and group, with one to three spatial axes.

    Attributes:
        wide: ``(B, G * C, *size)``, including padding.
        narrow: ``(B, G * K, *positions)``; with ``features_last``, ``(B, *positions, G * K)``.
        groups: Number of groups G.
        kernel: Size of a window along each axis.
        stride: Distance between two windows.
        dilation: Distance between two elements of a window.
        features_last: Whether the features are on the last axis of ``narrow``.
    """

    wide: Tensor
    narrow: Tensor
    groups: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    features_last: bool = False

    @classmethod
    def of_ones(cls, grads: Tensor, *, features_last: bool) -> Windows:
        """Returns windows that contain a single 1. The sums are then those of ``grads`` over positions, ``(B, K)``."""
        axis = 1 if features_last else 2
        narrow = grads.unsqueeze(axis) if grads.dim() == 2 else grads.flatten(axis, -1 - features_last)
        return cls(narrow.new_empty(len(narrow), 0, 1), narrow, 1, (1,), (1,), (1,), features_last)

    def is_supported(self) -> bool:
        """Returns True if there is compiled code, and each thread needs little memory."""
        features = math.prod((self.wide.shape[1] // self.groups, *self.kernel))
        sums = self._channels // self.groups * features
        return has_kernels(self.wide, self.narrow) and 4 * (sums + 33 * (features + 16)) <= _MAX_WORK_BYTES

    @property
    def _channels(self) -> int:
        return self.narrow.shape[-1 if self.features_last else 1]

    def fields(self) -> dict[str, Any]:
        """Returns the fields of `OUTERS` that are not 0, except addresses, for contiguous tensors."""
        positions = self.narrow.shape[1:-1] if self.features_last else self.narrow.shape[2:]
        count, channels = math.prod(positions), self._channels
        height = channels // self.groups
        strides = (height, 1, channels) if self.features_last else (height * count, count, 1)
        axes = {"size": self.wide.shape[2:], "kernel": self.kernel, "stride": self.stride}
        axes |= {"dilation": self.dilation, "positions": positions}
        return {name: (*[1] * (3 - len(axis)), *axis) for name, axis in axes.items()} | {
            "rows": len(self.narrow),
            "groups": self.groups,
            "channels": self.wide.shape[1] // self.groups,
            "height": height,
            "row_stride": channels * count,
            **dict(zip(("group_stride", "channel_stride", "position_stride"), strides, strict=True)),
            "kind": _WINDOWS,
        }


@dataclass(frozen=True, eq=False)
class Normed:
    """Products of normalized numbers and their gradients, summed over the numbers of each feature.

    Attributes:
        wide: ``(B, groups, n)``. Each group is normalized.
        narrow: The gradients, of the same shape.
        run_length: Number of adjacent numbers that belong to one feature.
        features: Number of features.
        separate_features: True if each group has its own features; False if all groups share the same features.
        eps: Constant that is added to the mean square.
        centered: True if the mean is subtracted.
    """

    wide: Tensor
    narrow: Tensor
    run_length: int
    features: int
    separate_features: bool
    eps: float
    centered: bool = True

    def is_supported(self) -> bool:
        """Returns True if there is compiled code."""
        return has_kernels(self.wide, self.narrow)

    def fields(self) -> dict[str, Any]:
        """Returns the fields of `OUTERS`; see `Windows.fields`."""
        rows, groups, width = self.wide.shape
        return {
            "rows": rows,
            "groups": groups,
            "channels": width // self.run_length if self.separate_features else 0,
            "size": (0, 0, width),
            "kernel": (0, 0, self.run_length),
            "height": self.features,
            "row_stride": groups * width,
            "kind": _CENTERED if self.centered else _SCALED,
            "eps": self.eps,
        }


@dataclass(frozen=True, eq=False)
class Entries:
    """Gradients of the entries of a table, by the indices that were looked up.

    Attributes:
        wide: The indices, ``(B, T)`` int64.
        narrow: The gradients, ``(B, T, D)``.
        count: Number of entries.
        padding: Index that is ignored; None if there is none.
    """

    wide: Tensor
    narrow: Tensor
    count: int
    padding: int | None

    def is_supported(self) -> bool:
        """Returns True if there is compiled code."""
        return has_kernels(self.narrow) and self.wide.is_cpu and self.wide.dtype is torch.int64

    def fields(self) -> dict[str, Any]:
        """Returns the fields of `OUTERS`; see `Windows.fields`."""
        rows, positions, width = self.narrow.shape
        return {
            "rows": rows,
            "groups": 1,
            "size": (0, 0, self.count),
            "kernel": (0, 0, 2**64 - 1 if self.padding is None else self.padding),
            "positions": (0, 0, positions),
            "height": width,
            "row_stride": positions * width,
            "kind": _ENTRIES,
        }


Job = Windows | Normed | Entries


def job_table(jobs: Sequence[Job]) -> np.ndarray:
    """Returns an array of type `OUTERS` with the fields of each job, except addresses."""
    table = np.zeros(len(jobs), OUTERS)
    for row, job in zip(table, jobs, strict=True):
        for name, value in job.fields().items():
            row[name] = value
    return table


def outer_sums(jobs: np.ndarray) -> None:
    """Computes the sum over positions of ``narrow`` (outer) window for each job. The jobs must have addresses."""
    count, rows, address = len(jobs), int(jobs["rows"][0]), jobs.ctypes.data
    work, threads = _work(native_library().products_work(count, address), count * rows)
    native_library().sum_products_f32(count, address, _aligned(work), threads, thread_team())


def window_grads(windows: Windows, out: Tensor | None = None) -> Tensor:
    """Returns the squared norms ``(B,)`` of the sums over positions of ``narrow`` (outer) window.

    Writes the sums to ``out`` if it is given: ``(B, G * K, C, *kernel)`` in float32, contiguous except for axis 0.
    """
    windows = replace(windows, wide=windows.wide.contiguous(), narrow=windows.narrow.contiguous())
    sq_norm = torch.empty(len(windows.narrow), dtype=torch.float64)
    jobs = job_table([windows])
    jobs["wide"], jobs["narrow"] = windows.wide.data_ptr(), windows.narrow.data_ptr()
    jobs["sq_norm"] = sq_norm.data_ptr()
    if out is not None:
        jobs["out"], jobs["out_row_stride"] = out.data_ptr(), out.stride(0)
    outer_sums(jobs)
    return sq_norm


def _work(bytes_per_thread: int, rows: int) -> tuple[Tensor, int]:
    """Returns work memory for all threads, and the number of threads, which GOMP does not exceed."""
    threads = max(1, min(torch.get_num_threads(), rows)) if thread_team() else 1
    return torch.empty(threads * bytes_per_thread + _ALIGNMENT, dtype=torch.uint8), threads


def _aligned(work: Tensor) -> int:
    return -(-work.data_ptr() // _ALIGNMENT) * _ALIGNMENT
