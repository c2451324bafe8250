"""Safetensors files of tensors, which may be sharded over processes. Such files cannot contain code.

One process writes one file, ``NAME.safetensors``. Several processes write ``NAME-00001-of-00004.safetensors`` and so
on, with the offsets of their shards in the format of ``torch.distributed.checkpoint``, whose
``HuggingFaceStorageReader`` reads them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dpengine.distributed.local_shards import Box
from dpengine.errors import CorruptFileError

from .folder import COPY_ALL
from .layout import USE_EARLIER

_SUFFIX = ".safetensors"
_SHARDING_KEY, _OFFSETS_KEY = "DCP_SHARDING_INFO", "saved_offsets"  # names of torch.distributed.checkpoint


@dataclass(frozen=True, eq=False)
class Shard:
    """A shard of a tensor.

    Attributes:
        tensor: The shard.
        start: Offset along each axis; None for a complete tensor.
    """

    tensor: Tensor
    start: tuple[int, ...] | None = None


def file_name(name: str, rank: int, ranks: int) -> str:
    """Returns the name of a rank's file."""
    return f"{name}{_SUFFIX}" if ranks == 1 else f"{name}-{rank + 1:05d}-of-{ranks:05d}{_SUFFIX}"


def files_of(name: str, files: Iterable[str]) -> list[str]:
    """Returns the names in ``files`` that are files of any rank for ``name``, sorted."""
    pattern = re.compile(rf"{re.escape(name)}(-\d{{5,}}-of-\d{{5,}})?{re.escape(_SUFFIX)}")
    return sorted(file for file in files if pattern.fullmatch(file))


def writer(parts: Mapping[str, Shard], metadata: Mapping[str, str]) -> Callable[[Path], None]:
    """Returns a function that writes the shards and the metadata to a file."""
    offsets = {name: {_OFFSETS_KEY: part.start} for name, part in parts.items() if part.start is not None}
    if offsets:
        others = {name: {_OFFSETS_KEY: [0] * part.tensor.dim()} for name, part in parts.items() if part.start is None}
        metadata = {**metadata, _SHARDING_KEY: json.dumps({**offsets, **others})}
    tensors = {name: _with_own_storage(part.tensor.detach()) for name, part in parts.items()}
    return lambda path: save_file(tensors, path, dict(metadata))


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Returns the tensor with a storage that it does not share, which safetensors requires."""
    tensor = tensor.contiguous()
    size = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() == size else tensor.clone()


class StoredTensors:
    """Reads tensors, completely or partially, from the files of all ranks.

    A context manager that closes the files.
    """

    def __init__(self, paths: Iterable[Path]):
        self._parts: dict[str, list[tuple[Any, Box]]] = {}
        self._files = contextlib.ExitStack()
        self.metadata: dict[str, str] = {}
        for path in paths:
            with _corruption_errors(path.name):
                file = self._files.enter_context(safe_open(path, framework="pt"))
                metadata = dict(file.metadata() or {})
                offsets = json.loads(metadata.pop(_SHARDING_KEY, "{}"))
                self.metadata = self.metadata or metadata
                for name in file.keys():
                    size = tuple(file.get_slice(name).get_shape())
                    start = tuple(offsets[name][_OFFSETS_KEY]) if name in offsets else (0,) * len(size)
                    if len(start) != len(size):
                        raise ValueError(f"{name!r} is a shard of another tensor")
                    parts = self._parts.setdefault(name, [])
                    if all(box != Box(start, size) for _, box in parts):  # several ranks may write the same shard
                        parts.append((file, Box(start, size)))

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(self, *raised: object) -> None:
        self._files.close()

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the complete tensor."""
        ends = [[a + n for a, n in zip(box.start, box.size, strict=True)] for _, box in self._parts[name]]
        return tuple(map(max, zip(*ends, strict=True)))

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Returns a part of a tensor, or the complete tensor, as a new tensor on the CPU."""
        box = Box.full(self.shape(name)) if box is None else box
        out, count = None, 0
        with _corruption_errors(name):
            for file, part in self._parts[name]:
                common = part.intersection(box)
                if out is None or common.numel:
                    values = _values(file, name, part, common)
                    out = torch.empty(box.size, dtype=values.dtype) if out is None else out
                    out[common.slices_in(box)] = values
                    count += common.numel
        if out is None or count != box.numel:
            raise CorruptFileError(f"{name!r} is incomplete.", fix=USE_EARLIER)
        return out


def _values(file: Any, name: str, part: Box, common: Box) -> Tensor:
    if common == part or not part.size:
        return file.get_tensor(name)  # type: ignore[no-any-return]
    if not common.numel:  # an empty tensor with the stored dtype
        return file.get_slice(name)[tuple(slice(0, 0) for _ in part.size)].new_empty(common.size)  # type: ignore[no-any-return]
    return file.get_slice(name)[common.slices_in(part)]  # type: ignore[no-any-return]


@contextlib.contextmanager
def _corruption_errors(name: str) -> Any:
    try:
        yield
    except FileNotFoundError:
        raise CorruptFileError(f"{name} is missing.", fix=COPY_ALL) from None
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
        if isinstance(error, CorruptFileError):
            raise
        raise CorruptFileError(f"{name} is damaged, or not a tensor file: {error}.", fix=USE_EARLIER) from error
