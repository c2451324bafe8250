"""Short private runs for the checks of loops, and the warnings that they emit."""

import contextlib
import warnings

import torch
from torch.utils.data import DataLoader

from dpengine import PrivacyEngine
from dpengine.errors import PrivacyWarning


def private(model, data, batch_size=16, *, seed=None, collate=None, **options):
    """Makes a model private; returns the engine, the model, the optimizer and the loader."""
    loader = data if isinstance(data, DataLoader) else DataLoader(data, batch_size=batch_size, collate_fn=collate)
    optimizer, engine = torch.optim.SGD(model.parameters(), lr=0.1), PrivacyEngine(seed=seed)
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
    return engine, *engine.make_private(model, optimizer, loader, **settings)


def train(run, loss_of, steps=None):
    """Trains for some steps, or an epoch; returns the engine. ``loss_of(model, batch)`` is the loss."""
    engine, model, optimizer, loader = run
    taken = 0
    while True:
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            taken += 1
            if taken == steps:
                return engine
        if steps is None:
            return engine


@contextlib.contextmanager
def undecided():
    """A list of the warnings about losses that could not be checked, filled when the block ends."""
    texts = []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always", PrivacyWarning)
        yield texts
    texts += [str(one.message) for one in shown if "loss could not be checked" in str(one.message)]
