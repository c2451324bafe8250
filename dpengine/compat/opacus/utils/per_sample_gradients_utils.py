"""Compares per-sample gradients of a batch with the gradients of each sample alone, for ``probe_loss``.

See ``dpengine.engine.gradient_check``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dpengine.compat.opacus.grad_sample import wrap_model
from dpengine.compat.opacus.utils.module_utils import clone_module as clone_module
from dpengine.engine.gradient_check import (
    REDUCTIONS,
    call,
    compare,
    probe_loss,
    reference_gradients,
    unpacked,
)
from dpengine.grad_modes.modes import MODES


def is_batch_empty(batch: Tensor | Sequence[Tensor]) -> bool:
    """Returns True if a batch, or its first tensor, has no entries."""
    first: Tensor = batch if isinstance(batch, Tensor) else batch[0]
    return first.numel() == 0


class ModelWithLoss(nn.Module):
    """Model followed by a loss, which ``loss_reduction`` (``"mean"`` or ``"sum"``) reduces to one number.

    The model's output is a tensor with the batch on axis 0, or a packed sequence.
    """

    supported_reductions: ClassVar[list[str]] = list(REDUCTIONS)

    def __init__(self, module: nn.Module, loss_reduction: str = "mean"):
        super().__init__()
        if loss_reduction not in self.supported_reductions:
            raise ValueError(
                f"ModelWithLoss: loss_reduction={loss_reduction!r} is unknown. "
                f"Choose one of: {', '.join(map(repr, self.supported_reductions))}."
            )
        self.wrapped_module = module
        self.criterion = functools.partial(probe_loss, loss_reduction=loss_reduction)

    def forward(self, x: Any) -> Tensor:
        """Returns the loss of a batch: a tensor, a packed sequence or a tuple of inputs."""
        return self.criterion(call(self.wrapped_module, x))


def compute_microbatch_grad_sample(
    x: Tensor | list[Tensor],
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    chunk_method: Callable[[Any], Iterable[Any]] = iter,
) -> dict[str, Tensor]:
    """Returns the per-sample gradients ``(B, *parameter)`` of each trainable parameter, computed one sample at a time.

    Args:
        x: The batch, or a list with the input of each sample.
        module: The model; only a copy of it runs.
        batch_first: Whether axis 0 of ``x`` and of the output is the batch; else axis 1.
        loss_reduction: ``"mean"`` or ``"sum"``.
        chunk_method: Splits ``x``, batch first, into samples: tensors without the batch axis, or tuples that are
            batches of size 1.
    """
    batch = x.transpose(0, 1) if isinstance(x, Tensor) and not batch_first else x
    axis = 0 if batch_first else 1
    samples = (x if isinstance(x, tuple) else x.unsqueeze(axis) for x in chunk_method(batch))
    return reference_gradients(module, samples, batch_first=batch_first, loss_reduction=loss_reduction)


def compute_opacus_grad_sample(
    x: Tensor | PackedSequence,
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    grad_sample_mode: str = "hooks",
) -> dict[str, Tensor]:
    """Returns the per-sample gradients ``(B, *parameter)`` of each trainable parameter, computed by a wrapped copy.

    ``grad_sample_mode`` is one of ``get_grad_sample_modes(use_ew=True)``; the other arguments are those of
    ``compute_microbatch_grad_sample``.
    """
    wrapped: Any = wrap_model(
        clone_module(module), grad_sample_mode, batch_first=batch_first, loss_reduction=loss_reduction
    )
    wrapped.zero_grad()
    probe_loss(call(wrapped, x), batch_first=batch_first, loss_reduction=loss_reduction).backward()
    return {name: p.grad_sample for name, p in wrapped._module.named_parameters() if p.requires_grad}


def check_torch_version_for_ew_sample() -> bool:
    """Returns True if expanded weights are available."""
    return "ew" in MODES


def get_grad_sample_modes(use_ew: bool = False) -> list[str]:
    """Returns the modes that write ``grad_sample``, with ``use_ew`` including expanded weights."""
    return ["hooks", "functorch", *(["ew"] if use_ew and check_torch_version_for_ew_sample() else [])]


def check_per_sample_gradients_are_correct(
    x: Tensor | PackedSequence,
    module: nn.Module,
    *,
    batch_first: bool = True,
    atol: float = 10e-6,
    rtol: float = 10e-5,
    grad_sample_mode: str = "hooks",
) -> bool:
    """Returns True if the per-sample gradients of a model equal those of each sample alone, for both reductions.

    Args:
        x: The batch, with at least one sample.
        module: The model; only copies of it run, in train mode.
        batch_first: Whether axis 0 of ``x`` and of the output is the batch; else axis 1.
        atol: Absolute tolerance.
        rtol: Relative tolerance.
        grad_sample_mode: One of ``get_grad_sample_modes(use_ew=True)``.
    """
    return all(
        compare(
            *compute_grad_samples_microbatch_and_opacus(x, module, batch_first, reduction, grad_sample_mode),
            atol=atol,
            rtol=rtol,
        ).ok
        for reduction in REDUCTIONS
    )


def compute_microbatch_grad_sample_tensor_or_seq(
    x: Tensor | PackedSequence,
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
) -> dict[str, Tensor]:
    """Calls ``compute_microbatch_grad_sample``. A packed sequence is first unpacked to its original order."""
    inputs = unpacked(x) if isinstance(x, PackedSequence) else x
    return compute_microbatch_grad_sample(inputs, module, batch_first=batch_first, loss_reduction=loss_reduction)


def compute_grad_samples_microbatch_and_opacus(
    x: Tensor | PackedSequence,
    module: nn.Module,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    grad_sample_mode: str = "hooks",
    chunk_method: Callable[[Any], Iterable[Any]] = iter,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the results of ``compute_microbatch_grad_sample`` and of ``compute_opacus_grad_sample``.

    Raises:
        RuntimeError: If the batch is empty.
        ValueError: If the results have different parameter names.
    """
    if not isinstance(x, PackedSequence) and is_batch_empty(x):
        raise RuntimeError("The batch is empty. Pass at least one sample.")
    inputs = unpacked(x) if isinstance(x, PackedSequence) else x
    expected = compute_microbatch_grad_sample(inputs, module, batch_first, loss_reduction, chunk_method)
    found = compute_opacus_grad_sample(x, module, batch_first, loss_reduction, grad_sample_mode)
    if expected.keys() != found.keys():
        raise ValueError(
            f"Parameters with gradients of single samples only: {sorted(expected.keys() - found.keys())}; "
            f"with gradients of the batch only: {sorted(found.keys() - expected.keys())}."
        )
    return expected, found


def unpack_packedsequences(X: PackedSequence) -> list[Tensor]:
    """Returns the sequences ``(length, ...)`` of a packed one in packed order, longest first."""
    sequences = unpacked(X)
    return sequences if X.sorted_indices is None else [sequences[index] for index in X.sorted_indices.tolist()]
