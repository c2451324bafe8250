"""Checks the arguments of ``make_private`` before anything changes, and derives values of the plan from them."""

from __future__ import annotations

import copy
import math
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from dpengine.accounting.constants import check_delta, suggested_delta
from dpengine.accounting.events import Relation
from dpengine.accounting.ledger import Charge
from dpengine.accounting.noise_calibration import calibration
from dpengine.accounting.own_accountant import Accountant
from dpengine.clipping.policy import AbstractClip
from dpengine.clipping.short_forms import clipping_from
from dpengine.distributed.topology import Topology
from dpengine.errors import (
    InvalidBudgetError,
    LedgerError,
    ParameterMismatchError,
    SamplingError,
    UnknownParameterError,
    UnsupportedLayerError,
    notice,
)
from dpengine.grad_modes.modes import MODES
from dpengine.noise.band_mf import BandMF
from dpengine.noise.correlated import Recurrence
from dpengine.plan.run_plan import RunPlan, rate_to_book
from dpengine.sampling.cyclic import CyclicPoissonStrategy, Partition
from dpengine.sampling.external import ExternalBatches
from dpengine.sampling.poisson import PoissonSampling
from dpengine.sampling.scheme import AbstractBatchStrategy
from dpengine.sampling.units import UnitIds, refuse_reordering, unit_numbers
from dpengine.validation.check_model import check

from .optimizer import parameters_of, refuse_optimizer


class Uncopied:
    """Keeps the books of private models, and so may not be copied once there are some."""

    _to_keep = "engine.state_dict()"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For copies and pickles of an engine that no model is private in; TypeError for any other."""
        if self._keeps_books():
            raise TypeError(
                f"{type(self).__name__} cannot be copied or pickled while it keeps the account of private models: the "
                "steps of each would be missing in the other, and noise would come twice. For its epsilon at this "
                f"moment keep the number, or {self._to_keep}; to go on elsewhere, save a checkpoint."
            )
        return super().__reduce_ex__(protocol)

    def _keeps_books(self) -> bool:
        return bool(getattr(self, "runs", ()))


class _Attached:
    """Models that are private now. Several threads may make models private at once."""

    def __init__(self) -> None:
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, model: nn.Module) -> None:
        with self._lock:
            self._models.add(model)

    def discard(self, model: nn.Module) -> None:
        with self._lock:
            self._models.discard(model)

    def all(self) -> list[nn.Module]:
        with self._lock:
            return list(self._models)


attached_models = _Attached()
_PASS_STATE = "Pass what engine.state_dict() returned."


def refuse_unknown(argument: str, value: str, choices: Collection[str]) -> None:
    """Refuses a name that is not in a list."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{argument}={value!r} is not known. Choose one of: {', '.join(map(repr, choices))}.")


_CHOICES = {
    "grad_sample_mode": MODES,
    "unused_parameters": ("error", "zero"),
    "on_budget": ("stop", "raise", "warn"),
    "loss_reduction": ("mean", "sum"),
    "unit_reduction": ("mean", "sum"),
}


def refuse_unknown_choices(**arguments: str) -> None:
    """Refuses names that are not in the list of their argument."""
    for argument, value in arguments.items():
        refuse_unknown(argument, value, _CHOICES[argument])


def refuse_other_than_bool(**arguments: Any) -> None:
    """Refuses an argument that is neither True nor False: ``"no"`` would count as True."""
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}; pass True or False.")


def refuse_state(state: Any) -> None:
    """Refuses what is no state of an engine. The charges in it are read, and refused, by the ledger."""
    if not isinstance(state, Mapping):
        raise LedgerError(f"The engine's state is a {type(state).__name__}.", fix=_PASS_STATE)
    for name in ("ledger", "delta"):
        if name not in state:
            raise LedgerError(f"The engine's state has no {name!r}; it has {list(state)}.", fix=_PASS_STATE)
    ledger, delta = state["ledger"], state["delta"]
    if not isinstance(ledger, Mapping):
        raise LedgerError(f"The engine's state has a {type(ledger).__name__} as its 'ledger'.", fix=_PASS_STATE)
    if delta is not None and not (isinstance(delta, float) and 0 < delta < 1):
        raise LedgerError(f"The engine's state has delta={delta!r}, which is not in (0, 1).", fix=_PASS_STATE)


def delta_for(given: float | None, num_examples: int, allow_large: bool) -> float:
    """The delta given, checked, or the one suggested for so many examples."""
    if given is None and num_examples == 0:
        raise InvalidBudgetError(
            "target_delta is not given, and no number of examples is known from which it could follow.",
            fix="Pass target_delta=1e-6, below one over the number of examples; or ExternalBatches(num_examples=...).",
        )
    delta = suggested_delta(num_examples) if given is None else given
    check_delta(delta, max(num_examples, 1), allow_large=allow_large)
    return delta


def planned_steps(epochs: int | None, steps: int | None, steps_per_epoch: int) -> int | None:
    """The number of logical batches that training is planned for, None if it was not said."""
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidBudgetError(f"{name}={value!r} is not a whole number of at least 1.", fix=f"Pass {name}=10.")
    if epochs is not None and steps is not None:
        raise InvalidBudgetError("epochs and steps were both given.", fix="Pass one of them.")
    return steps if epochs is None else epochs * steps_per_epoch


def noise_for(
    sigma: float | None,
    target: float | None,
    delta: float,
    strategy: AbstractBatchStrategy,
    planned: int | None,
    accountant: str | Accountant,
    spent: Sequence[Charge],
    *,
    sq_sensitivity: float | None = None,
) -> float:
    """The noise multiplier that was given, or the one that keeps the target: with what was spent and is planned."""
    if (sigma is None) == (target is None):
        given = "both were given" if sigma is not None else "neither was given"
        raise InvalidBudgetError(
            f"Exactly one of noise_multiplier and target_epsilon is needed; {given}.",
            fix="Pass noise_multiplier=1.1, or target_epsilon=3.0 with epochs=10.",
        )
    if target is None:
        return sigma  # type: ignore[return-value]
    if not strategy.claims_epsilon:
        raise InvalidBudgetError(
            f"target_epsilon={target!r} cannot be kept with sampling={strategy.law!r}: no epsilon is claimed for it.",
            fix='Pass sampling="poisson", or noise_multiplier=1.1.',
        )
    if planned is None:
        raise InvalidBudgetError("target_epsilon needs to know how long training is.", fix="Pass epochs= or steps=.")
    if sq_sensitivity is not None:  # chance earns nothing: the run is one release, of so much more sensitivity
        one = calibration(
            target_epsilon=target, target_delta=delta, sample_rate=1.0, steps=1, accountant=accountant, spent=spent
        ).noise_multiplier
        return one * math.sqrt(sq_sensitivity) * (1 + 1e-12)
    cycle = strategy.cycle_length if isinstance(strategy, CyclicPoissonStrategy) else 1
    return calibration(
        target_epsilon=target,
        target_delta=delta,
        sample_rate=rate_to_book(strategy.sample_rate),
        steps=-(-planned // cycle),
        accountant=accountant,
        spent=spent,
    ).noise_multiplier


def sampling_and_noise(
    strategy: AbstractBatchStrategy, noise: Any, planned: int | None, relation: Relation
) -> tuple[AbstractBatchStrategy, Recurrence | None]:
    """The sampling that noise with bands needs, with batches as large as before, and the noise of the planned steps."""
    if noise is None:
        return strategy, None
    if not isinstance(noise, BandMF):
        known = "BandMF(num_bands=16), BLT() or BandedInverse(num_bands=4)"
        raise TypeError(f"noise is a {type(noise).__name__}; pass noise={known}.")
    if planned is None:
        raise InvalidBudgetError("noise=BandMF(...) needs to know how long training is.", fix="Pass epochs= or steps=.")
    if not isinstance(strategy, PoissonSampling):
        raise InvalidBudgetError(
            f"noise=BandMF(...) does not go with sampling={strategy.law!r}.", fix='Pass sampling="poisson".'
        )
    bands, rate = noise.num_bands, strategy.sample_rate
    if bands * rate > 1 + 1e-12:
        raise InvalidBudgetError(
            f"{bands} bands need batches of at most 1/{bands} of the data set, and these have 1/{1 / rate:.4g} of it.",
            fix=f"Pass BandMF(num_bands={max(1, int(1 / rate))}), or a smaller batch.",
        )
    if bands > planned:
        raise InvalidBudgetError(
            f"noise=BandMF(num_bands={bands}) has more bands than the {planned:,} steps that are planned.",
            fix=f"Pass BandMF(num_bands={planned}) at most, or plan for more steps.",
        )
    sampling = CyclicPoissonStrategy(
        strategy.num_examples,
        min(1.0, bands * rate),
        bands,
        strategy.steps_per_epoch,
        strategy.expected_batch_size,
        Partition.INDEPENDENT if relation is Relation.ADD_OR_REMOVE_ONE else Partition.EQUAL_SPLIT,
    )
    return sampling, noise.recurrence(planned)


def clipping_for(module: nn.Module, value: str | AbstractClip, max_grad_norm: Any) -> AbstractClip:
    """The clipping policy that was meant, which must fit the model. A copy: it may hold a threshold that moves."""
    if max_grad_norm is None and isinstance(value, str):
        max_grad_norm = 1.0
    policy = copy.deepcopy(clipping_from(value, max_grad_norm))
    policy.group_of([name for name, p in module.named_parameters() if p.requires_grad])
    return policy


def admit(module: nn.Module, optimizer: Optimizer, grad_scaler: Any, lr_scheduler: Any) -> None:
    """Refuses a model, an optimizer or their companions that cannot be made private."""
    if grad_scaler is not None and not isinstance(grad_scaler, GradScaler):
        raise TypeError(f"grad_scaler is a {type(grad_scaler).__name__}; pass the torch.amp.GradScaler of the loop.")
    if lr_scheduler is not None and not callable(getattr(lr_scheduler, "step", None)):
        raise TypeError(f"lr_scheduler is a {type(lr_scheduler).__name__}; pass a scheduler, which has step().")
    _refuse_foreign_scheduler(lr_scheduler, optimizer)
    if isinstance(lr_scheduler, ReduceLROnPlateau):
        notice(
            "DPE012",
            "ReduceLROnPlateau follows a loss. Of the training data, that is a release which no accountant knows of: "
            "give it the loss on public data.",
            key="plateau",
        )
    _refuse_attached(module)
    refuse_optimizer(optimizer)
    check(module).raise_if_blocked()
    check_foreign_parameters(module, optimizer)
    _check_groups(module, optimizer)


def _refuse_foreign_scheduler(lr_scheduler: Any, optimizer: Any) -> None:
    """A scheduler skips when its optimizer skipped, so that must be the one that is made private."""
    if lr_scheduler is None or getattr(lr_scheduler, "optimizer", None) is optimizer:
        return
    kind = type(lr_scheduler).__name__
    if isinstance(lr_scheduler, Optimizer):
        raise TypeError(f"lr_scheduler is an optimizer ({kind}); pass a scheduler, such as StepLR(optimizer, 10).")
    raise ValueError(
        f"lr_scheduler ({kind}) belongs to another optimizer than the one given, or to none: its .optimizer is not "
        f"this {type(optimizer).__name__}. Build it over the optimizer that make_private is given."
    )


def _refuse_attached(module: nn.Module) -> None:
    """A model may be private once, in whole or in part and in whichever engine."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; pass a torch.nn.Module.")
    below = set(module.modules())
    if any(model in below or module in set(model.modules()) for model in attached_models.all()):
        raise UnknownParameterError(
            f"The model ({type(module).__name__}), or a part of it, is private already.",
            fix="Call engine.detach(model) first.",
        )


def check_foreign_parameters(module: nn.Module, optimizer: Optimizer) -> None:
    """Raises ParameterMismatchError if an optimizer holds parameters that are not in the model."""
    known = set(module.parameters())
    foreign = [p for p in parameters_of(optimizer) if p not in known]
    if foreign:
        shapes = ", ".join(str(tuple(p.shape)) for p in foreign[:3])
        raise ParameterMismatchError(
            f"{len(foreign)} optimizer parameters are not in the model (shapes {shapes}). Likely: fix, PEFT or "
            ".to(dtype) ran after the optimizer was built.",
            fix="Build the optimizer last.",
        )


def _check_groups(module: nn.Module, optimizer: Optimizer) -> None:
    """Raises if an optimizer holds a parameter twice; warns about trainable parameters that it lacks."""
    held = parameters_of(optimizer)
    held_set = set(held)
    if len(held_set) < len(held):
        raise ParameterMismatchError("A parameter is in the optimizer's groups twice.", fix="List each parameter once.")
    left = [name for name, p in module.named_parameters() if p.requires_grad and p not in held_set]
    if left:
        notice(
            "DPE003",
            f"{len(left)} trainable parameters are not in the optimizer and will not change: {left[:3]}. Norms and "
            "noise cover them all the same: freeze them, or call dpengine.engine.restrict_to_optimizer(engine).",
        )


def tell_of_plan(plan: RunPlan) -> None:
    """Says so where what follows is not private, or no epsilon is claimed for it."""
    if plan.noise_multiplier == 0:
        notice("DPE012", "NOT PRIVATE (noise_multiplier=0).", key="noise")
    if not plan.sampling.claims_epsilon and plan.claim is None:
        notice("DPE012", f"epsilon not claimed (sampling={plan.sampling.law!r}).", key="sampling")


def units_for(privacy_unit: Any, loader: Any, mode: str) -> tuple[UnitIds | None, int | None, str]:
    """The unit of each example, how many there are, and what one is called."""
    if privacy_unit is None:
        return None, None, "training example"
    if mode != "auto":
        raise UnsupportedLayerError(
            f"privacy_unit= needs grad_sample_mode='auto', got {mode!r}.", fix="Leave grad_sample_mode out."
        )
    units = unit_numbers(privacy_unit, loader.dataset)
    refuse_reordering(loader.collate_fn, loader.dataset)
    return units, int(units.max(initial=-1)) + 1, privacy_unit if isinstance(privacy_unit, str) else "user"


def is_external(sampling: Any, data: Any, topology: Topology, accumulation_steps: int, **of_loader: Any) -> bool:
    """Returns True if the loop draws its own batches. Raises for arguments that contradict that, or the data."""
    if isinstance(sampling, str):
        return False
    if not isinstance(sampling, ExternalBatches):
        raise TypeError(f"sampling={sampling!r}; pass 'poisson', 'shuffle' or dpengine.sampling.ExternalBatches(...).")
    given = [name for name, value in of_loader.items() if value is not None]
    given += ["accumulation_steps"] if accumulation_steps != 1 else []
    given += ["several processes"] if topology.everyone.size > 1 else []
    if given:
        raise SamplingError(
            f"sampling=ExternalBatches(...) does not support {given[0]}: the engine does not draw these batches.",
            fix='State the rate and the batch size in ExternalBatches(...), or pass sampling="poisson".',
        )
    found = _number_of_examples(data) if sampling.num_examples else None
    if found not in (None, sampling.num_examples):
        raise SamplingError(
            f"ExternalBatches(num_examples={sampling.num_examples}) does not fit the data, which has {found} examples.",
            fix=f"Pass num_examples={found}, or data that has every example of which you state the rate.",
        )
    return True


def _number_of_examples(data: Any) -> int | None:
    """Returns the number of examples; None where it is not certain, as for a loader that draws from a part of them."""
    if isinstance(data, DataLoader):
        whole = type(data.sampler) in (SequentialSampler, RandomSampler) and type(data.batch_sampler) is BatchSampler
        return _number_of_examples(data.dataset) if whole else None
    if isinstance(data, IterableDataset):  # its length may be a number of batches
        return None
    if isinstance(data, tuple):
        sizes = {_number_of_examples(tensor) if isinstance(tensor, Tensor) else None for tensor in data}
        return sizes.pop() if len(sizes) == 1 else None
    sized = data.dim() > 0 if isinstance(data, Tensor) else isinstance(data, Dataset) and hasattr(data, "__len__")
    return len(data) if sized else None
