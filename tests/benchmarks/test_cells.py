"""Every cell trains, and dpengine's default mode passes the gate in it."""

import pytest
import torch

from benchmarks.cells import CELLS, TokenLoss
from benchmarks.contenders import CONTENDERS
from benchmarks.gate import judge
from benchmarks.runner import Setting, trainable

LARGE = {"wrn", "vit", "bert", "gpt", "bert-per-layer"}
ROWS = 2
MARKED = [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in CELLS]


@pytest.mark.slow
@pytest.mark.one_in(5, "name")
@pytest.mark.parametrize("name", MARKED)
def test_default_mode_equals_the_loop_over_rows_and_keeps_to_its_threshold(name):
    verdict = judge(CONTENDERS["dpengine auto"], CELLS[name], Setting(threads=1), rows=ROWS)
    assert verdict.why_not is None
    assert verdict.deviation is not None and verdict.overshoot is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_an_ordinary_step_moves_every_trained_parameter_and_no_other(name):
    torch.manual_seed(0)
    cell = CELLS[name]
    model = cell.make()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    CONTENDERS["plain"].build(cell, model, cell.batch(ROWS), Setting(rate=1.0)).step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(trainable(model))


@pytest.mark.parametrize("name", CELLS)
def test_every_cell_says_what_is_aimed_at(name):
    assert all(goal.stretch is None or goal.stretch < goal.target for goal in CELLS[name].goals)
    assert CELLS[name].goals


def test_the_language_models_loss_is_the_mean_over_rows_of_the_mean_over_tokens():
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    rows = []
    for b in range(3):
        tokens = [-torch.log_softmax(logits[b, t], 0)[targets[b, t]] for t in range(5)]
        rows.append(sum(tokens) / 5)
    torch.testing.assert_close(TokenLoss(reduction="none")(logits, targets), torch.stack(rows))
    torch.testing.assert_close(TokenLoss()(logits, targets), sum(rows) / 3)


def test_the_language_models_head_is_its_word_embedding():
    model = CELLS["gpt"].make()
    assert model.head.weight is model.words.weight


def test_only_low_rank_updates_train_in_the_lora_cell():
    names = list(trainable(CELLS["lora"].make()))
    assert len(names) == 2 * (4 * 4 + 1)  # two matrices for each of four linear layers of four blocks, and for the head
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in names} == {"down", "up"}


def test_only_biases_and_the_head_train_in_the_bitfit_cell():
    names = list(trainable(CELLS["bitfit"].make()))
    assert [name for name in names if not name.endswith("bias")] == ["head.weight"]
