"""Independence probe on a copy of the model: finds the layer in which the samples of a batch interact.

Some samples are kept and the others get other data; the batch size stays the same. If a kept sample changes, the first
layer in execution order whose output changed while its input did not is reported. The batch then runs once more after
two different ones: a model whose answer changes keeps state between batches.

Everything runs on a copy of the model, from one state of the model and of the random generators.
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
from dpengine.capture.tap import tensors_in_outputs
from dpengine.errors import notice

_EXACT, _HALF = 1e-4, 2e-2  # relative: what a row may differ by for rounding
_SEED = 0


@dataclass(frozen=True)
class Coupling:
    """Where rows meet.

    Attributes:
        name: Dotted name of the module, empty for the model itself.
        type: Name of its class.
        why: What it does, as the rest of a sentence that begins with its name.
        remedy: What to do.
    """

    name: str
    type: str
    why: str
    remedy: str


@dataclass(frozen=True)
class _Event:
    """A module begins or ends."""

    entry: bool
    name: str
    type: str
    tensors: list[Tensor]


@dataclass(frozen=True)
class _Run:
    output: Any
    events: list[_Event]
    buffers: dict[str, Tensor]
    random: Tensor  # state of the generator afterwards

    @property
    def outputs(self) -> list[Tensor]:
        return tensors_in_outputs(self.output)

    @property
    def shapes(self) -> list[torch.Size]:
        return [tensor.shape for event in self.events for tensor in event.tensors]


def call(model: nn.Module, inputs: Any) -> Any:
    """The model on inputs: a tensor, a tuple of positional or a mapping of keyword inputs."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def carries_rows(leaf: Any, size: int) -> bool:
    """Whether this is a tensor with so many rows."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size


def kept_rows(size: int) -> list[Tensor]:
    """Sets of rows to keep: for any two rows there is a set with the first and without the second."""
    places = torch.arange(size)
    ones = [(places >> bit) % 2 == 1 for bit in range((size - 1).bit_length())]
    return [keep_B for one in ones for keep_B in (one, ~one)]


def with_others_changed(tree: Any, keep_B: Tensor, *, first_only: bool = False) -> Any:
    """The tree, in which every row that is not kept has the data of the row before it."""
    leaves, spec = pytree.tree_flatten(tree)
    carrying = [i for i, leaf in enumerate(leaves) if carries_rows(leaf, len(keep_B))]
    for i in carrying[:1] if first_only else carrying:
        chosen = keep_B.to(leaves[i].device).view(-1, *[1] * (leaves[i].dim() - 1))
        leaves[i] = torch.where(chosen, leaves[i].detach(), leaves[i].detach().roll(1, dims=0))
    return pytree.tree_unflatten(leaves, spec)


class Company:
    """A model that is run on one batch again and again."""

    def __init__(self, model: nn.Module, inputs: Any, size: int):
        self._model = copy.deepcopy(model)
        self._inputs, self._size = inputs, size
        self._all_B = torch.ones(size, dtype=torch.bool)

    def ask(self) -> tuple[Coupling | None, Any]:
        """Returns the first coupling, None if none was found, and the output of the batch."""
        if not self._model.training:  # a part may be in eval mode on purpose
            self._model.train()
        base = self._run(self._inputs)
        if not any(carries_rows(output, self._size) for output in base.outputs):
            shapes = [tuple(output.shape) for output in base.outputs]
            raise ValueError(
                f"check: no output of the model has {self._size} rows in front, as the targets have (shapes {shapes}), "
                "so it cannot be seen whether they stay apart. Check the model without its loss, with the batch first."
            )
        if not self._can_be_changed():
            _notice_unknown(
                "which inputs carry rows cannot be told: some may be indices of bags", "Give each bag a row."
            )
            return None, base.output
        if self._differ(base, self._run(self._inputs), self._all_B):
            _notice_unknown("the model gives another output when it runs again", "Draw random numbers by torch alone.")
            return None, base.output
        return self._memory(base) or self._mixing(base), base.output

    # Runs

    def _can_be_changed(self) -> bool:
        """Indices may be flat bags, as long as the batch by chance, and others where these begin."""
        leaves = [leaf for leaf in pytree.tree_leaves(self._inputs) if isinstance(leaf, Tensor) and leaf.dim()]
        indices = [leaf for leaf in leaves if not leaf.is_floating_point() and leaf.dtype is not torch.bool]
        flat = [leaf for leaf in indices if leaf.dim() == 1]
        shared = [leaf for leaf in indices if leaf.shape[0] not in (1, self._size)]
        return not shared and not any(int(one[0]) == 0 and bool((one.diff() >= 0).all()) for one in flat)

    def _run(self, inputs: Any, before: Any = None) -> _Run:
        """One forward pass from the state that the model came in, or after a pass over another batch."""
        state = ModelState.of(self._model)
        devices = sorted({p.device for p in self._model.parameters() if p.device.type == "cuda"}, key=str)
        try:
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                if before is not None:
                    torch.manual_seed(_SEED)
                    call(self._model, _copied(before))
                torch.manual_seed(_SEED)
                with _Listener(self._model) as listener:
                    output = call(self._model, _copied(inputs))
                random = torch.get_rng_state()
            buffers = {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}
        finally:
            state.put_back()
        return _Run(output, listener.events, buffers, random)

    # What they show

    def _mixing(self, base: _Run) -> Coupling | None:
        for keep_B in kept_rows(self._size):
            changed = self._run(with_others_changed(self._inputs, keep_B))
            if not self._differ(base, changed, keep_B):
                continue
            if not _comparable(base, changed):  # dropout fell on other places: look without it
                self._model.eval()
                base, changed = self._run(self._inputs), self._run(with_others_changed(self._inputs, keep_B))
            # An input that all rows share may be as long as the batch by chance.
            alone = self._run(with_others_changed(self._inputs, keep_B, first_only=True))
            if self._differ(base, changed, keep_B) and self._differ(base, alone, keep_B):
                name, kind, where = self._first_difference(base, alone, keep_B)
                return Coupling(
                    name,
                    kind,
                    f"mixes rows{where}: the output for a row changed when other rows of its batch got other data",
                    "Normalise, sort and attend within each row, not over axis 0; dpengine.fix(model) replaces the "
                    "layers that it knows.",
                )
        return self._mixing_backward()

    def _mixing_backward(self) -> Coupling | None:
        """What looks at other rows on the way back alone."""
        for keep_B in kept_rows(self._size)[:2]:
            norms = []
            for inputs in (self._inputs, with_others_changed(self._inputs, keep_B, first_only=True)):
                norms.append(self._gradients(inputs, keep_B))
            for one, other in zip(*norms, strict=True):
                if float((one - other).norm()) > 1e-3 * float(one.norm()):
                    return Coupling(
                        "",
                        type(self._model).__name__,
                        "mixes rows in its backward pass: gradients of some rows changed when others got other data",
                        "Look for a torch.autograd.Function whose backward sums or averages over axis 0.",
                    )
        return None

    def _gradients(self, inputs: Any, keep_B: Tensor) -> list[Tensor]:
        """Of a sum over outputs of the kept rows, by parameter."""
        state = ModelState.of(self._model)
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                torch.manual_seed(_SEED)
                outputs = tensors_in_outputs(call(self._model, _copied(inputs)))
                kept = [o[keep_B.to(o.device)] for o in outputs if o.requires_grad and carries_rows(o, self._size)]
                if not kept or not parameters:
                    return []
                total = torch.stack(
                    [(one * torch.linspace(1, 2, one.numel()).view(one.shape).to(one)).sum() for one in kept]
                )
                found = torch.autograd.grad(total.sum(), parameters, allow_unused=True)
        finally:
            state.put_back()
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]

    def _memory(self, base: _Run) -> Coupling | None:
        """What a batch leaves for the next one."""
        keep_B = kept_rows(self._size)[0]
        other = with_others_changed(self._inputs, keep_B)
        remedy = "Use a layer without running statistics, or keep it in eval mode; dpengine.fix(model) knows some."
        after = self._run(other)
        for name, buffer in base.buffers.items():
            if name not in after.buffers or not _same(buffer, after.buffers[name]):
                owner, _, slot = name.rpartition(".")
                kind = type(self._model.get_submodule(owner)).__name__
                return Coupling(owner, kind, f"writes what it saw of a batch into its buffer {slot!r}", remedy)
        one, two = self._run(self._inputs, before=self._inputs), self._run(self._inputs, before=other)
        if not self._differ(one, two, self._all_B):
            return None
        name, kind, where = self._first_difference(one, two, self._all_B)
        return Coupling(name, kind, f"remembers the batch before{where}, and answers the next one by it", remedy)

    def _differ(self, one: _Run, other: _Run, keep_B: Tensor) -> bool:
        return any(not self._agree(a, b, keep_B) for a, b in zip(one.outputs, other.outputs, strict=False)) or len(
            one.outputs
        ) != len(other.outputs)

    def _agree(self, one: Tensor, other: Tensor, keep_B: Tensor) -> bool:
        """Whether the kept rows of two tensors are the same; True of tensors that have none."""
        a, b = self._rows(one), self._rows(other)
        if a is None or b is None or a.shape != b.shape:
            return True  # as long as the longest row, say: what is made of it will tell
        keep_B = keep_B.to(a.device)
        return _same(a[keep_B], b[keep_B])

    def _rows(self, tensor: Tensor) -> Tensor | None:
        if carries_rows(tensor, self._size):
            return tensor
        return tensor.transpose(0, 1) if tensor.dim() > 1 and tensor.shape[1] == self._size else None

    def _first_difference(self, one: _Run, other: _Run, keep_B: Tensor) -> tuple[str, str, str]:
        """Name and class of the module in which the kept rows part, and where in its forward."""
        inside = [("", type(self._model).__name__)]
        for a, b in zip(one.events, other.events, strict=False):
            same = (a.entry, a.name) == (b.entry, b.name)
            same = same and all(self._agree(x, y, keep_B) for x, y in zip(a.tensors, b.tensors, strict=False))
            if not same and a.entry:
                return *inside[-1], f" in its own forward, before it calls {a.name!r}"
            if not same:
                return a.name, a.type, ""
            if a.entry:
                inside.append((a.name, a.type))
            else:
                inside.pop()
        return *inside[0], ""


def _notice_unknown(what: str, fix: str) -> None:
    notice(
        "DPE012",
        f"check: {what}, so it is not known whether the model keeps the rows of a batch apart. {fix}",
        key=what,
    )


class _Listener:
    """Notes what goes into each module and what comes out, in the order of execution."""

    def __init__(self, model: nn.Module):
        self.events: list[_Event] = []
        self._hooks: list[Any] = []
        self._model = model

    def __enter__(self) -> _Listener:
        for name, module in self._model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                note = self._noted(name, type(module).__name__)
                self._hooks.append(module.register_forward_pre_hook(note, with_kwargs=True, prepend=True))
                self._hooks.append(module.register_forward_hook(note, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _noted(self, name: str, kind: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
            tensors = tensors_in_outputs(output if output else (args, kwargs))
            self.events.append(_Event(not output, name, kind, [tensor.detach().clone() for tensor in tensors]))

        return note


def _comparable(one: _Run, other: _Run) -> bool:
    """Whether random numbers fell on the same places: shapes may follow from the data, as in padding."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        none_drawn = torch.equal(one.random, torch.get_rng_state())
    return torch.equal(one.random, other.random) and (none_drawn or one.shapes == other.shapes)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same but for rounding, as far as the first is finite."""
    if one.shape != other.shape:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    tolerance = _HALF if one.dtype in {torch.float16, torch.bfloat16} else _EXACT
    finite = one.isfinite()
    sizes = torch.where(finite, one.abs(), 0)
    scale = sizes.max() if sizes.numel() else 0.0
    return bool(((one - other).abs() <= tolerance * (sizes + scale)).logical_or(~finite).all())


def _copied(tree: Any) -> Any:
    """Copies of the tensors, which a forward pass may write."""
    return pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, tree)
