"""Saves and restores the states of random generators, so that code can run twice with the same random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def random_states() -> list[Tensor]:
    """Returns the states of torch's default generators for the CPU and the current GPU."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if cuda else [])]


def python_states() -> tuple[object, ...]:
    """Returns the states of the Python and NumPy generators in a form that can be compared."""
    kind, keys, *others = np.random.get_state()
    return random.getstate(), kind, np.asarray(keys).tobytes(), others


def set_random_states(states: Sequence[Tensor]) -> None:
    """Sets the states that `random_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


@contextmanager
def restored_random_states() -> Iterator[None]:
    """Restores the states of torch's default generators on exit."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)
