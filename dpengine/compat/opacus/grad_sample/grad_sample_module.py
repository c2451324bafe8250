"""``GradSampleModule``: per-sample gradients that are materialized when they are read."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, MutableMapping
from typing import Any, ClassVar

from torch import Tensor, nn

from dpengine.capture.capture import CaptureState
from dpengine.errors import keyword_hints
from dpengine.grad_modes.grad_sample import add_grad_sample

from .gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule
from .registries import GRAD_SAMPLERS


def create_or_accumulate_grad_sample(*, param: Tensor, grad_sample: Tensor, max_batch_len: int) -> None:
    """Adds to the per-sample gradient of a parameter in the current backward pass.

    Args:
        param: The parameter.
        grad_sample: ``(n, *param.shape)``, of the first ``n`` samples.
        max_batch_len: Number of samples in the batch.
    """
    if not param.requires_grad:
        return
    present = getattr(param, "_current_grad_sample", None)
    if present is None:
        present = grad_sample.new_zeros(max_batch_len, *grad_sample.shape[1:])
        param._current_grad_sample = present  # type: ignore[attr-defined]
    present[: len(grad_sample)] += grad_sample


def promote_current_grad_sample(p: nn.Parameter) -> None:
    """Moves the per-sample gradient of the current pass to ``p.grad_sample``, or appends it to that list."""
    if p.requires_grad:
        add_grad_sample(p, p._current_grad_sample)  # type: ignore[attr-defined]
        del p._current_grad_sample  # type: ignore[attr-defined]


class GradSampleHooks(AbstractGradSampleHooks):
    """Hooks on a model that write per-sample gradients to its parameters.

    Args:
        m: The model.
        batch_first: Whether axis 0 of the inputs is the batch; else axis 1.
        loss_reduction: Reduction of the loss over samples, ``"mean"`` or ``"sum"``.
        strict: Whether a trainable layer with a buffer raises, as in Opacus. The engine itself rejects only buffers
            that a forward pass writes.
        force_functorch: Whether every layer uses the ``torch.func`` fallback.

    Raises:
        NotImplementedError: If ``strict`` is set and a trainable layer has buffers.
    """

    GRAD_SAMPLERS: ClassVar[MutableMapping[type[nn.Module], Any]] = GRAD_SAMPLERS

    @keyword_hints
    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
    ):
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)
        self._initialize(strict=strict, force_functorch=force_functorch)

    def _initialize(self, *, strict: bool, force_functorch: bool) -> None:
        self.strict = strict
        self.force_functorch = force_functorch
        if strict:
            self.validate(module=self._module, strict=True)
        self.add_hooks(
            loss_reduction=self.loss_reduction, batch_first=self.batch_first, force_functorch=force_functorch
        )

    @property
    def hooks_enabled(self) -> bool:
        """True if backward passes write per-sample gradients."""
        return self._pending_passes is not None and self._pending_passes.clipper.capture.state is CaptureState.ATTACHED

    def add_hooks(
        self, *, loss_reduction: str = "mean", batch_first: bool = True, force_functorch: bool = False
    ) -> None:
        """Attaches the hooks, with the arguments of the class. Raises ValueError if they are attached already."""
        if self._pending_passes is not None:
            raise ValueError("The hooks are attached already. Call remove_hooks() first.")
        self.loss_reduction, self.batch_first, self.force_functorch = loss_reduction, batch_first, force_functorch
        self._attach("functorch" if force_functorch else self.mode)

    def remove_hooks(self) -> None:
        """Removes the hooks, if they are attached."""
        self._detach()

    def disable_hooks(self) -> None:
        """Stops recording passes."""
        self._switch(enabled=False)

    def enable_hooks(self) -> None:
        """Records passes again after ``disable_hooks``."""
        self._switch(enabled=True)

    def _switch(self, *, enabled: bool) -> None:
        if self._pending_passes is not None:
            self._pending_passes.clipper.capture.state = CaptureState.ATTACHED if enabled else CaptureState.PAUSED

    def iterate_submodules(self, module: nn.Module) -> Iterable[nn.Module]:
        """Returns the modules of a model with trainable parameters of their own, outermost first."""
        return (layer for layer in module.modules() if any(p.requires_grad for p in layer.parameters(recurse=False)))

    @classmethod
    def is_supported(cls, module: nn.Module) -> bool:
        """True for every layer, as in Opacus, where it is deprecated."""
        warnings.warn("is_supported is deprecated: every layer is supported.", DeprecationWarning, stacklevel=2)
        return True

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[NotImplementedError]:
        """Returns an error for each trainable layer with buffers; with ``strict``, raises them instead."""
        errors = [
            NotImplementedError(
                f"'{name}' ({type(layer).__name__}) is a trainable layer with buffers. Pass strict=False: buffers that "
                "forward does not write are harmless; the first forward pass rejects others."
            )
            for name, layer in module.named_modules()
            if any(p.requires_grad for p in layer.parameters(recurse=False)) and any(True for _ in layer.buffers())
        ]
        if strict and errors:
            raise NotImplementedError(errors)
        return errors

    def _settings(self) -> dict[str, Any]:
        return {
            "batch_first": self.batch_first,
            "loss_reduction": self.loss_reduction,
            "strict": self.strict,
            "force_functorch": self.force_functorch,
        }


class GradSampleModule(GradSampleHooks, AbstractGradSampleModule):
    """Wraps a model, with the arguments of ``GradSampleHooks``."""

    @keyword_hints
    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
    ):
        AbstractGradSampleModule.__init__(self, m, batch_first=batch_first, loss_reduction=loss_reduction)
        self._initialize(strict=strict, force_functorch=force_functorch)
