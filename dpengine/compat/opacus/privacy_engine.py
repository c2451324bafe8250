"""``PrivacyEngine`` with Opacus's arguments: wraps model, optimizer and loader, over the engine's own parts."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import dpengine
from dpengine.accounting import Relation, suggested_delta
from dpengine.names import suggests_names
from dpengine.report import PrivacyReport
from dpengine.run import Budget, Run

from . import checkpoints
from .accountants import create_accountant
from .accountants.utils import get_noise_multiplier
from .admission import adaptive_settings, admit
from .data_loader import DPDataLoader, unsampled_loader
from .grad_sample.gsm_base import AbstractGradSampleHooks, AbstractGradSampleModule, is_spread
from .grad_sample.prepare import GHOST, get_gsm_class, prepare_module
from .optimizers import DPOptimizer, get_optimizer_class
from .utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from .validators import ModuleValidator


class PrivacyEngine:
    """Makes training private with wrappers, as Opacus does.

    ::

        privacy_engine = PrivacyEngine()
        model, optimizer, data_loader = privacy_engine.make_private(
            module=model, optimizer=optimizer, data_loader=data_loader, noise_multiplier=1.1, max_grad_norm=1.0
        )

    Args:
        accountant: ``"prv"``, ``"rdp"``, ``"gdp"``, or what was given to ``register_accountant``.
        secure_mode: Whether all noise comes from a cryptographic generator on the CPU, which no seed can be given.

    Raises:
        ValueError: If the accountant is not known.
    """

    _flat_adapts: ClassVar[dict[str, float] | None] = None  # settings, where "flat" means adaptive

    @suggests_names
    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False):
        self.accountant: Any = create_accountant(mechanism=accountant)
        self.secure_mode = secure_mode
        self.secure_rng: Any = None
        self.dataset: Any = None
        self.engine = dpengine.PrivacyEngine(secure_rng=secure_mode)
        self._own_books = hasattr(self.accountant, "ledger")
        if self._own_books:
            self.accountant.ledger = self.engine.ledger

    # What subclasses may change

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
        """The private optimizer around one."""
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
        distributed: bool,
        batch_first: bool = True,
        rand_on_empty: bool = False,
    ) -> DataLoader[Any]:
        """The private loader for one."""
        if self.dataset is not None and self.dataset is not data_loader.dataset:
            warnings.warn(
                "This engine was used with another data set before; its epsilon adds up both. Take an engine for each "
                "data set, unless they are one.",
                stacklevel=3,
            )
        self.dataset = data_loader.dataset
        if not poisson_sampling:
            return unsampled_loader(data_loader)
        return DPDataLoader.from_data_loader(
            data_loader, distributed=distributed, batch_first=batch_first, rand_on_empty=rand_on_empty
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
        """The wrapper of a model, or the hooks on it."""
        if wrap_model and isinstance(module, AbstractGradSampleModule):
            wanted = (get_gsm_class(grad_sample_mode), batch_first, loss_reduction)
            found = (type(module), module.batch_first, module.loss_reduction)
            if wanted != found:
                raise ValueError(
                    f"The model is a {found[0].__name__} with batch_first={found[1]}, loss_reduction={found[2]!r}; "
                    f"asked for was a {wanted[0].__name__} with {wanted[1]}, {wanted[2]!r}. Pass module._module, or "
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
        """The criterion of ghost modes. The user's own is as good."""
        return DPLossFastGradientClipping(module, optimizer, criterion, loss_reduction)

    # The calls

    @suggests_names
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = nn.CrossEntropyLoss(),  # noqa: B008 - Opacus's default
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        target_unclipped_quantile: float | None = None,
        clipbound_learning_rate: float | None = None,
        max_clipbound: float | None = None,
        min_clipbound: float | None = None,
        unclipped_num_std: float | None = None,
    ) -> tuple[Any, ...]:
        """Wraps a model, an optimizer and a loader, so that the loop over them is private.

        Args:
            module: The model, or a wrapper of the same class and settings.
            optimizer: Over parameters of the model, and no others.
            criterion: What the criterion of ghost modes is made of.
            data_loader: A plain loader. The one returned draws Poisson batches, as many in a pass.
            noise_multiplier: Standard deviation of the noise over ``max_grad_norm``.
            max_grad_norm: What norms are clipped to; a list, one for each parameter, with ``"per_layer"``.
            batch_first: Whether axis 0 of the model's inputs is the batch; else axis 1.
            loss_reduction: ``"mean"`` or ``"sum"``: what the loss does over rows.
            poisson_sampling: False keeps the batches of the loader. Epsilon is then that of passes without any
                amplification.
            clipping: ``"flat"``, ``"per_layer"`` or ``"adaptive"``.
            noise_generator: Makes the noise repeat, for tests. What is trained so is not private.
            grad_sample_mode: ``"hooks"``, ``"functorch"``, ``"ew"``, ``"ghost"``, ``"ghost_fsdp"``, ``"ghost_tp"`` or
                ``"no_op"``.
            wrap_model: False puts hooks on the model, which is used as it is; the first value returned is theirs.
            rand_on_empty: Whether an empty batch has one row of zeros and ones, whose gradient is dropped.
            target_unclipped_quantile: Of ``"adaptive"``: see ``AdaClipDPOptimizer``. None takes 0.5.
            clipbound_learning_rate: Of ``"adaptive"``; None takes 0.2.
            max_clipbound: Of ``"adaptive"``; None takes 1e6.
            min_clipbound: Of ``"adaptive"``; None takes 1e-6.
            unclipped_num_std: Of ``"adaptive"``; None takes a twentieth of the batch size, and at least the noise
                multiplier.

        Returns:
            Model, optimizer and loader; with a ghost mode the criterion before the loader. What cannot be made private
            is refused, and nothing has changed then.
        """
        settings = {
            "target_unclipped_quantile": target_unclipped_quantile,
            "clipbound_learning_rate": clipbound_learning_rate,
            "max_clipbound": max_clipbound,
            "min_clipbound": min_clipbound,
            "unclipped_num_std": unclipped_num_std,
        }
        size = admit(module, optimizer, data_loader, noise_generator, self.secure_mode)
        if clipping == "flat" and self._flat_adapts is not None:
            clipping = "adaptive"
            settings = {**self._flat_adapts, **{k: v for k, v in settings.items() if v is not None}}
        adapts: dict[str, Any] = adaptive_settings(clipping, settings, noise_multiplier, size)
        distributed = is_spread(module._module if isinstance(module, AbstractGradSampleModule) else module)
        layout: dict[str, Any] = {"loss_reduction": loss_reduction, "grad_sample_mode": grad_sample_mode}
        loader = self._prepare_data_loader(
            data_loader,
            distributed=distributed,
            poisson_sampling=poisson_sampling,
            batch_first=batch_first,
            rand_on_empty=rand_on_empty,
        )
        hooks: Any = self._prepare_model(
            module, batch_first=batch_first, max_grad_norm=max_grad_norm, wrap_model=wrap_model, **layout
        )
        try:
            ranks = torch.distributed.get_world_size() if distributed else 1
            private = self._prepare_optimizer(
                optimizer=optimizer,
                noise_multiplier=noise_multiplier,
                max_grad_norm=max_grad_norm,
                expected_batch_size=size / ranks if distributed else size,
                noise_generator=noise_generator,
                distributed=distributed,
                clipping=clipping,
                **layout,
                **adapts,
            )
            self._join(hooks, private, loader, poisson_sampling)
        except BaseException:
            if hooks is not module:
                hooks.cleanup()
            raise
        if grad_sample_mode not in GHOST:
            return hooks, private, loader
        criterion = self._prepare_criterion(
            module=hooks, optimizer=private, criterion=criterion, loss_reduction=loss_reduction
        )
        return hooks, private, criterion, loader

    def _join(self, hooks: AbstractGradSampleHooks, optimizer: DPOptimizer, loader: Any, poisson: bool) -> None:
        """Has the optimizer release what the loader hands out, and the engine book it."""
        release, strategy = optimizer._release, loader._batches.strategy
        release.hand_fed = False
        release.pads_empty = getattr(loader, "rand_on_empty", False)
        release.plan = dataclasses.replace(
            release.plan, sampling=strategy, relation=Relation.ZERO_OUT, claims_passes=not poisson
        )
        if poisson:
            hooks.forbid_grad_accumulation()
        else:
            hooks.allow_grad_accumulation()
        model = release.sums.model
        budget = Budget(None, suggested_delta(strategy.num_examples), None, "warn", self.engine.accountant)
        run = Run(model, optimizer, release, budget, attached=True, batches=loader)
        loader.bind(release.handed_out, release.plan.has_step)
        self.engine.enlist(run)
        if self._own_books:
            self.accountant.ledger = self.engine.ledger
        else:
            optimizer.attach_step_hook(self.accountant.get_optimizer_hook_fn(sample_rate=strategy.sample_rate))

    @suggests_names
    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Any = nn.CrossEntropyLoss(),  # noqa: B008 - Opacus's default
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | list[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        target_unclipped_quantile: float | None = None,
        clipbound_learning_rate: float | None = None,
        max_clipbound: float | None = None,
        min_clipbound: float | None = None,
        unclipped_num_std: float | None = None,
        epsilon_tolerance: float = 0.01,
        alphas: Sequence[float] | None = None,
        eps_error: float | None = None,
        delta_error: float | None = None,
    ) -> tuple[Any, ...]:
        """``make_private`` with the noise found for a target; of what was spent before, a warning says that it adds up.

        Args:
            module: As in ``make_private``, as all that is not listed here.
            optimizer: As there.
            criterion: As there.
            data_loader: As there.
            target_epsilon: What the planned passes may spend.
            target_delta: The delta at which that holds.
            epochs: Planned passes over the loader.
            max_grad_norm: As there.
            batch_first: As there.
            loss_reduction: As there.
            poisson_sampling: As there.
            clipping: As there.
            noise_generator: As there.
            grad_sample_mode: As there.
            wrap_model: As there.
            rand_on_empty: As there.
            target_unclipped_quantile: As there.
            clipbound_learning_rate: As there.
            max_clipbound: As there.
            min_clipbound: As there.
            unclipped_num_std: As there.
            epsilon_tolerance: How far below the target the planned passes may stay.
            alphas: Orders of the RDP accountant.
            eps_error: Of the PRV accountant.
            delta_error: Of the PRV accountant.

        Returns:
            As ``make_private``.
        """
        given: dict[str, Any] = {"alphas": alphas, "eps_error": eps_error, "delta_error": delta_error}
        if len(self.accountant) > 0:
            warnings.warn("This engine has spent before; the target is that of the new run alone.", stacklevel=2)
        sigma = get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            # Without Poisson sampling every pass is one release of everybody's contribution.
            sample_rate=1 / len(data_loader) if poisson_sampling else 1.0,
            epochs=epochs,
            accountant=self.accountant.mechanism(),
            epsilon_tolerance=epsilon_tolerance,
            **{name: value for name, value in given.items() if value is not None},
        )
        return self.make_private(
            module=module,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=data_loader,
            noise_multiplier=sigma,
            max_grad_norm=max_grad_norm,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            clipping=clipping,
            noise_generator=noise_generator,
            grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model,
            rand_on_empty=rand_on_empty,
            target_unclipped_quantile=target_unclipped_quantile,
            clipbound_learning_rate=clipbound_learning_rate,
            max_clipbound=max_clipbound,
            min_clipbound=min_clipbound,
            unclipped_num_std=unclipped_num_std,
        )

    def get_epsilon(self, delta: float) -> float:
        """Epsilon spent so far at this delta, by the accountant; 0 before the first step, infinite without noise."""
        return float(self.accountant.get_epsilon(delta))

    def report(self, **facts: Any) -> PrivacyReport:
        """The report of what was spent so far: see ``dpengine.PrivacyEngine.report``."""
        return self.engine.report(**facts)

    def is_compatible(self, *, module: nn.Module, optimizer: Any, data_loader: Any) -> bool:
        """Whether nothing stands in the way of the model. The others are looked at in ``make_private``."""
        return ModuleValidator.is_valid(module)

    def validate(self, *, module: nn.Module, optimizer: Any, data_loader: Any) -> None:
        """Raises an ``UnsupportedModuleError`` for a model that stands in the way; else nothing."""
        ModuleValidator.validate(module, strict=True)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """A copy of a model whose layers were replaced where that helps, validated."""
        fixed = ModuleValidator.fix(module)
        ModuleValidator.validate(fixed, strict=True)
        return fixed

    @suggests_names
    def save_checkpoint(
        self,
        *,
        path: Any,
        module: Any,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Writes the state of the model, of what was spent, and of whatever else is given, as Opacus does.

        Args:
            path: A path or file, for ``torch.save``.
            module: The wrapper, or the model.
            optimizer: The private optimizer.
            noise_scheduler: Of the noise multiplier.
            grad_clip_scheduler: Of the threshold.
            checkpoint_dict: More, by keys of the user's.
            module_state_dict_kwargs: Of ``module.state_dict``.
            torch_save_kwargs: Of ``torch.save``.
        """
        parts = {
            "optimizer": optimizer,
            "noise_scheduler": noise_scheduler,
            "grad_clip_scheduler": grad_clip_scheduler,
        }
        checkpoints.save(
            path, module, self.accountant, parts, checkpoint_dict, module_state_dict_kwargs, torch_save_kwargs
        )

    @suggests_names
    def load_checkpoint(
        self,
        *,
        path: Any,
        module: Any,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Goes on from a checkpoint of ``save_checkpoint``, or of Opacus's.

        Args:
            path: A path or file, for ``torch.load``.
            module: The wrapper, or the model: keys may have ``_module.`` or not.
            optimizer: The private optimizer.
            noise_scheduler: Of the noise multiplier.
            grad_clip_scheduler: Of the threshold.
            module_load_dict_kwargs: Of ``module.load_state_dict``.
            torch_load_kwargs: Of ``torch.load``; ``weights_only`` is False unless it is there.

        Returns:
            The content, less the states of optimizer and schedulers.

        Raises:
            ValueError: If it is no such checkpoint, or of another accountant.
        """  # noqa: DOC502 - what is called raises on our behalf
        parts = {
            "optimizer": optimizer,
            "noise_scheduler": noise_scheduler,
            "grad_clip_scheduler": grad_clip_scheduler,
        }
        return checkpoints.load(path, module, self.accountant, parts, module_load_dict_kwargs, torch_load_kwargs)
