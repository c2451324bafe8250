"""PrivacyEngine: makes training private and computes the privacy cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpengine.accounting.accountant import PrivacySpent, accountant_name, epsilon_of, privacy_spent
from dpengine.accounting.custom_accountant import Accountant, name_of, observer_of
from dpengine.accounting.ledger import Ledger
from dpengine.accounting.origin import origins_in, relation_of, states_of, unit_of
from dpengine.clipping.policy import AbstractClip
from dpengine.errors import InvalidBudgetError, keyword_hints
from dpengine.grad_modes.choose_method import MethodTable, method_table
from dpengine.grad_modes.method import explain
from dpengine.ledger_file.engine_ledger import EngineLedger, run_settings
from dpengine.noise.keyed_streams import DEFAULT_KIND, SECURE_KIND
from dpengine.noise.source import NoiseSource
from dpengine.plan.config import AbstractPlanConfig
from dpengine.plan.execution_plan import DPExecutionPlan
from dpengine.report.report import PrivacyReport

from . import argument_checks, run_report
from .batch_state import BatchState
from .build_plan import BudgetConfig, Noise, PlanRequest, Sampling, SamplingConfig, build_plan, name_for, source_for
from .grad_sample_module import topology_and_model
from .pass_clipper import PassClipper
from .progress import ProgressBar, progress
from .rank_consistency import check_rank_consistency
from .run import Run, run_of
from .run_report import origins_of
from .shared_dataset_check import SharedDatasetCheck
from .step import PrivateStep

B = TypeVar("B")
M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer)


class PrivacyEngine(argument_checks.NotCopyable):
    """Makes training differentially private and computes its privacy cost.

    ::

        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private(model, optimizer, loader, noise_multiplier=1.1)

    Args:
        accountant: ``"pld"`` (tight, the default), ``"rdp"``, ``"gdp"`` where it is exact, or, for comparison,
            ``"prv"``, ``"dp_accounting"`` or ``"dp_accounting_rdp"``; or a `dpengine.accounting.Accountant`.
        secure_rng: If True, all randomness is cryptographic on accelerators too. Noise is then generated on the CPU,
            at about 7 ns per parameter and step, and copied. On the CPU randomness is always cryptographic.
        seed: Makes noise and batches reproducible, for tests. The noise is then not secret, which every report
            states.
        methods: Timings of another run: a ``MethodTable``, or a file that its ``save`` wrote.
        ledger: File that records the privacy cost of all runs on one data set; see `dpengine.ledger_file`. Each step
            is charged on disk before the parameters change. None keeps the ledger in memory.
        reserve_steps: Number of steps charged on disk at once. After a crash, unused reserved steps stay charged.

    Raises:
        ValueError: If the accountant is unknown, the file holds no timings, or ``reserve_steps`` is out of range.
        TypeError: If the seed is not an integer, the ledger is not a path, or a custom accountant lacks a method.
        LedgerError: If the ledger file was edited, or is not a ledger.
    """

    @keyword_hints
    def __init__(
        self,
        accountant: str | Accountant = "pld",
        *,
        secure_rng: bool = False,
        seed: int | None = None,
        methods: MethodTable | str | Path | None = None,
        ledger: str | Path | None = None,
        reserve_steps: int = 1,
    ):
        accountant_name(accountant)  # raises if it is not an accountant
        if seed is not None:
            NoiseSource.seeded(seed)  # raises if it is not an integer
        self.accountant: Any = accountant
        self.methods = method_table(methods)
        self._engine_ledger = EngineLedger(ledger, reserve_steps, observer_of(accountant))
        self._kind = SECURE_KIND if secure_rng else DEFAULT_KIND
        self._seed = seed
        self.runs: list[Run] = []
        self._delta: float | None = None

    @keyword_hints
    def make_private(
        self,
        module: M,
        optimizer: O,
        data_loader: DataLoader[Any],
        *,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        max_grad_norm: float | list[float] | None = None,
        clipping: str | AbstractClip = "flat",
        noise: Noise | None = None,
        plan: DPExecutionPlan | AbstractPlanConfig | None = None,
        sampling: Sampling = "poisson",
        sample_rate: float | None = None,
        expected_batch_size: float | None = None,
        physical_batch_size: int | None = None,
        accumulation_steps: int = 1,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        privacy_unit: Any = None,
        unit_reduction: str = "mean",
        grad_sample_mode: str = "auto",
        unused_parameters: str = "error",
        on_budget: str = "stop",
        allow_large_delta: bool = False,
        example_input: Any = None,
        grad_scaler: Any = None,
        lr_scheduler: Any = None,
        compile: bool | str | Callable[..., Any] = False,
    ) -> tuple[M, O, DataLoader[Any]]:
        """Makes training private in place; the training loop does not change.

        Pass exactly one of ``noise_multiplier``, ``target_epsilon`` and ``plan``. Raises a ``PrivacyError`` with a fix
        if training cannot be made private, and a ``ValueError`` for an argument out of range. On an error, all objects
        are unchanged.

        Args:
            module: The model, or a ``GradSampleModule``. Hooks are attached to it; ``detach`` removes them.
            optimizer: Any optimizer of ``torch.optim`` except LBFGS and SparseAdam, over the model's parameters.
            data_loader: A ``DataLoader``. The returned loader draws Poisson batches of the same expected size. For an
                empty batch it returns one placeholder sample, of zeros.
            noise_multiplier: Ratio of the noise standard deviation to the sensitivity. 0 trains without privacy.
            target_epsilon: Maximum epsilon of all planned steps and the earlier runs of this engine; the noise is
                calibrated to it. The first run after ``load_state_dict`` resumes with the same noise and the remaining
                steps.
            target_delta: Delta of the guarantee. None selects ``N ** -1.1``. Values of ``1 / N`` or more are rejected.
            epochs: Number of planned passes over the loader, with ``target_epsilon``.
            steps: Number of planned logical batches, instead of ``epochs``.
            max_grad_norm: Clipping norm: upper limit of the L2 norm of each per-sample gradient; a list for
                ``"per_layer"``. None selects 1.0, or the norm of the policy.
            clipping: ``"flat"``, ``"per_layer"``, ``"automatic"``, ``"adaptive"``, or a policy.
            noise: ``BandMF(num_bands=16)``, ``BLT()``, ``BandedInverse(num_bands=4)``, or custom `CorrelatedRows`:
                less error at the same privacy cost over the planned ``epochs`` or ``steps``.
            plan: Replaces all arguments for noise, clipping and sampling; see `dpengine.plan`. ``p.grad`` is then the
                noised sum of the plan divided by its ``normalize_by``. The run ends after the plan's iterations.
            sampling: ``"poisson"``; ``"shuffle"``, for which no epsilon is claimed; a scheme, which then determines the
                batch size; or ``ExternalBatches(...)`` if the loop draws its own batches. ``data_loader`` is then
                returned unchanged and may be any iterable.
            sample_rate: Sampling rate, as a constant. None derives it from the loader, which makes the number of
                examples public. With ``expected_batch_size`` and ``target_delta``, the guarantee is add-or-remove.
            expected_batch_size: Divisor of the sums, as a constant. None selects the loader's batch size.
            physical_batch_size: Maximum number of samples per forward pass; larger logical batches are split.
            accumulation_steps: Number of physical batches per logical batch.
            batch_first: True if axis 0 of the model's inputs is the batch; False for axis 1.
            loss_reduction: ``"mean"`` or ``"sum"``: reduction of the loss over the batch.
            privacy_unit: The privacy unit of each example: a sequence of ids, or a column of the data set. Sampling
                then draws units with all of their examples, and clipping and the guarantee apply to units. The loader's
                batch size and the sampling rate count units. The loop must not reorder the samples of a batch.
            unit_reduction: ``"mean"`` or ``"sum"``: reduction of the gradients of a unit's examples.
            grad_sample_mode: ``"auto"``, ``"hooks"``, ``"functorch"``, ``"ew"``, ``"whole_model"`` or ``"ghost"``.
            unused_parameters: ``"error"``, or ``"zero"`` to update a parameter without a gradient by noise only.
            on_budget: ``"stop"`` ends the loader before the target is exceeded, ``"raise"`` raises, ``"warn"`` warns.
            allow_large_delta: Accepts a delta of ``1 / N`` or more.
            example_input: A made-up example in the format of the data set. An empty data set needs it; otherwise it
                replaces the placeholder of zeros.
            grad_scaler: The GradScaler that scales the loss. Its scale stays constant from now on.
            lr_scheduler: A scheduler that must not count accumulation steps.
            compile: True compiles forward and backward pass, norms and clipped sums with ``torch.compile``; the loop
                does not change. The name of a backend, or a function, selects another backend. A model that cannot be
                compiled trains without compilation, with a notice. See docs/performance.md.

        Returns:
            The same model, the same optimizer, and the private loader.
        """
        choices = {"grad_sample_mode": grad_sample_mode, "unused_parameters": unused_parameters, "on_budget": on_budget}
        argument_checks.check_choices(**choices, loss_reduction=loss_reduction, unit_reduction=unit_reduction)
        argument_checks.check_bools(batch_first=batch_first, allow_large_delta=allow_large_delta)
        argument_checks.check_objects(module, optimizer, grad_scaler, lr_scheduler)
        topology, inner = topology_and_model(module, batch_first=batch_first, loss_reduction=loss_reduction)
        loader_args = {"privacy_unit": privacy_unit, "sample_rate": sample_rate, "example_input": example_input}
        loader_args |= {"physical_batch_size": physical_batch_size, "expected_batch_size": expected_batch_size}
        external = argument_checks.is_external(sampling, data_loader, topology, accumulation_steps, **loader_args)
        units, num_units, unit = argument_checks.units_for(privacy_unit, data_loader, grad_sample_mode)
        settings = run_settings(plan, target_epsilon=target_epsilon, delta=target_delta, epochs=epochs, steps=steps)
        prior_charges, steps_taken = self._engine_ledger.open(topology.everyone, settings, first=not self.runs)
        target, split = (target_epsilon, target_delta, epochs, steps), (physical_batch_size, accumulation_steps)
        budget_config = BudgetConfig(*target, on_budget, allow_large_delta, self.accountant, prior_charges, steps_taken)
        sampling_config = SamplingConfig(sampling, sample_rate, expected_batch_size, num_units)
        mechanism, name = (noise_multiplier, noise, plan, clipping, max_grad_norm), name_for(topology)
        run_plan, budget = build_plan(inner, data_loader, PlanRequest(*mechanism, budget_config, sampling_config, name))
        options: dict[str, Any] = {"batch_first": batch_first, "loss_reduction": loss_reduction, "topology": topology}
        options |= {"grad_sample_mode": grad_sample_mode, "methods": self.methods}
        parts: dict[str, Any] = {"batches": BatchState(external=external), "budget": budget, "grad_scaler": grad_scaler}
        parts |= {"unused_parameters": unused_parameters, "unit_reduction": unit_reduction}
        parts["dataset_check"] = SharedDatasetCheck(data_loader, self._engine_ledger.totals)
        source, ledger = self._new_source(topology), self._engine_ledger.of_run(run_plan.run, topology.everyone)
        step = PrivateStep(run_plan, partial(PassClipper, inner, run_plan.clipping, **options), source, ledger, **parts)
        run = Run(module, optimizer, step, grad_scaler, lr_scheduler, units, unit)
        loader = data_loader if external else run.build_loader(data_loader, *split, batch_first, example_input)
        self._begin_run(run, settings, split, compile)
        return module, optimizer, loader

    def _new_source(self, topology: Any) -> NoiseSource:
        return source_for(topology, self._kind, self._seed, run=len(self.runs))

    def _begin_run(
        self, run: Run, settings: Mapping[str, Any], split: tuple[int | None, int], compile: Any = False
    ) -> None:
        run.compile(compile, *split)
        unit_of(origins_of(self, run))  # raises if runs have different privacy units
        argument_checks.warn_if_not_private(run.step.plan, run.model)
        check_rank_consistency(run, *split)
        noise = run_report.noise_of(run)
        self._engine_ledger.begin(run.step.ledger, run_report.run_facts(run), asked=settings, noise=noise)
        if not run.attached:
            run.attach()  # the first change to the user's objects; all checks come before it
        self.runs.append(run)
        self._delta = run.budget.delta

    @keyword_hints
    def make_private_with_epsilon(
        self,
        module: M,
        optimizer: O,
        data_loader: DataLoader[Any],
        *,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | list[float] | None = None,
        clipping: str | AbstractClip = "flat",
        physical_batch_size: int | None = None,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        grad_sample_mode: str = "auto",
    ) -> tuple[M, O, DataLoader[Any]]:
        """Calls ``make_private`` with noise calibrated to a target epsilon and delta. The arguments are the same."""
        return self.make_private(
            module,
            optimizer,
            data_loader,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            epochs=epochs,
            max_grad_norm=max_grad_norm,
            clipping=clipping,
            physical_batch_size=physical_batch_size,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            grad_sample_mode=grad_sample_mode,
        )

    @keyword_hints
    def backward(self, loss_per_example: Tensor) -> None:
        """Runs the backward pass of an unreduced loss, reduced over the batch by ``loss_reduction``.

        Args:
            loss_per_example: Loss of each sample, ``(B,)``, as ``reduction="none"`` returns it. Another number of axes
                raises ``BatchDependentLossError``; another number of samples raises ``BatchMismatchError``.
        """
        self._last_run().backward(loss_per_example)

    @keyword_hints
    def get_epsilon(self, delta: float | None = None) -> float:
        """Returns an upper bound of epsilon; raises AccountingRefusedError if none exists.

        Args:
            delta: In (0, 1). None selects the delta of the last run.
        """
        delta = self.delta if delta is None else delta
        relation = relation_of(origins_of(self))
        return epsilon_of(self.ledger.totals, delta, accountant=self.accountant, relation=relation)

    @property
    def epsilon(self) -> float:
        """Epsilon of all charges so far, at the configured delta."""
        return self.get_epsilon()

    @property
    def ledger(self) -> Ledger:
        """All charges of this engine and of every run in its ledger file."""
        return self._engine_ledger.ledger

    @property
    def delta(self) -> float:
        """The delta of the last ``make_private``."""
        if self._delta is None:
            raise InvalidBudgetError("No delta is configured yet.", fix="Call make_private, or get_epsilon(delta=...).")
        return self._delta

    @property
    def spent(self) -> PrivacySpent:
        """Privacy cost so far: epsilon, delta, mu, advantage and number of steps."""
        relation = relation_of(origins_of(self))
        return privacy_spent(self.ledger.history, self.delta, accountant=self.accountant, relation=relation)

    @keyword_hints
    def metrics(self, *, nonprivate: bool = False) -> dict[str, float]:
        """Returns metrics by name. ``nonprivate=True`` adds ``nonprivate/...``, which must not be published."""
        run = self._last_run()
        return run_report.metrics_of_run(run, self.ledger, self.delta, self.get_epsilon, nonprivate=nonprivate)

    @keyword_hints
    def progress(self, loader: Iterable[B], *, total: int | None = None) -> ProgressBar[B]:
        """Iterates over a loader, with a progress bar that shows epsilon; see `dpengine.engine.progress`."""
        target = self._last_run().budget.target_epsilon
        return progress(self, loader, target_epsilon=target, total=total)

    @keyword_hints
    def report(
        self,
        *,
        data: Mapping[str, Any] | None = None,
        utility: Mapping[str, Any] | None = None,
        excludes: Sequence[str] = (),
    ) -> PrivacyReport:
        """Returns the privacy report so far. ``print`` shows it; ``save(directory)`` writes its files.

        Raises ValueError for an unknown key of an argument, and TypeError for a wrong type.

        Args:
            data: Any of ``name``, ``source``, ``licence`` and ``sha256`` of the data.
            utility: ``metric``, ``value`` and ``split`` of a score. The guarantee does not cover it, as the report
                states.
            excludes: Further sentences on the limits of the guarantee.

        Returns:
            The report, with the plan of the last run and the charges of all runs. Its guarantee holds for all runs.
        """
        run_report.check_report_arguments(data, utility, excludes)
        return run_report.report_of_run(self._last_run(), self.ledger, origins_of(self), data, utility, excludes)

    @keyword_hints
    def describe(self) -> dict[str, Any]:
        """Describes the last run: sampling, clipping, standard deviations, relation, steps charged and planned."""
        return self._last_run().describe()

    @keyword_hints
    def explain(self) -> str:
        """Returns a table with the method of the norm and the sum of each parameter in the last pass, and its cost."""
        return explain(self._last_run().step.passes.mode.choices)

    @keyword_hints
    def state_dict(self) -> dict[str, Any]:
        """Returns all charges and facts about their runs as JSON values, and the length of a ledger file."""
        state: dict[str, Any] = {"accountant": name_of(self.accountant), "delta": self._delta}
        state |= {"ledger": self.ledger.state_dict(), "origins": states_of(origins_of(self))}
        return state | ({} if self._engine_ledger.anchor is None else {"anchor": self._engine_ledger.anchor})

    @keyword_hints
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adds stored charges unless the ledger file contains them. Raises LedgerError if the state is damaged."""
        argument_checks.check_state(state)
        origins = origins_in(state)
        unit_of({*origins_of(self), *origins})
        self._engine_ledger.load(state["ledger"], state.get("anchor"), origins)
        self._delta = self._delta if self._delta is not None else state["delta"]

    @keyword_hints
    def detach(self, module: nn.Module) -> None:
        """Removes all hooks from a model that is private in this engine. The ledger keeps the privacy cost."""
        run_of(module, self.runs).detach()

    __repr__, _repr_html_ = run_report.text_of_engine, run_report.table_of_engine

    def _last_run(self) -> Run:
        if not self.runs:
            raise InvalidBudgetError("Nothing is private yet.", fix="Call make_private first.")
        return self.runs[-1]
