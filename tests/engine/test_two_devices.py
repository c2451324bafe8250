"""Models over two devices: what meets is moved, and sums are those of one device."""

import pytest
import torch
from pains.doors import DEFAULT_DOORS, assert_equal, fixed_loader, true_sum
from torch import nn
from two_devices import SECOND, TwoDevices, to_second

import dpengine

CRITERION = nn.CrossEntropyLoss()


class Split(nn.Module):
    """Layers in turn and side by side on two devices."""

    def __init__(self, *, second: bool):
        super().__init__()
        torch.manual_seed(1)
        self.lower, self.upper, self.beside = nn.Linear(4, 5), nn.Linear(5, 3), nn.LayerNorm(4)
        self.last = nn.Linear(4, 3)
        self.device = SECOND if second else torch.device("cpu")
        if second:
            to_second(self.upper), to_second(self.beside)

    def forward(self, x):
        upper = self.upper(torch.tanh(self.lower(x)).to(self.device)).cpu()
        return upper + self.last(self.beside(x.to(self.device)).cpu())


def rows(*, broken):
    torch.manual_seed(2)
    inputs, targets = torch.randn(6, 4), torch.arange(6) % 3
    if broken:
        inputs[1] = torch.nan
    return inputs, targets


DOORS = [door for door in DEFAULT_DOORS if door.mode != "ew"]  # whose own tensors cannot hold others


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.id)
def test_sums_over_two_devices_are_those_of_one(door, broken):
    inputs, targets = rows(broken=broken)
    kept = inputs.isfinite().all(dim=1)
    truth = true_sum(Split(second=False), CRITERION, (inputs[kept], targets[kept]), 0.5)
    with TwoDevices():
        private = door.open(Split(second=True), fixed_loader(6), criterion=CRITERION, max_grad_norm=0.5)
        for _ in private.loader:
            private.step(inputs, targets)
        assert_equal({name: value.cpu() for name, value in private.sum().items()}, truth)


@pytest.mark.parametrize("clipping", [dpengine.PerLayer(0.5), dpengine.Automatic(0.5)], ids=repr)
def test_policies_get_norms_on_one_device(clipping):
    trained = []
    for second in (False, True):
        with TwoDevices():
            model = Split(second=second)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            private, optimizer, loader = dpengine.PrivacyEngine(seed=0).make_private(
                model, optimizer, fixed_loader(6), noise_multiplier=0.0, clipping=clipping, sampling="shuffle"
            )
            for _ in range(3):
                for _ in loader:
                    optimizer.zero_grad()
                    inputs, targets = rows(broken=False)
                    CRITERION(private(inputs), targets).backward()
                    optimizer.step()
            trained.append({name: p.detach().cpu().double() for name, p in model.named_parameters()})
    assert_equal(trained[1], trained[0])
