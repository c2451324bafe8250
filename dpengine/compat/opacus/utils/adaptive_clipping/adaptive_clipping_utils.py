"""Adaptive clipping in ghost modes, by the clipping policy of the engine."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from dpengine.clipping.adaptive import Adaptive
from dpengine.compat.opacus.argument_checks import default_count_noise
from dpengine.compat.opacus.privacy_engine import PrivacyEngine
from dpengine.compat.opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)


class DPTensorFastGradientAdaptiveClipping(DPTensorFastGradientClipping):
    """``DPTensorFastGradientClipping`` that makes the clipping of the optimizer adaptive, if it is not.

    The optimizer's step updates the clipping norm.

    Args:
        module: The model.
        optimizer: Its optimizer.
        loss_per_sample: ``(B,)``, or a loss without axes that the criterion has reduced.
        loss_reduction: ``"mean"`` or ``"sum"`` over samples.
        target_unclipped_quantile: Target fraction of unclipped samples.
        min_clipbound: Lower limit of the clipping norm.
        max_clipbound: Upper limit of the clipping norm.
        clipbound_learning_rate: Step size of the update of the logarithm of the clipping norm.
        initial_noise_multiplier: Ignored: the optimizer's ``noise_multiplier`` determines the cost of a step.
    """

    def __init__(
        self,
        module: Any,
        optimizer: Any,
        loss_per_sample: Tensor,
        loss_reduction: str = "mean",
        target_unclipped_quantile: float = 0.5,
        min_clipbound: float = 1,
        max_clipbound: float = 1e8,
        clipbound_learning_rate: float = 0.2,
        initial_noise_multiplier: float = 1.0,
    ):
        super().__init__(module, optimizer, loss_per_sample, loss_reduction)
        _make_adaptive(optimizer, target_unclipped_quantile, min_clipbound, max_clipbound, clipbound_learning_rate)


class DPLossFastGradientAdaptiveClipping(DPLossFastGradientClipping):
    """``DPLossFastGradientClipping`` that makes the clipping of the optimizer adaptive, if it is not.

    The further arguments are those of ``DPTensorFastGradientAdaptiveClipping``.
    """

    def __init__(
        self,
        module: Any,
        optimizer: Any,
        criterion: Any,
        loss_reduction: str = "mean",
        target_unclipped_quantile: float = 0.5,
        min_clipbound: float = 1,
        max_clipbound: float = 1e8,
        clipbound_learning_rate: float = 0.2,
        initial_noise_multiplier: float = 1.0,
    ):
        super().__init__(module, optimizer, criterion, loss_reduction)
        _make_adaptive(optimizer, target_unclipped_quantile, min_clipbound, max_clipbound, clipbound_learning_rate)


def _make_adaptive(optimizer: Any, quantile: float, min_norm: float, max_norm: float, rate: float) -> None:
    if isinstance(optimizer._clipping, Adaptive):
        return
    policy = Adaptive(
        min(max(optimizer.max_grad_norm, min_norm), max_norm),
        target_quantile=quantile,
        learning_rate=rate,
        count_noise_multiplier=default_count_noise(optimizer.expected_batch_size or 1, optimizer.noise_multiplier),
        min_norm=min_norm,
        max_norm=max_norm,
    )
    optimizer._change(clipping=policy)


class PrivacyEngineAdaptiveClipping(PrivacyEngine):
    """``PrivacyEngine`` whose ``clipping="flat"`` is adaptive, with Opacus's defaults, in all modes."""

    _adaptive_settings: ClassVar[dict[str, float] | None] = {
        "target_unclipped_quantile": 0.5,
        "min_clipbound": 1,
        "max_clipbound": 1e8,
        "clipbound_learning_rate": 0.2,
    }

    def _prepare_criterion(
        self,
        *,
        module: Any,
        optimizer: Any,
        criterion: Any = nn.CrossEntropyLoss(),  # noqa: B008 - Opacus's default
        loss_reduction: str = "mean",
        target_unclipped_quantile: float = 0.5,
        min_clipbound: float = 1,
        max_clipbound: float = 1e8,
        clipbound_learning_rate: float = 0.2,
        **kwargs: Any,
    ) -> DPLossFastGradientAdaptiveClipping:
        """Returns the criterion, and makes the clipping of the optimizer adaptive if it is not."""
        return DPLossFastGradientAdaptiveClipping(
            module,
            optimizer,
            criterion,
            loss_reduction,
            target_unclipped_quantile,
            min_clipbound,
            max_clipbound,
            clipbound_learning_rate,
        )
