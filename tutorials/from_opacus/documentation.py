"""Text classification data: docstrings of three installed libraries, with the library as the label.

The tutorials therefore need no network and contain no third-party text.
"""

import ast
import importlib.util
import re
import sysconfig
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

LIBRARIES = ("python", "numpy", "scipy")
NAMES = {*LIBRARIES, "np"}  # words that would reveal the label
WORDS = 32  # number of words of each text, from its beginning
BUCKETS = 2000  # words are hashed, because a vocabulary of the training data would have a privacy cost


def load(rows_each: int) -> tuple[TensorDataset, TensorDataset]:
    """Returns train and test data, four to one: word numbers ``(WORDS,)``, padded with 0, and labels."""
    inputs, labels = [], []
    for label, library in enumerate(LIBRARIES):
        texts = list(islice(_texts(library), rows_each))
        inputs += [_numbers(text) for text in texts]
        labels += [label] * len(texts)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    inputs_NT, labels_N = torch.tensor(inputs)[order], torch.tensor(labels)[order]
    test = torch.arange(len(order)) % 5 == 4
    return TensorDataset(inputs_NT[~test], labels_N[~test]), TensorDataset(inputs_NT[test], labels_N[test])


def accuracy(model: torch.nn.Module, dataset: TensorDataset) -> float:
    """Returns the accuracy of the model."""
    inputs, labels = dataset.tensors
    training = model.training
    model.eval()
    with torch.no_grad():
        correct = model(inputs).argmax(1) == labels
    model.train(training)
    return correct.float().mean().item()


def _texts(library: str) -> Iterator[str]:
    if library == "python":
        files = Path(sysconfig.get_path("stdlib")).glob("*.py")
    else:
        files = Path(importlib.util.find_spec(library).origin).parent.rglob("*.py")
    for path in sorted(files):
        if "tests" not in path.parts:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    text = ast.get_docstring(node) or ""
                    if len(_words(text)) >= 6:
                        yield text


def _words(text: str) -> list[str]:
    return [word for word in re.findall(r"[a-z]+", text.lower()) if word not in NAMES]


def _numbers(text: str) -> list[int]:
    numbers = [1 + zlib.crc32(word.encode()) % (BUCKETS - 1) for word in _words(text)[:WORDS]]
    return numbers + [0] * (WORDS - len(numbers))
