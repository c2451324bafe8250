import pytest
import torch

from dpengine.kernels.precision import full_precision
from dpengine.kernels.products import _block, blocked_sq_norms

by_operation = pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="one setting for all operations"
)


@pytest.fixture
def lowered():
    """Lowers the precision of products with the global settings of torch."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def lowered_by_operation():
    """The same with the settings of torch 2.9, after which the old ones cannot be read."""
    operations = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [op.fp32_precision for op in operations]
    for op in operations:
        op.fp32_precision = "tf32" if op is torch.backends.cuda.matmul else "bf16"
    yield operations
    for op, setting in zip(operations, before, strict=True):
        op.fp32_precision = setting


def flags():
    return torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def test_products_are_exact_inside_and_follow_the_user_setting_outside(lowered):
    with full_precision():
        assert flags() == ("highest", False, False)
    assert flags() == ("medium", True, True)


@by_operation
def test_settings_by_operation_are_exact_inside_and_restored_outside(lowered_by_operation):
    with full_precision():
        assert [op.fp32_precision for op in lowered_by_operation] == ["ieee", "ieee"]
        assert torch.backends.cudnn.conv.fp32_precision == "ieee"
    assert [op.fp32_precision for op in lowered_by_operation] == ["tf32", "bf16"]
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"


def test_the_setting_of_the_user_is_restored_after_an_exception(lowered):
    with pytest.raises(KeyError), full_precision():
        raise KeyError
    assert flags() == ("medium", True, True)


@pytest.mark.parametrize("size", [0, 1, 64, 65, 4096, 4099, 8198, 9408, 20_000])
def test_squared_norms_in_blocks_for_an_accelerator(size):
    torch.manual_seed(size)
    tensor = torch.randn(3, size + 5)[:, 2 : size + 2]
    expected = tensor.double().square().sum(dim=1)
    torch.testing.assert_close(blocked_sq_norms(tensor), expected, rtol=1e-6, atol=0)


def test_blocks_for_an_accelerator_are_equal_and_long():
    assert [_block(size) for size in (65, 4096, 4097, 768 * 768, 4099)] == [65, 4096, None, 4096, None]
