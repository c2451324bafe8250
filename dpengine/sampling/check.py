"""Checks that a loader can be made private: each example must have the same known sampling rate."""

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

_UNSUPPORTED_SAMPLERS = {
    WeightedRandomSampler: (
        "samples examples with unequal probabilities; the accounting needs equal ones.",
        f"Weight the loss instead. {_PLAIN_LOADER}",
    ),
    SubsetRandomSampler: (
        "samples from a subset of the examples, so its rate is not batch_size / len(dataset).",
        "Pass DataLoader(torch.utils.data.Subset(dataset, indices), batch_size=..., shuffle=True).",
    ),
    DistributedSampler: (
        "repeats examples to give all ranks the same number; a repeated example counts twice.",
        f"Pass the complete data set on every rank; the engine splits each batch over the ranks. {_PLAIN_LOADER} "
        "batch_size is the total of all ranks.",
    ),
}


def check_loader(loader: Any) -> None:
    """Raises SamplingError for a loader whose examples do not have equal, known sampling rates.

    Accepts a ``DataLoader`` or a subclass, over a map-style data set, with ``batch_size`` set and one of PyTorch's own
    orders: sequential, or a random permutation of all examples.
    """
    if not isinstance(loader, DataLoader):
        raise SamplingError(f"{_name(loader)} is not a torch DataLoader.", fix=_PLAIN_LOADER)
    if isinstance(loader.dataset, IterableDataset):
        raise SamplingError(
            f"{_name(loader.dataset)} is an IterableDataset: examples without an index cannot be sampled uniformly.",
            fix="Pass a map-style data set, such as DataLoader(list(dataset), batch_size=..., shuffle=True), "
            "or a class with __len__ and __getitem__.",
        )
    if loader.batch_sampler is None:
        raise SamplingError(f"{_name(loader)} has batch_size=None, so it does not return batches.", fix=_PLAIN_LOADER)
    if isinstance(loader.batch_sampler, PrivateBatchSampler):
        raise SamplingError(
            f"{_name(loader)} is private already: its batches belong to the model for which it was created.",
            fix="Pass the plain loader from which it was created; each private model needs its own private loader.",
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise SamplingError(
            f"batch_sampler={_name(loader.batch_sampler)} has its own distribution; accounting needs equal rates.",
            fix=_PLAIN_LOADER,
        )
    _check_sampler(loader.batch_sampler.sampler, loader.dataset)


def _check_sampler(sampler: Any, dataset: Any) -> None:
    for kind, (why, fix) in _UNSUPPORTED_SAMPLERS.items():
        if isinstance(sampler, kind):
            raise SamplingError(f"{_name(sampler)} {why}", fix=fix)
    # Exact types only, because a subclass may change the order.
    if type(sampler) not in (SequentialSampler, RandomSampler):
        raise SamplingError(
            f"sampler={_name(sampler)} has its own distribution; accounting needs equal rates.",
            fix=_PLAIN_LOADER,
        )
    rows = _rows(dataset)
    if type(sampler) is RandomSampler and sampler.replacement:
        raise SamplingError(
            "RandomSampler(replacement=True) may return an example twice in a batch; it would count twice.",
            fix=_PLAIN_LOADER,
        )
    if len(sampler) != rows or _rows(sampler.data_source) != rows:
        raise SamplingError(
            f"{_name(sampler)} samples {len(sampler)} examples from a data set of {rows}, so its rate is not "
            "batch_size / len(dataset).",
            fix=_PLAIN_LOADER,
        )


def _rows(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise SamplingError(
            f"{_name(dataset)} has no length, so the sampling rate is not known.", fix="Implement __len__."
        ) from None


def _name(thing: Any) -> str:
    return type(thing).__name__
