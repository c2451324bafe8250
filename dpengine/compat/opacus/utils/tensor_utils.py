"""Per-sample norms, sums over inner axes, and sliding windows, for tensors of any memory format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dpengine.grad_samplers.conv import padding_of, sliding_windows

_NARROW = {torch.float16, torch.bfloat16}


def calc_sample_norms(named_params: Iterable[tuple[str, Tensor]], *, flat: bool = True) -> list[Tensor]:
    """Returns the L2 norms ``(B,)`` of the samples of each batch-first tensor, in float32 or wider.

    Args:
        named_params: Names and tensors.
        flat: Whether to return a list of one tensor, the norms over all tensors.

    Raises:
        ValueError: If ``flat`` is set and there is no tensor.
    """
    norms = [calc_sample_norms_one_layer(tensor) for _, tensor in named_params]
    if not flat:
        return norms
    if not norms:
        raise ValueError("calc_sample_norms: no tensors. Pass (name, tensor) pairs, each with the batch on axis 0.")
    return [torch.linalg.vector_norm(torch.stack(norms), dim=0)]


def calc_sample_norms_one_layer(param: Tensor) -> Tensor:
    """Returns the L2 norm ``(B,)`` of each sample of a batch-first tensor, in float32 or wider."""
    flat = param.reshape(len(param), math.prod(param.shape[1:]))
    return torch.linalg.vector_norm(flat, dim=1, dtype=torch.float32 if param.dtype in _NARROW else None)


def sum_over_all_but_batch_and_last_n(tensor: Tensor, n_dims: int) -> Tensor:
    """Sums over all axes except the first and the last ``n_dims``. Returns the tensor itself if there are none."""
    axes = list(range(1, tensor.dim() - n_dims))
    return tensor.sum(dim=axes) if axes else tensor


def unfold2d(
    input: Tensor,
    *,
    kernel_size: tuple[int, int],
    padding: str | tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
) -> Tensor:
    """Returns the windows of a two-dimensional convolution, ``(B, C * window, positions)``.

    Order and arguments are those of ``torch.nn.functional.unfold``; ``padding`` may also be ``"same"`` or ``"valid"``.
    """
    return _unfolded(input, kernel_size, padding, stride, dilation)


def unfold3d(
    tensor: Tensor,
    *,
    kernel_size: int | tuple[int, int, int],
    padding: str | int | tuple[int, int, int] = 0,
    stride: int | tuple[int, int, int] = 1,
    dilation: int | tuple[int, int, int] = 1,
) -> Tensor:
    """Returns the windows of a three-dimensional convolution over ``(B, C, D, H, W)``, in the order of ``unfold2d``.

    The arguments are those of ``unfold2d``, where one number stands for all axes.

    Raises:
        ValueError: If the tensor does not have five axes.
    """
    if tensor.dim() != 5:
        raise ValueError(f"unfold3d: tensor must be (B, C, D, H, W), got shape {tuple(tensor.shape)}.")
    pads = padding if isinstance(padding, str) else _three(padding)
    return _unfolded(tensor, _three(kernel_size), pads, _three(stride), _three(dilation))


def filter_dilated_rows(
    tensor: Tensor,
    dilation: tuple[int, int, int],
    dilated_kernel_size: tuple[int, int, int],
    kernel_size: tuple[int, int, int],
) -> Tensor:
    """Selects the values that a dilated kernel reads from each window, which is in the last axes.

    These axes have the sizes ``dilated_kernel_size`` in the tensor, and ``kernel_size`` in the result.
    """
    for axis, (reach, step) in enumerate(zip(dilated_kernel_size, dilation, strict=True), tensor.dim() - len(dilation)):
        tensor = tensor.narrow(axis, 0, reach).movedim(axis, 0)[::step].movedim(0, axis)
    return tensor


def _unfolded(
    tensor: Tensor,
    kernel: Sequence[int],
    padding: str | Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    windows = sliding_windows(tensor, kernel, stride, dilation, padding_of(padding, kernel, dilation))
    positions = math.prod(windows.shape[windows.dim() - len(kernel) :])
    return windows.reshape(len(tensor), math.prod(windows.shape[1 : windows.dim() - len(kernel)]), positions)


def _three(value: int | tuple[int, int, int]) -> tuple[int, int, int]:
    return (value, value, value) if isinstance(value, int) else value
