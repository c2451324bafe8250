"""A gradient on demand: formed by the first operation, once, and from then on an ordinary tensor to everybody."""

import copy
import io

import pytest
import torch

from dpengine.errors import MissingGradientError
from dpengine.grad_modes.on_demand import OnDemand


def on_demand(values=None):
    values = torch.arange(6.0).reshape(2, 3) if values is None else values
    calls = []

    def form():
        calls.append(1)
        return values

    return OnDemand(form, tuple(values.shape), dtype=values.dtype, device=values.device), values, calls


def test_shape_dtype_and_device_are_known_without_forming():
    shown, values, calls = on_demand()
    assert (shown.shape, shown.size(), shown.dim(), shown.ndim, len(shown)) == ((2, 3), (2, 3), 2, 2, 2)
    assert (shown.numel(), shown.dtype, shown.device) == (6, values.dtype, values.device)
    assert not shown.requires_grad
    assert shown.untouched
    assert isinstance(shown, torch.Tensor)
    assert not calls


READS = {
    "operator": lambda one: one * 1,
    "method": lambda one: one.clone(),
    "function": lambda one: torch.stack([one, one])[0],
    "list": lambda one: torch.tensor(one.tolist()),
    "numpy": lambda one: torch.from_numpy(one.numpy()),
    "data": lambda one: one.data,
    "einsum": lambda one: torch.einsum("bi->bi", one),
    "in-place on another": lambda one: torch.zeros(2, 3).add_(one),
    "out": lambda one: torch.add(one, 0, out=torch.empty(2, 3)),
    "copy": lambda one: torch.empty(2, 3).copy_(one),
    "deepcopy": lambda one: copy.deepcopy(one) + 0,
    "vmap": lambda one: torch.func.vmap(lambda row: row + 0)(one + 0),
    "foreach": lambda one: torch._foreach_mul([one], 1.0)[0],
    "saved": lambda one: _saved(one) + 0,
}


def _saved(one):
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_every_way_to_read_gives_the_values(read):
    shown, values, calls = on_demand()
    assert torch.equal(read(shown), values)
    assert torch.equal(read(shown), values)
    assert len(calls) == 1
    assert not shown.untouched


WRITES = {
    "mul_": lambda one: one.mul_(3),
    "item": lambda one: one.__setitem__(0, 7.0),
    "data": lambda one: one.data.mul_(3),
    "out": lambda one: torch.mul(torch.ones(2, 3), 5, out=one),
    "foreach": lambda one: torch._foreach_mul_([one], 3.0),
    "zero": lambda one: one.zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_way_to_write_changes_what_is_read_later(write):
    shown, values, _ = on_demand()
    expected = values.clone()
    write(expected)
    write(shown)
    assert torch.equal(shown + 0, expected)
    assert not shown.untouched


def test_what_was_used_up_unseen_says_so_and_what_was_seen_stays():
    unseen, seen = on_demand()[0], on_demand()[0]
    _ = seen + 0
    for one in (unseen, seen):
        one.use_up()
    with pytest.raises(MissingGradientError, match="without ever being formed"):
        _ = unseen + 0
    assert unseen.shape == (2, 3)
    assert torch.equal(seen + 0, torch.arange(6.0).reshape(2, 3))
