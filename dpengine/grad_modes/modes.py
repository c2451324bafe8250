"""Table of grad modes: for each ``grad_sample_mode``, the watch list of the model and the class that gets its calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from dpengine.capture.capture import Capture
from dpengine.capture.replay import Replay
from dpengine.distributed.layer_parts import layer_type
from dpengine.grad_samplers.expanded_weights import expanded_rule_for
from dpengine.grad_samplers.table import rule_for, sampler_for

from .bookkeep import BookKeeping
from .choose_method import KeepAll, MethodTable
from .reweight import Reweight
from .strategy import AbstractGradients


@dataclass(frozen=True)
class Mode:
    """A row of the table of grad modes.

    Attributes:
        name: The value of ``grad_sample_mode``.
        build: Creates the object that holds the layer calls, and sets what it needs on the capture.
        lookup: Returns the rule of a layer, or None if it has none.
        by_operations: True if modules with both parameters and children are followed operation by operation.
        whole_model: True if the model is one unit, of which each sample is run alone.
        smallest_units: True if parts of the model that need it become units, which the first batch decides.
    """

    name: str
    build: Callable[[Capture, MethodTable], AbstractGradients]
    lookup: Callable[[nn.Module], Any] = sampler_for
    by_operations: bool = True
    whole_model: bool = False
    smallest_units: bool = False


def _reweight(capture: Capture, methods: MethodTable) -> AbstractGradients:
    replay = capture.replay = Replay()
    capture.counts_uses = True
    rerun = lambda select: replay.run(capture.model, select)  # noqa: E731
    uses = lambda parameter: capture.uses[parameter]  # noqa: E731
    return Reweight(uses, rerun, methods.with_budget(0), capture.paused, capture.reporting)


def _rule_without_vmap(module: nn.Module) -> Any:
    """Returns the layer's own rule where functorch cannot be used: flat bags without a batch axis, sparse gradients."""
    flat = layer_type(module) is nn.EmbeddingBag or (layer_type(module) is nn.Embedding and module.sparse)
    return sampler_for(module) if flat else None


def _keep_all(*, stores: bool) -> Callable[[Capture, MethodTable], AbstractGradients]:
    return lambda capture, methods: BookKeeping(KeepAll(), stores=stores)


MODES: dict[str, Mode] = {
    "auto": Mode(
        "auto",
        lambda capture, methods: BookKeeping(methods, capture.paused),
        lookup=rule_for,
        smallest_units=True,
    ),
    "hooks": Mode("hooks", _keep_all(stores=True)),
    "functorch": Mode("functorch", _keep_all(stores=True), lookup=_rule_without_vmap, by_operations=False),
    "ew": Mode("ew", _keep_all(stores=False), lookup=expanded_rule_for),
    "whole_model": Mode("whole_model", _keep_all(stores=False), whole_model=True),
    "ghost": Mode("ghost", _reweight, lookup=rule_for),
}


def on_demand(mode: Mode) -> Mode:
    """Returns a mode with the same grad samplers that keeps layer calls and forms gradients only if needed."""
    lookup = sampler_for if mode.lookup is expanded_rule_for else mode.lookup  # ExpandedWeights forms all of them
    return replace(mode, build=MODES["auto"].build, lookup=lookup)
