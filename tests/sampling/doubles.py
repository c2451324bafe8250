"""Test doubles for a private loader: fixed batches, a dataset with many types of leaves, a recording engine."""

import math

import torch
from torch.utils.data import DataLoader, Dataset

from dpengine.accounting.run_events import PoissonParticipation
from dpengine.sampling.loader import private_loader
from dpengine.sampling.scheme import Draws


class Fixed(Draws):
    """Sampling scheme with the given batches; repeats the last one."""

    law, participation = "poisson", PoissonParticipation(0.1)

    def __init__(self, *batches, rows=20, steps_per_epoch=None):
        self.batches = batches
        self.num_examples, self.sample_rate, self.expected_batch_size = rows, 0.1, 2.4
        self.steps_per_epoch = len(batches) if steps_per_epoch is None else steps_per_epoch
        self.drawn = []

    def draw(self, step, words):
        self.drawn.append(step)
        return torch.tensor(self.batches[min(step, len(self.batches) - 1)], dtype=torch.int64).numpy()


class Rows(Dataset):
    """Example i is a dict with several types of leaves. A list of indices must not be empty."""

    def __init__(self, rows=20):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return {"x": torch.full((3,), float(index)), "y": index, "name": f"row {index}"}

    def __getitems__(self, indices):
        assert len(indices)
        return [self[index] for index in indices]


class Recorder:
    """Replaces the engine and records the callbacks of the loader."""

    def __init__(self, budget=math.inf):
        self.handed, self.asked, self.budget = [], [], budget

    def on_return(self, ticket, chunk, data=None):
        self.handed.append((ticket, chunk))

    def may_draw(self, step):
        self.asked.append(step)
        return step < self.budget

    @property
    def steps(self):
        return [(ticket.step, chunk, ticket.sizes[chunk]) for ticket, chunk in self.handed]


def private(strategy, *, words=None, loader=None, recorder=None, workers=0, **options):
    recorder = recorder or Recorder()
    loader = loader or DataLoader(Rows(strategy.num_examples), batch_size=2, num_workers=workers)
    return private_loader(
        loader, sampling=strategy, words=words, on_return=recorder.on_return, may_draw=recorder.may_draw, **options
    )


def rows_of(batches) -> list[list[int]]:
    return [batch["y"].tolist() for batch in batches]
