"""Chooses units: the smallest modules that run on each sample alone, because gradient rules of layers do not apply.

The gradient rule of a layer needs the batch on axis 0 of the layer's input, and covers only the operations of the layer
itself. Before the first training pass, the model runs forward once on the first batch. If the rule of a layer does not
apply, or a parameter is used outside its layer, the enclosing module becomes a unit, which the fallback of
`functional_sampler` differentiates. If rules still do not apply, the next enclosing module becomes the unit, up to the
entire model. Nothing is released before the choice.

Privacy: the choice changes how per-sample gradients are computed, and never whether they are checked. A unit is
accepted if samples that run alone give the same outputs as in the batch. Each later batch repeats the comparison, or
also runs each sample alone in the forward pass. As in the independence check, data of a batch influence the choice only
through an error, or through the names of modules, which depend on shapes and on the code of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture.capture import Capture, CaptureState
from dpengine.capture.checkpoints import without_checkpoints
from dpengine.capture.forward_state import ForwardState
from dpengine.capture.hooks import batch_size_of_call
from dpengine.capture.model_state import ModelState
from dpengine.capture.on_modules import has_own_forward
from dpengine.capture.record import ForwardCall, LayerCall, TensorCall, Use, swap_batch_axis
from dpengine.capture.replay import copies_of
from dpengine.capture.tensors import tensors_in, tensors_in_outputs
from dpengine.capture.watch import Kind, Watch
from dpengine.capture.watched_parameter import WatchedParameter
from dpengine.errors import PrivacyError, notice
from dpengine.grad_samplers.per_sample_forward import PerSampleForwardError, check_samples_independent
from dpengine.kernels.library import traced
from dpengine.layers.replacements import ORIGINALS

_logger = logging.getLogger(__name__)


class MakeWatches(Protocol):
    """Function that returns the watches of a model in which the modules with the names ``units`` are units."""

    def __call__(self, *, units: Collection[str]) -> Sequence[Watch]: ...


class _Obstacle(NamedTuple):
    """Watched module whose gradient rule does not apply, and the reason."""

    watch: Watch
    reason: str


class UnitChoice:
    """Chooses the units of a model before its first forward pass with two samples or more.

    Processes that train one model choose separately, because they may get their first samples in different steps. The
    gradients of each process are exact. At the end of the first step in which all processes have chosen, each process
    uses the units of all.
    """

    def __init__(self, make_watches: MakeWatches):
        self._make_watches = make_watches
        self._has_chosen = False
        self._replaced: tuple[Sequence[Watch], tuple[str, ...]] | None = None  # watches and units before an empty batch

    def __call__(self, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Chooses the units before the first batch. Leaves the model, the inputs and random generators unchanged."""
        samples = None if self._has_chosen else batch_size_of_call(capture, args, kwargs)
        if samples is None or any(map(traced, tensors_in((args, kwargs)))):
            return
        self._replace_for_empty(capture, samples)
        if samples == 0:
            return
        if capture.replay is not None and capture.replay.loop is not None:
            capture.replay.loop.model_started()  # the runs below are not part of the loop
        watches_and_units = capture.watches, capture.units
        reasons = self._choose(_Trial(capture, args, kwargs, samples))
        if reasons is None and capture.watches is not watches_and_units[0]:
            capture.watch(*watches_and_units)  # the training pass raises the error of the layer
        self._has_chosen = samples > 1  # with one sample, any axis of length one may be the batch axis
        if self._has_chosen and capture.topology.everyone.size == 1:
            capture.stop_choosing()
        for name, reason in (reasons or {}).items():
            _give_notice(capture.model, name, reason)

    def use(self, capture: Capture, units: Collection[str]) -> None:
        """Makes the modules with the names ``units`` units, and ends the choice."""
        outer = tuple(sorted(name for name in units if not _is_inside_other(name, units)))
        if outer != capture.units:
            capture.watch(self._make_watches(units=outer), outer)
        capture.stop_choosing()

    def share(self, capture: Capture) -> None:
        """Makes each process use the units of all processes, if all have chosen."""
        everyone = capture.topology.everyone
        if everyone.size > 1:
            chosen = everyone.all_gather(capture.units if self._has_chosen else None)
            if all(units is not None for units in chosen):
                self.use(capture, {name for units in chosen for name in units})

    def _replace_for_empty(self, capture: Capture, samples: int) -> None:
        """Makes the entire model a unit for empty batches, and restores the watches at the first batch with samples."""
        if samples == 0 and self._replaced is None:
            before = capture.watches, capture.units
            with suppress(PrivacyError):  # no gradient rule supports a layer
                capture.watch(self._make_watches(units=("",)), ("",))
                self._replaced = before
        elif samples and self._replaced is not None:
            capture.watch(*self._replaced)
            self._replaced = None

    def _choose(self, trial: _Trial) -> dict[str, str] | None:
        """Returns the names of the units, each with the reason for it; None if no choice of units is accepted."""
        model, reasons = trial.capture.model, dict.fromkeys(trial.capture.units, "")
        while obstacles := trial.obstacles():
            tried = frozenset(reasons)
            for watch, reason in obstacles:
                name = _enclosing_module(model, watch, tried)
                if name is None:
                    return None
                reasons.setdefault(name, reasons.get(watch.name) or reason)
            reasons = {name: reason for name, reason in reasons.items() if not _is_inside_other(name, reasons)}
            try:
                trial.capture.watch(self._make_watches(units=reasons), tuple(sorted(reasons)))
            except PrivacyError:  # no gradient rule supports a layer
                return None
        return None if obstacles is None else reasons


class _Trial:
    """Runs the forward pass of a model to find the layers whose rules do not apply."""

    def __init__(self, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any], samples: int):
        self.capture = capture
        self._inputs, self._samples = (args, kwargs), samples
        self._initial = ForwardState.now((*tensors_in((args, kwargs)), *capture.model.parameters()))
        self._obstacles: list[_Obstacle] = []

    def obstacles(self) -> list[_Obstacle] | None:
        """Returns the layers and units whose rules do not apply; None if the forward pass fails for another reason."""
        obstacles = self._run()
        if obstacles or obstacles is None or self._samples < 3:
            return obstacles
        inputs, samples = self._inputs, self._samples
        self._inputs, self._samples = pytree.tree_map(partial(_without_last, samples), inputs), samples - 1
        try:
            return self._run() or []  # another axis cannot have the length of the batch both times
        finally:
            self._inputs, self._samples = inputs, samples

    def _run(self) -> list[_Obstacle] | None:
        capture, model = self.capture, self.capture.model
        state, (args, kwargs) = ModelState.of(model), copies_of(self._inputs)
        seen: list[tuple[Watch, int]] = []
        self._obstacles, inputs, samples = [], capture.inputs, self._samples
        handles = [
            watch.module.register_forward_hook(partial(self._record_call, watch, seen), with_kwargs=True)
            for watch in capture.watches
            if watch.kind is not Kind.OPERATIONS
        ]
        try:
            initial = self._initial
            with (
                initial.random_again(),
                initial.with_autocast(),
                _outside_checkpoints(),
                without_checkpoints(),
                capture.redirected(_NO_RECEIVER, samples),
            ):
                capture.inputs, capture.rows_seen = (args, kwargs), seen
                outputs = tensors_in_outputs(model(*args, **kwargs))
        except Exception as error:
            watch = self._watch_of(getattr(error, "where", None))
            _logger.debug("The forward pass that chooses the units failed.", exc_info=True)
            return None if watch is None else [_Obstacle(watch, _reason(error))]
        finally:
            capture.inputs, capture.rows_seen = inputs, None
            for handle in handles:
                handle.remove()
            state.restore()
        return [*self._obstacles, *self._without_batch_axis(seen, outputs), *self._used_outside_layer(outputs)]

    def _record_call(
        self, watch: Watch, seen: list[tuple[Watch, int]], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Records the number of samples of a layer or unit. Also checks that samples of a unit can run alone."""
        if self.capture.state is CaptureState.PAUSED or self.capture.is_in_running_unit(module):
            return
        batch_first = watch.batch_first or self.capture.batch_first
        tensors = [
            leaf if batch_first else swap_batch_axis(leaf) for leaf in tensors_in(output) if leaf.is_floating_point()
        ]
        samples = next(
            (len(tensor) for tensor in tensors if tensor.dim() and not isinstance(tensor, WatchedParameter)), None
        )
        if watch.name and tensors and not any(tensor.dim() for tensor in tensors):
            self._obstacles.append(_Obstacle(watch, f"{_label(watch)} returns one number for all samples"))
        if samples is None:
            return
        seen.append((watch, samples))
        if watch.kind is not Kind.UNIT or samples != self._samples:
            return
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        try:
            with self.capture.paused():
                call = ForwardCall(module, module.forward, args, kwargs, named, watch.name, batch_first)
                check_samples_independent(call, samples)
        except (PerSampleForwardError, PrivacyError):
            _logger.debug("Samples of %s cannot run alone.", _label(watch), exc_info=True)
            self._obstacles.append(_Obstacle(watch, f"single samples cannot run through {_label(watch)}"))

    def _without_batch_axis(self, seen: list[tuple[Watch, int]], outputs: Sequence[Tensor]) -> list[_Obstacle]:
        """Returns the layers and units whose outputs do not have the batch on axis 0."""
        sizes = {samples for _, samples in seen}
        batches = [self.capture.batch_to_front(output) for output in outputs if output.dim()]
        same_size = len(sizes) == 1 and all(len(batch) != self._samples for batch in batches)
        if same_size and not any(watch.kind is Kind.UNIT for watch, _ in seen):
            return []  # the first input may have no batch axis; the step compares sizes with the sampler
        return [
            _Obstacle(watch, f"axis 0 of the output of {_label(watch)} is not the batch")
            for watch, samples in seen
            if samples != self._samples
        ]

    def _used_outside_layer(self, outputs: Sequence[Tensor]) -> list[_Obstacle]:
        """Returns the layers whose parameters get a gradient from autograd outside a recorded layer call."""
        names: dict[Tensor, str] = {p: name for name, p in self.capture.model.named_parameters() if p.requires_grad}
        uses = []
        for leaf in _leaves_of(outputs):
            if isinstance(leaf, WatchedParameter):
                uses.append((leaf.origin.name, "in a torch.autograd.Function"))
            elif leaf in names:
                uses.append((names[leaf], "outside the forward of the layer that owns it"))
        return [
            _Obstacle(watch, f"parameter '{name}' is used {where}")
            for name, where in uses
            if (watch := self._watch_of(name)) is not None
        ]

    def _watch_of(self, where: str | None) -> Watch | None:
        """Returns the watch of a layer or parameter with a dotted name; None if there is none."""
        if where is None:
            return None
        named = dict(self.capture.model.named_parameters(remove_duplicate=False))
        for watch in self.capture.watches:
            if watch.name == where:
                return watch
            if where in named and any(owner._parameters[n] is named[where] for owner, n, _ in watch.slots()):
                return watch
        return None


class _NoReceiver:
    """Ignores all calls, because no backward pass follows."""

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None: ...

    def receive_tensor_call(self, call: TensorCall) -> None: ...

    def receive_rows(self, use: Use, grad: Tensor) -> None: ...


_NO_RECEIVER = _NoReceiver()


def has_only_standard_layers(model: nn.Module) -> bool:
    """Returns True if a model consists only of torch layers, and no layer moves the batch to another axis."""
    return all(
        (type(module).__module__.startswith("torch.nn.modules.") or type(module) in ORIGINALS)
        and not has_own_forward(module)
        and not module._forward_pre_hooks  # these may compute parameters, as torch.nn.utils.weight_norm does
        and not (isinstance(module, nn.Flatten) and module.start_dim == 0)
        and not (isinstance(module, nn.Unflatten) and module.dim == 0)
        for module in model.modules()
    )


def _outside_checkpoints() -> AbstractContextManager[Any]:
    """Returns a context in which an activation checkpoint around the model does not register saved tensors."""
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)


def _enclosing_module(model: nn.Module, watch: Watch, units: Collection[str]) -> str | None:
    """Returns the name of the smallest module that contains a watched one and is not a unit yet; None if none."""
    name: str | None = watch.name
    if watch.kind is not Kind.OPERATIONS:  # watched operations are those of the module itself
        name = _parent_of(watch.name)
    while name is not None and (name in units or type(model.get_submodule(name)).forward is nn.Module.forward):
        name = _parent_of(name)
    return name


def _parent_of(name: str) -> str | None:
    return name.rpartition(".")[0] if name else None


def _is_inside_other(name: str, units: Collection[str]) -> bool:
    return any(other != name and (not other or name.startswith(f"{other}.")) for other in units)


def _leaves_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the leaf tensors of the autograd graph."""
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, leaves = set(nodes), []
    while nodes:
        node = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        inputs = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= inputs
        nodes += inputs
    return leaves


def _without_last(samples: int, leaf: Any) -> Any:
    can_be_cut = isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested
    return leaf[:-1] if can_be_cut and leaf.shape[:1] == (samples,) else leaf


def _label(watch: Watch) -> str:
    return f"'{watch.name}'" if watch.name else "the model"


def _reason(error: Exception) -> str:
    text = str(error)
    if isinstance(error, PrivacyError):
        text = text.removeprefix(f"[{error.code}] ").removesuffix(error.fix)
    return text.rstrip(" .")


def _give_notice(model: nn.Module, name: str, reason: str) -> None:
    module = model.get_submodule(name)
    size = sum(p.numel() for p in module.parameters() if p.requires_grad) * 4 / 2**20
    part = f"'{name}' ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
    notice(
        "DPE028",
        f"Each sample runs alone through {part}, because no layer rule applies: {reason}. This costs another "
        f"forward and backward pass of this part, and {size:.3g} MiB for the gradients of each sample.",
        key=name,
        of=model,
    )
