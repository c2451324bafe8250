"""Which loaders can be made private: those that give every example one known chance."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dpengine.errors import SamplingError

from .batches import PrivateBatchSampler

_PLAIN_LOADER = "Pass DataLoader(dataset, batch_size=..., shuffle=True)."

_WHY_REFUSED = {
    WeightedRandomSampler: (
        "gives rows unequal chances; the accounting needs equal ones.",
        "Weight the loss instead; batches that are not drawn by Poisson sampling need a plain loader too. "
        + _PLAIN_LOADER,
    ),
    SubsetRandomSampler: (
        "draws from a part of the rows, so batch_size / len(dataset) is not its rate.",
        "Pass DataLoader(torch.utils.data.Subset(dataset, indices), batch_size=..., shuffle=True).",
    ),
    DistributedSampler: (
        "repeats rows so that all ranks get equally many; a repeated row counts twice.",
        f"Give every rank the whole data set, the engine takes each rank's part of one draw. {_PLAIN_LOADER} "
        "batch_size is that of all ranks together.",
    ),
}


def check_loader(loader: Any) -> None:
    """Refuses every loader whose rows do not have equal and known chances.

    Accepted are a ``DataLoader`` or a subclass, over a map-style data set, with ``batch_size`` set and either order of
    PyTorch's own: sequential, or a random permutation of all rows.
    """
    if not isinstance(loader, DataLoader):
        raise SamplingError(f"{_name(loader)} is not a torch DataLoader.", fix=_PLAIN_LOADER)
    if isinstance(loader.dataset, IterableDataset):
        raise SamplingError(
            f"{_name(loader.dataset)} is an IterableDataset: rows without an index cannot be drawn with equal chances.",
            fix="Pass a map-style data set, such as DataLoader(list(dataset), batch_size=..., shuffle=True), "
            "or a class with __len__ and __getitem__ over the stored rows.",
        )
    if loader.batch_sampler is None:
        raise SamplingError(f"{_name(loader)} has batch_size=None, so it yields no batches.", fix=_PLAIN_LOADER)
    if isinstance(loader.batch_sampler, PrivateBatchSampler):
        raise SamplingError(
            f"{_name(loader)} is private already: its batches are those of the model that it was made for.",
            fix="Pass the plain loader that it was made from; each private model gets a private loader of its own.",
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise SamplingError(
            f"batch_sampler={_name(loader.batch_sampler)} has a law of its own; the accounting needs equal chances.",
            fix=_PLAIN_LOADER,
        )
    _check_sampler(loader.batch_sampler.sampler, loader.dataset)


def _check_sampler(sampler: Any, dataset: Any) -> None:
    for kind, (why, fix) in _WHY_REFUSED.items():
        if isinstance(sampler, kind):
            raise SamplingError(f"{_name(sampler)} {why}", fix=fix)
    # A subclass may have changed the order, so only the exact types are known.
    if type(sampler) not in (SequentialSampler, RandomSampler):
        raise SamplingError(
            f"sampler={_name(sampler)} has a law of its own; the accounting needs equal chances.",
            fix=_PLAIN_LOADER,
        )
    rows = _rows(dataset)
    if type(sampler) is RandomSampler and sampler.replacement:
        raise SamplingError(
            "RandomSampler(replacement=True) may give one row twice in a batch; it would count twice.",
            fix=_PLAIN_LOADER,
        )
    if len(sampler) != rows or _rows(sampler.data_source) != rows:
        raise SamplingError(
            f"{_name(sampler)} draws {len(sampler)} rows of a data set of {rows}, at a rate that is not "
            "batch_size / len(dataset).",
            fix=_PLAIN_LOADER,
        )


def _rows(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise SamplingError(
            f"{_name(dataset)} has no length, so the chance of a row is not known.", fix="Give it a __len__."
        ) from None


def _name(thing: Any) -> str:
    return type(thing).__name__
