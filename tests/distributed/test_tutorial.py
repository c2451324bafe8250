"""The distributed example gives the same run with one process, DDP and FSDP."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tutorials" / "distributed" / "train.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Runs the script, and ends without the interpreter's last steps: there, one in eight processes with gloo aborts
# (torch 2.13, without this package too).
RUNNER = """
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)
"""


def printed(tmp_path, command, *options):
    (tmp_path / "runner.py").write_text(RUNNER)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*command, str(tmp_path / "runner.py"), str(SCRIPT), "--steps", "12", "--seed", "7", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_the_example_gives_one_result_on_one_process_ddp_and_fsdp(tmp_path):
    alone = printed(tmp_path, [sys.executable])
    accuracy, epsilon = re.search(r"accuracy (\S+)", alone), re.search(r"ε = \S+", alone)
    assert float(accuracy[1]) > 0.7
    for wrap in ("ddp", "fsdp"):
        text = printed(tmp_path, TORCHRUN, "--wrap", wrap)
        assert epsilon[0] in text
        found = float(re.search(r"accuracy (\S+)", text)[1])
        assert found == pytest.approx(float(accuracy[1]), abs=2e-4)  # a row or three on the edge
