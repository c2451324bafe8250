"""Calls in any order: every batch is charged once, and a step contains exactly the samples of its batches."""

import collections
import random

import inside
import pytest
import torch
import torch.nn.functional as F
from engine.failing_optimizer import Boom, Fragile
from loops import SLACK
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.errors import PrivacyError

pytestmark = pytest.mark.filterwarnings("ignore:.*DPE006", "ignore:.*DPE012", "ignore:.*DPE015")


def clipped_sum_of(weight, bias, rows, max_norm):
    """Closed-form clipped sum of a linear layer under cross-entropy: (softmax - onehot) x^T for each sample."""
    total_weight, total_bias = torch.zeros_like(weight), torch.zeros_like(bias)
    for inputs, target in rows:
        error = torch.softmax(weight @ inputs + bias, 0)
        error[target] -= 1
        norm = float(error.norm() * (inputs.square().sum() + 1).sqrt())
        factor = min(1.0, (1 - SLACK) * max_norm / max(norm, 1e-300))
        total_weight += factor * torch.outer(error, inputs)
        total_bias += factor * error
    return total_weight, total_bias


class Trace:
    """Random sequence of calls; checks the invariants of the engine after each call."""

    FEATURES, CLASSES, ROWS, MAX_NORM = 3, 2, 8, 0.7

    def __init__(self, seed):
        self.choose = choose = random.Random(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(self.FEATURES, self.CLASSES))
        data = TensorDataset(torch.randn(self.ROWS, self.FEATURES), torch.randint(0, self.CLASSES, (self.ROWS,)))
        chunks = choose.choice(
            [{}, {}, {"accumulation_steps": 2}, {"accumulation_steps": 3}, {"physical_batch_size": 2}]
        )
        self.engine = PrivacyEngine(seed=seed)
        _, self.optimizer, self.loader = self.engine.make_private(
            self.model,
            Fragile(self.model.parameters(), lr=0.3),
            DataLoader(data, batch_size=choose.choice([1, 3, 6])),
            noise_multiplier=1.0,
            max_grad_norm=self.MAX_NORM,
            grad_sample_mode=choose.choice(["auto", "hooks", "functorch", "ew", "ghost"]),
            target_delta=1e-2,
            **chunks,
        )
        self.batches = iter(self.loader)
        self.batch = self.outputs = None
        self.handed_out = collections.defaultdict(list)  # samples by step
        self.released = []  # steps, in the order of their updates
        self.noised = []  # noise addresses
        self._watch()

    def _watch(self):
        def returned(step):
            self.current = step

        def releasing(steps):
            self.released += steps
            self._compare_sums(steps)

        inside.record_batches(self.engine, self.loader, returned)
        inside.record_releases(self.engine, releasing)
        inside.record_noise(self.engine, lambda flat, step, start: self.noised.append((step, start)))

    def _compare_sums(self, steps):
        """Asserts that the sums contain each sample of the step's batches once, at the current weights."""
        layer = self.model[0]
        rows = [row for step in steps for row in self.handed_out[step]]
        weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
        expected = clipped_sum_of(weight, bias, rows, self.MAX_NORM)
        found = inside.clipped_sums(self.engine)
        for name, truth in zip(("0.weight", "0.bias"), expected, strict=True):
            torch.testing.assert_close(found[name].double(), truth, rtol=1e-5, atol=2e-5)

    # Calls

    def next_batch(self):
        self.outputs = None
        batch = next(self.batches, None)
        if batch is None:
            return self.start_over()
        self.batch = batch
        rows = zip(batch[0].double(), batch[1], strict=True) if inside.samples_now(self.engine) else ()
        self.handed_out[self.current] += list(rows)

    def start_over(self):
        self.batches = iter(self.loader)

    def zero_grad(self):
        self.optimizer.zero_grad(self.choose.random() < 0.8)

    def zero_grad_of_the_model(self):
        self.model.zero_grad()

    def forward(self):
        self.outputs = self.model(self.batch[0])

    def backward(self):
        outputs = self.model(self.batch[0]) if self.outputs is None else self.outputs
        self.outputs = None
        F.cross_entropy(outputs, self.batch[1]).backward()

    def a_whole_step(self):
        self.zero_grad()
        self.backward()
        self.step()

    def an_ordinary_turn(self):
        self.next_batch()
        self.a_whole_step()

    def backward_that_fails_at_the_output(self):
        outputs = self.model(self.batch[0])
        outputs.register_hook(self._fail)
        outputs.sum().backward()

    def backward_that_fails_at_the_end(self):
        inputs = self.batch[0].clone().requires_grad_()
        inputs.register_hook(self._fail)
        self.model(inputs).sum().backward()

    def backward_that_fails_in_the_sums(self):
        with inside.failing_sums(self.engine, MemoryError(), at=2, after=True):
            self.backward()

    def backward_in_eval_mode(self):
        self.model.eval()
        try:
            F.cross_entropy(self.model(self.batch[0]), self.batch[1]).backward()
        finally:
            self.model.train()

    def forward_in_eval_mode(self):
        self.model.eval()
        self.model(self.batch[0])
        self.model.train()

    def forward_that_fails(self):
        self.model(self.batch[0][:, :1])

    def step(self):
        self.optimizer.step()

    def step_twice(self):
        self.optimizer.step()
        self.optimizer.step()

    def step_whose_update_fails(self):
        self.optimizer.fails = True
        try:
            self.optimizer.step()
        finally:
            self.optimizer.fails = False

    def step_with_closure(self):
        self.optimizer.step(self.backward)

    @staticmethod
    def _fail(*_):
        raise Boom

    # Invariants

    def run(self, length):
        self.next_batch()
        seen = collections.Counter()
        for _ in range(length):
            (action,) = self.choose.choices(list(ACTIONS), ACTIONS.values())
            before, weights = self.engine.ledger.steps, [p.detach().clone() for p in self.model.parameters()]
            count = len(self.released)
            try:
                action(self)
            except (PrivacyError, Boom, MemoryError) as error:
                seen[getattr(error, "code", type(error).__name__)] += 1
            except RuntimeError as error:
                assert "mat1 and mat2" in str(error)  # the forward pass that fails on purpose
            self._audit(before, count, weights)
        self._finish()
        return seen

    def _audit(self, before, count, weights):
        ledger = self.engine.ledger
        assert ledger.steps >= before
        assert ledger.steps >= len(self.released)
        assert len(set(self.released)) == len(self.released)
        assert len(set(self.noised)) == len(self.noised)
        changed = any(not torch.equal(w, p) for w, p in zip(weights, self.model.parameters(), strict=True))
        assert not changed or len(self.released) > count
        state = inside.state(self.engine)
        if state.stage in {"idle", "discarded", "released"}:
            assert state.zero

    def _finish(self):
        self.engine.detach(self.model)
        # every returned batch was charged once, as released or as discarded
        assert self.engine.ledger.steps == len(self.handed_out)
        modules = list(self.model.modules())
        assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in modules)
        assert not any(p._post_accumulate_grad_hooks for p in self.model.parameters())
        assert not any(hasattr(p, "grad_sample") for p in self.model.parameters())
        assert inside.state(self.engine).zero
        assert not inside.pass_recorded(self.engine)[0]
        assert type(self.optimizer) is Fragile
        self.model.zero_grad()
        F.cross_entropy(self.model(torch.ones(2, self.FEATURES)), torch.tensor([0, 1])).backward()
        assert all(p.grad is not None for p in self.model.parameters())


ACTIONS = {
    Trace.next_batch: 6, Trace.an_ordinary_turn: 6, Trace.a_whole_step: 3, Trace.backward: 4, Trace.step: 4,
    Trace.zero_grad: 3, Trace.forward: 1, Trace.start_over: 1, Trace.step_twice: 1, Trace.zero_grad_of_the_model: 1,
    Trace.step_with_closure: 1, Trace.step_whose_update_fails: 1, Trace.backward_that_fails_at_the_output: 1,
    Trace.backward_that_fails_at_the_end: 1, Trace.backward_that_fails_in_the_sums: 1, Trace.backward_in_eval_mode: 1,
    Trace.forward_in_eval_mode: 1, Trace.forward_that_fails: 1,
}  # fmt: skip


def fuzz(seeds):
    seen, released = collections.Counter(), 0
    for seed in seeds:
        trace = Trace(seed)
        try:
            seen += trace.run(30)
        except BaseException as error:
            raise AssertionError(f"trace {seed} failed: {error!r}") from error
        released += len(trace.released)
    return seen, released


def test_any_order_of_calls_keeps_the_charges_and_the_sums():
    seen, released = fuzz(range(25))
    assert released > 40
    assert set(seen) >= {"DPE005", "DPE017", "DPE022", "Boom", "MemoryError"}  # the traces reach these errors


@pytest.mark.nightly
def test_three_thousand_orders_of_calls_keep_the_charges_and_the_sums():
    _, released = fuzz(range(1000, 4000))
    assert released > 4000
