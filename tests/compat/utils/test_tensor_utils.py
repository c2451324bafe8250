"""Norms, sums and windows by Opacus's names, in every memory format."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from dpengine.compat.opacus.utils.packed_sequences import compute_seq_lengths
from dpengine.compat.opacus.utils.tensor_utils import (
    calc_sample_norms,
    calc_sample_norms_one_layer,
    filter_dilated_rows,
    sum_over_all_but_batch_and_last_n,
    unfold2d,
    unfold3d,
)

LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels-last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1),
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "sliced": lambda t: torch.stack([t, -t], dim=-1)[..., 0],
    "expanded": lambda t: t[:1].expand(len(t), *t.shape[1:]),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@each_layout
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_norms_are_those_of_each_sample(layout, dtype):
    torch.manual_seed(0)
    one, other = (layout(torch.randn(4, 3, 5, 2, dtype=dtype)) for _ in range(2))
    expected = torch.tensor([[sum(x * x for x in row.flatten().tolist()) ** 0.5 for row in t] for t in (one, other)])
    torch.testing.assert_close(calc_sample_norms_one_layer(one), expected[0].to(dtype))
    apart = calc_sample_norms([("a", one), ("b", other)], flat=False)
    torch.testing.assert_close(torch.stack(apart), expected.to(dtype))
    (flat,) = calc_sample_norms(iter([("a", one), ("b", other)]))
    torch.testing.assert_close(flat, expected.square().sum(0).sqrt().to(dtype))


def test_norms_of_half_precision_do_not_overflow():
    large = torch.full((2, 4), 6e4, dtype=torch.float16)
    norms = calc_sample_norms_one_layer(large)
    assert norms.dtype == torch.float32 and norms.tolist() == pytest.approx([1.2e5] * 2, rel=1e-3)


def test_norms_of_no_samples_and_of_numbers():
    assert calc_sample_norms_one_layer(torch.zeros(0, 3, 2)).shape == (0,)
    assert calc_sample_norms_one_layer(torch.tensor([3.0, -4.0])).tolist() == [3.0, 4.0]
    with pytest.raises(ValueError, match="no tensors"):
        calc_sample_norms([])


def test_sums_keep_the_batch_and_the_last_axes():
    tensor = torch.arange(120.0).view(2, 3, 4, 5)
    for kept, expected in {0: (2,), 1: (2, 5), 2: (2, 4, 5), 3: (2, 3, 4, 5)}.items():
        found = sum_over_all_but_batch_and_last_n(tensor, kept)
        assert found.shape == expected and found.sum() == tensor.sum()
    assert torch.equal(sum_over_all_but_batch_and_last_n(tensor, 1)[1], tensor[1].sum(dim=(0, 1)))


SHAPES_2D = list(itertools.product([(1, 1), (2, 3)], [(0, 0), (1, 2)], [(1, 1), (2, 1)], [(1, 1), (1, 2)]))


@pytest.mark.one_in(3, "layout", "kernel")
@each_layout
@pytest.mark.parametrize("kernel, padding, stride, dilation", SHAPES_2D, ids=str)
def test_windows_in_two_dimensions_are_those_of_torch(layout, kernel, padding, stride, dilation):
    torch.manual_seed(0)
    image = layout(torch.randn(2, 3, 7, 6))
    expected = F.unfold(image.contiguous(), kernel, dilation=dilation, padding=padding, stride=stride)
    found = unfold2d(image, kernel_size=kernel, padding=padding, stride=stride, dilation=dilation)
    assert torch.equal(found, expected)


@pytest.mark.one_in(3, "layout", "padding", "dilation")
@each_layout
@pytest.mark.parametrize("padding", ["same", "valid", (1, 0, 2)], ids=str)
@pytest.mark.parametrize("dilation", [(1, 1, 1), (2, 1, 2)], ids=str)
def test_windows_in_three_dimensions_make_the_convolution(layout, padding, dilation):
    torch.manual_seed(0)
    volume = layout(torch.randn(2, 3, 6, 7, 5, dtype=torch.float64))
    weight = torch.randn(4, 3, 2, 3, 2, dtype=torch.float64)
    windows = unfold3d(volume, kernel_size=(2, 3, 2), padding=padding, dilation=dilation)
    expected = F.conv3d(volume.contiguous(), weight, padding=padding, dilation=dilation)
    torch.testing.assert_close((weight.view(4, -1) @ windows).view_as(expected), expected)


def test_same_padding_in_two_dimensions_puts_the_odd_zero_behind():
    torch.manual_seed(0)
    image, weight = torch.randn(2, 3, 7, 6), torch.randn(4, 3, 2, 4)
    options = {"padding": "same", "dilation": (1, 1)}
    windows = unfold2d(image, kernel_size=(2, 4), stride=(1, 1), **options)
    expected = F.conv2d(image, weight, **options)
    torch.testing.assert_close((weight.view(4, -1) @ windows).view_as(expected), expected)


def test_numbers_stand_for_all_axes_in_three_dimensions():
    volume = torch.randn(1, 2, 5, 5, 5)
    number = unfold3d(volume, kernel_size=2, padding=1, stride=2, dilation=2)
    tuples = unfold3d(volume, kernel_size=(2,) * 3, padding=(1,) * 3, stride=(2,) * 3, dilation=(2,) * 3)
    assert torch.equal(number, tuples)
    with pytest.raises(ValueError, match=r"\(2, 5, 5, 5\)"):
        unfold3d(volume[0], kernel_size=2)


def test_dilated_rows_keep_every_so_manieth_value():
    tensor = torch.randn(2, 3, 5, 3, 4)
    kept = filter_dilated_rows(tensor, (2, 1, 3), (5, 3, 4), (3, 3, 2))
    assert kept.shape == (2, 3, 3, 3, 2)
    assert torch.equal(kept, tensor[:, :, [0, 2, 4]][..., [0, 3]])


def test_lengths_of_packed_sequences_fall():
    for lengths in ([5, 3, 3, 1], [1, 1, 1], [4], [2, 2]):
        packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(n, 2) for n in lengths])
        assert compute_seq_lengths(packed.batch_sizes) == lengths
    assert compute_seq_lengths(torch.zeros(0, dtype=torch.int64)) == []
