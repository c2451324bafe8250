"""Planted bugs of the sampler and the loader."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from dpengine.engine.batch_state import Stage
from dpengine.engine.step import PrivateStep
from dpengine.sampling.batches import LogicalBatches
from dpengine.sampling.poisson import PoissonDraws
from dpengine.sampling.shuffle import ShuffleDraws

from .planted import Patch, Planted

_ELSEWHERE = 1 << 40  # beyond the steps of any run
Draw = Callable[[Any, int, Any], Any]


def _drawn(change: Callable[[Draw, Any, int, Any], Any]) -> tuple[Patch, ...]:
    """Replaces draws by ``change(draw, strategy, step, words)``."""

    def wrong(draw: Any) -> Any:
        @functools.wraps(draw)
        def drawn(self: Any, step: int, words: Any) -> Any:
            return change(draw, self, step, words)

        return drawn

    return (Patch(PoissonDraws, "draw", wrong),)


def _random_on_empty(draw: Draw, strategy: Any, step: int, words: Any) -> Any:
    found = draw(strategy, step, words)
    if len(found) or not strategy.num_examples:
        return found
    word = words(1, step=step + _ELSEWHERE, block=0)
    return (word % np.uint64(strategy.num_examples)).astype(np.int64)


def _redrawn(draw: Draw, strategy: Any, step: int, words: Any) -> Any:
    found = draw(strategy, step, words)
    for attempt in range(1, 200):
        if len(found):
            break
        found = draw(strategy, step + attempt * _ELSEWHERE, words)
    return found


def _shuffled(draw: Draw, strategy: Any, step: int, words: Any) -> Any:
    size = max(1, round(strategy.sample_rate * strategy.num_examples))
    return ShuffleDraws(strategy.num_examples, size).draw(step, words) if strategy.num_examples else draw(
        strategy, step, words
    )  # fmt: skip


def _fixed_size(draw: Draw, strategy: Any, step: int, words: Any) -> Any:
    size = min(strategy.num_examples, round(strategy.sample_rate * strategy.num_examples))
    generator = np.random.Generator(np.random.Philox(key=words(2, step=step, block=0)))
    return np.sort(generator.choice(strategy.num_examples, size, replace=False)).astype(np.int64)


def _each_epoch_alike(draw: Draw, strategy: Any, step: int, words: Any) -> Any:
    return draw(strategy, step % max(1, strategy.steps_per_epoch), words)


def _more_often(draw: Draw, strategy: Any, step: int, words: Any) -> Any:
    rate = min(1.0, 1.1 * strategy.sample_rate)
    return draw(dataclasses.replace(strategy, sample_rate=rate), step, words)


def _empty_skipped(step: Any) -> Any:
    @functools.wraps(step)
    def stepped(self: Any, update: Any) -> bool:
        state = self.batches
        if state.stage in (Stage.OPEN, Stage.CLIPPED) and not sum(batch.size for batch in state.logical_batches):
            self.passes.discard()
            state.logical_batches, state.stage = [], Stage.IDLE
            return False
        return bool(step(self, update))

    return stepped


def _rechunked(change: Callable[[Any, Any], Any]) -> tuple[Patch, ...]:
    """Replaces the chunks of batches by the indices that ``change(batches, drawn)`` returns."""

    def wrong(draw: Any) -> Any:
        @functools.wraps(draw)
        def drawn(self: Any, step: int) -> Any:
            batch = draw(self, step)
            chunks = change(self, batch)
            rows = tuple(map(len, chunks))
            return batch._replace(batch=dataclasses.replace(batch.batch, sizes=rows), chunks=chunks)

        return drawn

    return (Patch(LogicalBatches, "draw", wrong),)


def _one_mask_for_all(batches: Any, batch: Any) -> list[list[int]]:
    rank, ranks = batches.shard
    if ranks == 1:
        return batch.chunks
    own = dataclasses.replace(batches.sampling, num_examples=batches.sampling.num_examples // ranks)
    return [[int(index) * ranks + rank for index in own.draw(batch.batch.step, batches._words)]]


def _filled_up(batches: Any, batch: Any) -> list[list[int]]:
    rank, ranks = batches.shard
    if ranks == 1:
        return batch.chunks
    whole = batches.sampling.draw(batch.batch.step, batches._words).tolist()
    each = -(-len(whole) // ranks)
    padded = whole + whole[: each * ranks - len(whole)]
    return [padded[rank::ranks]]


def _padded(batches: Any, batch: Any) -> list[list[int]]:
    if batch.batch.units:
        return batch.chunks
    return [chunk + chunk[:1] * (-len(chunk) % 4) for chunk in batch.chunks]


BUGS = (
    Planted("PB-20", "a random example on an empty batch", ("DR", "DS"), _drawn(_random_on_empty)),
    Planted("PB-23", "an empty batch is skipped", ("DR", "DN"), (Patch(PrivateStep, "step", _empty_skipped),)),
    Planted("PB-24", "an empty batch is drawn again", ("DS",), _drawn(_redrawn)),
    Planted("PB-25", "shuffled epochs", ("DS",), _drawn(_shuffled)),
    Planted("PB-26", "batches of one size", ("DS",), _drawn(_fixed_size)),
    Planted("PB-27", "the same batches in each epoch", ("DS",), _drawn(_each_epoch_alike)),
    Planted("PB-28", "examples come 1.1 times as often", ("DS",), _drawn(_more_often)),
    Planted("PB-29", "two ranks share masks", ("DS",), _rechunked(_one_mask_for_all)),
    Planted("PB-44", "rows that fill up a batch have gradients", ("DO", "DR"), _rechunked(_padded)),
    Planted("PB-46", "ranks repeat rows to have equally many", ("DS",), _rechunked(_filled_up)),
)
