"""Runs of small models on the simulated GPU: launches, synchronizations, noise, and updates equal to the CPU's."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from simulated_runs import CAPABILITIES, NARROW, RUNS, name_with

from benchmarks.gpu import TINY

ROOT = Path(__file__).resolve().parents[2]
NEEDS = pytest.mark.skipif(
    torch.version.cuda is not None or shutil.which("g++") is None, reason="needs a build of torch without CUDA, and g++"
)
pytestmark = [NEEDS, pytest.mark.slow]  # a process of 20 s, and one of 45 s


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu_model") / "tiny.json"
    arguments = ["--tiny", "--contenders", "dpengine auto", "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.gpu_model", *arguments]
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


@pytest.fixture(scope="module")
def deviations():
    command = [sys.executable, "-m", "tests.simulated_runs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("run", RUNS)
def test_a_run_gives_the_parameters_of_the_cpu(deviations, run):
    deviation = deviations[run]
    assert isinstance(deviation, float), deviation  # an error on the device
    assert deviation <= 1e-5


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("run", NARROW)
def test_a_run_in_bfloat16_gives_the_parameters_of_the_cpu(deviations, run, capability):
    """The CPU and GPUs round other results to bfloat16 under autocast, so only models of bfloat16 are equal."""
    assert deviations[name_with(run, capability)] <= (0 if run == "bfloat16 model" else 1e-3)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_autocast_around_the_backward_pass_changes_nothing(deviations, capability):
    outside, inside = (
        deviations[name_with(f"autocast of sequences{end}", capability)] for end in ("", ", backward inside")
    )
    assert inside == outside
