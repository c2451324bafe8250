"""Compiled norms and gradients of sums of outer products; the oracles are einsum and unfold in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from dpengine.kernels import products
from dpengine.kernels.library import native_library

pytestmark = pytest.mark.skipif(native_library() is None, reason="native code is not built here")
CANARY = 0x5A


@pytest.fixture(autouse=True, params=[0, 1, 2], ids=["any", "avx2", "avx512"])
def level(request):
    native_library().allow_vectors(request.param)
    yield request.param
    native_library().allow_vectors(2)


@pytest.fixture
def fenced(monkeypatch):
    """Adds guard elements after the workspace, which must not be overwritten."""
    original, fences = products._work, []

    def work(each, rows):
        _, threads = original(each, rows)
        size = threads * each
        memory = torch.full((size + 64 + 4096,), CANARY, dtype=torch.uint8)
        fences.append(memory[products._aligned(memory) - memory.data_ptr() + size :])
        return memory, threads

    monkeypatch.setattr(products, "_work", work)
    yield
    assert fences
    assert all((fence == CANARY).all() for fence in fences)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 8, 15, 16, 17, 31, 32, 33, 64, 100, 1000])
def test_squared_norms_are_exact_for_every_length(size):
    torch.manual_seed(size)
    tensor = torch.randn(5, size)
    expected = tensor.double().square().sum(dim=1)
    torch.testing.assert_close(products.native_sq_norms(tensor), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 3e38])
def test_squares_outside_the_range_of_float32_are_included(scale):
    tensor = torch.full((2, 100), scale)
    expected = tensor.double().square().sum(dim=1)
    torch.testing.assert_close(products.native_sq_norms(tensor), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, 3:20],
        lambda t: t[1:2].expand(4, -1),
        lambda t: t.view(6, 4, 10),
        lambda t: t.view(6, 4, 10).transpose(0, 1),
        lambda t: t.view(2, 3, 40).transpose(1, 2),
        lambda t: t[:0],
    ],
)
def test_squared_norms_of_views(view):
    torch.manual_seed(0)
    tensor = view(torch.randn(6, 40))
    found = products.native_sq_norms(tensor)
    assert found.shape == tensor.shape[:-1]
    torch.testing.assert_close(found, tensor.double().square().sum(dim=-1), rtol=1e-14, atol=0)


def test_many_rows_are_divided_over_threads(two_threads):
    tensor = torch.randn(300, 1000)
    expected = tensor.double().square().sum(dim=1)
    torch.testing.assert_close(products.native_sq_norms(tensor), expected, rtol=1e-14, atol=0)


def dense(*factors):
    letters = "ijk"[: len(factors)]
    equation = ",".join(f"bt{letter}" for letter in letters) + f"->b{letters}"
    return torch.einsum(equation, *[f.double() for f in factors]).flatten(1).square().sum(dim=1)


def parts(*factors):
    return math.prod(f.double().norm(dim=2) for f in factors).sum(dim=1)


def check_grams(factors, listed):
    sq_norm, rounding_scale = products.gram_norms(factors, listed)
    for which, found, rounding_scale_B in zip(listed, sq_norm, rounding_scale, strict=True):
        chosen = [factors[i] for i in which]
        torch.testing.assert_close(found, dense(*chosen), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(rounding_scale_B, parts(*chosen), rtol=1e-12, atol=0)


@pytest.mark.one_in(6, "sizes", "length", others="slow")
@pytest.mark.one_in(3, "sizes", "length")
@pytest.mark.parametrize("sizes", [(1, 1), (3, 8), (16, 17), (40, 7), (300, 9), (256, 512)])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 6, 15, 16, 31, 65])
def test_gram_norms_for_every_length_and_width(fenced, length, sizes):
    torch.manual_seed(length)
    check_grams([torch.randn(3, length, size) for size in sizes], [(0, 1)])


def test_products_share_grams(fenced):
    torch.manual_seed(0)
    check_grams([torch.randn(4, 13, size) for size in (5, 30, 9)], [(0, 1), (1, 2), (2,), (0, 1, 2), (1, 1)])


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.transpose(1, 2),
        lambda t: t.transpose(0, 1),
        lambda t: t[:, ::2],
        lambda t: t[:, :, 1::2],
        lambda t: t[:1].expand(4, -1, -1),
        lambda t: t[:, :1].expand(-1, 8, -1),
    ],
)
def test_grams_of_views(fenced, view):
    torch.manual_seed(0)
    factor = view(torch.randn(6, 7, 12))
    check_grams([factor, torch.randn(*factor.shape[:2], 5)], [(0, 1)])


def test_gram_norms_are_not_negative_if_positions_cancel():
    factor = torch.randn(2, 6, 50)
    factor[:, 3:] = factor[:, :3]
    signs = torch.tensor([1.0, 1, 1, -1, -1, -1]).view(1, 6, 1).expand(2, 6, 40)
    found = products.gram_norms([factor, signs], [(0, 1)])[0]
    assert ((found >= 0) & (found < 1e-9)).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_values_stay_in_their_row(two_threads, bad):
    torch.manual_seed(0)
    one, other = torch.randn(9, 12, 20), torch.randn(9, 12, 30)
    whole = products.gram_norms([one, other], [(0, 1)])[0][0]
    windows = products.Windows(torch.randn(9, 4, 6, 6), torch.randn(9, 8, 4, 4), 1, (3, 3), (1, 1), (1, 1))
    summed = products.window_grads(windows)
    one[4, 3, 2] = windows.wide[4, 1, 2, 3] = bad
    for before, now in (
        (whole, products.gram_norms([one, other], [(0, 1)])[0][0]),
        (summed, products.window_grads(windows)),
    ):
        assert not now[4].isfinite()
        kept = torch.arange(9) != 4
        assert torch.equal(now[kept], before[kept])


def test_results_do_not_depend_on_the_number_of_threads(two_threads):
    torch.manual_seed(0)
    factors = [torch.randn(50, 20, 30), torch.randn(50, 20, 40)]
    windows = products.Windows(torch.randn(50, 4, 9, 9), torch.randn(50, 8, 7, 7), 2, (3, 3), (1, 1), (1, 1))
    together = products.gram_norms(factors, [(0, 1)])[0], products.window_grads(windows)
    torch.set_num_threads(1)
    alone = products.gram_norms(factors, [(0, 1)])[0], products.window_grads(windows)
    assert all(map(torch.equal, together, alone))


CASES = {
    # kernel, stride, dilation, size, groups, C, K
    "1d": ((4,), (1,), (1,), (9,), 1, 3, 5),
    "1d-strided": ((5,), (3,), (2,), (30,), 1, 2, 8),
    "1d-wide": ((19,), (1,), (1,), (40,), 1, 2, 9),
    "2d-1": ((1, 1), (1, 1), (1, 1), (5, 4), 1, 20, 16),
    "2d-2": ((2, 2), (2, 2), (1, 1), (6, 8), 1, 3, 4),
    "2d-3": ((3, 3), (1, 1), (1, 1), (7, 6), 1, 4, 17),
    "2d-4": ((4, 4), (2, 2), (1, 1), (11, 11), 1, 16, 32),
    "2d-5": ((5, 5), (1, 2), (1, 1), (9, 9), 1, 1, 1),
    "2d-7": ((7, 7), (2, 2), (1, 1), (15, 15), 1, 3, 10),
    "2d-8": ((8, 8), (2, 2), (1, 1), (34, 34), 1, 1, 16),
    "2d-groups": ((3, 2), (1, 2), (2, 1), (8, 9), 3, 2, 8),
    "2d-many-positions": ((3, 3), (1, 1), (1, 1), (40, 40), 1, 10, 12),
    "3d": ((2, 3, 2), (1, 2, 1), (1, 1, 2), (4, 7, 6), 2, 2, 3),
}


def windows_of(case):
    kernel, stride, dilation, size, groups, channels, high = CASES[case]
    places = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(size, kernel, stride, dilation, strict=True)]
    wide, narrow = torch.randn(3, groups * channels, *size), torch.randn(3, groups * high, *places)
    return products.Windows(wide, narrow, groups, kernel, stride, dilation), (groups * high, channels)


def summed(c, channels):
    """Returns the weight gradients of an ordinary convolution for each sample."""
    conv = (F.conv1d, F.conv2d, F.conv3d)[len(c.kernel) - 1]
    weight = torch.zeros(*channels, *c.kernel, dtype=torch.float64, requires_grad=True)
    rows = []
    for wide, narrow in zip(c.wide.double().split(1), c.narrow.double().split(1), strict=True):
        output = conv(wide, weight, stride=c.stride, dilation=c.dilation, groups=c.groups)
        rows.append(torch.autograd.grad(output, weight, narrow)[0])
    return torch.stack(rows)


@pytest.mark.parametrize("case", CASES)
def test_window_gradients_are_those_of_the_convolution(fenced, case):
    torch.manual_seed(0)
    windows, channels = windows_of(case)
    truth = summed(windows, channels)
    fence = torch.full((truth.numel() + 64,), math.nan)
    out = fence[: truth.numel()].view(truth.shape)
    found = products.window_grads(windows, out)
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found, out.double().square().flatten(1).sum(dim=1), rtol=1e-12, atol=0)
    assert fence[truth.numel() :].isnan().all()
    assert torch.equal(products.window_grads(windows), found)


@pytest.mark.parametrize("features_last", [True, False])
@pytest.mark.parametrize("shape", [(3, 5), (3, 1, 40), (3, 21, 17), (3, 6, 2, 19)], ids=str)
def test_sums_over_positions_are_exact(fenced, shape, features_last):
    torch.manual_seed(0)
    grads = torch.randn(shape)
    windows = products.Windows.of_ones(grads, features_last=features_last)
    if grads.dim() > 2:
        truth = grads.double().flatten(1, -2).sum(dim=1) if features_last else grads.double().flatten(2).sum(dim=2)
    else:
        truth = grads.double()
    out = torch.full_like(truth, math.nan, dtype=torch.float32)
    found = products.window_grads(windows, out)
    assert torch.equal(out, truth.float())
    torch.testing.assert_close(found, out.double().square().sum(dim=1), rtol=1e-12, atol=0)
    assert torch.equal(products.window_grads(windows), found)


def test_adjacent_windows_give_exact_gradients(fenced):
    torch.manual_seed(0)
    for width, high in [(16, 8), (32, 5), (48, 17), (7, 8)]:
        acts, grads = torch.randn(3, 33, width), torch.randn(3, 33, high)
        windows = products.Windows(acts.view(3, 1, -1), grads, 1, (width,), (width,), (1,), features_last=True)
        matrix = torch.full((3, high * width + 5), math.nan)  # rows of other lengths, as in a matrix of all gradients
        found = products.window_grads(windows, matrix[:, 2 : 2 + high * width])
        truth = torch.einsum("bto,bti->boi", grads.double(), acts.double()).flatten(1)
        torch.testing.assert_close(matrix[:, 2:-3].double(), truth, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(found, matrix[:, 2:-3].double().square().sum(dim=1), rtol=1e-12, atol=0)
        assert matrix[:, :2].isnan().all() and matrix[:, -3:].isnan().all()


def test_windows_may_be_views(fenced):
    torch.manual_seed(0)
    windows, channels = windows_of("2d-3")
    last = windows.wide.contiguous(memory_format=torch.channels_last), windows.narrow[:1].expand_as(windows.narrow)
    viewed = products.Windows(*last, windows.groups, windows.kernel, windows.stride, windows.dilation)
    truth = summed(viewed, channels).square().flatten(1).sum(dim=1)
    torch.testing.assert_close(products.window_grads(viewed), truth, rtol=1e-5, atol=0)


def test_only_float32_cpu_tensors_have_kernels():
    assert products.has_kernels(torch.zeros(2), torch.zeros(3))
    assert not products.has_kernels(torch.zeros(2), torch.zeros(3, dtype=torch.float64))
    assert not products.has_kernels(torch.zeros(2, device="meta"))
    assert not products.has_kernels(torch.zeros(2).to_sparse())


def test_large_gram_matrices_and_windows_are_not_supported():
    assert products.has_gram_kernel(64, 3)
    assert not products.has_gram_kernel(5000, 2)
    large = products.Windows(torch.zeros(2, 2000, 3, 3), torch.zeros(2, 2000, 1, 1), 1, (3, 3), (1, 1), (1, 1))
    assert not large.is_supported()
