"""Reads batches of a ``TensorDataset`` with one operation per tensor, instead of stacking single examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset
from torch.utils.data import dataset as torch_dataset
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from torch.utils.data.dataloader import default_collate


@dataclasses.dataclass(frozen=True)
class BatchedTensors:
    """Data set that returns complete batches, equal to those of torch with `identity_collate` as ``collate_fn``."""

    tensors: tuple[Tensor, ...]
    indices: tuple[Sequence[int], ...] = ()  # from the outermost subset to the innermost

    def __getitems__(self, rows: list[int]) -> list[Tensor]:
        """Returns the tensors of a batch, each ``(B, *)``."""
        for subset in self.indices:
            rows = [subset[row] for row in rows]
        selected = torch.tensor(rows, dtype=torch.int64, device="cpu")  # not the default device
        if self.indices:  # indices of a subset may be negative
            selected = torch.where(selected < 0, selected + len(self.tensors[0]), selected)
        # Not `tensor[rows]`, whose memory layout differs from that of stacked examples for a transposed tensor.
        return [tensor.index_select(0, selected.to(tensor.device)) for tensor in self.tensors]


def identity_collate(batch: list[Tensor]) -> list[Tensor]:
    """Returns its argument, because `BatchedTensors` returns a complete batch."""
    return batch


def batched_tensors(dataset: Dataset[Any], collate_fn: Any) -> BatchedTensors | None:
    """Returns a data set that returns complete batches; None if they might differ from batches of ``dataset``."""
    if collate_fn is not default_collate or not _collates_as_torch_does():
        return None
    indices = []
    while type(dataset) is Subset and _reads_as_torch_does(dataset):
        if type(dataset.indices) not in {list, tuple, range}:
            return None
        if type(dataset.indices) is not range and not all(type(i) is int for i in dataset.indices):
            return None  # for example a mask
        indices.append(dataset.indices)
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or not _reads_as_torch_does(dataset):
        return None
    tensors = dataset.tensors
    is_supported = all(map(_is_selectable, tensors)) and len({len(tensor) for tensor in tensors}) == 1
    return BatchedTensors(tensors, tuple(indices)) if is_supported else None


def _collates_as_torch_does() -> bool:
    """Returns True if the user did not change how ``default_collate`` handles tuples and tensors."""
    functions = default_collate_fn_map
    return functions.get(Tensor) is collate_tensor_fn and not any(issubclass(tuple, kinds) for kinds in functions)


def _reads_as_torch_does(dataset: Dataset[Any]) -> bool:
    """Returns True if methods of torch read examples, and none was replaced on the object or its class."""
    for name in ("__getitem__", "__getitems__"):
        method = getattr(dataset, name, None)
        code = getattr(method, "__func__", None)
        if method is not None and (
            getattr(method, "__self__", None) is not dataset
            or getattr(code, "__globals__", None) is not vars(torch_dataset)
            or getattr(code, "__name__", None) != name
        ):
            return False
    return True


def _is_selectable(tensor: Tensor) -> bool:
    """Returns True if selected examples equal stacked ones, including their type and autograd history."""
    own = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    return own and tensor.dim() > 0 and not tensor.requires_grad
