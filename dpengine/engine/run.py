"""Parts that ``make_private`` builds around a model and removes again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpengine.errors import (
    BatchDependentLossError,
    BatchMismatchError,
    UnknownParameterError,
    UnsupportedLayerError,
    keyword_hints,
)
from dpengine.kernels.memory import keep_freed_memory
from dpengine.ledger_file.run_ledger import RunLedger
from dpengine.report.facts import DEFAULT_UNIT
from dpengine.sampling.loader import private_loader
from dpengine.sampling.units import UnitDraws, UnitIds

from . import amp_and_lr_schedulers
from . import optimizer as private_optimizer
from .argument_checks import attached_runs
from .budget import Budget
from .grad_sample_module import GradSampleModule
from .step import PrivateStep


@dataclass(eq=False)
class Run:
    """A model, its optimizer and the parts that make them private.

    Attributes:
        units: The privacy unit of each example; None if each example is a unit.
        unit: Name of the privacy unit.
        loader: The private loader; None if the loop draws the batches.
        resumed: True if the run continues a saved run.
        attached: True if the hooks are attached.
        recorder: The model if it is a GradSampleModule whose hooks are off during the run; otherwise None.
    """

    model: nn.Module
    optimizer: Optimizer
    step: PrivateStep
    grad_scaler: Any = None
    lr_scheduler: Any = None
    units: UnitIds | None = None
    unit: str = DEFAULT_UNIT
    loader: Any = None
    resumed: bool = False
    attached: bool = False
    recorder: GradSampleModule | None = None
    _other_optimizers: Any = None  # handle of the hook on steps of other optimizers

    @property
    def budget(self) -> Budget:
        """The privacy budget."""
        return self.step.budget

    def attach(self) -> None:
        """Attaches all hooks; on an error, removes those already attached."""
        recorder = self.model if isinstance(self.model, GradSampleModule) and self.model._attached else None
        with contextlib.ExitStack() as undo:
            if recorder is not None:
                recorder._clipper.detach()
                undo.callback(recorder._clipper.attach)
            private_optimizer.attach(self.optimizer, self.step)
            undo.callback(private_optimizer.detach, self.optimizer)
            undo.callback(self.step.passes.detach)  # before attach(), which may fail between two hooks
            self.step.passes.attach()
            if self.grad_scaler is not None:
                amp_and_lr_schedulers.attach_scaler(self.grad_scaler)
                undo.callback(amp_and_lr_schedulers.detach, self.grad_scaler)
            if self.lr_scheduler is not None:
                amp_and_lr_schedulers.attach_scheduler(self.lr_scheduler)
                undo.callback(amp_and_lr_schedulers.detach, self.lr_scheduler)
            self._other_optimizers = private_optimizer.reject_other_optimizers(self.step)
            undo.callback(self._other_optimizers.remove)
            attached_runs.add(self)
            self.step.run = self
            undo.pop_all()  # without an error, nothing is undone
        self.attached, self.recorder = True, recorder
        if recorder is not None:
            recorder._forget_results()
        if any(parameter.device.type == "cpu" for parameter in self.model.parameters()):
            keep_freed_memory()

    def build_loader(
        self,
        data_loader: DataLoader[Any],
        physical_batch_size: int | None,
        accumulation_steps: int,
        batch_first: bool,
        example_input: Any,
    ) -> DataLoader[Any]:
        """Returns the private loader of this run, which reports each returned physical batch to the step."""
        draws = self.step.plan.sampling
        loader = private_loader(
            data_loader,
            sampling=draws if self.units is None else UnitDraws(draws, self.units),
            words=self.step.sampling_words,
            physical_batch_size=physical_batch_size,
            accumulation_steps=accumulation_steps,
            batch_first=batch_first,
            on_return=self.step.batch_returned,
            on_end=self.step.loop.close,
            may_draw=self.step.may_draw,
            example_input=example_input,
            shard=(self.step.passes.topology.rank, self.step.passes.topology.ranks),
            placeholder=True,
        )
        self.loader = loader
        return loader

    def describe(self) -> dict[str, Any]:
        """Returns the plan, the number of charged steps and the number of planned steps."""
        steps = {"steps": self.step.ledger.steps, "planned_steps": self.budget.planned_steps}
        return self.step.plan.describe() | steps

    def backward(self, loss_B: Tensor) -> None:
        """Runs the backward pass of a loss ``(B,)`` with one value per sample."""
        if loss_B.dim() != 1:
            raise BatchDependentLossError(
                f"loss_per_example has shape {tuple(loss_B.shape)}; one number per sample is needed, because a reduced "
                "loss may mix samples.",
                fix='Compute it with reduction="none", and reduce every axis but the first.',
            )
        batches = self.step.batches
        if batches.logical_batches and loss_B.shape[0] != batches.samples and not batches.is_placeholder:
            raise BatchMismatchError(
                f"loss_per_example has {loss_B.shape[0]} numbers for the {batches.samples} samples of this batch.",
                fix="Reduce every axis but the first, which is the batch.",
            )
        mean = self.step.passes.loss_reduction == "mean"
        loss = loss_B.sum() / (max(len(loss_B), 1) if mean else 1)
        (loss if self.grad_scaler is None else self.grad_scaler.scale(loss)).backward()

    def compile(self, backend: Any, physical_batch_size: int | None, accumulation_steps: int) -> None:
        """Compiles the passes of the model, unless ``backend`` is False. The hooks must not be attached yet."""
        if backend is False:
            return
        if not (backend is True or isinstance(backend, str) or callable(backend)):
            raise TypeError(f"compile={backend!r}; pass True, the name of a backend of torch.compile, or a function.")
        passes = self.step.passes
        for unsupported, requirement in (
            (passes.grad_sample_mode != "auto", "grad_sample_mode='auto'"),
            (self.units is not None, "privacy_unit=None"),
            (not passes.capture.batch_first, "batch_first=True"),
            (not passes.topology.runs_independently, "the complete model in one process"),
        ):
            if unsupported:
                raise UnsupportedLayerError(f"compile= needs {requirement}.", fix="Pass that, or leave out compile=.")
        from .compiled_forward import CompiledForward, compiler_for, padded_size_for  # imports the compiler, slowly

        padded_size = padded_size_for(self.step.plan.sampling, physical_batch_size, accumulation_steps)
        passes.capture.outermost = CompiledForward(passes, padded_size, compiler_for(backend))

    def detach(self) -> None:
        """Removes all hooks, even if the ledger file cannot be written."""
        try:
            self.step.close()
            if isinstance(self.step.ledger, RunLedger):
                self.step.ledger.close()
        finally:
            private_optimizer.detach(self.optimizer)
            for attached in (self.grad_scaler, self.lr_scheduler):
                if attached is not None:
                    amp_and_lr_schedulers.detach(attached)
            self._other_optimizers.remove()
            attached_runs.discard(self)
            self.attached = False
            if self.recorder is not None:
                self.recorder._clipper.attach()


def run_of(model: nn.Module, runs: Iterable[Run]) -> Run:
    """Returns the attached run of a model; raises UnknownParameterError if there is none."""
    attached = next((run for run in runs if run.model is model and run.attached), None)
    if attached is None:
        raise UnknownParameterError(
            f"{type(model).__name__} is not private in this engine, or was detached before.",
            fix="For an optimizer, an engine, or a model of another engine, call dpengine.detach(x).",
        )
    return attached


@keyword_hints
def detach(target: Any) -> None:
    """Ends the private run of a model or an optimizer, or all runs of an engine. Later training is not private.

    Removes all hooks of the run. The run may belong to any engine, whose ledger keeps the privacy cost.

    Args:
        target: A model or optimizer that ``make_private`` returned, a copy of such an optimizer, or an engine.

    Raises:
        UnknownParameterError: If the model is not private, or was detached before.
        TypeError: If ``target`` is of another type.
    """
    if isinstance(target, Optimizer):
        runs = [run for run in attached_runs.all() if run.optimizer is target]
        if not runs:
            private_optimizer.detach(target)
    elif isinstance(target, nn.Module):
        runs = [run for run in attached_runs.all() if run.model is target]
        if not runs:
            raise UnknownParameterError(
                f"The model ({type(target).__name__}) is not private, or was detached before.",
                fix="Pass the model that make_private returned, once.",
            )
    elif hasattr(target, "runs"):
        runs = [run for run in target.runs if run.attached]
    else:
        raise TypeError(f"detach: {type(target).__name__} is not a model, an optimizer or an engine.")
    for run in runs:
        run.detach()
