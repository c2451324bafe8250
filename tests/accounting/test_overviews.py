"""Reprs and notebook tables of engine, loader, ledger and report omit private values."""

import re

import torch
from loops import make_loop
from torch.utils.data import DataLoader, TensorDataset

from dpengine import PrivacyEngine
from dpengine.accounting.overviews import html_table
from dpengine.accounting.rounding import round_up


def test_reprs_of_engine_loader_and_ledger_show_their_contents():
    model = torch.nn.Linear(4, 2)
    optimizer, engine = torch.optim.SGD(model.parameters(), lr=0.1), PrivacyEngine()
    data = DataLoader(TensorDataset(torch.randn(200, 4)), batch_size=20)
    assert repr(engine) == "PrivacyEngine(accountant=pld, runs=0, steps=0)"
    loader = engine.make_private(model, optimizer, data, noise_multiplier=1.0, max_grad_norm=1.0, target_delta=1e-3)[2]
    shown = repr(loader)
    assert shown.startswith("PrivateDataLoader(sampling=PoissonDraws(num_examples=200, sample_rate=0.1, ")
    assert shown.endswith(", steps=10, position=0)")
    for (inputs,) in loader:
        optimizer.zero_grad()
        model(inputs).sum(1).mean().backward()
        optimizer.step()
    assert repr(loader).endswith(", position=10)")
    assert repr(engine.ledger) == "Ledger(steps=10, events=1)"
    shown = round_up(engine.epsilon)
    assert repr(engine) == f"PrivacyEngine(accountant=pld, runs=1, steps=10, epsilon={shown}, delta=0.001)"
    assert f"<th>epsilon</th><td>{shown}</td>" in engine._repr_html_()
    assert "<th>position</th><td>10</td>" in loader._repr_html_()
    assert re.search("<th>PoissonGaussianEvent.*, release</th><td>10</td>", engine.ledger._repr_html_())
    report = engine.report()._repr_html_()
    assert f"(ε = {shown}, δ = 0.001)" in report and "<th>Steps</th><td>10 steps charged.</td>" in report


def test_an_engine_without_a_claim_shows_no_epsilon():
    loop = make_loop(noise_multiplier=1.0, sampling="shuffle")
    loop.step(*next(iter(loop.loader)))
    assert "epsilon=not claimed" in repr(loop.engine)


def test_the_repr_of_a_loader_does_not_show_the_unit_of_each_example():
    loop = make_loop(noise_multiplier=1.0, target_delta=1e-3, privacy_unit=[7] * 23 + [8])
    assert "array" not in repr(loop.loader) and "num_examples=2," in repr(loop.loader)


def test_notebook_tables_are_escaped_and_state_the_number_of_omitted_rows():
    shown = html_table("<a>", {f"<{number}>": "&" for number in range(23)})
    assert "<a>" not in shown and "&lt;a&gt;" in shown and "<td>&amp;</td>" in shown
    assert shown.endswith("<p>and 3 more</p>") and "&lt;19&gt;" in shown and "&lt;20&gt;" not in shown
