"""Tickets stand for one logical batch and one process."""

import copy
import pickle

import pytest

from dpengine.sampling.batches import LogicalBatch


def test_a_logical_batch_knows_its_step_and_rows():
    batch = LogicalBatch(4, (3, 0, 2))
    assert (batch.step, batch.rows, batch.size) == (4, (3, 0, 2), 5)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda function: function.__name__)
def test_a_logical_batch_cannot_be_copied_or_pickled(duplicate):
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        duplicate(LogicalBatch(0, (1,)))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps], ids=lambda function: function.__name__)
def test_what_holds_a_logical_batch_cannot_be_copied_or_pickled(duplicate):
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        duplicate({"tickets": [LogicalBatch(0, (1,))]})


def test_two_logical_batches_with_equal_contents_are_different():
    first, second = LogicalBatch(0, (1,)), LogicalBatch(0, (1,))
    assert first != second
    assert len({first, second}) == 2


def test_a_logical_batch_cannot_be_changed():
    with pytest.raises(AttributeError):
        LogicalBatch(0, (1,)).step = 1


def test_the_size_that_was_drawn_does_not_show_in_messages():
    assert "37" not in repr(LogicalBatch(0, (37,)))
