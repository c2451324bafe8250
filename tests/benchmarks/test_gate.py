"""The gate, which excludes contenders with wrong gradients from timing; cells and processes of the timing benchmark."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks import contenders, gate, table, timing
from benchmarks.cells import CELLS, Cell, TokenLoss, vectors
from benchmarks.contenders import CONTENDERS, Contender, ours, plain
from benchmarks.gate import judge
from benchmarks.jax_process import jax_runner
from benchmarks.memory import peak_memory
from benchmarks.runner import Setting, trainable
from benchmarks.step import contenders_for

SETTING = Setting(threads=1)
QUICK = timing.Protocol(steps=2, warm_up=0, memory="none")


def two_layers():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 10))


CELL = Cell(two_layers, vectors(3), 4)


@pytest.fixture
def contend(monkeypatch):
    """Registers a contender during a test."""

    def enter(build, **facts):
        monkeypatch.setitem(CONTENDERS, "guest", Contender(build, **facts))

    return enter


def test_a_contender_that_does_not_clip_is_reported_with_its_deviation_and_without_a_time(contend):
    contend(plain)
    found = timing.measure("small", CELL, ["plain", "guest"], QUICK, SETTING)
    assert "guest" not in found["results"]
    assert found["gate"]["guest"]["deviation"] > 1e-2
    assert "deviates" in found["failed"]["guest"]
    printed = table.report({"cells": {"small": found}})
    assert found["failed"]["guest"] in printed


@pytest.mark.one_in(2, "clipping", others="slow")
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_clipping_norm_that_is_off_by_a_thousandth_fails_the_gate(contend, clipping):
    right = ours("auto")
    contend(
        lambda cell, model, batch, s: right(cell, model, batch, replace(s, max_norm=1.001 * s.max_norm)), groups="layer"
    )
    cell = replace(CELL, clipping=clipping)
    verdict = gate.judge(CONTENDERS["guest"], cell, SETTING)
    assert 1e-4 < verdict.deviation < 2e-3
    assert verdict.why_not is not None
    assert gate.judge(CONTENDERS["dpengine auto"], cell, SETTING).why_not is None


def test_a_sample_above_the_clipping_norm_fails_the_gate_even_if_the_sum_is_within_tolerance(contend):
    right = ours("auto")
    contend(
        lambda cell, model, batch, s: right(cell, model, batch, replace(s, max_norm=(1 + 1e-5) * s.max_norm)),
        overshoot=1e-6,
    )
    verdict = gate.judge(CONTENDERS["guest"], CELL, SETTING)
    assert verdict.overshoot == pytest.approx(1e-5, rel=0.2)  # float32, and dpengine clips about 1e-6 below the norm
    assert "exceeds" in verdict.why_not


def test_a_contender_that_is_not_installed_is_reported_and_the_others_are_timed(contend):
    def build(cell, model, batch, setting):
        raise ModuleNotFoundError("No module named 'guest'")

    contend(build)
    found = timing.measure("small", CELL, ["plain", "guest", "dpengine auto"], QUICK, SETTING)
    assert found["failed"] == {"guest": "ModuleNotFoundError: No module named 'guest'"}
    assert set(found["results"]) == {"plain", "dpengine auto"}


def test_a_contender_that_raises_while_it_is_timed_is_reported(contend):
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


def test_timing_stops_at_the_minimum_number_of_steps_when_the_time_budget_is_used_up(contend):
    contend(plain)
    protocol = replace(QUICK, steps=timing.MIN_STEPS + 3, budget=0.0)
    rows, _ = timing.time_steps(CELL, ["guest", "plain"], protocol, SETTING)
    assert {row["steps"] for row in rows.values()} == {timing.MIN_STEPS}
    rows, _ = timing.time_steps(CELL, ["guest", "plain"], replace(protocol, budget=60.0), SETTING)
    assert {row["steps"] for row in rows.values()} == {protocol.steps}


def test_a_contender_is_not_timed_if_its_per_sample_gradients_would_not_fit_in_memory(contend):
    contend(ours("hooks"), stores_gradients=True)
    found = timing.measure("small", CELL, ["plain", "guest"], replace(QUICK, max_bytes=1.0), SETTING)
    assert found["failed"]["guest"].startswith("not timed")


def test_the_reference_is_the_gradient_of_the_loss_of_each_sample():
    torch.manual_seed(0)
    model, (inputs, targets) = nn.Linear(3, 10).double(), vectors(3)(4)
    rows = gate.sample_gradients(CELL, model, (inputs, targets))
    for i, row in enumerate(rows):
        output = torch.softmax(model(inputs[i].double()), 0) - nn.functional.one_hot(targets[i], 10)
        torch.testing.assert_close(row["bias"], output.detach())
        torch.testing.assert_close(row["weight"], torch.outer(output.detach(), inputs[i].double()))


def test_labels_match_contenders_by_the_prefix_of_the_name():
    assert contenders.label("opacus hooks", "bert-per-layer")
    assert contenders.label("opacus hooks", "bert") is None
    assert contenders.label("opake", "bert-per-layer") is None


LARGE = {"wrn", "vit", "bert", "gpt", "bert-per-layer"}
BATCH = 2
MARKED = [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in CELLS]


@pytest.mark.slow
@pytest.mark.one_in(5, "name")
@pytest.mark.parametrize("name", MARKED)
def test_the_default_mode_equals_the_loop_over_samples_and_respects_the_clipping_norm(name):
    verdict = judge(CONTENDERS["dpengine auto"], CELLS[name], Setting(threads=1), batch_size=BATCH)
    assert verdict.why_not is None
    assert verdict.deviation is not None and verdict.overshoot is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_an_ordinary_step_updates_exactly_the_trainable_parameters(name):
    torch.manual_seed(0)
    cell = CELLS[name]
    model = cell.make()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    CONTENDERS["plain"].build(cell, model, cell.batch(BATCH), Setting(rate=1.0)).step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(trainable(model))


@pytest.mark.parametrize("name", CELLS)
def test_every_cell_has_goals_and_stretch_goals_are_stricter(name):
    assert all(goal.stretch is None or goal.stretch < goal.target for goal in CELLS[name].goals)
    assert CELLS[name].goals


def test_the_language_model_loss_is_the_mean_over_samples_of_the_mean_over_tokens():
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    rows = []
    for b in range(3):
        tokens = [-torch.log_softmax(logits[b, t], 0)[targets[b, t]] for t in range(5)]
        rows.append(sum(tokens) / 5)
    torch.testing.assert_close(TokenLoss(reduction="none")(logits, targets), torch.stack(rows))
    torch.testing.assert_close(TokenLoss()(logits, targets), sum(rows) / 3)


def test_the_language_model_ties_its_head_to_the_word_embedding():
    model = CELLS["gpt"].make()
    assert model.head.weight is model.words.weight


def test_only_low_rank_matrices_are_trainable_in_the_lora_cell():
    names = list(trainable(CELLS["lora"].make()))
    assert len(names) == 2 * (4 * 4 + 1)  # two matrices for each of four linear layers of four blocks, and for the head
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in names} == {"down", "up"}


def test_only_biases_and_the_head_are_trainable_in_the_bitfit_cell():
    names = list(trainable(CELLS["bitfit"].make()))
    assert [name for name in names if not name.endswith("bias")] == ["head.weight"]


def start_jax(cell, **setting):
    jax_runner(private=True)(cell, cell.make(), cell.batch(2), replace(SETTING, **setting))


def test_a_jax_process_that_exits_raises_instead_of_blocking():
    with pytest.raises(RuntimeError, match="no message"):
        start_jax(CELLS["cnn"], jax_python="/bin/false")


def test_a_model_without_a_jax_implementation_is_rejected():
    with pytest.raises(NotImplementedError, match="no implementation in JAX"):
        start_jax(CELLS["lstm"])


@pytest.mark.slow
def test_peak_memory_of_the_first_and_of_later_steps_includes_the_batch():
    held = peak_memory("cnn", "plain", SETTING)
    assert held is not None
    assert held["first"] > 1 and held["later"] > 1  # 256 images of 784 float32 numbers take 0.77 MiB


@pytest.mark.slow
def test_peak_memory_of_a_contender_that_fails_is_none():
    assert peak_memory("cnn", "jax plain", SETTING) is None
    assert peak_memory("cnn", "nobody", SETTING) is None


def test_contenders_are_chosen_by_mode_and_library():
    assert contenders_for(["auto"], ["none"]) == ["plain", "dpengine auto"]
    assert contenders_for(["ew"], ["jax-privacy"]) == ["plain", "dpengine ew", "jax plain", "jax-privacy"]
    everything = contenders_for(["auto"], ["all"])
    assert {"opacus ghost", "opake", "backpack norm", "jax plain", "jax-privacy"} <= set(everything)
