"""Runs the demonstration: trains with privacy at several budgets, and without, and writes all files."""

from __future__ import annotations

import functools
import json
import math
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import dpengine
from dpengine.accounting import PrivacySpent
from dpengine.accounting.accountant import accountant_name
from dpengine.accounting.rounding import percent_up, round_up, round_up_delta
from dpengine.cli.screen import strong
from dpengine.data import LabelledData
from dpengine.engine.progress import is_shown

from .artifacts import write_artifacts
from .devices import best_device, device_text
from .screen import line, table
from .sources import find_files
from .tasks import DELTA, Task, tasks_for
from .training import PrivateOutcome, Results, Split, prepare, train_without_privacy

_QUICK = "QUICK RUN: a few steps on few examples, to check that everything works. The accuracies are meaningless."
_NOT_COVERED = (
    "Not covered: choice of hyper-parameters, the accuracies above, the training of several models on the same data."
)


@dataclass(frozen=True)
class Row:
    """Row of the table: a trained model, or the frequency of the largest class.

    Attributes:
        run: ``"majority"``, ``"private"`` or ``"non-private"``.
        epsilon: Privacy cost.
        accuracy: Accuracy on the test split.
        sigma: Noise multiplier of a private run.
        seconds: Duration of training.
    """

    run: str
    epsilon: float
    accuracy: float
    sigma: float | None = None
    seconds: float | None = None

    def cells(self) -> tuple[str, ...]:
        """Returns the cells of the table."""
        sigma = "–" if self.sigma is None else f"{self.sigma:.2f}"
        seconds = "–" if self.seconds is None else f"{self.seconds:.1f}"
        return (self.run, round_up(self.epsilon), f"{100 * self.accuracy:.1f} %", sigma, seconds)

    def json(self) -> dict[str, Any]:
        """Returns the row as JSON values, with infinity as text."""
        return vars(self) | {"epsilon": self.epsilon if math.isfinite(self.epsilon) else "inf"}


@dataclass(frozen=True)
class Setting:
    """Settings of all tasks: the device, the seed if there is one, and the function that prints texts."""

    device: torch.device
    seed: int | None
    echo: Callable[[str], None]


def run(arguments: Namespace) -> None:
    """Trains the requested tasks one after the other. Each has its own table and files."""
    echo = _silent if arguments.json else functools.partial(print, flush=True)
    setting = Setting(best_device(), arguments.seed, echo)
    tasks = tasks_for(
        arguments.data,
        full=arguments.full,
        quick=arguments.quick,
        images_here=find_files("fashion-mnist") is not None,
    )
    summaries = []
    for number, task in enumerate(tasks):
        data = task.load()
        _introduce(task, data, setting, quick=arguments.quick, first=number == 0)
        results = _train_all(task, data, setting)
        rows = _rows(results)
        echo(table(("run", "ε", "accuracy", "σ", "seconds"), [row.cells() for row in rows], "<^^^^"))
        echo(f"{_guarantee(results.reported.engine.spent)}\n{_NOT_COVERED}")
        folder = arguments.out / task.name if number else arguments.out
        written, missing = write_artifacts(folder, results)
        echo("\n".join([f"wrote to {folder}: {'  '.join(written)}", *missing]))
        summaries.append(
            {"data": data.name, "model": task.model_name, "delta": DELTA, "runs": [row.json() for row in rows]}
        )
    if arguments.data is None and len(tasks) == 1:
        echo(
            "FashionMNIST is not on this machine. To download it: python -m tutorials.demo.data_sets get fashion-mnist"
        )
    echo(f"next: open {arguments.out / 'privacy_report.html'} · dpengine calibrate --help")
    if arguments.json:
        print(json.dumps(summaries, ensure_ascii=False, indent=2))


def _silent(text: str) -> None:
    """Ignores a text."""


def _introduce(task: Task, data: LabelledData, setting: Setting, *, quick: bool, first: bool) -> None:
    versions = f"dpengine {dpengine.__version__} · torch {torch.__version__} · {device_text(setting.device)} · "
    setting.echo(strong(versions + data.describe()) if first else f"\n{strong(data.describe())}")
    if first and quick:
        setting.echo(_QUICK)
    if first and setting.seed is not None:
        setting.echo(
            f"INSECURE_SEED: with --seed {setting.seed} the noise is reproducible and not secret. For tests only."
        )
    setting.echo(f"model: {task.model_name}")


def _train_all(task: Task, data: LabelledData, setting: Setting) -> Results:
    split = _split(task, data, setting)
    private = {target: _train_privately(task, split, target, setting) for target in task.epsilons}
    plain = train_without_privacy(task, split, seed=setting.seed, device=setting.device)
    setting.echo(line(f"training without privacy, epochs: {task.plain_epochs}", f"{plain.seconds:.1f} s"))
    return Results(task, data, private, plain, setting.seed)


def _split(task: Task, data: LabelledData, setting: Setting) -> Split:
    start = time.monotonic()
    with torch.no_grad():
        inputs = [task.inputs(part) for part in (data.train_inputs, data.test_inputs)]
    seconds = time.monotonic() - start
    if seconds > 1:
        setting.echo(line("computing the features of each image", f"{seconds:.1f} s"))
    return Split(inputs[0], data.train_labels, inputs[1], data.test_labels)


def _train_privately(task: Task, split: Split, target: float, setting: Setting) -> PrivateOutcome:
    start = time.monotonic()
    training = prepare(task, split, target, seed=setting.seed, device=setting.device)
    plan = training.engine.describe()
    result = f"σ={plan['noise_multiplier']:.2f} ({accountant_name().upper()}, Poisson q={plan['sample_rate']:.4f})"
    request = f"calibrating ε={round_up(target)} δ={DELTA:g} over {training.steps:,} steps"
    setting.echo(line(f"{request} … {result}", f"{time.monotonic() - start:.1f} s"))
    outcome = training.run(split)
    if not is_shown():
        steps = outcome.engine.ledger.steps
        done = f"training {steps:,}/{training.steps:,}  ε {round_up(outcome.engine.epsilon)}/{round_up(target)}"
        setting.echo(line(done, f"{outcome.trained.seconds:.1f} s"))
    return outcome


def _rows(results: Results) -> list[Row]:
    counts = torch.bincount(results.data.test_labels)
    rows = [Row("majority", 0.0, int(counts.max()) / int(counts.sum()))]
    for outcome in results.private.values():
        sigma = outcome.engine.describe()["noise_multiplier"]
        rows.append(Row("private", outcome.engine.epsilon, outcome.trained.accuracy, sigma, outcome.trained.seconds))
    return [*rows, Row("non-private", math.inf, results.plain.accuracy, seconds=results.plain.seconds)]


def _guarantee(spent: PrivacySpent) -> str:
    eps, delta = round_up(spent.epsilon), round_up_delta(spent.delta)
    return (
        f"Guarantee (ε={eps} run): ({eps}, {delta})-DP per training row, add/remove; μ-GDP {round_up(spent.mu)}; "
        f"membership advantage ≤ {percent_up(spent.advantage)}."
    )
