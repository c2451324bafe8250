"""Results of the engine for a subject through each interface, as ``{name: float64 tensor}``."""

from __future__ import annotations

import copy
import re

import torch
from generated.subjects import Subject, row_losses
from generated.truth import Gradients
from inside_parts import ClippedPasses
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import GradSampleModule, PrivacyEngine
from dpengine.clipping.short_forms import clipping_from


def by_engine(subject: Subject, max_norm: float) -> Gradients:
    """Returns the gradients of one ``make_private`` step without noise, at sampling rate 1, in physical batches."""
    settings, model = subject.settings, copy.deepcopy(subject.model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    data = TensorDataset(*subject.tensors, subject.targets_B)
    engine = PrivacyEngine(seed=0)
    model, optimizer, loader = engine.make_private(
        model,
        optimizer,
        DataLoader(data, batch_size=len(data)),
        noise_multiplier=0.0,
        max_grad_norm=max_norm,
        clipping=settings["clipping"],
        sample_rate=1.0,
        expected_batch_size=1.0,
        target_delta=1e-3,
        physical_batch_size=settings["chunk"],
        loss_reduction=settings["reduction"],
        grad_sample_mode=settings["mode"],
    )
    for *tensors, targets_B in loader:
        optimizer.zero_grad()
        losses_B = row_losses(subject.call(model, tensors), targets_B)
        if settings["per_example"]:
            engine.backward(losses_B)
        else:
            _reduced(losses_B, settings["reduction"]).backward()
        optimizer.step()
    return {name: p.grad.detach().double() for name, p in model.named_parameters() if p.requires_grad}


def by_sums(subject: Subject, max_norm: float, rows: slice = slice(None)) -> Gradients:
    """Returns the clipped sums of some of the samples, without an optimizer or a loader."""
    settings, model = subject.settings, copy.deepcopy(subject.model)
    policy = clipping_from(settings["clipping"], max_norm)
    passes = ClippedPasses(model, policy, mode=settings["mode"], loss_reduction=settings["reduction"])
    tensors, targets_B = [t[rows].clone() for t in subject.tensors], subject.targets_B[rows]
    size = settings["chunk"] or max(1, len(targets_B))
    for start in range(0, max(1, len(targets_B)), size):
        some = slice(start, start + size)
        losses_B = row_losses(subject.call(model, [t[some] for t in tensors]), targets_B[some])
        _reduced(losses_B, settings["reduction"]).backward()
        passes.clip(rows=len(losses_B))
    return {name: total.double() for name, total in passes.totals().items()}


def by_grad_samples(subject: Subject) -> list[Gradients]:
    """Returns the per-sample gradients of ``GradSampleModule``."""
    model = copy.deepcopy(subject.model)
    reduction = subject.settings["reduction"]
    watched = GradSampleModule(model, loss_reduction=reduction, force_functorch=subject.settings["mode"] == "functorch")
    losses_B = row_losses(subject.call(watched, [t.clone() for t in subject.tensors]), subject.targets_B)
    _reduced(losses_B, reduction).backward()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    samples = {name: getattr(p, "grad_sample", None) for name, p in trainable.items()}
    nothing = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in trainable.items()}
    return [
        {name: nothing[name] if rows is None else rows[i].detach().double() for name, rows in samples.items()}
        for i in range(len(losses_B))
    ]


def _reduced(losses_B: Tensor, reduction: str) -> Tensor:
    return losses_B.mean() if reduction == "mean" else losses_B.sum()


def named_in(message: str, model: nn.Module) -> bool:
    """Returns True if a message names a layer, a parameter or a buffer of the model, or the model itself."""
    parts = (model.named_modules(), model.named_parameters(), model.named_buffers())
    names = {name for part in parts for name, _ in part if name}
    whole = f"The model ({type(model).__name__})" in message
    return whole or not names.isdisjoint(re.split(r"[\s',():]+", message))
