"""Builds the plan of a run from the arguments of ``make_private``: single values, or an execution plan."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from dpengine.accounting.events import MatrixGaussianEvent, Relation, UnclaimedEvent
from dpengine.accounting.ledger import Charge
from dpengine.accounting.own_accountant import Accountant
from dpengine.batch_selection.fixed_size import FixedSizeStrategy
from dpengine.clipping.policy import AbstractClip
from dpengine.distributed.topology import Topology
from dpengine.errors import InvalidBudgetError
from dpengine.noise.band_mf import BandMF
from dpengine.noise.short_forms import BLT, BandedInverse
from dpengine.noise.source import NoiseSource
from dpengine.plan.config import AbstractPlanConfig
from dpengine.plan.execution_plan import DPExecutionPlan
from dpengine.plan.long_noise import BandedInverseConfig, BLTConfig
from dpengine.plan.run_plan import RunPlan
from dpengine.sampling.choose_scheme import strategy_for
from dpengine.sampling.cyclic import CyclicPoissonStrategy
from dpengine.sampling.external import ExternalBatches
from dpengine.sampling.poisson import PoissonSampling
from dpengine.sampling.scheme import AbstractBatchStrategy
from dpengine.sampling.subset import TruncatedStrategy

from .argument_checks import clipping_for, delta_for, noise_for, planned_steps, sampling_and_noise
from .budget import Budget

_PlannedScheme = CyclicPoissonStrategy | TruncatedStrategy | FixedSizeStrategy
_BATCH_SIZE_TOLERANCE = 0.02  # relative difference of the batch sizes of the plan and the loader


@dataclasses.dataclass(frozen=True)
class BudgetConfig:
    """Arguments of ``make_private`` for the privacy budget and the length of training.

    Attributes:
        prior_charges: Charges of earlier runs, which count against the budget.
        steps_taken: Number of steps of the plan taken before the state was loaded.
    """

    target_epsilon: float | None
    target_delta: float | None
    epochs: int | None
    steps: int | None
    on_budget: str
    allow_large_delta: bool
    accountant: str | Accountant
    prior_charges: Sequence[Charge]
    steps_taken: int


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """Arguments of ``make_private`` for the sampling of batches."""

    sampling: str | ExternalBatches
    sample_rate: float | None
    expected_batch_size: float | None
    num_units: int | None


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """Arguments of ``make_private`` from which a plan is built.

    Attributes:
        run: Unique name of the run.
    """

    noise_multiplier: float | None
    noise: BandMF | BLT | BandedInverse | None
    plan: Any
    clipping: str | AbstractClip
    max_grad_norm: Any
    budget_config: BudgetConfig
    sampling_config: SamplingConfig
    run: str


def build_plan(module: nn.Module, loader: DataLoader[Any], request: PlanRequest) -> tuple[RunPlan, Budget]:
    """Returns the plan and the budget of a run."""
    return (
        _plan_from_values(module, loader, request)
        if request.plan is None
        else _plan_from_config(module, loader, request)
    )


def name_for(topology: Topology) -> str:
    """Returns a unique name for a run, the same on all of its processes."""
    return str(topology.everyone.broadcast(secrets.token_hex(8)))


def source_for(topology: Topology, kind: str, seed: int | None, *, run: int) -> NoiseSource:
    """Returns the source of private randomness of a run, the same on all of its processes.

    With a seed, ``run`` is the noise nonce, so that two runs of an engine never use the same noise.
    """
    if seed is not None:
        return NoiseSource.seeded(seed, kind, nonce=run)
    return NoiseSource.from_secret_state(topology.everyone.broadcast(NoiseSource.fresh(kind).secret_state()))


def _plan_from_values(module: nn.Module, loader: DataLoader[Any], request: PlanRequest) -> tuple[RunPlan, Budget]:
    budget_config, sampling_config = request.budget_config, request.sampling_config
    strategy: AbstractBatchStrategy
    if isinstance(sampling_config.sampling, str):
        strategy = strategy_for(
            loader,
            sampling=sampling_config.sampling,
            sample_rate=sampling_config.sample_rate,
            expected_batch_size=sampling_config.expected_batch_size,
            num_units=sampling_config.num_units,
        )
    else:
        strategy = sampling_config.sampling
    policy = clipping_for(module, request.clipping, request.max_grad_norm)
    delta = delta_for(budget_config.target_delta, strategy.num_examples, budget_config.allow_large_delta)
    if isinstance(request.noise, (BLT, BandedInverse)):
        strategy = _split_into_groups(strategy, request)
    planned = planned_steps(budget_config.epochs, budget_config.steps, strategy.steps_per_epoch)
    constants = None not in (
        sampling_config.sample_rate,
        sampling_config.expected_batch_size,
        budget_config.target_delta,
    )
    relation = Relation.ADD_OR_REMOVE_ONE if constants else Relation.ZERO_OUT
    if isinstance(request.noise, (BLT, BandedInverse)):
        plan = _cyclic_plan(request, request.noise, strategy, policy, delta, planned, relation)
        return plan, _budget(budget_config, budget_config.target_epsilon, delta, planned)
    strategy, recurrence = sampling_and_noise(strategy, request.noise, planned, relation)
    sigma = noise_for(
        request.noise_multiplier,
        budget_config.target_epsilon,
        delta,
        strategy,
        planned,
        budget_config.accountant,
        budget_config.prior_charges,
    )
    plan = RunPlan(strategy, policy, sigma, strategy.expected_batch_size, relation, recurrence, run=request.run)
    return plan, _budget(budget_config, budget_config.target_epsilon, delta, planned)


def _budget(budget_config: BudgetConfig, target: float | None, delta: float, planned: int | None) -> Budget:
    # A custom accountant may rate the events of the run differently from those of the calibration: check every step.
    fits, accountant = isinstance(budget_config.accountant, str), budget_config.accountant
    return Budget(target, delta, planned, budget_config.on_budget, accountant, fits_plan=fits)


def _split_into_groups(strategy: AbstractBatchStrategy, request: PlanRequest) -> AbstractBatchStrategy:
    """Returns the scheme with one step per epoch for each group of examples.

    Raises InvalidBudgetError if groups of about one batch each do not divide the data set.
    """
    if not isinstance(strategy, PoissonSampling):
        raise InvalidBudgetError(
            f"noise={type(request.noise).__name__}(...) does not support sampling={strategy.law!r}.",
            fix='Pass sampling="poisson".',
        )
    rows, rate = strategy.num_examples, strategy.sample_rate
    groups = max(1, round(1 / rate))
    if abs(rows / groups - rate * rows) > max(1.0, _BATCH_SIZE_TOLERANCE * rate * rows):
        raise InvalidBudgetError(
            f"noise={type(request.noise).__name__}(...) splits the {rows:,} examples into groups of one batch each. "
            f"Batches of {rate * rows:g} do not divide them: {groups} groups would have {rows / groups:.4g} each.",
            fix=f"Pass a loader with batch_size={math.ceil(rows / groups)} or {math.ceil(rows / (groups + 1))}.",
        )
    return dataclasses.replace(strategy, steps_per_epoch=groups)


def _cyclic_plan(
    request: PlanRequest,
    noise: BLT | BandedInverse,
    strategy: AbstractBatchStrategy,
    policy: AbstractClip,
    delta: float,
    planned: int | None,
    relation: Relation,
) -> RunPlan:
    """Returns the plan of a run with cyclic batches and noise correlated across all steps."""
    name, budget_config = type(noise).__name__, request.budget_config
    if planned is None:
        raise InvalidBudgetError(f"noise={name}(...) needs the length of training.", fix="Pass epochs= or steps=.")
    public = relation is not Relation.ADD_OR_REMOVE_ONE
    shared: dict[str, Any] = {
        "iterations": planned,
        "cycle_length": strategy.steps_per_epoch,
        "num_examples": strategy.num_examples if public else None,
    }
    config: AbstractPlanConfig
    if isinstance(noise, BLT):
        config = BLTConfig.default(num_buffers=noise.num_buffers, **shared)
    else:
        config = BandedInverseConfig.default(num_bands=noise.num_bands, **shared)
    cyclic = config.selection.over(strategy.num_examples)
    assert isinstance(cyclic, CyclicPoissonStrategy)
    if request.sampling_config.expected_batch_size is not None:  # keep the declared constant
        cyclic = dataclasses.replace(cyclic, expected_batch_size=strategy.expected_batch_size)
    cyclic = dataclasses.replace(cyclic, steps_per_epoch=strategy.steps_per_epoch)
    whole_run = config.claim(1.0)
    assert isinstance(whole_run, MatrixGaussianEvent)
    sigma = noise_for(
        request.noise_multiplier,
        budget_config.target_epsilon,
        delta,
        cyclic,
        planned,
        budget_config.accountant,
        budget_config.prior_charges,
        sq_sensitivity=whole_run.sq_sensitivities[-1],
    )
    run = request.run
    divisor, claim = cyclic.expected_batch_size, config.claim(sigma, run)
    return RunPlan(cyclic, policy, sigma, divisor, relation, config.recurrence, planned, claim, run=run)


def _plan_from_config(module: nn.Module, loader: DataLoader[Any], request: PlanRequest) -> tuple[RunPlan, Budget]:
    config = _config_of(request.plan)
    _check_conflicts(request)
    units = request.sampling_config.num_units
    rows = len(loader.dataset) if units is None else units  # type: ignore[arg-type]
    selection = config.selection
    strategy = selection.over(rows)
    config.make()  # raises if it has no noise multiplier yet
    sigma = config.noise_multiplier
    assert sigma is not None
    run = request.run
    claim = config.claim(sigma, run)
    if isinstance(claim, UnclaimedEvent) or not isinstance(strategy, _PlannedScheme):
        raise InvalidBudgetError(
            f"The ledger has no privacy event for this plan: {getattr(claim, 'reason', selection.accounting)}.",
            fix="Use a plan with plain or cyclic Poisson batches, or use the parts of this plan in your own loop.",
        )
    _check_fit(config, strategy, loader, request)
    public = config.num_examples is not None
    if public:  # otherwise the length of an epoch would reveal the number of examples
        passes = math.ceil(rows / strategy.expected_batch_size)
        strategy = _with_steps_per_epoch(strategy, min(config.iterations, max(1, passes)))
    elif request.budget_config.target_delta is None:
        raise InvalidBudgetError(
            "The plan keeps the number of examples private, and the default delta would reveal it.",
            fix="Pass target_delta=, or num_examples= to the plan if that number is public.",
        )
    divisor = config.normalize_by * (config.l2_clip_norm if config.rescale_to_unit_norm else 1.0)
    policy = clipping_for(module, "flat", config.l2_clip_norm)
    budget_config = request.budget_config
    left = config.iterations - budget_config.steps_taken
    if left <= 0:
        raise InvalidBudgetError(
            f"The plan has {config.iterations:,} iterations, and the loaded state has {budget_config.steps_taken:,} "
            "steps already.",
            fix="Report now, or make a plan with more iterations.",
        )
    relation, noise = config.relation, config.recurrence
    plan = RunPlan(strategy, policy, sigma, divisor, relation, noise, left, claim, divides_always=True, run=run)
    delta = delta_for(budget_config.target_delta, rows, budget_config.allow_large_delta)
    return plan, _budget(budget_config, None, delta, config.iterations)


def _with_steps_per_epoch(strategy: _PlannedScheme, steps: int) -> _PlannedScheme:
    """Returns the scheme with another number of batches per epoch of the loader."""
    if isinstance(strategy, TruncatedStrategy):
        assert isinstance(strategy.drawn, CyclicPoissonStrategy)
        return dataclasses.replace(strategy, drawn=dataclasses.replace(strategy.drawn, steps_per_epoch=steps))
    return dataclasses.replace(strategy, steps_per_epoch=steps)


def _num_groups(strategy: _PlannedScheme) -> int:
    """Number of groups of examples that are used cyclically."""
    drawn = strategy.drawn if isinstance(strategy, TruncatedStrategy) else strategy
    return drawn.cycle_length if isinstance(drawn, CyclicPoissonStrategy) else 1


def _config_of(plan: Any) -> AbstractPlanConfig:
    config = plan.config if isinstance(plan, DPExecutionPlan) else plan
    if not isinstance(config, AbstractPlanConfig):
        raise TypeError(f"plan is a {type(plan).__name__}; pass the result of config.make(), or a calibrated config.")
    return config


def _check_conflicts(request: PlanRequest) -> None:
    """Raises if arguments are given that the plan determines."""
    given: Mapping[str, Any] = {
        "noise_multiplier": request.noise_multiplier,
        "target_epsilon": request.budget_config.target_epsilon,
        "max_grad_norm": request.max_grad_norm,
        "clipping": None if request.clipping == "flat" else request.clipping,
        "noise": request.noise,
        "sampling": None if request.sampling_config.sampling == "poisson" else request.sampling_config.sampling,
        "sample_rate": request.sampling_config.sample_rate,
        "expected_batch_size": request.sampling_config.expected_batch_size,
    }
    conflicts = [name for name, value in given.items() if value is not None]
    if conflicts:
        raise InvalidBudgetError(
            f"{', '.join(conflicts)} cannot be combined with plan=, which determines it.",
            fix="Leave it out, or pass it to the plan's config.",
        )


def _check_fit(
    config: AbstractPlanConfig, strategy: _PlannedScheme, loader: DataLoader[Any], request: PlanRequest
) -> None:
    """Raises if the plan does not match the data set, the loader's batch size or the number of steps."""
    rows = strategy.num_examples
    default = strategy_for(loader, num_units=rows)
    loader_batch_size = default.sample_rate * rows
    if config.num_examples is not None and config.num_examples != rows:
        raise InvalidBudgetError(
            f"The plan is for num_examples={config.num_examples:,}, and the data set has {rows:,} examples.",
            fix=f"Make the plan with num_examples={rows}.",
        )
    if abs(strategy.expected_batch_size - loader_batch_size) > max(1.0, _BATCH_SIZE_TOLERANCE * loader_batch_size):
        sampling_prob = min(1.0, loader_batch_size * _num_groups(strategy) / max(rows, 1))
        raise InvalidBudgetError(
            f"The plan has an expected batch size of {strategy.expected_batch_size:.4g} (sampling_prob="
            f"{strategy.sample_rate:.4g} of {rows:,} examples in {_num_groups(strategy)} groups), and the loader has "
            f"batch_size={loader_batch_size:g}.",
            fix=f"Make the plan with sampling_prob={sampling_prob:.6g}, or the loader with that batch size.",
        )
    passes = math.ceil(rows / strategy.expected_batch_size)
    planned = planned_steps(request.budget_config.epochs, request.budget_config.steps, passes)
    if planned is not None and planned != config.iterations:
        raise InvalidBudgetError(
            f"The plan has {config.iterations:,} iterations, but epochs= or steps= request {planned:,}.",
            fix="Leave out epochs= and steps=.",
        )
