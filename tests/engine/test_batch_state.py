"""The state machine of a logical batch, in random orders of calls: no batch is lost, and none is charged twice."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dpengine.engine.batch_state import BatchState, Stage

ROWS = [(2,), (1,), (0,), (1, 2), (2, 0, 1)]


@dataclass(frozen=True, eq=False)
class Batch:
    step: int
    sizes: tuple
    placeholder: bool = False


def batch(step, *sizes, placeholder=False):
    return Batch(step, sizes, placeholder)


class Loops(RuleBasedStateMachine):
    """Training loop with calls of loader, backward, zero_grad and step in any order; applies the returned effects.

    ``sums`` is what the real owner has in its buffer: pairs of a step and a physical batch.
    """

    @initialize(look_ahead=st.integers(0, 2), external=st.booleans(), continues=st.booleans())
    def start(self, look_ahead, external, continues):
        look_ahead = 0 if external else look_ahead
        self.state = BatchState(external=external, continues=continues, look_ahead=look_ahead)
        self.sums = set()
        self.returned = self.charged = self.discarded = self.dropped = 0
        self.step, self.rest = 0, []

    def apply(self, effect):
        self.discarded += effect.discarded
        if effect.zero_sums:
            self.sums.clear()

    def begin(self, physical):
        if physical is not None:
            self.apply(self.state.begin(*physical))

    @precondition(lambda self: not self.state.external)
    @rule(
        sizes=st.sampled_from([(2,), (1,), (0,), (1, 2), (2, 0, 1)]),
        skipped=st.integers(0, 1),
        placeholder=st.booleans(),
    )
    def loader_returns_a_batch(self, sizes, skipped, placeholder):
        self.step += skipped + 1
        drawn = batch(self.step, *sizes, placeholder=placeholder)
        self.rest = [(drawn, chunk) for chunk in range(1, len(sizes))]
        self.returned += 1
        self.begin(self.state.fetch(drawn, 0))

    @precondition(lambda self: self.rest)
    @rule()
    def loader_returns_the_next_physical_batch(self):
        self.begin(self.state.fetch(*self.rest.pop(0)))

    @precondition(lambda self: not self.state.external)
    @rule()
    def a_whole_batch_is_clipped(self):
        self.loader_returns_a_batch((2,), 0, False)
        self.backward()

    @precondition(lambda self: self.state.external)
    @rule(samples=st.integers(0, 2))
    def backward_over_external_samples(self, samples):
        if self.state.stage is Stage.CLIPPED and self.state.continues:
            self.state.extend(samples)
        else:
            self.step += 1
            self.returned += 1
            self.begin((batch(self.step, samples), 0))
        assert self.state.awaits_backward and self.state.samples == samples
        if samples:
            self.sums.add((self.state.logical_batches[-1].step, self.state.chunk))
        self.state.clipped()

    @rule()
    def backward(self):
        while physical := self.state.next_for_backward([1, 2]):
            self.begin(physical)
        if self.state.is_placeholder:  # the pass is over the placeholder sample
            self.state.clipped()
            return
        if not self.state.awaits_backward or self.state.samples == 0:
            return
        self.sums.add((self.state.logical_batches[-1].step, self.state.chunk))
        self.state.clipped()

    @precondition(lambda self: self.state.awaits_backward)
    @rule()
    def backward_fails(self):
        self.apply(self.state.discard())

    @rule()
    def zero_grad(self):
        self.apply(self.state.cleared())
        assert self.state.stage is not Stage.CLIPPED
        if self.state.awaits_backward and self.state.chunk == 0:
            assert not self.sums

    @rule(end=st.sampled_from(["update", "over budget", "fails before the charge", "fails after the charge"]))
    def optimizer_step(self, end):
        self.begin(self.state.next_for_step())
        open_or_clipped = self.state.stage in {Stage.OPEN, Stage.CLIPPED}
        if not (open_or_clipped and (self.state.done or self.state.samples == 0)):
            return
        if not self.state.done:
            self.state.clipped()
        if self.state.stage is not Stage.CLIPPED:
            return
        merged = self.state.logical_batches
        assert self.sums == {(b.step, i) for b in merged for i, size in enumerate(b.sizes) if size}
        if end == "over budget":
            self.dropped += len(merged)
            self.state.drop_uncharged()
            self.sums.clear()
        elif end == "fails before the charge":
            self.apply(self.state.discard())
        else:
            self.charged += len(merged)
            self.state.charged()
            assert self.state.merged == len(merged)
            if end == "update":
                self.state.finished()
                self.sums.clear()
            else:
                self.apply(self.state.discard())

    @invariant()
    def every_batch_is_charged_once(self):
        live = len(self.state.logical_batches) if self.state.stage in {Stage.OPEN, Stage.CLIPPED} else 0
        ahead = sum(chunk == 0 for _, chunk in self.state.fetched)
        assert live + ahead + self.charged + self.discarded + self.dropped == self.returned

    @invariant()
    def the_sums_hold_nothing_of_other_batches(self):
        assert {step for step, _ in self.sums} <= set(self.state.steps)

    @invariant()
    def a_complete_batch_has_no_physical_batch_left(self):
        if self.state.stage is Stage.CLIPPED:
            assert self.state.done and self.state.chunk == len(self.state.logical_batches[-1].sizes) - 1

    @invariant()
    def steps_rise(self):
        assert self.state.steps == sorted(set(self.state.steps))

    @invariant()
    def upcoming_charges_cover_what_is_not_charged(self):
        separately, together = self.state.upcoming()
        live = len(self.state.logical_batches) if self.state.stage in {Stage.OPEN, Stage.CLIPPED} else 0
        assert separately + together > live

    def teardown(self):
        if not hasattr(self, "state"):
            return
        self.apply(self.state.close())
        assert self.charged + self.discarded + self.dropped == self.returned
        assert self.state.stage is Stage.CLOSED and not self.sums


TestLoops = Loops.TestCase
TestLoops.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("step", [3, 2])
def test_a_step_number_is_never_used_again(step):
    state = BatchState()
    state.begin(batch(3, 4), 0)
    with pytest.raises(ValueError, match=f"Step {step} does not come after step 3"):
        state.begin(batch(step, 4), 0)


def test_pass_over_a_placeholder_belongs_to_the_empty_batch():
    state, empty = BatchState(look_ahead=1), batch(0, 0, placeholder=True)
    state.begin(empty, 0)
    assert state.fetch(batch(1, 1), 0) is None
    assert state.next_for_backward([1]) is None
    state.clipped()
    assert state.next_for_backward([1])[0].step == 1


def test_the_state_machine_needs_no_torch():
    script = "import sys, dpengine.engine.batch_state; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
