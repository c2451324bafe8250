"""Runs that are killed and resumed from their last checkpoint. Each logs its releases to a separate file."""

import hashlib
import json
import os
import signal

import inside
import torch
from ledger_runs import Run

from dpengine import checkpoint
from dpengine.ledger_file import file as ledger_file

STEPS = 30
SAVED_EVERY = 4
FEW = 100  # bytes, less than a line has


class Telling(torch.optim.SGD):
    """Logs each change of the weights immediately."""

    def step(self, closure=None):
        super().step()
        self.tell()


def begun(folder, **settings):
    """The run of a folder, at its last checkpoint if it has one. Each release is logged to ``released``."""
    torch.set_num_threads(1)
    run = Run(folder / "run.ledger", optimizer=Telling, **settings)
    if checkpoint.exists(folder / "saved"):
        checkpoint.load(folder / "saved", run.engine)
    source = inside.noise_source(run.engine)
    key = hashlib.sha256(source.secret_state()["key"].encode()).hexdigest()

    def tell():
        told = {
            "address": [key, source.nonce, inside.state(run.engine).step],
            "batch": hashlib.sha256(run.batch.numpy().tobytes()).hexdigest(),
            "weights": hashlib.sha256(run.model.weight.detach().numpy().tobytes()).hexdigest(),
        }
        with open(folder / "released", "a") as file:
            file.write(json.dumps(told) + "\n")

    run.optimizer.tell = tell
    return run


def trained(folder, **settings):
    """Trains to the end and logs that it finished."""
    run = begun(folder, **settings)
    (folder / "begun").touch()
    while run.loader.position < STEPS:
        run.train(1)
        if run.loader.position % SAVED_EVERY == 0:
            checkpoint.save(folder / "saved", run.engine)
    checkpoint.save(folder / "saved", run.engine)
    (folder / "ended").touch()


def killed_at(folder, place):
    """Trains, and is killed just before or after a given change of the file or the weights."""
    run = begun(folder, reserve=2)
    left = [place]

    def die_before_and_after(action):
        def counted(*args):
            die()
            answer = action(*args)
            die()
            return answer

        return counted

    def die():
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def half(file, data, place):
        return os.pwrite(file, data[: len(data) // 2] if len(data) > FEW else data, place)

    class System:
        """System calls of the ledger file; the process can be killed between any two."""

        pwrite = staticmethod(die_before_and_after(half))

        def __getattr__(self, name):
            return getattr(os, name)

    run.train(1)
    ledger_file.os = System()
    ledger_file._sync = die_before_and_after(ledger_file._sync)
    run.optimizer.tell = die_before_and_after(run.optimizer.tell)
    run.train(3)
    (folder / "ended").touch()


def released(folder):
    """Returns the messages of the runs of a folder."""
    path = folder / "released"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
