"""Grad mode with the least memory: a first pass computes norms only, a second pass the weighted sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture.record import LayerCall, Use
from dpengine.errors import UnsupportedLayerError
from dpengine.kernels.products import norms

from .bookkeep import BookKeeping, Pause
from .choose_method import Planner
from .flat_buffer import Sums
from .rows import zeroed
from .strategy import AbstractGradients, common_rows, note_rows

Rerun = Callable[[Callable[[Tensor], Tensor]], None]
_MOST_DEVIATION = 2e-3  # relative deviation of the squared norms of a layer's inputs and gradients in two passes


class Reweight(AbstractGradients):
    """Stores norms only. A second forward and backward pass over the same batch computes the sums.

    For a parameter that is used more than once, the norm needs all uses, so its layer calls are kept until the end of
    the pass. ``planner`` should choose methods that keep no gradients, or the memory advantage is lost.
    """

    def __init__(self, uses: Callable[[nn.Parameter], int], rerun: Rerun, planner: Planner, pause: Pause | None = None):
        self._uses = uses
        self._rerun = rerun
        self._repeated = BookKeeping(planner, pause, sums_follow=False)
        self._single = BookKeeping(planner, pause, sums_follow=False)  # for one call at a time
        self._sq_norms: dict[nn.Parameter, Tensor] = {}
        self._names: dict[nn.Parameter, str] = {}  # of the parameters in `_sq_norms`
        self._rows: dict[str, int] = {}
        self._tensor_norms: tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]] = ({}, {})  # in both passes
        self._dropped: Tensor | None = None
        self._consume: Callable[[BookKeeping], None] | None = None  # applied to each call of the second pass

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        if self._consume is None:
            note_rows(self._rows, call.name, call.batch_size)
        for grad in pytree.tree_leaves(call.grad_output):
            if grad is not None:  # None for an output that the loss does not use
                self._record_norms(f"'{call.name}' had other gradients", grad)
        for leaf in pytree.tree_leaves((call.inputs, dict(call.kwargs))):
            if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == call.batch_size:
                self._record_norms(f"'{call.name}' had another input", leaf)
        self._check_first_norm(list(uses.values()))
        once = all(self._uses(use.parameter) <= 1 for use in uses.values())
        with self._receiver(once) as gradients:
            gradients.receive(call, uses, rule)

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        if self._consume is None:
            note_rows(self._rows, use.name, grad.shape[0])
        self._record_norms(f"'{use.name}' had other gradients", grad)
        self._check_first_norm([use])
        with self._receiver(self._uses(use.parameter) <= 1) as gradients:
            gradients.receive_rows(use, grad)

    def _record_norms(self, difference: str, tensor: Tensor) -> None:
        """Records the norms of a tensor, under the message for a difference between the two passes."""
        flat_BF = tensor.flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)
        if not (flat_BF.is_floating_point() or flat_BF.is_complex()):  # indices
            flat_BF = flat_BF.float()
        if flat_BF.device.type == "cpu":
            norm_B = norms(flat_BF, 1)
        else:  # one kernel
            dtype = torch.promote_types(flat_BF.dtype, torch.float32)
            norm_B = torch.linalg.vector_norm(flat_BF, dim=1, dtype=dtype)
        self._tensor_norms[self._consume is not None].setdefault(difference, []).append(norm_B)

    def _check_equal_passes(self) -> None:
        """Raises if the two passes differ, because norms are from the first and sums from the second."""
        first, second = self._tensor_norms
        by_length: dict[int, list[str]] = {}
        for difference in {**first, **second}:
            one, other = first.get(difference, []), second.get(difference, [])
            lengths = {len(norm_B) for norm_B in (*one, *other)}
            if len(one) != len(other) or len(lengths) != 1:
                self._raise_other_pass(difference)
            by_length.setdefault(lengths.pop(), []).append(difference)
        for names in by_length.values():  # together, since each value that the host reads waits for the device
            device = first[names[0]][0].device
            first_KB, second_KB = (
                _total_sq_norms([found[name] for name in names], device) for found in (first, second)
            )
            usable_KB = first_KB.isfinite()
            if self._dropped is not None:
                usable_KB &= ~self._dropped.to(device)
            least_K1 = 1e-9 * first_KB.where(usable_KB, 0).sum(dim=1, keepdim=True)
            close_KB = (second_KB - first_KB).abs() <= _MOST_DEVIATION * first_KB + least_K1
            equal_K = (close_KB | ~usable_KB).all(dim=1)
            if not equal_K.all():
                self._raise_other_pass(names[equal_K.tolist().index(False)])

    def _raise_other_pass(self, difference: str) -> NoReturn:
        raise UnsupportedLayerError(
            f"Layer {difference} when the batch was run again. grad_sample_mode='ghost' runs the forward "
            "twice, which must compute the same, and starts backward from the tensors that it returns in "
            "tuples, lists, dicts or the fields of one object, outside any checkpoint.",
            fix="Return all tensors that the loss depends on, or use grad_sample_mode='auto'.",
        )

    def _check_first_norm(self, uses: Sequence[Use]) -> None:
        # Only the norm of the first use is left, and the norm of a sum does not follow from norms.
        for use in uses:
            if self._consume is None and use.parameter in self._sq_norms:
                raise UnsupportedLayerError(
                    f"Parameter '{use.name}' was reached a second time in one backward pass, over forward passes from "
                    "before the last one. grad_sample_mode='ghost' cannot combine their norms.",
                    fix="Run the forward passes again, or use grad_sample_mode='auto'.",
                )

    def _receiver(self, once: bool) -> _Receiver:
        if self._consume is not None:
            return _Receiver(self._single, self._consume)
        return _Receiver(self._single, self._store_norms) if once else _Receiver(self._repeated, None)

    def _store_norms(self, gradients: BookKeeping) -> None:
        parameters = list(gradients.parameters)
        columns = {parameter: i for i, parameter in enumerate(parameters)}
        sq_norms_BP = gradients.sq_norms(columns, len(parameters), 1.0)
        self._names.update(gradients.parameters)
        self._sq_norms.update({parameter: sq_norms_BP[:, i] for parameter, i in columns.items()})

    @property
    def rows(self) -> Mapping[str, int]:
        return self._rows

    @property
    def parameters(self) -> Mapping[nn.Parameter, str]:
        return {**self._names, **self._repeated.parameters}

    def sq_norms(self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float) -> Tensor:
        rows = common_rows(self._rows)
        device = next((sq_norm_B.device for sq_norm_B in self._sq_norms.values()), None)
        norms_BK = torch.zeros(rows, num_groups, dtype=torch.float64, device=device)
        if self._repeated.parameters:
            norms_BK = self._repeated.sq_norms(groups, num_groups, 1.0)
        by_group: dict[int, list[Tensor]] = {}
        for parameter, sq_norm_B in self._sq_norms.items():
            by_group.setdefault(groups[parameter], []).append(sq_norm_B.to(norms_BK.device))
        for group, found in by_group.items():
            norms_BK[:, group] += torch.stack(found).sum(dim=0)
        self._repeated.clear()
        return norms_BK * scale**2

    def drop(self, rows_B: Tensor) -> None:
        self._dropped = rows_B

    def add_sums(self, groups: Mapping[nn.Parameter, int], weights_BK: Tensor, scale: float, into: Sums) -> None:
        dropped = self._dropped

        def consume(gradients: BookKeeping) -> None:
            if dropped is not None:
                gradients.drop(dropped)
            gradients.add_sums(groups, weights_BK, scale, _PartialSums(into))

        def select(grad: Tensor) -> Tensor:
            if dropped is None or grad.dim() == 0 or len(grad) != len(dropped):
                return grad  # may be that of a loss, whose samples consume() drops
            return zeroed(grad, dropped)

        self._consume = consume
        try:
            self._rerun(select)
        finally:
            self._consume = None
        self._check_equal_passes()

    def clear(self) -> None:
        self._repeated.clear()
        self._sq_norms, self._names = {}, {}
        self._rows = {}
        self._tensor_norms = ({}, {})
        self._dropped = None


def _total_sq_norms(found: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """Returns the squared norms ``(K, B)`` of K sequences of tensors, from the norms ``(B,)`` of each tensor."""
    each_NB = torch.stack([norm_B.to(device) for one in found for norm_B in one]).double().square()
    if len(each_NB) == len(found):
        return each_NB
    places = [k for k, one in enumerate(found) for _ in one]
    total_KB = each_NB.new_zeros(len(found), each_NB.shape[1])
    return total_KB.index_add_(0, torch.tensor(places, device=device), each_NB)


class _PartialSums(Sums):
    """Sums without ``complete``, because further calls in the pass may use the same parameter."""

    def __init__(self, sums: Sums):
        self._sums = sums

    def add(self, parameter: nn.Parameter, total: Tensor, scale: float = 1.0) -> None:
        self._sums.add(parameter, total, scale)

    def fill(self, parameter: nn.Parameter, write: Callable[[Tensor, float], None]) -> None:
        self._sums.fill(parameter, write)

    def complete(self, parameter: nn.Parameter) -> None:
        pass


class _Receiver:
    """Receives one layer call and, if ``consume`` is given, applies it and clears the gradients."""

    def __init__(self, gradients: BookKeeping, consume: Callable[[BookKeeping], None] | None):
        self.gradients = gradients
        self.consume = consume

    def __enter__(self) -> BookKeeping:
        return self.gradients

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if self.consume is None:
            return
        try:
            if kind is None:
                self.consume(self.gradients)
        finally:
            self.gradients.clear()
