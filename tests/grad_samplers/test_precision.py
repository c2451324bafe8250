import pytest
import torch

from dpengine.grad_samplers.precision import full_precision


@pytest.fixture
def lowered():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


def flags():
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def test_products_are_exact_inside_and_as_the_user_wants_outside(lowered):
    before = flags()
    assert before == (True, True)
    with full_precision():
        assert flags() == (False, False)
        assert torch.get_float32_matmul_precision() == "highest"
    assert flags() == before
    assert torch.get_float32_matmul_precision() == "medium"


def test_the_users_setting_is_back_after_an_exception(lowered):
    with pytest.raises(KeyError), full_precision():
        raise KeyError
    assert flags() == (True, True)


def test_low_precision_products_do_not_reach_a_sampler(lowered):
    from dpengine.capture import LayerCall
    from dpengine.grad_samplers import sampler_for

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
