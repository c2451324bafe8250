"""Layout of a checkpoint: file names, and the objects whose state is saved."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dpengine.distributed.local_shards import local_part
from dpengine.distributed.topology import Topology
from dpengine.engine.privacy_engine import PrivacyEngine
from dpengine.engine.run import Run
from dpengine.errors import InvalidBudgetError

VERSION = 2
SECRET = "private"
MODEL, OPTIMIZER, RUN, NOISE = "model", "optimizer", "run", "noise"  # names of tensor files
PUBLIC, SEALS = "privacy_state.json", "seals.json"  # the seal of a file is its SHA-256
USE_EARLIER = "Use an earlier checkpoint."


def only_run(engine: PrivacyEngine) -> Run:
    """Returns the attached run of an engine. Raises InvalidBudgetError if there is none or more than one."""
    runs = [run for run in engine.runs if run.attached]
    if len(runs) != 1:
        raise InvalidBudgetError(
            f"A checkpoint contains one run, but this engine has {len(runs)}.",
            fix="Call make_private first." if not runs else "Detach the other runs, or use one engine for each.",
        )
    return runs[0]


def stateful_objects(run: Run) -> dict[str, Any]:
    """Returns the objects other than the model whose state is saved, the optimizer first."""
    objects = {"optimizer": run.optimizer, "lr_scheduler": run.lr_scheduler, "grad_scaler": run.grad_scaler}
    return {name: stateful for name, stateful in objects.items() if stateful is not None}


def untied_tensors(model: nn.Module, topology: Topology) -> dict[str, Tensor]:
    """Returns each tensor of a model once, by its first name, because readers reject tensors that share memory."""
    weights: dict[str, Any] = model.state_dict()
    others = [name for name, tensor in weights.items() if not isinstance(tensor, Tensor)]
    if others:
        raise TypeError(f"checkpoint: {others[0]!r} in the model's state is not a tensor. Remove get_extra_state.")
    registered: dict[str, object] = {
        f"{prefix}.{name}" if prefix else name: id(topology.registered(owner, name, current))
        for prefix, owner in model.named_modules(remove_duplicate=False)
        for name, current in owner._parameters.items()
        if current is not None
    }
    first: dict[object, str] = {}
    for name, tensor in weights.items():
        first.setdefault(_memory(local_part(tensor)) or registered.get(name) or name, name)
    return {name: weights[name] for name in first.values()}


def _memory(tensor: Any) -> tuple[Any, ...]:
    """Returns a key that is equal for tensors with the same memory; empty for an empty tensor."""
    if not tensor.numel():
        return ()
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
