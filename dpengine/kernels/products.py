"""Computes per-sample weight gradients and their norms by compiled code on the CPU.

`norms` and `sq_norms` accept all tensors, and use torch if there is no compiled code. All other functions accept only
float32 tensors on the CPU for which ``takes`` returns True.

Axes: B rows, T places, F features, G groups, C channels of a group, K channels of ``narrow`` in a group.
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
_LINE = 64  # bytes to which work space is aligned
_FEW = 64  # values per sample up to which one call in float64 is faster than several in float32
_SHORT_BLOCK = 64  # number of squares that are added in float32 before the result is added to a float64 sum
_SMALLEST_BLOCK, _LARGEST_BLOCK = 256, 4096  # limits of this number on accelerators, which need longer blocks
_SURE = 1e-12  # for norms between this and its inverse, squares outside the range of float32 are negligible
_LARGEST_WORK = 16 * 2**20  # largest work memory of a thread, in bytes


def takes(*tensors: Tensor) -> bool:
    """Returns True if there is compiled code for these tensors."""
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
    if takes(flat_BP):
        return native_sq_norms(flat_BP)
    if flat_BP.device.type == "cpu":
        return norms(flat_BP, 1).square()
    return blocked_sq_norms(flat_BP)


def blocked_sq_norms(flat_BP: Tensor) -> Tensor:
    """Computes squared norms of ``(B, P)`` with operations that are fast on an accelerator."""
    if flat_BP.dtype is torch.float64 or (flat_BP.shape[1] <= _FEW and flat_BP.device.type != "mps"):
        return torch.linalg.vector_norm(flat_BP, dim=1, dtype=torch.float64).square()
    block = _block(flat_BP.shape[1])
    if block is None:
        in_blocks = flat_BP.shape[1] // _LARGEST_BLOCK * _LARGEST_BLOCK
        return blocked_sq_norms(flat_BP[:, :in_blocks]) + blocked_sq_norms(flat_BP[:, in_blocks:])
    norms_BN = torch.linalg.vector_norm(flat_BP.unflatten(1, (-1, block)), dim=2).to(widest(flat_BP))
    return (norms_BN if norms_BN.shape[1] == 1 else torch.linalg.vector_norm(norms_BN, dim=1)).square().view(-1)


@functools.lru_cache(maxsize=10_000)
def _block(size: int) -> int | None:
    """Returns the largest size of equal blocks, for an accelerator; None if the best blocks are too short."""
    sizes = range(min(size, _LARGEST_BLOCK), min(size, _SMALLEST_BLOCK) - 1, -1)
    return next((block for block in sizes if size % block == 0), None)


def norms(tensor: Tensor, dim: int) -> Tensor:
    """Returns norms along the last axis, which must be ``dim``, in float64 or the widest dtype of the device."""
    if takes(tensor):
        return native_sq_norms(tensor).sqrt_()
    if tensor.dtype is not torch.float32 or tensor.device.type != "cpu" or traced(tensor):
        return torch.linalg.vector_norm(tensor, dim=dim, dtype=widest(tensor))
    # In torch, float64 takes ten times as long. In float32, squares of values below 1e-19 lose bits, which matters only
    # if the sum has no larger values.
    tensor = tensor.contiguous()  # otherwise torch adds the squares one by one
    in_blocks = tensor.shape[-1] // _SHORT_BLOCK * _SHORT_BLOCK
    parts = [torch.linalg.vector_norm(tensor[..., in_blocks:], dim=dim).double().square()]
    if in_blocks:
        blocks = tensor[..., :in_blocks].unflatten(-1, (-1, _SHORT_BLOCK))
        parts.append(torch.linalg.vector_norm(blocks, dim=-1).double().square().sum(dim=-1))
    result = sum(parts[1:], parts[0]).sqrt()
    doubtful = ~((result > _SURE) & (result < 1 / _SURE))
    if doubtful.any():
        result[doubtful] = torch.linalg.vector_norm(tensor[doubtful], dim=-1, dtype=torch.float64)
    return result


def widest(tensor: Tensor) -> torch.dtype:
    """Returns the dtype in which norms are formed: float64, which MPS lacks."""
    return tensor.dtype if tensor.device.type == "mps" else torch.float64


def native_sq_norms(tensor: Tensor) -> Tensor:
    """Returns the squared norms ``(...)`` of a tensor ``(..., F)`` in float64."""
    rows = tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    result = rows.new_empty(len(rows), dtype=torch.float64)
    sizes = (*rows.shape, rows.stride(0))
    native_library().sq_norms_f32(*sizes, rows.data_ptr(), result.data_ptr(), torch.get_num_threads(), thread_team())
    return result.view(tensor.shape[:-1])


def gram_fits(length: int, factors: int) -> bool:
    """Returns True if compiled code is fast for Gram matrices of this number of positions and factors."""
    return native_library() is not None and native_library().gram_work(length, factors) <= _LARGEST_WORK


def gram_norms(factors: Sequence[Tensor], products: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Computes squared norms of sums over T of outer products from Gram matrices. See ``grad_samplers.gram``.

    A product lists the indices of its factors ``(B, T, F)``. Returns squared norms, and the sums of the norms of the
    terms, both ``(products, B)`` in float64.
    """
    rows, length, _ = factors[0].shape
    described = [number for t in factors for number in (t.data_ptr(), *t.stride(), t.shape[2])]
    listed = [number for which in products for number in (len(which), *which)]
    sq_norm, rounding_scale = torch.empty(2, len(products), rows, dtype=torch.float64)
    work, threads = _work(native_library().gram_work(length, len(factors)), rows)
    native_library().gram_norms_f32(
        *(rows, length, len(factors), (_COUNT * len(described))(*described), len(products)),
        *((_COUNT * len(listed))(*listed), sq_norm.data_ptr(), rounding_scale.data_ptr(), _aligned(work)),
        *(threads, thread_team()),
    )
    return sq_norm, rounding_scale


# ``struct outers`` of products.c, with the same names
OUTERS = np.dtype(
    [(name, np.uint64) for name in ("rows", "groups", "channels")]
    + [(name, np.uint64, 3) for name in ("size", "kernel", "stride", "dilation", "places")]
    + [(name, np.uint64) for name in ("wide", "narrow", "high", "row", "group", "channel", "place")]
    + [(name, np.uint64) for name in ("out", "out_row", "sq_norm", "kind")]
    + [("eps", np.float64)]
)
_WINDOWS, _CENTERED, _SCALED, _ENTRIES = range(4)  # ``enum kind``


@dataclass(frozen=True, eq=False)
class Windows:
    """A correlation of two tensors in each row and group, with one to three spatial axes.

    Attributes:
        wide: ``(B, G * C, *size)``, including padding.
        narrow: ``(B, G * K, *places)``; with ``features_last``, ``(B, *places, G * K)``.
        groups: Number of groups G.
        kernel: Size of a window along each axis.
        stride: Distance between two windows.
        dilation: Distance between two numbers of a window.
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
        """Returns windows of a single 1, so that the sums are those of ``grads`` over positions, ``(B, K)``."""
        at = 1 if features_last else 2
        narrow = grads.unsqueeze(at) if grads.dim() == 2 else grads.flatten(at, -1 - features_last)
        return cls(narrow.new_empty(len(narrow), 0, 1), narrow, 1, (1,), (1,), (1,), features_last)

    def fit(self) -> bool:
        """Returns True if there is compiled code, and each thread needs little memory."""
        features = math.prod((self.wide.shape[1] // self.groups, *self.kernel))
        sums = self._channels // self.groups * features
        return takes(self.wide, self.narrow) and 4 * (sums + 33 * (features + 16)) <= _LARGEST_WORK

    @property
    def _channels(self) -> int:
        return self.narrow.shape[-1 if self.features_last else 1]

    def fields(self) -> dict[str, Any]:
        """Returns the fields of `OUTERS` that are not 0, without addresses, for contiguous tensors."""
        places = self.narrow.shape[1:-1] if self.features_last else self.narrow.shape[2:]
        count, channels = math.prod(places), self._channels
        high = channels // self.groups
        group, channel, place = (high, 1, channels) if self.features_last else (high * count, count, 1)
        axes = {"size": self.wide.shape[2:], "kernel": self.kernel, "stride": self.stride}
        axes |= {"dilation": self.dilation, "places": places}
        return {name: (*[1] * (3 - len(axis)), *axis) for name, axis in axes.items()} | {
            "rows": len(self.narrow),
            "groups": self.groups,
            "channels": self.wide.shape[1] // self.groups,
            "high": high,
            "row": channels * count,
            "group": group,
            "channel": channel,
            "place": place,
            "kind": _WINDOWS,
        }


@dataclass(frozen=True, eq=False)
class Normed:
    """The product of normalized numbers and their gradients, summed by feature.

    Attributes:
        wide: ``(B, groups, n)``. Each group is normalized.
        narrow: The gradients, of the same shape.
        run: Number of adjacent numbers of one feature.
        features: Number of features.
        apart: True if each group has separate features; False if all groups share the same features.
        eps: Added to the mean square.
        centered: True if the mean is subtracted.
    """

    wide: Tensor
    narrow: Tensor
    run: int
    features: int
    apart: bool
    eps: float
    centered: bool = True

    def fit(self) -> bool:
        """Returns True if there is compiled code."""
        return takes(self.wide, self.narrow)

    def fields(self) -> dict[str, Any]:
        """Returns the fields of `OUTERS`; see `Windows.fields`."""
        rows, groups, width = self.wide.shape
        return {
            "rows": rows,
            "groups": groups,
            "channels": width // self.run if self.apart else 0,
            "size": (0, 0, width),
            "kernel": (0, 0, self.run),
            "high": self.features,
            "row": groups * width,
            "kind": _CENTERED if self.centered else _SCALED,
            "eps": self.eps,
        }


@dataclass(frozen=True, eq=False)
class Entries:
    """Gradients of the entries of a table, by the indices that were looked up.

    Attributes:
        wide: ``(B, T)`` int64.
        narrow: The gradients, ``(B, T, D)``.
        count: Number of entries.
        padding: An index that is ignored; None without one.
    """

    wide: Tensor
    narrow: Tensor
    count: int
    padding: int | None

    def fit(self) -> bool:
        """Returns True if there is compiled code."""
        return takes(self.narrow) and self.wide.is_cpu and self.wide.dtype is torch.int64

    def fields(self) -> dict[str, Any]:
        """Returns the fields of `OUTERS`; see `Windows.fields`."""
        rows, places, width = self.narrow.shape
        return {
            "rows": rows,
            "groups": 1,
            "size": (0, 0, self.count),
            "kernel": (0, 0, 2**64 - 1 if self.padding is None else self.padding),
            "places": (0, 0, places),
            "high": width,
            "row": places * width,
            "kind": _ENTRIES,
        }


Job = Windows | Normed | Entries


def job_table(jobs: Sequence[Job]) -> np.ndarray:
    """Returns a table of type `OUTERS` with a row for each job, without addresses."""
    table = np.zeros(len(jobs), OUTERS)
    for row, job in zip(table, jobs, strict=True):
        for name, value in job.fields().items():
            row[name] = value
    return table


def outer_sums(jobs: np.ndarray) -> None:
    """Computes the sums over positions of ``narrow`` (outer) window, for a table of jobs with addresses."""
    count, rows, at = len(jobs), int(jobs["rows"][0]), jobs.ctypes.data
    work, threads = _work(native_library().products_work(count, at), count * rows)
    native_library().sum_products_f32(count, at, _aligned(work), threads, thread_team())


def window_grads(c: Windows, out: Tensor | None = None) -> Tensor:
    """Returns the squared norms ``(B,)`` of the sums over positions of ``narrow`` (outer) window.

    Writes the sums to ``out`` if it is not None: ``(B, G * K, C, *kernel)`` in float32, contiguous except for axis 0.
    """
    c = replace(c, wide=c.wide.contiguous(), narrow=c.narrow.contiguous())
    sq_norm = torch.empty(len(c.narrow), dtype=torch.float64)
    jobs = job_table([c])
    jobs["wide"], jobs["narrow"], jobs["sq_norm"] = c.wide.data_ptr(), c.narrow.data_ptr(), sq_norm.data_ptr()
    if out is not None:
        jobs["out"], jobs["out_row"] = out.data_ptr(), out.stride(0)
    outer_sums(jobs)
    return sq_norm


def _work(bytes_per_thread: int, rows: int) -> tuple[Tensor, int]:
    """Returns work memory for all threads, and the number of threads, which GOMP does not exceed."""
    threads = max(1, min(torch.get_num_threads(), rows)) if thread_team() else 1
    return torch.empty(threads * bytes_per_thread + _LINE, dtype=torch.uint8), threads


def _aligned(work: Tensor) -> int:
    return -(-work.data_ptr() // _LINE) * _LINE
