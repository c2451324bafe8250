"""Private loaders that report their batches to an optimizer, also in several processes."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from dpengine.accounting.run_events import EpochParticipation
from dpengine.distributed.detect import topology_of
from dpengine.distributed.topology import SINGLE, Topology
from dpengine.engine.build_plan import source_for
from dpengine.errors import SamplingError
from dpengine.noise.keyed_streams import DEFAULT_KIND
from dpengine.noise.source import NoiseSource
from dpengine.sampling.batches import LogicalBatch
from dpengine.sampling.check import check_loader
from dpengine.sampling.loader import PrivateIteration, private_loader
from dpengine.sampling.scheme import IndexBatch, WordStream
from dpengine.sampling.shuffle import ShuffleDraws

from .optimizers.step_of import seed_of

if TYPE_CHECKING:
    from .optimizers import DPOptimizer


class Shuffled(ShuffleDraws):
    """Batches in random order, for which epsilon is claimed without amplification by the order."""

    @property
    def participation(self) -> EpochParticipation:
        """See `Draws.participation`."""
        return EpochParticipation(self.steps_per_epoch, claimed=True)


class InOrder(Shuffled):
    """Batches in the order of the data set, as ``DataLoader(shuffle=False)`` returns them."""

    name = "in order"

    def draw(self, step: int, words: WordStream) -> IndexBatch:
        """Returns the examples of one batch. See `Draws.draw`."""
        first = step % max(self.steps_per_epoch, 1) * self.batch_size
        return np.arange(first, min(first + self.batch_size, self.num_examples), dtype=np.int64)


class BatchReports:
    """Reports each physical batch of a loader to an optimizer, which exists only after the loader.

    Copies of the loader continue the same run, so they share the object.
    """

    def __init__(self) -> None:
        self._optimizer: weakref.ref[DPOptimizer] | None = None

    def report_to(self, optimizer: DPOptimizer) -> None:
        """Reports to this optimizer from now on, instead of any other. The reference is weak."""
        self._optimizer = weakref.ref(optimizer)

    def batch_returned(self, batch: LogicalBatch, chunk: int, data: Any) -> None:
        """Called when the loader returns a physical batch to the user."""
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None:
            return
        if not optimizer.has_external_batches:
            optimizer._pending_passes.batch_returned(optimizer._step, batch, chunk, data)
            return
        if chunk == 0:
            optimizer.forget_skips()
        optimizer.signal_skip_step(do_skip=chunk < len(batch.sizes) - 1)

    def may_draw(self, step: int) -> bool:
        """Returns True, because runs with the interface of Opacus have no last step."""
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchReports:
        return self


def reporting_loader(loader: DataLoader[Any], topology: Topology, **options: Any) -> DataLoader[Any]:
    """Returns the private form of a loader, for `report_to`. ``options`` are those of `private_loader`."""
    reports = BatchReports()
    private = private_loader(
        loader,
        on_return=reports.batch_returned,
        may_draw=reports.may_draw,
        shard=(topology.rank, topology.ranks),
        **options,
    )
    private.__dict__["_reports"] = reports
    return private


def report_to(loader: Any, optimizer: DPOptimizer) -> None:
    """Reports the batches of a private loader to an optimizer, instead of any other."""
    reports = loader.__dict__.get("_reports")
    if reports is None:
        raise TypeError(
            "This loader reports its batches to a private optimizer of dpengine.PrivacyEngine, and cannot be used "
            "with another one. Pass a DPDataLoader or a plain DataLoader."
        )
    reports.report_to(optimizer)


def unsampled_loader(data_loader: DataLoader[Any], distributed: bool | Topology = False) -> DataLoader[Any]:
    """Returns a loader with the batches of another loader, in order or shuffled, that reports them to the engine.

    Raises SamplingError for other samplers.
    """
    topology = topology_for(distributed)
    scheme = data_loader._batches.sampling if isinstance(data_loader, PrivateIteration) else None
    whole = whole_loader(data_loader, topology)
    if isinstance(scheme, ShuffleDraws):
        if not isinstance(scheme, Shuffled):
            scheme = Shuffled(scheme.num_examples, scheme.batch_size, scheme.drop_last)
    else:
        check_loader(whole)
        batches: Any = whole.batch_sampler
        scheme_class = Shuffled if type(batches.sampler) is RandomSampler else InOrder
        scheme = scheme_class(len(whole.dataset), batches.batch_size, batches.drop_last)  # type: ignore[arg-type]
    private = reporting_loader(plain(whole), topology, sampling=scheme, words=words_for(None, topology))
    private.__dict__["sampler"] = data_loader.sampler  # because scripts call sampler.set_epoch
    return private


def whole_loader(data_loader: DataLoader[Any], topology: Topology | None = None) -> DataLoader[Any]:
    """Returns a loader of the batches of all processes for a ``DistributedSampler``; else the same loader.

    Raises SamplingError if the sampler and the given topology have different numbers of processes.
    """
    batches: Any = data_loader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    if type(batches) is not BatchSampler or type(sampler) is not DistributedSampler:
        return data_loader
    if topology is not None and sampler.num_replicas != topology.ranks:
        raise SamplingError(
            f"The loader has DistributedSampler(num_replicas={sampler.num_replicas}), but {topology.ranks} processes "
            "share the batches of this model.",
            fix="Wrap the model in DifferentiallyPrivateDistributedDataParallel or DistributedDataParallel, or pass "
            "DataLoader(dataset, batch_size=..., shuffle=True) with the batch size of all processes together.",
        )
    dataset: Any = data_loader.dataset
    order: Any = RandomSampler(dataset) if sampler.shuffle else SequentialSampler(dataset)
    size = batches.batch_size * sampler.num_replicas
    whole = copy.copy(data_loader)
    whole.__dict__.update(sampler=order, batch_size=size, batch_sampler=BatchSampler(order, size, batches.drop_last))
    return whole


def plain(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Returns a plain loader with the settings of a private one; other loaders are returned unchanged."""
    if not isinstance(loader, PrivateIteration):
        return loader
    collate = loader.collate_fn
    while hasattr(collate, "_collate") or hasattr(collate, "collate"):
        collate = getattr(collate, "_collate", None) or collate.collate  # type: ignore[union-attr]
    settings = {name: getattr(loader, name) for name in _SETTINGS}
    size = max(1, round(loader._batches.sampling.expected_batch_size))
    settings["drop_last"] = getattr(loader._batches.sampling, "drop_last", False)
    return DataLoader(loader.dataset, batch_size=size, collate_fn=collate, **settings)


_SETTINGS = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


def topology_for(distributed: bool | Topology) -> Topology:
    """Returns the processes that share batches: all for True, none for False. Raises ValueError without a group."""
    if isinstance(distributed, Topology) or not distributed:
        return distributed or SINGLE
    if not torch.distributed.is_initialized():
        raise ValueError("distributed=True, but there is no process group. Call torch.distributed.init_process_group.")
    return topology_of(torch.nn.Module())


def words_for(generator: torch.Generator | None, topology: Topology) -> Any:
    """Returns the random words of batches, which are equal on all processes that share them."""
    # Each process draws the same batch and loads its part. With different seeds, parts could overlap.
    seed = topology.everyone.broadcast(seed_of(generator))
    source: NoiseSource = source_for(topology, DEFAULT_KIND, seed, run=0)

    def words(count: int, *, step: int, block: int) -> Any:
        return source.words(count, domain="mask", step=step, block=block << 32)

    return words
