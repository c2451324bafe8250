"""Two passes over each batch, least memory: the first for norms alone, the second for the weighted sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpengine.capture.record import LayerCall, Use
from dpengine.errors import UnsupportedLayerError
from dpengine.kernels.products import sq_norms

from .bookkeep import BookKeeping, Pause
from .choose_method import Planner
from .flat_buffer import Sums
from .rows import zeroed
from .strategy import AbstractGradients, common_rows, note_rows

Rerun = Callable[[Callable[[Tensor], Tensor]], None]
_SAME = 2e-3  # relative: what the squared norms of a layer's inputs and gradients may differ by in two passes


class Reweight(AbstractGradients):
    """Keeps norms only; the sums come from a second forward and backward pass of the same batch.

    Parameters that are used more than once need their uses together for the norm, and are kept until the pass is over.
    The methods that ``planner`` chooses should keep nothing, or the memory advantage is lost.
    """

    def __init__(self, uses: Callable[[nn.Parameter], int], rerun: Rerun, planner: Planner, pause: Pause | None = None):
        self._uses = uses
        self._rerun = rerun
        self._held = BookKeeping(planner, pause)
        self._single = BookKeeping(planner, pause)  # for one call at a time
        self._sq_norms: dict[nn.Parameter, Tensor] = {}
        self._names: dict[nn.Parameter, str] = {}  # of the parameters in `_sq_norms`
        self._rows: dict[str, int] = {}
        self._arrived: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})  # squared norms in both passes
        self._dropped: Tensor | None = None
        self._take: Callable[[BookKeeping], None] | None = None  # what to do with a call of the second pass

    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        if self._take is None:
            note_rows(self._rows, call.name, call.batch_size)
        for grad in pytree.tree_leaves(call.grad_output):
            if grad is not None:  # an output that the loss does not use
                self._note_arrival(f"'{call.name}' had other gradients", grad)
        for given in pytree.tree_leaves((call.inputs, dict(call.kwargs))):
            if isinstance(given, Tensor) and given.dim() and len(given) == call.batch_size:
                self._note_arrival(f"'{call.name}' had another input", given)
        self._refuse_second_norm(list(uses.values()))
        once = all(self._uses(use.parameter) <= 1 for use in uses.values())
        with self._one(once) as one:
            one.receive(call, uses, rule)

    def receive_rows(self, use: Use, grad: Tensor) -> None:
        if self._take is None:
            note_rows(self._rows, use.name, grad.shape[0])
        self._note_arrival(f"'{use.name}' had other gradients", grad)
        self._refuse_second_norm([use])
        with self._one(self._uses(use.parameter) <= 1) as one:
            one.receive_rows(use, grad)

    def _note_arrival(self, difference: str, tensor: Tensor) -> None:
        """Notes a tensor by its squared norms, and what is to be said if they are others in the second pass."""
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        sq_norm_B = sq_norms(tensor)
        arrived = self._arrived[self._take is not None]
        earlier_B = arrived.get(difference)
        arrived[difference] = sq_norm_B if earlier_B is None else earlier_B + sq_norm_B.to(earlier_B.device)

    def _refuse_another_pass(self) -> None:
        """Norms are those of the first pass, sums those of the second: the same must have arrived in both."""
        first, second = self._arrived
        for difference in {**first, **second}:
            then_B, now_B = first.get(difference), second.get(difference)
            if then_B is None or now_B is None or not self._same(then_B, now_B):
                raise UnsupportedLayerError(
                    f"Layer {difference} when the batch was run again: grad_sample_mode='ghost' runs the model's "
                    "forward twice, which must compute the same, and starts backward from the tensors that it returns, "
                    "in tuples, lists, dicts or the fields of one object, outside any checkpoint.",
                    fix="Return all tensors that the loss is made of, or use grad_sample_mode='auto'.",
                )

    def _same(self, then_B: Tensor, now_B: Tensor) -> bool:
        if then_B.shape != now_B.shape:
            return False
        usable_B = then_B.isfinite()
        if self._dropped is not None:
            usable_B &= ~self._dropped.to(usable_B.device)
        within_B = (now_B - then_B).abs() <= _SAME * then_B + 1e-9 * then_B[usable_B].sum()
        return bool(within_B[usable_B].all())

    def _refuse_second_norm(self, uses: Sequence[Use]) -> None:
        # Of the first use only the norm is left, and the norm of a sum does not follow from norms.
        for use in uses:
            if self._take is None and use.parameter in self._sq_norms:
                raise UnsupportedLayerError(
                    f"Parameter '{use.name}' was reached a second time in one backward pass, over forward passes from "
                    "before the last one; grad_sample_mode='ghost' cannot join their norms.",
                    fix="Run the forward passes again, or use grad_sample_mode='auto'.",
                )

    def _one(self, once: bool) -> _Passing:
        if self._take is not None:
            return _Passing(self._single, self._take)
        return _Passing(self._single, self._note_norms) if once else _Passing(self._held, None)

    def _note_norms(self, one: BookKeeping) -> None:
        parameters = list(one.parameters)
        columns = {parameter: i for i, parameter in enumerate(parameters)}
        sq_norms_BP = one.sq_norms(columns, len(parameters), 1.0)
        self._names.update(one.parameters)
        self._sq_norms.update({parameter: sq_norms_BP[:, i] for parameter, i in columns.items()})

    @property
    def rows(self) -> Mapping[str, int]:
        return self._rows

    @property
    def parameters(self) -> Mapping[nn.Parameter, str]:
        return {**self._names, **self._held.parameters}

    def sq_norms(self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float) -> Tensor:
        rows = common_rows(self._rows)
        device = next((sq_norm_B.device for sq_norm_B in self._sq_norms.values()), None)
        norms = torch.zeros(rows, num_groups, dtype=torch.float64, device=device)
        if self._held.parameters:
            norms = self._held.sq_norms(groups, num_groups, 1.0)
        for parameter, sq_norm_B in self._sq_norms.items():
            norms[:, groups[parameter]] += sq_norm_B.to(norms.device)
        self._held.clear()
        return norms * scale**2

    def drop(self, rows_B: Tensor) -> None:
        self._dropped = rows_B

    def add_sums(self, groups: Mapping[nn.Parameter, int], weights_BK: Tensor, scale: float, into: Sums) -> None:
        dropped = self._dropped

        def take(one: BookKeeping) -> None:
            if dropped is not None:
                one.drop(dropped)
            one.add_sums(groups, weights_BK, scale, _InPieces(into))

        def select(grad: Tensor) -> Tensor:
            if dropped is None or grad.dim() == 0 or len(grad) != len(dropped):
                return grad  # perhaps that of a loss: its rows are dropped by take()
            return zeroed(grad, dropped)

        self._take = take
        try:
            self._rerun(select)
        finally:
            self._take = None
        self._refuse_another_pass()

    def clear(self) -> None:
        self._held.clear()
        self._sq_norms, self._names = {}, {}
        self._rows = {}
        self._arrived = ({}, {})
        self._dropped = None


class _InPieces(Sums):
    """Sums of which only the end of the pass is the end: a parameter may be used in several calls."""

    def __init__(self, sums: Sums):
        self._sums = sums

    def add(self, parameter: nn.Parameter, total: Tensor, scale: float = 1.0) -> None:
        self._sums.add(parameter, total, scale)

    def fill(self, parameter: nn.Parameter, write: Callable[[Tensor, float], None]) -> None:
        self._sums.fill(parameter, write)

    def complete(self, parameter: nn.Parameter) -> None:
        pass


class _Passing:
    """Lets one call through a strategy and, unless it is to be held, does something with it at once."""

    def __init__(self, inner: BookKeeping, then: Callable[[BookKeeping], None] | None):
        self.inner = inner
        self.then = then

    def __enter__(self) -> BookKeeping:
        return self.inner

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if self.then is None:
            return
        try:
            if kind is None:
                self.then(self.inner)
        finally:
            self.inner.clear()
