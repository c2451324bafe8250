"""Grad mode with the least memory: a first pass computes norms only, a second pass the weighted sums."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dpengine.capture.record import LayerCall, TensorCall, Use
from dpengine.capture.tensors import tensors_in
from dpengine.errors import UnsupportedLayerError
from dpengine.grad_samplers.devices import launches_kernels, memory_for
from dpengine.kernels.products import norms

from .bookkeep import BookKeeping, Pause
from .choose_method import Planner
from .flat_buffer import Sums
from .rows import zeroed
from .stacks import SMALL_CALL_BYTES
from .strategy import AbstractGradients, common_rows, note_rows

Rerun = Callable[[Callable[[Tensor], Tensor]], None]
TensorKey = tuple[str, str, int]  # name of a layer, "input" or "gradients", batch size

WINDOW_BYTES = 4 * 2**20  # of the tensors of layer calls that are processed together on the CPU; fits the cache
_MAX_WINDOW_BYTES = 2**26  # the same on accelerators
_MAX_DEVIATION = 2e-3  # relative deviation of the squared norms of a layer's inputs and gradients in two passes


class Reweight(AbstractGradients):
    """Stores norms only. A second forward and backward pass over the same batch computes the sums.

    Layer calls wait in a window until their tensors take `WINDOW_BYTES`, so that small layers are processed together.
    For a parameter that is used more than once, the norm needs all uses, so its layer calls are kept until the end of
    the pass. ``planner`` should choose methods that keep no gradients, or the memory advantage is lost.

    Args:
        uses: Returns how often a parameter was used since the last backward pass.
        rerun: Runs the batch again, with a function that is applied to each gradient of an output.
        planner: Chooses the methods.
        pause: Pauses hooks.
        reporting: Prepares computations inside a backward pass: one thread at a time, without autocast.
    """

    def __init__(
        self, uses: Callable[[nn.Parameter], int], rerun: Rerun, planner: Planner, pause: Pause, reporting: Pause
    ):
        self._uses = uses
        self._rerun = rerun
        self._reporting = reporting
        self._repeated = BookKeeping(planner, pause)
        self._window = BookKeeping(planner, pause, matrix_bytes=WINDOW_BYTES)
        self._window_bytes = 0
        # Calls that are not in the window yet, and the object that receives them. Threads of autograd append to it.
        self._arrived: deque[tuple[TensorCall, BookKeeping]] = deque()
        self._tensors: list[tuple[TensorKey, Tensor]] = []  # inputs and gradients of the calls in the window
        self._reused: set[nn.Parameter] = set()  # parameters of the calls in `_repeated`
        self._window_names: dict[nn.Parameter, str] = {}  # parameters of all calls that were put into the window
        self._sq_norms: list[tuple[list[nn.Parameter], Tensor]] = []  # parameters, (B, len(parameters))
        self._rows: dict[str, int] = {}
        self._tensor_norms: tuple[dict[TensorKey, list[Tensor]], dict[TensorKey, list[Tensor]]] = {}, {}  # two passes
        self._sum_methods: dict[nn.Parameter, tuple[str | None, bool]] = {}  # for the second pass
        self._dropped: Tensor | None = None
        self._consume: Callable[[BookKeeping], None] | None = None  # applied to the windows of the second pass

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        held = [("gradients", grad) for grad in tensors_in(call.grad_output)]
        inputs = tensors_in((call.inputs, dict(call.kwargs)))
        held += [("input", tensor) for tensor in inputs if tensor.dim() and len(tensor) == call.batch_size]
        receiver = self._register(call.name, call.batch_size, uses.values())
        self._hold(call.name, held)
        receiver.receive(call, uses, rule)
        self._grow(held[0][1].device, sum(tensor.nbytes for _, tensor in held))

    def receive_tensor_call(self, call: TensorCall) -> None:
        assert call.inputs is not None and call.grad is not None
        self._arrived.append((call, self._register(call.uses.name, call.shape[0], call.uses.values())))
        self._grow(call.grad.device, call.inputs.nbytes + call.grad.nbytes)

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        receiver = self._register(use.name, grad.shape[0], [use])
        self._hold(use.name, [("gradients", grad)])
        receiver.receive_rows(use, grad)
        self._grow(grad.device, grad.nbytes)

    def _register(self, name: str, rows: int, uses: Collection[Use]) -> BookKeeping:
        """Records the parameters of a call and its number of samples. Returns the object that receives the call."""
        if self._consume is not None:
            return self._repeated if any(use.parameter in self._reused for use in uses) else self._window
        note_rows(self._rows, name, rows)
        for use in uses:
            # Only the norm of the first use was stored, and the norm of a sum cannot be computed from norms.
            if use.parameter in self._window_names:
                raise UnsupportedLayerError(
                    f"Parameter '{use.name}' was reached a second time in one backward pass, over forward passes from "
                    "before the last one. grad_sample_mode='ghost' cannot combine their norms.",
                    fix="Run the forward passes again, or use grad_sample_mode='auto'.",
                )
        if any(self._uses(use.parameter) > 1 for use in uses):
            self._reused.update(use.parameter for use in uses)
            return self._repeated
        self._window_names.update((use.parameter, use.name) for use in uses)
        return self._window

    def _hold(self, name: str, held: Sequence[tuple[str, Tensor]]) -> None:
        """Keeps the tensors of a call until the window is emptied, to compare the passes."""
        self._tensors += [((name, kind, len(tensor)), tensor) for kind, tensor in held]

    def _grow(self, device: torch.device, size: int) -> None:
        """Adds bytes to the window, and empties it if it is full."""
        self._window_bytes += size
        if self._window_bytes >= memory_for(device, WINDOW_BYTES, most=_MAX_WINDOW_BYTES):
            with self._reporting():
                self._empty_window()

    def _empty_window(self) -> None:
        """Computes the norms, or the sums, of the calls in the window, and frees them."""
        try:
            while self._arrived:
                call, receiver = self._arrived.popleft()
                inputs, grad = call.inputs, call.grad
                assert inputs is not None and grad is not None
                held = [("gradients", grad.reshape(call.shape)), ("input", inputs.detach())]
                if inputs.shape[:1] != call.shape[:1]:
                    held.pop()
                self._hold(call.uses.name, held)
                receiver.receive_tensor_call(call)
            tensors, self._tensors = self._tensors, []
            self._record_norms(tensors)
            if self._consume is not None:
                self._consume(self._window)
            elif len(set(self._window.rows.values())) == 1:  # else `sq_norms` raises the error
                parameters = list(self._window.parameters)
                columns = {parameter: i for i, parameter in enumerate(parameters)}
                self._sq_norms.append((parameters, self._window.sq_norms(columns, len(parameters), 1.0)))
                self._sum_methods.update(self._window.sum_methods())
        finally:
            self._window.clear()
            self._tensors, self._window_bytes = [], 0

    def _record_norms(self, tensors: Sequence[tuple[TensorKey, Tensor]]) -> None:
        """Records the norms of the samples in each tensor, to compare the two passes."""
        recorded = self._tensor_norms[self._consume is not None]
        groups: dict[object, list[tuple[TensorKey, Tensor]]] = {}
        for i, (_, tensor) in enumerate(tensors):
            together = launches_kernels(tensor.device) or tensor.numel() * tensor.itemsize <= SMALL_CALL_BYTES
            shape = (tensor.shape, tensor.dtype, tensor.device) if together else i
            groups.setdefault(shape, []).append(tensors[i])
        for group in groups.values():
            stacked = torch.stack([tensor for _, tensor in group]) if len(group) > 1 else group[0][1].unsqueeze(0)
            flat_NBF = stacked.flatten(2) if stacked.dim() > 2 else stacked.unsqueeze(2)
            if not (flat_NBF.is_floating_point() or flat_NBF.is_complex()):  # indices
                flat_NBF = flat_NBF.float()
            if flat_NBF.device.type == "cpu":
                norms_NB = norms(flat_NBF, 2)
            else:  # one kernel
                dtype = torch.promote_types(flat_NBF.dtype, torch.float32)
                norms_NB = torch.linalg.vector_norm(flat_NBF, dim=2, dtype=dtype)
            for (key, _), norm_B in zip(group, norms_NB, strict=True):
                recorded.setdefault(key, []).append(norm_B)

    def _check_equal_passes(self) -> None:
        """Raises if the two passes differ, because norms are from the first and sums from the second."""
        first, second = self._tensor_norms
        by_length: dict[int, list[TensorKey]] = {}
        for key in {**first, **second}:
            if len(first.get(key, [])) != len(second.get(key, [])):
                self._raise_other_pass(key)
            by_length.setdefault(key[2], []).append(key)
        for keys in by_length.values():  # together, because each read by the host waits for the device
            device = first[keys[0]][0].device
            first_KB, second_KB = (
                _total_sq_norms([norms_of[key] for key in keys], device) for norms_of in (first, second)
            )
            usable_KB = first_KB.isfinite()
            if self._dropped is not None:
                usable_KB &= ~self._dropped.to(device)
            least_K1 = 1e-9 * first_KB.where(usable_KB, 0).sum(dim=1, keepdim=True)
            close_KB = (second_KB - first_KB).abs() <= _MAX_DEVIATION * first_KB + least_K1
            equal_K = (close_KB | ~usable_KB).all(dim=1)
            if not equal_K.all():
                self._raise_other_pass(keys[equal_K.tolist().index(False)])

    def _raise_other_pass(self, key: TensorKey) -> NoReturn:
        name, kind, _ = key
        raise UnsupportedLayerError(
            f"Layer '{name}' had {'another input' if kind == 'input' else 'other gradients'} when the batch was run "
            "again. grad_sample_mode='ghost' runs the forward twice, which must compute the same, and starts backward "
            "from the tensors that it returns in tuples, lists, dicts or the fields of one object, outside any "
            "checkpoint.",
            fix="Return all tensors that the loss depends on, or use grad_sample_mode='auto'.",
        )

    @property
    def rows(self) -> Mapping[str, int]:
        return self._rows

    @property
    def parameters(self) -> Mapping[nn.Parameter, str]:
        repeated = {use.parameter: use.name for call, _ in self._arrived for use in call.uses.values()}
        return {**self._window_names, **repeated, **self._repeated.parameters}

    def sq_norms(self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float) -> Tensor:
        rows = common_rows(self._rows)
        self._empty_window()
        if self._repeated.parameters:
            sq_norms_BK = self._repeated.sq_norms(groups, num_groups, 1.0)
        else:
            device = self._sq_norms[0][1].device if self._sq_norms else None
            sq_norms_BK = torch.zeros(rows, num_groups, dtype=torch.float64, device=device)
        if self._sq_norms:
            sq_norms_BP = torch.cat([sq_norms.to(sq_norms_BK) for _, sq_norms in self._sq_norms], dim=1)
            columns = torch.tensor([groups[parameter] for parameters, _ in self._sq_norms for parameter in parameters])
            sq_norms_BK.index_add_(1, columns.to(sq_norms_BK.device), sq_norms_BP)
        self._repeated.clear()
        return sq_norms_BK * scale**2

    def drop(self, rows_B: Tensor) -> None:
        self._dropped = rows_B

    def add_sums(self, groups: Mapping[nn.Parameter, int], weights_BK: Tensor, scale: float, into: Sums) -> None:
        dropped = self._dropped

        def consume(gradients: BookKeeping) -> None:
            if dropped is not None:
                gradients.drop(dropped)
            gradients.set_sum_methods(self._sum_methods)
            gradients.add_sums(groups, weights_BK, scale, into)

        def select(grad: Tensor) -> Tensor:
            if dropped is None or grad.dim() == 0 or len(grad) != len(dropped):
                return grad  # may be the gradient of a loss, whose samples consume() drops
            return zeroed(grad, dropped)

        self._consume = consume
        try:
            self._rerun(select)
            self._empty_window()
            if self._repeated.rows:  # with the gradients whose norms were computed
                self._repeated.sq_norms(groups, weights_BK.shape[1], 1.0)
                if dropped is not None:
                    self._repeated.drop(dropped)
                self._repeated.add_sums(groups, weights_BK, scale, into)
        finally:
            self._consume = None
        self._check_equal_passes()

    def clear(self) -> None:
        self._repeated.clear()
        self._window.clear()
        self._arrived.clear()
        self._tensors, self._window_bytes = [], 0
        self._window_names, self._sq_norms, self._sum_methods, self._reused = {}, [], {}, set()
        self._rows = {}
        self._tensor_norms = ({}, {})
        self._dropped = None


def _total_sq_norms(norms_of: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """Returns the squared norms ``(K, B)`` of K sequences of tensors, from the norms ``(B,)`` of each tensor."""
    each_NB = torch.stack([norm_B.to(device) for sequence in norms_of for norm_B in sequence]).double().square()
    if len(each_NB) == len(norms_of):
        return each_NB
    indices = [k for k, sequence in enumerate(norms_of) for _ in sequence]
    total_KB = each_NB.new_zeros(len(norms_of), each_NB.shape[1])
    return total_KB.index_add_(0, torch.tensor(indices, device=device), each_NB)
