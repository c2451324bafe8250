"""Tensors in the safetensors format: a header in JSON, then the bytes. Nothing in such a file can be code.

Layout: 8 bytes with the length of the header, little-endian; the header, which maps each name to its dtype, shape and
place; the data. ``__metadata__`` in the header maps strings to strings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dpengine.errors import CorruptFileError

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_METADATA = "__metadata__"
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit
_ALIGNMENT = 8


def to_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The file.

    Args:
        tensors: By name; on any device.
        metadata: Strings by name.

    Returns:
        Its bytes.

    Raises:
        TypeError: If a tensor has a dtype that the format does not have.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    parts, end = [], 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES:
            raise TypeError(f"checkpoint: {name!r} is a {tensor.dtype} tensor, which the file format does not have.")
        raw = _bytes_of(tensor)
        shape = list(tensor.shape)
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": shape, "data_offsets": [end, end + len(raw)]}
        parts.append(raw)
        end += len(raw)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % _ALIGNMENT)
    return b"".join([len(head).to_bytes(8, "little"), head, *parts])


def from_bytes(data: bytes, where: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What `to_bytes` was given.

    Args:
        data: The file.
        where: Its name, for messages.

    Returns:
        Tensors on the CPU, and the metadata.

    Raises:
        CorruptFileError: If it is no such file, or damaged.
    """  # noqa: DOC501 - the others become this one
    try:
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 or length > min(_LONGEST_HEADER, len(data) - 8):
            raise ValueError("its header does not fit")
        header = json.loads(data[8 : 8 + length])
        metadata = header.pop(_METADATA, {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("its metadata is no text")
        body = memoryview(data)[8 + length :]
        tensors, end = {}, 0
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            if start != end:
                raise ValueError(f"{name!r} does not begin where the one before ends")
            tensors[name], end = _tensor(body[start:stop], entry["dtype"], entry["shape"]), stop
        if end != len(body):
            raise ValueError(f"it holds {len(body)} bytes of data, and its header tells of {end}")
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
        raise CorruptFileError(
            f"{where} is no tensor file, or damaged: {error}.", fix="Take an earlier checkpoint."
        ) from error
    return tensors, metadata


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _tensor(raw: memoryview, code: str, shape: list[int]) -> Tensor:
    dtype = _DTYPES[code]
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in shape):
        raise ValueError(f"a shape is {shape}")
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes for shape {shape} of {dtype}")
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)
