"""``dpengine audit one-run``: a lower bound on epsilon from a small training run with canaries."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpengine.auditing.one_run_audit import one_run
from dpengine.auditing.verdict import AuditReport
from dpengine.data.adult import load_adult
from dpengine.engine.privacy_engine import PrivacyEngine

from .commands import CommandError
from .screen import strong

_NUM_EXAMPLES = 2000  # training examples of Adult, in addition to the canaries
_FEATURES, _CLASSES = 107, 2


def run(arguments: Namespace) -> int:
    """Prints the report. Returns 0 for a pass, 1 for a violation, 2 if the result is inconclusive."""
    try:
        report = _run_audit(arguments)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if arguments.json:
        print(report.to_json())
    else:
        first, rest = str(report).split("\n", 1)
        print(f"{strong(first)}\n{rest}")
    return report.exit_code


def _run_audit(arguments: Namespace) -> AuditReport:
    data = load_adult()
    examples = TensorDataset(data.train_inputs[:_NUM_EXAMPLES], data.train_labels[:_NUM_EXAMPLES])
    flipped = TensorDataset(
        data.train_inputs[_NUM_EXAMPLES : _NUM_EXAMPLES + arguments.canaries],
        1 - data.train_labels[_NUM_EXAMPLES : _NUM_EXAMPLES + arguments.canaries],
    )
    sigma = arguments.noise_multiplier
    calibration_kwargs = {"target_epsilon": arguments.epsilon, "steps": arguments.steps} if sigma is None else {}

    def make(dataset: Dataset[Any]) -> Any:
        if arguments.seed is not None:
            torch.manual_seed(arguments.seed)
        width = max(32, -(-arguments.canaries // _FEATURES))  # at least one weight for each canary
        model = nn.Sequential(nn.Linear(_FEATURES, width), nn.Tanh(), nn.Linear(width, _CLASSES))
        batch_size = max(1, round(arguments.sample_rate * (_NUM_EXAMPLES + arguments.canaries)))
        loader = DataLoader(dataset, batch_size=batch_size)
        engine = PrivacyEngine(seed=arguments.seed)
        private = engine.make_private(
            model,
            SGD(model.parameters(), lr=1.0),
            loader,
            noise_multiplier=sigma,
            target_delta=arguments.delta,
            **calibration_kwargs,  # type: ignore[arg-type]
        )
        return engine, *private

    def train(engine: PrivacyEngine, model: nn.Module, optimizer: Optimizer, loader: DataLoader[Any]) -> None:
        remaining = arguments.steps
        while remaining:
            for inputs, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                remaining -= 1
                if not remaining:
                    return

    input_canary_kwargs = {"examples": flipped, "loss": _loss} if arguments.kind == "input" else {}
    return one_run(
        make,
        train,
        examples,
        canaries=arguments.canaries,
        kind=arguments.kind,
        delta=arguments.delta,
        alpha=arguments.alpha,
        seed=arguments.seed,
        **input_canary_kwargs,  # type: ignore[arg-type]
    )


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")
