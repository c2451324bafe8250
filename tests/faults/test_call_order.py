"""In every order of calls, a batch is released at most once, charged exactly once, and clipped by itself."""

import random

import inside
import pytest
import torch
import torch.nn.functional as F
from faults.neighbours import CLASSES, FEATURES, SLACK
from loops import assert_same_gradients, expected_gradients, gradients_of, make_loop
from reference import clipped_sum, per_sample_gradients
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.errors import PrivacyError, StaleGradientError

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE0")
LR = 0.5


class Trace:
    """Calls the API in random order and checks charges and parameter updates."""

    def __init__(self, choose, **options):
        torch.manual_seed(0)
        self.choose = choose
        self.model = nn.Linear(FEATURES, CLASSES)
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(6, FEATURES, generator=generator), torch.arange(6) % CLASSES)
        self.engine = PrivacyEngine(seed=choose.randrange(1000))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        _, self.optimizer, self.loader = self.engine.make_private(
            self.model, optimizer, DataLoader(data, batch_size=2), noise_multiplier=0.0, **options
        )
        self.batches, self.batch, self.losses = iter(self.loader), None, []
        self.drawn, self.released, self.releases = set(), set(), 0
        self.sums = {}  # clipped sum of each chunk after its backward pass, by step and chunk
        self.calls = []

    def draw(self):
        try:
            self.batch = next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            return
        self.drawn.add(inside.state(self.engine).step)
        self.losses = self.losses if self.choose.random() < 0.2 else []

    def restart_loader(self):
        self.batches = iter(self.loader)

    def forward(self):
        if self.batch is not None:
            inputs, targets = self.batch
            loss = F.cross_entropy(self.model(inputs), targets, reduction="sum") / max(len(targets), 1)
            self.losses.append((loss, self.truth() if self.model.training else None))

    def truth(self):
        inputs, targets = self.batch
        rows = per_sample_gradients(self.model, F.cross_entropy, (inputs,), targets)
        return clipped_sum(rows, 1 - SLACK) if rows else {n: torch.zeros(p.shape) for n, p in self.named()}

    def named(self):
        return list(self.model.named_parameters())

    def backward(self):
        if not self.losses:
            return
        loss, truth = self.losses.pop(self.choose.randrange(len(self.losses)))
        loss.backward(retain_graph=self.choose.random() < 0.2)
        if truth is not None:
            state = inside.state(self.engine)
            self.sums[state.step, state.chunk] = truth

    def full_step(self):
        """Runs a correct step over all chunks of a batch."""
        self.model.train()
        self.losses = []
        for _ in range(4):
            self.draw()
            self.optimizer.zero_grad()
            self.forward()
            self.backward()
            self.step()
            if not self.optimizer.step_was_skipped:
                break

    def accumulate(self):
        """Uses two batches in one step without ``accumulation_steps``."""
        for _ in range(2):
            self.draw()
            self.losses = []
            self.forward()
            self.backward()
        self.step()

    def backward_twice(self):
        """Runs two backward passes over one batch."""
        for _ in range(2):
            self.forward()
            self.backward()
        self.step()

    def step(self):
        before = {name: p.detach().clone() for name, p in self.named()}
        charged = self.engine.ledger.steps
        try:
            self.optimizer.step()
        finally:
            moved = any(not torch.equal(before[name], p) for name, p in self.named())
            stepped = inside.state(self.engine).stage == "released" and charged < self.engine.ledger.steps
            assert stepped or not moved
            if stepped:
                self.check_release(before, self.engine.ledger.steps - charged)

    def check_release(self, before, charged):
        batches = inside.state(self.engine).waiting
        assert charged == len(batches)
        steps = {step for step, _ in batches}
        assert not steps & self.released and steps <= self.drawn
        self.released |= steps
        self.releases += 1
        parts = [self.sums[step, c] for step, chunks in batches for c, rows in enumerate(chunks) if rows]
        for name, parameter in self.named():
            expected = before[name] - LR / (2.0 * len(batches)) * sum((part[name] for part in parts), torch.zeros(()))
            torch.testing.assert_close(parameter.detach(), expected.float(), rtol=1e-4, atol=1e-5)

    def zero_grad(self):
        (self.optimizer if self.choose.random() < 0.7 else self.model).zero_grad(self.choose.random() < 0.7)

    def toggle(self):
        self.model.train(not self.model.training)

    def fail(self):
        if self.batch is not None:
            with pytest.raises(ArithmeticError):
                handle = self.model.register_forward_hook(fail_in_backward)
                try:
                    F.cross_entropy(self.model(self.batch[0]), self.batch[1]).backward()
                    raise ArithmeticError  # an empty batch
                finally:
                    handle.remove()

    def overwrite_gradient(self):
        self.model.weight.grad = torch.ones_like(self.model.weight)

    def other_forward(self):
        self.model(torch.randn(3, FEATURES))

    CALLS = (
        ["draw", "forward", "backward", "step", "zero_grad"] * 3
        + ["full_step"] * 5
        + ["accumulate", "backward_twice", "toggle", "restart_loader", "fail", "overwrite_gradient", "other_forward"]
    )

    def run(self, length):
        for _ in range(length):
            call = self.choose.choice(self.CALLS)
            self.calls.append(call)
            try:
                getattr(self, call)()
            except PrivacyError as error:
                self.calls.append(f"! {error.code}")
                if isinstance(error, StaleGradientError):
                    self.optimizer.zero_grad()
            except RuntimeError as error:
                assert "backward through the graph a second time" in str(error) or "does not require grad" in str(error)
            self.check()
        self.engine.detach(self.model)
        assert self.engine.ledger.steps == len(self.drawn)  # each batch was charged once

    def check(self):
        state = inside.state(self.engine)
        waiting = len(state.waiting) if state.stage in {"open", "clipped"} else 0
        assert self.engine.ledger.steps + waiting >= len(self.drawn)
        assert self.engine.ledger.steps >= self.releases
        if state.stage in {"discarded", "idle", "released"}:
            assert state.clean


def fail_in_backward(module, args, output):
    if not output.requires_grad:
        raise ArithmeticError
    output.register_hook(raise_arithmetic)
    return output


def raise_arithmetic(grad):
    raise ArithmeticError


OPTIONS = [
    {},
    {"accumulation_steps": 2},
    {"physical_batch_size": 1},
    {"grad_sample_mode": "ghost"},
    {"grad_sample_mode": "ew"},
]


def trace_all(seeds, options):
    releases = 0
    for seed in seeds:
        trace = Trace(random.Random(seed), **options)
        try:
            trace.run(30)
        except BaseException:
            print(f"seed {seed}: {' '.join(trace.calls)}")
            raise
        releases += trace.releases
    assert releases > len(seeds)  # enough steps for a meaningful test


@pytest.mark.one_in(5, "options", others="slow")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options)) or "plain")
@pytest.mark.hazard("L1")
def test_random_call_orders_release_each_batch_at_most_once(options):
    trace_all(range(6), options)


@pytest.mark.nightly
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options)) or "plain")
@pytest.mark.hazard("L1")
def test_ten_thousand_random_call_orders_release_each_batch_at_most_once(options):
    trace_all(range(10, 2010), options)


@pytest.mark.parametrize("discard", ["zero_grad", "a second backward"])
def test_a_batch_is_discarded_even_if_charging_it_fails(discard, monkeypatch):
    loop = make_loop()
    batches = iter(loop.loader)
    batch = next(batches)
    loop.backward(*batch)
    with monkeypatch.context() as patches, pytest.raises(ZeroDivisionError):
        patches.setattr(loop.engine.ledger, "charge", lambda *_, **__: 1 / 0)
        if discard == "zero_grad":
            loop.optimizer.zero_grad()
        else:
            loop.backward(*batch)
    batch = next(batches)
    expected = expected_gradients(loop.model, [batch])
    loop.backward(*batch)
    loop.optimizer.step()
    assert_same_gradients(gradients_of(loop.model), expected)
