"""The UCI Adult data set, which is part of the package.

The task is to predict if a person of the 1994 census earns more than 50,000 dollars a year.
"""

import csv
import hashlib
import lzma
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_FOLDER = Path(__file__).parent / "adult"
_SHA256 = {  # digests of the published files, uncompressed
    "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
}

_COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship", "race",
    "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country",
)  # fmt: skip

# Ranges and value lists are from the documentation, or were chosen without the examples. Ranges that are computed from
# the examples would reveal private values.
_RANGES = {
    "age": (17, 90),
    "education_num": (1, 16),
    "capital_gain": (0, 20_000),
    "capital_loss": (0, 4_500),
    "hours_per_week": (1, 99),
}
_VALUES = {
    "workclass": (
        "Private, Self-emp-not-inc, Self-emp-inc, Federal-gov, Local-gov, State-gov, Without-pay, Never-worked, ?"
    ),
    "education": (
        "Bachelors, Some-college, 11th, HS-grad, Prof-school, Assoc-acdm, Assoc-voc, 9th, 7th-8th, 12th, Masters, "
        "1st-4th, 10th, Doctorate, 5th-6th, Preschool"
    ),
    "marital_status": (
        "Married-civ-spouse, Divorced, Never-married, Separated, Widowed, Married-spouse-absent, Married-AF-spouse"
    ),
    "occupation": (
        "Tech-support, Craft-repair, Other-service, Sales, Exec-managerial, Prof-specialty, Handlers-cleaners, "
        "Machine-op-inspct, Adm-clerical, Farming-fishing, Transport-moving, Priv-house-serv, Protective-serv, "
        "Armed-Forces, ?"
    ),
    "relationship": "Wife, Own-child, Husband, Not-in-family, Other-relative, Unmarried",
    "race": "White, Asian-Pac-Islander, Amer-Indian-Eskimo, Other, Black",
    "sex": "Female, Male",
    "native_country": (
        "United-States, Cambodia, England, Puerto-Rico, Canada, Germany, Outlying-US(Guam-USVI-etc), India, Japan, "
        "Greece, South, China, Cuba, Iran, Honduras, Philippines, Italy, Poland, Jamaica, Vietnam, Mexico, Portugal, "
        "Ireland, France, Dominican-Republic, Laos, Ecuador, Taiwan, Haiti, Columbia, Hungary, Guatemala, Nicaragua, "
        "Scotland, Thailand, Yugoslavia, El-Salvador, Trinadad&Tobago, Peru, Hong, Holand-Netherlands, ?"
    ),
}
_LABELS = {"<=50K": 0, ">50K": 1}


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledData:
    """A classification task with a fixed split.

    Attributes:
        name: Short name, such as ``"adult"``. Results of data sets with different names must not be compared.
        title: Full name.
        train_inputs: ``(N, ...)`` float32, scaled by public ranges only.
        train_labels: ``(N,)`` int64.
        test_inputs: ``(M, ...)`` float32.
        test_labels: ``(M,)`` int64.
        classes: Number of classes.
        source: Place of publication.
        licence: License of the data.
        sha256: Digest of each file. For Adult, digests are of the uncompressed files.
        feature_names: Name of each input column. Empty for images.
        note: Note for ``describe``, for example that this data set replaces another one. May be empty.
    """

    name: str
    title: str
    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    classes: int
    source: str
    licence: str
    sha256: Mapping[str, str]
    feature_names: tuple[str, ...] = ()
    note: str = ""

    def describe(self) -> str:
        """Returns the title, sizes, license and note in one line."""
        line = f"{self.title} ({len(self.train_labels):,} train / {len(self.test_labels):,} test, {self.licence})"
        return f"{line}. {self.note}" if self.note else line


def load_adult() -> LabelledData:
    """Reads UCI Adult from the files that are part of the package.

    There are 107 input columns: five numbers, clamped to fixed public ranges and scaled to [0, 1], and eight categories
    as one-hot columns over the documented values, including "?" for missing values. All examples are included.
    ``fnlwgt``, a survey weight, is omitted.

    Returns:
        32,561 training examples and 16,281 test examples. Label 1 means an income above 50,000 dollars.

    Raises:
        ValueError: If a file is damaged.
    """  # noqa: DOC502 - raised by _read_examples
    train, test = (_read_examples(file) for file in _SHA256)
    return LabelledData(
        name="adult",
        title="UCI Adult",
        train_inputs=_inputs(train),
        train_labels=_labels(train),
        test_inputs=_inputs(test),
        test_labels=_labels(test),
        classes=len(_LABELS),
        source="UCI Machine Learning Repository, doi:10.24432/C5XW20",
        licence="CC BY 4.0",
        sha256=dict(_SHA256),
        feature_names=(*_RANGES, *(f"{name}={value}" for name in _VALUES for value in _values(name))),
    )


def _read_examples(file: str) -> list[list[str]]:
    path = _FOLDER / f"{file}.xz"
    content = lzma.decompress(path.read_bytes())
    digest = hashlib.sha256(content).hexdigest()
    if digest != _SHA256[file]:
        raise ValueError(
            f"data.load_adult: {path} is damaged: its sha256 is {digest}, expected {_SHA256[file]}. Install dpengine "
            "again."
        )
    lines = content.decode("ascii").splitlines()
    if file == "adult.test":
        lines = lines[1:]  # a comment, not a header
    return [example for example in csv.reader(lines, skipinitialspace=True) if example]  # the last line is empty


def _inputs(examples: list[list[str]]) -> Tensor:
    columns = dict(zip(_COLUMNS, zip(*examples, strict=True), strict=False))  # without the label, which is last
    numbers = [_scaled(columns[name], *_RANGES[name]) for name in _RANGES]
    categories = [_one_hot(columns[name], _values(name)) for name in _VALUES]
    return torch.cat([torch.stack(numbers, dim=1), *categories], dim=1)


def _labels(examples: list[list[str]]) -> Tensor:
    labels = [example[-1].rstrip(".") for example in examples]  # labels of adult.test end with a period
    return torch.tensor([_LABELS[label] for label in labels])


def _scaled(column: tuple[str, ...], low: int, high: int) -> Tensor:
    numbers = torch.tensor([float(value) for value in column])
    return ((numbers - low) / (high - low)).clamp(0, 1)


def _one_hot(column: tuple[str, ...], values: tuple[str, ...]) -> Tensor:
    index = {value: i for i, value in enumerate(values)}
    return torch.nn.functional.one_hot(torch.tensor([index[value] for value in column]), len(values)).float()


def _values(name: str) -> tuple[str, ...]:
    return tuple(_VALUES[name].split(", "))
