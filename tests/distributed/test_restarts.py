"""One process dies: torchrun restarts all, and the run resumes from its last checkpoint."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
SCRIPT = """
import os, signal, sys
from pathlib import Path
import inside, torch, torch.distributed as dist
from dpengine import checkpoint
from spread_runs import Case, Spread

torch.set_num_threads(1)
dist.init_process_group("gloo")
folder, wrap, steps = Path(sys.argv[1]), sys.argv[2], 12
deaths, rank = [folder.with_name(name) for name in ("in a step", "in a save")], dist.get_rank()
run = Spread(Case(noise="bandmf"), wrap, seed=None, optimizer="Adam")
if checkpoint.exists(folder):
    checkpoint.load(folder, run.engine)
begun = run.loader.position

def die(death):
    death.touch()
    os.kill(os.getpid(), signal.SIGKILL)

if rank == 1 and not deaths[0].exists():
    inside.before_exchange(run.engine, lambda step: die(deaths[0]) if step == 5 else None)
if rank == 0 and deaths[0].exists() and not deaths[1].exists():  # between the two renames of its last save
    rename = Path.rename
    def dying(self, target):
        if inside.state(run.engine).step == 7 and str(self).endswith("dpengine-new"):
            die(deaths[1])
        return rename(self, target)
    Path.rename = dying
while run.loader.position < steps:
    run.train(1)
    if run.loader.position % 2 == 0:
        checkpoint.save(folder, run.engine)
weights = torch.cat([w.flatten() for w in run.result()["weights"].values()])
both = [torch.empty_like(weights) for _ in range(2)]
dist.all_gather(both, weights)
if rank == 0:
    print("ENDED", torch.equal(*both), begun, run.engine.ledger.steps, flush=True)
dist.destroy_process_group()
os._exit(0)  # one in eight processes with gloo (torch 2.13, without this package too) aborts while the interpreter ends
"""


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [pytest.param("ddp", marks=pytest.mark.nightly), "fsdp"])
@pytest.mark.hazard("P2")
def test_a_run_whose_processes_die_goes_on_from_its_last_checkpoint(tmp_path, wrap):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"}
    # Without this, processes of a second start may meet the addresses of the first, which are dead (torch 2.13, gloo).
    environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", str(tmp_path / "script.py"), str(tmp_path / "run"), wrap]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    ((same, begun, steps),) = re.findall(r"ENDED (\w+) (\d+) (\d+)", done.stdout)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("in")) == ["in a save", "in a step"]
    assert (same, begun, steps) == (
        "True",
        "8",
        "12",
    )  # saved at 4 before the first death, and as a whole at 8 before the second
