"""Scratch memory that passes reuse."""

import torch

from dpengine.grad_modes.scratch import Scratch

CPU = torch.device("cpu")


def taken(scratch, *shapes, dtype=torch.float32):
    tensors = [scratch.take(shape, dtype, CPU) for shape in shapes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    return tensors


def test_buffers_of_one_pass_do_not_overlap():
    scratch = Scratch()
    for shapes in ([(3, 5), (7,), (2, 2)], [(3, 5), (7,), (2, 2)], [(100,), (3,), ()], [(1,), (100,)]):
        for dtype in (torch.float32, torch.float64):
            tensors = taken(scratch, *shapes, dtype=dtype)
            for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
                assert tensor.shape == shape and tensor.dtype == dtype and (tensor == number).all()
            scratch.start_again()


def test_memory_is_reused_from_the_second_pass_on():
    scratch, places = Scratch(), []
    for _ in range(4):
        places.append([tensor.data_ptr() for tensor in taken(scratch, (300, 5), (70,))])
        scratch.start_again()
    assert places[1] == places[2] == places[3]
    assert all(place % 64 == 0 for place in places[1])


def test_a_larger_pass_gets_memory_and_the_next_one_room():
    scratch = Scratch()
    for shape in ((10,), (10_000,), (10_000,), (10,)):
        (tensor,) = taken(scratch, shape)
        assert tensor.shape == shape
        scratch.start_again()
    assert len(scratch._block) == 40_000
