"""Access to internal parts of the training step that tests use without a run: plans, backward passes, probes.

The drivers take public objects (a model, a clipping policy) and return plain values. `test_inside` holds the rule.
"""

from __future__ import annotations

import unittest.mock
from dataclasses import replace
from types import SimpleNamespace

import torch

import dpengine.accounting.noise_calibration
import dpengine.engine.argument_checks
import dpengine.engine.compiled_forward
import dpengine.engine.optimizer
import dpengine.engine.run
import dpengine.engine.run_report
import dpengine.engine.watch_model
from dpengine.accounting.run_events import accounted_sample_rate
from dpengine.clipping import Flat
from dpengine.compat.opacus.grad_sample.pending_passes import PendingPasses
from dpengine.distributed.topology import SINGLE
from dpengine.engine import amp_and_lr_schedulers
from dpengine.engine.add_clipped import ClipStatistics
from dpengine.engine.argument_checks import attached_runs
from dpengine.engine.optimizer import UNSUPPORTED
from dpengine.engine.pass_clipper import PassClipper, RecordedPass
from dpengine.engine.watch_model import watch_model
from dpengine.grad_modes.bookkeep import BookKeeping
from dpengine.grad_modes.choose_method import MethodTable
from dpengine.grad_modes.flat_buffer import FlatBuffer
from dpengine.grad_modes.rows import Units
from dpengine.independence import live_probe as probe
from dpengine.plan.run_plan import RunPlan

REJECTED_OPTIMIZERS = frozenset(UNSUPPORTED)
"""Names of the optimizers of torch that ``make_private`` rejects."""

accounted_rate = accounted_sample_rate


def planned_steps(epochs, steps, steps_per_epoch):
    """Returns the number of steps of a run; looked up at each call, so that a planted bug takes effect."""
    return dpengine.engine.argument_checks.planned_steps(epochs, steps, steps_per_epoch)


def totals_of(passes):
    """Sums by name of the parameter, as copies."""
    names = {p: name for name, p in passes.model.named_parameters()}
    return {names[p]: total.detach().clone() for p, total in passes.buffer}


class ClippedPasses:
    """Clips and sums backward passes over a model, without noise and without a ledger.

    Args:
        model: The model.
        clips: The clipping policy.
        probes: Whether passes are probed for dependence between samples.
    """

    def __init__(self, model, clips=None, *, mode="auto", probes=True, **settings):
        self._passes = PassClipper(model, clips or Flat(1.0), self._ended, grad_sample_mode=mode, **settings)
        self._recorded, self._action = None, None
        if not probes:
            self._passes.probe.every = None
        self._passes.attach()

    @classmethod
    def of_run(cls, passes):
        """Returns a driver of the clipped sums of a run; the run no longer sees its backward passes."""
        made = object.__new__(cls)
        made._passes, made._recorded, made._action = passes, None, None
        passes._on_pass = made._ended
        return made

    def restrict(self, parameters):
        """Clips and sums these parameters alone."""
        self._passes.only = frozenset(parameters)

    def _ended(self, recorded):
        self._recorded = recorded
        if self._action is not None:
            self._action(set(recorded.mode.rows))

    def clip(self, *, rows=None, units=None, count=0):
        """Clips the pass. ``units`` is the index of the privacy unit of each row, of ``count`` in all."""
        units = None if units is None else Units(torch.tensor(units), count, mean=False)
        recorded, self._recorded = self._recorded, None
        if recorded is None:
            mean = self._passes.loss_reduction == "mean"
            recorded = RecordedPass(self._passes.mode, self._passes.capture.replay, mean)
        seen = self._passes.clip(recorded, samples=rows, units=units)
        return SimpleNamespace(
            samples=seen.samples, dropped=seen.dropped, clipped=seen.clipped, largest_norm=seen.largest_norm
        )

    def totals(self):
        """The clipped sums, by name, as copies."""
        return totals_of(self._passes)

    def choices(self):
        """Returns the method for the norm of each parameter and its reason, by name."""
        return {choice.name: (str(choice.algorithm), choice.why) for choice in self._passes.mode.choices}

    def unused(self):
        """Names of the trainable parameters without a gradient."""
        return self._passes.missing(self._passes.trainable())

    def mode(self):
        """Returns the grad mode of the pass that waits to be clipped."""
        return self._recorded.mode

    def pending(self):
        """Returns True if a pass waits to be clipped."""
        return self._passes.pending

    def is_idle(self):
        """Returns True if nothing of a pass is held, and the parameters of the model are its own."""
        capture = self._passes.capture
        return not (self._passes.pending or capture.swapped or capture.switched_off)

    def interrupt_in_layer(self, layer):
        """Simulates an interrupt while the flags of the parameters of a layer are restored."""
        live = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        self._passes.capture.switched_off.append(live)
        for parameter in live:
            parameter.requires_grad = False

    def leaks(self):
        """Returns True if autograd wrote a gradient that no layer accounts for."""
        return bool(self._passes.capture.leaks)

    def on_end(self, action):
        """Calls ``action`` with the names of the layers seen, when a backward pass has ended."""
        self._action = action

    def discard(self):
        """Clears the sums."""
        self._recorded = None
        self._passes.discard()

    def detach(self):
        """Removes the hooks from the model."""
        self._passes.detach()


class ShownPasses:
    """Passes that wait in ``p.grad_sample``, clipped and summed without noise and without a ledger.

    Args:
        model: The model.
        clips: The clipping policy.
        settings: Of the passes.
    """

    def __init__(self, model, clips, **settings):
        self._pending_passes = PendingPasses(model, **settings)
        self._pending_passes.clipper.policy = clips
        self._pending_passes.attach()
        self._rows = None
        self.statistics = ClipStatistics()

    def on_pass(self, recorded):
        """Clips a pass, as the private step does."""
        rows = self._rows
        if rows is not None and recorded.samples != rows:
            raise AssertionError(f"{recorded.samples} rows, not {rows}")
        self.statistics = self._pending_passes.clipper.clip(recorded)

    def clip(self, *, rows=None):
        """Clips the oldest pending pass."""
        self._rows = rows
        self._pending_passes._deliver_next(self)
        self._rows = None
        return SimpleNamespace(largest_norm=self.statistics.largest_norm)

    def own(self):
        """Clips passes like an optimizer that was built for the model."""
        owner = SimpleNamespace(_step=self)
        self._pending_passes.owner = lambda: owner

    def totals(self):
        """The clipped sums, by name, as copies."""
        return totals_of(self._pending_passes.clipper)

    def norms(self):
        """Norms of the last pass."""
        return self._pending_passes.norms()

    def waiting(self):
        """Returns True if a pass is pending, the number of passes, and the number of samples of the first."""
        parts = next(iter(self._pending_passes._parts().values()), None)
        rows = len(parts[0]) if parts else self._pending_passes._pending[0].gradients.samples
        return self._pending_passes.pending, self._pending_passes.count, rows

    def pending(self):
        """Returns True if a pass waits to be clipped."""
        return self._pending_passes.pending

    def forbid_accumulation(self):
        """Allows one waiting pass at a time."""
        self._pending_passes.allows_accumulation = False

    def restrict(self, parameters):
        """Clips and sums these parameters alone."""
        self._pending_passes.clipper.only = frozenset(parameters)

    def released(self):
        """Marks what was clipped as used by a step."""
        self._pending_passes.mark_released()

    def clear_shown(self):
        """Sets ``p.grad_sample`` to None."""
        self._pending_passes.clear()


def share_units(model, inputs, others):
    """Chooses units as one rank of several; ``others`` are the choices of the other ranks. Returns the common units."""
    everyone = SimpleNamespace(size=1 + len(others), rank=0, all_gather=lambda own: [own, *others])
    listener = SimpleNamespace(forward_started=lambda _: None)
    capture, *_ = watch_model(model, listener, "auto", topology=replace(SINGLE, everyone=everyone))
    capture.attach()
    model(**inputs)
    capture.choice.share(capture)
    capture.detach()
    return capture.units


def rows_of_forward(model, inputs):
    """Returns the number of samples that capture infers for a forward pass."""
    rows = []
    capture, *_ = watch_model(model, SimpleNamespace(forward_started=rows.append), "auto")
    capture.attach()
    model(inputs)
    return rows


def book_keeping():
    """Returns the default grad mode without timing of algorithms."""
    return BookKeeping(MethodTable(timed=False))


class GradientsOfRows:
    """Norms and weighted sums of the calls of layers, by the algorithms of a table of methods."""

    def __init__(self, table):
        self._kept = BookKeeping(table)

    def receive(self, call, uses, rule):
        """Adds the call of a layer."""
        self._kept.receive(call, uses, rule)

    def sq_norms(self, parameters, scale):
        """Squared norms over these parameters."""
        return self._kept.sq_norms(dict.fromkeys(parameters, 0), 1, scale)[:, 0]

    def weighted_sums(self, parameters, factors, scale):
        """Weighted sums of the gradients, by parameter."""
        buffer = FlatBuffer(parameters)
        self._kept.add_sums(dict.fromkeys(parameters, 0), factors, scale, buffer)
        return dict(buffer)

    def clear(self):
        """Removes all calls."""
        self._kept.clear()


# Plans


class Plan:
    """A plan without a run, built from the arguments of the plan."""

    def __init__(self, *arguments, plan=None, **settings):
        self._plan = RunPlan(*arguments, **settings) if plan is None else plan
        self.run, self.noise_multiplier = self._plan.run, self._plan.noise_multiplier
        self.event, self.why_not_merged = self._plan.event, self._plan.why_not_merged

    def changed(self, step, **constants):
        """Returns the plan with other constants from a step on."""
        return Plan(plan=self._plan.changed(step, **constants))

    def at_step(self, step, **options):
        """The plan at a step."""
        return Plan(plan=self._plan.at_step(step, **options))


# Compiled passes


def limit_compiled_graphs(monkeypatch, number):
    """Limits the graphs of one model."""
    monkeypatch.setattr(dpengine.engine.compiled_forward, "_MAX_GRAPHS", number)


# Probes


def record_probes(monkeypatch, *, ask=True):
    """Returns a list of the number of samples of each probe; without ``ask``, probes do nothing."""
    asked, original = [], probe.IndependenceCheck.run

    def recorded(self):
        asked.append(len(self._usable_B))
        return original(self) if ask else None

    monkeypatch.setattr(probe.IndependenceCheck, "run", recorded)
    return asked


def record_halves(monkeypatch):
    """Returns a list of the samples of each half that a probe would keep. The probe compares none of them."""
    kept, halves = [], probe._halves
    monkeypatch.setattr(probe, "_halves", lambda *args: kept.extend(part.tolist() for part in halves(*args)) or [])
    return kept


def set_probe_interval(monkeypatch, passes):
    """Sets the number of passes between probes, for all models."""
    monkeypatch.setattr(dpengine.engine.watch_model, "EVERY", passes)


def unprobed():
    """A context in which no new run is probed."""
    return unittest.mock.patch.object(dpengine.engine.watch_model, "EVERY", None)


def copied_buffers(watch):
    """The number of buffers and parameters of which a watch keeps a copy."""
    return sum(one.value is not None for one in watch._snapshots.values())


# make_private


ATTACHED_PARTS = {  # what make_private attaches besides hooks, in order
    "optimizer": (dpengine.engine.optimizer, "private_class"),
    "layers": (dpengine.capture.hooks.LayerForward, "attach"),
    "scaler": (amp_and_lr_schedulers, "attach_scaler"),
    "scheduler": (amp_and_lr_schedulers, "attach_scheduler"),
    "models": (dpengine.engine.run, "attached_runs"),
}


def fail_to_attach(monkeypatch, part, fail):
    """Makes ``make_private`` call ``fail`` where it attaches a part."""
    owner, name = ATTACHED_PARTS[part]
    monkeypatch.setattr(owner, name, SimpleNamespace(add=fail) if part == "models" else fail)


def is_private(model):
    """Returns True if a model is in the list of private models."""
    return any(run.model is model for run in attached_runs.all())


def list_as_private(model):
    """Adds a model to the list of private models, and reads the list."""
    attached_runs.add(type("Listed", (), {"model": model})())
    attached_runs.all()


def record_calibrations(monkeypatch):
    """Returns a list of the sample rate of each noise calibration."""
    rates, original = [], dpengine.accounting.noise_calibration.calibration

    def recorded(**given):
        rates.append(given["sample_rate"])
        return original(**given)

    monkeypatch.setattr(dpengine.accounting.noise_calibration, "calibration", recorded)
    return rates


def replace_report(monkeypatch, action):
    """Makes ``engine.report`` call ``action`` instead of computing a report."""
    monkeypatch.setattr(dpengine.engine.run_report, "report_of_run", action)
