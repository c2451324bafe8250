"""Models sharded by ``torch.distributed.fsdp.fully_shard``, on a mesh of one or two axes."""

from __future__ import annotations

from typing import Any

from torch import nn

from dpengine.errors import UnsupportedLayerError

from .local_shards import dtensor_layout
from .ranks import SINGLE_PROCESS, Ranks, world
from .topology import Slot, Topology


def fully_sharded(model: nn.Module) -> Topology | None:
    """Returns the topology of a model with ``fully_shard``; None for other models."""
    sharded = [group for module in model.modules() for group in _groups_of(module)]
    parts = [part for group in sharded for part in group.fsdp_params]
    if not parts:
        return None
    infos = {(id(part.mesh_info.mesh), type(part.mesh_info).__name__): part.mesh_info for part in parts}
    if len({_processes_of(info) for info in infos.values()}) > 1:
        raise UnsupportedLayerError(
            "Parts of the model are sharded over different meshes.", fix="Pass the same mesh to every fully_shard call."
        )
    slots = {slot: part.sharded_param for part in parts for slot in _slots_of(part)}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and (module, name) not in slots and parameter.requires_grad:
                raise UnsupportedLayerError(
                    f"Parameter '{prefix}.{name}' is not sharded, but others are. Its gradient would not be summed "
                    "over the ranks.",
                    fix="After sharding its parts, also call fully_shard(model) on the complete model.",
                )
    info = next(iter(infos.values()))
    replicated = hasattr(info, "replicate_process_group")
    if not hasattr(info, "shard_process_group"):
        raise UnsupportedLayerError(
            f"The mesh of the model does not shard its parameters ({type(info).__name__}).",
            fix="Wrap the model in torch.nn.parallel.DistributedDataParallel instead.",
        )
    shards = Ranks.of(info.shard_process_group)
    replicas = Ranks.of(info.replicate_process_group) if replicated else SINGLE_PROCESS
    remaining = world().size - replicas.size * shards.size
    if remaining and replicated and not _is_tensor_parallel(parts, info):
        raise UnsupportedLayerError(
            f"The model is on a mesh of {replicas.size} x {shards.size} processes, but {world().size} processes run. "
            "Another model on the remaining processes would get the same noise.",
            fix="Use a mesh of all processes, or launch each run separately.",
        )
    return Topology(
        name="hybrid sharded" if replicated else "fully sharded",
        replicas=replicas,
        shards=shards,
        everyone=shards if remaining and not replicated else world(),
        slots=slots,
        group={part.sharded_param: number for number, group in enumerate(sharded) for part in group.fsdp_params}.get,
        defers=lambda: not any(getattr(group, "reduce_grads", True) for group in sharded),
        layout=dtensor_layout(data_axes=info.mesh.ndim),
    )


def _groups_of(module: nn.Module) -> list[Any]:
    """Returns the parameter groups of FSDP for a module. The parameters of a group are gathered together."""
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None  # type: ignore[operator]
    if state is None:
        return []
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.11, a module had at most one group
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def _is_tensor_parallel(parts: list[Any], info: Any) -> bool:
    """Returns True if tensor parallelism also shards the parameters. It has its own check of the mesh."""
    return any(part.sharded_param.device_mesh.ndim > info.mesh.ndim for part in parts)


def _slots_of(part: Any) -> list[Slot]:
    info = part._module_info
    tied = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *tied]


def _processes_of(info: Any) -> tuple[Any, Any]:
    return getattr(info, "shard_process_group", None), getattr(info, "replicate_process_group", None)
