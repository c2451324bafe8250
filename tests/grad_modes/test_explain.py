"""``engine.explain()``, and method tables that are passed between runs."""

import pytest
import torch
from launch import launched
from loops import make_loop
from torch import nn

from dpengine import PrivacyEngine
from dpengine.grad_modes import MethodTable, choose_method, stacks


def images():
    return nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(4, 3))


def step_of(loop):
    for batch in loop.loader:
        loop.backward(*batch)
        loop.optimizer.step()
        break


@pytest.mark.parametrize("small", [True, False])
def test_explain_has_one_line_for_each_parameter(small, monkeypatch):
    if not small:
        monkeypatch.setattr(stacks, "SMALL_CALL_BYTES", 0)
    torch.manual_seed(0)
    loop = make_loop(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 3)))
    assert loop.engine.explain().splitlines()[1:] == []
    step_of(loop)
    head, *rows = loop.engine.explain().splitlines()
    assert head.split() == ["parameter", "layer", "method", "why", "ms", "kept", "MiB"]
    names = {row.split()[0] for row in rows}
    assert names == {name for name, _ in loop.model.named_parameters()}
    (weight,) = (row for row in rows if row.startswith("0.weight"))
    assert "Linear(in_features=4, out_features=5" in weight and ("keep: direct" if small else "ghost: gram") in weight
    (norm,) = (row for row in rows if row.startswith("2.weight"))
    assert "LayerNorm" in norm and "keep: direct" in norm and "formed at once" in norm


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_explain_reports_modes_that_keep_all_gradients(mode):
    loop = make_loop(grad_sample_mode=mode)
    step_of(loop)
    assert "keep" in loop.engine.explain() and "ghost" not in loop.engine.explain()


def test_explain_needs_a_model():
    with pytest.raises(ValueError, match="Nothing is private yet"):
        PrivacyEngine().explain()


def test_a_method_table_is_passed_on_to_another_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(choose_method, "_MIN_TIMED", 0.0)
    monkeypatch.setattr(stacks, "SMALL_CALL_BYTES", 0)
    first = PrivacyEngine(seed=0)  # batches of one size
    torch.manual_seed(0)
    step_of(make_loop(images(), engine=first))
    assert any("Conv1d" in signature for signature in first.methods.seconds)
    first.methods.save(tmp_path / "methods.json")
    monkeypatch.setattr(choose_method, "time_algorithms", lambda *args: pytest.fail("timed again"))
    for given in (tmp_path / "methods.json", str(tmp_path / "methods.json"), first.methods):
        second = PrivacyEngine(seed=0, methods=given)
        torch.manual_seed(0)
        step_of(make_loop(images(), engine=second))
        assert "timed" in second.explain()


@pytest.mark.parametrize("given", [3, {"seconds": {}}, True])
def test_invalid_tables_are_rejected(given):
    with pytest.raises(TypeError, match="MethodTable"):
        PrivacyEngine(methods=given)


def _share():
    rank = torch.distributed.get_rank()
    table = MethodTable()
    table.seconds["a"] = {"ghost: gram": 1.0 + rank}
    table.seconds[f"only {rank}"] = {"keep: direct": 1.0}
    table.share()
    return rank, table.seconds, table.timed, table.version


def test_rank_0_decides_for_all_ranks():
    found = launched(2, _share)
    expected = {"a": {"ghost: gram": 1.0}, "only 0": {"keep: direct": 1.0}}
    assert found == [(0, expected, False, 1), (1, expected, False, 1)]


def test_sharing_in_one_process_changes_nothing():
    table = MethodTable()
    table.seconds["a"] = {"ghost: gram": 1.0}
    table.share()
    assert table.version == 0 and table.timed and table.seconds == {"a": {"ghost: gram": 1.0}}
