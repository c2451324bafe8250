"""Defects of Opacus with several devices and with trainers."""

import copy

import pytest
import torch
from opacus_defects.apis import LAYER_APIS, assert_equal, fixed_loader, opacus, true_sum, with_few_apis
from opacus_defects.small import CRITERION, ROWS, mlp
from opacus_defects.small import normal_batch as batch
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012:dpengine.PrivacyWarning")


class TwoDeviceModel(nn.Module):
    """A model whose layers are on two devices."""

    def __init__(self, first, second):
        super().__init__()
        torch.manual_seed(1)
        self.lower, self.upper = nn.Linear(4, 5).to(first), nn.Linear(5, 3).to(second)
        self.second = second

    def forward(self, x):
        return self.upper(torch.tanh(self.lower(x)).to(self.second)).cpu()


@pytest.mark.gpu
@with_few_apis(LAYER_APIS)
@pytest.mark.hazard("O53")
def test_a_model_on_two_devices_gives_the_sums_of_one(api):
    rows = batch()
    truth = true_sum(TwoDeviceModel("cpu", "cpu"), CRITERION, rows, 0.5)
    private = api.open(TwoDeviceModel("cpu", "cuda"), fixed_loader(ROWS), criterion=CRITERION, max_grad_norm=0.5)
    assert_equal({name: value.cpu() for name, value in private.run(*rows).items()}, truth)


@with_few_apis(LAYER_APIS)
@pytest.mark.hazard("O55")
def test_a_trainer_that_steps_by_closure_gives_the_sums(api):
    model, (x, y), losses = mlp(), batch(), []
    private = api.open(copy.deepcopy(model), fixed_loader(ROWS), criterion=CRITERION, max_grad_norm=0.5)

    def closure():  # forward, zero_grad and backward, as in Lightning's automatic optimization
        loss = private.criterion(private.model(x), y)
        private.optimizer.zero_grad()
        loss.backward()
        return loss

    for _ in private.loader:
        losses.append(private.optimizer.step(closure=closure))
    assert_equal(private.sum(), true_sum(model, CRITERION, (x, y), 0.5))
    assert float(losses[0].item()) == pytest.approx(float(CRITERION(model(x), y)), rel=1e-5)


@pytest.mark.hazard("O55")
def test_the_data_module_of_compat_makes_the_train_loader_private():
    lightning = pytest.importorskip("lightning")

    class Data(lightning.LightningDataModule):
        def train_dataloader(self):
            return fixed_loader(24, batch_size=6)

        def val_dataloader(self):
            return fixed_loader(7)

    plain = Data()
    private = opacus("lightning").DPLightningDataModule(plain)
    assert private.train_dataloader().sample_rate == 1 / 4
    assert len(private.val_dataloader()) == 1
