"""Builds the private model, optimizer and loader from the arguments of Opacus's ``make_private``."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import dpengine
from dpengine.accounting.constants import suggested_delta
from dpengine.accounting.events import CyclicGaussianEvent
from dpengine.accounting.ledger import Charge, Ledger
from dpengine.distributed.topology import SINGLE, Topology
from dpengine.engine.argument_checks import NotCopyable
from dpengine.engine.budget import Budget
from dpengine.engine.run import Run
from dpengine.engine.shared_dataset_check import SharedDatasetCheck
from dpengine.engine.step import PrivateStep
from dpengine.kernels.memory import keep_freed_memory

from .accountants.entries import charges_of
from .accountants.ledger_accountant import LedgerAccountant
from .data_loader import private_loader_for
from .engine_batches import report_to, unsampled_loader
from .grad_sample.gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule, is_distributed
from .grad_sample.prepare import GHOST, get_gsm_class, prepare_module
from .optimizers import DPOptimizer, get_optimizer_class
from .utils.fast_gradient_clipping_utils import DPLossFastGradientClipping


class Preparation(NotCopyable):
    """The parts of ``make_private``. Subclasses may override methods whose names begin with ``_prepare``.

    Attributes:
        accountant: Accountant that computes epsilon.
        secure_mode: Whether all noise comes from a cryptographic generator on the CPU.
        dataset: The data set of the last run.
        engine: The engine of dpengine, which has the ledger.
        own_accountants: For each run, an object that counts its steps in accountants that do not follow the ledger.
    """

    accountant: Any
    secure_mode: bool
    dataset: Any
    engine: dpengine.PrivacyEngine
    own_accountants: list[_OwnAccountant]

    _to_keep = "copy.deepcopy(engine.accountant)"
    _reproducible = False  # whether the batches of the next run are reproducible, for tests

    def _has_private_models(self) -> bool:
        return bool(self.engine.runs)

    def _prepare_optimizer(
        self,
        *,
        optimizer: Optimizer,
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        expected_batch_size: float | None,
        loss_reduction: str = "mean",
        distributed: bool = False,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        **kwargs: Any,
    ) -> DPOptimizer:
        """Returns the private optimizer around another one."""
        kind = get_optimizer_class(clipping=clipping, distributed=distributed, grad_sample_mode=grad_sample_mode)
        return kind(
            optimizer=optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=noise_generator,
            secure_mode=self.secure_mode,
            **kwargs,
        )

    def _prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        *,
        poisson_sampling: bool,
        distributed: bool | Topology,
        batch_first: bool = True,
        rand_on_empty: bool = False,
    ) -> DataLoader[Any]:
        """Returns the private form of a loader."""
        if self.dataset is not None and self.dataset is not data_loader.dataset:
            warnings.warn(
                "This engine was used with another data set before, and its epsilon covers both. Use one engine for "
                "each data set, unless they have common examples.",
                stacklevel=3,
            )
        self.dataset = data_loader.dataset
        if not poisson_sampling:
            return unsampled_loader(data_loader, distributed)
        return private_loader_for(
            data_loader,
            reproducible=self._reproducible,
            distributed=distributed,
            batch_first=batch_first,
            rand_on_empty=rand_on_empty,
        )

    def _prepare_model(
        self,
        module: nn.Module,
        *,
        batch_first: bool = True,
        max_grad_norm: float | Sequence[float] = 1.0,
        loss_reduction: str = "mean",
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
    ) -> AbstractGradSampleHooks:
        """Returns the wrapper of a model, or the hooks on it."""
        if wrap_model and isinstance(module, AbstractGradSampleModule):
            expected = (get_gsm_class(grad_sample_mode), batch_first, loss_reduction)
            found = (type(module), module.batch_first, module.loss_reduction)
            if expected != found:
                raise ValueError(
                    f"The model is a {found[0].__name__} with batch_first={found[1]}, loss_reduction={found[2]!r}; "
                    f"expected a {expected[0].__name__} with {expected[1]}, {expected[2]!r}. Pass module._module, or "
                    "call module.to_standard_module() first."
                )
            return module
        more = {"max_grad_norm": max_grad_norm} if grad_sample_mode in GHOST else {}
        return prepare_module(
            module,
            grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            **more,
        )

    def _prepare_criterion(
        self, *, module: Any, optimizer: DPOptimizer, criterion: Any, loss_reduction: str = "mean", **kwargs: Any
    ) -> DPLossFastGradientClipping:
        """Returns the criterion of ghost modes."""
        return DPLossFastGradientClipping(module, optimizer, criterion, loss_reduction)

    def _parts(
        self,
        module: nn.Module,
        data_loader: DataLoader[Any],
        criterion: Any,
        batch_size: float,
        *,
        of_model: Mapping[str, Any],
        of_loader: Mapping[str, Any],
        of_optimizer: Mapping[str, Any],
    ) -> tuple[Any, ...]:
        """Creates all private parts, given the keyword arguments of each. Removes the hooks on an error."""
        hooks: Any = self._prepare_model(module, **of_model)
        topology: Topology = hooks._topology
        try:
            self._reproducible = of_optimizer["noise_generator"] is not None
            loader = self._prepare_data_loader(
                data_loader, distributed=topology is not SINGLE and topology, **of_loader
            )
            private = self._prepare_optimizer(
                expected_batch_size=batch_size / topology.ranks,
                distributed=is_distributed(hooks._module),
                **of_optimizer,
            )
            self._connect(hooks, private, loader, of_loader["poisson_sampling"])
        except BaseException:
            if hooks is not module:
                hooks.cleanup()
            raise
        if of_model["grad_sample_mode"] not in GHOST:
            return hooks, private, loader
        loss_reduction = of_model["loss_reduction"]
        wrapped = self._prepare_criterion(
            module=hooks, optimizer=private, criterion=criterion, loss_reduction=loss_reduction
        )
        return hooks, private, wrapped, loader

    def _connect(self, hooks: AbstractGradSampleHooks, optimizer: DPOptimizer, loader: Any, poisson: bool) -> None:
        """Connects the optimizer to the loader and to the engine's ledger."""
        scheme = loader._batches.sampling
        delta = suggested_delta(max(2, scheme.num_examples))  # one example has no suggested delta
        custom_accountant = _OwnAccountant(self, optimizer, scheme.sample_rate if poisson else None)
        step = optimizer._begin_run(
            scheme,
            self.engine.ledger,
            custom_accountant.count_step,
            budget=Budget(None, delta, None, "warn", self.engine.accountant),
            dataset_check=SharedDatasetCheck(loader, custom_accountant.charges),
        )
        if poisson:
            hooks.forbid_grad_accumulation()
        else:
            hooks.allow_grad_accumulation()
        model = step.passes.model
        run = Run(model, optimizer, step, attached=True, loader=loader)
        report_to(loader, optimizer)
        if any(parameter.device.type == "cpu" for parameter in model.parameters()):
            keep_freed_memory()
        self.engine._begin_run(run, {}, (None, 1))
        follow(self.accountant, self.engine.ledger)
        self.own_accountants.append(custom_accountant)


def follow(accountant: Any, ledger: Ledger) -> bool:
    """Adds future charges of a ledger to an accountant. Returns False if the accountant must count steps itself."""
    if not isinstance(accountant, LedgerAccountant) or accountant.counts_by_itself():
        return False
    accountant.follow(ledger)
    return True


class _OwnAccountant:
    """Counts the steps of a run in an accountant that does not follow the engine's ledger, such as a user's own.

    Args:
        engine: The engine, whose accountant may be replaced at any time.
        optimizer: The optimizer of the run.
        sample_rate: Sampling rate; None if each pass over the data counts as one release of all of it.
    """

    def __init__(self, engine: Preparation, optimizer: DPOptimizer, sample_rate: float | None):
        self._engine = weakref.ref(engine)  # a script may delete it and continue with another one
        self._ledger = engine.engine.ledger
        self._accountant = engine.accountant
        self._optimizer = optimizer
        self._rate = sample_rate
        self._discarded = 0
        self._passes: Callable[[Any, DPOptimizer], None] | None = None

    @property
    def accountant(self) -> Any:
        """The accountant of the engine, or the last one that it had."""
        engine = self._engine()
        if engine is not None:
            self._accountant = engine.accountant
        return self._accountant

    def charges(self) -> Iterable[Charge]:
        """Returns the charges in the accountant's history, if it holds triples."""
        accountant = self.accountant
        if isinstance(accountant, LedgerAccountant):
            return accountant.ledger.totals
        try:
            return charges_of(accountant.history)
        except Exception:
            return ()

    def count_step(self) -> None:
        """Counts the step that the optimizer takes."""
        accountant = self.accountant
        if follow(accountant, self._ledger):
            return
        if self._rate is None:
            self._passes = self._passes or _counting_passes(self._optimizer._step)
            self._passes(accountant, self._optimizer)
            return
        self.count_discarded()
        accountant.get_optimizer_hook_fn(sample_rate=self._rate)(self._optimizer)

    def count_discarded(self) -> None:
        """Counts batches that were charged without a step since the last call: discarded, or of a failed step."""
        counted, optimizer = self._discarded, self._optimizer
        self._discarded = optimizer._step.batches.discarded + optimizer._failed_batches
        accountant = self.accountant
        if self._rate is not None and not follow(accountant, self._ledger):
            for _ in range(self._discarded - counted):
                accountant.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=self._rate)


def _counting_passes(step: PrivateStep) -> Callable[[Any, DPOptimizer], None]:
    """Returns a function that counts each pass over the data as one release in an accountant."""
    run, counted = step.plan.run.partition("@")[0], dict[CyclicGaussianEvent, int]()

    def count(accountant: Any, optimizer: DPOptimizer) -> None:
        if optimizer.noise_multiplier == 0:
            accountant.step(noise_multiplier=0.0, sample_rate=1.0)
        for charge in step.ledger.totals:
            event = charge.event
            if isinstance(event, CyclicGaussianEvent) and event.run.partition("@")[0] == run:
                for _ in range(counted.get(event, 0), event.cycles(charge.count)):
                    accountant.step(noise_multiplier=event.noise_multiplier, sample_rate=event.sample_rate)
                counted[event] = event.cycles(charge.count)

    return count
