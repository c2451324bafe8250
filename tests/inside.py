"""Access to the internals of the training step, for tests; `inside_parts` has what needs no run.

The functions take public objects (an engine, an optimizer, a model or a loader) and return plain values: numbers,
strings, tensors, and public values such as accounting events and clipping policies. `test_inside` holds the rule.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from types import SimpleNamespace

from inside_parts import ClippedPasses, totals_of

from dpengine import PrivacyEngine
from dpengine.accounting import Ledger
from dpengine.auditing.canaries import CanaryGradients
from dpengine.engine.budget import Budget
from dpengine.grad_modes.flat_buffer import Sums
from dpengine.noise.correlated import mechanism_for
from dpengine.sampling.batches import LogicalBatch
from dpengine.sampling.collate import EmptyAwareCollate, empty_template


def _step(owner, run=-1):
    """The private step of a run of an engine, or of a private optimizer."""
    if isinstance(owner, PrivacyEngine):
        return owner.runs[run].step
    attachment = owner.__dict__.get("_dpengine")
    return owner._step if attachment is None else attachment.step


def state(owner, run=-1):
    """The state of a run of an engine, or of a private optimizer, as plain values.

    Of the step: ``stage`` of the logical batch (idle, open, clipped, charged, released, discarded or closed); numbers
    of steps taken (``released``), of batches discarded (``discarded``) and of samples dropped (``dropped``); ``step``
    and ``chunk`` that the loader returned last; ``waiting``, step and row counts of each logical batch in the sums; the
    parameters whose gradient was ``written``; the ``largest_norm`` of the last pass; whether a pass is ``pending``.
    Of the sums: whether nothing was added (``clean``), and whether their memory is ``zero``.
    Of the plan: ``noise_std``, ``asked_noise_std`` (of the next step), ``noise_multiplier``, ``clipping_norm``,
    ``clipping_norm_in_force``, ``relation``, ``iterations``, ``expected_batch_size``, ``noise`` (facts, or None).
    """
    step = _step(owner, run)
    plan, passes = step.plan, step.passes
    return SimpleNamespace(
        stage=step.batches.stage.value,
        released=step.batches.released,
        discarded=step.batches.discarded,
        dropped=step.dropped_samples,
        step=step.batches.last_step,
        chunk=step.batches.chunk,
        waiting=[(ticket.step, tuple(ticket.sizes)) for ticket in step.batches.logical_batches],
        written=set(step.writer.released),
        largest_norm=step.statistics.largest_norm,
        pending=passes.pending,
        clean=passes.buffer.clean,
        zero=not any(flat.any() for flat in passes.buffer.flats.values()),
        noise_std=plan.noise_std,
        asked_noise_std=step.next_plan.noise_std,
        noise_multiplier=plan.noise_multiplier,
        clipping_norm=plan.clipping.max_grad_norm,
        clipping_norm_in_force=passes.policy.max_grad_norm,
        relation=plan.relation,
        iterations=plan.iterations,
        expected_batch_size=plan.expected_batch_size,
        noise=None if plan.noise is None else dict(plan.noise.description),
    )


# The step


def public_text(owner, run=-1):
    """Representations that may reach a log: the plan and the logical batches."""
    step = _step(owner, run)
    return f"{step.plan!r} {step.batches.logical_batches!r}"


def return_batch(owner, step, rows):
    """Acts as a loader that returns a logical batch of one chunk."""
    _step(owner).batch_returned(LogicalBatch(step, (rows,)), 0)


def samples_now(owner, run=-1):
    """The number of samples of the current physical batch: 0 for a placeholder, or if the batch was discarded."""
    batches = _step(owner, run).batches
    return batches.samples if batches.logical_batches else 0


def without_placeholders(loader):
    """Makes a private loader return zero samples for an empty batch, as in Opacus compatibility."""
    loader._batches._placeholder = False
    collate = loader.collate_fn.collate
    loader.__dict__["collate_fn"] = EmptyAwareCollate(collate, empty_template(collate, loader.dataset[0]))
    return loader


# The plan


def policy(owner, run=-1):
    """The clipping policy of the plan, which is a public object."""
    return _step(owner, run).plan.clipping


def unclipped_count(owner, run=-1):
    """The centered count of unclipped samples that an adaptive policy collected for the current step."""
    return float(_step(owner, run).plan.clipping._centered_count)


def sampling(owner, run=-1):
    """The sampling scheme of the plan, which is a public object."""
    return _step(owner, run).plan.sampling


def assignable_constants(owner, run=-1):
    """Names of those constants of the plan and of its sampling scheme that can be assigned."""
    plan, assigned = _step(owner, run).plan, []
    for frozen, name in ((plan, "noise_multiplier"), (plan.sampling, "sample_rate"), (plan, "expected_batch_size")):
        try:
            setattr(frozen, name, 0.25)
        except dataclasses.FrozenInstanceError:
            continue
        assigned.append(name)
    return assigned


def event(owner, count=1, run=-1):
    """The accounting event of one step over so many logical batches."""
    return _step(owner, run).plan.event(count)


def divisor(owner, count=1, *, mean=True, run=-1):
    """The constant that divides the sums of so many logical batches."""
    return _step(owner, run).plan.divisor(count, mean=mean)


def change_plan(owner, **constants):
    """Changes constants of the plan from the next step on."""
    _step(owner).change(**constants)


def described_plan(owner, run=-1):
    """The description of the plan."""
    return _step(owner, run).plan.describe()


def planned_steps_of(engine, run=-1):
    """The number of steps for which the noise was calibrated."""
    return engine.runs[run].budget.planned_steps


def is_attached(engine, run=-1):
    """Returns True if a run of an engine is private."""
    return engine.runs[run].attached


# The clipped sums


def clipped_sums(owner, run=-1):
    """The clipped sums, by name of the parameter, as copies."""
    return totals_of(_step(owner, run).passes)


def sum_dtypes(owner, run=-1):
    """The data types of the memory of the sums."""
    return {flat.dtype for flat in _step(owner, run).passes.buffer.flats.values()}


def passes_of_run(owner, run=-1):
    """Returns a driver of the clipped sums of a run; the run no longer sees its backward passes."""
    return ClippedPasses.of_run(_step(owner, run).passes)


def pass_recorded(owner, run=-1):
    """Returns True if records of a backward pass are held: per layer, or of the whole batch for a probe."""
    passes = _step(owner, run).passes
    replay = passes.capture.replay
    return passes.pending, bool(replay is not None and replay.reached)


def gradients_formed_by(owner, run=-1):
    """Returns the identity of the grad mode of a run, whether the run owns it, and whether its passes are probed."""
    passes = _step(owner, run).passes
    return id(passes.mode), not isinstance(passes.mode, CanaryGradients) and passes.probe.every is not None


def set_probe_every(owner, passes):
    """Sets the number of passes between probes, for a run."""
    _step(owner).passes.probe.every = passes


def paused(owner, run=-1):
    """A context in which the model of a run is not captured."""
    return _step(owner, run).passes.capture.paused()


# Noise and batches


def noise_source(owner, run=-1):
    """The source of private randomness, which is a public object."""
    return _step(owner, run).source


def draw_from(owner, source):
    """Draws noise from another source. Returns True if the mechanism was replaced as well."""
    step = _step(owner)
    before = step.noise
    step.source, step.noise = source, mechanism_for(source, step.plan.noise)
    return step.noise is not before


def _batches(loader):
    return loader.batch_sampler._batches


def draw(loader, step):
    """Indices of the examples of a logical batch."""
    return [index for chunk in _batches(loader).draw(step).chunks for index in chunk]


def loader_draws_plan(owner, loader, run=-1):
    """Returns True if the loader draws by the sampling scheme of the plan."""
    return _batches(loader).sampling is _step(owner, run).plan.sampling


@contextlib.contextmanager
def drawn_noise(owner, run=-1):
    """Records each draw of noise from the source, as ``(domain, step, start, std)``."""
    source, asked = _step(owner, run).source, []
    add = source.add_normal_

    def recorded(flat, std, *, domain, step, start=0, **rest):
        asked.append((domain, step, start, std))
        return add(flat, std, domain=domain, step=step, start=start, **rest)

    source.add_normal_ = recorded
    try:
        yield asked
    finally:
        del source.add_normal_


@contextlib.contextmanager
def drawn_batches(owner, run=-1):
    """Records each draw of a logical batch, as ``(step, sample_rate)``."""
    strategy, drawn = _step(owner, run).plan.sampling, []
    kind = type(strategy)

    def draw_and_record(self, step, words):
        drawn.append((step, self.sample_rate))
        return kind.draw(self, step, words)

    object.__setattr__(strategy, "__class__", type(kind.__name__, (kind,), {"draw": draw_and_record}))
    try:
        yield drawn
    finally:
        object.__setattr__(strategy, "__class__", kind)


def record_noise(owner, seen):
    """Calls ``seen(flat, step, start)`` for each addition of noise."""
    mechanism = _step(owner).noise
    add = mechanism.add

    def adding(flat, *, step, start, **rest):
        seen(flat, step, start)
        add(flat, step=step, start=start, **rest)

    mechanism.add = adding


def checked_loops(owner):
    """Returns the number of steps that passed the check of the loss and of the loop."""
    return _step(owner).loop.checked


def record_batches(owner, loader, seen):
    """Calls ``seen(step)`` for each chunk that the loader returns."""
    batch_returned = _step(owner).batch_returned

    def returned(batch, chunk, data):
        seen(batch.step)
        batch_returned(batch, chunk, data)

    _batches(loader).on_return = returned


def record_releases(owner, seen):
    """Calls ``seen(steps)`` before the noise of a step is added, with the steps of its logical batches."""
    step = _step(owner)
    write = step.write_gradients

    def writing(divisor):
        seen(step.batches.steps)
        write(divisor)

    step.write_gradients = writing


# Faults


@contextlib.contextmanager
def failing_sums(owner, error, *, at=1, after=False):
    """Raises ``error`` instead of the ``at``-th write to the sums, or after it."""
    buffer = _step(owner).passes.buffer
    calls = []

    def fill(parameter, write):
        calls.append(parameter)
        if len(calls) == at and not after:
            raise error
        type(buffer).fill(buffer, parameter, write)
        if len(calls) == at:
            raise error

    buffer.fill, buffer.add_flat = fill, functools.partial(Sums.add_flat, buffer)  # one write for each parameter
    try:
        yield
    finally:
        del buffer.fill, buffer.add_flat


def before_exchange(owner, action):
    """Calls ``action(step)`` before the ranks exchange clipped sums."""
    step = _step(owner)
    clip = step.passes.clip

    def clipped(recorded, **arguments):
        action(step.batches.last_step)
        return clip(recorded, **arguments)

    step.passes.clip = clipped


# Runs, ledgers and budgets


def runs_of(engine):
    """The identity of each run of an engine, and the delta that it states."""
    return tuple(id(run) for run in engine.runs), engine._delta


def alive(engine, run=-1):
    """Returns a function that returns True while the state of a run exists."""
    reference = weakref.ref(engine.runs[run])
    return lambda: reference() is not None


def charges(owner, run=-1):
    """The charges of the ledger of one run."""
    return _step(owner, run).ledger.totals


def charge(owner, of_step, *, kind="release"):
    """Charges an accounting event to the ledger of a run."""
    _step(owner).ledger.charge(of_step, kind=kind)


def close_ledger_file(engine):
    """Closes the ledger file, as the end of the process does."""
    engine._engine_ledger._open_ledger.file.close()


def settle_ledger_file(engine):
    """Settles the reservation of the current run in the ledger file."""
    engine._engine_ledger._open_ledger.file.settle(_step(engine).plan.run)


def let_go_of_ledger_file(engine, *, settles=True):
    """Releases the ledger file as at the end of the process; without ``settles``, as after a crash."""
    if not settles:
        engine._engine_ledger._open_ledger.file.reservations.clear()
    engine._engine_ledger._open_ledger.finalizer()


def budget(owner, *arguments):
    """An empty ledger for a run, and a function ``overspend(count)`` of a budget with these arguments."""
    step, limit = _step(owner), Budget(*arguments)
    step.ledger = ledger = Ledger()
    return ledger, lambda count: limit.exceeding_epsilon(step.plan, ledger, count)
