"""Defects of Opacus: stale parameters, learning rates and arguments of optimizers."""

import copy
import warnings

import pytest
import torch
from opacus_defects.apis import (
    ALL_APIS,
    LAYER_APIS,
    assert_equal,
    assert_unmoved,
    fixed_loader,
    true_sum,
    weights_of,
    with_apis,
)
from opacus_defects.small import ROWS, batch, mlp
from torch import nn

import dpengine
from dpengine.errors import PrivacyError

pytestmark = pytest.mark.filterwarnings("ignore::dpengine.PrivacyWarning")

LOSS = nn.CrossEntropyLoss()


# The optimizer holds parameters that the model no longer has


@with_apis(ALL_APIS)
@pytest.mark.hazard("O26")
def test_an_optimizer_over_other_tensors_is_rejected_before_training(api):
    held = list(mlp().parameters())
    with pytest.raises(ValueError, match=r"(?i)optimizer.*after|Module parameters are different"):
        api.open(mlp(), fixed_loader(ROWS), make_optimizer=lambda _: torch.optim.SGD(held, lr=1.0))


@with_apis(ALL_APIS)
@pytest.mark.hazard("O26")
def test_the_first_step_changes_the_weights(api):
    private = api.open(mlp(), fixed_loader(ROWS))
    before = weights_of(private.bare)
    private.run(*batch())
    assert not any(torch.equal(p, before[name]) for name, p in private.bare.named_parameters())


@with_apis(LAYER_APIS)
@pytest.mark.hazard("O26")
def test_a_step_after_training_a_copy_raises(api):
    private = api.open(mlp(), fixed_loader(ROWS))
    before = weights_of(private.bare)
    moved = copy.deepcopy(private.bare)  # as a launcher moves a model to its device
    next(iter(private.loader))
    private.optimizer.zero_grad()
    inputs, targets = batch()
    with pytest.raises((PrivacyError, ValueError), match=r"(?i)backward|not initialized"):
        LOSS(moved(inputs), targets).backward()
        private.optimizer.step()
    assert_unmoved(private.bare, before)


@with_apis(LAYER_APIS)
@pytest.mark.hazard("O26")
def test_a_step_raises_if_every_parameter_was_replaced_after_the_call(api):
    private = api.open(mlp(), fixed_loader(ROWS))
    for module in private.bare:
        for name, p in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(p.detach().clone()))
    message = (
        r"(?s)optimizer.*build the optimizer|not initialized"
        if api.compat
        else "DPE003.*all were replaced after make_private"
    )
    with pytest.raises(ValueError, match=message):
        private.run(*batch())


@with_apis(LAYER_APIS)
@pytest.mark.hazard("L9", "O26")
def test_a_single_replaced_parameter_is_reported(api):
    private = api.open(mlp(), fixed_loader(ROWS))
    private.bare[2].weight = nn.Parameter(private.bare[2].weight.detach().clone())
    with warnings.catch_warnings():
        warnings.simplefilter("error", dpengine.PrivacyWarning)
        message = r"optimizer|not initialized" if api.compat else "DPE003"
        with pytest.raises((PrivacyError, ValueError, dpengine.PrivacyWarning), match=message):
            next(iter(private.loader))
            private.step(*batch())


@with_apis(LAYER_APIS)
@pytest.mark.hazard("O26")
def test_a_model_that_is_cast_after_the_call_is_still_captured(api):
    private = api.open(mlp(), fixed_loader(ROWS), max_grad_norm=1.5)
    private.model.to(torch.float64)
    next(iter(private.loader))
    inputs, targets = batch()
    private.step(inputs.double(), targets)
    assert_equal(private.sum(), true_sum(mlp(), LOSS, batch(), 1.5), rtol=1e-6)


# A learning-rate scheduler does not reach the optimizer


def update_factor(private, before):
    """Returns the factor by which the last step multiplied ``p.grad``."""
    change = torch.cat([(before[name] - p.detach()).flatten() for name, p in private.bare.named_parameters()])
    grad = torch.cat([p.grad.flatten() for p in private.bare.parameters()])
    return float(change @ grad / (grad @ grad))


def replace_groups(optimizer):
    optimizer.param_groups = [{**group, "lr": 0.1} for group in optimizer.param_groups]


def load_state(optimizer):
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.1
    optimizer.load_state_dict(state)


def schedule(optimizer):
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1).step()


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@pytest.mark.parametrize("change", [schedule, replace_groups, load_state])
@with_apis(ALL_APIS)
@pytest.mark.hazard("O27")
def test_the_update_uses_the_current_learning_rate(api, change):
    private = api.open(mlp(), fixed_loader(ROWS))
    for rate in (1.0, 0.1):
        before = weights_of(private.bare)
        private.run(*batch())
        assert update_factor(private, before) == pytest.approx(rate, rel=1e-3)
        change(private.optimizer)


@with_apis(ALL_APIS)
@pytest.mark.hazard("O27")
def test_lbfgs_is_rejected_with_the_reason(api):
    with pytest.raises(PrivacyError, match="reads the data several times in one step"):
        api.open(mlp(), fixed_loader(ROWS), make_optimizer=lambda parameters: torch.optim.LBFGS(list(parameters)))


# Misspelled keywords are accepted

MISSPELLED = {"default": ("max_grad_nrom", "max_grad_norm"), "compat": ("posson_sampling", "poisson_sampling")}


@with_apis(ALL_APIS)
@pytest.mark.hazard("O34")
def test_a_misspelled_keyword_raises_a_type_error_with_the_closest_name(api):
    wrong, right = MISSPELLED["compat" if api.compat else "default"]
    with pytest.raises(TypeError, match=rf"{wrong}.*Did you mean '{right}'"):
        api.open(mlp(), fixed_loader(ROWS), **{wrong: False})


@pytest.mark.parametrize("bad", [{"noise_multiplier": -1.0}, {"max_grad_norm": -1.0}, {"max_grad_norm": 0.0}])
@with_apis(ALL_APIS)
@pytest.mark.hazard("O34")
def test_a_number_out_of_range_raises_a_value_error_with_its_name(api, bad):
    with pytest.raises(ValueError, match="noise_multiplier" if "noise_multiplier" in bad else "max_(grad_)?norm"):
        api.open(mlp(), fixed_loader(ROWS), **bad)
