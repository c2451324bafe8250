"""The buffer of clipped sums: sums are exact and in float32, and drained memory is never reused."""

import pytest
import torch
from torch import nn

from dpengine.grad_modes.flat_buffer import Columns, FlatBuffer


def parameters():
    return [
        nn.Parameter(torch.zeros(3, 2)),
        nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)),
        nn.Parameter(torch.zeros(())),
    ]


def test_sums_add_up_and_what_was_not_written_is_zero():
    first, second, third = listed = parameters()
    buffer = FlatBuffer(listed)
    for _ in range(3):
        buffer.add(first, torch.ones(3, 2))
    buffer.add(third, torch.tensor(5.0))
    found = dict(buffer)
    assert found[first].eq(3).all() and found[second].eq(0).all() and found[third] == 5
    assert {view.dtype for view in found.values()} == {torch.float32}
    buffer.zero()
    assert not any(view.any() for _, view in buffer)


def test_sums_of_all_parameters_at_once_are_added_in_the_order_of_the_buffer():
    listed = parameters()
    at_once, one_by_one = FlatBuffer(listed), FlatBuffer(listed)
    totals = [torch.arange(11.0), torch.arange(11.0) * 3]
    for scale, total in zip((2.0, 0.5), totals, strict=True):
        at_once.add_all([total], scale)
        for parameter, part in zip(listed, total.split([p.numel() for p in listed]), strict=True):
            one_by_one.add(parameter, part, scale)
    for parameter, total in at_once:
        assert torch.equal(total, dict(one_by_one)[parameter])
    with pytest.raises(ValueError, match="those of the parameters"):
        at_once.add_all([torch.zeros(3)], 1.0)


def test_drained_buffers_are_never_written_again():
    listed = parameters()
    buffer = FlatBuffer(listed)
    buffer.add(listed[0], torch.ones(3, 2))
    drained = buffer.drain()
    flats, views = list(drained.flats.values()), drained.views
    assert buffer.clean
    buffer.add(listed[0], torch.full((3, 2), 7.0))
    assert views[listed[0]].eq(1).all() and views[listed[1]].eq(0).all()
    assert [len(flat) for flat in flats] == [11]


@pytest.mark.hazard("U3")
def test_thousands_of_small_sums_do_not_stagnate_in_half_precision():
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    buffer = FlatBuffer([parameter])
    for _ in range(20_000):
        buffer.add(parameter, torch.full((1,), 1e-3))
    assert abs(float(dict(buffer)[parameter]) - 20.0) < 0.01


def test_empty_sums_are_drained_completely():
    listed = parameters()
    drained = FlatBuffer(listed).drain()
    assert [len(memory) for memory in drained.memory.values()] == [len(flat) for flat in drained.flats.values()] == [11]
    assert drained.views.keys() == set(listed)
    assert not any(flat.any() for flat in drained.flats.values())


@pytest.mark.parametrize("interleaved", [False, True], ids=["few spans", "many spans"])
def test_add_flat_adds_each_slice_to_its_parameter(interleaved):
    listed = [nn.Parameter(torch.zeros(2, 3) if i % 2 else torch.zeros(2)) for i in range(40)]
    chosen = listed[::2] if interleaved else listed[:20]
    torch.manual_seed(0)
    chosen = [chosen[i] for i in torch.randperm(20)]
    ends = torch.tensor([p.numel() for p in chosen]).cumsum(0).tolist()
    columns = Columns({p: slice(end - p.numel(), end) for p, end in zip(chosen, ends, strict=True)})
    totals = [torch.randn(ends[-1]) for _ in range(2)]
    buffer = FlatBuffer(listed)
    buffer.add_flat(columns, totals[0], 1.0)  # overwrites
    buffer.add(listed[1], torch.ones(2, 3))
    buffer.add_flat(columns, totals[1], 0.5)  # adds
    for parameter, found in buffer:
        expected = torch.ones(parameter.shape) * (parameter is listed[1])
        if parameter in columns.slices:
            part = columns.slices[parameter]
            expected = expected + (totals[0][part] + 0.5 * totals[1][part]).view(parameter.shape)
        torch.testing.assert_close(found, expected)
