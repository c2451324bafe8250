"""Adaptive clipping in ghost modes."""

from .adaptive_clipping_utils import (
    DPLossFastGradientAdaptiveClipping,
    DPTensorFastGradientAdaptiveClipping,
    PrivacyEngineAdaptiveClipping,
)

__all__ = [
    "DPLossFastGradientAdaptiveClipping",
    "DPTensorFastGradientAdaptiveClipping",
    "PrivacyEngineAdaptiveClipping",
]
