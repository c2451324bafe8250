"""Checks the arguments of ``make_private`` before anything changes, and derives values of the plan from them."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from dpengine.accounting.constants import check_delta, suggested_delta
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
from dpengine.plan.run_plan import RunPlan
from dpengine.sampling.external import is_drawn_by_loop
from dpengine.sampling.scheme import checked_scheme
from dpengine.sampling.units import UnitIds, check_collate_order, unit_numbers
from dpengine.validation.check_model import check

from .optimizer import check_optimizer, parameters_of


class NotCopyable:
    """Base class of engines, which cannot be copied or pickled once they have private models."""

    _alternative = "engine.state_dict()"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Supports copies and pickles of an engine without private models; raises TypeError for any other."""
        if self._has_private_models():
            raise TypeError(
                f"{type(self).__name__} cannot be copied or pickled while it has private models: each copy would "
                "account for its own steps only, and both would draw the same noise. To keep the current epsilon, "
                f"store the number, or {self._alternative}. To continue elsewhere, save a checkpoint."
            )
        return super().__reduce_ex__(protocol)

    def _has_private_models(self) -> bool:
        return bool(getattr(self, "runs", ()))


class _AttachedRuns:
    """Thread-safe set of the runs whose models are private now."""

    def __init__(self) -> None:
        self._runs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, run: Any) -> None:
        with self._lock:
            self._runs.add(run)

    def discard(self, run: Any) -> None:
        with self._lock:
            self._runs.discard(run)

    def all(self) -> list[Any]:
        with self._lock:
            return list(self._runs)


attached_runs = _AttachedRuns()
_PASS_STATE = "Pass the result of engine.state_dict()."


def check_choice(argument: str, value: str, choices: Collection[str]) -> None:
    """Raises ValueError if the value of an argument is not one of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{argument}={value!r} is not known. Choose one of: {', '.join(map(repr, choices))}.")


_CHOICES = {
    "grad_sample_mode": MODES,
    "unused_parameters": ("error", "zero"),
    "on_budget": ("stop", "raise", "warn"),
    "loss_reduction": ("mean", "sum"),
    "unit_reduction": ("mean", "sum"),
}


def check_choices(**arguments: str) -> None:
    """Raises ValueError if the value of an argument is not one of its choices."""
    for argument, value in arguments.items():
        check_choice(argument, value, _CHOICES[argument])


def check_bools(**arguments: Any) -> None:
    """Raises TypeError if an argument is neither True nor False: ``"no"`` would count as True."""
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}; pass True or False.")


def check_state(state: Any) -> None:
    """Raises LedgerError if a value is not the state of an engine. The ledger checks the charges in it."""
    if not isinstance(state, Mapping):
        raise LedgerError(f"The engine's state is a {type(state).__name__}.", fix=_PASS_STATE)
    for name in ("ledger", "delta"):
        if name not in state:
            raise LedgerError(f"The engine's state has no {name!r}; it has {list(state)}.", fix=_PASS_STATE)
    ledger, delta = state["ledger"], state["delta"]
    if not isinstance(ledger, Mapping):
        raise LedgerError(f"'ledger' in the engine's state is a {type(ledger).__name__}.", fix=_PASS_STATE)
    if delta is not None and not (isinstance(delta, float) and 0 < delta < 1):
        raise LedgerError(f"The engine's state has delta={delta!r}, which is not in (0, 1).", fix=_PASS_STATE)


def delta_for(target_delta: float | None, num_examples: int, allow_large: bool) -> float:
    """Checks and returns the target delta; if it is None, the default delta for the number of examples."""
    if target_delta is None and num_examples == 0:
        raise InvalidBudgetError(
            "target_delta is not given, and the default delta needs the number of examples, which is not known.",
            fix="Pass target_delta=1e-6, below one over the number of examples; or ExternalBatches(num_examples=...).",
        )
    delta = suggested_delta(num_examples) if target_delta is None else target_delta
    check_delta(delta, max(num_examples, 1), allow_large, name="target_delta")
    return delta


def planned_steps(epochs: int | None, steps: int | None, steps_per_epoch: int) -> int | None:
    """Returns the number of planned logical batches; None if it was not given."""
    for name, value in (("epochs", epochs), ("steps", steps)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InvalidBudgetError(f"{name}={value!r} is not a whole number of at least 1.", fix=f"Pass {name}=10.")
    if epochs is not None and steps is not None:
        raise InvalidBudgetError("epochs and steps were both given.", fix="Pass one of them.")
    return steps if epochs is None else epochs * steps_per_epoch


def clipping_for(module: nn.Module, value: str | AbstractClip, max_grad_norm: Any) -> AbstractClip:
    """Returns the clipping policy as a copy, because a policy may have state. Raises if it does not fit the model."""
    if max_grad_norm is None and isinstance(value, str):
        max_grad_norm = 1.0
    policy = copy.deepcopy(clipping_from(value, max_grad_norm))
    policy.group_of([name for name, p in module.named_parameters() if p.requires_grad])
    return policy


def check_objects(module: nn.Module, optimizer: Optimizer, grad_scaler: Any, lr_scheduler: Any) -> None:
    """Raises if the model, optimizer, GradScaler or scheduler cannot be made private."""
    if grad_scaler is not None and not isinstance(grad_scaler, GradScaler):
        raise TypeError(f"grad_scaler is a {type(grad_scaler).__name__}; pass the torch.amp.GradScaler of the loop.")
    if lr_scheduler is not None and not callable(getattr(lr_scheduler, "step", None)):
        raise TypeError(f"lr_scheduler is a {type(lr_scheduler).__name__}; pass a scheduler, which has step().")
    _check_scheduler(lr_scheduler, optimizer)
    if isinstance(lr_scheduler, ReduceLROnPlateau):
        notice(
            "DPE012",
            "ReduceLROnPlateau depends on a loss. A loss on the training data is private, and this use of it is not "
            "accounted: pass the loss on public data.",
            key="plateau",
            of=lr_scheduler,
        )
    _check_not_attached(module)
    check_optimizer(optimizer)
    check(module).raise_if_blocked()
    check_not_shared(module)
    check_foreign_parameters(module, optimizer)
    _check_groups(module, optimizer)


def _check_scheduler(lr_scheduler: Any, optimizer: Any) -> None:
    """Raises if a scheduler belongs to another optimizer: it reads from its optimizer which steps were skipped."""
    if lr_scheduler is None or getattr(lr_scheduler, "optimizer", None) is optimizer:
        return
    kind = type(lr_scheduler).__name__
    if isinstance(lr_scheduler, Optimizer):
        raise TypeError(f"lr_scheduler is an optimizer ({kind}); pass a scheduler, such as StepLR(optimizer, 10).")
    raise ValueError(
        f"lr_scheduler ({kind}) does not belong to the optimizer passed to make_private: its .optimizer is not this "
        f"{type(optimizer).__name__}. Build the scheduler with that optimizer."
    )


def _check_not_attached(module: nn.Module) -> None:
    """Raises if a model, or a part of it, is already private in any engine."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; pass a torch.nn.Module.")
    submodules = set(module.modules())
    if any(run.model in submodules or module in set(run.model.modules()) for run in attached_runs.all()):
        raise UnknownParameterError(
            f"The model ({type(module).__name__}), or a part of it, is private already, for example because a notebook "
            "cell was run twice.",
            fix="Create model, optimizer and loader again, or call dpengine.detach(model) to continue with its "
            "weights. Keep one engine for all runs on a data set: create it in a cell of its own.",
        )


def check_not_shared(module: nn.Module) -> None:
    """Raises UnknownParameterError if parameters are in memory that other processes can write."""
    for name, p in module.named_parameters():
        if p.requires_grad and p.device.type == "cpu" and p.is_shared():
            raise UnknownParameterError(
                f"Parameter '{name}' is in shared memory, for example after model.share_memory(): other processes may "
                "change it (Hogwild), and each process would account for its own steps only.",
                fix="Train a copy in one process, model = copy.deepcopy(model), and build the optimizer from it. For "
                "several processes, wrap the copy in torch.nn.parallel.DistributedDataParallel.",
            )


def check_foreign_parameters(module: nn.Module, optimizer: Optimizer) -> None:
    """Raises ParameterMismatchError if an optimizer holds parameters that are not in the model."""
    parameters = set(module.parameters())
    foreign = [p for p in parameters_of(optimizer) if p not in parameters]
    if foreign:
        shapes = ", ".join(str(tuple(p.shape)) for p in foreign[:3])
        raise ParameterMismatchError(
            f"{len(foreign)} optimizer parameters are not in the model (shapes {shapes}). Likely cause: "
            "dpengine.fix, PEFT or .to(dtype) ran after the optimizer was built.",
            fix="Build the optimizer last. To train several networks with one optimizer, make them submodules of one "
            "module whose forward returns all outputs.",
        )


def _check_groups(module: nn.Module, optimizer: Optimizer) -> None:
    """Raises if an optimizer holds a parameter twice; warns about trainable parameters that it lacks."""
    parameters = parameters_of(optimizer)
    distinct = set(parameters)
    if len(distinct) < len(parameters):
        raise ParameterMismatchError("A parameter is in the optimizer's groups twice.", fix="List each parameter once.")
    missing = [name for name, p in module.named_parameters() if p.requires_grad and p not in distinct]
    if missing:
        notice(
            "DPE003",
            f"{len(missing)} trainable parameters are not in the optimizer, so they are not updated: {missing[:3]}. "
            "Norms and noise include them. Freeze them, or call dpengine.engine.restrict_to_optimizer(engine).",
            of=optimizer,
        )


def warn_if_not_private(plan: RunPlan, module: nn.Module) -> None:
    """Warns if the run is not private, or if no epsilon is claimed for it."""
    if plan.noise_multiplier == 0:
        notice("DPE012", "NOT PRIVATE (noise_multiplier=0).", key="noise", of=module)
    if not plan.claims_epsilon:
        notice("DPE012", f"epsilon not claimed (sampling={plan.sampling.name!r}).", key="sampling", of=module)


def units_for(privacy_unit: Any, loader: Any, mode: str) -> tuple[UnitIds | None, int | None, str]:
    """Returns the privacy unit of each example, the number of units, and the name of a unit."""
    if privacy_unit is None:
        return None, None, "training example"
    if mode != "auto":
        raise UnsupportedLayerError(
            f"privacy_unit= needs grad_sample_mode='auto', got {mode!r}.", fix="Leave grad_sample_mode out."
        )
    units = unit_numbers(privacy_unit, loader.dataset)
    check_collate_order(loader.collate_fn, loader.dataset)
    return units, int(units.max(initial=-1)) + 1, privacy_unit if isinstance(privacy_unit, str) else "user"


def is_external(sampling: Any, data: Any, topology: Topology, accumulation_steps: int, **loader_options: Any) -> bool:
    """Returns True if the loop draws its own batches. Raises if arguments or the data contradict that."""
    if isinstance(sampling, str):
        return False
    if not is_drawn_by_loop(sampling):
        if isinstance(sampling, type) or not (hasattr(sampling, "over") or hasattr(sampling, "participation")):
            choices = "'poisson', 'shuffle', a sampling scheme, or dpengine.sampling.ExternalBatches(...)"
            raise TypeError(f"sampling={sampling!r}; pass {choices}.")
        checked_scheme("sampling", sampling)
        return False
    unsupported = [name for name, value in loader_options.items() if value is not None]
    unsupported += ["accumulation_steps"] if accumulation_steps != 1 else []
    unsupported += ["several processes"] if topology.everyone.size > 1 else []
    if unsupported:
        raise SamplingError(
            f"sampling=ExternalBatches(...) does not support {unsupported[0]}: the engine does not draw these batches.",
            fix='State the rate and the batch size in ExternalBatches(...), or pass sampling="poisson".',
        )
    size = _number_of_examples(data) if sampling.num_examples else None
    if size not in (None, sampling.num_examples):
        raise SamplingError(
            f"ExternalBatches(num_examples={sampling.num_examples}) does not fit the data, which has {size} examples.",
            fix=f"Pass num_examples={size}, or data with all examples to which the sampling rate applies.",
        )
    return True


def _number_of_examples(data: Any) -> int | None:
    """Returns the number of examples; None if it is unknown, for example for a loader that samples from a subset."""
    if isinstance(data, DataLoader):
        complete = type(data.sampler) in (SequentialSampler, RandomSampler) and type(data.batch_sampler) is BatchSampler
        return _number_of_examples(data.dataset) if complete else None
    if isinstance(data, IterableDataset):  # its length may count batches
        return None
    if isinstance(data, tuple):
        sizes = {_number_of_examples(tensor) if isinstance(tensor, Tensor) else None for tensor in data}
        return sizes.pop() if len(sizes) == 1 else None
    sized = data.dim() > 0 if isinstance(data, Tensor) else isinstance(data, Dataset) and hasattr(data, "__len__")
    return len(data) if sized else None
