"""Generated models: one step of an engine, of the clipper alone, and per-sample gradients, on the same subject."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from differential.adapter import Recorder, charges, error_of, projections, tables_are_untimed
from generated.subjects import Subject, row_losses, subject_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import Automatic, Flat, GradSampleModule, PerLayer, PerSampleGradientClipper, PrivacyEngine

NORM = 0.5
POLICIES = {"flat": Flat, "per_layer": PerLayer, "automatic": Automatic}


def played_model(seed: int, recorder: Recorder) -> list[dict[str, Any]]:
    """Returns one record for each of the ways into the package."""
    subject = subject_of(seed)
    return [_recorded(way, copy.deepcopy(subject), recorder) for way in (_engine, _clipper, _samples)]


def _recorded(way: Callable[[Subject, nn.Module, dict], None], subject: Subject, recorder: Recorder) -> dict[str, Any]:
    record: dict[str, Any] = {"call": [way.__name__], "error": None}
    try:
        way(subject, subject.model, record)
    except Exception as error:
        record["error"] = error_of(error)
    parameters = list(subject.model.parameters())
    record |= {"gradients": projections(p.grad for p in parameters), "parameters": projections(parameters)}
    return record | {"draws": recorder.take()}


def _engine(subject: Subject, model: nn.Module, record: dict[str, Any]) -> None:
    settings = subject.settings
    data = TensorDataset(*subject.tensors, subject.targets_B)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine = PrivacyEngine("rdp", seed=subject.seed)
    tables_are_untimed(engine)
    _, _, loader = engine.make_private(
        model,
        optimizer,
        DataLoader(data, batch_size=len(data)),
        noise_multiplier=0.01,
        clipping=POLICIES[settings["clipping"]](NORM),
        sample_rate=0.9,
        expected_batch_size=1.0,
        target_delta=1e-3,
        physical_batch_size=settings["chunk"],
        loss_reduction=settings["reduction"],
        grad_sample_mode=settings["mode"],
    )
    record["ledger"] = charges(engine)
    for *tensors, targets_B in loader:
        optimizer.zero_grad()
        _loss(subject, model, list(tensors), targets_B).backward()
        optimizer.step()
    record["ledger"] = charges(engine)


def _clipper(subject: Subject, model: nn.Module, record: dict[str, Any]) -> None:
    settings = subject.settings
    more = {"loss_reduction": settings["reduction"], "grad_sample_mode": settings["mode"]}
    clipper = PerSampleGradientClipper(model, POLICIES[settings["clipping"]](NORM), **more)
    _loss(subject, model, [t.clone() for t in subject.tensors], subject.targets_B).backward()
    clipper.clip_and_accumulate()
    record["answer"] = [float(value) for value in clipper.pre_step()]


def _samples(subject: Subject, model: nn.Module, record: dict[str, Any]) -> None:
    mode = subject.settings["mode"] == "functorch"
    watched = GradSampleModule(model, loss_reduction=subject.settings["reduction"], force_functorch=mode)
    _loss(subject, watched, [t.clone() for t in subject.tensors], subject.targets_B).backward()
    record["answer"] = projections(getattr(p, "grad_sample", None) for p in model.parameters())


def _loss(subject: Subject, model: nn.Module, tensors: list[Tensor], targets_B: Tensor) -> Tensor:
    losses_B = row_losses(subject.call(model, tensors), targets_B)
    return losses_B.mean() if subject.settings["reduction"] == "mean" else losses_B.sum()
