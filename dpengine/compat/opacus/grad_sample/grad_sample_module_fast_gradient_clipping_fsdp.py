"""Ghost clipping of a model of which processes hold parts: the topology is read off the model."""

from __future__ import annotations

from .grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)


class GradSampleHooksFastGradientClippingFSDP(GradSampleHooksFastGradientClipping):
    """``GradSampleHooksFastGradientClipping`` under another name."""


class GradSampleModuleFastGradientClippingFSDP(GradSampleModuleFastGradientClipping):
    """``GradSampleModuleFastGradientClipping`` under another name."""
