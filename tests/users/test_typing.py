"""Y1: a program of a user passes a strict type check against the public names."""

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
    width: int = model.in_features  # the very class that was passed in comes back
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


def strict_check(program: str, folder: Path) -> subprocess.CompletedProcess:
    file = folder / "program.py"
    file.write_text(program, encoding="utf-8")
    # --follow-imports=silent reports on the program alone; `make lint` checks the package
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent"]
    command += ["--ignore-missing-imports", f"--cache-dir={folder / 'cache'}", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.slow
def test_y1_a_program_of_a_user_passes_a_strict_check(tmp_path):
    pytest.importorskip("mypy")
    result = strict_check(PROGRAM, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_y1_wrong_types_misspelt_arguments_and_unknown_names_are_found(tmp_path):
    pytest.importorskip("mypy")
    result = strict_check(MISTAKES, tmp_path)
    lines = [line.split(":")[1] for line in result.stdout.splitlines() if ": error:" in line]
    assert lines == ["11", "12", "13"], result.stdout
