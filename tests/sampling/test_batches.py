"""Batches and step counts of a private loader, with and without workers, and across ranks."""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from sampling.doubles import Fixed, Recorder, Rows, private, rows_of
from torch.utils.data import DataLoader

from dpengine.errors import SamplingError
from dpengine.noise import NoiseSource
from dpengine.sampling.batches import LogicalBatch
from dpengine.sampling.loader import private_loader
from dpengine.sampling.poisson import PoissonDraws

WORKERS = [0, 2]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.hazard("S5", "D2")
def test_empty_batches_are_returned_at_any_position(workers):
    recorder = Recorder()
    strategy = Fixed([], [3, 7], [], [], [1, 2, 19], [])
    batches = list(private(strategy, recorder=recorder, workers=workers))
    assert rows_of(batches) == [[], [3, 7], [], [], [1, 2, 19], []]
    assert batches[0]["x"].shape == (0, 3)
    assert batches[0]["x"].dtype == torch.float32
    assert batches[0]["name"] == []
    assert batches[4]["name"] == ["row 1", "row 2", "row 19"]
    assert recorder.steps == [(0, 0, 0), (1, 0, 2), (2, 0, 0), (3, 0, 0), (4, 0, 3), (5, 0, 0)]


@pytest.mark.parametrize("workers", WORKERS)
def test_a_run_of_empty_batches_only(workers):
    assert rows_of(private(Fixed([], [], []), workers=workers)) == [[], [], []]


@pytest.mark.one_in(3, "workers", "physical", others="slow")
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("physical", [1, 2, 3, 4, 5, 100])
def test_physical_chunks_are_nearly_equal_and_none_is_too_large(workers, physical):
    recorder = Recorder()
    logical = [[*range(13)], [], [4], [*range(7)]]
    batches = rows_of(private(Fixed(*logical), recorder=recorder, workers=workers, physical_batch_size=physical))
    tickets = list(dict.fromkeys(ticket for ticket, _ in recorder.handed))
    assert [ticket.size for ticket in tickets] == [13, 0, 1, 7]
    assert [len(batch) for batch in batches] == [rows for ticket in tickets for rows in ticket.sizes]
    for ticket, indices in zip(tickets, logical, strict=True):
        chunks = [batches.pop(0) for _ in ticket.sizes]
        assert list(itertools.chain(*chunks)) == indices
        assert len(chunks) == max(1, math.ceil(len(indices) / physical))
        assert max(ticket.sizes) <= physical
        assert max(ticket.sizes) - min(ticket.sizes) <= 1


@pytest.mark.parametrize("workers", WORKERS)
def test_accumulation_steps_sets_the_number_of_chunks(workers):
    recorder = Recorder()
    batches = rows_of(private(Fixed([5, 6], [], [*range(7)]), recorder=recorder, workers=workers, accumulation_steps=3))
    assert [len(batch) for batch in batches] == [1, 1, 0, 0, 0, 0, 3, 2, 2]
    assert recorder.steps == [
        (0, 0, 1), (0, 1, 1), (0, 2, 0), (1, 0, 0), (1, 1, 0), (1, 2, 0), (2, 0, 3), (2, 1, 2), (2, 2, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("workers", WORKERS)
def test_on_return_is_called_immediately_before_each_chunk(workers):
    recorder = Recorder()
    for number, batch in enumerate(private(Fixed([1], [2, 3], [], [4]), recorder=recorder, workers=workers)):
        ticket, chunk = recorder.handed[-1]
        assert len(recorder.handed) == number + 1
        assert (ticket.step, chunk, ticket.sizes) == (number, 0, (len(batch["y"]),))


@pytest.mark.parametrize("workers", WORKERS)
def test_each_pass_continues_after_the_previous_one(workers, seeded_words):
    recorder = Recorder()
    strategy = PoissonDraws(20, 0.2, 5, 4.0)
    loader = private(strategy, words=seeded_words(1), recorder=recorder, workers=workers)
    seen = [rows_of(loader), rows_of(loader)]
    assert [ticket.step for ticket, _ in recorder.handed] == list(range(10)) == recorder.asked
    assert list(itertools.chain(*seen)) == [strategy.draw(step, seeded_words(1)).tolist() for step in range(10)]
    assert loader.position == 10


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.hazard("S10")
def test_prefetched_batch_that_was_not_returned_is_drawn_again(workers, seeded_words):
    recorder = Recorder()
    strategy = PoissonDraws(20, 0.2, 8, 4.0)
    loader = private(strategy, words=seeded_words(2), recorder=recorder, workers=workers)
    seen = []
    for batch in loader:
        seen.append(batch["y"].tolist())
        if len(seen) == 3:
            break
    assert loader.position == 3
    seen += rows_of(loader)
    assert loader.position == 11
    assert seen == [strategy.draw(step, seeded_words(2)).tolist() for step in range(11)]
    assert [ticket.step for ticket, _ in recorder.handed] == list(range(11))


def test_partially_returned_batch_is_not_returned_again():
    recorder = Recorder()
    loader = private(Fixed([1, 2, 3], [4]), recorder=recorder, physical_batch_size=2)
    for _ in loader:
        break
    assert loader.position == 1
    assert next(iter(loader))["y"].tolist() == [4]
    assert recorder.steps == [(0, 0, 2), (1, 0, 1)]


def test_step_is_consumed_if_the_callback_raises():
    class Failing(Recorder):
        def on_return(self, ticket, chunk, data=None):
            super().on_return(ticket, chunk)
            if ticket.step == 1:
                raise RuntimeError("no")

    recorder = Failing()
    loader = private(Fixed([1], [2], [3]), recorder=recorder)
    with pytest.raises(RuntimeError, match="no"):
        list(loader)
    assert loader.position == 2


@pytest.mark.parametrize("workers", WORKERS)
def test_pass_ends_when_may_draw_returns_false(workers):
    recorder = Recorder(budget=2)
    loader = private(Fixed([1], [2], [3], [4]), recorder=recorder, workers=workers)
    assert rows_of(loader) == [[1], [2]]
    assert rows_of(loader) == []
    assert recorder.asked == [0, 1, 2, 2]
    assert loader.position == 2


@pytest.mark.parametrize("workers", WORKERS)
def test_may_draw_is_called_when_the_batch_is_requested(workers):
    recorder = Recorder()
    loader = private(Fixed(*[[1]] * 6), recorder=recorder, workers=workers)
    for number, _ in enumerate(loader):
        assert recorder.asked == list(range(number + 1))
        assert [ticket.step for ticket, _ in recorder.handed] == recorder.asked


def test_loader_without_workers_does_not_prefetch():
    strategy = Fixed([1], [], [2])
    for number, _ in enumerate(private(strategy)):
        assert strategy.drawn == list(range(number + 1))


def test_starting_a_second_pass_ends_the_first():
    loader = private(Fixed([1], [2], [3], [4]))
    first, second = iter(loader), iter(loader)
    assert next(first)["y"].tolist() == [1]
    assert next(second)["y"].tolist() == [2]
    with pytest.raises(SamplingError, match="one iterator at a time"):
        next(first)
    assert next(second)["y"].tolist() == [3]
    assert loader.position == 3


def test_enumerate_zip_and_length_work():
    loader = private(Fixed([1], [2], [3]))
    assert len(loader) == len(loader.batch_sampler) == 3
    assert [(number, batch["y"].item()) for number, batch in enumerate(loader)] == [(0, 1), (1, 2), (2, 3)]
    assert [number for number, _ in zip(range(2), loader, strict=False)] == [0, 1]


def test_tqdm_knows_the_number_of_steps():
    tqdm = pytest.importorskip("tqdm")
    bar = tqdm.tqdm(private(Fixed([1], [2], [3])), disable=True)
    assert len(bar) == 3
    assert len(list(bar)) == 3


@pytest.mark.parametrize("workers", WORKERS)
def test_resumed_loader_returns_the_same_batches(workers, seeded_words):
    strategy = PoissonDraws(20, 0.2, 6, 4.0)
    straight = rows_of(private(strategy, words=seeded_words(3)))
    first = private(strategy, words=seeded_words(3), workers=workers)
    seen = [batch["y"].tolist() for _, batch in zip(range(2), first, strict=False)]
    assert first.state_dict() == {"position": 2}
    second = private(strategy, words=seeded_words(3), workers=workers)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    seen += rows_of(second)
    assert seen[:6] == straight
    assert second.position == 8


def test_loading_a_state_ends_the_open_pass():
    loader = private(Fixed([1], [2], [3]))
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict({"position": 0})
    with pytest.raises(SamplingError, match="a state was loaded"):
        next(iterator)
    assert next(iter(loader))["y"].tolist() == [1]


@pytest.mark.parametrize("state", [{}, {"position": -1}, {"position": 1, "more": 2}])
def test_a_bad_state_is_rejected(state):
    with pytest.raises(ValueError, match="position"):
        private(Fixed([1])).load_state_dict(state)


def test_a_copy_continues_the_same_run():
    for duplicate in (copy.copy, copy.deepcopy):
        recorder = Recorder()
        loader = private(Fixed([1], [2], [3], [4]), recorder=recorder)
        other = duplicate(loader)
        assert next(iter(loader))["y"].tolist() == [1]
        assert next(iter(other))["y"].tolist() == [2]
        assert loader.position == other.position == 2
        assert [ticket.step for ticket, _ in recorder.handed] == [0, 1]


@pytest.mark.hazard("N4")
def test_a_private_loader_cannot_be_pickled():
    with pytest.raises(TypeError, match="another process would return the same batches"):
        pickle.dumps(private(Fixed([1])))


@pytest.mark.parametrize("workers", WORKERS)
def test_loader_that_reuses_the_batch_sampler_reports_its_batches(workers):
    recorder = Recorder(budget=5)
    loader = private(Fixed([1], [], [2, 3]), recorder=recorder)
    around = DataLoader(
        [{"y": index} for index in range(20)],
        batch_sampler=loader.batch_sampler,
        collate_fn=loader.collate_fn,
        num_workers=workers,
    )
    assert rows_of(around) == [[1], [], [2, 3]]
    assert recorder.steps == [(0, 0, 1), (1, 0, 0), (2, 0, 2)]
    assert len(list(around)) == 2
    assert loader.position == 5


def test_dataset_error_ends_the_pass_without_consuming_a_step():
    class Broken(Rows):
        def __getitem__(self, index):
            if index == 7:
                raise OSError("disk")
            return super().__getitem__(index)

    loader = private(Fixed([1], [7], [2]), loader=DataLoader(Broken(), batch_size=2))
    with pytest.raises(OSError, match="disk"):
        list(loader)
    assert loader.position == 1


def test_logical_batch_stores_its_step_and_indices():
    batch = LogicalBatch(4, (3, 0, 2))
    assert (batch.step, batch.sizes, batch.size) == (4, (3, 0, 2), 5)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda function: function.__name__)
def test_a_logical_batch_and_its_containers_cannot_be_copied_or_pickled(duplicate):
    batch = LogicalBatch(0, (1,))
    for holder in (batch,) if duplicate is copy.copy else (batch, {"batches": [batch]}):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            duplicate(holder)


def test_two_logical_batches_with_equal_contents_are_different():
    first, second = LogicalBatch(0, (1,)), LogicalBatch(0, (1,))
    assert first != second
    assert len({first, second}) == 2


def test_a_logical_batch_cannot_be_changed():
    with pytest.raises(AttributeError):
        LogicalBatch(0, (1,)).step = 1


def test_messages_do_not_contain_the_drawn_batch_size():
    assert "37" not in repr(LogicalBatch(0, (37,)))


ROWS, STEPS = 48, 50


def batches_of(rank, ranks):
    """Returns the examples that a rank loads, by step; each call has its own source of random words."""
    source = NoiseSource.seeded(4)
    loader = private_loader(
        DataLoader(range(ROWS), batch_size=6),
        sampling=PoissonDraws(ROWS, 0.2, STEPS, 9.6),
        words=lambda count, *, step, block: source.words(count, domain="mask", step=step, block=block << 32),
        on_return=lambda batch, chunk, data: None,
        may_draw=lambda step: True,
        shard=(rank, ranks),
    )
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.hazard("S7", "S8")
def test_ranks_partition_the_examples_of_each_batch(ranks):
    whole = batches_of(0, 1)
    shares = [batches_of(rank, ranks) for rank in range(ranks)]
    for step, rows in enumerate(whole):
        assert sorted(row for share in shares for row in share[step]) == sorted(rows)
    sizes = np.array([[len(batch) for batch in share] for share in shares])
    assert sizes.sum() > 5 * STEPS  # of 9.6 expected in each
    assert (sizes.max(0) - sizes.min(0)).max() <= 1
