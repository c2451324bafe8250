"""The loader reads the whole published file, and only public constants shape the inputs."""

import hashlib
import lzma
from pathlib import Path

import pytest
import torch

import dpengine.data
from dpengine.data import load_adult

FOLDER = Path(dpengine.data.__file__).parent / "adult"
NUMBERS = ("age", "education_num", "capital_gain", "capital_loss", "hours_per_week")


@pytest.fixture(scope="module")
def adult():
    return load_adult()


def published_rows(file: str) -> list[list[str]]:
    """Reads a file independently of the loader: every line with 15 cells."""
    text = lzma.decompress((FOLDER / f"{file}.xz").read_bytes()).decode("ascii")
    return [cells for line in text.splitlines() if len(cells := line.split(", ")) == 15]


@pytest.mark.parametrize(
    ("file", "size", "sha256"),
    [
        ("adult.data", 3_974_305, "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
        ("adult.test", 2_003_153, "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
    ],
)
def test_the_shipped_files_are_the_published_ones(file, size, sha256):
    content = lzma.decompress((FOLDER / f"{file}.xz").read_bytes())
    assert len(content) == size
    assert hashlib.sha256(content).hexdigest() == sha256
    note = (FOLDER / "SOURCE.md").read_text(encoding="utf-8")
    assert sha256 in note
    assert f"{size:,}" in note


def test_the_shipped_files_are_small():
    assert sum(path.stat().st_size for path in FOLDER.glob("*.xz")) < 500_000


def test_the_license_and_the_authors_are_stated():
    note = (FOLDER / "SOURCE.md").read_text(encoding="utf-8")
    for words in ["Barry Becker", "Ronny Kohavi", "CC BY 4.0", "10.24432/C5XW20", "contents unchanged"]:
        assert words in note


def test_all_examples_of_the_file_are_loaded(adult):
    assert adult.train_inputs.shape == (32_561, 107)
    assert adult.test_inputs.shape == (16_281, 107)
    assert adult.train_labels.shape == (32_561,)
    assert adult.test_labels.shape == (16_281,)


def test_missing_values_are_a_separate_category(adult):
    missing = [i for i, name in enumerate(adult.feature_names) if name.endswith("=?")]
    assert len(missing) == 3
    assert (adult.train_inputs[:, missing].sum(dim=1) > 0).sum() == 2_399
    assert (adult.test_inputs[:, missing].sum(dim=1) > 0).sum() == 1_221


def test_inputs_are_float32_and_labels_are_int64(adult):
    assert adult.train_inputs.dtype == adult.test_inputs.dtype == torch.float32
    assert adult.train_labels.dtype == adult.test_labels.dtype == torch.int64
    assert adult.classes == 2


def test_the_majority_class_has_the_published_share_of_the_test_set(adult):
    assert 1 - adult.test_labels.double().mean().item() == pytest.approx(12_435 / 16_281)


@pytest.mark.parametrize(("file", "part"), [("adult.data", "train"), ("adult.test", "test")])
def test_encoded_examples_equal_the_cells_of_the_file(adult, file, part):
    inputs, labels = getattr(adult, f"{part}_inputs"), getattr(adult, f"{part}_labels")
    order = ["age", "workclass", None, "education", "education_num", "marital_status", "occupation", "relationship"]
    order += ["race", "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country"]
    ranges = {"age": (17, 90), "education_num": (1, 16), "capital_gain": (0, 20_000)}
    ranges |= {"capital_loss": (0, 4_500), "hours_per_week": (1, 99)}
    rows = published_rows(file)
    for i in [*range(0, len(rows), 997), len(rows) - 1]:
        row, expected = rows[i], dict.fromkeys(adult.feature_names, 0.0)
        for name, cell in zip(order, row, strict=False):
            if name in ranges:
                low, high = ranges[name]
                expected[name] = min((float(cell) - low) / (high - low), 1.0)
            elif name:
                assert f"{name}={cell}" in expected
                expected[f"{name}={cell}"] = 1.0
        assert inputs[i].tolist() == pytest.approx(list(expected.values()), abs=1e-6)
        assert labels[i].item() == row[-1].startswith(">50K")


def test_inputs_are_in_the_unit_interval_and_each_example_has_eight_categories(adult):
    for inputs in (adult.train_inputs, adult.test_inputs):
        assert inputs.min() == 0
        assert inputs.max() == 1
        assert (inputs[:, len(NUMBERS) :].sum(dim=1) == 8).all()


def test_the_encoding_of_an_example_does_not_depend_on_other_examples(adult, monkeypatch):
    # Preprocessing with statistics of the data set would change example 0 if the others are removed
    from dpengine.data import adult as reader

    read_all = reader._read_examples
    monkeypatch.setattr(reader, "_read_examples", lambda file: read_all(file)[:1])
    first_only = reader.load_adult()
    assert torch.equal(first_only.train_inputs, adult.train_inputs[:1])
    assert torch.equal(first_only.test_inputs, adult.test_inputs[:1])


def test_a_damaged_file_is_rejected(adult, monkeypatch, tmp_path):
    from dpengine.data import adult as reader

    for file in adult.sha256:
        content = lzma.decompress((FOLDER / f"{file}.xz").read_bytes())
        (tmp_path / f"{file}.xz").write_bytes(
            lzma.compress(content.replace(b"39, State-gov", b"40, State-gov"), preset=0)
        )
    monkeypatch.setattr(reader, "_FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"adult\.data\.xz is damaged: its sha256 is .* expected 5b002646"):
        reader.load_adult()


def test_describe_returns_name_sizes_and_license(adult):
    assert adult.describe() == "UCI Adult (32,561 train / 16,281 test, CC BY 4.0)"
