"""Expected clipped sums of a subject, from a loop over single samples by plain autograd, without code of dpengine."""

from __future__ import annotations

import copy
import math

import torch
from generated.modules import Checkpointed
from generated.subjects import Subject, row_losses
from reference import widened
from torch import Tensor

Gradients = dict[str, Tensor]
SLACK = 2.0**-20  # relative margin by which clipped norms are below the clipping norm
STABILITY = 0.01  # stability constant of automatic clipping


def sample_gradients(subject: Subject, *, wide: bool) -> list[Gradients]:
    """Returns per-sample gradients as float64, computed in float64 if ``wide`` and else in the model's dtype."""
    model = copy.deepcopy(subject.model).to(memory_format=torch.contiguous_format)
    if wide:
        model.double()
    for part in model.modules():
        if isinstance(part, Checkpointed):
            part.plain = True
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tensors = widened(subject.tensors) if wide else subject.tensors
    found = []
    for i in range(len(subject.targets_B)):
        model.zero_grad()
        output = subject.call(model, [t[i : i + 1].clone() for t in tensors], layout="contiguous")
        row_losses(output, subject.targets_B[i : i + 1]).sum().backward()
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for name, p in parameters.items()
        }
        found.append({name: gradient.detach().double().clone() for name, gradient in gradients.items()})
    return found


def untouched(subject: Subject) -> set[str]:
    """Returns the names of the parameters that the loss does not depend on."""
    model = copy.deepcopy(subject.model)
    row_losses(subject.call(model, [t.clone() for t in subject.tensors]), subject.targets_B).sum().backward()
    return {name for name, p in model.named_parameters() if p.grad is None}


def length(gradients: Gradients) -> float:
    """Returns the norm of all gradients as one vector."""
    return math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))


def threshold(rows: list[Gradients], quantile: float) -> float:
    """Returns a clipping norm near this quantile of the sample norms; above 1, no sample is clipped."""
    norms = sorted(length(row) for row in rows)
    if quantile > 1:
        return 2 * norms[-1] + 1e-3
    return max(0.9 * norms[int(quantile * (len(norms) - 1))], 1e-3)


def _flat(row: Gradients, max_norm: float) -> Gradients:
    factor = min(1.0, (1 - SLACK) * max_norm / max(length(row), 1e-300))
    return {name: factor * g for name, g in row.items()}


def _per_layer(row: Gradients, max_norm: float) -> Gradients:
    layers: dict[str, Gradients] = {}
    for name, gradient in row.items():
        layers.setdefault(name.rpartition(".")[0], {})[name] = gradient
    clipped: Gradients = {}
    for layer in layers.values():
        clipped |= _flat(layer, max_norm / math.sqrt(len(layers)))
    return clipped


def _automatic(row: Gradients, max_norm: float) -> Gradients:
    factor = (1 - SLACK) * max_norm / (length(row) + STABILITY)
    return {name: factor * g for name, g in row.items()}


CLIPPED = {"flat": _flat, "per_layer": _per_layer, "automatic": _automatic}


def clipped_sum(rows: list[Gradients], clipping: str, max_norm: float) -> Gradients:
    """Returns the sum of the clipped gradients."""
    clipped = [CLIPPED[clipping](row, max_norm) for row in rows]
    return {name: sum(row[name] for row in clipped) for name in rows[0]}
