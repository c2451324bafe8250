"""A program of a user passes a strict type check against the public names."""

import subprocess
import sys
from pathlib import Path

import pytest

import dpengine

ROOT = Path(dpengine.__file__).parents[1]

PROGRAM = """
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpengine as dp


def train(model: nn.Linear, optimizer: torch.optim.SGD, loader: DataLoader[Any]) -> float:
    engine = dp.PrivacyEngine(accountant="pld")
    model, optimizer, loader = engine.make_private(
        model, optimizer, loader, noise_multiplier=1.1, max_grad_norm=1.0, clipping="flat"
    )
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    width: int = model.in_features  # the class of the argument is also the return type
    engine.detach(model)
    return engine.get_epsilon(delta=1e-5) + engine.epsilon + width
"""
MISTAKES = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpengine as dp

model = nn.Linear(2, 2)
loader = DataLoader(TensorDataset(torch.zeros(4, 2)))
optimizer = torch.optim.SGD(model.parameters())
dp.PrivacyEngine().make_private(model, optimizer, loader, noise_multiplier="much")
dp.PrivacyEngine().make_private(model, optimizer, loader, noise_multipler=1.0)
dp.NoSuchName
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> dict[str, list[str]]:
    """Returns the errors of a strict check of both programs, by file."""
    pytest.importorskip("mypy")
    folder = tmp_path_factory.mktemp("typing")
    for name, text in {"program": PROGRAM, "mistakes": MISTAKES}.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    # silent: errors of the package are left to `make lint`. Untyped calls: Tensor.backward has no types.
    command = [sys.executable, "-m", "mypy", "--config-file=", f"--cache-dir={folder / 'cache'}"]
    command += ["--strict", "--allow-untyped-calls", "--ignore-missing-imports", "--follow-imports=silent"]
    files = [str(folder / "program.py"), str(folder / "mistakes.py")]
    result = subprocess.run([*command, *files], capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode in (0, 1), result.stderr
    lines = [line for line in result.stdout.splitlines() if ": error:" in line]
    return {
        file.stem: [line for line in lines if Path(line.split(":")[0]).name == file.name] for file in map(Path, files)
    }


@pytest.mark.slow
def test_a_program_of_a_user_passes_a_strict_check(errors):
    assert errors["program"] == []


@pytest.mark.slow
def test_wrong_types_misspelled_arguments_and_unknown_names_are_found(errors):
    assert [line.split(":")[1] for line in errors["mistakes"]] == ["11", "12", "13"]
