import pytest
import torch

from dpengine.capture import LayerCall
from dpengine.grad_samplers.table import sampler_for
from dpengine.kernels.precision import full_precision

by_operation = pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="one setting for all operations"
)


@pytest.fixture
def lowered():
    """As of a user who asks for speed."""
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


def test_products_are_exact_inside_and_as_the_user_wants_outside(lowered):
    with full_precision():
        assert flags() == ("highest", False, False)
    assert flags() == ("medium", True, True)


@by_operation
def test_settings_by_operation_are_exact_inside_and_back_outside(lowered_by_operation):
    with full_precision():
        assert [op.fp32_precision for op in lowered_by_operation] == ["ieee", "ieee"]
        assert torch.backends.cudnn.conv.fp32_precision == "ieee"
    assert [op.fp32_precision for op in lowered_by_operation] == ["tf32", "bf16"]
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"


def test_the_users_setting_is_back_after_an_exception(lowered):
    with pytest.raises(KeyError), full_precision():
        raise KeyError
    assert flags() == ("medium", True, True)


def test_low_precision_products_do_not_reach_a_sampler(lowered):
    """On CPU this setting means bfloat16, where the processor has it."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 256)
    call = LayerCall(layer, (torch.randn(64, 8, 256),), torch.randn(64, 8, 256))
    sampler, factor_B = sampler_for(layer)["weight"], torch.rand(64)
    wide = call.replace(inputs=(call.inputs[0].double(),), grad_output=call.grad_output.double())
    for found, true in (
        (sampler.grad(call), sampler.grad(wide)),
        (sampler.total(call, factor_B), sampler.total(wide, factor_B)),
    ):
        torch.testing.assert_close(found.double(), true, rtol=1e-5, atol=1e-4)
