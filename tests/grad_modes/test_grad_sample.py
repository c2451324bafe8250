"""Gradients on demand: the first operation computes the values, and later operations reuse them."""

import copy
import io

import pytest
import torch

from dpengine.errors import MissingGradientError, StaleGradientError
from dpengine.grad_modes.grad_sample import OnDemand


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
    assert shown.formed is None
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
def test_every_read_operation_gives_the_values(read):
    shown, values, calls = on_demand()
    assert torch.equal(read(shown), values)
    assert torch.equal(read(shown), values)
    assert len(calls) == 1
    assert shown.formed is not None


WRITES = {
    "mul_": lambda one: one.mul_(3),
    "item": lambda one: one.__setitem__(0, 7.0),
    "data": lambda one: one.data.mul_(3),
    "out": lambda one: torch.mul(torch.ones(2, 3), 5, out=one),
    "foreach": lambda one: torch._foreach_mul_([one], 3.0),
    "zero": lambda one: one.zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_write_operation_changes_later_reads(write):
    shown, values, _ = on_demand()
    expected = values.clone()
    write(expected)
    write(shown)
    assert torch.equal(shown + 0, expected)
    assert shown.formed is not None


@pytest.mark.parametrize("error", [MissingGradientError, StaleGradientError])
def test_values_that_cannot_be_formed_raise_when_they_are_read_and_are_saved_as_none(error):
    def form():
        raise error("The batch is gone.")

    shown = OnDemand(form, (2, 3), dtype=torch.float32, device=torch.device("cpu"))
    for _ in range(2):
        with pytest.raises(error, match="The batch is gone"):
            _ = shown + 0
    assert shown.shape == (2, 3)
    assert _saved(shown) is None
