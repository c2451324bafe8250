"""Positions of shards in the flattened parameter, which address their noise."""

import itertools

import pytest
import torch

from dpengine.distributed.local_shards import Box, LocalShard, StridedPositions


def numbers(positions):
    return [
        positions.start + row * positions.stride + i for row in range(positions.rows) for i in range(positions.length)
    ]


def cuts(shape):
    """Yields boxes that cover a part, or all, of each axis."""
    ranges = [[(0, n), *([(1, n - 2), (n - 1, 1)] if n > 2 else [])] for n in shape]
    for box in itertools.product(*ranges):
        yield Box(tuple(start for start, _ in box), tuple(size for _, size in box))


@pytest.mark.parametrize("shape", [(), (7,), (5, 4), (4, 3, 5), (3, 4, 3, 5)], ids=str)
def test_positions_of_a_shard_equal_its_flat_indices(shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for box in cuts(shape):
        found = LocalShard(shape, Box.full(shape), box).positions
        assert [n for positions in found for n in numbers(positions)] == whole[
            box.slices_in(Box.full(shape))
        ].flatten().tolist()
        assert sum(positions.count for positions in found) == box.numel


def test_the_description_of_a_matrix_does_not_depend_on_its_chunks():
    for box in cuts((50, 40)):
        assert len(LocalShard((50, 40), Box.full((50, 40)), box).positions) == 1


def test_an_empty_shard_has_no_positions():
    assert LocalShard((3, 4), Box.full((3, 4)), Box((3, 0), (0, 4))).positions == []
    assert StridedPositions(3, 4, 2, 10).shifted(100) == StridedPositions(103, 4, 2, 10)
