"""Builds the capture, the grad mode and the independence probe of a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from dpengine.capture.capture import Capture
from dpengine.capture.record import Listener
from dpengine.capture.watch import Kind, Watch, watch_list
from dpengine.distributed.topology import SINGLE, Topology
from dpengine.errors import UnsupportedLayerError
from dpengine.grad_modes.choose_method import MethodTable
from dpengine.grad_modes.modes import MODES, Mode
from dpengine.grad_modes.strategy import AbstractGradients
from dpengine.grad_samplers.embedding import check_embedding
from dpengine.grad_samplers.functional import functional_sampler
from dpengine.grad_samplers.table import BUILTIN, rule_for, sampler_for
from dpengine.independence.choose_units import UnitChoice, has_only_standard_layers
from dpengine.independence.probe import EVERY, Probe

_ONE_PASS = ("auto", "hooks", "functorch")


def watch_model(
    model: nn.Module,
    listener: Listener,
    mode: str | Mode,
    *,
    batch_first: bool = True,
    mean_loss: bool = False,
    methods: MethodTable | None = None,
    topology: Topology = SINGLE,
) -> tuple[Capture, AbstractGradients, Probe]:
    """Returns the capture, the grad mode and the independence probe of a model, without attaching hooks."""
    grad_mode = mode_of(mode)
    for name, module in model.named_modules():
        check_embedding(module, name)
    # A registered norm rule runs after the pass, when a module no longer holds its full parameters.
    sharded = bool(topology.slots) or topology.splits.size > 1
    lookup = sampler_for if sharded and grad_mode.lookup is rule_for else grad_mode.lookup
    make_watches = partial(watch_list, model, lookup, functional_sampler, by_operations=grad_mode.by_operations)
    watches = make_watches(units=("",) if grad_mode.whole_model else ())
    capture = Capture(
        model,
        watches,
        listener,
        linear_rule=BUILTIN[nn.Linear],
        batch_first=batch_first,
        mean_loss=mean_loss,
        topology=topology,
        choice=UnitChoice(make_watches)
        if grad_mode.smallest_units and not sharded and not has_only_standard_layers(model)
        else None,
    )
    _check_mode(grad_mode.name, topology, watches)
    methods = MethodTable() if methods is None else methods
    if topology.splits.size > 1:
        # Sums of replicated parameters must be bitwise equal on all ranks, so all ranks use the same methods.
        methods = methods.untimed(topology.splits.broadcast(methods.seconds))
    return capture, grad_mode.build(capture, methods), Probe(capture, EVERY if topology.runs_independently else None)


def mode_of(mode: str | Mode) -> Mode:
    """Returns the grad mode with this name."""
    if isinstance(mode, Mode):
        return mode
    if mode not in MODES:
        raise ValueError(f"grad_sample_mode={mode!r} is not known. Choose one of: {', '.join(map(repr, MODES))}.")
    return MODES[mode]


def _check_mode(mode: str, topology: Topology, watches: Sequence[Watch]) -> None:
    if topology.slots and mode not in _ONE_PASS:
        raise UnsupportedLayerError(
            f"grad_sample_mode={mode!r} runs the model again within a backward pass, when sharded parameters are not "
            "gathered.",
            fix="Leave grad_sample_mode out: the default mode needs one pass.",
        )
    if topology.splits.size == 1:
        return
    if mode != "auto":
        raise UnsupportedLayerError(
            f"grad_sample_mode={mode!r} forms gradients of whole layers, and some are split over processes.",
            fix="Leave grad_sample_mode out: the default mode forms none.",
        )
    for watch in watches:
        inside = next((part for layer, part in topology.parts.items() if layer in set(watch.module.modules())), None)
        if watch.kind is Kind.UNIT and inside is not None:
            raise UnsupportedLayerError(
                f"The hooks treat '{watch.name}' ({type(watch.module).__name__}) as one unit, and its layer "
                f"'{inside.name}' is split over processes.",
                fix="Leave that layer out of the plan of parallelize_module.",
            )
