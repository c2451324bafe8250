"""External batches, and loaders of one run in chunks of another size."""

import pytest
from sampling.doubles import Fixed, Recorder, private, rows_of

from dpengine.errors import SamplingError
from dpengine.sampling.external import ExternalBatches


def test_external_batches_are_never_drawn():
    scheme = ExternalBatches(4)
    assert (scheme.expected_batch_size, scheme.sample_rate, scheme.claims_epsilon) == (4.0, 1.0, False)
    with pytest.raises(TypeError, match="training loop"):
        scheme.draw(0, None)
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="ExternalBatches"):
            ExternalBatches(wrong)


BATCHES = ([0, 1, 2, 3, 4], [5, 6], [], [7, 8, 9])


@pytest.mark.parametrize("workers", [0, 2])
def test_chunks_of_another_size_are_of_the_same_run(workers):
    recorder = Recorder()
    whole = private(Fixed(*BATCHES), recorder=recorder, workers=workers)
    chunks = whole.in_chunks(2)
    assert type(chunks) is type(whole)
    assert rows_of(chunks) == [[0, 1], [2, 3], [4], [5, 6], [], [7, 8], [9]]
    assert recorder.steps == [(0, 0, 2), (0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 0), (3, 0, 2), (3, 1, 1)]
    assert chunks.position == whole.position == 4
    assert rows_of(whole) == [[7, 8, 9]] * 4  # undivided, and behind what was handed out
    assert recorder.steps[-1] == (7, 0, 3)
    with pytest.raises(ValueError, match="physical_batch_size"):
        whole.in_chunks(0)


def test_a_pass_in_other_chunks_ends_the_one_that_is_open():
    whole = private(Fixed(*BATCHES))
    first = iter(whole)
    next(first)
    second = iter(whole.in_chunks(1))
    next(second)
    with pytest.raises(SamplingError, match="another was started"):
        next(first)
