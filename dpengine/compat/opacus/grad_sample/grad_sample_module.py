"""``GradSampleModule``: per-sample gradients, formed for whoever looks at them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, MutableMapping
from typing import Any, ClassVar

from torch import Tensor, nn

from dpengine.capture.capture import CaptureState
from dpengine.errors import suggests_names
from dpengine.grad_modes.materialize import show_grad_sample

from .gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule
from .registries import GRAD_SAMPLERS


def create_or_accumulate_grad_sample(*, param: Tensor, grad_sample: Tensor, max_batch_len: int) -> None:
    """Adds to the per-sample gradient that a parameter has in the running backward pass.

    Args:
        param: The parameter.
        grad_sample: ``(n, *param.shape)``, of the first ``n`` rows.
        max_batch_len: Rows of the batch.
    """
    if not param.requires_grad:
        return
    present = getattr(param, "_current_grad_sample", None)
    if present is None:
        present = grad_sample.new_zeros(max_batch_len, *grad_sample.shape[1:])
        param._current_grad_sample = present  # type: ignore[attr-defined]
    present[: len(grad_sample)] += grad_sample


def promote_current_grad_sample(p: nn.Parameter) -> None:
    """Makes what was added up in the running pass ``p.grad_sample``, or one more entry of its list."""
    if p.requires_grad:
        show_grad_sample(p, p._current_grad_sample)  # type: ignore[attr-defined]
        del p._current_grad_sample  # type: ignore[attr-defined]


class GradSampleHooks(AbstractGradSampleHooks):
    """Per-sample gradients from hooks on a model that is used as it is.

    Args:
        m: The model.
        batch_first: Whether axis 0 of the inputs is the batch; else axis 1.
        loss_reduction: ``"mean"`` or ``"sum"``: what the loss does over rows.
        strict: Whether a trainable layer that owns a buffer is refused, as Opacus does. The engine refuses by itself
            only what a forward pass writes into.
        force_functorch: Whether every layer goes through the ``torch.func`` fallback.

    Raises:
        NotImplementedError: If ``strict`` is set and a trainable layer has buffers.
    """

    GRAD_SAMPLERS: ClassVar[MutableMapping[type[nn.Module], Any]] = GRAD_SAMPLERS

    @suggests_names
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
        self._begin(strict=strict, force_functorch=force_functorch)

    def _begin(self, *, strict: bool, force_functorch: bool) -> None:
        self.strict = strict
        self.force_functorch = force_functorch
        if strict:
            self.validate(module=self._module, strict=True)
        self.add_hooks(
            loss_reduction=self.loss_reduction, batch_first=self.batch_first, force_functorch=force_functorch
        )

    @property
    def hooks_enabled(self) -> bool:
        """Whether backward passes leave per-sample gradients."""
        return self._waiting is not None and self._waiting.clipper.capture.state is CaptureState.ATTACHED

    def add_hooks(
        self, *, loss_reduction: str = "mean", batch_first: bool = True, force_functorch: bool = False
    ) -> None:
        """Puts the hooks on, with these settings.

        Args:
            loss_reduction: As in the class.
            batch_first: As in the class.
            force_functorch: As in the class.

        Raises:
            ValueError: If they are on.
        """
        if self._waiting is not None:
            raise ValueError("The hooks are on already. Call remove_hooks() first.")
        self.loss_reduction, self.batch_first, self.force_functorch = loss_reduction, batch_first, force_functorch
        self._watch("functorch" if force_functorch else self.mode)

    def remove_hooks(self) -> None:
        """Takes the hooks off; without effect if there are none."""
        self._unwatch()

    def disable_hooks(self) -> None:
        """Lets passes run as if there were no hooks."""
        self._switch(enabled=False)

    def enable_hooks(self) -> None:
        """Undoes ``disable_hooks``."""
        self._switch(enabled=True)

    def _switch(self, *, enabled: bool) -> None:
        if self._waiting is not None:
            self._waiting.clipper.capture.state = CaptureState.ATTACHED if enabled else CaptureState.PAUSED

    def iterate_submodules(self, module: nn.Module) -> Iterable[nn.Module]:
        """The modules in a model whose parameters are followed, outermost first."""
        return (one for one in module.modules() if any(p.requires_grad for p in one.parameters(recurse=False)))

    @classmethod
    def is_supported(cls, module: nn.Module) -> bool:
        """True for every layer, as in Opacus, where it is deprecated."""
        warnings.warn("is_supported is deprecated: every layer has a way.", DeprecationWarning, stacklevel=2)
        return True

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[NotImplementedError]:
        """Looks for trainable layers that own buffers.

        Args:
            module: The model.
            strict: Whether to raise what was found.

        Returns:
            An error for each such layer.

        Raises:
            NotImplementedError: If ``strict`` is set and there is one.
        """
        errors = [
            NotImplementedError(
                f"'{name}' ({type(layer).__name__}) is a trainable layer with buffers. Pass strict=False: buffers that "
                "forward does not write are harmless, and what it writes is refused in the first forward pass."
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
    """``GradSampleHooks`` as a module around the model.

    Args:
        m: As in ``GradSampleHooks``.
        batch_first: As there.
        loss_reduction: As there.
        strict: As there.
        force_functorch: As there.
    """

    @suggests_names
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
        self._begin(strict=strict, force_functorch=force_functorch)
