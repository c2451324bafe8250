"""Per-sample results of a backward pass: norms, weighted sums and gradients.

Axes: B samples.
"""

from __future__ import annotations

import difflib
from functools import partial

import torch
from torch import Tensor, nn

from dpengine.errors import MissingGradientError, StaleGradientError, keyword_hints
from dpengine.grad_modes.bookkeep import BookKeeping
from dpengine.grad_modes.flat_buffer import FlatBuffer
from dpengine.grad_modes.grad_sample import OnDemand
from dpengine.grad_modes.rows import wide
from dpengine.grad_modes.strategy import common_rows
from dpengine.kernels.precision import without_autocast

from .pass_clipper import PassClipper, RecordedPass


class PerSampleGradients:
    """Per-sample gradients of one backward pass, formed when they are read. Returned by ``GradSampleModule.last_pass``.

    All results refer to the gradients of the losses of single samples, even if the loss is a mean. They are not
    private. Norms and weighted sums form no gradient tensor ``(B, *param.shape)``, except for layers without a built-in
    grad sampler. The object keeps the inputs and output gradients of all layers in memory. Parameter names are those of
    the wrapped module, without the prefix ``module.``. Results may be read several times, even after the next pass.

    Reading a result raises StaleGradientError if an input of a layer was changed in place.

    Attributes:
        samples: Number of samples B.

    Args:
        clipper: The clipper that recorded the pass.
        recorded: The pass, as `PassClipper.take` returned it.
    """

    def __init__(self, clipper: PassClipper, recorded: RecordedPass):
        assert isinstance(recorded.mode, BookKeeping)
        self.recorded = recorded
        self.samples = common_rows(recorded.mode.rows)
        self._mode = recorded.mode
        self._clipper = clipper
        self._scale = recorded.scale
        # In the model, a tied parameter has the name of its first layer. In the pass it may have another name.
        model_names = {p: name for name, p in clipper.topology.parameters(clipper.model).items()}
        pass_names = recorded.mode.parameters
        self._names = {name: p for p, name in model_names.items() if p in pass_names}
        self._names |= {name: p for p, name in pass_names.items() if p not in model_names}
        self._norms_B: Tensor | None = None
        self._versions = _versions(recorded.mode)

    @torch.no_grad()
    def norms(self) -> Tensor:
        """Returns the L2 norm ``(B,)`` of each sample's gradient over all parameters, in float64."""
        if self._norms_B is None:
            self.check_unchanged()
            groups = dict.fromkeys(self._mode.parameters, 0)
            with self._clipper.capture.paused(), without_autocast():
                self._norms_B = self._mode.sq_norms(groups, 1, self._scale).sum(dim=1).sqrt()
            self._versions = _versions(self._mode)  # sq_norms() may merge the calls of a layer
        return self._norms_B.clone()

    @keyword_hints
    @torch.no_grad()
    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """Returns the sum over samples of weight times gradient for each parameter, by dotted name.

        Args:
            weights: ``(B,)``, one finite number for each sample, of any sign and size. A one-hot vector gives the
                gradient of one sample.

        Returns:
            Tensors of the shapes of the parameters, in float32 (float64 for float64 parameters).

        Raises:
            TypeError: If ``weights`` is not a tensor of real numbers.
            ValueError: If ``weights`` has another shape, or a weight is not finite.
            StaleGradientError: If an input of a layer was changed in place since the pass.
        """  # noqa: DOC502 - the check raises
        if not isinstance(weights, Tensor) or weights.is_complex():
            kind = f"a {weights.dtype} tensor" if isinstance(weights, Tensor) else f"a {type(weights).__name__}"
            raise TypeError(f"weights is {kind}; pass a tensor with one real number for each sample.")
        if weights.shape != (self.samples,):
            raise ValueError(
                f"weights has shape {tuple(weights.shape)}; expected ({self.samples},), one number for each sample."
            )
        if not bool(weights.isfinite().all()):
            raise ValueError("weights has an entry that is NaN or infinite.")
        self.check_unchanged()
        weights = weights.detach().double()
        # Grad samplers take weights of at most 1. The lower limit prevents a division by 0.
        largest = max(float(weights.abs().max()) if self.samples else 1.0, torch.finfo(torch.float32).tiny)
        mode, parameters = self._mode.copied(), list(self._mode.parameters)
        sums = FlatBuffer(parameters)
        weights_B1 = (weights / largest).unsqueeze(1)
        with self._clipper.capture.paused(), without_autocast():
            mode.add_sums(dict.fromkeys(parameters, 0), weights_B1, self._scale * largest, sums)
        by_parameter = dict(sums)
        return {name: by_parameter[parameter].view(parameter.shape) for name, parameter in self._names.items()}

    @keyword_hints
    @torch.no_grad()
    def gradients(self, name: str) -> Tensor:
        """Returns the gradients ``(B, *param.shape)`` of one parameter, in float32 (float64 for float64 parameters).

        Args:
            name: Dotted name of the parameter.

        Raises:
            MissingGradientError: If the parameter has no gradient in this pass.
            StaleGradientError: If an input of a layer was changed in place since the pass.
        """  # noqa: DOC502 - the check raises
        parameter = self._names.get(name)
        if parameter is None:
            matches = difflib.get_close_matches(str(name), self._names, n=1)
            raise MissingGradientError(
                f"Parameter '{name}' has no gradient in this backward pass.",
                fix=f"Did you mean '{matches[0]}'?" if matches else f"Choose one of: {', '.join(self._names)}.",
            )
        self.check_unchanged()
        with self._clipper.capture.paused(), without_autocast():
            return (self._mode.formed(parameter) * self._scale).to(wide(parameter.dtype))

    def on_demand(self) -> dict[nn.Parameter, OnDemand]:
        """Returns a tensor for each trainable parameter that calls ``gradients`` when it is first read."""
        gradients = {}
        for name, p in self._names.items():
            if p.requires_grad:
                shape, dtype = (self.samples, *p.shape), wide(p.dtype)
                gradients[p] = OnDemand(partial(self.gradients, name), shape, dtype=dtype, device=p.device)
        return gradients

    def check_unchanged(self) -> None:
        """Raises StaleGradientError if an input of a layer was changed in place since the pass."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise StaleGradientError(
                "An input of a layer was changed in place since the backward pass, so its per-sample gradients can no "
                "longer be formed.",
                fix="Read per-sample results before the batch is overwritten.",
            )


def _versions(mode: BookKeeping) -> list[tuple[Tensor, int]]:
    """Returns the tensors from which gradients are formed, with their in-place version counters."""
    tensors = [tensor for call in mode.calls() for tensor in call.tensors()]
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
