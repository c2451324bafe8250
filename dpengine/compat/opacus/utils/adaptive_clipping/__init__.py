"""Adaptive clipping in ghost modes."""

from .adaptive_clipping_utils import PrivacyEngineAdaptiveClipping

__all__ = ["PrivacyEngineAdaptiveClipping"]
