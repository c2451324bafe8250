"""The default grad mode: one backward pass, with clipping factors applied to stored inputs and output gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.capture.record import LayerCall, TensorCall, Use
from dpengine.capture.tensors import elements_key
from dpengine.grad_samplers.sampler import JointSampler, NormedRule
from dpengine.kernels.precision import full_precision
from dpengine.kernels.products import sq_norms

from .choose_method import MethodTable, Plan, Planner, plan_key
from .entry import Entry, gram_sq_norms, group_sq_norms, round_factors
from .flat_buffer import Key, Sums
from .grad_sample import add_grad_sample
from .method import Choice, Method
from .rows import Units, stays_narrow, wide, widened, zeroed
from .scratch import Scratch
from .stacks import Layout, Matrix, bucket_of, layout_of
from .strategy import AbstractGradients, common_rows, joint_gradients, joint_parts, note_rows

Pause = Callable[[], AbstractContextManager[None]]

_MATRIX_SHARE = 4  # the matrix takes at most a quarter of the budget for kept gradients
_MAX_PLANS = 500  # cached plans and layouts; sequences and batches of varying length need many


class BookKeeping(AbstractGradients):
    """Computes norms by the fastest applicable method for each parameter, and clipped sums by one weighted product.

    The gradients of small layers are stacked: computed together, in one matrix. A call waits until the first use of the
    gradients decides whether it is stacked, or goes to the `Entry` of each of its parameters.

    With ``stores`` and `KeepAll`, the norms also store the gradients ``(B, *param.shape)`` of each sample's own loss in
    ``p.grad_sample``. After several backward passes it is a list with one tensor per pass. ``zero_grad`` of the
    optimizer deletes it.
    """

    rows: dict[str, int] = None  # type: ignore[assignment]  # replaces the property; set per instance

    def __init__(
        self,
        planner: Planner | None = None,
        pause: Pause | None = None,
        *,
        matrix_bytes: int | None = None,
        stores: bool = False,
    ):
        self.planner = MethodTable() if planner is None else planner
        # Maximum bytes of stacked gradients; 0 disables stacking.
        self._matrix_bytes = self.planner.keep_budget // _MATRIX_SHARE if matrix_bytes is None else matrix_bytes
        self._stores = stores  # stores kept gradients in ``p.grad_sample``
        self._pause = pause  # pauses hooks while a registered norm rule reruns a layer; None ignores the rule
        self._paused: Pause = nullcontext if pause is None else pause
        self._computes = False  # inside `computing`
        self._entries: dict[nn.Parameter, Entry] = {}  # parameters whose calls are not stacked
        self.rows = {}
        self._plans: dict[object, Plan] = {}  # shared with the next passes
        self._plan: Plan = {}  # of the last pass; kept after `clear`, for `choices`
        self._scratch = Scratch()
        self._last_input: tuple[Tensor, Tensor] | None = None  # last float32 input that was rounded, and the result
        self._waiting: list[TensorCall] = []  # calls that may be stacked, until norms are computed
        self._layouts: dict[object, Layout] = {}  # shared with the next passes
        self._layout: Layout | None = None  # of the waiting calls; None if they changed since it was computed
        self._matrix: Matrix | None = None  # stacked gradients, from the norms to the sums
        self._stacked: tuple[Layout, int] | None = None  # layout and number of samples of the last pass, for `choices`

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        note_rows(self.rows, call.name, call.batch_size)
        self._receive(call, uses, rule)

    def receive_tensor_call(self, call: TensorCall) -> None:
        if not self._matrix_bytes:
            super().receive_tensor_call(call)
            return
        name, size = call.uses.name, call.shape[0]
        if self.rows.setdefault(name, size) != size:  # once per layer call, so `note_rows` is called for others only
            note_rows(self.rows, name, size)
        self._waiting.append(call)
        self._layout = None

    def _receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        is_slice = not isinstance(rule, Mapping) or any(use.axis_slice is not None for use in uses.values())
        if is_slice or not stays_narrow(call, [rule[name] for name in uses]):
            call = widened(call)
        else:
            call = self._narrowed(call)
        if isinstance(rule, NormedRule):
            if self._pause is not None:
                self._receive_normed(call, uses, rule)
                return
            rule = rule.gradients
        if isinstance(rule, JointSampler):
            for use, grad in joint_gradients(call, uses, rule):
                self._entry(use).keep(grad)
            return
        for name, use in uses.items():
            if use.axis_slice is None:
                self._entry(use).calls.append((call, rule[name]))
            else:
                self._entry(use).keep(_zero_padded(rule[name].grad(call), use))

    def _narrowed(self, call: LayerCall) -> LayerCall:
        """Returns the call with inputs in bfloat16, in which the layer multiplied. Calls in a row may share inputs."""

        def narrowed(tensor: Tensor) -> Tensor:
            if tensor.dtype is not torch.float32:
                return tensor
            if self._last_input is None or elements_key(self._last_input[0]) != elements_key(tensor):
                self._last_input = tensor, tensor.bfloat16()
            return self._last_input[1]

        return call.map(narrowed)

    def _receive_normed(self, call: LayerCall, uses: Mapping[str, Use], rule: NormedRule) -> None:
        gradients = rule.gradients
        samplers = joint_parts(call, uses, gradients) if isinstance(gradients, JointSampler) else gradients
        for name, sampler in samplers.items():
            if name in uses:
                self._entry(uses[name]).calls.append((call, rule.normed(name, sampler)))

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        note_rows(self.rows, use.name, grad.shape[0])
        self._entry(use).keep(grad.to(wide(grad.dtype)))

    def combine(self, units: Units) -> None:
        """Combines the gradients of the samples of each privacy unit. Afterwards axis 0 is the unit."""
        self._unstack()
        rows = common_rows(self.rows)
        with self.computing():
            for entry in self._entries.values():
                entry.join()
                entry.combine(units, rows)
        self.rows = dict.fromkeys(self.rows, units.count)

    def renewed(self) -> BookKeeping:
        """Returns an empty mode for the next pass that shares the cached plans. This mode keeps its layer calls."""
        other = BookKeeping(self.planner, self._pause, matrix_bytes=self._matrix_bytes, stores=self._stores)
        other._plans, other._layouts = self._plans, self._layouts
        return other

    def keep(self, parameters: Collection[nn.Parameter]) -> None:
        self._unstack()
        self._entries = {parameter: entry for parameter, entry in self._entries.items() if parameter in parameters}

    def copied(self) -> BookKeeping:
        """Returns a mode with copied layer calls, for norms or exact sums. Consuming one does not change the other."""
        self._unstack()
        other = self.renewed()
        other.rows = dict(self.rows)
        entries = self._entries.items()
        other._entries = {p: replace(e, calls=list(e.calls), rounds=False, grams=None) for p, e in entries}
        return other

    def _entry(self, use: Use) -> Entry:
        self._layout = None  # a stacked parameter must not have other uses
        return self._entries.setdefault(use.parameter, Entry(use))

    def _unstack(self) -> None:
        """Moves all waiting calls and the columns of the matrix to entries, because the caller needs each parameter."""
        waiting, self._waiting, self._layout = self._waiting, [], None
        for call in waiting:
            self._receive(call.layer_call(), call.uses, call.uses.rule)
            _release([call])
        self._last_input = None
        if self._matrix is not None:
            matrix, self._matrix = self._matrix, None
            for parameter, columns in matrix.layout.columns.slices.items():
                grad = matrix.grads_BP[:, columns].reshape(-1, *parameter.shape)
                self._entry(Use(parameter, matrix.layout.names[parameter])).keep(grad)

    def _current_layout(self) -> Layout | None:
        """Returns the layout of the waiting calls, from the cache if possible; None without calls."""
        if self._layout is None and self._waiting:
            rows, budget = bucket_of(common_rows(self.rows)), self._matrix_bytes
            key = (rows, budget, tuple(self._entries), *[call.uses for call in self._waiting])
            if key not in self._layouts:
                if len(self._layouts) >= _MAX_PLANS:
                    self._layouts.clear()
                self._layouts[key] = layout_of(self._waiting, self._entries, rows, budget)
            self._layout = self._layouts[key]
        return self._layout

    @property
    def parameters(self) -> Mapping[nn.Parameter, str]:
        layout = self._current_layout() if self._matrix is None else self._matrix.layout
        entries = {parameter: entry.use.name for parameter, entry in self._entries.items()}
        if layout is None:
            return entries
        return {**layout.names, **entries} if entries else layout.names

    @property
    def choices(self) -> list[Choice]:
        """Method chosen for each parameter in the last pass."""
        stacked = [] if self._stacked is None else self._stacked[0].choices(self._stacked[1])
        return [*self._plan.values(), *stacked]

    def calls(self) -> list[LayerCall]:
        """Returns the stored layer calls."""
        in_entries = [call for entry in self._entries.values() for call, _ in entry.calls]
        return in_entries + [call.layer_call() for call in self._waiting]

    def kept(self) -> dict[nn.Parameter, Tensor]:
        """Returns the kept per-sample gradients, unscaled."""
        self._unstack()
        return {p: entry.kept for p, entry in self._entries.items() if entry.kept is not None}

    def formed(self, parameter: nn.Parameter) -> Tensor:
        """Returns unscaled per-sample gradients ``(B, *param.shape)`` of an included parameter. Consumes nothing."""
        self._unstack()
        with self.computing():
            return self._entries[parameter].formed(common_rows(self.rows))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Pauses the hooks, and computes products in full precision and outside the graph. May be nested."""
        if self._computes:
            yield
            return
        self._computes = True
        try:
            with torch.no_grad(), full_precision(), self._paused():
                yield
        finally:
            self._computes = False

    def sq_norms(self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float) -> Tensor:
        with self.computing():
            sq_norms_BK = self._sq_norms(groups, num_groups) * scale**2
        if self._stores:
            for parameter, grad in self.kept().items():
                add_grad_sample(parameter, grad * scale)
        return sq_norms_BK

    def _sq_norms(self, groups: Mapping[nn.Parameter, int], num_groups: int) -> Tensor:
        rows = common_rows(self.rows)
        by_group: list[list[Tensor]] = [[] for _ in range(num_groups)]
        self._stack(rows)
        self._matrix_sq_norms(groups, by_group)
        if not self._entries and self._matrix is None:
            return torch.zeros(rows, num_groups)
        for entry in self._entries.values():
            entry.join()
            entry.form_again, entry.rounds = None, False
        self._plan = self._planned(rows) if self._entries else {}
        for parameter, sq_norm_B in self._each_sq_norm(rows):
            by_group[groups[parameter]].append(sq_norm_B.double())
        if num_groups == 1:
            return _sum_on(by_group[0][0].device, by_group[0]).unsqueeze(1)
        like = next(group[0] for group in by_group if group)
        sums = [_sum_on(like.device, group) if group else torch.zeros_like(like) for group in by_group]
        return torch.stack(sums, dim=1)

    def _stack(self, rows: int) -> None:
        """Stacks the gradients of small layers."""
        if self._matrix is not None:  # an earlier `sq_norms` of this pass formed it
            return
        layout, waiting, self._stacked = self._current_layout(), self._waiting, None
        if layout is None:
            return
        if not (rows and layout.stacks):
            self._unstack()
            return
        self._waiting, self._stacked = [], (layout, rows)
        self._matrix = layout.matrix(waiting, rows, self._scratch.take)
        for i, uses in layout.rest:
            self._receive(waiting[i].layer_call(), uses, waiting[i].uses.rule)
            _release([waiting[i]])  # frees inputs that were rounded
        self._last_input = None
        _release(waiting)

    def _matrix_sq_norms(self, groups: Mapping[nn.Parameter, int], by_group: list[list[Tensor]]) -> None:
        """Appends the squared norms ``(B,)`` of stacked gradients to ``by_group[group]``."""
        if self._matrix is None:
            return
        grads_BP = self._matrix.grads_BP
        if len(by_group) == 1:
            sq_norm_B = self._matrix.sq_norm_B
            by_group[0].append(sq_norms(grads_BP) if sq_norm_B is None else sq_norm_B)
            return
        for parameters, columns in self._matrix.layout.equal_columns():
            parts_BLP = grads_BP[:, columns].unflatten(1, (len(parameters), -1))
            sq_norms_BL = sq_norms(parts_BLP.flatten(0, 1)).view(parts_BLP.shape[:2])
            for parameter, sq_norm_B in zip(parameters, sq_norms_BL.unbind(1), strict=True):
                by_group[groups[parameter]].append(sq_norm_B)

    def _planned(self, rows: int) -> Plan:
        entries = list(self._entries.values())
        key = (self.planner.version, plan_key(entries, rows))
        if key not in self._plans:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = self.planner.plan(entries, rows)
        return self._plans[key]

    def _each_sq_norm(self, rows: int) -> list[tuple[nn.Parameter, Tensor]]:
        """Returns squared norms by parameter. Parameters that share Gram matrices or kernels come last."""
        pairs: list[tuple[nn.Parameter, Tensor]] = []
        by_gram: list[Entry] = []
        groups: dict[Any, list[Entry]] = {}
        for parameter, entry in self._entries.items():
            algorithm = self._plan[parameter].algorithm
            if algorithm.method is Method.GHOST and len(entry.calls) == 1 and entry.calls[0][1].factors is not None:
                by_gram.append(entry)
            elif key := entry.group_key(algorithm, rows):
                groups.setdefault((algorithm, key), []).append(entry)
            else:
                pairs.append((parameter, entry.sq_norm(algorithm, rows, self._scratch)))
        together = [(by_gram, gram_sq_norms(by_gram))] if by_gram else []
        together += [(group, group_sq_norms(group, key[0], rows)) for key, group in groups.items()]
        for entries, sq_norms_KB in together:
            pairs += [(entry.use.parameter, sq_norm_B) for entry, sq_norm_B in zip(entries, sq_norms_KB, strict=True)]
        return pairs

    def sum_methods(self) -> dict[nn.Parameter, tuple[str | None, bool]]:
        """Returns ``form_again`` and ``rounds`` of each parameter, which depend on its norms, after `sq_norms`."""
        return {p: (entry.form_again, entry.rounds) for p, entry in self._entries.items()}

    def set_sum_methods(self, methods: Mapping[nn.Parameter, tuple[str | None, bool]]) -> None:
        """Makes `add_sums` compute the sums that match the norms of another pass over the batch."""
        if self._waiting:
            with self.computing():
                self._stack(common_rows(self.rows))
        for parameter, entry in self._entries.items():
            entry.form_again, entry.rounds = methods.get(parameter, (None, False))

    def drop(self, rows_B: Tensor) -> None:
        with self.computing():
            if self._waiting:  # of the second pass of ghost mode, whose norms are those of this matrix
                self._stack(common_rows(self.rows))
            if self._matrix is not None:
                self._matrix = Matrix(self._matrix.layout, zeroed(self._matrix.grads_BP, rows_B))
            for entry in self._entries.values():
                entry.drop(rows_B)

    def add_sums(self, groups: Mapping[nn.Parameter, int], weights_BK: Tensor, scale: float, into: Sums) -> None:
        with self.computing():
            self._add_sums(groups, weights_BK, scale, into)

    def _add_sums(self, groups: Mapping[nn.Parameter, int], weights_BK: Tensor, scale: float, into: Sums) -> None:
        if self._waiting:
            self._stack(common_rows(self.rows))
        if self._matrix is not None:
            (layout, grads_BP, _), self._matrix = self._matrix, None
            weight = weights_BK.to(grads_BP.device, grads_BP.dtype).unbind(dim=1)
            if len(weight) == 1:
                into.add_flat(layout.columns, torch.mv(grads_BP.t(), weight[0]), scale)
            else:
                for parameter, columns in layout.columns.slices.items():
                    total = torch.mv(grads_BP[:, columns].t(), weight[groups[parameter]])
                    into.add(parameter, total.view(parameter.shape), scale)
                    into.complete(parameter)
        weights: dict[Key, tuple[Tensor, ...]] = {}  # by device and dtype

        def weight_of(parameter: nn.Parameter) -> Tensor:
            key = parameter.device, wide(parameter.dtype)
            if key not in weights:
                weights[key] = weights_BK.to(*key).unbind(dim=1)
            return weights[key][groups[parameter]]

        if rounded := [entry for entry in self._entries.values() if entry.rounds]:
            round_factors(rounded, [weight_of(entry.use.parameter) for entry in rounded])
        while self._entries:  # last first; frees the memory of each entry before the next sum
            parameter, entry = self._entries.popitem()
            entry.add_sum(weight_of(parameter), scale, into)
            into.complete(parameter)

    def clear(self) -> None:
        _release(self._waiting)
        self._entries = {}
        self._waiting, self._layout, self._matrix, self._last_input = [], None, None, None
        self.rows = {}
        if self._scratch.taken:
            self._scratch.start_again()


def _sum_on(device: torch.device, tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0].to(device)
    return torch.stack([tensor.to(device) for tensor in tensors]).sum(dim=0)


def _release(calls: Sequence[TensorCall]) -> None:
    """Releases the tensors of calls, which hooks of the graph still hold."""
    for call in calls:
        call.inputs = call.grad = None


def _zero_padded(grad: Tensor, use: Use) -> Tensor:
    """Zero-pads the gradient of a slice of a parameter to the shape of the parameter."""
    padded = grad.new_zeros(grad.shape[0], *use.shape)
    padded[:, use.axis_slice] = grad
    return padded
