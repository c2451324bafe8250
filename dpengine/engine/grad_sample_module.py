"""GradSampleModule: per-sample gradients, without clipping, noise or accounting."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dpengine.capture.capture import CaptureState
from dpengine.distributed.detect import topology_of, unwrapped
from dpengine.distributed.topology import SINGLE, Topology
from dpengine.errors import BatchStateError, UnsupportedLayerError, keyword_hints
from dpengine.grad_modes.choose_method import MethodTable
from dpengine.grad_modes.grad_sample import add_grad_sample, forget_grad_samples
from dpengine.grad_modes.modes import MODES, on_demand
from dpengine.kernels.precision import without_autocast

from .pass_clipper import PassClipper, RecordedPass
from .per_sample import PerSampleGradients


@keyword_hints
class GradSampleModule(nn.Module):
    """Wraps a module and records the per-sample gradients of each backward pass.

    After ``backward``, ``p.grad_sample`` of every trainable parameter holds the gradients of the losses of single
    samples, ``(B, *p.shape)``. The batch is on axis 0 even with ``batch_first=False``. The tensor is formed when it is
    first read. Until then, the inputs and output gradients of the layers are kept in memory. After several backward
    passes, ``p.grad_sample`` is a list with one tensor per pass. ``zero_grad`` of this module clears it; ``zero_grad``
    of an optimizer does not. ``p.grad`` stays None. ``last_pass`` returns norms and weighted sums without forming
    per-sample gradients::

        model = GradSampleModule(model)
        loss_fn(model(inputs), targets).backward()
        norms = model.last_pass.norms()  # (B,)
        clipped = model.last_pass.weighted_sum((1.0 / norms).clamp(max=1.0))  # {name: sum over samples}

    The wrapped module must be in train mode. A pass in eval mode is not recorded and leaves ordinary gradients in
    ``p.grad``; ``last_pass`` then raises. To disable dropout, put only the dropout layers in eval mode. Wrap the module
    again after adding or replacing layers.

    In some passes the independence check runs the model again with other samples in the batch. If the gradient of a
    sample changes, ``backward`` raises ``UnsupportedLayerError``. For training use ``PrivacyEngine.make_private``,
    which accepts this wrapper instead of the module. During private training the hooks of the wrapper are off, and
    ``last_pass`` raises BatchStateError.

    Args:
        module: The module with all of its layers. It is not copied, and is available as ``.module``.
        batch_first: True if axis 0 of the inputs is the batch; False for axis 1.
        loss_reduction: Reduction of the loss over the samples, ``"mean"`` or ``"sum"``. With ``"mean"``, gradients are
            multiplied by the number of samples. Whether the argument matches the loss is not checked.
        force_functorch: If True, every layer uses the ``torch.func`` fallback.

    Raises:
        TypeError: If the module is not a ``torch.nn.Module``.
        ValueError: If ``loss_reduction`` is unknown.
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
        self.module = module
        self._last: PerSampleGradients | None = None
        self._clipper = PassClipper(
            module,
            None,
            self._pass_ended,
            grad_sample_mode=on_demand(MODES["functorch" if force_functorch else "hooks"]),
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            methods=MethodTable(keep_budget=0),  # norms() stores no per-sample gradients
        )
        self._clipper.attach()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the wrapped module."""
        return self.module(*args, **kwargs)

    @property
    def last_pass(self) -> PerSampleGradients:
        """Per-sample results of the last backward pass: ``norms()``, ``weighted_sum(weights)``, ``gradients(name)``.

        Only passes in train mode are recorded. Raises BatchStateError before the first one, after an interrupted one,
        after one in eval mode, after ``zero_grad`` of this module, and while the module is private. The returned object
        stays valid after the next pass. See `dpengine.engine.PerSampleGradients`.
        """
        self._check_not_private()
        if self._last is None or self._clipper.capture.unfinished is not None:
            raise BatchStateError(
                "No backward pass has recorded per-sample gradients.",
                fix="Call loss.backward() on outputs of the wrapped model in train mode, before zero_grad().",
            )
        if self._clipper.capture.leaks:  # the next pass in train mode clears them
            raise BatchStateError(
                "The last backward pass was not recorded: its forward pass ran in eval mode.",
                fix="Call model.train() before the forward pass. To disable dropout, put those layers in eval mode.",
            )
        return self._last

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears ``p.grad``, ``p.grad_sample`` and the last pass."""
        super().zero_grad(set_to_none)
        self._forget_results()

    def _forget_results(self) -> None:
        self._last = None
        forget_grad_samples(self.module.parameters())

    def to_standard_module(self) -> nn.Module:
        """Removes all hooks and gradients, and returns the module. Raises BatchStateError while it is private."""
        self._check_not_private()
        self._clipper.detach()
        self.zero_grad()
        return self.module

    @property
    def _attached(self) -> bool:
        return self._clipper.capture.state is not CaptureState.DETACHED

    def _check_not_private(self) -> None:
        if self._clipper.capture.superseded:
            raise BatchStateError(
                "The hooks of this GradSampleModule are off, because its module is private in an engine or in another "
                "wrapper.",
                fix="Call engine.detach(model) first, which attaches them again.",
            )

    @torch.no_grad()
    def _pass_ended(self, recorded: RecordedPass) -> None:
        try:
            self._check_not_private()  # the forward pass may have run before make_private
            self._clipper.check_leaks()
            self._clipper.trainable()  # checks that all layers have hooks
            gradients = PerSampleGradients(self._clipper, self._clipper.take())
            norms_B = gradients.norms() / gradients.recorded.scale
            with without_autocast():
                self._clipper.probe.end_pass(gradients.recorded.replay, len(norms_B), norms_B.square)
        except BaseException:
            self._clipper.forget()
            self._forget_results()
            raise
        self._last = gradients
        for parameter, grad_sample in gradients.on_demand().items():
            add_grad_sample(parameter, grad_sample)


def model_inside(model: nn.Module) -> nn.Module:
    """Returns the model inside DistributedDataParallel and GradSampleModule wrappers."""
    inner = unwrapped(model)
    return inner.module if isinstance(inner, GradSampleModule) else inner


def topology_and_model(model: nn.Module, *, batch_first: bool, loss_reduction: str) -> tuple[Topology, nn.Module]:
    """Returns the topology of a model, and the model without wrappers.

    Raises if the model is in a GradSampleModule that does not support a private run with these settings.
    """
    topology, wrapper = topology_of(model), unwrapped(model)
    if not isinstance(wrapper, GradSampleModule):
        return topology, wrapper
    if wrapper is not model or topology is not SINGLE or unwrapped(wrapper.module) is not wrapper.module:
        raise UnsupportedLayerError(
            "A GradSampleModule can be made private in a single process only.",
            fix="Pass the wrapped model: model.to_standard_module().",
        )
    clipper = wrapper._clipper
    for name, argument, setting in (
        ("batch_first", batch_first, clipper.capture.batch_first),
        ("loss_reduction", loss_reduction, clipper.loss_reduction),
    ):
        if argument != setting:
            raise ValueError(f"make_private got {name}={argument!r}, and the GradSampleModule has {name}={setting!r}.")
    return topology, wrapper.module
