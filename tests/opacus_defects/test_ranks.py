"""Defects of Opacus with several devices, processes and trainers."""

import copy
import math

import pytest
import torch
from launch import launched
from opacus_defects.apis import LAYER_APIS, OPACUS, assert_equal, fixed_loader, opacus, through_some, true_sum
from opacus_defects.two_ranks import CRITERION, ROWS, batch, compat_step, default_step, mlp
from reference import per_sample_gradients
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE012:dpengine.PrivacyWarning")


def sum_per_parameter(model, rows, bound, group):
    """The clipped sum where each group of parameters has a bound of its own; ``group`` tells it from a name."""
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for row in per_sample_gradients(model, CRITERION, (rows[0],), rows[1]):
        squares = {}
        for name, value in row.items():
            squares[group(name)] = squares.get(group(name), 0.0) + float(value.square().sum())
        for name, value in row.items():
            total[name] += value * min(1.0, bound * (1 - 2.0**-20) / math.sqrt(squares[group(name)]))
    return total


class Split(nn.Module):
    """A model whose layers are on two devices."""

    def __init__(self, first, second):
        super().__init__()
        torch.manual_seed(1)
        self.lower, self.upper = nn.Linear(4, 5).to(first), nn.Linear(5, 3).to(second)
        self.second = second

    def forward(self, x):
        return self.upper(torch.tanh(self.lower(x)).to(self.second)).cpu()


@pytest.mark.gpu
@through_some(LAYER_APIS)
@pytest.mark.hazard("O53")
def test_a_model_on_two_devices_gives_the_sums_of_one(api):
    rows = batch(ROWS)
    truth = true_sum(Split("cpu", "cpu"), CRITERION, rows, 0.5)
    private = api.open(Split("cpu", "cuda"), fixed_loader(ROWS), criterion=CRITERION, max_grad_norm=0.5)
    for _ in private.loader:
        private.step(*rows)
    assert_equal({name: value.cpu() for name, value in private.sum().items()}, truth)


@pytest.mark.slow
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.hazard("O54")
def test_two_ranks_under_torchs_own_wrapper_are_one_process(clipping):
    found = launched(2, default_step, clipping)
    assert all(isinstance(one, dict) for one in found), found
    truth = true_sum(mlp(), CRITERION, batch(), 0.6)
    if clipping == "per_layer":
        truth = sum_per_parameter(mlp(), batch(), 0.3, lambda name: name.split(".")[0])
    assert sum(one["sizes"][0] for one in found) == 2 * ROWS  # each rank has its part, and all rows are drawn once
    for one in found:
        assert_equal(one["sums"], truth)
        assert all(torch.equal(value, found[0]["weights"][name]) for name, value in one["weights"].items())


SPREAD = [
    ("DPDDP", "hooks", "flat"),
    ("DPDDP", "hooks", "per_layer"),
    ("DPDDP", "ghost", "flat"),
    ("DDP", "hooks", "flat"),
    ("DDP", "functorch", "flat"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("wrapper", "mode", "clipping"), SPREAD, ids=["-".join(one) for one in SPREAD])
@pytest.mark.hazard("O54")
def test_two_ranks_of_compat_are_one_process(wrapper, mode, clipping):
    opacus("distributed")
    found = launched(2, compat_step, OPACUS, wrapper, mode, clipping, 0.0)
    assert all(isinstance(one, dict) for one in found), found
    truth = true_sum(mlp(), CRITERION, batch(), 0.6)
    if clipping == "per_layer":
        truth = sum_per_parameter(mlp(), batch(), 0.3, lambda name: name)
    for one in found:
        assert all(torch.equal(one["before"][name], p) for name, p in mlp().named_parameters())
        assert_equal(one["sums"], truth)
        assert all(torch.equal(value, found[0]["weights"][name]) for name, value in one["weights"].items())


@pytest.mark.slow
@pytest.mark.hazard("O54")
def test_noise_of_compat_is_added_once_and_is_the_same_on_both_ranks():
    opacus("distributed")
    quiet, noisy = (launched(2, compat_step, OPACUS, "DPDDP", "hooks", "flat", noise) for noise in (0.0, 2.0))
    first, second = noisy
    drawn = []
    for name, value in first["sums"].items():
        assert torch.equal(value, second["sums"][name])
        drawn.append((value - quiet[0]["sums"][name]).flatten())
    std = torch.cat(drawn).std() / (2.0 * 0.6)
    assert 0.5 < std < 1.35  # 43 draws: noise of each of two ranks would be 1.41, with a spread of 0.15


class Plain:
    """The part of a LightningModule that its trainer calls in a step, with the trainer's own way to call it."""

    def __init__(self, private):
        self.private = private

    def training_step(self, rows, index):
        return self.private.criterion(self.private.model(rows[0]), rows[1])

    def fit(self, rows):
        """Lightning's automatic optimization: forward, zero_grad and backward are in the closure of ``step``."""
        losses = []
        for index, _ in enumerate(self.private.loader):

            def closure(index=index):
                loss = self.training_step(rows, index)
                self.private.optimizer.zero_grad()
                loss.backward()
                return loss

            losses.append(self.private.optimizer.step(closure=closure))
        return losses


@through_some(LAYER_APIS)
@pytest.mark.hazard("O55")
def test_a_trainer_that_steps_by_closure_gives_the_sums(api):
    model, rows = mlp(), batch(ROWS)
    private = api.open(copy.deepcopy(model), fixed_loader(ROWS), criterion=CRITERION, max_grad_norm=0.5)
    losses = Plain(private).fit(rows)
    assert_equal(private.sum(), true_sum(model, CRITERION, rows, 0.5))
    assert float(losses[0].item()) == pytest.approx(float(CRITERION(model(rows[0]), rows[1])), rel=1e-5)


@pytest.mark.hazard("O55")
def test_a_plain_lightning_module_trains_with_one_callback():
    lightning = pytest.importorskip("lightning.pytorch")
    from dpengine.integrations.lightning import DPCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def training_step(self, batch, index):
            return CRITERION(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback, module = DPCallback(noise_multiplier=1.0), Module()
    before = copy.deepcopy(module.state_dict())
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=2, callbacks=[callback], enable_checkpointing=False, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(*batch(24)), batch_size=6))
    assert callback.engine.ledger.steps == 8
    assert 0 < callback.engine.epsilon < 100
    assert all(not torch.equal(value, before[name]) for name, value in module.state_dict().items())


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
