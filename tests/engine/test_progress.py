"""The progress bar: privacy cost, overhead, and no output on non-interactive streams."""

import math
import re
import sys

import pytest
import torch
from loops import make_loop

from dpengine.accounting import Ledger, PoissonGaussianEvent
from dpengine.engine.progress import cost_text, is_shown, progress
from dpengine.errors import AccountingRefusedError


class Spender:
    """Engine whose epsilon is a hundredth of its steps; counts the reads of epsilon."""

    def __init__(self, refuses=False):
        self.ledger = Ledger()
        self.asked = 0
        self.refuses = refuses

    def step(self):
        self.ledger.charge(PoissonGaussianEvent(0.1, 1.0))

    @property
    def epsilon(self):
        self.asked += 1
        if self.refuses:
            raise AccountingRefusedError("No epsilon is claimed.")
        return self.ledger.steps / 100


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.setenv("DPENGINE_PROGRESS", "1")


def last_line(capsys):
    return capsys.readouterr().err.replace("\r", "\n").strip().splitlines()[-1]


def test_the_bar_shows_the_spent_epsilon_and_the_target(shown, capsys):
    spender = Spender()
    for _ in progress(spender, range(142), target_epsilon=3.0):
        spender.step()
    line = last_line(capsys)
    assert "142/142" in line
    assert "ε 1.42/3.00 (48 %)" in line  # 47.3 %, rounded up as the spent epsilon is


@pytest.mark.parametrize(
    ("epsilon", "target", "text"),
    [
        (0.0, 3.0, "ε 0.00/3.00 (0 %)"),
        (1.411, 3.0, "ε 1.42/3.00 (48 %)"),
        (3.0, 3.0, "ε 3.00/3.00 (100 %)"),
        (3.3, 3.0, "ε 3.30/3.00 (110 %)"),  # on_budget="warn"
        (1.411, None, "ε 1.42"),
        (math.inf, None, "ε ∞"),
    ],
)
def test_the_displayed_epsilon_is_never_below_the_spent_one(epsilon, target, text):
    spender = type("Fixed", (), {"epsilon": epsilon})()
    assert cost_text(spender, target) == text


def test_run_without_a_privacy_guarantee_shows_no_epsilon(shown, capsys):
    spender = Spender(refuses=True)
    for _ in progress(spender, range(3)):
        spender.step()
    assert "ε not claimed" in last_line(capsys)


def test_bar_counts_logical_steps(shown, capsys):
    spender = Spender()
    for chunk in progress(spender, range(20), total=5):
        if chunk % 4 == 3:
            spender.step()
    assert "5/5" in last_line(capsys)


def test_bar_counts_steps_relative_to_its_start(shown, capsys):
    spender = Spender()
    spender.step()
    for _ in progress(spender, range(4)):
        spender.step()
    assert "4/4" in last_line(capsys)


def test_bar_over_an_iterator_without_length_shows_only_a_count(shown, capsys):
    spender = Spender()
    for _ in progress(spender, iter(range(4))):
        spender.step()
    assert last_line(capsys).startswith("4 steps  ε 0.04")


def test_epsilon_is_computed_about_once_a_second(shown, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("dpengine.engine.progress.time.monotonic", lambda: now[0])
    spender = Spender()
    for _ in progress(spender, range(1000)):
        spender.step()
        now[0] += 0.01
    assert 8 <= spender.asked <= 14  # ten seconds, the first and the last


def test_slow_epsilon_is_computed_less_often(shown, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("dpengine.engine.progress.time.monotonic", lambda: now[0])

    class Slow(Spender):
        @property
        def epsilon(self):
            now[0] += 1.0
            return super().epsilon

    spender = Slow()
    for _ in progress(spender, range(1000)):
        spender.step()
        now[0] += 0.1
    assert spender.asked <= 9  # 100 seconds of work: at most a twentieth is spent on computing epsilon


def test_leaving_the_loop_early_shows_the_state_at_that_time(shown, capsys):
    spender = Spender()
    batches = progress(spender, range(10), target_epsilon=1.0)
    for batch in batches:
        spender.step()
        if batch == 3:
            break
    batches.close()
    assert "4/10  ε 0.040/1.00" in last_line(capsys)


def test_bar_shows_rate_and_metrics_within_80_columns(shown, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    spender = Spender()
    batches = progress(spender, range(1000), target_epsilon=10.0)
    for batch in batches:
        spender.step()
        batches.set_postfix({"loss": torch.tensor(0.25 + batch / 1000, requires_grad=True)})
    assert re.search(r"1000/1000  ε 10.00/10.00 \(100 %\)  \d\d:\d\d<00:00, .*it/s, loss=1.25$", last_line(capsys))


def test_tensors_are_read_only_when_the_bar_shows_them(shown, monkeypatch):
    read = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: read.append(tensor) or item(tensor))
    batches = progress(Spender(), range(100))
    for _ in batches:
        batches.set_postfix({"loss": torch.ones(())})
    assert len(read) <= 3  # less than a second: only the first and the last


def test_bar_is_hidden_when_the_output_is_not_a_terminal(capsys, monkeypatch):
    monkeypatch.delenv("DPENGINE_PROGRESS", raising=False)
    spender = Spender()
    assert list(progress(spender, range(4))) == [0, 1, 2, 3]
    assert capsys.readouterr().err == ""
    assert spender.asked == 0


@pytest.mark.parametrize(
    ("terminal", "variable", "rank", "expected"),
    [
        (True, None, None, True),
        (False, None, None, False),
        (True, "0", None, False),
        (False, "1", None, True),
        (True, None, 0, True),
        (True, None, 1, False),
        (True, "1", 1, False),
    ],
)
def test_the_bar_is_shown_on_terminals_and_on_request(monkeypatch, terminal, variable, rank, expected):
    monkeypatch.delenv("DPENGINE_PROGRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("DPENGINE_PROGRESS", variable)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: rank is not None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    assert is_shown() is expected


def test_loop_runs_without_tqdm(shown, monkeypatch):
    monkeypatch.setattr("dpengine.engine.progress.importlib.util.find_spec", lambda name: None)
    assert list(progress(Spender(), range(3))) == [0, 1, 2]


def test_a_private_loop_takes_the_same_steps_with_a_bar(shown, capsys):
    loop = make_loop(noise_multiplier=1.0)
    before = loop.engine.ledger.steps
    for inputs, targets in loop.engine.progress(loop.loader):
        loop.step(inputs, targets)
    assert loop.engine.ledger.steps - before == len(loop.loader)
    assert f"{len(loop.loader)}/{len(loop.loader)}" in last_line(capsys)
