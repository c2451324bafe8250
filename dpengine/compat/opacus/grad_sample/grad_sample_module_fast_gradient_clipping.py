"""Ghost clipping: norms and clipped sums without ``p.grad_sample``, in one backward pass."""

from __future__ import annotations

import warnings
from collections.abc import MutableMapping
from typing import Any, ClassVar

from torch import Tensor, nn

from dpengine.errors import keyword_hints

from .grad_sample_module import GradSampleHooks
from .gsm_base import AbstractGradSampleModule
from .registries import NORM_SAMPLERS


def create_norm_sample(*, param: Tensor, grad_sample: Tensor, max_batch_len: int) -> None:
    """Writes the norms of a parameter's per-sample gradients to ``param._norm_sample``.

    Args:
        param: The parameter.
        grad_sample: ``(B, *param.shape)``.
        max_batch_len: Number of samples in the batch.
    """
    if param.requires_grad:
        norms_B = grad_sample.reshape(len(grad_sample), -1).norm(dim=1) if max_batch_len else grad_sample.new_zeros(0)
        param._norm_sample = norms_B  # type: ignore[attr-defined]


class GradSampleHooksFastGradientClipping(GradSampleHooks):
    """Hooks that compute the norms of per-sample gradients.

    Args:
        m: The model.
        batch_first: Whether axis 0 of the inputs is the batch; else axis 1.
        loss_reduction: Reduction of the loss over samples, ``"mean"`` or ``"sum"``.
        strict: Whether a trainable layer with a buffer raises.
        force_functorch: Whether every layer uses the ``torch.func`` fallback.
        max_grad_norm: Clipping norm of ``get_clipping_coef`` until there is an optimizer.
        use_ghost_clipping: Has no effect: the method for each norm is chosen by its cost.
    """

    mode: ClassVar[str] = "auto"  # uses registered norm samplers
    writes_grad_sample: ClassVar[bool] = False
    NORM_SAMPLERS: ClassVar[MutableMapping[type[nn.Module], Any]] = NORM_SAMPLERS

    @keyword_hints
    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        max_grad_norm: float = 1,
        use_ghost_clipping: bool = True,
    ):
        self._set_clipping(max_grad_norm, use_ghost_clipping)
        super().__init__(
            m, batch_first=batch_first, loss_reduction=loss_reduction, strict=strict, force_functorch=force_functorch
        )

    def _set_clipping(self, max_grad_norm: float, use_ghost_clipping: bool) -> None:
        self._own_max_grad_norm = max_grad_norm
        self._first_policy: Any = None  # the policy before there is an optimizer
        self.use_ghost_clipping = use_ghost_clipping

    def _attach(self, mode: str) -> None:
        super()._attach(mode)
        self._first_policy = None if self._pending_passes is None else self._pending_passes.clipper.policy

    @property
    def max_grad_norm(self) -> float:
        """Clipping norm of the optimizer, which changes it; before there is one, the argument."""
        if self._pending_passes is None or self._pending_passes.clipper.policy is self._first_policy:
            return self._own_max_grad_norm
        return float(self._pending_passes.clipper.policy.max_grad_norm)

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        self._own_max_grad_norm = value
        if value != self.max_grad_norm:
            warnings.warn(
                f"max_grad_norm={value!r} of the module has no effect: the optimizer clips to "
                f"{self.max_grad_norm:g}. Set optimizer.max_grad_norm.",
                stacklevel=2,
            )

    @property
    def trainable_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return [p for p in self._module.parameters() if p.requires_grad]

    def get_norm_sample(self) -> Tensor:
        """Returns the norms ``(B,)`` of the last backward pass. Not private."""
        return self.per_sample_gradient_norms

    def get_clipping_coef(self) -> Tensor:
        """Returns the clipping factors ``(B,)`` of these norms."""
        return (self.max_grad_norm / self.get_norm_sample()).clamp(max=1.0)

    @property
    def per_sample_gradient_norms(self) -> Tensor:
        """Norms ``(B,)`` of the last backward pass. Not private."""
        found = None if self._pending_passes is None else self._pending_passes.norms()
        if found is None:
            raise AttributeError("No norms yet. Run a backward pass over a batch in train mode.")
        return found

    def _settings(self) -> dict[str, Any]:
        ghost = {"max_grad_norm": self.max_grad_norm, "use_ghost_clipping": self.use_ghost_clipping}
        return {**super()._settings(), **ghost}


class GradSampleModuleFastGradientClipping(GradSampleHooksFastGradientClipping, AbstractGradSampleModule):
    """Wraps a model, with the arguments of ``GradSampleHooksFastGradientClipping``."""

    @keyword_hints
    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
        max_grad_norm: float = 1,
        use_ghost_clipping: bool = True,
    ):
        AbstractGradSampleModule.__init__(self, m, batch_first=batch_first, loss_reduction=loss_reduction)
        self._set_clipping(max_grad_norm, use_ghost_clipping)
        self._initialize(strict=strict, force_functorch=force_functorch)
