"""Independence check on a copy of the model: finds the layer in which the samples of a batch interact.

Some samples are kept, and the others get different data. The batch size does not change. If the output of a kept sample
changes, the check reports the first layer in execution order whose output changed although its input did not. The check
also runs the batch after each of two different batches. If its output differs, the model keeps state between batches.

All runs start from the same state of the model and of the random generators.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture.model_state import ModelState
from dpengine.capture.tensors import tensors_in_outputs
from dpengine.errors import notice

_EXACT, _HALF = 1e-4, 2e-2  # relative tolerance for rounding, in float32 and in half precision
_SEED = 0


@dataclass(frozen=True)
class Coupling:
    """Module in which samples interact.

    Attributes:
        name: Dotted name of the module; empty for the model itself.
        type: Name of its class.
        why: Predicate of a sentence whose subject is the module, such as "mixes samples".
        remedy: Recommended fix.
    """

    name: str
    type: str
    why: str
    remedy: str


@dataclass(frozen=True)
class _Event:
    """Start or end of the forward of a module, with its inputs or outputs."""

    entry: bool
    name: str
    type: str
    tensors: list[Tensor]


@dataclass(frozen=True)
class _Run:
    output: Any
    events: list[_Event]
    buffers: dict[str, Tensor]
    random: Tensor  # state of the generator after the run

    @property
    def outputs(self) -> list[Tensor]:
        return tensors_in_outputs(self.output)

    @property
    def shapes(self) -> list[torch.Size]:
        return [tensor.shape for event in self.events for tensor in event.tensors]


def call(model: nn.Module, inputs: Any) -> Any:
    """Calls the model with a tensor, a tuple of positional inputs or a mapping of keyword inputs."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def has_batch_axis(leaf: Any, size: int) -> bool:
    """Returns True for a tensor whose axis 0 has this size."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size


def graph_note(inputs: Any) -> str:
    """Returns a sentence about graphs if an input is sparse or may be an edge list ``(2, E)``; else an empty string."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    for leaf in tensors:
        edges = not leaf.is_floating_point() and leaf.dim() == 2 and leaf.shape[0] == 2
        if edges or leaf.layout is not torch.strided:
            return "Nodes of one graph share its edges and are not independent samples: make each graph a sample. "
    return ""


def keep_masks(size: int) -> list[Tensor]:
    """Returns masks of samples to keep. For each ordered pair of samples, one mask keeps only the first of the pair."""
    indices = torch.arange(size)
    bits = [(indices >> bit) % 2 == 1 for bit in range((size - 1).bit_length())]
    return [keep_B for bit_B in bits for keep_B in (bit_B, ~bit_B)]


def with_others_replaced(tree: Any, keep_B: Tensor, *, first_only: bool = False) -> Any:
    """Returns the tree with each sample that is not kept replaced by the sample before it.

    With ``first_only``, changes only the first tensor that has a batch axis.
    """
    leaves, spec = pytree.tree_flatten(tree)
    batched = [i for i, leaf in enumerate(leaves) if has_batch_axis(leaf, len(keep_B))]
    for i in batched[:1] if first_only else batched:
        keep = keep_B.to(leaves[i].device).view(-1, *[1] * (leaves[i].dim() - 1))
        leaves[i] = torch.where(keep, leaves[i].detach(), leaves[i].detach().roll(1, dims=0))
    return pytree.tree_unflatten(leaves, spec)


class CopyIndependenceCheck:
    """Runs a copy of a model repeatedly on one batch."""

    def __init__(self, model: nn.Module, inputs: Any, size: int):
        self._original, self._model = model, copy.deepcopy(model)
        self._inputs, self._size = inputs, size
        self._all_B = torch.ones(size, dtype=torch.bool)

    def run(self) -> tuple[Coupling | None, Any]:
        """Returns the first module in which samples interact, or None, and the output of the model."""
        if not self._model.training:  # otherwise unchanged: some modules may be in eval mode on purpose
            self._model.train()
        base = self._run(self._inputs)
        if base.outputs and all(output.dim() == 0 for output in base.outputs):
            return None, base.output  # a loss, which the caller compares with the losses of single samples
        if not any(has_batch_axis(output, self._size) for output in base.outputs):
            shapes = [tuple(output.shape) for output in base.outputs]
            raise ValueError(
                f"check: no output of the model has {self._size} samples on axis 0, as the targets have (output shapes "
                f"{shapes}), so independence cannot be checked. Pass targets of the same batch, and batch_first=False "
                "if the batch is on axis 1 of the inputs."
            )
        if not self._can_replace():
            fix = graph_note(self._inputs) or "Pass EmbeddingBag indices as a 2-D tensor, one row per bag."
            self._warn_unknown("some inputs may be flat indices of bags without a batch axis", fix.strip())
            return None, base.output
        if self._differ(base, self._run(self._inputs), self._all_B):
            self._warn_unknown(
                "the output changes when the model runs again", "Use only torch's random number generators."
            )
            return None, base.output
        return self._memory(base) or self._mixing(base), base.output

    def _warn_unknown(self, reason: str, fix: str) -> None:
        notice(
            "DPE012",
            f"check: {reason}, so it is not known whether the model keeps the samples of a batch independent. {fix}",
            key=reason,
            of=self._original,
        )

    # Runs

    def _can_replace(self) -> bool:
        """Returns False if an input may hold flat indices for an EmbeddingBag, which have no batch axis."""
        leaves = [leaf for leaf in pytree.tree_leaves(self._inputs) if isinstance(leaf, Tensor) and leaf.dim()]
        indices = [leaf for leaf in leaves if not leaf.is_floating_point() and leaf.dtype is not torch.bool]
        flat = [leaf for leaf in indices if leaf.dim() == 1]
        shared = [leaf for leaf in indices if leaf.shape[0] not in (1, self._size)]
        return not shared and not any(int(leaf[0]) == 0 and bool((leaf.diff() >= 0).all()) for leaf in flat)

    def _run(self, inputs: Any, before: Any = None) -> _Run:
        """Runs forward from the original state of the model, optionally after a pass over another batch, ``before``."""
        state = ModelState.of(self._model)
        devices = sorted({p.device for p in self._model.parameters() if p.device.type == "cuda"}, key=str)
        try:
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                if before is not None:
                    torch.manual_seed(_SEED)
                    call(self._model, _copied(before))
                torch.manual_seed(_SEED)
                with _EventRecorder(self._model) as recorder:
                    output = call(self._model, _copied(inputs))
                random = torch.get_rng_state()
            buffers = {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}
        finally:
            state.restore()
        return _Run(output, recorder.events, buffers, random)

    # Comparison

    def _mixing(self, base: _Run) -> Coupling | None:
        for keep_B in keep_masks(self._size):
            changed = self._run(with_others_replaced(self._inputs, keep_B))
            if not self._differ(base, changed, keep_B):
                continue
            if not _comparable(base, changed):  # dropout masks differ, so compare without dropout
                self._model.eval()
                base, changed = self._run(self._inputs), self._run(with_others_replaced(self._inputs, keep_B))
            # An input that all samples share may have the length of the batch. So also replace in the first input only.
            first_changed = self._run(with_others_replaced(self._inputs, keep_B, first_only=True))
            if self._differ(base, changed, keep_B) and self._differ(base, first_changed, keep_B):
                name, kind, where = self._first_difference(base, first_changed, keep_B)
                return Coupling(
                    name,
                    kind,
                    f"mixes samples{where}: the output of a sample changed when other samples got different data",
                    f"{graph_note(self._inputs)}Normalize, sort and attend within each sample, not over axis 0 (if "
                    "axis 0 is time, pass batch_first=False). dpengine.fix(model) replaces known layers.",
                )
        return self._mixing_backward()

    def _mixing_backward(self) -> Coupling | None:
        """Finds a model that mixes samples in backward only."""
        for keep_B in keep_masks(self._size)[:2]:
            grads = []
            for inputs in (self._inputs, with_others_replaced(self._inputs, keep_B, first_only=True)):
                grads.append(self._gradients(inputs, keep_B))
            for grad, new_grad in zip(*grads, strict=True):
                if float((grad - new_grad).norm()) > 1e-3 * float(grad.norm()):
                    return Coupling(
                        "",
                        type(self._model).__name__,
                        "mixes samples in backward: gradients of some samples changed when others got different data",
                        "Look for a torch.autograd.Function whose backward sums or averages over axis 0.",
                    )
        return None

    def _gradients(self, inputs: Any, keep_B: Tensor) -> list[Tensor]:
        """Returns the gradient of a weighted sum of the kept outputs, by parameter."""
        state = ModelState.of(self._model)
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                torch.manual_seed(_SEED)
                outputs = tensors_in_outputs(call(self._model, _copied(inputs)))
                kept = [o[keep_B.to(o.device)] for o in outputs if o.requires_grad and has_batch_axis(o, self._size)]
                if not kept or not parameters:
                    return []
                total = torch.stack(
                    [(out * torch.linspace(1, 2, out.numel()).view_as(out).to(out)).sum() for out in kept]
                )
                grads = torch.autograd.grad(total.sum(), parameters, allow_unused=True)
        finally:
            state.restore()
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]

    def _memory(self, base: _Run) -> Coupling | None:
        """Finds a model that keeps state between batches."""
        keep_B = keep_masks(self._size)[0]
        other = with_others_replaced(self._inputs, keep_B)
        remedy = "Use a layer without running statistics, or keep it in eval mode. dpengine.fix(model) replaces some."
        after = self._run(other)
        for name, buffer in base.buffers.items():
            if name not in after.buffers or not _same(buffer, after.buffers[name]):
                owner, _, slot = name.rpartition(".")
                kind = type(self._model.get_submodule(owner)).__name__
                return Coupling(owner, kind, f"writes data of a batch into its buffer {slot!r}", remedy)
        first, second = (self._run(self._inputs, before=before) for before in (self._inputs, other))
        if not self._differ(first, second, self._all_B):
            return None
        name, kind, where = self._first_difference(first, second, self._all_B)
        return Coupling(name, kind, f"remembers the previous batch{where}, which changes its output", remedy)

    def _differ(self, first: _Run, second: _Run, keep_B: Tensor) -> bool:
        outputs = list(zip(first.outputs, second.outputs, strict=False))
        same_number = len(first.outputs) == len(second.outputs)
        return not same_number or any(not self._agree(a, b, keep_B) for a, b in outputs)

    def _agree(self, first: Tensor, second: Tensor, keep_B: Tensor) -> bool:
        """Returns True if the kept samples of two tensors are equal, or the tensors have no batch axis."""
        a, b = self._batch_first(first), self._batch_first(second)
        if a is None or b is None or a.shape != b.shape:
            return True  # shapes may differ, for example by padding; later tensors show a difference of values
        keep_B = keep_B.to(a.device)
        return _same(a[keep_B], b[keep_B])

    def _batch_first(self, tensor: Tensor) -> Tensor | None:
        if has_batch_axis(tensor, self._size):
            return tensor
        return tensor.transpose(0, 1) if tensor.dim() > 1 and tensor.shape[1] == self._size else None

    def _first_difference(self, first: _Run, second: _Run, keep_B: Tensor) -> tuple[str, str, str]:
        """Finds the module in which kept samples first differ.

        Returns:
            Name and class of the module, and a phrase that locates the difference within the module.
        """
        running = [("", type(self._model).__name__)]  # names and classes of the modules that contain the event
        for a, b in zip(first.events, second.events, strict=False):
            same = (a.entry, a.name) == (b.entry, b.name)
            same = same and all(self._agree(x, y, keep_B) for x, y in zip(a.tensors, b.tensors, strict=False))
            if not same and a.entry:
                return *running[-1], f" in its own forward, before it calls {a.name!r}"
            if not same:
                return a.name, a.type, ""
            if a.entry:
                running.append((a.name, a.type))
            else:
                running.pop()
        return *running[0], ""


class _EventRecorder:
    """Records the inputs and outputs of each module, in execution order."""

    def __init__(self, model: nn.Module):
        self.events: list[_Event] = []
        self._hooks: list[Any] = []
        self._model = model

    def __enter__(self) -> _EventRecorder:
        for name, module in self._model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                hook = self._recorder(name, type(module).__name__)
                self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
                self._hooks.append(module.register_forward_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _recorder(self, name: str, kind: str) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
            tensors = tensors_in_outputs(output if output else (args, kwargs))
            self.events.append(_Event(not output, name, kind, [tensor.detach().clone() for tensor in tensors]))

        return record


def _comparable(first: _Run, second: _Run) -> bool:
    """Returns True if both runs used the same random numbers for the same elements.

    Dropout masks differ if shapes depend on the data, as with padding to the longest sample.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        none_drawn = torch.equal(first.random, torch.get_rng_state())
    return torch.equal(first.random, second.random) and (none_drawn or first.shapes == second.shapes)


def _same(a: Tensor, b: Tensor) -> bool:
    """Returns True if two tensors are equal up to rounding. Ignores entries that are not finite in the first."""
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    tolerance = _HALF if a.dtype in {torch.float16, torch.bfloat16} else _EXACT
    finite = a.isfinite()
    sizes = torch.where(finite, a.abs(), 0)
    scale = sizes.max() if sizes.numel() else 0.0
    return bool(((a - b).abs() <= tolerance * (sizes + scale)).logical_or(~finite).all())


def _copied(tree: Any) -> Any:
    """Returns the tree with copies of all tensors, because forward may write to its inputs."""
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)
