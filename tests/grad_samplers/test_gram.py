import pytest
import torch

from dpengine.grad_samplers import gram
from dpengine.grad_samplers.gram import gram_norms, gram_operations, gram_sq_norm
from dpengine.kernels.library import native_library

MAKERS = {
    "normal": lambda *shape: torch.randn(shape),
    "constant": lambda *shape: torch.full(shape, 1 / 3),
    "positive": lambda *shape: torch.rand(shape),
    "positions-alike": lambda rows, length, size: torch.rand(rows, 1, size).expand(rows, length, size),
    "one-large": lambda *shape: torch.cat(
        [torch.ones(*shape[:2], 1), torch.full((*shape[:2], shape[2] - 1), 2.4e-4)], 2
    ),
    "wide-range": lambda *shape: torch.randn(shape).mul(3).exp(),
}


@pytest.fixture
def in_float32(monkeypatch):
    """Computes Gram matrices in float32, as on a device that is slow in float64."""
    monkeypatch.setattr(gram, "fast_in_float64", lambda device: False)


@pytest.fixture(params=["compiled", "float64-gram", "float32-gram"])
def gram_backend(request, monkeypatch):
    """Gram matrices in native code, in torch without it, and in float32."""
    if request.param == "compiled" and native_library() is None:
        pytest.skip("native code is not built here")
    if request.param == "float64-gram":
        monkeypatch.setattr(gram.native, "has_gram_kernel", lambda length, factors: False)
    if request.param == "float32-gram":
        monkeypatch.setattr(gram, "fast_in_float64", lambda device: False)
    return request.param


def truth(*factors):
    letters = "ijk"[: len(factors)]
    equation = ",".join(f"bt{letter}" for letter in letters) + f"->b{letters}"
    return torch.einsum(equation, *[f.double() for f in factors]).flatten(1).square().sum(dim=1)


@pytest.mark.one_in(12, "second", "first", "length", others="slow")
@pytest.mark.one_in(6, "second", "first", "length")
@pytest.mark.parametrize("second", MAKERS)
@pytest.mark.parametrize("first", MAKERS)
@pytest.mark.parametrize(("length", "sizes"), [(2, (64, 65)), (7, (300, 20)), (140, (40, 130))])
def test_float32_norms_are_never_underestimated(gram_backend, first, second, length, sizes):
    torch.manual_seed(0)
    factors = MAKERS[first](3, length, sizes[0]), MAKERS[second](3, length, sizes[1])
    true, found = truth(*factors), gram_sq_norm(*factors).double()
    assert (found >= true * (1 - 1e-7)).all()
    assert (found <= true * 1.0101).all()


def test_norms_are_accurate_if_positions_nearly_cancel(gram_backend):
    """The sum is 1e-3 of its terms; rounding of a float32 Gram matrix exceeds its square."""
    torch.manual_seed(0)
    acts = torch.randn(4, 1, 50).expand(4, 8, 50).clone()
    grads = torch.randn(4, 8, 60)
    grads[:, 4:] = -grads[:, :4]
    acts[:, 4:] += 1e-3 * torch.randn(4, 4, 50)
    true, found = truth(acts, grads), gram_sq_norm(acts, grads).double()
    assert (found >= true * (1 - 1e-6)).all()
    assert (found <= true * 1.0101).all()


def test_exact_cancellation_gives_a_norm_near_zero(gram_backend):
    acts = torch.ones(2, 4, 30)
    grads = torch.tensor([1.0, -1.0, 1.0, -1.0]).view(1, 4, 1).expand(2, 4, 20)
    assert (gram_sq_norm(acts, grads) < 1e-12).all()


def test_huge_finite_gradients_have_finite_norms(gram_backend):
    acts, grads = torch.full((1, 3, 5), 1e11), torch.full((1, 3, 4), 1e12)
    true, found = truth(acts, grads), gram_sq_norm(acts, grads).double()
    torch.testing.assert_close(found, true, rtol=0.02, atol=0)


@pytest.mark.parametrize("length", [1, 3])
def test_only_a_nonfinite_sample_has_a_nonfinite_norm(gram_backend, length):
    torch.manual_seed(0)
    acts, grads = torch.randn(3, length, 5), torch.randn(3, length, 4)
    acts[1, 0, 0] = torch.nan
    found = gram_sq_norm(acts, grads)
    assert found.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("workspace", [1, 10_000, 200_000])
@pytest.mark.parametrize("length", [5, 70, 300])
def test_norms_do_not_depend_on_the_workspace_size(monkeypatch, in_float32, workspace, length):
    torch.manual_seed(0)
    factors = [torch.randn(4, length, size) for size in (7, 5, 3)]
    monkeypatch.setattr(gram, "WORKSPACE_BYTES", workspace)
    torch.testing.assert_close(gram_sq_norm(*factors).double(), truth(*factors), rtol=0.0101, atol=0)


@pytest.mark.parametrize("workspace", [30_000, 200_000], ids=["less-than-a-row", "several-rows"])
def test_the_workspace_stays_below_its_bound(monkeypatch, in_float32, workspace):
    entries = []
    monkeypatch.setattr(gram, "WORKSPACE_BYTES", workspace)
    original = gram._gram

    def counted(left, right):
        found = original(left, right)
        entries.append(found.numel())
        return found

    monkeypatch.setattr(gram, "_gram", counted)
    gram_sq_norm(torch.randn(20, 90, 4), torch.randn(20, 90, 3))
    assert workspace / 8 < 2 * 4 * max(entries) <= workspace


CPU = torch.device("cpu")


def test_the_gram_matrix_is_not_offered_if_its_rounding_guard_is_too_large(in_float32):
    """4096 features and 1024 positions need fewer operations, but the guard exceeds its limit."""
    assert gram_operations(1024, (4096, 4096), torch.float32, CPU) is None
    assert gram_operations(1024, (4096, 4096), torch.float64, CPU) is not None
    assert gram_operations(8, (64, 64), torch.float32, CPU) is not None


@pytest.mark.parametrize("length", [1, 6, 70])
def test_norms_computed_together_equal_norms_computed_separately(gram_backend, monkeypatch, length):
    torch.manual_seed(0)
    shared, a, b, c = (torch.randn(5, length, size) for size in (7, 4, 9, 3))
    products = [(a, shared), (c, b), (b, shared), (shared,), (a, b, c)]
    formed = []
    original, compiled = gram._gram, gram.native.gram_norms
    monkeypatch.setattr(gram, "_gram", lambda *args: formed.append(1) or original(*args))
    monkeypatch.setattr(gram.native, "gram_norms", lambda them, which: formed.extend(them) or compiled(them, which))
    together = gram_norms(products)
    count = len(formed)
    for factors, found in zip(products, together, strict=True):
        alone = gram_norms([factors])[0]
        torch.testing.assert_close(found.sq_norm_B, alone.sq_norm_B, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.rounding_scale_B, alone.rounding_scale_B, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.sq_norm_B.double(), truth(*factors), rtol=0.0101, atol=0)
    assert count < len(formed) - count or length == 1  # ten factors are four tensors


def test_the_rounding_scale_is_the_scaled_sum_of_the_norms_of_positions(gram_backend):
    torch.manual_seed(0)
    for length in (6, 300):
        a, b = torch.randn(3, length, 8), torch.randn(3, length, 5)
        parts_B = (a.norm(dim=2) * b.norm(dim=2)).sum(dim=1).double()
        found_B = gram_norms([(a, b)])[0].rounding_scale_B.double()
        assert (found_B >= parts_B * (1 + length / 64) * (1 - 1e-5)).all()
        assert (found_B <= parts_B * (1 + length / 64) * (1 + 1e-5)).all()


@pytest.mark.parametrize(("length", "sizes"), [(64, (256, 2304)), (128, (768, 768))])
def test_large_norms_are_exact_to_1e_9_with_float64_gram_matrices(gram_backend, length, sizes):
    if gram_backend == "float32-gram":
        pytest.skip("float32 has a guard instead")
    torch.manual_seed(0)
    factors = [torch.randn(2, length, size) + 0.3 for size in sizes]
    torch.testing.assert_close(gram_sq_norm(*factors).double(), truth(*factors), rtol=1e-9, atol=0)
