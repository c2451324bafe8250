"""One callback makes what a Lightning ``Trainer`` fits private. Needs ``lightning`` or ``pytorch_lightning``.

Lightning owns the loop: it asks for the training loader, builds the optimizer, and steps by closure. The callback lets
the loader pass through its hands where the trainer's strategy may replace it, and calls ``make_private`` as soon as
loader and optimizer are both there.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from dpengine.engine import PrivacyEngine
from dpengine.errors import (
    AccountingRefusedError,
    MissingDependencyError,
    ParameterMismatchError,
    SamplingError,
    ScaledGradientError,
)
from dpengine.names import refuse_unknown

from .lightning_classes import lightning_class

_OURS = {"self", "module", "optimizer", "data_loader", "accumulation_steps", "grad_scaler", "lr_scheduler"}
_WANTED = [name for name in inspect.signature(PrivacyEngine.make_private).parameters if name not in _OURS]


class DPCallback(lightning_class("Callback")):  # type: ignore[misc]
    """Makes training private, from the first batch of ``trainer.fit`` to its end.

    ::

        private = DPCallback(target_epsilon=3.0, max_grad_norm=1.0)
        trainer = Trainer(max_epochs=10, callbacks=[private])
        trainer.fit(module, loader)
        private.engine.report().print()

    The module stays as it is: one optimizer, any ``training_step`` whose loss is a mean over rows (or a sum, with
    ``loss_reduction="sum"``). Epsilon is logged as ``epsilon`` at the end of each epoch, and goes into Lightning's
    checkpoints: a run that is resumed by ``ckpt_path`` counts all of its steps. With ``physical_batch_size`` a batch
    comes in chunks, each of which Lightning counts as a step, in ``max_steps`` too.

    Args:
        engine: Keeps the account; None makes one, which is ``engine`` from then on.
        wanted: As for `PrivacyEngine.make_private`. With ``target_epsilon`` or ``noise`` the planned length is that of
            the trainer, unless ``epochs`` or ``steps`` says it.

    Raises:
        MissingDependencyError: If Lightning is not installed.
        TypeError: If a keyword is not known.
    """

    def __init__(self, engine: PrivacyEngine | None = None, **wanted: Any):
        if type(self).__mro__[1] is object:
            raise MissingDependencyError(
                "DPCallback needs a package that is not installed.", fix="pip install lightning"
            )
        refuse_unknown("DPCallback", wanted, _WANTED)
        super().__init__()
        self.engine = PrivacyEngine() if engine is None else engine
        self.wanted = wanted
        self._trainer: Any = None
        self._resumes = False
        self._handed: _HandedOver | None = None

    # From Lightning

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuses what would not be private, and waits for the training loader."""
        if stage != "fit":
            return
        _refuse(trainer)
        self._trainer, self._resumes = trainer, False
        give = trainer.strategy.process_dataloader
        trainer.strategy.process_dataloader = lambda loader: self._take(give(loader))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The loader was handed over by now, or the trainer has another one."""
        if self._handed is None:
            raise SamplingError(
                "Lightning made its training loader before this callback could make it private.",
                fix="Have no other callback or strategy call trainer.fit_loop.setup_data() earlier.",
            )
        _ = self._handed.private

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Logs epsilon."""
        with contextlib.suppress(AccountingRefusedError):  # none is claimed of shuffled batches
            pl_module.log("epsilon", self.engine.epsilon, prog_bar=True)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Takes everything off again; what was spent stays in ``engine``."""
        if stage == "fit":
            self._let_go()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same, where training broke off."""
        self._let_go()

    def state_dict(self) -> dict[str, Any]:
        """What was spent, for Lightning's checkpoint."""
        return {"engine": self.engine.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Adds what was spent before the checkpoint that ``fit`` goes on from, each time: never too little."""
        if self._trainer is None:  # to validate or test, which spends nothing
            return
        self.engine.load_state_dict(state_dict["engine"])
        self._resumes = True

    # What becomes of the loader

    def _take(self, loader: Any) -> Any:
        if not self._trainer.training:  # a loader to validate with
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

    def make_private(self, loader: DataLoader[Any]) -> Any:
        """Returns the private loader, once there is an optimizer; called by what stands in for ``loader``."""
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
                f"The checkpoint ({trainer.ckpt_path}) says nothing of what was spent before it was written.",
                fix="Resume from one that was written with this callback, or load weights that are public by hand.",
            )
        in_chunks = self.wanted.get("physical_batch_size") is not None
        length = {}
        if self.wanted.keys() & {"target_epsilon", "noise"} and not self.wanted.keys() & {"epochs", "steps"}:
            length = {"steps": trainer.max_steps} if trainer.max_steps > 0 else {"epochs": trainer.max_epochs}
        scheduler = None
        if in_chunks:  # Lightning would count them
            by_step = [config.scheduler for config in trainer.lr_scheduler_configs if config.interval == "step"]
            scheduler = by_step[0] if by_step else None
        module, (optimizer,) = trainer.lightning_module, trainer.optimizers
        _, _, private = self.engine.make_private(
            module, optimizer, loader, lr_scheduler=scheduler, **{**length, **self.wanted}
        )
        self.engine.runs[-1].release.ahead = int(in_chunks)  # Lightning reads one ahead to see the end
        return private

    def _let_go(self) -> None:
        if self._trainer is None:
            return
        with contextlib.suppress(AttributeError):
            del self._trainer.strategy.process_dataloader
        if self._handed is not None and self._handed.made is not None:
            self.engine.detach(self._trainer.lightning_module)
        self._trainer, self._handed, self._resumes = None, None, False


class _HandedOver:
    """Stands where Lightning keeps the training loader: it is asked for before there is an optimizer.

    Args:
        callback: Makes it private.
        loader: The user's.
    """

    def __init__(self, callback: DPCallback, loader: DataLoader[Any]):
        self.loader = loader
        self.made: Any = None
        self._callback = callback

    @property
    def private(self) -> Any:
        """The private loader, from the first time that a batch is asked for."""
        if self.made is None:
            self.made = self._callback.make_private(self.loader)
        return self.made

    def __iter__(self) -> Iterator[Any]:
        """The batches. The first is drawn when it is asked for, not now."""
        yield from self.private

    def __len__(self) -> int:
        """Batches of a pass; a TypeError, which Lightning takes for an unknown number, where they come in chunks."""
        if self._callback.wanted.get("physical_batch_size") is not None:
            raise TypeError("The number of chunks depends on what is drawn.")
        return len(self.loader if self.made is None else self.made)


def _refuse(trainer: Any) -> None:
    """Refuses settings of the trainer that change gradients or batches behind the engine's back."""
    if trainer.world_size != 1:
        raise SamplingError(
            f"The trainer runs {trainer.world_size} processes, each of which would draw batches of its own.",
            fix="Trainer(devices=1); for several processes, write the loop: see docs/scale.md.",
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
            fix="Make the loader's batch_size so many times larger, and pass DPCallback(physical_batch_size=...).",
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
