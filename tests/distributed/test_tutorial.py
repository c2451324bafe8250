"""The example for several processes is the same run however it is started."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tutorials" / "distributed" / "train.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def printed(command, *options):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*command, str(SCRIPT), "--steps", "12", "--seed", "7", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_example_gives_one_result_on_one_process_ddp_and_fsdp():
    alone = printed([sys.executable])
    accuracy, epsilon = re.search(r"accuracy (\S+)", alone), re.search(r"ε = \S+", alone)
    assert float(accuracy[1]) > 0.7
    for wrap in ("ddp", "fsdp"):
        text = printed(TORCHRUN, "--wrap", wrap)
        assert epsilon[0] in text
        found = float(re.search(r"accuracy (\S+)", text)[1])
        assert found == pytest.approx(float(accuracy[1]), abs=2e-4)  # a row or three on the edge
