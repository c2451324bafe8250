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
def test_a_private_step_launches_at_most_half_as_many_kernels_more_plus_thirty(predicted, cell):
    plain, private = predicted[cell]["plain"], predicted[cell]["dpengine auto"]
    assert private["launches"] <= 1.5 * plain["launches"] + 30


@pytest.mark.parametrize("cell", TINY)
def test_the_host_synchronizes_once_per_private_step(predicted, cell):
    assert not predicted[cell]["plain"]["waits"]
    places = predicted[cell]["dpengine auto"]["waits"]
    assert sum(places.values()) == 1 and "engine/add_clipped.py" in next(iter(places)), places


@pytest.mark.parametrize("cell", TINY)
def test_noise_reads_and_writes_each_parameter_once(predicted, cell):
    assert predicted[cell]["dpengine auto"]["noise_bytes_per_parameter"] == 8


WIDER = {"bert": {"float32"}, "gpt-2": {"float32", "float64"}}  # dtypes of embedding gradients


@pytest.mark.parametrize("cell", TINY)
def test_matrix_products_of_layers_are_bfloat16_under_autocast(predicted, cell):
    flops = predicted[cell]["dpengine auto"]["flops"]
    assert flops.keys() <= {"bfloat16"} | WIDER.get(cell, set())
    assert sum(flops.values()) < 1.1 * flops["bfloat16"]


@pytest.mark.parametrize("cell", TINY)
def test_the_first_update_equals_that_of_the_cpu(predicted, cell):
    """Compares the first step; the simulated device raises if an operation mixes devices."""
    assert predicted[cell]["values"]["deviation"] < 1e-5


@pytest.fixture(scope="module")
def deviations():
    command = [sys.executable, "-m", "tests.simulated_runs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("run", RUNS)
def test_parameters_after_a_run_equal_those_of_the_cpu(deviations, run):
    deviation = deviations[run]
    assert isinstance(deviation, float), deviation  # an error on the device
    assert deviation <= 1e-5


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("run", NARROW)
def test_parameters_after_a_bfloat16_run_equal_those_of_the_cpu_up_to_autocast_rounding(deviations, run, capability):
    """Autocast rounds different results on the CPU and on GPUs, so only bfloat16 models are bitwise equal."""
    assert deviations[name_with(run, capability)] <= (0 if run == "bfloat16 model" else 1e-3)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_autocast_around_the_backward_pass_does_not_change_the_result(deviations, capability):
    outside, inside = (
        deviations[name_with(f"autocast of sequences{end}", capability)] for end in ("", ", backward inside")
    )
    assert inside == outside
