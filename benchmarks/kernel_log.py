"""Log of the kernels of a simulated device: their bytes and operations, the code that called them, and memory."""

from __future__ import annotations

import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

_WRITES_ONLY = {
    *("fill_", "zero_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones"),
    *("new_full", "arange", "normal_", "random_", "uniform_", "bernoulli_"),
}
# These read only as many bytes of a larger table as they write.
_READS_AS_WRITTEN = {"embedding", "gather", "index", "index_select"}
_CHUNK, _MAX_CHUNKS = 65_536, 320  # numbers of a chunk, and chunks of a launch, of operations on lists of tensors


@dataclass(frozen=True)
class Kernel:
    """Work that the device did for one operation.

    Attributes:
        name: Name of the operation, without its overload.
        part: Part of the step.
        place: Line of the package that called it, or "" for the model, autograd and the optimizer.
        dtype: Dtype of the factors of a product; None for other operations.
        flops: Floating point operations of a product.
        read_and_written: Bytes that it reads and writes at least.
        launches: Number of kernels that are launched.
    """

    name: str
    part: str
    place: str
    dtype: torch.dtype | None
    flops: float
    read_and_written: float
    launches: int = 1


class Log:
    """Record of the kernels of a simulated device since `start_again`.

    Attributes:
        kernels: The kernels, in order.
        waits: Number of times that the host waited for the device, by operation and place.
        seconds: Sum of the times that ``seconds_of`` returns for all kernels, also of those before `start_again`.
        held: Bytes in the memory of the device.
        peak: Largest number of bytes since `start_again`.
    """

    def __init__(self, seconds_of: Callable[[Kernel], float]):
        self.seconds_of = seconds_of
        self.seconds = 0.0
        self.held = self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        self.start_again()

    def start_again(self) -> None:
        """Forgets kernels and waits, and the peak."""
        self.kernels: list[Kernel] = []
        self.waits: Counter[str] = Counter()
        self.peak = self.held

    def add(self, name: str, dtype: torch.dtype | None, flops: float, moved: float, launches: int = 1) -> None:
        """Records a kernel of the calling code."""
        part, place = _caller()
        self.kernels.append(Kernel(name, part, place, dtype, flops, moved, launches))
        self.seconds += self.seconds_of(self.kernels[-1])

    def wait(self, name: str) -> None:
        """Records that the host waits for the device."""
        self.waits[f"{name} {_caller()[1]}"] += 1

    def allocate(self, tensor: Tensor) -> None:
        """Counts the memory of a tensor until it is freed."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._storages:
            return
        size = -(-storage.nbytes() // 512) * 512

        def freed(_: Any, at: int = storage._cdata) -> None:
            del self._storages[at]
            self.held -= size

        self._storages[storage._cdata] = weakref.ref(storage, freed)
        self.held += size
        self.peak = max(self.peak, self.held)


def written_by(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Returns the arguments that an operation writes to."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(kwargs[argument.name] if argument.name in kwargs else args[i])
    return found


def size_of(tensor: Tensor) -> float:
    """Returns the bytes of a tensor without expanded dimensions."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(sizes) * tensor.itemsize


def work(func: Any, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> tuple[Any, float, float, int]:
    """Returns dtype and operations of a product, the bytes that are read and written, and the number of launches."""
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    written = pytree.tree_leaves(written_by(func, args, kwargs))
    outputs = written or [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
    reads_output = name.endswith("_") and name not in ("copy_", *_WRITES_ONLY)
    keeps = reads_output or kwargs.get("beta", 0)
    read = sum(size_of(t) for t in inputs if keeps or not any(t is other for other in written))
    wrote = sum(map(size_of, outputs))
    if name in _WRITES_ONLY:
        read = 0.0
    elif name in _READS_AS_WRITTEN:
        read = wrote
    elif name in ("index_add_", "index_add", "index_put_", "_index_put_impl_", "index_copy_"):
        read, wrote = 2.0 * size_of(inputs[-1]), size_of(inputs[-1])
    elif name == "embedding_dense_backward":
        read = 2.0 * size_of(inputs[0])
    launches = 1
    if name.startswith("_foreach"):
        chunks = sum(-(-t.numel() // _CHUNK) for t in outputs)
        launches = -(-chunks // _MAX_CHUNKS)
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return None, 0.0, read + wrote, launches
    if name == "convolution_backward":  # the requested gradients; groups take five times as long
        (grad, _, weight), groups, requested = inputs[:3], args[-2], args[-1]
        flops = 2.0 * sum(requested[:2]) * len(grad) * math.prod(grad.shape[2:]) * weight.numel()
        return grad.dtype, flops * (5 if groups > 1 else 1), read + wrote, launches
    factors = [t for t in inputs if not any(t is other for other in written)]
    plain = [a for a in args if not isinstance(a, torch.dtype)]
    others = {n: value for n, value in kwargs.items() if n not in ("out", "out_dtype", "alpha", "beta")}
    return factors[-1].dtype, float(count(*plain, **others, out_val=out)), read + wrote, launches


_PARTS = {
    **{"add_normals": "noise", "add_noise": "noise", "add_sums": "sums", "sq_norms": "norms"},
    **{"time_algorithms": "timing"},
}
_SKIPPED = (  # modules between an operation and the code that called it
    *("torch.", "unittest.", "__main__"),
    *("benchmarks.simulated_gpu", "benchmarks.kernel_log", "benchmarks.gpu_model"),
)


def _caller() -> tuple[str, str]:
    """Returns the current part of the step, and the line of the package that called the operation, or ""."""
    frame: Any = sys._getframe(2)
    place, part, found = "", "", False
    while frame is not None and not part:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("torch.optim"):
            return "update", ""
        if not found and (module.startswith("torch.nn.modules.") or not module.startswith(_SKIPPED)):
            found = True
            if not module.startswith("dpengine."):
                part = "model"
            else:
                place = f"{module.removeprefix('dpengine.').replace('.', '/')}.py:{frame.f_lineno}"
        part = part or _PARTS.get(frame.f_code.co_name, "") if found else part
        frame = frame.f_back
    return part or ("capture" if found else "model"), place
