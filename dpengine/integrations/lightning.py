"""Callback that makes training with a Lightning ``Trainer`` private. Needs ``lightning`` or ``pytorch_lightning``.

Lightning runs the loop: it requests the training loader, builds the optimizer, and steps with a closure. The callback
replaces the loader where the trainer's strategy processes it, and calls ``make_private`` when loader and optimizer
exist.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from dpengine.engine.integration import fetch_ahead
from dpengine.engine.privacy_engine import PrivacyEngine
from dpengine.engine.run import Run
from dpengine.errors import (
    AccountingRefusedError,
    BatchStateError,
    MissingDependencyError,
    ParameterMismatchError,
    SamplingError,
    check_keywords,
)

from .lightning_checks import (
    check_callbacks,
    check_trainer_settings,
    lightning_class,
    notice_choices_by_training_data,
    reject_change,
)

_OURS = {"self", "module", "optimizer", "data_loader", "accumulation_steps", "grad_scaler", "lr_scheduler"}
_WANTED = [name for name in inspect.signature(PrivacyEngine.make_private).parameters if name not in _OURS]


class DPCallback(lightning_class("Callback")):  # type: ignore[misc]
    """Makes training private, from the first batch of ``trainer.fit`` to its end.

    ::

        private = DPCallback(target_epsilon=3.0, max_grad_norm=1.0)
        trainer = Trainer(max_epochs=10, callbacks=[private])
        trainer.fit(module, loader)
        print(private.engine.report())

    The module does not change: one optimizer, and a ``training_step`` whose loss is a mean over samples (or a sum, with
    ``loss_reduction="sum"``). Epsilon is logged as ``epsilon`` at the end of each epoch and stored in Lightning's
    checkpoints: a run that is resumed by ``ckpt_path`` counts all of its steps. With ``physical_batch_size`` a batch
    comes in chunks, each of which Lightning counts as a step, also in ``max_steps``. A batch for which
    ``training_step`` returns None is discarded and charged.

    Changes to the run by other code, such as another callback, raise an error before each batch and each step of the
    trainer's optimizers. Optimizers that a hook of the module creates are not seen.

    Args:
        engine: Accounts for the run; None creates an engine, which is then the attribute ``engine``.
        wanted: As for `PrivacyEngine.make_private`. With ``target_epsilon`` or ``noise`` the planned length is that of
            the trainer, unless ``epochs`` or ``steps`` is given.

    Raises:
        MissingDependencyError: If Lightning is not installed.
        TypeError: If a keyword is not known.
    """

    def __init__(self, engine: PrivacyEngine | None = None, **wanted: Any):
        if type(self).__mro__[1] is object:
            raise MissingDependencyError(
                "DPCallback needs a package that is not installed.", fix="pip install lightning"
            )
        check_keywords("DPCallback", wanted, _WANTED)
        super().__init__()
        self.engine = PrivacyEngine() if engine is None else engine
        self.wanted = wanted
        self._trainer: Any = None
        self._resumes = False
        self._handed: _HandedOver | None = None
        self._run: Run | None = None  # from the first batch on
        self._watched: list[Any] = []  # handles of the hooks on optimizers
        self._lossless = False  # whether training_step returned no loss

    # From Lightning

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Raises for settings that would not be private, and waits for the training loader."""
        if stage != "fit":
            return
        check_trainer_settings(trainer)
        check_callbacks(trainer)
        notice_choices_by_training_data(trainer)
        self._trainer, self._resumes = trainer, False
        give, step = trainer.strategy.process_dataloader, trainer.strategy.optimizer_step
        trainer.strategy.process_dataloader = lambda loader: self._take(give(loader))
        trainer.strategy.optimizer_step = lambda *args, **kwargs: _or_none(step, args, kwargs)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Allows steps of the private optimizer only."""
        self._watched = [one.register_step_pre_hook(self._before_step) for one in trainer.optimizers]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Raises if the trainer has another loader than the private one."""
        if self._handed is None:
            raise SamplingError(
                "Lightning made its training loader before this callback could make it private.",
                fix="Have no other callback or strategy call trainer.fit_loop.setup_data() earlier.",
            )
        _ = self._handed.private

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Notes that there is no loss yet."""
        self._lossless = pl_module.automatic_optimization

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Notes that there is a loss."""
        self._lossless = False

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Discards a batch with samples but no loss, as Lightning does."""
        if self._run is None or not self._lossless:
            return
        batches = self._run.step.batches
        if not batches.awaits_backward or batches.samples == 0:
            return
        if self.in_chunks:
            raise BatchStateError(
                "training_step returned None for a chunk of a batch; the other chunks cannot be released without it.",
                fix="Return a loss for each, or leave physical_batch_size out.",
            )
        raise _NoLossError

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Logs epsilon."""
        with contextlib.suppress(AccountingRefusedError):  # none is claimed of shuffled batches
            # Lightning asks for a batch size where training_step reads the loader by itself.
            pl_module.log("epsilon", self.engine.epsilon, prog_bar=True, batch_size=1)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Removes all hooks; the privacy cost stays in ``engine``."""
        if stage == "fit":
            self._let_go()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Removes all hooks after an error."""
        self._let_go()

    def state_dict(self) -> dict[str, Any]:
        """Returns the charges, for Lightning's checkpoint."""
        return {"engine": self.engine.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Adds the privacy cost before the checkpoint from which ``fit`` continues, each time: never too little."""
        if self._trainer is None:  # validation and tests cost no privacy
            return
        self.engine.load_state_dict(state_dict["engine"])
        self._resumes = True

    # The loader

    def _take(self, loader: Any) -> Any:
        if not self._trainer.training:  # a loader for validation
            return loader
        if not isinstance(loader, DataLoader):
            raise SamplingError(
                f"The training loader is a {type(loader).__name__}; batches are drawn for a torch DataLoader.",
                fix="Pass one DataLoader to trainer.fit.",
            )
        if self._handed is not None:
            raise SamplingError("There are several training loaders.", fix="Pass one DataLoader to trainer.fit.")
        self._handed = _HandedOver(self, loader)
        return self._handed

    @property
    def in_chunks(self) -> bool:
        """Returns True if a batch may come in parts."""
        return self.wanted.get("physical_batch_size") is not None

    def make_private(self, loader: DataLoader[Any]) -> Any:
        """Returns the private loader, once there is an optimizer. Called by the placeholder of ``loader``."""
        trainer = self._trainer
        if not trainer.optimizers:
            raise SamplingError(
                "Lightning read a batch before there was an optimizer: trainer.estimated_stepping_batches does, where "
                "batches come in chunks.",
                fix="In configure_optimizers, take max_epochs * len(loader) for the number of steps.",
            )
        if len(trainer.optimizers) != 1:
            raise ParameterMismatchError(
                f"The module has {len(trainer.optimizers)} optimizers, and this callback needs one.",
                fix="Return one from configure_optimizers; for several, write the loop with one engine for each model.",
            )
        if trainer.ckpt_path and not self._resumes:
            raise SamplingError(
                f"The checkpoint ({trainer.ckpt_path}) has no record of the privacy cost before it.",
                fix="Resume from one that was written with this callback, or load weights that are public by hand.",
            )
        length = {}
        if self.wanted.keys() & {"target_epsilon", "noise"} and not self.wanted.keys() & {"epochs", "steps"}:
            length = _length(trainer, loader, self.in_chunks)
        scheduler = None
        if self.in_chunks:  # Lightning would count them
            by_step = [config.scheduler for config in trainer.lr_scheduler_configs if config.interval == "step"]
            scheduler = by_step[0] if by_step else None
        module, (optimizer,) = trainer.lightning_module, trainer.optimizers
        _, _, private = self.engine.make_private(
            module, optimizer, loader, lr_scheduler=scheduler, **{**length, **self.wanted}
        )
        self._run = self.engine.runs[-1]
        fetch_ahead(self.engine, int(self.in_chunks))  # Lightning reads one batch ahead to see the end
        return private

    def reject_change(self) -> None:
        """Raises if the trainer continues with another run than the private one. Called before each batch and step."""
        if self._run is not None:
            reject_change(self._trainer, self, self._run)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._run is None:
            raise SamplingError(
                f"{type(optimizer).__name__} stepped before the first training batch, and so without privacy.",
                fix="Train in training_step alone: neither while validating nor before training.",
            )
        self.reject_change()

    def end(self) -> None:
        """Stops the trainer. The budget is used up, and Lightning would run empty epochs."""
        if self._trainer is not None:
            self._trainer.should_stop = True

    def _let_go(self) -> None:
        if self._trainer is None:
            return
        for name in ("process_dataloader", "optimizer_step"):
            vars(self._trainer.strategy).pop(name, None)
        while self._watched:
            self._watched.pop().remove()
        if self._run is not None and self._run.attached:
            self.engine.detach(self._run.model)
        self._trainer, self._handed, self._run, self._resumes = None, None, None, False


def _length(trainer: Any, loader: DataLoader[Any], in_chunks: bool) -> dict[str, int]:
    """Returns the planned length of training, for which the noise is calibrated."""
    limit = 1.0 if in_chunks or trainer.limit_train_batches is None else trainer.limit_train_batches  # it counts chunks
    cut = isinstance(limit, int) or limit < 1
    epochs, steps = trainer.max_epochs, trainer.max_steps
    if not epochs or epochs < 1:
        return {"steps": steps} if steps > 0 else {"epochs": epochs}
    if (steps < 1 and not cut) or isinstance(loader.dataset, IterableDataset):  # which make_private rejects
        return {"epochs": epochs}
    batches = min(len(loader), limit) if isinstance(limit, int) else int(len(loader) * limit)
    return {"steps": epochs * batches if steps < 1 else min(epochs * batches, steps)}


class _NoLossError(Exception):
    """Leaves a step that has no loss."""


def _or_none(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with contextlib.suppress(_NoLossError):
        return step(*args, **kwargs)
    return None


class _HandedOver:
    """Placeholder of the training loader, because Lightning requests the loader before there is an optimizer.

    Args:
        callback: Makes the loader private.
        loader: The loader of the user.
    """

    def __init__(self, callback: DPCallback, loader: DataLoader[Any]):
        self.loader = loader
        self.made: Any = None
        self._callback = callback

    @property
    def private(self) -> Any:
        """The private loader, which the first request of a batch creates."""
        if self.made is None:
            self.made = self._callback.make_private(self.loader)
        return self.made

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches. The first is drawn when it is requested."""
        empty = True
        for batch in self.private:
            self._callback.reject_change()
            yield batch
            empty = False
        if empty:
            self._callback.end()

    def __len__(self) -> int:
        """Returns the number of batches in a pass; TypeError for chunks, so that Lightning treats it as unknown."""
        if self._callback.in_chunks:
            raise TypeError("The number of chunks depends on what is drawn.")
        return len(self.loader if self.made is None else self.made)
