"""A simulated CUDA device for builds of torch without CUDA: its tensors report ``cuda:0``, and each kernel is recorded.

Tensors hold shapes (meta tensors) or numbers (tensors of the CPU). Autograd runs its thread for the device, and
autocast, SGD and the engine take the paths that they take on a GPU. torch looks for CUDA when it is imported, so a
module that simulates a device runs itself again by `run_again`.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernel_log import Log, size_of, work, written_by

aten = torch.ops.aten
CARD = torch.device("cuda", 0)
_LIBRARY = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace at {
struct SimulatedHooks : CUDAHooksInterface {
  explicit SimulatedHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedHooks)
}
namespace c10::impl {
const Device card(DeviceType::CUDA, 0);
struct SimulatedGuard : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return card; }
  Device getDevice() const override { return card; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, card); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, card); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, card); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, SimulatedGuard)
}
"""
_PRELOADED = "DPENGINE_SIMULATED_GPU"
_NO_KERNEL = {
    *("_unsafe_view", "_reshape_alias", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty", "detach"),
    *("new_empty_strided", "set_", "resize_", "detach_", "alias", "t_", "transpose_", "squeeze_", "unsqueeze_"),
}
_WAITS = {"_local_scalar_dense", "equal", "allclose", "nonzero", "masked_select", "_unique2", "bincount", "is_nonzero"}
_PRODUCT_DTYPE = {aten.bmm.dtype, aten.bmm.dtype_out, aten.addmm.dtype, aten.addmm.dtype_out, aten.mm.dtype}


class OnCard(Tensor):
    """Tensor that reports the simulated device, and holds a meta tensor or a tensor of the CPU."""

    held: Tensor
    made_by: str

    @staticmethod
    def __new__(cls, held: Tensor, made_by: str = "") -> OnCard:
        layout: dict[str, Any] = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=CARD, **layout)
        made.held, made.made_by = held, made_by
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        """Runs an operation on the device."""
        return _running().run(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        """Returns the name of the class, and the tensor that holds the values."""
        return f"OnCard({self.held!r})"

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        return self.held.untyped_storage()._cdata + self.held.storage_offset() * self.held.itemsize


class Card(TorchDispatchMode):
    """Runs operations on tensors of the simulated device, and records them.

    Args:
        log: Where operations are recorded.
        holds: Device of the tensors that hold the values: ``"meta"`` for shapes alone, or ``"cpu"``.
    """

    def __init__(self, log: Log, holds: str = "meta"):
        super().__init__()
        self.log, self.holds = log, torch.device(holds)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Runs an operation."""
        return self.run(func, args, kwargs or {})

    def moved(self, tensor: Tensor) -> OnCard:
        """Returns a tensor of the CPU, or a meta tensor, on the simulated device."""
        held = tensor.detach()
        if self.holds.type == "meta" and not held.is_meta:
            held = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device="meta")
        self.log.allocate(held)
        return OnCard(held)

    def move_model(self, model: nn.Module) -> nn.Module:
        """Moves parameters and buffers to the simulated device, in place. Tied parameters stay tied."""
        found: dict[Tensor, nn.Parameter] = {}
        for part in model.modules():
            for name, p in part._parameters.items():
                if p is not None:
                    part._parameters[name] = found.setdefault(p, nn.Parameter(self.moved(p), p.requires_grad))
            part._buffers.update({n: None if b is None else self.moved(b) for n, b in part._buffers.items()})
        return model

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs an operation."""
        leaves = pytree.tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, OnCard)]
        target = kwargs.get("device")
        target = None if target is None else torch.device(target)
        if not given and (target is None or target.type != "cuda"):
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if name in _WAITS or (given and target is not None and target.type == "cpu"):
            return self._read(func, name, args, kwargs, given)
        if any(index is not None and index.dtype is torch.bool for index in _indices(name, args)):
            self.log.wait(f"{name} by a mask")
        others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, OnCard) and leaf.dim()]
        if others and name not in ("_to_copy", "copy_"):
            raise RuntimeError(f"Expected all tensors to be on the same device: {func}")
        if name == "copy_" and (others or not isinstance(args[0], OnCard)):
            self.log.wait("copy between devices")
        if target is not None:
            kwargs = {**kwargs, "device": self.holds}
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        out = self._computed(func, args, kwargs)
        result = self._wrapped(func, args, kwargs, out)
        if not (func.is_view or name in _NO_KERNEL):
            self.log.add(name, *work(func, name, args, kwargs, out))
        return result

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Computes an operation on the tensors that hold the values."""
        swap = lambda leaf: leaf.held if isinstance(leaf, OnCard) else _scalar_on(self.holds, leaf)  # noqa: E731
        args, kwargs = pytree.tree_map_only(Tensor, swap, (args, kwargs))
        if self.holds.type == "meta":
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        if func in _PRODUCT_DTYPE:  # which only CUDA has
            *args, _ = (*args, kwargs.pop("out_dtype", None)) if "out_dtype" in kwargs else args
            tensors = [a.float() if isinstance(a, Tensor) else a for a in args]
            return getattr(torch, func._schema.name.split("::")[1])(*tensors, **kwargs)
        return func(*args, **kwargs)

    def _wrapped(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        """Returns the results as tensors of the device: the arguments themselves where these were written."""
        written = written_by(func, args, kwargs)
        if written:
            if not func._schema.returns:
                return None
            return written[0] if len(func._schema.returns) == 1 else tuple(written)

        def wrap(tensor: Tensor) -> OnCard:
            self.log.allocate(tensor)
            return OnCard(tensor, func._schema.name)

        return pytree.tree_map_only(Tensor, wrap, out)

    def _read(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], given: list[OnCard]) -> Any:
        """Runs an operation for which the host waits. Without values, numbers are 1, and all tensors are equal."""
        self.log.wait(name)
        if self.holds.type == "cpu":
            args, kwargs = pytree.tree_map_only(OnCard, lambda tensor: tensor.held, (args, kwargs))
            out = func(*args, **kwargs)
            return (
                out
                if name in ("_to_copy", "_local_scalar_dense", "equal", "allclose")
                else self._wrapped(func, (), {}, out)
            )
        if name == "_to_copy":
            return torch.ones(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype)
        if name == "_local_scalar_dense":
            found = torch.ones((), dtype=given[0].dtype).item()
            return given[0].made_by == "aten::all" if given[0].dtype is torch.bool else found
        if name in ("equal", "allclose"):
            return True
        if name == "_unique2":  # all numbers differ
            sizes = (given[0].numel(),), given[0].shape, (given[0].numel(),)
            made = [torch.empty(size, dtype=torch.int64, device="meta") for size in sizes]
            self.log.add(name, None, 0.0, 16 * size_of(given[0]), launches=6)  # a sort in passes
            return self._wrapped(func, (), {}, tuple(made))
        raise NotImplementedError(f"{func} depends on values, which this device does not hold.")


class _Stream:
    device = CARD

    def wait_stream(self, other: _Stream) -> None:
        """Does nothing: there is one stream."""


_CARDS: list[Card] = []


def _running() -> Card:
    return _CARDS[-1]


def run_again(module: str, arguments: list[str]) -> int | None:
    """Runs a module in another process, which can simulate a device. Returns its exit status, or None in that process.

    Args:
        module: Name of the module.
        arguments: Its arguments.

    Returns:
        The exit status.

    Raises:
        RuntimeError: If this build of torch has CUDA, or there is no compiler.
    """
    if _PRELOADED in os.environ:
        return None
    if torch.version.cuda is not None or shutil.which("g++") is None:
        raise RuntimeError("A simulated device needs a build of torch without CUDA, and g++.")
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "device.cpp"), str(Path(folder, "device.so"))
        source.write_text(_LIBRARY)
        paths = [f"-I{root}/include", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib"]
        flags = ["-O1", "-shared", "-fPIC", "-std=c++20", *paths]
        subprocess.run(["g++", *flags, str(source), "-o", library, "-lc10", "-ltorch_cpu"], check=True)
        environment = {**os.environ, "LD_PRELOAD": library, _PRELOADED: "1"}
        return subprocess.run([sys.executable, "-m", module, *arguments], env=environment, check=False).returncode


@contextmanager
def simulated(
    log: Log, holds: str = "meta", *, memory: int = 139 * 2**30, capability: tuple[int, int] = (9, 0)
) -> Iterator[Card]:
    """Simulates a CUDA device in this process.

    Args:
        log: Where kernels are recorded.
        holds: See `Card`.
        memory: Bytes of the device.
        capability: Its compute capability.

    Yields:
        The mode in which operations run.

    Raises:
        RuntimeError: If `run_again` did not start this process.
    """
    if _PRELOADED not in os.environ:
        raise RuntimeError("The library of the simulated device is not loaded. Call run_again first.")
    card = Card(log, holds)
    facts = {
        **{"is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0, "_lazy_init": None},
        **{"get_device_capability": capability, "get_device_name": "simulated GPU", "is_bf16_supported": True},
        **{"set_rng_state": None, "current_stream": _Stream()},
        **{"get_device_properties": SimpleNamespace(total_memory=memory)},
    }
    with ExitStack() as stack:
        for name, fact in facts.items():
            stack.enter_context(patch.object(torch.cuda, name, lambda *args, fact=fact, **kwargs: fact))
        stack.enter_context(patch.object(torch.cuda, "synchronize", lambda *args: log.wait("synchronize")))
        stack.enter_context(patch.object(torch.cuda, "get_rng_state", lambda *args: torch.get_rng_state()))
        stack.enter_context(patch.object(torch.cuda, "device", lambda *args: nullcontext()))
        stack.enter_context(patch.object(torch, "Generator", _Generator))
        stack.enter_context(patch("torch.cuda.amp.common.amp_definitely_not_available", lambda: False))
        types = [*torch.utils._foreach_utils._foreach_supported_types, nn.Parameter, OnCard]
        stack.enter_context(patch("torch.optim.optimizer._foreach_supported_types", types))
        if card.holds.type == "meta":
            stack.enter_context(patch.object(F, "scaled_dot_product_attention", _attention))
        _CARDS.append(card)
        stack.callback(_CARDS.pop)
        stack.enter_context(card)
        yield card


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu")


class _Attention(torch.autograd.Function):
    """Attention by one kernel that forms no matrix of all pairs, as flash attention does."""

    @staticmethod
    def forward(ctx, q, k, v, causal):
        ctx.save_for_backward(q, k, v)
        ctx.share = 0.5 if causal else 1.0
        out = torch.empty_like(q)
        _add_attention("attention", 4 * ctx.share, [q, k, v, out])
        return out

    @staticmethod
    def backward(ctx, grad):
        grads = [torch.empty_like(tensor) for tensor in ctx.saved_tensors]
        _add_attention("attention_backward", 10 * ctx.share, [*ctx.saved_tensors, *grads, grad, grad])
        return (*grads, None)


def _add_attention(name: str, factor: float, tensors: list[Tensor]) -> None:
    *shape, time, width = tensors[0].shape
    flops = factor * math.prod(shape) * time * time * width
    _running().log.add(name, tensors[0].dtype, flops, sum(map(size_of, tensors)))


def _attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, in the dtype of autocast."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return _Attention.apply(query, key, value, is_causal)


def _scalar_on(device: torch.device, tensor: Tensor) -> Tensor:
    """Returns a tensor of the CPU as the operation on the values takes it; scalars stay where they are."""
    if device.type == "meta" and tensor.dim():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return tensor


def _indices(name: str, args: Any) -> list[Any]:
    listed = name.startswith(("index", "_index_put")) and len(args) > 1 and isinstance(args[1], (list, tuple))
    return list(args[1]) if listed else []
