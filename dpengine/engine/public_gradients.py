"""Ordinary gradients of a private model on public data, which are not accounted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from dpengine.errors import UnknownParameterError, keyword_hints

if TYPE_CHECKING:
    from .privacy_engine import PrivacyEngine


@keyword_hints
@contextlib.contextmanager
def public(engine: PrivacyEngine, module: nn.Module | None = None) -> Iterator[dict[str, Tensor]]:
    """Runs the passes in this context on public data, as if the model were not private.

    ::

        with public(engine) as gradients:
            loss_fn(model(public_inputs), public_targets).backward()
        gradients["0.weight"]  # not clipped, without noise

    ``p.grad``, the sums of the current batch and the ledger do not change. A backward pass is private if its forward
    pass ran before the context.

    Privacy: the caller states that the data are public. Gradients of private examples would not be protected.

    Args:
        engine: The engine of the model.
        module: A private model of the engine; None selects the model of the last ``make_private``.

    Yields:
        Gradients by parameter name, summed over all passes. The dictionary is filled when the context ends.

    Raises:
        UnknownParameterError: If the model is not private in this engine, or several processes train it.
    """
    run = next((run for run in reversed(engine.runs) if run.attached and module in (None, run.model)), None)
    if run is None:
        raise UnknownParameterError(
            "The model is not private in this engine, or was detached.", fix="Call make_private first."
        )
    if not run.step.passes.topology.runs_independently:
        raise UnknownParameterError(
            "Several processes train this model, and their public gradients would differ.",
            fix="Use a copy of the model for public data: copy.deepcopy(model).",
        )
    capture, gradients = run.step.passes.capture, dict[str, Tensor]()
    parameters = dict(run.model.named_parameters())
    grads, leaks = {name: p.grad for name, p in parameters.items()}, dict(capture.leaks)
    try:
        for parameter in parameters.values():
            parameter.grad = None
        with capture.paused():
            yield gradients
    finally:
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                gradients[name] = parameter.grad
            parameter.grad = grads[name]
        capture.leaks.clear()  # gradients from inside the context are public
        capture.leaks.update(leaks)
