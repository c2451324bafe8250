"""The buffer of clipped sums: exact, of a wide dtype, and never the same memory before and after a release."""

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
    one, other = FlatBuffer(listed), FlatBuffer(listed)
    totals = [torch.arange(11.0), torch.arange(11.0) * 3]
    for scale, total in zip((2.0, 0.5), totals, strict=True):
        one.add_all([total], scale)
        for parameter, part in zip(listed, total.split([p.numel() for p in listed]), strict=True):
            other.add(parameter, part, scale)
    for parameter, total in one:
        assert torch.equal(total, dict(other)[parameter])
    with pytest.raises(ValueError, match="those of the parameters"):
        one.add_all([torch.zeros(3)], 1.0)


def test_what_was_taken_is_never_written_again():
    listed = parameters()
    buffer = FlatBuffer(listed)
    buffer.add(listed[0], torch.ones(3, 2))
    taken = buffer.drain()
    flats, views = list(taken.flats.values()), taken.views
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


def test_where_there_was_no_sum_all_is_handed_over_all_the_same():
    listed = parameters()
    taken = FlatBuffer(listed).drain()
    assert [len(memory) for memory in taken.memory.values()] == [len(flat) for flat in taken.flats.values()] == [11]
    assert taken.views.keys() == set(listed)
    assert not any(flat.any() for flat in taken.flats.values())


@pytest.mark.parametrize("interleaved", [False, True], ids=["few spans", "many spans"])
def test_a_vector_of_sums_goes_where_its_parameters_are(interleaved):
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
        if parameter in columns.of:
            part = columns.of[parameter]
            expected = expected + (totals[0][part] + 0.5 * totals[1][part]).view(parameter.shape)
        torch.testing.assert_close(found, expected)


def released(buffer, listed, number):
    """Sums that are all ``number``, released to ``p.grad``."""
    for parameter in listed:
        buffer.add(parameter, torch.full_like(parameter, number))
    views = buffer.drain().views
    for parameter, view in views.items():
        parameter.grad = view


def clear(parameters):
    for parameter in parameters:
        parameter.grad = None


def saved_for_backward(grad):
    return (torch.ones((), requires_grad=True) * grad).sum()


class Holds(nn.Module):
    """Holds a gradient as the gradient of another tensor, without an object of Python."""

    def __init__(self, grad):
        super().__init__()
        self.other = nn.Parameter(torch.zeros_like(grad))
        self.other.grad = grad


HELD = {  # what a user may keep of ``p.grad``, and how the numbers are read later
    "itself": (lambda grad: grad, lambda kept: kept),
    "view": (lambda grad: grad[:2], lambda kept: kept),
    "detached": (lambda grad: grad.detach(), lambda kept: kept),
    "data": (lambda grad: grad.data, lambda kept: kept),
    "array": (lambda grad: grad.numpy(), torch.from_numpy),
    "capsule": (torch.utils.dlpack.to_dlpack, torch.utils.dlpack.from_dlpack),
    "storage": (lambda grad: grad.untyped_storage(), lambda kept: torch.tensor(kept.tolist()).view(torch.uint8)[:0]),
    "graph": (saved_for_backward, lambda kept: kept.grad_fn.next_functions[0][0]._saved_other),
    "gradient of another": (Holds, lambda kept: kept.other.grad),
    "list of an optimizer": (lambda grad: {"state": [grad]}, lambda kept: kept["state"][0]),
}


@pytest.mark.parametrize("held", HELD)
def test_memory_that_somebody_holds_is_not_written_again(held):
    listed = [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(()))]
    keep, read = HELD[held]
    buffer = FlatBuffer(listed)
    released(buffer, listed, 1.0)
    kept, address = keep(listed[0].grad), listed[0].grad.data_ptr()
    clear(listed)
    released(buffer, listed, 7.0)
    assert listed[0].grad.data_ptr() != address
    assert read(kept).eq(1).all()
    assert all(p.grad.eq(7).all() for p in listed)


CHANGED = {
    "accumulated": lambda listed: None,
    "zeroed": lambda listed: [p.grad.zero_() for p in listed],
    "transposed": lambda listed: (listed[0].grad.t_(), clear(listed)),
    "resized": lambda listed: (listed[0].grad.resize_(2), clear(listed)),
    "of other data": lambda listed: (setattr(listed[0].grad, "data", torch.zeros(3, 2)), clear(listed)),
    "requires gradients": lambda listed: (listed[0].grad.requires_grad_(), clear(listed)),
    "marked": lambda listed: (setattr(listed[0].grad, "used", True), clear(listed)),
    "shared": lambda listed: (listed[0].grad.share_memory_(), clear(listed)),
}


@pytest.mark.parametrize("change", CHANGED)
def test_views_that_somebody_changed_are_not_used_again(change):
    listed = [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(5))]
    buffer = FlatBuffer(listed)
    released(buffer, listed, 1.0)
    before = {p: p.grad.data_ptr() for p in listed}
    CHANGED[change](listed)
    released(buffer, listed, 7.0)
    assert all(p.grad.data_ptr() != before[p] and p.grad.shape == p.shape and p.grad.eq(7).all() for p in listed)
    assert not any(p.grad.requires_grad for p in listed)


def test_memory_that_nobody_holds_is_used_again():
    listed = [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(()))]
    buffer = FlatBuffer(listed)
    addresses = set()
    for number in range(4):
        released(buffer, listed, float(number))
        assert all(p.grad.eq(number).all() for p in listed)
        addresses.add(listed[0].grad.data_ptr())
        clear(listed)
    assert len(addresses) == 1
    released(buffer, listed, 1.0)
    clear(listed)
    buffer.add(listed[0], torch.ones(3, 2))  # what has no sum is zero, whatever the memory held
    assert [float(view.sum()) for _, view in buffer] == [6.0, 0.0, 0.0]
