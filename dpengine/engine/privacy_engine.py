"""PrivacyEngine: makes training private and computes the privacy cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpengine.accounting.accountant import PrivacySpent, accountant_used, epsilon_of, privacy_spent
from dpengine.accounting.events import Relation
from dpengine.accounting.ledger import Ledger
from dpengine.accounting.origin import origins_in, relation_of, states_of, unit_of
from dpengine.accounting.own_accountant import Accountant, name_of, observer_of
from dpengine.clipping.policy import AbstractClip
from dpengine.distributed.topology import Topology
from dpengine.errors import InvalidBudgetError, UnknownParameterError, suggests_names
from dpengine.grad_modes.choose_method import MethodTable, method_table
from dpengine.grad_modes.explain import explain
from dpengine.ledger_file.books import Books, asked_for
from dpengine.noise.band_mf import BandMF
from dpengine.noise.keyed_streams import DEFAULT_KIND, SECURE_KIND
from dpengine.noise.short_forms import BLT, BandedInverse
from dpengine.noise.source import NoiseSource
from dpengine.plan.config import AbstractPlanConfig
from dpengine.plan.execution_plan import DPExecutionPlan
from dpengine.report.report import PrivacyReport
from dpengine.sampling.external import ExternalBatches

from . import argument_checks
from .batch_state import BatchState
from .build_plan import BudgetConfig, PlanRequest, SamplingConfig, build_plan, name_for, source_for
from .grad_sample_module import topology_and_model
from .pass_clipper import PassClipper
from .progress import progress
from .rank_consistency import refuse_disagreement
from .run import Run
from .run_report import about_run, metrics_of_run, noise_of, origins_of, refuse_unknown_facts, report_of_run
from .shared_dataset_check import SharedDatasetCheck
from .step import PrivateStep

if TYPE_CHECKING:
    from .compiled_backward import CompiledBackward

B = TypeVar("B")
M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer)


class PrivacyEngine(argument_checks.Uncopied):
    """Makes training private, and keeps account of what it spends.

    ::

        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private(model, optimizer, loader, noise_multiplier=1.1)

    Args:
        accountant: ``"pld"`` (tight, the default), ``"rdp"``, ``"gdp"`` where that is exact, or a second opinion:
            ``"prv"``, ``"dp_accounting"`` or ``"dp_accounting_rdp"``; or a `dpengine.accounting.Accountant`.
        secure_rng: Whether all randomness is cryptographic on an accelerator too: noise is then drawn on the CPU, at
            about 7 ns a parameter and step, and copied there. On the CPU it always is.
        seed: Makes noise and batches repeat, for tests. The noise is then no secret, and every statement says so.
        methods: Times of methods that another run learnt: a ``MethodTable``, or the file that its ``save`` wrote.
        ledger: A file for what is spent on one data set, by all runs that are given it: see `dpengine.ledger_file`.
            Each step is charged on disk before the weights change. None keeps the ledger in memory.
        reserve_steps: How many steps are charged on disk at once. A crash leaves those charged that were not made.

    Raises:
        ValueError: If the accountant is not known, the file holds no methods, or ``reserve_steps`` is out of range.
        TypeError: If the seed is not an integer, the ledger no path, or your accountant lacks a method.
        LedgerError: If the file of the ledger was edited, or is none.
    """

    @suggests_names
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
        accountant_used(accountant)  # raises if it is none
        if seed is not None:
            NoiseSource.seeded(seed)  # refuses what is no integer
        self.accountant: Any = accountant
        self.methods = method_table(methods)
        self._books = Books(ledger, reserve_steps, observer_of(accountant))
        self._kind = SECURE_KIND if secure_rng else DEFAULT_KIND
        self._seed = seed
        self.runs: list[Run] = []
        self._delta: float | None = None

    @suggests_names
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
        noise: BandMF | BLT | BandedInverse | None = None,
        plan: DPExecutionPlan | AbstractPlanConfig | None = None,
        sampling: str | ExternalBatches = "poisson",
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
    ) -> tuple[M, O, DataLoader[Any]]:
        """Makes training private in place; the training loop does not change.

        Exactly one of ``noise_multiplier``, ``target_epsilon`` and ``plan`` is given. What cannot be made private is
        refused with a ``PrivacyError`` that says what to do, an argument out of its range with a ``ValueError``;
        nothing has changed then.

        Args:
            module: The model, or a ``GradSampleModule``. The same object is returned; ``detach`` removes all hooks.
            optimizer: Any optimizer of ``torch.optim`` but LBFGS and SparseAdam, over the model's parameters.
            data_loader: An ordinary loader. The one returned draws Poisson batches of the same expected size.
            noise_multiplier: Standard deviation of the noise over the sensitivity. 0 trains without privacy.
            target_epsilon: What all planned steps may spend, with the runs of this engine before; the noise is found
                for it. The first run after ``load_state_dict`` resumes: the same noise, and the steps that are left.
            target_delta: The delta of the statement; None takes ``N ** -1.1``. At or above ``1 / N`` it is refused.
            epochs: Planned passes over the loader, with ``target_epsilon``.
            steps: Planned logical batches, instead of ``epochs``.
            max_grad_norm: What the L2 norm of each sample's gradient is clipped to; a list with ``"per_layer"``. None
                takes 1.0, or what the policy says.
            clipping: ``"flat"``, ``"per_layer"``, ``"automatic"``, ``"adaptive"``, or a policy.
            noise: ``BandMF(num_bands=16)``, ``BLT()`` or ``BandedInverse(num_bands=4)`` of `dpengine.noise`, for less
                error at the same cost over the planned ``epochs`` or ``steps``.
            plan: Instead of all that concerns noise, clipping and sampling: see `dpengine.plan`. ``p.grad`` is then the
                sum that the plan says, divided by its ``normalize_by``; the run ends with its iterations.
            sampling: ``"poisson"``; ``"shuffle"``, for which no epsilon is claimed; or ``ExternalBatches(...)``, if the
                loop draws its own batches: ``data_loader`` is then returned as it is, and may be any iterable.
            sample_rate: The probability of each example, as a constant. None derives it from the loader, which makes
                the number of examples public.
            expected_batch_size: The divisor of the sums, as a constant. None takes the loader's batch size.
            physical_batch_size: Most rows that reach the model at once; larger logical batches come in chunks.
            accumulation_steps: Number of chunks that every logical batch comes in.
            batch_first: Whether axis 0 of the model's inputs is the batch; else axis 1.
            loss_reduction: ``"mean"`` or ``"sum"``: what the loss does over the rows of a batch.
            privacy_unit: Whose each example is: an id for each, or a column of the data set. Then units are drawn, each
                with all of its examples, clipped as one, and protected; batch size and rate are those of units. The
                loop must leave the rows of a batch in their order.
            unit_reduction: ``"mean"`` or ``"sum"``: what a unit's gradient is of those of its examples.
            grad_sample_mode: ``"auto"``, ``"hooks"``, ``"functorch"``, ``"ew"`` or ``"ghost"``.
            unused_parameters: ``"error"``, or ``"zero"`` to give a parameter that took no part noise only.
            on_budget: ``"stop"`` ends the loader before the target is passed, ``"raise"`` raises, ``"warn"`` warns.
            allow_large_delta: Accepts a delta of ``1 / N`` or more.
            example_input: An example of the data set, for an empty one.
            grad_scaler: The GradScaler that scales the loss. Its scale stays as it is from here on.
            lr_scheduler: A scheduler that shall not count steps that only accumulated.

        Returns:
            The same model, the same optimizer, and the private loader.
        """
        choices = {"grad_sample_mode": grad_sample_mode, "unused_parameters": unused_parameters, "on_budget": on_budget}
        argument_checks.refuse_unknown_choices(**choices, loss_reduction=loss_reduction, unit_reduction=unit_reduction)
        argument_checks.refuse_other_than_bool(batch_first=batch_first, allow_large_delta=allow_large_delta)
        argument_checks.admit(module, optimizer, grad_scaler, lr_scheduler)
        topology, inner = topology_and_model(module, batch_first=batch_first, loss_reduction=loss_reduction)
        of_loader = {"privacy_unit": privacy_unit, "sample_rate": sample_rate, "example_input": example_input}
        of_loader |= {"physical_batch_size": physical_batch_size, "expected_batch_size": expected_batch_size}
        external = argument_checks.is_external(sampling, data_loader, topology, accumulation_steps, **of_loader)
        units, num_units, unit = argument_checks.units_for(privacy_unit, data_loader, grad_sample_mode)
        asked = asked_for(plan, target_epsilon=target_epsilon, delta=target_delta, epochs=epochs, steps=steps)
        spent, resumed = self._books.open(topology.everyone, asked, first=not self.runs)
        length = (target_epsilon, target_delta, epochs, steps)
        budget_config = BudgetConfig(*length, on_budget, allow_large_delta, self.accountant, spent, resumed)
        sampling_config = SamplingConfig(sampling, sample_rate, expected_batch_size, num_units)
        constants, name = (noise_multiplier, noise, plan, clipping, max_grad_norm), name_for(topology)
        request = PlanRequest(*constants, budget_config, sampling_config, name)
        run_plan, budget = build_plan(inner, data_loader, request)
        layout: dict[str, Any] = {"batch_first": batch_first, "loss_reduction": loss_reduction, "topology": topology}
        layout |= {"grad_sample_mode": grad_sample_mode, "methods": self.methods}
        parts: dict[str, Any] = {"batches": BatchState(external=external), "budget": budget, "grad_scaler": grad_scaler}
        parts |= {"unused_parameters": unused_parameters, "unit_reduction": unit_reduction}
        parts["dataset_check"] = SharedDatasetCheck(getattr(data_loader, "dataset", None), self._books.totals)
        source, ledger = self._new_source(topology), self._books.of_run(run_plan.run, topology.everyone)
        step = PrivateStep(run_plan, partial(PassClipper, inner, run_plan.clipping, **layout), source, ledger, **parts)
        run = Run(module, optimizer, step, grad_scaler, lr_scheduler, units, unit)
        chunks = (physical_batch_size, accumulation_steps)
        loader = data_loader if external else run.loader(data_loader, *chunks, batch_first, example_input)
        self._enter(run, asked, chunks)
        return module, optimizer, loader

    def _new_source(self, topology: Topology) -> NoiseSource:
        return source_for(topology, self._kind, self._seed, run=len(self.runs))

    def _enter(self, run: Run, asked: Mapping[str, Any], chunks: tuple[int | None, int]) -> None:
        unit_of(origins_of(self, run))  # raises if there are several
        argument_checks.tell_of_plan(run.step.plan)
        refuse_disagreement(run, *chunks)
        self._books.begin(run.step.ledger, about_run(run), asked=asked, noise=noise_of(run))
        if not run.attached:
            run.attach()  # the first change to anything of the user's: all that may be refused was refused
        self.runs.append(run)
        self._delta = run.budget.delta

    @suggests_names
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
        """Calls ``make_private``, whose arguments these are, with noise calibrated to a target epsilon and delta."""
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

    @suggests_names
    def backward(self, loss_per_example: Tensor) -> None:
        """The backward pass of a loss that is not reduced yet: ``loss_reduction`` over rows, and nothing else.

        Args:
            loss_per_example: ``(B,)``, a loss for each row of the batch, as ``reduction="none"`` gives it. Another
                shape is a ``BatchDependentLossError``, another number of rows a ``BatchMismatchError``.
        """
        self._last_run().backward(loss_per_example)

    @suggests_names
    def compile_backward(
        self,
        loss_fn: Callable[..., Tensor],
        *,
        multiple_of: int | None = None,
        backend: str | Callable[..., Any] = "inductor",
    ) -> CompiledBackward:
        """Compiles forward, loss and clipped backward pass into one graph: ``loss = backward(inputs, targets)``.

        Args:
            loss_fn: The loss of a batch, ``lambda x, y: criterion(model(x), y)``. What it reads besides its arguments,
                the model and torch's random numbers is fixed when it is traced.
            multiple_of: Batches are padded to a multiple of this, since each size is compiled; None takes the root of
                the expected batch size.
            backend: Of ``torch.compile``, by name or as a function.

        Returns:
            What takes the place of ``loss.backward()`` in the loop; see `dpengine.engine.CompiledBackward`.
        """
        return self._last_run().compile_backward(loss_fn, multiple_of, backend)

    @suggests_names
    def get_epsilon(self, delta: float) -> float:
        """Epsilon spent so far at a delta in (0, 1), an upper bound; AccountingRefusedError where none is claimed."""
        return epsilon_of(self.ledger.totals, delta, accountant=self.accountant, relation=self._relation)

    @property
    def epsilon(self) -> float:
        """Epsilon spent so far at the configured delta."""
        return self.get_epsilon(self.delta)

    @property
    def ledger(self) -> Ledger:
        """All that was charged: by this engine, and by every run that its ledger file knows of."""
        return self._books.ledger

    @property
    def delta(self) -> float:
        """The delta of the last ``make_private``."""
        if self._delta is None:
            raise InvalidBudgetError("No delta is configured yet.", fix="Call make_private, or get_epsilon(delta=...).")
        return self._delta

    @property
    def spent(self) -> PrivacySpent:
        """Epsilon, delta, mu, advantage and steps."""
        return privacy_spent(self.ledger.history, self.delta, accountant=self.accountant, relation=self._relation)

    @property
    def _relation(self) -> Relation:
        return relation_of(origins_of(self))

    @suggests_names
    def metrics(self, *, nonprivate: bool = False) -> dict[str, float]:
        """Numbers by name for loggers; with ``nonprivate`` also, under that name, some that must not be published."""
        return metrics_of_run(self._last_run(), self.ledger, self.delta, self.get_epsilon, nonprivate=nonprivate)

    @suggests_names
    def progress(self, loader: Iterable[B], *, total: int | None = None) -> Iterator[B]:
        """Iterates over a loader with a progress bar that shows epsilon; see `dpengine.engine.progress`."""
        target = self._last_run().budget.target_epsilon
        return progress(self, loader, target_epsilon=target, total=total)

    @suggests_names
    def report(
        self,
        *,
        data: Mapping[str, Any] | None = None,
        utility: Mapping[str, Any] | None = None,
        excludes: Sequence[str] = (),
    ) -> PrivacyReport:
        """The report of what was spent so far: ``print`` states it, ``save(directory)`` writes its files.

        An unknown key of an argument is a ``ValueError``, what has another type a ``TypeError``.

        Args:
            data: ``name``, ``source``, ``licence``, ``sha256`` of the data, as far as they shall be known.
            utility: ``metric``, ``value`` and ``split`` of a score. The guarantee does not cover it, and says so.
            excludes: Sentences on what else the guarantee does not cover.

        Returns:
            The report, with the plan of the last run, and the charges of all; what it states holds for all runs.
        """
        refuse_unknown_facts(data, utility, excludes)
        return report_of_run(self._last_run(), self.ledger, origins_of(self), data, utility, excludes)

    @suggests_names
    def describe(self) -> dict[str, Any]:
        """What the last run does: sampling, clipping, standard deviations, relation, steps charged and planned."""
        return self._last_run().describe()

    @suggests_names
    def explain(self) -> str:
        """A table, one row a parameter: how its norm and sum were formed in the last pass, why, and what that costs."""
        return explain(self._last_run().step.passes.mode.choices)

    @suggests_names
    def state_dict(self) -> dict[str, Any]:
        """Returns all charges, and what is known of their runs, as JSON values; with a ledger file also its length."""
        state: dict[str, Any] = {"accountant": name_of(self.accountant), "delta": self._delta}
        state |= {"ledger": self.ledger.state_dict(), "origins": states_of(origins_of(self))}
        return state | ({} if self._books.anchor is None else {"anchor": self._books.anchor})

    @suggests_names
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adds a stored history to what was spent, unless the ledger file has it; if damaged, a ``LedgerError``."""
        argument_checks.refuse_state(state)
        origins = origins_in(state)
        unit_of({*origins_of(self), *origins})
        self._books.load(state["ledger"], state.get("anchor"), origins)
        self._delta = self._delta if self._delta is not None else state["delta"]

    @suggests_names
    def detach(self, module: nn.Module) -> None:
        """Removes all hooks from a model and its optimizer. The ledger keeps the privacy cost.

        Args:
            module: The model that ``make_private`` returned.

        Raises:
            UnknownParameterError: If the model is not private in this engine.
        """
        run = next((run for run in self.runs if run.model is module and run.attached), None)
        if run is None:
            name, fix = type(module).__name__, "Pass the model that make_private returned."
            raise UnknownParameterError(f"The model ({name}) is not private in this engine.", fix=fix)
        run.detach()

    def _last_run(self) -> Run:
        if not self.runs:
            raise InvalidBudgetError("Nothing is private yet.", fix="Call make_private first.")
        return self.runs[-1]
