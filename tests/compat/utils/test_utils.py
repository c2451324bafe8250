"""Utilities under Opacus's names: properties of modules; norms, sums and windows of tensors."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpengine.compat.opacus.utils.module_utils import (
    are_state_dict_equal,
    clone_module,
    get_submodule,
    has_trainable_params,
    parametrized_modules,
    requires_grad,
    trainable_modules,
    trainable_parameters,
)
from dpengine.compat.opacus.utils.packed_sequences import compute_seq_lengths
from dpengine.compat.opacus.utils.tensor_utils import (
    calc_sample_norms,
    calc_sample_norms_one_layer,
    filter_dilated_rows,
    sum_over_all_but_batch_and_last_n,
    unfold2d,
    unfold3d,
)


def model():
    one = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 1)))
    one[0].requires_grad_(False)
    return one


def test_modules_that_own_parameters_are_found_frozen_or_not():
    one = model()
    assert list(parametrized_modules(one)) == [("0", one[0]), ("2.0", one[2][0]), ("2.1", one[2][1])]
    assert list(trainable_modules(one)) == [("2.0", one[2][0]), ("2.1", one[2][1])]
    assert [has_trainable_params(part) for part in (one, one[0], one[1], one[2], one[2][1])] == [False] * 4 + [True]


def test_one_trainable_parameter_makes_a_module_trainable():
    layer = nn.Linear(2, 3)
    layer.weight.requires_grad_(False)
    assert [name for name, _ in trainable_modules(layer)] == [""]
    assert [name for name, _ in trainable_parameters(layer)] == ["bias"]


def test_trainable_parameters_leave_out_frozen_ones():
    assert [name for name, _ in trainable_parameters(model())] == ["2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias"]


def test_submodules_count_only_if_requested():
    assert (requires_grad(model()), requires_grad(model(), recurse=True)) == (False, True)
    assert not requires_grad(model()[0], recurse=True)


def test_a_clone_has_parameters_of_its_own_and_needs_no_importable_class():
    class InANotebook(nn.Linear):
        pass

    one = InANotebook(2, 3)
    other = clone_module(one)
    assert type(other) is InANotebook and are_state_dict_equal(one.state_dict(), other.state_dict())
    with torch.no_grad():
        other.weight.add_(1)
    assert not are_state_dict_equal(one.state_dict(), other.state_dict())


def test_a_submodule_is_found_by_its_dotted_name():
    one = model()
    assert get_submodule(one, "2.1") is one[2][1] and get_submodule(one, "") is one
    for target in ("2.7", "0.weight"):
        with pytest.raises(AttributeError):
            get_submodule(one, target)


EQUAL = {"p": torch.tensor([1.0, 2.0]), "n": torch.tensor(3), "b": torch.tensor([True, False])}
CHANGES = {
    "value": {"p": torch.tensor([1.0, 2.1])},
    "shape": {"p": torch.tensor([[1.0, 2.0]])},
    "count": {"n": torch.tensor(4)},
    "mask": {"b": torch.tensor([True, True])},
    "kind": {"n": 3},
}


def test_states_within_rounding_are_equal():
    rounded = {**EQUAL, "p": EQUAL["p"] * (1 + 1e-7)}
    assert are_state_dict_equal(EQUAL, rounded)
    assert are_state_dict_equal(EQUAL, {**EQUAL, "p": EQUAL["p"].double()})


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_states_that_differ_are_not_equal(change):
    assert not are_state_dict_equal(EQUAL, {**EQUAL, **change})


def test_states_with_other_keys_are_not_equal():
    fewer = {"p": EQUAL["p"]}
    renamed = {"q" if key == "p" else key: value for key, value in EQUAL.items()}
    assert not are_state_dict_equal(EQUAL, fewer)
    assert not are_state_dict_equal(fewer, EQUAL)
    assert not are_state_dict_equal(EQUAL, renamed)


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


def test_norms_of_empty_batches_and_of_scalars():
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


def test_same_padding_in_two_dimensions_puts_the_odd_zero_at_the_end():
    torch.manual_seed(0)
    image, weight = torch.randn(2, 3, 7, 6), torch.randn(4, 3, 2, 4)
    options = {"padding": "same", "dilation": (1, 1)}
    windows = unfold2d(image, kernel_size=(2, 4), stride=(1, 1), **options)
    expected = F.conv2d(image, weight, **options)
    torch.testing.assert_close((weight.view(4, -1) @ windows).view_as(expected), expected)


def test_single_numbers_apply_to_all_axes_in_three_dimensions():
    volume = torch.randn(1, 2, 5, 5, 5)
    number = unfold3d(volume, kernel_size=2, padding=1, stride=2, dilation=2)
    tuples = unfold3d(volume, kernel_size=(2,) * 3, padding=(1,) * 3, stride=(2,) * 3, dilation=(2,) * 3)
    assert torch.equal(number, tuples)
    with pytest.raises(ValueError, match=r"\(2, 5, 5, 5\)"):
        unfold3d(volume[0], kernel_size=2)


def test_dilated_windows_keep_values_at_the_dilation_step():
    tensor = torch.randn(2, 3, 5, 3, 4)
    kept = filter_dilated_rows(tensor, (2, 1, 3), (5, 3, 4), (3, 3, 2))
    assert kept.shape == (2, 3, 3, 3, 2)
    assert torch.equal(kept, tensor[:, :, [0, 2, 4]][..., [0, 3]])


def test_lengths_of_packed_sequences_are_in_descending_order():
    for lengths in ([5, 3, 3, 1], [1, 1, 1], [4], [2, 2]):
        packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(n, 2) for n in lengths])
        assert compute_seq_lengths(packed.batch_sizes) == lengths
    assert compute_seq_lengths(torch.zeros(0, dtype=torch.int64)) == []
