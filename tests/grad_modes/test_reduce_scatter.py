"""Reduce-scatter of gradient sums: fixed buckets in one order, each sent as soon as it is complete."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from dpengine.distributed.local_shards import Box, LocalShard, ParameterLayout
from dpengine.distributed.topology import Topology
from dpengine.grad_modes import reduce_scatter as module
from dpengine.grad_modes.flat_buffer import FlatBuffer


@dataclass
class TwoAlike:
    """The first of two ranks with equal sums. Records the size of each message, and which ones were waited for."""

    rank: int = 0
    size: int = 2
    left: list[int] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)

    def reduce_scatter(self, whole, part):
        part.copy_(2 * whole.view(2, -1)[0])
        self.left.append(part.numel())
        number = len(self.left) - 1
        return lambda: self.waited.append(number)


def half(parameter):
    whole = Box.full(parameter.shape)
    return LocalShard(tuple(parameter.shape), whole, whole.part(0, 0, 2))


@pytest.fixture
def parameters(monkeypatch):
    monkeypatch.setattr(module, "BUCKET_BYTES", 4 * 8)
    return [nn.Parameter(torch.zeros(4, 2)) for _ in range(5)]  # each fills a bucket


@pytest.fixture
def ranks():
    return TwoAlike()


@pytest.fixture
def buffer(parameters, ranks):
    buffer = FlatBuffer(parameters, Topology(shards=ranks, layout=ParameterLayout(local_shard=half)))
    buffer.begin(("facts",))
    return buffer


def summed(buffer, parameter, number=1.0):
    buffer.add(parameter, torch.full((4, 2), number))
    buffer.complete(parameter)


def test_a_bucket_is_sent_as_soon_as_it_is_complete(buffer, parameters, ranks):
    for i, parameter in enumerate(parameters):
        summed(buffer, parameter)
        assert len(ranks.left) == i + 1


def test_a_bucket_waits_for_its_turn_so_that_the_order_is_the_same_on_all_ranks(buffer, parameters, ranks):
    for parameter in parameters[1:]:
        summed(buffer, parameter)
    assert ranks.left == []
    summed(buffer, parameters[0])
    assert len(ranks.left) == 5


def test_only_a_few_buckets_are_in_memory(buffer, parameters, ranks):
    for parameter in parameters:
        summed(buffer, parameter)
    assert ranks.waited == [0, 1, 2]


def test_unused_parameters_are_sent_at_the_end_as_zeros(buffer, parameters, ranks):
    summed(buffer, parameters[0])
    summed(buffer, parameters[2], 3.0)
    buffer.settle()
    found = dict(buffer)
    assert len(ranks.left) == 5 and sorted(ranks.waited) == [0, 1, 2, 3, 4]
    assert [float(found[p].max()) for p in parameters] == [2, 0, 6, 0, 0]
    assert {view.shape for view in found.values()} == {(2, 2)}


def test_passes_add_up(buffer, parameters):
    for _ in range(3):
        buffer.begin(("facts",))
        for parameter in parameters:
            summed(buffer, parameter)
        buffer.settle()
    assert all(view.eq(6).all() for _, view in buffer)


@pytest.mark.parametrize(("groups", "buckets"), [([0, 0, 1, 1, 1], 2), ([0, 1, 2, 3, 4], 5), ([0] * 5, 1)])
def test_sums_that_are_gathered_together_are_sent_together(parameters, ranks, groups, buckets):
    group = dict(zip(parameters, groups, strict=True)).get
    buffer = FlatBuffer(parameters, Topology(shards=ranks, layout=ParameterLayout(local_shard=half), group=group))
    buffer.begin(("facts",))
    for parameter in parameters:
        summed(buffer, parameter)
    assert len(ranks.left) == buckets


def test_sums_of_several_passes_are_sent_once(buffer, parameters, ranks):
    for _ in range(3):
        buffer.begin(("facts",), defer=True)
        for parameter in parameters:
            summed(buffer, parameter)
    assert ranks.left == [] and buffer.deferred and not buffer.clean
    buffer.settle()
    assert len(ranks.left) == 5 and not buffer.deferred
    assert all(view.eq(6).all() for _, view in buffer)


def test_nothing_is_added_to_sent_buffers(buffer, parameters):
    summed(buffer, parameters[0])
    with pytest.raises(AssertionError, match="was sent"):
        summed(buffer, parameters[0])


def test_pending_messages_are_destroyed_with_the_sums(buffer, parameters, ranks):
    summed(buffer, parameters[0])
    buffer.zero()
    assert buffer.clean
    buffer.begin(("facts",))
    summed(buffer, parameters[0], 5.0)
    buffer.settle()
    assert dict(buffer)[parameters[0]].eq(10).all()


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_each_rank_gets_its_part_of_torch_chunk(axis, ranks):
    whole = torch.arange(2.0 * 5 * 4).view(5, 4, 2) if axis else torch.arange(10.0).view(5, 2)
    parts = whole.chunk(ranks, axis)
    size = parts[0].numel()
    each = torch.full((ranks, size), -1.0)
    module._chunk_into(each, whole, axis)
    for i in range(ranks):
        kept = parts[i].reshape(-1) if i < len(parts) else torch.zeros(0)
        assert torch.equal(each[i, : len(kept)], kept) and each[i, len(kept) :].eq(-1).all()
