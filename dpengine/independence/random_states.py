"""States of random generators, to run code twice with the same random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def random_states() -> list[Tensor]:
    """Returns the states of torch's generators of the CPU and of the current GPU."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if cuda else [])]


def set_random_states(states: Sequence[Tensor]) -> None:
    """Sets the states that `random_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


@contextmanager
def restored_random_states(*, all_generators: bool = False) -> Iterator[None]:
    """Restores the states of torch's generators on exit; with ``all_generators`` also of Python's and numpy's."""
    states, numpy = random_states(), sys.modules.get("numpy")
    others = (random.getstate(), None if numpy is None else numpy.random.get_state()) if all_generators else None
    try:
        yield
    finally:
        set_random_states(states)
        if others is not None:
            random.setstate(others[0])
            if numpy is not None:
                numpy.random.set_state(others[1])
