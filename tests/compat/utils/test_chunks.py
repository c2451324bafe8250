"""Loaders of one run with other physical batch sizes."""

from types import SimpleNamespace

import pytest
from sampling.doubles import Fixed, Recorder, private, rows_of

from dpengine.compat.opacus.utils.batch_memory_manager import wrap_data_loader
from dpengine.errors import SamplingError


def in_chunks(loader, size):
    optimizer = SimpleNamespace(has_external_batches=False)
    return wrap_data_loader(data_loader=loader, max_batch_size=size, optimizer=optimizer)


BATCHES = ([0, 1, 2, 3, 4], [5, 6], [], [7, 8, 9])


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_with_other_chunk_sizes_belong_to_the_same_run(workers):
    recorder = Recorder()
    whole = private(Fixed(*BATCHES), recorder=recorder, workers=workers)
    chunks = in_chunks(whole, 2)
    assert isinstance(chunks, type(whole))
    assert type(in_chunks(chunks, 3)) is type(chunks)
    assert rows_of(chunks) == [[0, 1], [2, 3], [4], [5, 6], [], [7, 8], [9]]
    assert recorder.steps == [(0, 0, 2), (0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 0), (3, 0, 2), (3, 1, 1)]
    assert chunks.position == whole.position == 4
    assert rows_of(whole) == [[7, 8, 9]] * 4  # undivided, and after the batches already returned
    assert recorder.steps[-1] == (7, 0, 3)
    with pytest.raises(ValueError, match="max_batch_size"):
        in_chunks(whole, 0)


def test_a_pass_in_other_chunks_ends_the_one_that_is_open():
    whole = private(Fixed(*BATCHES))
    first = iter(whole)
    next(first)
    second = iter(in_chunks(whole, 1))
    next(second)
    with pytest.raises(SamplingError, match="another pass started"):
        next(first)
