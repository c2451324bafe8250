"""``PrivacyEngine`` with the interface of Opacus: wraps model, optimizer and loader."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import dpengine
from dpengine.accounting.accountant import epsilon_of
from dpengine.accounting.origin import Origin, relation_of
from dpengine.engine.run_report import check_report_arguments, origins_of, report_of_run
from dpengine.errors import LedgerError, keyword_hints
from dpengine.report.report import PrivacyReport

from .accountants import create_accountant
from .accountants.ledger_accountant import LedgerAccountant
from .accountants.utils import get_noise_multiplier
from .argument_checks import adaptive_settings, check_arguments
from .checkpoints import Checkpoints
from .preparation import Preparation, follow
from .validators import ModuleValidator


class PrivacyEngine(Preparation, Checkpoints):
    """Makes training private with wrappers, as Opacus does.

    ::

        privacy_engine = PrivacyEngine()
        model, optimizer, data_loader = privacy_engine.make_private(
            module=model, optimizer=optimizer, data_loader=data_loader, noise_multiplier=1.1, max_grad_norm=1.0
        )

    Args:
        accountant: ``"prv"``, ``"rdp"``, ``"gdp"`` or a registered name. Other names raise ``ValueError``.
        secure_mode: Whether all noise comes from a cryptographic generator on the CPU, without a seed.
    """

    _adaptive_settings: ClassVar[dict[str, float] | None] = None  # set if "flat" means adaptive clipping

    @keyword_hints
    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False):
        self.own_accountants = []
        self.secure_mode = secure_mode
        self.secure_rng: Any = None
        self.dataset = None
        self.engine = dpengine.PrivacyEngine(secure_rng=secure_mode)
        self.accountant = create_accountant(mechanism=accountant)

    @property
    def accountant(self) -> Any:
        """Accountant that computes epsilon. A new one counts later steps, in addition to its own history."""
        return self._accountant

    @accountant.setter
    def accountant(self, accountant: Any) -> None:
        follow(accountant, self.engine.ledger)
        self._accountant = accountant

    @keyword_hints
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
        """Wraps a model, an optimizer and a loader, so that training with them is private.

        Args:
            module: The model, or a wrapper of the same class and settings.
            optimizer: Optimizer of parameters of the model, and no others.
            criterion: The criterion that ghost modes wrap.
            data_loader: A plain loader. The private loader draws the same number of Poisson batches per epoch.
            noise_multiplier: Standard deviation of the noise over ``max_grad_norm``.
            max_grad_norm: Clipping norm; with ``"per_layer"`` a list with one for each parameter.
            batch_first: Whether axis 0 of the model's inputs is the batch; else axis 1.
            loss_reduction: Reduction of the loss over samples, ``"mean"`` or ``"sum"``.
            poisson_sampling: Whether to draw Poisson batches. False keeps the batches of the loader, and epsilon is
                then without amplification by sampling.
            clipping: ``"flat"``, ``"per_layer"`` or ``"adaptive"``.
            noise_generator: Generator of reproducible noise, for tests. The result is not private.
            grad_sample_mode: ``"hooks"``, ``"functorch"``, ``"ew"``, ``"ghost"``, ``"ghost_fsdp"``, ``"ghost_tp"`` or
                ``"no_op"``.
            wrap_model: Whether to wrap the model. False attaches hooks to it and returns the hooks in place of the
                wrapper.
            rand_on_empty: Whether an empty batch has one sample of zeros and ones, whose gradient is dropped.
            target_unclipped_quantile: For ``"adaptive"``: see ``AdaClipDPOptimizer``. Default 0.5.
            clipbound_learning_rate: For ``"adaptive"``. Default 0.2.
            max_clipbound: For ``"adaptive"``. Default 1e6.
            min_clipbound: For ``"adaptive"``. Default 1e-6.
            unclipped_num_std: For ``"adaptive"``. Default a twentieth of the batch size, at least the noise multiplier.

        Returns:
            Model, optimizer and loader; in a ghost mode also the criterion, before the loader. Arguments that cannot
            be made private raise an error, and all objects remain unchanged.
        """
        settings = {
            "target_unclipped_quantile": target_unclipped_quantile,
            "clipbound_learning_rate": clipbound_learning_rate,
            "max_clipbound": max_clipbound,
            "min_clipbound": min_clipbound,
            "unclipped_num_std": unclipped_num_std,
        }
        size = check_arguments(module, optimizer, data_loader, noise_generator, self.secure_mode)
        if clipping == "flat" and self._adaptive_settings is not None:
            clipping = "adaptive"
            settings = {**self._adaptive_settings, **{k: v for k, v in settings.items() if v is not None}}
        adaptive: dict[str, Any] = adaptive_settings(clipping, settings, noise_multiplier, size)
        shared = {"loss_reduction": loss_reduction, "grad_sample_mode": grad_sample_mode}
        of_model = {"batch_first": batch_first, "max_grad_norm": max_grad_norm, "wrap_model": wrap_model}
        of_loader = {"poisson_sampling": poisson_sampling, "batch_first": batch_first, "rand_on_empty": rand_on_empty}
        of_optimizer = {"optimizer": optimizer, "noise_multiplier": noise_multiplier, "max_grad_norm": max_grad_norm}
        of_optimizer |= {"noise_generator": noise_generator, "clipping": clipping, **adaptive}
        return self._parts(
            module,
            data_loader,
            criterion,
            size,
            of_model=of_model | shared,
            of_loader=of_loader,
            of_optimizer=of_optimizer | shared,
        )

    @keyword_hints
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
        """Calls ``make_private`` with the noise multiplier for which ``epochs`` epochs cost the target.

        ``target_epsilon`` at ``target_delta`` is the cost of the planned epochs alone; a warning is given if earlier
        steps add to it. The planned epochs may cost less than the target by ``epsilon_tolerance``. ``alphas`` are the
        orders of the RDP accountant; ``eps_error`` and ``delta_error`` are for the PRV accountant. All other arguments,
        and the result, are those of ``make_private``.
        """
        given = {"alphas": alphas, "eps_error": eps_error, "delta_error": delta_error}
        steps = len(data_loader) if poisson_sampling else 1  # otherwise an epoch is one release of all examples
        sigma = self._calibrated_noise(target_epsilon, target_delta, steps, epochs, epsilon_tolerance, given)
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

    def _calibrated_noise(
        self, epsilon: float, delta: float, steps: int, epochs: int, tolerance: float, given: Mapping[str, Any]
    ) -> float:
        """Returns the noise multiplier for a target epsilon."""
        if len(self.accountant) > 0:
            warnings.warn("This engine has accounted steps before. The target is for the new run alone.", stacklevel=4)
        return get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=1 / steps,
            epochs=epochs,
            accountant=self.accountant.mechanism(),
            epsilon_tolerance=tolerance,
            **{name: value for name, value in given.items() if value is not None},
        )

    @keyword_hints
    def get_epsilon(self, delta: float) -> float:
        """Returns the epsilon so far at ``delta``: 0 before the first step, infinite without noise."""
        for custom_accountant in self.own_accountants:
            custom_accountant.count_discarded()
        return float(self.accountant.get_epsilon(delta))

    @keyword_hints
    def report(
        self,
        *,
        data: Mapping[str, Any] | None = None,
        utility: Mapping[str, Any] | None = None,
        excludes: Sequence[str] = (),
    ) -> PrivacyReport:
        """Returns the report of all accounted steps, including loaded histories; see ``dpengine.PrivacyEngine.report``.

        Raises:
            LedgerError: If the history of the accountant costs less than the steps of this engine.
        """
        if not (isinstance(self.accountant, LedgerAccountant) and self.engine.runs):
            return self.engine.report(data=data, utility=utility, excludes=excludes)
        ledger, num_steps = self.accountant.ledger, self.engine.ledger.steps
        loaded = set() if set(ledger.totals) == set(self.engine.ledger.totals) else {Origin()}
        origins = origins_of(self.engine) | loaded
        relation = relation_of(origins)
        histories = (ledger.totals, self.engine.ledger.totals)
        stated, actual = (epsilon_of(totals, 1e-5, relation=relation) for totals in histories)
        if ledger.steps < num_steps or stated < actual:
            raise LedgerError(
                f"The accountant's history of {ledger.steps} steps costs less than the {num_steps} of this engine.",
                fix="Do not change accountant.history, or call privacy_engine.engine.report().",
            )
        check_report_arguments(data, utility, excludes)
        return report_of_run(self.engine.runs[-1], ledger, origins, data, utility, excludes)

    def is_compatible(self, *, module: nn.Module, optimizer: Any, data_loader: Any) -> bool:
        """Returns True if the model is valid. ``make_private`` checks optimizer and loader."""
        return ModuleValidator.is_valid(module)

    def validate(self, *, module: nn.Module, optimizer: Any, data_loader: Any) -> None:
        """Raises ``UnsupportedModuleError`` if the model is not valid."""
        ModuleValidator.validate(module, strict=True)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Returns a valid copy of a model, with unsupported layers replaced."""
        return ModuleValidator.fix_and_validate(module)
