"""Steps of small models on the simulated GPU: launches, synchronizations, noise, and updates equal to the CPU's."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import TINY

ROOT = Path(__file__).resolve().parents[2]
NEEDS = pytest.mark.skipif(
    torch.version.cuda is not None or shutil.which("g++") is None, reason="needs a build of torch without CUDA, and g++"
)
pytestmark = [NEEDS, pytest.mark.slow]  # one process of 20 s


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu_model") / "tiny.json"
    command = [sys.executable, "-m", "benchmarks.gpu_model", "--tiny", "--ways", "dpengine auto", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize("cell", TINY)
def test_a_private_step_launches_few_kernels_more(predicted, cell):
    plain, private = predicted[cell]["plain"], predicted[cell]["dpengine auto"]
    assert private["launches"] <= 1.5 * plain["launches"] + 30


@pytest.mark.parametrize("cell", TINY)
def test_the_host_waits_once_in_a_step(predicted, cell):
    assert not predicted[cell]["plain"]["waits"]
    places = predicted[cell]["dpengine auto"]["waits"]
    assert sum(places.values()) == 1 and "engine/add_clipped.py" in next(iter(places)), places


@pytest.mark.parametrize("cell", TINY)
def test_noise_reads_and_writes_each_number_once(predicted, cell):
    assert predicted[cell]["dpengine auto"]["noise_bytes_per_parameter"] == 8


WIDER = {"bert": {"float32"}, "gpt-2": {"float32", "float64"}}  # of embeddings, whose gradients are float32


@pytest.mark.parametrize("cell", TINY)
def test_products_of_layers_are_in_bfloat16_under_autocast(predicted, cell):
    flops = predicted[cell]["dpengine auto"]["flops"]
    assert flops.keys() <= {"bfloat16"} | WIDER.get(cell, set())
    assert sum(flops.values()) < 1.1 * flops["bfloat16"]


@pytest.mark.parametrize("cell", TINY)
def test_updates_equal_those_of_the_cpu(predicted, cell):
    """The first step, which is checked: its operations never mix devices."""
    assert predicted[cell]["values"]["deviation"] < 1e-5
