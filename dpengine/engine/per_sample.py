"""Per-sample results of a backward pass: norms, weighted sums and gradients.

Axes: B samples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from dpengine.errors import MissingGradientError
from dpengine.grad_modes.bookkeep import Bookkeep
from dpengine.grad_modes.flat_buffer import FlatBuffer, wide
from dpengine.grad_modes.on_demand import OnDemand
from dpengine.grad_modes.strategy import common_rows

from .pass_clipper import PassClipper, RecordedPass


class PerSampleGradients:
    """Gradients of the samples of one backward pass, which are formed only when they are read.

    All results refer to the gradient of each sample's own loss, whatever the loss reduction. They are not private.
    Results that need no gradient tensor ``(B, *param.shape)`` form none: norms and weighted sums need about the memory
    of an ordinary backward pass.

    Attributes:
        samples: Number of samples B.

    Args:
        clipper: The clipper that recorded the pass.
        recorded: The pass, as `PassClipper.take` returned it.
    """

    def __init__(self, clipper: PassClipper, recorded: RecordedPass):
        assert isinstance(recorded.mode, Bookkeep)
        self.recorded = recorded
        self.samples = common_rows(recorded.mode.rows)
        self._mode = recorded.mode
        self._clipper = clipper
        self._scale = clipper.scale_of(recorded)
        self._names = {name: parameter for parameter, name in recorded.mode.parameters.items()}
        self._norms_B: Tensor | None = None

    @torch.no_grad()
    def norms(self) -> Tensor:
        """Returns the L2 norm ``(B,)`` of each sample's gradient over all parameters."""
        if self._norms_B is None:
            groups = dict.fromkeys(self._mode.parameters, 0)
            with self._clipper.capture.paused():
                self._norms_B = self._mode.sq_norms(groups, 1, self._scale).sum(dim=1).sqrt()
        return self._norms_B

    @torch.no_grad()
    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """Returns the sum over samples of weight times gradient for each parameter, by dotted name.

        Args:
            weights: ``(B,)``, one finite number for each sample.

        Returns:
            Tensors of the shapes of the parameters, in float32 (float64 for float64 parameters).

        Raises:
            ValueError: If ``weights`` has another shape, or a weight is not finite.
        """
        if weights.shape != (self.samples,) or not bool(weights.isfinite().all()):
            raise ValueError(
                f"weights has shape {tuple(weights.shape)}; expected {self.samples} finite numbers, one for each "
                "sample of the pass."
            )
        largest = max(float(weights.abs().max()) if self.samples else 1.0, torch.finfo(torch.float32).tiny)
        mode, parameters = self._mode.copied(self._mode.parameters), list(self._mode.parameters)
        sums = FlatBuffer(parameters)
        weights_B1 = (weights.detach().double() / largest).unsqueeze(1)
        with self._clipper.capture.paused():
            mode.add_sums(dict.fromkeys(parameters, 0), weights_B1, self._scale * largest, sums)
        found = dict(sums)
        return {name: found[parameter].view(parameter.shape) for name, parameter in self._names.items()}

    @torch.no_grad()
    def gradients(self, name: str) -> Tensor:
        """Returns the gradients ``(B, *param.shape)`` of one parameter, in float32 (float64 for float64 parameters).

        Args:
            name: Dotted name of the parameter.

        Raises:
            MissingGradientError: If the parameter has no gradient in this pass.
        """
        parameter = self._names.get(name)
        if parameter is None:
            raise MissingGradientError(
                f"Parameter '{name}' has no gradient in this backward pass.",
                fix=f"Choose one of: {', '.join(sorted(self._names))}.",
            )
        with self._clipper.capture.paused():
            return (self._mode.formed(parameter) * self._scale).to(wide(parameter.dtype))

    def on_demand(self, dtype_of: Callable[[torch.dtype], torch.dtype] = wide) -> dict[nn.Parameter, OnDemand]:
        """Returns a tensor for each trainable parameter that forms its gradients when it is read.

        ``dtype_of`` gives the dtype of these gradients by that of the parameter.
        """
        found = {}
        for name, parameter in self._names.items():
            if parameter.requires_grad:
                shape, dtype = (self.samples, *parameter.shape), dtype_of(parameter.dtype)
                form = partial(self._gradients_in, name, dtype)
                found[parameter] = OnDemand(form, shape, dtype=dtype, device=parameter.device)
        return found

    def _gradients_in(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.gradients(name).to(dtype)
