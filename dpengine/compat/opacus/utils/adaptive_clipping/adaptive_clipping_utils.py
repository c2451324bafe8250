"""Ghost modes whose threshold follows a quantile of the norms: the engine's one policy of adaptive clipping."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from dpengine.clipping.adaptive import Adaptive
from dpengine.compat.opacus.privacy_engine import PrivacyEngine
from dpengine.compat.opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)

_COUNT_SHARE = 20  # of the batch size, for the noise on the count


class DPTensorFastGradientAdaptiveClipping(DPTensorFastGradientClipping):
    """``DPTensorFastGradientClipping`` that makes the clipping of the optimizer adaptive, if it is not.

    The threshold moves in the optimizer's step.

    Args:
        module: As in ``DPTensorFastGradientClipping``.
        optimizer: As there.
        loss_per_sample: As there.
        loss_reduction: As there.
        target_unclipped_quantile: The share of samples that should stay unclipped.
        min_clipbound: The threshold never falls below.
        max_clipbound: The threshold never rises above.
        clipbound_learning_rate: Of the threshold's logarithm.
        initial_noise_multiplier: Accepted; what each step costs is the optimizer's ``noise_multiplier``.
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
        _adapt(optimizer, target_unclipped_quantile, min_clipbound, max_clipbound, clipbound_learning_rate)


class DPLossFastGradientAdaptiveClipping(DPLossFastGradientClipping):
    """``DPLossFastGradientClipping`` that makes the clipping of the optimizer adaptive, if it is not.

    Args:
        module: As in ``DPLossFastGradientClipping``.
        optimizer: As there.
        criterion: As there.
        loss_reduction: As there.
        target_unclipped_quantile: The share of samples that should stay unclipped.
        min_clipbound: The threshold never falls below.
        max_clipbound: The threshold never rises above.
        clipbound_learning_rate: Of the threshold's logarithm.
        initial_noise_multiplier: Accepted; what each step costs is the optimizer's ``noise_multiplier``.
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
        _adapt(optimizer, target_unclipped_quantile, min_clipbound, max_clipbound, clipbound_learning_rate)


def _adapt(optimizer: Any, quantile: float, least: float, most: float, rate: float) -> None:
    if isinstance(optimizer._clipping, Adaptive):
        return
    size = optimizer.expected_batch_size or 1
    policy = Adaptive(
        min(max(optimizer.max_grad_norm, least), most),
        target_quantile=quantile,
        learning_rate=rate,
        count_noise_multiplier=max(size / _COUNT_SHARE, optimizer.noise_multiplier),
        min_norm=least,
        max_norm=most,
    )
    optimizer._change(clipping=policy)


class PrivacyEngineAdaptiveClipping(PrivacyEngine):
    """``PrivacyEngine`` whose ``clipping="flat"`` is adaptive, with Opacus's defaults, in all modes."""

    _flat_adapts: ClassVar[dict[str, float] | None] = {
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
        """The criterion; the clipping of the optimizer is adaptive from then on, if it was not."""
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
