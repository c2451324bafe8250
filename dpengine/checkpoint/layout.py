"""What a checkpoint is made of: the names of its files, and who keeps a state beside the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from dpengine.accounting.ledger import Ledger
from dpengine.distributed.local_shards import local_part
from dpengine.distributed.topology import Topology
from dpengine.engine.run import Run
from dpengine.errors import InvalidBudgetError

VERSION = 2
SECRET = "private"
MODEL, OPTIMIZER, RUN, NOISE = "model", "optimizer", "run", "noise"  # of tensors
PUBLIC, SEALS = "privacy_state.json", "seals.json"
EARLIER = "Take an earlier checkpoint."


class Engine(Protocol):
    """What is asked of a ``PrivacyEngine``."""

    runs: list[Run]

    @property
    def ledger(self) -> Ledger:
        """What was charged."""

    def state_dict(self) -> dict[str, Any]:
        """What was spent."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adds what was spent."""


def only_run(engine: Engine) -> Run:
    """The run of an engine that a checkpoint is of."""
    runs = [run for run in engine.runs if run.attached]
    if len(runs) != 1:
        raise InvalidBudgetError(
            f"A checkpoint is of one run, and this engine has {len(runs)}.",
            fix="Call make_private first." if not runs else "Detach the others, or use an engine for each.",
        )
    return runs[0]


def companions(run: Run) -> dict[str, Any]:
    """What keeps a state beside the model, the optimizer first."""
    found = {"optimizer": run.optimizer, "lr_scheduler": run.lr_scheduler, "grad_scaler": run.grad_scaler}
    return {name: one for name, one in found.items() if one is not None}


def without_ties(model: nn.Module, topology: Topology) -> dict[str, Tensor]:
    """Each tensor of a model once, under its first name: readers of such files refuse tensors that share memory."""
    weights: dict[str, Any] = model.state_dict()
    strange = [name for name, tensor in weights.items() if not isinstance(tensor, Tensor)]
    if strange:
        raise TypeError(f"checkpoint: {strange[0]!r} in the model's state is no tensor. Leave out get_extra_state.")
    registered: dict[str, object] = {
        f"{prefix}.{name}" if prefix else name: id(topology.registered(owner, name, present))
        for prefix, owner in model.named_modules(remove_duplicate=False)
        for name, present in owner._parameters.items()
        if present is not None
    }
    first: dict[object, str] = {}
    for name, tensor in weights.items():
        first.setdefault(_memory(local_part(tensor)) or registered.get(name) or name, name)
    return {name: weights[name] for name in first.values()}


def _memory(tensor: Any) -> tuple[Any, ...]:
    """What only tensors that share their memory have alike; nothing for an empty one."""
    if not tensor.numel():
        return ()
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
