"""Ghost clipping of a model of which processes hold parts: the topology is read off the model."""

from __future__ import annotations

from .grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)


class GradSampleHooksFastGradientClippingTP(GradSampleHooksFastGradientClipping):
    """``GradSampleHooksFastGradientClipping`` under another name."""


class GradSampleModuleFastGradientClippingTP(GradSampleModuleFastGradientClipping):
    """``GradSampleModuleFastGradientClipping`` under another name."""
