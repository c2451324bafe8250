"""Positions of parts of a parameter in the flat one, by which their noise is addressed."""

import itertools

import pytest
import torch

from dpengine.distributed.local_shards import Box, LocalShard, StridedPositions


def numbers(positions):
    return [
        positions.start + row * positions.stride + i for row in range(positions.rows) for i in range(positions.length)
    ]


def cuts(shape):
    """Every box that takes a part, or all, of each axis."""
    ways = [[(0, n), *([(1, n - 2), (n - 1, 1)] if n > 2 else [])] for n in shape]
    for way in itertools.product(*ways):
        yield Box(tuple(start for start, _ in way), tuple(size for _, size in way))


@pytest.mark.parametrize("shape", [(), (7,), (5, 4), (4, 3, 5), (3, 4, 3, 5)], ids=str)
def test_the_places_of_a_part_are_those_of_its_numbers(shape):
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


def test_an_empty_part_has_none():
    assert LocalShard((3, 4), Box.full((3, 4)), Box((3, 0), (0, 4))).positions == []
    assert StridedPositions(3, 4, 2, 10).shifted(100) == StridedPositions(103, 4, 2, 10)
