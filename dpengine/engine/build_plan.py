"""Builds the plan of a run from the arguments of ``make_private``: single values or an execution plan."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from dpengine.accounting.custom_accountant import Accountant
from dpengine.accounting.events import Event
from dpengine.accounting.ledger import Charge
from dpengine.accounting.run_events import INDEPENDENT, StepParameters, event_of_step, relation_of
from dpengine.clipping.policy import AbstractClip
from dpengine.distributed.topology import Topology
from dpengine.errors import InvalidBudgetError
from dpengine.noise.band_mf import BandMF
from dpengine.noise.blt_and_banded_inverse import BLT, BandedInverse
from dpengine.noise.correlated import CorrelatedRows
from dpengine.noise.source import NoiseSource
from dpengine.plan.config import AbstractPlanConfig
from dpengine.plan.noise_of_run import BATCH_SIZE_TOLERANCE, NoiseTarget, with_correlation
from dpengine.plan.run_plan import RunPlan
from dpengine.sampling.check import check_loader
from dpengine.sampling.choose_scheme import draws_for, scheme_from
from dpengine.sampling.external import ExternalBatches, is_drawn_by_loop
from dpengine.sampling.scheme import Draws, SamplingScheme

from .argument_checks import clipping_for, delta_for, planned_steps
from .budget import Budget

Noise = BandMF | BLT | BandedInverse | CorrelatedRows
Sampling = str | SamplingScheme | ExternalBatches


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

    sampling: Sampling
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
    noise: Noise | None
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
    draws = _draws(loader, sampling_config)
    policy = clipping_for(module, request.clipping, request.max_grad_norm)
    delta = delta_for(budget_config.target_delta, draws.num_examples, budget_config.allow_large_delta)
    constants = (sampling_config.sample_rate, sampling_config.expected_batch_size, budget_config.target_delta)
    relation = relation_of(draws.participation, public_size=None in constants)
    iterations = getattr(sampling_config.sampling, "iterations", None)
    has_length = budget_config.epochs is not None or budget_config.steps is not None
    planned = partial(planned_steps, budget_config.epochs, budget_config.steps if has_length else iterations)
    noise, size = None, sampling_config.expected_batch_size
    if request.noise is not None:
        keep_draws = _checked_for_noise(request.noise, sampling_config.sampling)
        draws, noise = with_correlation(request.noise, draws, planned, relation, keep_draws=keep_draws, divisor=size)
    steps = planned(draws.steps_per_epoch)
    target = NoiseTarget(
        request.noise_multiplier,
        budget_config.target_epsilon,
        delta,
        budget_config.accountant,
        budget_config.prior_charges,
    )

    def event_of(sigma: float) -> Event:
        step = StepParameters(sigma, draws.num_examples, relation, request.run)
        return event_of_step(draws.participation, INDEPENDENT if noise is None else noise.correlation, step)

    sigma = target.solve(event_of, draws.name, steps, relation)
    iterations = noise.size if iterations is None and noise is not None else iterations
    plan = RunPlan(draws, policy, sigma, draws.expected_batch_size, relation, noise, iterations, run=request.run)
    return plan, _budget(budget_config, budget_config.target_epsilon, delta, steps)


def _draws(loader: DataLoader[Any], config: SamplingConfig) -> Draws:
    """Returns the batches of a run over the data set of a loader, or over its privacy units."""
    constants = {"sample_rate": config.sample_rate, "expected_batch_size": config.expected_batch_size}
    if isinstance(config.sampling, str):
        return draws_for(loader, sampling=config.sampling, num_units=config.num_units, **constants)
    if is_drawn_by_loop(config.sampling):  # the loader may be any object, and is not read
        return config.sampling  # type: ignore[return-value]
    conflicts = [name for name, value in constants.items() if value is not None]
    if conflicts:
        scheme = type(config.sampling).__name__
        raise InvalidBudgetError(
            f"{conflicts[0]} cannot be combined with sampling={scheme}(...), which determines it.", fix="Leave it out."
        )
    check_loader(loader)
    examples = len(loader.dataset) if config.num_units is None else config.num_units  # type: ignore[arg-type]
    return scheme_from(config.sampling).over(examples)


def _checked_for_noise(noise: Any, sampling: Any) -> bool:
    """Returns True if the user chose the sampling scheme. Raises if it does not support correlated noise."""
    name = sampling if isinstance(sampling, str) else getattr(sampling, "name", "")
    if sampling == "shuffle" or is_drawn_by_loop(sampling):
        raise InvalidBudgetError(
            f"noise={type(noise).__name__}(...) does not support sampling={name!r}.", fix='Pass sampling="poisson".'
        )
    return not isinstance(sampling, str)


def _budget(budget_config: BudgetConfig, target: float | None, delta: float, planned: int | None) -> Budget:
    # A user's accountant may not return the same value again, so every step is checked.
    fits, accountant = isinstance(budget_config.accountant, str), budget_config.accountant
    return Budget(target, delta, planned, budget_config.on_budget, accountant, fits_plan=fits)


def _plan_from_config(module: nn.Module, loader: DataLoader[Any], request: PlanRequest) -> tuple[RunPlan, Budget]:
    config = _config_of(request.plan)
    _check_conflicts(request)
    units = request.sampling_config.num_units
    examples = len(loader.dataset) if units is None else units  # type: ignore[arg-type]
    draws = config.sampling_scheme.over(examples)
    sigma = config.required_noise_multiplier()
    event = config.event(sigma, request.run)
    if not event.claimed:
        raise InvalidBudgetError(
            f"The ledger has no privacy event for this plan: {event.refusal}",
            fix="Use a plan with Poisson or cyclic Poisson batches, or use the parts of this plan in your own loop.",
        )
    _check_fit(config, draws, loader, request)
    public = config.num_examples is not None
    if not public:  # the length of an epoch would reveal the number of examples
        draws = draws.with_steps_per_epoch(config.iterations)
    if not public and request.budget_config.target_delta is None:
        raise InvalidBudgetError(
            "The plan keeps the number of examples private, and the default delta would reveal it.",
            fix="Pass target_delta=, or num_examples= to the plan if that number is public.",
        )
    divisor = config.normalize_by * (config.l2_clip_norm if config.rescale_to_unit_norm else 1.0)
    policy = clipping_for(module, *config.clipping_policy())
    budget_config = request.budget_config
    remaining = config.iterations - budget_config.steps_taken
    if remaining <= 0:
        raise InvalidBudgetError(
            f"The plan has {config.iterations:,} iterations, and the loaded state already has "
            f"{budget_config.steps_taken:,} steps.",
            fix="Report now, or create a plan with more iterations.",
        )
    relation, noise = config.relation, config.recurrence
    plan = RunPlan(draws, policy, sigma, divisor, relation, noise, remaining, from_config=True, run=request.run)
    delta = delta_for(budget_config.target_delta, examples, budget_config.allow_large_delta)
    return plan, _budget(budget_config, None, delta, config.iterations)


def _config_of(plan: Any) -> AbstractPlanConfig:
    """Returns the config of a plan, or the config itself."""
    config = getattr(plan, "config", plan)
    if not callable(getattr(config, "required_noise_multiplier", None)):
        raise TypeError(f"plan is a {type(plan).__name__}; pass the result of config.make(), or a calibrated config.")
    return config


def _check_conflicts(request: PlanRequest) -> None:
    """Raises if an argument was passed that the plan determines."""
    arguments: Mapping[str, Any] = {
        "noise_multiplier": request.noise_multiplier,
        "target_epsilon": request.budget_config.target_epsilon,
        "max_grad_norm": request.max_grad_norm,
        "clipping": None if request.clipping == "flat" else request.clipping,
        "noise": request.noise,
        "sampling": None if request.sampling_config.sampling == "poisson" else request.sampling_config.sampling,
        "sample_rate": request.sampling_config.sample_rate,
        "expected_batch_size": request.sampling_config.expected_batch_size,
    }
    conflicts = [name for name, value in arguments.items() if value is not None]
    if conflicts:
        raise InvalidBudgetError(
            f"{', '.join(conflicts)} cannot be combined with plan=, which determines it.",
            fix="Leave it out, or pass it to the plan's config.",
        )


def _check_fit(config: AbstractPlanConfig, draws: Draws, loader: DataLoader[Any], request: PlanRequest) -> None:
    """Raises if the plan does not match the data set, the loader's batch size or the number of steps."""
    examples = draws.num_examples
    default = draws_for(loader, num_units=examples)
    loader_batch_size = default.sample_rate * examples
    if config.num_examples is not None and config.num_examples != examples:
        raise InvalidBudgetError(
            f"The plan is for num_examples={config.num_examples:,}, and the data set has {examples:,} examples.",
            fix=f"Create the plan with num_examples={examples}.",
        )
    if abs(draws.expected_batch_size - loader_batch_size) > max(1.0, BATCH_SIZE_TOLERANCE * loader_batch_size):
        size, groups = draws.expected_batch_size, getattr(draws.participation, "cycle_length", 0)
        sampling_prob = min(1.0, loader_batch_size * groups / max(examples, 1))
        with_prob = f" (sampling_prob={draws.sample_rate:.4g} of {examples:,} examples in {groups} groups)"
        raise InvalidBudgetError(
            f"The plan has an expected batch size of {size:.4g}{with_prob if groups else ''}, and the loader has "
            f"batch_size={loader_batch_size:g}.",
            fix=f"Create the plan with sampling_prob={sampling_prob:.6g}, or the loader with batch_size={size:.0f}."
            if groups
            else f"Create the loader with batch_size={size:.0f}, or the plan with batches of another size.",
        )
    steps_per_epoch = math.ceil(examples / draws.expected_batch_size)
    planned = planned_steps(request.budget_config.epochs, request.budget_config.steps, steps_per_epoch)
    if planned is not None and planned != config.iterations:
        raise InvalidBudgetError(
            f"The plan has {config.iterations:,} iterations, but epochs= or steps= request {planned:,}.",
            fix="Leave out epochs= and steps=.",
        )
