"""Reads batches of a ``TensorDataset`` with one operation per tensor, instead of stacking single examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset
from torch.utils.data import dataset as torchs
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from torch.utils.data.dataloader import default_collate


@dataclasses.dataclass(frozen=True)
class WholeTensors:
    """Data set that is read in batches. With `as_read` as ``collate_fn``, batches equal those of torch."""

    tensors: tuple[Tensor, ...]
    indices: tuple[Sequence[int], ...] = ()  # from the outermost subset to the innermost

    def __getitems__(self, rows: list[int]) -> list[Tensor]:
        """Returns the tensors of a batch, each ``(B, *)``."""
        for subset in self.indices:
            rows = [subset[row] for row in rows]
        chosen = torch.tensor(rows, dtype=torch.int64, device="cpu")  # not the default device
        if self.indices:  # indices of a subset may be negative
            chosen = torch.where(chosen < 0, chosen + len(self.tensors[0]), chosen)
        # Not `tensor[rows]`, whose memory layout differs from that of stacked examples for a transposed tensor.
        return [one.index_select(0, chosen.to(one.device)) for one in self.tensors]


def as_read(batch: list[Tensor]) -> list[Tensor]:
    """Returns the result of `WholeTensors`, which is a batch already."""
    return batch


def whole_tensors(dataset: Dataset[Any], collate_fn: Any) -> WholeTensors | None:
    """Returns a data set that is read in batches; None if its batches might differ from those of ``dataset``."""
    if collate_fn is not default_collate or not _collates_as_torch_does():
        return None
    indices = []
    while type(dataset) is Subset and _reads_as_torch_does(dataset):
        if type(dataset.indices) not in {list, tuple, range}:
            return None
        if type(dataset.indices) is not range and not all(type(i) is int for i in dataset.indices):
            return None  # for example a mask, which would be read as numbers
        indices.append(dataset.indices)
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or not _reads_as_torch_does(dataset):
        return None
    tensors = dataset.tensors
    plain = all(map(_is_plain, tensors)) and len({len(one) for one in tensors}) == 1
    return WholeTensors(tensors, tuple(indices)) if plain else None


def _collates_as_torch_does() -> bool:
    """Returns True if the user did not change the lookup of ``default_collate`` for tuples and tensors."""
    found = default_collate_fn_map
    return found.get(Tensor) is collate_tensor_fn and not any(issubclass(tuple, kinds) for kinds in found)


def _reads_as_torch_does(dataset: Dataset[Any]) -> bool:
    """Returns True if torch's own methods read examples: none was replaced on the object or its class."""
    for name in ("__getitem__", "__getitems__"):
        method = getattr(dataset, name, None)
        code = getattr(method, "__func__", None)
        if method is not None and (
            getattr(method, "__self__", None) is not dataset
            or getattr(code, "__globals__", None) is not vars(torchs)
            or getattr(code, "__name__", None) != name
        ):
            return False
    return True


def _is_plain(one: Tensor) -> bool:
    """Returns True if selected rows equal stacked rows, including their type and autograd history."""
    own = type(one) is Tensor and one.layout == torch.strided and not one.is_nested and not one.is_quantized
    return own and one.dim() > 0 and not one.requires_grad
