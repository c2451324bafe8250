"""Checks the settings and callbacks of a Lightning trainer, and imports classes from either Lightning package."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

from dpengine.engine.run import Run
from dpengine.errors import (
    DetachedError,
    ParameterMismatchError,
    PrivacyError,
    SamplingError,
    ScaledGradientError,
    UnsupportedLayerError,
    notice,
)

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def lightning_class(name: str) -> type:
    """Returns a class of Lightning, from an already imported package if possible; ``object`` if none is installed."""
    for package in sorted(_PACKAGES, key=lambda package: package not in sys.modules):
        try:
            return getattr(importlib.import_module(package), name)  # type: ignore[no-any-return]
        except ImportError:
            continue
    return object


_TRAINING_METRIC = re.compile(r"(^|[^a-z])train(ing)?([^a-z]|$)")
_LARGER_BATCH = (
    "Multiply the loader's batch_size by the accumulation factor, and pass DPCallback(physical_batch_size=...)."
)
# Error, effect of the callback, and fix, by class name, which is the same in both Lightning packages.
_CALLBACKS: dict[str, tuple[type[PrivacyError], str, str]] = {
    "GradientAccumulationScheduler": (
        ScaledGradientError,
        "divides the loss, so clipping would act on scaled gradients.",
        _LARGER_BATCH,
    ),
    "LearningRateFinder": (
        SamplingError,
        "(also as Tuner.lr_find) takes steps on the training data with DPCallback disabled, and then restores the "
        "weights. These steps would not be accounted.",
        "Find the rate on public data, with a trainer without DPCallback; or compare private runs, which are all "
        "accounted.",
    ),
    "BatchSizeFinder": (
        SamplingError,
        "(also as Tuner.scale_batch_size) takes steps on the training data with DPCallback disabled, and changes "
        "the batch size, on which the cost of a step depends.",
        "Choose the loader's batch_size yourself, and pass DPCallback(physical_batch_size=...) for the number of "
        "samples that fit into memory.",
    ),
    "ModelPruning": (
        UnsupportedLayerError,
        "replaces the trainable parameters, while the optimizer holds the old ones.",
        "Prune the trained module after trainer.fit, which costs no privacy.",
    ),
}


def check_callbacks(trainer: Any) -> None:
    """Rejects callbacks of Lightning that bypass the engine: they train, or change gradients or parameters."""
    for callback in trainer.callbacks:
        for cls in type(callback).__mro__:
            if cls.__name__ in _CALLBACKS:
                error, effect, fix = _CALLBACKS[cls.__name__]
                raise error(f"{cls.__name__} {effect}", fix=fix)


def warn_of_training_metrics(trainer: Any) -> None:
    """Warns about callbacks that monitor a metric of the training data, recognized by its name."""
    for callback in trainer.callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and _TRAINING_METRIC.search(monitor.lower()):
            notice(
                "DPE012",
                f"{type(callback).__name__}(monitor={monitor!r}) decides by the training data, and this decision has a "
                "privacy cost that is not accounted. Monitor a metric of public data.",
                of=callback,
            )


def check_unchanged(trainer: Any, callback: Any, run: Run) -> None:
    """Raises if the trainer no longer runs the training that was made private."""
    if not run.attached:
        raise DetachedError(
            "The module was detached during trainer.fit, so training would continue without privacy.",
            fix="Do not call engine.detach(module) during trainer.fit. DPCallback detaches the module when fit ends.",
        )
    if len(trainer.optimizers) != 1 or trainer.optimizers[0] is not run.optimizer:
        raise ParameterMismatchError(
            "The optimizer of the trainer is not the one that was made private.",
            fix="Set trainer.optimizers before training starts, or call trainer.fit again.",
        )
    if not any(other is callback for other in trainer.callbacks):
        raise SamplingError(
            "DPCallback was removed from the trainer's callbacks, for example by a Tuner.",
            fix="Keep it in trainer.callbacks while trainer.fit runs.",
        )
    check_trainer_settings(trainer)


def check_trainer_settings(trainer: Any) -> None:
    """Rejects settings of the trainer that change gradients or batches outside the engine."""
    if trainer.world_size != 1:
        raise SamplingError(
            f"The trainer runs {trainer.world_size} processes, and each would draw its own batches.",
            fix="Pass Trainer(devices=1). For several processes, write the loop: see docs/distributed.md.",
        )
    if getattr(trainer.strategy, "launcher", None) is not None:
        raise SamplingError(
            f"The trainer trains in another process ({type(trainer.strategy).__name__}), so this process would not "
            "record the privacy cost.",
            fix="Pass Trainer(devices=1, strategy='auto').",
        )
    if trainer.accumulate_grad_batches != 1:
        raise ScaledGradientError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) divides the loss, so clipping would "
            "act on scaled gradients.",
            fix=_LARGER_BATCH,
        )
    if trainer.gradient_clip_val:
        raise ValueError(
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) would find no gradient to clip. Leave it out: "
            "max_grad_norm clips the gradient of each sample."
        )
    if getattr(trainer, "scaler", None) is not None:
        raise ScaledGradientError(
            f"Trainer(precision={trainer.precision!r}) scales the loss, so clipping would act on scaled gradients.",
            fix="Pass Trainer(precision='bf16-mixed'), which needs no scaler.",
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise SamplingError(
            "Trainer(reload_dataloaders_every_n_epochs=...) replaces the private loader.",
            fix="Leave it out, or call trainer.fit once for each loader, with one callback.",
        )
