"""Backward passes over public data through a private model: ordinary gradients, which are not accounted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from dpengine.errors import UnknownParameterError, suggests_names

if TYPE_CHECKING:
    from .privacy_engine import PrivacyEngine


@suggests_names
@contextlib.contextmanager
def public(engine: PrivacyEngine, module: nn.Module | None = None) -> Iterator[dict[str, Tensor]]:
    """Runs passes inside over data that are nobody's secret, as if the model were not private.

    ::

        with public(engine) as gradients:
            loss_fn(model(public_inputs), public_targets).backward()
        gradients["0.weight"]  # not clipped, without noise

    What is in ``p.grad``, the sums of a batch at hand and the ledger stay as they are. That the data are public is the
    caller's word: of rows of the private data set these would be raw gradients. A backward pass over a forward pass
    from before is a private one, here as elsewhere.

    Args:
        engine: Whose model it is.
        module: One of its private models; None takes that of the last ``make_private``.

    Yields:
        Gradients by the names of parameters, added up over all passes; filled when the context ends.

    Raises:
        UnknownParameterError: If no such model is private in this engine, or several processes train it.
    """
    run = next((one for one in reversed(engine.runs) if one.attached and module in (None, one.model)), None)
    if run is None:
        raise UnknownParameterError("No such model is private in this engine.", fix="Call make_private first.")
    if not run.step.passes.topology.runs_independently:
        raise UnknownParameterError(
            "Several processes train this model, and each would have a public gradient of its own.",
            fix="Run public data through a copy: copy.deepcopy(model).",
        )
    capture, gradients = run.step.passes.capture, dict[str, Tensor]()
    parameters = dict(run.model.named_parameters())
    before, leaks = {name: p.grad for name, p in parameters.items()}, dict(capture.leaks)
    try:
        for parameter in parameters.values():
            parameter.grad = None
        with capture.paused():
            yield gradients
    finally:
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                gradients[name] = parameter.grad
            parameter.grad = before[name]
        capture.leaks.clear()  # what autograd filled inside is public
        capture.leaks.update(leaks)
