"""Files of the demonstration: report, plot, model, metrics, and the state from which the report can be rebuilt."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

from dpengine.cli.rebuild import STATE_FILE
from dpengine.errors import MissingDependencyError
from dpengine.report import PrivacyReport

from . import plots
from .tasks import DELTA
from .training import Results


def write_artifacts(folder: Path, results: Results) -> tuple[list[str], list[str]]:
    """Writes all files of one task.

    Args:
        folder: Output folder, which is created if it does not exist.
        results: Results of the task.

    Returns:
        The names of the files, and a message for each file that was skipped because a package is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: list[str] = []
    missing: list[str] = []
    for write in _WRITERS:
        try:
            written += [path.name for path in write(folder, results)]
        except MissingDependencyError as error:
            missing.append(f"skipped: {error}")
    return written, missing


def _write_report(folder: Path, results: Results) -> list[Path]:
    return _report(results).save(folder)


def _write_state(folder: Path, results: Results) -> list[Path]:
    state = results.reported.engine.state_dict()
    return [_write_text(folder / STATE_FILE, json.dumps(state, ensure_ascii=False, indent=2) + "\n")]


def _report(results: Results) -> PrivacyReport:
    data, trained = results.data, results.reported.trained
    report = results.reported.engine.report(
        data={"name": data.title, "source": data.source, "licence": data.licence, "sha256": data.sha256},
        utility={"metric": "accuracy", "value": round(trained.accuracy, 4), "split": "test"},
        excludes=(results.task.tuned, "the other models that this demonstration trained on the same examples"),
    )
    # `prepare` checked the loss before training.
    return PrivacyReport(dataclasses.replace(report.facts, loss_checked=True))


def _write_plot(folder: Path, results: Results) -> list[Path]:
    seed = results.seed or 0
    private = results.private.values()
    runs = [plots.TrainedRun(run.engine.epsilon, run.trained.accuracy, seed, DELTA) for run in private]
    runs.append(plots.TrainedRun(math.inf, results.plain.accuracy, seed))
    return plots.tradeoff(runs, folder / "tradeoff.png", title=f"{results.data.title}, {results.task.model_name}")


def _write_model(folder: Path, results: Results) -> list[Path]:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingDependencyError("safetensors is needed for models:", fix="pip install safetensors") from error
    path = folder / "model.safetensors"
    save_file(results.reported.trained.model.state_dict(), path)
    return [path]


def _write_metrics(folder: Path, results: Results) -> list[Path]:
    rows = []
    for target, run in results.private.items():
        fixed = {"run": f"private-{target:g}", "delta": DELTA}
        rows += [fixed | {"step": step, "epsilon": epsilon} for step, epsilon in run.curve]
        rows.append(fixed | {"accuracy": run.trained.accuracy, "seconds": round(run.trained.seconds, 2)})
    plain = results.plain
    rows.append({"run": "non-private", "accuracy": plain.accuracy, "seconds": round(plain.seconds, 2)})
    return [_write_text(folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))]


def _write_text(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


_WRITERS: tuple[Callable[[Path, Results], list[Path]], ...] = (
    _write_report,
    _write_state,
    _write_plot,
    _write_model,
    _write_metrics,
)
