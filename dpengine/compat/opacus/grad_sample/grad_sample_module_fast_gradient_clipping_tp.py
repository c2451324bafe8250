"""Ghost clipping of a sharded model, whose topology is read from the model."""

from . import grad_sample_module_fast_gradient_clipping as ghost


class GradSampleHooksFastGradientClippingTP(ghost.GradSampleHooksFastGradientClipping):
    """``GradSampleHooksFastGradientClipping`` under another name."""


class GradSampleModuleFastGradientClippingTP(ghost.GradSampleModuleFastGradientClipping):
    """``GradSampleModuleFastGradientClipping`` under another name."""
