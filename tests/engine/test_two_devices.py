"""Models on two devices: norms are moved to one device, and sums equal those of one device."""

import pytest
import torch
from inside_parts import ClippedPasses
from opacus_defects.apis import DEFAULT_APIS, assert_equal, fixed_loader, true_sum
from oracle import clip_by_loop, relative_error
from torch import nn
from torch.autograd.variable import Variable
from two_devices import SECOND, FakeStreams, TwoDevices, to_second

import dpengine
from dpengine.capture import threads

CRITERION = nn.CrossEntropyLoss()


class Split(nn.Module):
    """Sequential and parallel layers on two devices."""

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


APIS = [api for api in DEFAULT_APIS if api.mode != "ew"]  # its expanded weights cannot hold tensors of another device


@pytest.mark.one_in(4, "broken", "api", others="slow")
@pytest.mark.one_in(2, "broken", "api")
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.id)
def test_clipped_sums_on_two_devices_equal_those_on_one(api, broken):
    inputs, targets = rows(broken=broken)
    kept = inputs.isfinite().all(dim=1)
    truth = true_sum(Split(second=False), CRITERION, (inputs[kept], targets[kept]), 0.5)
    with TwoDevices():
        private = api.open(Split(second=True), fixed_loader(6), criterion=CRITERION, max_grad_norm=0.5)
        for _ in private.loader:
            private.step(inputs, targets)
        assert_equal({name: value.cpu() for name, value in private.sum().items()}, truth)


@pytest.mark.slow
@pytest.mark.parametrize("clipping", [dpengine.PerLayer(0.5), dpengine.Automatic(0.5)], ids=repr)
def test_clipping_policies_receive_norms_on_one_device(clipping):
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


class Branches(nn.Module):
    """Two branches, on separate streams of the second device if ``streams`` are given."""

    def __init__(self, streams=None):
        super().__init__()
        torch.manual_seed(1)
        self.main, self.side, self.streams = nn.Linear(4, 3), nn.Linear(4, 3), streams
        if streams is not None:
            to_second(self)

    def run(self, name, x):
        if self.streams is None:
            return getattr(self, name)(x)
        self.streams.wait(name, self.streams.now)
        before, self.streams.now = self.streams.now, name
        output = getattr(self, name)(x)
        self.streams.now = before
        self.streams.wait(before, name)
        if output.requires_grad:
            output.register_hook(lambda grad: self.streams.arrives(grad, name))
        return output

    def forward(self, x):
        return self.run("main", x) + self.run("side", x)


@pytest.fixture
def streams(monkeypatch):
    found = FakeStreams()
    monkeypatch.setattr(TwoDevices, "streams", found)
    monkeypatch.setitem(threads.STREAM_MODULES, SECOND.type, found)
    return found


@pytest.mark.one_in(3, "end", "mode")
@pytest.mark.parametrize("end", ["main", "side", "caller"])
@pytest.mark.parametrize("mode", ["auto", "hooks", "ghost"])
def test_sums_wait_for_every_stream_that_computed_a_gradient(streams, mode, end):
    """The end of the backward pass is called on each of them, and on another one."""
    inputs, targets = rows(broken=False)
    with TwoDevices():
        model = Branches(streams)
        passes = ClippedPasses(model, mode=mode)
        output = model(inputs.to(SECOND)).cpu()
        loss = CRITERION(output, targets)
        back = lambda: setattr(streams, "now", end)  # noqa: E731
        loss.register_hook(lambda grad: Variable._execution_engine.queue_callback(back))
        loss.backward()
        passes.clip(rows=len(inputs))
        for name in {"main", "side", end} - {streams.now}:  # otherwise memory could be reused before it is read
            assert streams.known_to(name)[streams.now] >= streams.last_read > 0
        found = {name: total.cpu().double() for name, total in passes.totals().items()}
    truth, _ = clip_by_loop(Branches(), (inputs,), lambda output, i: CRITERION(output, targets[i]), len(targets))
    assert relative_error(found, truth) < 1e-5
