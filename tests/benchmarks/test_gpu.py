"""The GPU benchmark runs on the CPU with tiny models, and its checks can fail."""

import json

import pytest

from benchmarks import gpu
from benchmarks.cells import CELLS
from dpengine.clipping import policy


@pytest.mark.slow
def test_all_parts_run_with_tiny_models(tmp_path, monkeypatch):
    out = tmp_path / "gpu.json"
    arguments = ["gpu", "--device", "cpu", "--tiny", "--steps", "1", "--contenders", "dpengine auto"]
    monkeypatch.setattr("sys.argv", [*arguments, "--gate", "vit", "--out", str(out)])
    gpu.main()
    found = json.loads(out.read_text())
    assert not [name for name, part in found.items() if isinstance(part, dict) and "failed" in part]
    assert all(one["why_not"] is None for one in found["sums"]["vit"].values())
    assert all(one["overshoot"] <= 1e-6 and one["inside"] < 1e-6 for one in found["autocast"].values())
    assert found["cell vit"]["dpengine auto"]["ratio"] > 0


@pytest.mark.slow
def test_the_autocast_check_reports_samples_above_the_clipping_norm(monkeypatch):
    monkeypatch.setattr(policy, "SLACK", -1e-3)
    assert gpu.check_autocast("cpu", gpu.TINY["vit"])["overshoot"] == pytest.approx(1e-3, rel=0.01)
    assert CELLS.keys() >= {"mlp", "vit", "bert", "gpt"}  # those that are checked on a GPU
