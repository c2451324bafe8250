"""Functions run by several processes at once, on gloo, without a network: they meet through a file.

Processes are forked from one that has imported what takes long, and nothing else: it has one thread.
"""

import datetime
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

IMPORTED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.fx.experimental.symbolic_shapes",  # takes a second, on the first call of a DTensor
    "torch._dynamo",  # as much, on the first optimizer
    "torch.testing",
    "scipy.stats",
    "pytest",
    "hypothesis",
    "dpengine.auditing.one_run_audit",  # with the engine
    "dpengine.auditing.direct",
    "dpengine.checkpoint.loading",
    "dpengine.checkpoint.saving",
    "dpengine.cli.main",
    "dpengine.compat.opacus",
]


def started(function: Callable[..., Any], *args: Any, **settings: Any) -> multiprocessing.Process:
    """A process that runs a function. All of a test session are forked from one: the first start takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    process = context.Process(target=function, args=args, kwargs=settings)
    process.start()
    return process


def launched(ranks: int, function: Callable[..., Any], *args: Any, seconds: float = 60.0) -> list[Any]:
    """Returns the result of ``function(*args)`` in each of several processes, or the exception that it raised.

    A process that was killed has None.
    """
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder)
        processes = [started(_process, rank, ranks, meeting, seconds, function, args) for rank in range(ranks)]
        for process in processes:
            process.join(timeout=300)
            if process.is_alive():
                process.kill()
        answers = [meeting / f"answer{rank}" for rank in range(ranks)]
        return [torch.load(one, weights_only=False) if one.exists() else None for one in answers]


def _process(rank: int, ranks: int, meeting: Path, seconds: float, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=seconds)
    store = dist.FileStore(str(meeting / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    try:
        answer = function(*args)
    except Exception as error:
        traceback.print_exc()
        answer = error
    torch.save(answer, meeting / f"answer{rank}.part")
    (meeting / f"answer{rank}.part").rename(meeting / f"answer{rank}")
    dist.destroy_process_group()
