"""Checks that a loader can be made private: all examples must have the same, known sampling rate."""

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
        "samples examples with unequal probabilities; accounting needs equal sampling rates.",
        f"Weight the loss instead. {_PLAIN_LOADER}",
    ),
    SubsetRandomSampler: (
        "samples from a subset of the examples, so the sampling rate is not batch_size / len(dataset).",
        "Pass DataLoader(torch.utils.data.Subset(dataset, indices), batch_size=..., shuffle=True).",
    ),
    DistributedSampler: (
        "repeats examples so that all ranks get the same number; a repeated example counts twice.",
        f"Pass the complete data set on every rank; the engine splits each batch over the ranks. {_PLAIN_LOADER} "
        "batch_size is the total of all ranks.",
    ),
}


def check_loader(loader: Any) -> None:
    """Raises SamplingError for a loader whose examples do not have equal, known sampling rates.

    Accepts a ``DataLoader``, or an instance of a subclass, with a map-style data set, a ``batch_size``, and an order of
    PyTorch: sequential, or a random permutation of all examples.
    """
    if not isinstance(loader, DataLoader):
        raise SamplingError(f"{_name(loader)} is not a torch DataLoader.", fix=_PLAIN_LOADER)
    if isinstance(loader.dataset, IterableDataset):
        raise SamplingError(
            f"{_name(loader.dataset)} is an IterableDataset: examples without an index cannot be sampled uniformly.",
            fix="Pass a map-style data set: DataLoader(list(dataset), batch_size=..., shuffle=True), or a class with "
            "__len__ and __getitem__.",
        )
    if loader.batch_sampler is None:
        raise SamplingError(f"{_name(loader)} has batch_size=None, so it does not return batches.", fix=_PLAIN_LOADER)
    if isinstance(loader.batch_sampler, PrivateBatchSampler):
        raise SamplingError(
            f"{_name(loader)} is private already: its batches belong to the model for which it was created.",
            fix="Pass the plain loader from which it was created, or create it again, for example if a notebook cell "
            "was run twice. Each private model needs its own private loader.",
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise SamplingError(
            f"batch_sampler={_name(loader.batch_sampler)} may sample unequally; accounting needs equal sampling rates.",
            fix=_PLAIN_LOADER,
        )
    _check_sampler(loader.batch_sampler.sampler, loader.dataset)


def _check_sampler(sampler: Any, dataset: Any) -> None:
    for kind, (reason, fix) in _UNSUPPORTED_SAMPLERS.items():
        if isinstance(sampler, kind):
            raise SamplingError(f"{_name(sampler)} {reason}", fix=fix)
    # Only exact types, because a subclass may change the order.
    if type(sampler) not in (SequentialSampler, RandomSampler):
        raise SamplingError(
            f"sampler={_name(sampler)} may sample unequally; accounting needs equal sampling rates.",
            fix=_PLAIN_LOADER,
        )
    size = _length(dataset)
    if type(sampler) is RandomSampler and sampler.replacement:
        raise SamplingError(
            "RandomSampler(replacement=True) may return an example twice in a batch; it would count twice.",
            fix=_PLAIN_LOADER,
        )
    if len(sampler) != size or _length(sampler.data_source) != size:
        raise SamplingError(
            f"{_name(sampler)} samples {len(sampler)} examples from a data set of {size}, so the sampling rate is not "
            "batch_size / len(dataset).",
            fix=_PLAIN_LOADER,
        )


def check_repeats(dataset: Any) -> None:
    """Raises SamplingError if a data set contains an example more than once.

    Finds repeated indices of ``torch.utils.data.Subset``, and overlapping data sets of a ``ConcatDataset``, at any
    depth. Different examples with equal values are not detected as copies.
    """
    if type(dataset) not in (Subset, ConcatDataset):
        return
    selections: dict[int, tuple[Any, list[np.ndarray | None]]] = {}  # by id of the part; `dataset` keeps parts alive
    for part, indices in examples_of(dataset):
        selections.setdefault(id(part), (part, []))[1].append(indices)
    for part, selected in selections.values():
        if len(selected) == 1 and selected[0] is None:
            continue
        indices_of_part = [np.arange(_length(part)) if indices is None else indices for indices in selected]
        examples, counts = np.unique(np.concatenate(indices_of_part), return_counts=True)
        if len(counts) and counts.max() > 1:
            position = int(counts.argmax())
            raise SamplingError(
                f"Example {examples[position]} of {_name(part)} is in the data set {counts[position]} times, and "
                f"{(counts > 1).sum()} of {len(counts)} examples are repeated. Each copy is sampled and clipped "
                "separately, so the privacy loss of an example is larger than stated.",
                fix="Use each example once, for example with Subset(dataset, sorted(set(indices))), or pass to "
                "make_private: privacy_unit=dpengine.sampling.example_numbers(loader.dataset)",
            )


def example_numbers(dataset: Any) -> npt.NDArray[np.int64]:
    """Numbers the examples of a data set, for ``make_private(privacy_unit=...)``. Copies get the same number.

    Args:
        dataset: A map-style data set. Copies may come from ``torch.utils.data.Subset`` and ``ConcatDataset``.

    Returns:
        The numbers, ``(N,)``.
    """
    return _numbers(dataset, {})


def _numbers(dataset: Any, starts: dict[int, int]) -> npt.NDArray[np.int64]:
    if type(dataset) is Subset:
        return _numbers(dataset.dataset, starts)[np.asarray(dataset.indices, dtype=np.int64)]
    if type(dataset) is ConcatDataset:
        return np.concatenate([_numbers(part, starts) for part in dataset.datasets])
    size = _length(dataset)
    start = starts.setdefault(id(dataset), starts.get(0, 0))
    starts[0] = max(starts.get(0, 0), start + size)  # the next free number; 0 is not an id
    return np.arange(start, start + size)


def overlap(first: np.ndarray | None, second: np.ndarray | None) -> bool:
    """Returns True if two arrays of indices have a common element. None stands for all indices."""
    if first is None or second is None:
        return True
    return bool(np.isin(first, second).any())


def examples_of(dataset: Any, chosen: np.ndarray | None = None) -> list[tuple[Any, np.ndarray | None]]:
    """Returns the innermost data sets of a data set, each with the indices that are included.

    Indices are None if each example is included once.

    Args:
        dataset: The data set.
        chosen: Included indices of ``dataset``; None for all.
    """
    if type(dataset) is Subset:
        try:
            indices = np.asarray(dataset.indices)
        except (TypeError, ValueError):  # raised for a tensor on a GPU
            indices = np.empty(0, dtype=object)
        if indices.ndim == 1 and indices.dtype.kind in "iu":  # indices may also be keys, which are not followed
            return examples_of(dataset.dataset, indices if chosen is None else indices[chosen])
    if type(dataset) is ConcatDataset:
        if chosen is None:
            return [selection for part in dataset.datasets for selection in examples_of(part)]
        ends, selections = dataset.cumulative_sizes, []
        chosen = np.where(chosen < 0, chosen + ends[-1], chosen)
        for part, start, end in zip(dataset.datasets, [0, *ends], ends, strict=False):
            selections += examples_of(part, chosen[(start <= chosen) & (chosen < end)] - start)
        return selections
    if chosen is not None and (chosen < 0).any():
        chosen = np.where(chosen < 0, chosen + _length(dataset), chosen)
    return [(dataset, chosen)]


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise SamplingError(
            f"{_name(dataset)} has no length, so the sampling rate is unknown.", fix="Implement __len__."
        ) from None


def _name(value: Any) -> str:
    return type(value).__name__
