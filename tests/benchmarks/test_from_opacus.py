"""The benchmark of migrated scripts: its runs, its measurements, and its output without Opacus."""

import argparse

import pytest
from migrated import SCRIPTS, script

from benchmarks import from_opacus

SCRIPT = """
import torch

class PrivacyEngine: pass

def main(argv):
    held = torch.ones(16 * 2**20)  # 64 MiB
    return {"steps": 2, "seconds": 0.5, "accuracy": float(held[0]), "epsilon": 1.0, "argv": argv}
"""


def a_run(**figures):
    return {
        "steps": 10,
        "seconds": 1.0,
        "whole": 2.0,
        "accuracy": 0.5,
        "epsilon": 2.0,
        "noise_multiplier": 1.0,
        "peak_mib": 7.0,
    } | figures


def test_each_script_is_measured_in_the_modes_that_it_lists():
    assert set(from_opacus.EXAMPLES) == set(SCRIPTS)
    for name in SCRIPTS:
        assert from_opacus.modes_of(name) == script(name).MODES
        assert set(from_opacus.modes_of(name)) <= set(from_opacus.MODES)


def test_copies_for_opacus_import_opacus_instead_of_dpengine(tmp_path):
    from_opacus.copy_for_opacus(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.py")} > set(SCRIPTS)
    for name in SCRIPTS:
        text = (tmp_path / f"{name}.py").read_text(encoding="utf-8")
        assert "from opacus import PrivacyEngine" in text
        assert "dpengine.compat" not in text


def test_without_opacus_only_dpengine_is_run():
    assert from_opacus.contenders_for(["hooks"], ["ew", "ghost"], installed=False) == [("dpengine", "hooks")]
    both = from_opacus.contenders_for(["hooks"], ["ew", "ghost"], installed=True)
    assert both == [("dpengine", "hooks"), ("opacus", "ew"), ("opacus", "ghost")]


def test_the_output_without_opacus_names_the_requirements_to_install(monkeypatch, capsys):
    monkeypatch.setattr(from_opacus.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(from_opacus.sys, "argv", ["from_opacus", "--examples", "schedulers"])
    monkeypatch.setattr(from_opacus, "run", lambda *args: a_run())
    from_opacus.main()
    said = capsys.readouterr().out
    assert "Opacus is not installed" in said
    assert "benchmarks/requirements.txt" in said
    assert "| schedulers | dpengine hooks | 100.0 |" in said
    assert "opacus hooks" not in said


def test_the_ratio_is_the_median_time_over_that_of_the_fastest_opacus_mode():
    runs = {
        "dpengine hooks": [a_run(seconds=3.0), a_run(seconds=2.0), a_run(seconds=1.0)],
        "opacus hooks": [a_run(seconds=8.0)],
        "opacus ew": [a_run(seconds=4.0)],
    }
    lines = from_opacus.table("x", {"runs": runs, "broke": {"opacus ghost": "ValueError: no"}}).splitlines()
    ratios = {line.split("|")[2].strip(): line.split("|")[6].strip() for line in lines if line.startswith("| x")}
    assert ratios == {"dpengine hooks": "0.50", "opacus hooks": "2.00", "opacus ew": "1.00"}
    assert lines[-1] == "opacus ghost does not run: ValueError: no"


def test_contenders_alternate_and_one_that_fails_is_reported_and_not_run_again(monkeypatch, tmp_path):
    seen = []

    def run(folder, example, argv, threads):
        seen.append((folder == from_opacus.SCRIPTS, argv[-3], argv[-1]))
        if argv[-3] == "ghost":
            raise RuntimeError("no")
        return a_run()

    monkeypatch.setattr(from_opacus, "run", run)
    args = argparse.Namespace(repeats=2, quick=True, threads=1)
    pairs = [("dpengine", "hooks"), ("opacus", "ghost"), ("opacus", "ew")]
    measured = from_opacus.measure("x", pairs, args, tmp_path)
    first = [(True, "hooks", "0"), (False, "ghost", "0"), (False, "ew", "0")]
    assert seen == [*first, (True, "hooks", "1"), (False, "ew", "1")]
    assert measured["broke"] == {"opacus ghost": "no"}
    assert [len(past) for past in measured["runs"].values()] == [2, 2]


@pytest.mark.slow
def test_a_run_returns_time_and_peak_memory_or_raises_the_error_of_its_script(tmp_path):
    (tmp_path / "one.py").write_text(SCRIPT, encoding="utf-8")
    found = from_opacus.run(tmp_path, "one", ["--quick"], threads=1)
    assert (found["argv"], found["accuracy"], found["library"]) == (["--quick"], 1.0, "one")
    assert found["whole"] > 0
    assert 60 < found["peak_mib"] < 90
    (tmp_path / "two.py").write_text("raise ValueError('planned failure')", encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"^ValueError: planned failure$"):
        from_opacus.run(tmp_path, "two", [], threads=1)
