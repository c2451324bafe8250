"""The contract of a gradient strategy: records of one backward pass in, norms and weighted sums out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from dpengine.capture.record import LayerCall, Use
from dpengine.errors import BatchMismatchError, MissingGradientError, UnsupportedLayerError
from dpengine.grad_samplers.sampler import GradSampler, JointSampler

from .flat_buffer import Sums
from .method import Choice
from .rows import Units

KEEP_THE_BATCH_FIRST = (
    "Keep the batch on axis 0 of every layer's input: use (B, T, features), not (B*T, features) or (T, B, ...)."
)


class AbstractGradients(ABC):
    """Holds what one backward pass reported, until its clipped sums are formed.

    The calls follow one order: ``receive``... , ``sq_norms``, perhaps ``drop``, ``add_sums``, ``clear``.
    """

    @abstractmethod
    def receive(self, call: LayerCall, uses: Mapping[str, Use], rule: Any) -> None:
        """Takes one use of a layer."""

    @abstractmethod
    def receive_rows(self, use: Use, grad: Tensor) -> None:
        """Takes a part ``(B, *param.shape)`` of a parameter's per-sample gradient; parts add up."""

    def backward_ended(self) -> None:  # noqa: B027 - most strategies have everything by then
        """Fetches what the backward pass left elsewhere, while its graph is still there."""

    @property
    @abstractmethod
    def rows(self) -> Mapping[str, int]:
        """Batch size that each layer showed, by dotted name. Empty when nothing was received."""

    @property
    @abstractmethod
    def parameters(self) -> Mapping[nn.Parameter, str]:
        """The parameters that took part, with their dotted names."""

    @property
    def choices(self) -> Sequence[Choice]:
        """How each parameter was treated in the last pass, where that is chosen."""
        return ()

    @abstractmethod
    def sq_norms(self, groups: Mapping[nn.Parameter, int], num_groups: int, scale: float) -> Tensor:
        """Squared norms ``(B, K)`` of ``scale`` times the per-sample gradients, one column for each group."""

    def combine(self, units: Units) -> None:
        """Combines the samples of each privacy unit: from here on a row is a unit."""
        raise UnsupportedLayerError(
            "Gradients of a unit of privacy are formed by grad_sample_mode='auto' alone.", fix="Pass that."
        )

    def keep(self, parameters: Collection[nn.Parameter]) -> None:
        """Drops the gradients of all other parameters."""
        raise UnsupportedLayerError(
            "Gradients of some of the parameters are clipped in grad_sample_mode='auto' only, through loss.backward().",
            fix="Pass that mode to make_private, or give the optimizer all parameters of the model.",
        )

    @abstractmethod
    def drop(self, rows_B: Tensor) -> None:
        """Makes the rows where ``rows_B`` is True contribute exactly zero, whatever their values."""

    @abstractmethod
    def add_sums(self, groups: Mapping[nn.Parameter, int], weights_BK: Tensor, scale: float, into: Sums) -> None:
        """Adds to the buffer, for each parameter, ``scale`` times the sum over rows of weight times unscaled gradient.

        What was received is gone then, but for ``rows``. Weights are at most 1: an input of 1e38 without gradient must
        not overflow before it vanishes.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forgets everything of the batch."""


def note_rows(rows: dict[str, int], name: str, seen: int) -> None:
    """Notes a layer's batch size; a use with another size does not hide the first."""
    rows[name if rows.get(name, seen) == seen else f"{name} (again)"] = seen


def common_rows(rows: Mapping[str, int]) -> int:
    """The batch size on which all layers agree."""
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
    """Per-sample gradients of every used parameter from a rule that gives all at once."""
    grads = rule.grads(call)
    found = {uses[name].parameter: (uses[name], grad) for name, grad in grads.items() if name in uses}
    for use in uses.values():
        if use.parameter not in found:
            raise MissingGradientError(
                f"The grad sampler of '{call.name}' ({type(call.layer).__name__}) gave no gradient for parameter "
                f"'{use.name}'.",
                fix="Return {parameter: per-sample gradient} for every trainable parameter of the layer.",
            )
        grad = found[use.parameter][1]
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
    return list(found.values())


def joint_parts(call: LayerCall, uses: Mapping[str, Use], rule: JointSampler) -> dict[str, GradSampler]:
    """One sampler for each used parameter, from a rule that gives all at once.

    Gradients are formed when the first of them is asked, for all, and live as long as the samplers, which are valid for
    this call only.
    """

    @cache
    def formed() -> dict[nn.Parameter, Tensor]:
        return {use.parameter: grad for use, grad in joint_gradients(call, uses, rule)}

    names = {use.parameter: name for name, use in uses.items()}
    return {
        name: GradSampler(lambda _, parameter=parameter: formed()[parameter], whole_calls=True)  # type: ignore[misc]
        for parameter, name in names.items()
    }
