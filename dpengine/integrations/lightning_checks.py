"""Checks a Lightning trainer's settings and callbacks, and loads Lightning's classes from either package."""

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

NAMES = ("lightning.pytorch", "pytorch_lightning")


def lightning_class(name: str) -> type:
    """Returns a class of Lightning, preferably of the package already imported; ``object`` if none is installed."""
    for package in sorted(NAMES, key=lambda package: package not in sys.modules):
        try:
            return getattr(importlib.import_module(package), name)  # type: ignore[no-any-return]
        except ImportError:
            continue
    return object


_OF_TRAINING = re.compile(r"(^|[^a-z])train(ing)?([^a-z]|$)")
_LARGER_BATCH = "Make the loader's batch_size larger by this factor, and pass DPCallback(physical_batch_size=...)."
# By name, which is the same in both packages of Lightning: the error, what it does, and what to do instead.
_CALLBACKS: dict[str, tuple[type[PrivacyError], str, str]] = {
    "GradientAccumulationScheduler": (
        ScaledGradientError,
        "divides the loss, so that clipping would use another unit.",
        _LARGER_BATCH,
    ),
    "LearningRateFinder": (
        SamplingError,
        "(also as Tuner.lr_find) takes steps on the training data, then sets weights and trainer back: a release of "
        "its own, with this callback switched off.",
        "Find the rate on public data, by a trainer without this callback; or compare private runs, each of which "
        "is counted.",
    ),
    "BatchSizeFinder": (
        SamplingError,
        "(also as Tuner.scale_batch_size) takes steps on the training data with this callback switched off, and the "
        "batch size decides what a step costs.",
        "Choose the loader's batch_size by hand, and pass DPCallback(physical_batch_size=...) for what fits into "
        "memory.",
    ),
    "ModelPruning": (
        UnsupportedLayerError,
        "puts other parameters in the place of those that train, and the optimizer holds the old ones.",
        "Prune the trained module after trainer.fit, which costs no privacy.",
    ),
}


def check_callbacks(trainer: Any) -> None:
    """Refuses callbacks of Lightning's own that train, or change gradients or parameters, behind the engine's back."""
    for callback in trainer.callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in _CALLBACKS:
                error, does, fix = _CALLBACKS[kind.__name__]
                raise error(f"{kind.__name__} {does}", fix=fix)


def notice_choices_by_training_data(trainer: Any) -> None:
    """Notices callbacks that choose by what the training data gave, as far as names tell."""
    for callback in trainer.callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and _OF_TRAINING.search(monitor.lower()):
            notice(
                "DPE012",
                f"{type(callback).__name__}(monitor={monitor!r}) chooses by the training data; that choice is a "
                "release which no accountant knows of. Monitor a metric of public data.",
                of=callback,
            )


def reject_change(trainer: Any, callback: Any, run: Run) -> None:
    """Raises if the trainer continues with another run than the one that was made private."""
    if not run.attached:
        raise DetachedError(
            "The module was detached while the trainer fits it: it would train on without privacy.",
            fix="Call engine.detach(module) after trainer.fit, which does it by itself.",
        )
    if len(trainer.optimizers) != 1 or trainer.optimizers[0] is not run.optimizer:
        raise ParameterMismatchError(
            "The trainer has another optimizer than the one that was made private.",
            fix="Set trainer.optimizers before training starts, or end trainer.fit and call it again.",
        )
    if not any(one is callback for one in trainer.callbacks):
        raise SamplingError(
            "The trainer's callbacks no longer have the one that keeps it private; a Tuner takes them off, say.",
            fix="Leave it in trainer.callbacks for as long as trainer.fit runs.",
        )
    check_trainer_settings(trainer)


def check_trainer_settings(trainer: Any) -> None:
    """Refuses settings of the trainer that change gradients or batches behind the engine's back."""
    if trainer.world_size != 1:
        raise SamplingError(
            f"The trainer runs {trainer.world_size} processes, each of which would draw batches of its own.",
            fix="Trainer(devices=1); for several processes, write the loop: see docs/distributed.md.",
        )
    if getattr(trainer.strategy, "launcher", None) is not None:
        raise SamplingError(
            f"The trainer trains in another process ({type(trainer.strategy).__name__}), which would keep the account.",
            fix="Trainer(devices=1, strategy='auto').",
        )
    if trainer.accumulate_grad_batches != 1:
        raise ScaledGradientError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) divides the loss, so that clipping "
            "would use another unit.",
            fix=_LARGER_BATCH,
        )
    if trainer.gradient_clip_val:
        raise ValueError(
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) would find no gradient to clip. Leave it out: "
            "max_grad_norm clips that of each sample."
        )
    if getattr(trainer, "scaler", None) is not None:
        raise ScaledGradientError(
            f"Trainer(precision={trainer.precision!r}) scales the loss, so that clipping would use another unit.",
            fix="Trainer(precision='bf16-mixed'), which needs no scaler.",
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise SamplingError(
            "Trainer(reload_dataloaders_every_n_epochs=...) replaces the private loader.",
            fix="Leave it out, or call trainer.fit once for each loader, with one callback.",
        )
