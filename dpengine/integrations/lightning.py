"""Callback that makes training with a Lightning ``Trainer`` private. Needs ``lightning`` or ``pytorch_lightning``.

Lightning runs the training loop: it requests the training loader, builds the optimizer, and steps with a closure. The
callback replaces the loader when the trainer's strategy processes it, and calls ``make_private`` once both loader and
optimizer exist.
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
    check_unchanged,
    lightning_class,
    warn_of_training_metrics,
)

_SET_BY_CALLBACK = {"self", "module", "optimizer", "data_loader", "accumulation_steps", "grad_scaler", "lr_scheduler"}
_ARGUMENTS = [name for name in inspect.signature(PrivacyEngine.make_private).parameters if name not in _SET_BY_CALLBACK]


class DPCallback(lightning_class("Callback")):  # type: ignore[misc]
    """Callback that makes training private from the first batch of ``trainer.fit`` to its end.

    ::

        private = DPCallback(target_epsilon=3.0, max_grad_norm=1.0)
        trainer = Trainer(max_epochs=10, callbacks=[private])
        trainer.fit(module, loader)
        print(private.engine.report())

    The module needs no changes. It must have one optimizer, and a ``training_step`` whose loss is a mean over samples
    (or a sum, with ``loss_reduction="sum"``). Epsilon is logged as ``epsilon`` at the end of each epoch. Checkpoints of
    Lightning store the privacy cost, so a run that is resumed with ``ckpt_path`` accounts for all of its steps. With
    ``physical_batch_size``, a batch is split into chunks, and Lightning counts each chunk as a step, also for
    ``max_steps``. A batch for which ``training_step`` returns None is discarded and charged.

    Before each batch and each step of the trainer's optimizers, the callback raises an error if other code, such as
    another callback, has changed the run. It does not detect optimizers that a hook of the module creates.

    Args:
        engine: The engine of the run; None creates one. It is available as the attribute ``engine``.
        arguments: Arguments of `PrivacyEngine.make_private`. With ``target_epsilon`` or ``noise``, the planned length
            is that of the trainer, unless ``epochs`` or ``steps`` is passed.

    Raises:
        MissingDependencyError: If Lightning is not installed.
        TypeError: If a keyword is unknown.
    """

    def __init__(self, engine: PrivacyEngine | None = None, **arguments: Any):
        if type(self).__mro__[1] is object:
            raise MissingDependencyError(
                "DPCallback needs a package that is not installed.", fix="pip install lightning"
            )
        check_keywords("DPCallback", arguments, _ARGUMENTS)
        super().__init__()
        self.engine = PrivacyEngine() if engine is None else engine
        self.arguments = arguments
        self._trainer: Any = None
        self._resumes = False
        self._placeholder: _LoaderPlaceholder | None = None
        self._run: Run | None = None  # set at the first batch
        self._handles: list[Any] = []  # handles of the hooks on optimizers
        self._has_no_loss = False  # whether training_step returned no loss

    # Hooks that Lightning calls

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Rejects settings that would break privacy, and intercepts the training loader."""
        if stage != "fit":
            return
        check_trainer_settings(trainer)
        check_callbacks(trainer)
        warn_of_training_metrics(trainer)
        self._trainer, self._resumes = trainer, False
        process, step = trainer.strategy.process_dataloader, trainer.strategy.optimizer_step
        trainer.strategy.process_dataloader = lambda loader: self._replace_loader(process(loader))
        trainer.strategy.optimizer_step = lambda *args, **kwargs: _step_unless_no_loss(step, args, kwargs)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Adds hooks that check the run before each optimizer step."""
        self._handles = [optimizer.register_step_pre_hook(self._before_step) for optimizer in trainer.optimizers]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Raises if the trainer does not use the private loader."""
        if self._placeholder is None:
            raise SamplingError(
                "Lightning created its training loader before this callback could replace it.",
                fix="Do not call trainer.fit_loop.setup_data() earlier, in another callback or strategy.",
            )
        _ = self._placeholder.private

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Records that there is no loss yet."""
        self._has_no_loss = pl_module.automatic_optimization

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Records that there is a loss."""
        self._has_no_loss = False

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Discards a batch with samples but no loss, as Lightning does."""
        if self._run is None or not self._has_no_loss:
            return
        batches = self._run.step.batches
        if not batches.awaits_backward or batches.samples == 0:
            return
        if self.in_chunks:
            raise BatchStateError(
                "training_step returned None for a chunk of a batch. The other chunks cannot be released without it.",
                fix="Return a loss for each chunk, or leave physical_batch_size out.",
            )
        raise _NoLossError

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Logs epsilon."""
        with contextlib.suppress(AccountingRefusedError):  # no epsilon is claimed for shuffled batches
            # Lightning needs a batch size if training_step reads the loader itself.
            pl_module.log("epsilon", self.engine.epsilon, prog_bar=True, batch_size=1)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Removes all hooks. The privacy cost stays in ``engine``."""
        if stage == "fit":
            self._remove_hooks()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Removes all hooks after an error."""
        self._remove_hooks()

    def state_dict(self) -> dict[str, Any]:
        """Returns the charges, for Lightning's checkpoint."""
        return {"engine": self.engine.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Adds the privacy cost of the checkpoint from which ``fit`` resumes. Each call adds it again."""
        if self._trainer is None:  # not in trainer.fit: validation and tests have no privacy cost
            return
        self.engine.load_state_dict(state_dict["engine"])
        self._resumes = True

    # Private loader

    def _replace_loader(self, loader: Any) -> Any:
        if not self._trainer.training:  # a loader for validation
            return loader
        if not isinstance(loader, DataLoader):
            raise SamplingError(
                f"The training loader is a {type(loader).__name__}. Only a torch DataLoader is supported.",
                fix="Pass one DataLoader to trainer.fit.",
            )
        if self._placeholder is not None:
            raise SamplingError("There are several training loaders.", fix="Pass one DataLoader to trainer.fit.")
        self._placeholder = _LoaderPlaceholder(self, loader)
        return self._placeholder

    @property
    def in_chunks(self) -> bool:
        """True if batches may be split into chunks."""
        return self.arguments.get("physical_batch_size") is not None

    def make_private(self, loader: DataLoader[Any]) -> Any:
        """Returns the private loader. The placeholder of ``loader`` calls this once there is an optimizer."""
        trainer = self._trainer
        if not trainer.optimizers:
            raise SamplingError(
                "Lightning requested a batch before there was an optimizer, as trainer.estimated_stepping_batches does "
                "if batches are split into chunks.",
                fix="In configure_optimizers, use max_epochs * len(loader) as the number of steps.",
            )
        if len(trainer.optimizers) != 1:
            raise ParameterMismatchError(
                f"The module has {len(trainer.optimizers)} optimizers, and this callback supports only one.",
                fix="Return one from configure_optimizers; for several, write the loop with one engine for each model.",
            )
        if trainer.ckpt_path and not self._resumes:
            raise SamplingError(
                f"The checkpoint {trainer.ckpt_path} has no record of the privacy cost of its steps.",
                fix="Resume from a checkpoint that was written with this callback, or load public weights yourself.",
            )
        length = {}
        if self.arguments.keys() & {"target_epsilon", "noise"} and not self.arguments.keys() & {"epochs", "steps"}:
            length = _planned_length(trainer, loader, self.in_chunks)
        scheduler = None
        if self.in_chunks:  # Lightning would count chunks as steps
            by_step = [config.scheduler for config in trainer.lr_scheduler_configs if config.interval == "step"]
            scheduler = by_step[0] if by_step else None
        module, (optimizer,) = trainer.lightning_module, trainer.optimizers
        _, _, private = self.engine.make_private(
            module, optimizer, loader, lr_scheduler=scheduler, **{**length, **self.arguments}
        )
        self._run = self.engine.runs[-1]
        fetch_ahead(self.engine, int(self.in_chunks))  # without a known length, Lightning fetches one batch ahead
        return private

    def check_unchanged(self) -> None:
        """Raises if other code has changed the private run. Called before each batch and step."""
        if self._run is not None:
            check_unchanged(self._trainer, self, self._run)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._run is None:
            raise SamplingError(
                f"{type(optimizer).__name__} stepped before the first training batch, and so without privacy.",
                fix="Train only in training_step, not during validation or before training.",
            )
        self.check_unchanged()

    def stop_training(self) -> None:
        """Stops the trainer when the budget is used up. Otherwise Lightning would run empty epochs."""
        if self._trainer is not None:
            self._trainer.should_stop = True

    def _remove_hooks(self) -> None:
        if self._trainer is None:
            return
        for name in ("process_dataloader", "optimizer_step"):
            vars(self._trainer.strategy).pop(name, None)
        while self._handles:
            self._handles.pop().remove()
        if self._run is not None and self._run.attached:
            self.engine.detach(self._run.model)
        self._trainer, self._placeholder, self._run, self._resumes = None, None, None, False


def _planned_length(trainer: Any, loader: DataLoader[Any], in_chunks: bool) -> dict[str, int]:
    """Returns the planned length of training, for which the noise is calibrated."""
    # The limit would count chunks, so it is ignored if batches are split.
    limit = 1.0 if in_chunks or trainer.limit_train_batches is None else trainer.limit_train_batches
    is_limited = isinstance(limit, int) or limit < 1
    epochs, steps = trainer.max_epochs, trainer.max_steps
    if not epochs or epochs < 1:
        return {"steps": steps} if steps > 0 else {"epochs": epochs}
    if (steps < 1 and not is_limited) or isinstance(loader.dataset, IterableDataset):  # make_private rejects the latter
        return {"epochs": epochs}
    batches = min(len(loader), limit) if isinstance(limit, int) else int(len(loader) * limit)
    return {"steps": epochs * batches if steps < 1 else min(epochs * batches, steps)}


class _NoLossError(Exception):
    """Raised to skip an optimizer step without a loss."""


def _step_unless_no_loss(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with contextlib.suppress(_NoLossError):
        return step(*args, **kwargs)
    return None


class _LoaderPlaceholder:
    """Placeholder for the private loader, because Lightning requests the loader before there is an optimizer.

    Args:
        callback: The callback that makes the loader private.
        loader: The loader of the user.
    """

    def __init__(self, callback: DPCallback, loader: DataLoader[Any]):
        self.loader = loader
        self._private: Any = None
        self._callback = callback

    @property
    def private(self) -> Any:
        """The private loader. It is created when it is first read."""
        if self._private is None:
            self._private = self._callback.make_private(self.loader)
        return self._private

    def __iter__(self) -> Iterator[Any]:
        """Yields the private batches. Each is drawn when it is requested."""
        empty = True
        for batch in self.private:
            self._callback.check_unchanged()
            yield batch
            empty = False
        if empty:
            self._callback.stop_training()

    def __len__(self) -> int:
        """Returns the number of batches in an epoch. Raises TypeError for chunks, whose number is unknown."""
        if self._callback.in_chunks:
            raise TypeError("The number of chunks depends on the sampled batches.")
        return len(self.loader if self._private is None else self._private)
