"""GradSampleModule: per-sample gradients in ``p.grad_sample``, without clipping, noise or accounting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.capture.record import LayerCall, Use
from dpengine.errors import MissingGradientError, suggests_names
from dpengine.grad_modes.materialize import forget_grad_samples
from dpengine.grad_modes.strategy import common_rows

from .watch_model import watch_model


@suggests_names
class GradSampleModule(nn.Module):
    """Wraps a module so that ``backward`` leaves ``p.grad_sample`` on every trainable parameter.

    ``p.grad_sample`` is ``(B, *p.shape)``, batch first whatever ``batch_first`` says: the gradient of each sample's own
    loss. After several backward passes it is a list with one tensor for each, until ``zero_grad``. ``p.grad`` stays
    None. Some passes are run again with other rows beside each row; where that changes something, ``backward`` raises
    ``UnsupportedLayerError``. For training use ``PrivacyEngine.make_private``, which needs no wrapper.

    Args:
        module: The module. It is not copied.
        batch_first: Whether axis 0 of the inputs is the batch; else axis 1.
        loss_reduction: ``"mean"`` if the loss averages over the samples of a batch, ``"sum"`` if it adds them.
        force_functorch: Whether every layer goes through the ``torch.func`` fallback.

    Raises:
        TypeError: If the module is no ``torch.nn.Module``.
        ValueError: If ``loss_reduction`` is not known.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        force_functorch: bool = False,
    ):
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"GradSampleModule: module is {torch.typename(module)}; pass an instance of torch.nn.Module."
            )
        if loss_reduction not in {"mean", "sum"}:
            raise ValueError(f"loss_reduction={loss_reduction!r} is not known. Choose one of: 'mean', 'sum'.")
        self.module = module
        self._loss_reduction = loss_reduction
        receiver = _Shower(self)
        mode = "functorch" if force_functorch else "hooks"
        mean = loss_reduction == "mean"
        self._capture, self._strategy = watch_model(module, receiver, mode, batch_first=batch_first, mean_loss=mean)
        self._capture.attach()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the wrapped module."""
        return self.module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears ``p.grad`` and ``p.grad_sample``."""
        super().zero_grad(set_to_none)
        forget_grad_samples(self.module.parameters())

    def to_standard_module(self) -> nn.Module:
        """Takes everything off, and gives the module back."""
        self._capture.detach()
        self.zero_grad()
        return self.module


class _Shower:
    """Receives what capture reports, and shows it on the parameters when the pass is over."""

    def __init__(self, owner: GradSampleModule):
        self._owner = owner

    def forward_started(self, rows: int | None) -> None:
        if self._owner._capture.backward_broke_off:
            self._owner._strategy.clear()
            self._owner._capture.forget_backward()
        elif self._owner._strategy.rows:
            self.backward_ended()

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        with self._owner._capture.paused():
            self._owner._strategy.receive(call, uses, rule)

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        self._owner._strategy.receive_rows(use, grad)

    @torch.no_grad()
    def backward_ended(self) -> None:
        strategy, leaks = self._owner._strategy, self._owner._capture.leaks
        try:
            if leaks:
                names = ", ".join(map(repr, leaks.values()))
                leaks.clear()
                raise MissingGradientError(
                    f"Autograd filled the gradient of {names} directly: the parameter is used outside its layer.",
                    fix="Call the layer itself, or freeze the parameter.",
                )
            rows = common_rows(strategy.rows)
            scale = rows if self._owner._loss_reduction == "mean" else 1.0
            strategy.sq_norms(dict.fromkeys(strategy.parameters, 0), 1, scale)  # forms and shows them
            strategy.probe()
        except BaseException:
            forget_grad_samples(self._owner.module.parameters())
            raise
        finally:
            strategy.clear()
            if self._owner._capture.replay is not None:
                self._owner._capture.replay.clear()
