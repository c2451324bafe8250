"""Noise on the sums of a run: each rank draws that of its own share, and each number gets its noise once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dpengine.distributed import Ranks, Seal
from dpengine.gradients import Stretch, Taken

from .mechanism import AbstractNoise

_TOGETHER = 25 * 2**20  # bytes that ranks add up in one message


def add_noise(
    taken: Taken,
    mechanism: AbstractNoise,
    *,
    std: float,
    step: int,
    scale: float,
    replicas: Ranks,
    facts: tuple[object, ...],
) -> None:
    """Adds a step's noise to sums, multiplies them by a public constant, and adds them up over replicas.

    Noise comes before the exchange, with full standard deviation on each rank's share and nowhere else; so it costs no
    message of its own, and a rank draws and keeps what it needs for its share only.

    Args:
        taken: The sums of this rank's rows, changed in place.
        mechanism: Draws the noise.
        std: Standard deviation of the noise, in units of the sums.
        step: Number of the release.
        scale: What noisy sums are multiplied by.
        replicas: The ranks that hold the same parameters.
        facts: What must be the same on all of them.

    Raises:
        MechanismMismatchError: If it is not.
    """  # noqa: DOC502 - the seal raises on our behalf
    for stretch, mine in _shares(taken.stretches, replicas):
        if mine:
            _noised(stretch, mechanism, std, step, scale)
        else:
            stretch.sums.mul_(scale)
    if replicas.size == 1:
        return
    for memory in taken.sealed:
        Seal.write(memory[-Seal.WORDS :], facts)
    waits = [replicas.add_up(part) for memory in taken.sealed for part in memory.split(_TOGETHER // memory.itemsize)]
    for wait in waits:
        wait()
    for memory in taken.sealed:
        Seal.refuse_other(memory[-Seal.WORDS :], replicas.size)


def _shares(stretches: list[Stretch], replicas: Ranks) -> Iterator[tuple[Stretch, bool]]:
    """The stretches, cut so that each part is this rank's or another's to draw noise for."""
    total = sum(stretch.sums.numel() for stretch in stretches)
    first, end = (total * rank // replicas.size for rank in (replicas.rank, replicas.rank + 1))
    at = 0
    for stretch in stretches:
        size = stretch.sums.numel()
        if stretch.held is not None:  # one that is no run stays whole
            yield stretch, first <= at < end
        else:
            low, high = (min(max(edge - at, 0), size) for edge in (first, end))
            for begin, stop, mine in ((0, low, False), (low, high, True), (high, size, False)):
                if stop > begin:
                    yield Stretch(stretch.sums[begin:stop], stretch.start + begin), mine
        at += size


def _noised(stretch: Stretch, mechanism: AbstractNoise, std: float, step: int, scale: float) -> None:
    sums, held = stretch.sums, stretch.held
    if held is None:
        mechanism.add(sums, std=std, step=step, start=stretch.start, scale=scale)
        return
    offset, count = held.span
    rows = torch.zeros(count, dtype=sums.dtype, device=sums.device)
    mechanism.add(rows, std=std, step=step, start=stretch.start + offset)
    assert held.cut is not None
    noise: Tensor = rows.view(held.kept.size[0], *held.shape[1:])[held.cut]
    sums.view(held.kept.size).add_(noise)
    sums.mul_(scale)
