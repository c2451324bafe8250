"""Checks that a loader can be made private: each example must have the same known sampling rate."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
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
            fix="Pass the plain loader from which it was created, or create it again, as in a notebook cell that was "
            "run twice; each private model needs its own private loader.",
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


def check_repeats(dataset: Any) -> None:
    """Raises SamplingError if a data set has an example more than once.

    Finds repeated indices of ``torch.utils.data.Subset``, and data sets that overlap in a ``ConcatDataset``, at any
    depth. Equal values in other data sets cannot be told from different examples.
    """
    if type(dataset) not in (Subset, ConcatDataset):
        return
    taken: dict[int, tuple[Any, list[np.ndarray | None]]] = {}  # by the id of a data set, which ``dataset`` keeps alive
    for part, indices in examples_of(dataset):
        taken.setdefault(id(part), (part, []))[1].append(indices)
    for part, every in taken.values():
        if len(every) == 1 and every[0] is None:
            continue
        listed = [np.arange(_rows(part)) if one is None else one for one in every]
        found, counts = np.unique(np.concatenate(listed), return_counts=True)
        if len(counts) and counts.max() > 1:
            most = int(counts.argmax())
            raise SamplingError(
                f"Example {found[most]} of {_name(part)} is in the data set {counts[most]} times, and "
                f"{(counts > 1).sum()} of {len(counts)} examples are repeated. Each copy is sampled and clipped by "
                "itself, so the privacy loss of an example is larger than stated.",
                fix="Take each example once, as by Subset(dataset, sorted(set(indices))), or pass to make_private: "
                "privacy_unit=dpengine.sampling.example_numbers(loader.dataset)",
            )


def example_numbers(dataset: Any) -> npt.NDArray[np.int64]:
    """Returns a number for each example, the same for all copies of an example, as ``privacy_unit=`` of make_private.

    Args:
        dataset: A map-style data set. Copies are those of ``torch.utils.data.Subset`` and ``ConcatDataset``.

    Returns:
        The numbers, ``(N,)``.
    """
    return _numbers(dataset, {})


def _numbers(dataset: Any, starts: dict[int, int]) -> npt.NDArray[np.int64]:
    if type(dataset) is Subset:
        return _numbers(dataset.dataset, starts)[np.asarray(dataset.indices, dtype=np.int64)]
    if type(dataset) is ConcatDataset:
        return np.concatenate([_numbers(part, starts) for part in dataset.datasets])
    rows = _rows(dataset)
    start = starts.setdefault(id(dataset), starts.get(0, 0))
    starts[0] = max(starts.get(0, 0), start + rows)  # 0 is no id
    return np.arange(start, start + rows)


def overlap(some: np.ndarray | None, others: np.ndarray | None) -> bool:
    """Returns True if two selections of one data set have an example in common. None stands for all examples."""
    if some is None or others is None:
        return True
    return bool(np.isin(some, others).any())


def examples_of(dataset: Any, chosen: np.ndarray | None = None) -> list[tuple[Any, np.ndarray | None]]:
    """Returns the data sets that a data set contains, and the indices that it uses; None for each index once."""
    if type(dataset) is Subset:
        try:
            own = np.asarray(dataset.indices)
        except (TypeError, ValueError):  # a tensor on a GPU
            own = np.empty(0, dtype=object)
        if own.ndim == 1 and own.dtype.kind in "iu":  # else keys
            return examples_of(dataset.dataset, own if chosen is None else own[chosen])
    if type(dataset) is ConcatDataset:
        if chosen is None:
            return [one for part in dataset.datasets for one in examples_of(part)]
        ends, found = dataset.cumulative_sizes, []
        chosen = np.where(chosen < 0, chosen + ends[-1], chosen)
        for part, start, end in zip(dataset.datasets, [0, *ends], ends, strict=False):
            found += examples_of(part, chosen[(start <= chosen) & (chosen < end)] - start)
        return found
    if chosen is not None and (chosen < 0).any():
        chosen = np.where(chosen < 0, chosen + _rows(dataset), chosen)
    return [(dataset, chosen)]


def _rows(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise SamplingError(
            f"{_name(dataset)} has no length, so the sampling rate is not known.", fix="Implement __len__."
        ) from None


def _name(thing: Any) -> str:
    return type(thing).__name__
