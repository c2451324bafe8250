"""A contender that computes something else has no time."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks import contenders, gate, table, timing
from benchmarks.cells import Cell, vectors
from benchmarks.contenders import CONTENDERS, Contender, ours, plain
from benchmarks.runner import Setting

SETTING = Setting(threads=1)
QUICK = timing.Protocol(steps=2, warm_up=0, memory="none")


def two_layers():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 10))


CELL = Cell(two_layers, vectors(3), 4)


@pytest.fixture
def contend(monkeypatch):
    """Enters a contender for the time of a test."""

    def enter(build, **facts):
        monkeypatch.setitem(CONTENDERS, "guest", Contender(build, **facts))

    return enter


def test_a_contender_that_does_not_clip_prints_no_time_but_its_deviation(contend):
    contend(plain)
    found = timing.measure("small", CELL, ["plain", "guest"], QUICK, SETTING)
    assert "guest" not in found["results"]
    assert found["gate"]["guest"]["deviation"] > 1e-2
    assert "deviates" in found["failed"]["guest"]
    printed = table.report({"cells": {"small": found}})
    assert found["failed"]["guest"] in printed


@pytest.mark.one_in(2, "clipping", others="slow")
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_threshold_that_is_wrong_by_a_thousandth_is_seen(contend, clipping):
    right = ours("auto")
    contend(
        lambda cell, model, batch, s: right(cell, model, batch, replace(s, max_norm=1.001 * s.max_norm)), groups="layer"
    )
    cell = replace(CELL, clipping=clipping)
    verdict = gate.judge(CONTENDERS["guest"], cell, SETTING)
    assert 1e-4 < verdict.deviation < 2e-3
    assert verdict.why_not is not None
    assert gate.judge(CONTENDERS["dpengine auto"], cell, SETTING).why_not is None


def test_a_row_that_passes_its_threshold_has_no_time_even_if_the_sum_is_near_enough(contend):
    right = ours("auto")
    contend(
        lambda cell, model, batch, s: right(cell, model, batch, replace(s, max_norm=(1 + 1e-5) * s.max_norm)),
        overshoot=1e-6,
    )
    verdict = gate.judge(CONTENDERS["guest"], CELL, SETTING)
    assert verdict.overshoot == pytest.approx(1e-5, rel=0.2)  # float32, and our own margin of about 1e-6
    assert "exceeds" in verdict.why_not


def test_a_peer_that_is_missing_is_reported_and_the_others_go_on(contend):
    def build(cell, model, batch, setting):
        raise ModuleNotFoundError("No module named 'guest'")

    contend(build)
    found = timing.measure("small", CELL, ["plain", "guest", "dpengine auto"], QUICK, SETTING)
    assert found["failed"] == {"guest": "ModuleNotFoundError: No module named 'guest'"}
    assert set(found["results"]) == {"plain", "dpengine auto"}


def test_a_peer_that_breaks_while_it_is_timed_is_reported(contend):
    calls = []

    def build(cell, model, batch, setting):
        runner = plain(cell, model, batch, setting)

        def step():
            calls.append(None)
            if len(calls) > 2:
                raise RuntimeError("tired")
            return runner.step()

        return replace(runner, step=step)

    contend(build, tolerance=math.inf)
    found = timing.measure("small", CELL, ["plain", "guest"], QUICK, SETTING)
    assert found["failed"] == {"guest": "RuntimeError: tired"}


def test_a_slow_contender_stops_early_and_the_others_do_not(contend):
    contend(plain)
    protocol = replace(QUICK, steps=timing.FEWEST_STEPS + 3, budget=0.0)
    rows, _ = timing.time_steps(CELL, ["guest", "plain"], protocol, SETTING)
    assert {row["steps"] for row in rows.values()} == {timing.FEWEST_STEPS}
    rows, _ = timing.time_steps(CELL, ["guest", "plain"], replace(protocol, budget=60.0), SETTING)
    assert {row["steps"] for row in rows.values()} == {protocol.steps}


def test_gradients_of_rows_that_would_fill_the_memory_are_left_out(contend):
    contend(ours("hooks"), keeps_rows=True)
    found = timing.measure("small", CELL, ["plain", "guest"], replace(QUICK, largest=1.0), SETTING)
    assert found["failed"]["guest"].startswith("left out")


def test_the_reference_is_the_gradient_of_each_rows_loss():
    torch.manual_seed(0)
    model, (inputs, targets) = nn.Linear(3, 10).double(), vectors(3)(4)
    rows = gate.row_gradients(CELL, model, (inputs, targets))
    for i, row in enumerate(rows):
        output = torch.softmax(model(inputs[i].double()), 0) - nn.functional.one_hot(targets[i], 10)
        torch.testing.assert_close(row["bias"], output.detach())
        torch.testing.assert_close(row["weight"], torch.outer(output.detach(), inputs[i].double()))


def test_a_label_is_found_by_the_beginning_of_a_name():
    assert contenders.label("opacus hooks", "bert-per-layer")
    assert contenders.label("opacus hooks", "bert") is None
    assert contenders.label("opake", "bert-per-layer") is None
