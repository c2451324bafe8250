"""Interface of a grad mode: takes records of one backward pass, returns norms and weighted sums."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.capture.record import LayerCall, TensorCall, Use
from dpengine.errors import BatchMismatchError, MissingGradientError, UnsupportedLayerError
from dpengine.grad_samplers.sampler import GradSampler, JointSampler

from .flat_buffer import Sums
from .method import Choice
from .rows import Units

KEEP_THE_BATCH_FIRST = (
    "For inputs (T, B, ...), pass batch_first=False to make_private. If the model moves samples to other axes inside, "
    "as in (B*T, features), and is not sharded, pass grad_sample_mode='auto' or 'whole_model', and keep the batch on "
    "axis 0 of its outputs. For graphs, pass the batch of torch_geometric to the model, in mode 'whole_model'."
)


class AbstractGradients(ABC):
    """Holds the records of one backward pass until its clipped sums are computed.

    Methods are called in this order: ``receive`` for each layer, ``sq_norms``, optionally ``drop``, ``add_sums``,
    ``clear``.
    """

    @abstractmethod
    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        """Stores one call of a layer, with the grad samplers of its parameters (``rule``)."""

    def receive_tensor_call(self, call: TensorCall) -> None:
        """Stores one call of a layer with one input and one output tensor."""
        self.receive(call.layer_call(), call.uses, call.uses.rule)
        call.inputs = call.grad = None

    @abstractmethod
    def receive_rows(self, use: Use, grad: Tensor) -> None:
        """Adds a part ``(B, *param.shape)`` of a parameter's per-sample gradient."""

    @property
    @abstractmethod
    def rows(self) -> Mapping[str, int]:
        """Batch size seen by each layer, by dotted name. Empty if nothing was received."""

    @property
    @abstractmethod
    def parameters(self) -> Mapping[nn.Parameter, str]:
        """Parameters included in the backward pass, with their dotted names."""

    @property
    def choices(self) -> Sequence[Choice]:
        """Method chosen for each parameter in the last pass, if the mode has a choice."""
        return ()

    def computing(self) -> AbstractContextManager[None]:
        """Returns a context for ``sq_norms``, ``drop`` and ``add_sums`` of one pass, which prepares for them once."""
        return nullcontext()

    @abstractmethod
    def sq_norms(self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float) -> Tensor:
        """Returns squared norms ``(B, K)`` of ``scale`` times the per-sample gradients, one column per group."""

    def combine(self, units: Units) -> None:
        """Combines the gradients of the samples of each privacy unit. Afterwards axis 0 is the unit."""
        raise UnsupportedLayerError(
            "Gradients of privacy units are computed in the default mode only.", fix="Pass grad_sample_mode='auto'."
        )

    def keep(self, parameters: Collection[nn.Parameter]) -> None:
        """Restricts the pass to ``parameters``: drops the gradients of all others."""
        raise UnsupportedLayerError(
            "Gradients of some of the parameters are clipped in grad_sample_mode='auto' only, through loss.backward().",
            fix="Pass that mode to make_private, or give the optimizer all parameters of the model.",
        )

    @abstractmethod
    def drop(self, rows_B: Tensor) -> None:
        """Makes the samples where ``rows_B`` is True contribute exactly zero, also if they are not finite."""

    @abstractmethod
    def add_sums(self, groups: Mapping[nn.Parameter, int], weights_BK: Tensor, scale: float, into: Sums) -> None:
        """Adds ``scale`` times the weighted sum of unscaled per-sample gradients of each parameter to the buffer.

        Consumes the stored records, except ``rows``. Weights must be at most 1, so that an input of 1e38 with a zero
        gradient does not overflow.
        """

    @abstractmethod
    def clear(self) -> None:
        """Clears all records of the batch."""


def note_rows(rows: dict[str, int], name: str, seen: int) -> None:
    """Records the batch size of a layer. A call with another size does not replace the first."""
    if rows.setdefault(name, seen) != seen:
        rows[f"{name} (again)"] = seen


def common_rows(rows: Mapping[str, int]) -> int:
    """Returns the batch size of all layers, 0 without layers. Raises BatchMismatchError if it differs."""
    sizes = set(rows.values())
    if len(sizes) > 1:
        name, other = _two_that_differ(rows)
        raise BatchMismatchError(
            f"Layer '{name}' saw {rows[name]} rows and layer '{other}' saw {rows[other]} in one backward pass; axis 0 "
            "must be the batch in every layer (axis 1 with batch_first=False).",
            fix=KEEP_THE_BATCH_FIRST,
        )
    return sizes.pop() if sizes else 0


def _two_that_differ(rows: Mapping[str, int]) -> tuple[str, str]:
    first = next(iter(rows))
    return next(name for name in rows if rows[name] != rows[first]), first


def joint_gradients(call: LayerCall, uses: Mapping[str, Use], rule: JointSampler) -> list[tuple[Use, Tensor]]:
    """Computes the per-sample gradients of all used parameters by a joint rule, and checks their shapes and types."""
    grads = rule.grads(call)
    computed = {uses[name].parameter: (uses[name], grad) for name, grad in grads.items() if name in uses}
    for use in uses.values():
        if use.parameter not in computed:
            raise MissingGradientError(
                f"The grad sampler of '{call.name}' ({type(call.layer).__name__}) gave no gradient for parameter "
                f"'{use.name}'.",
                fix="Return {parameter: per-sample gradient} for every trainable parameter of the layer.",
            )
        grad = computed[use.parameter][1]
        if not (isinstance(grad, Tensor) and grad.is_floating_point()):
            raise MissingGradientError(
                f"The grad sampler of '{call.name}' ({type(call.layer).__name__}) gave {torch.typename(grad)} for "
                f"parameter '{use.name}'; expected a tensor of floating point numbers.",
                fix="Return one gradient for each row, as a tensor of the parameter's dtype.",
            )
        expected = (call.batch_size, *use.shape)
        if tuple(grad.shape) != expected:
            raise MissingGradientError(
                f"The grad sampler of '{call.name}' ({type(call.layer).__name__}) gave shape "
                f"{tuple(grad.shape)} for parameter '{use.name}'; expected {expected}.",
                fix="Return one gradient for each row, batch first.",
            )
    return list(computed.values())


def joint_parts(call: LayerCall, uses: Mapping[str, Use], rule: JointSampler) -> dict[str, GradSampler]:
    """Returns a sampler for each used parameter of a joint rule.

    The first use of a sampler computes the gradients of all parameters. They live as long as the samplers, which are
    valid for this call only.
    """

    @cache
    def formed() -> dict[nn.Parameter, Tensor]:
        return {use.parameter: grad for use, grad in joint_gradients(call, uses, rule)}

    names = {use.parameter: name for name, use in uses.items()}
    return {
        name: GradSampler(lambda _, parameter=parameter: formed()[parameter], needs_complete_calls=True)  # type: ignore[misc]
        for parameter, name in names.items()
    }
