"""The demonstration, run in a subprocess without a network: files, output, seeds and labels."""

import json
import os
import pty
import re
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dpengine.data import load_adult
from tutorials.demo.tasks import adult_network

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    *["metrics.jsonl", "model.safetensors", "privacy_report.html", "privacy_report.json", "privacy_report.md"],
    *["privacy_state.json", "tradeoff.png", "tradeoff.svg"],
]
ARGUMENTS = ["--quick", "--data", "adult", "--seed", "7"]

# Blocks every socket, and every third-party package except the allowed ones, before the program starts.
ALONE = """
import importlib.machinery, runpy, sys

def refuse(event, args):
    if event in {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"}:
        raise RuntimeError(f"the demonstration reached for the network: {event} {args}")

class WithoutSome:  # what is absent has no spec, which is how the import system says so
    @staticmethod
    def find_spec(name, path=None, target=None):
        hidden = name.partition(".")[0] in BLOCKED
        return None if hidden else importlib.machinery.PathFinder.find_spec(name, path, target)

BLOCKED = set(sys.argv.pop(1).split(","))
sys.addaudithook(refuse)
sys.meta_path[:] = [f for f in sys.meta_path if f is not importlib.machinery.PathFinder] + [WithoutSome]
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
OPTIONAL = "scipy,dp_accounting,matplotlib,safetensors,tqdm,opt_einsum,sklearn"

Demonstration = namedtuple("Demonstration", "code out err folder")


def environment(**changes):
    kept = {name: value for name, value in os.environ.items() if name not in ("DPENGINE_PROGRESS", "NO_COLOR")}
    return kept | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120"} | changes


def command(*arguments, blocked="", module="tutorials.demo"):
    return [sys.executable, "-c", ALONE, blocked, module, *arguments]


def piped(folder, *arguments, blocked=""):
    line = command(*arguments, "--out", str(folder), blocked=blocked)
    result = subprocess.run(line, capture_output=True, text=True, check=False, cwd=folder.parent, env=environment())
    return Demonstration(result.returncode, result.stdout, result.stderr, folder)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Returns the result of a run whose output is a pipe."""
    return piped(tmp_path_factory.mktemp("piped") / "demo", *ARGUMENTS)


@pytest.fixture(scope="module")
def on_terminal(tmp_path_factory):
    """Returns the result of a run on a terminal with color disabled."""
    folder = tmp_path_factory.mktemp("terminal") / "demo"
    ours, theirs = pty.openpty()
    line = command(*ARGUMENTS, "--out", str(folder))
    process = subprocess.Popen(line, stdout=theirs, stderr=theirs, cwd=folder.parent, env=environment(NO_COLOR="1"))
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # raised by Linux when the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    return Demonstration(process.wait(), b"".join(parts).decode(), "", folder)


def table_of(text):
    """Returns the rows of the table without their durations."""
    rows = [line.strip("│\r").split("│")[:-1] for line in text.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_exit_code_is_0_without_a_network(demo):
    assert demo.code == 0, demo.err


def test_every_file_is_there_and_named_on_the_screen(demo):
    assert sorted(path.name for path in demo.folder.iterdir()) == FILES
    assert [name for name in FILES if name not in demo.out] == []


def test_every_file_parses(demo):
    report = json.loads((demo.folder / "privacy_report.json").read_text(encoding="utf-8"))
    assert report["guarantee"]["epsilon"] <= 1
    assert report["guarantee"]["adjacency"] == "add-or-remove-one"
    assert report["data"]["sha256"] == load_adult().sha256
    assert "<svg" in (demo.folder / "privacy_report.html").read_text(encoding="utf-8")
    assert (demo.folder / "privacy_report.md").read_text(encoding="utf-8").startswith("---\n")
    assert (demo.folder / "tradeoff.png").read_bytes().startswith(b"\x89PNG")
    adult_network().load_state_dict(load_file(demo.folder / "model.safetensors"))
    rows = [json.loads(line) for line in (demo.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["run"] for row in rows} == {"private-0.5", "private-1", "private-3", "non-private"}


def test_epsilon_in_the_metrics_rises_to_the_budget_at_most(demo):
    rows = [json.loads(line) for line in (demo.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    spent = [row["epsilon"] for row in rows if row["run"] == "private-3" and "epsilon" in row]
    assert spent == sorted(spent)
    assert 2.9 < spent[-1] <= 3.0


def test_nothing_is_written_to_standard_error(demo):
    assert demo.err == ""


def test_a_pipe_gets_no_control_characters(demo):
    assert re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", demo.out) == []


def test_a_terminal_without_colour_gets_a_bar_and_no_colour(on_terminal):
    assert on_terminal.code == 0, on_terminal.out
    assert "\033[1m" not in on_terminal.out
    assert re.findall(r"\033\[[0-9;]*m", on_terminal.out) == []
    assert re.search(r"█{8} 40/40  ε 1.00/1.00 \(100 %\)  [\d:]+<00:00, +[\d.]+it/s", on_terminal.out)


def test_the_same_seed_gives_the_same_table(demo, on_terminal):
    assert len(table_of(demo.out)) == 6
    assert table_of(demo.out) == table_of(on_terminal.out)


def test_the_same_seed_gives_the_same_model(demo, on_terminal):
    one, other = (load_file(run.folder / "model.safetensors") for run in (demo, on_terminal))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_seed_is_labeled_insecure_on_the_screen_and_in_the_report(demo):
    assert "INSECURE_SEED" in demo.out
    report = json.loads((demo.folder / "privacy_report.json").read_text(encoding="utf-8"))
    assert report["run"]["seed_policy"] == "INSECURE_SEED"
    assert "INSECURE_SEED" in (demo.folder / "privacy_report.md").read_text(encoding="utf-8")


def test_a_quick_run_is_labeled_on_the_screen_in_the_report_and_in_the_plot(demo):
    assert "QUICK RUN" in demo.out
    for name in ("privacy_report.json", "privacy_report.md", "privacy_report.html", "tradeoff.svg"):
        assert "quick run" in (demo.folder / name).read_text(encoding="utf-8"), name


def test_output_states_what_is_guaranteed_and_what_is_not(demo):
    assert "(1.00, 1e-05)-DP per training row, add/remove" in demo.out
    assert "Not covered: choice of hyper-parameters" in demo.out
    assert "CC BY 4.0" in demo.out


def test_report_contains_no_local_path(demo):
    for path in demo.folder.glob("privacy_*"):
        text = path.read_text(encoding="utf-8")
        assert str(demo.folder.parent) not in text
        assert str(ROOT) not in text


def test_json_option_replaces_the_text_output(tmp_path):
    run = piped(tmp_path / "demo", *ARGUMENTS, "--json")
    (shown,) = json.loads(run.out)
    assert shown["data"] == "adult"
    assert [row["run"] for row in shown["runs"]] == ["majority", "private", "private", "private", "non-private"]
    assert shown["runs"][-1]["epsilon"] == "inf"
    assert run.err == ""


def test_the_demonstration_runs_without_optional_packages_and_names_what_it_skipped(tmp_path):
    run = piped(tmp_path / "demo", *ARGUMENTS, blocked=OPTIONAL)
    assert run.code == 0, run.err
    assert "skipped: [DPE020] matplotlib is needed" in run.out
    assert "skipped: [DPE020] safetensors is needed" in run.out
    report = json.loads((run.folder / "privacy_report.json").read_text(encoding="utf-8"))
    assert report["accounting"]["accountant"] == "pld"


def test_the_doctor_runs_on_a_bare_machine():
    line = command("doctor", blocked=OPTIONAL, module="dpengine")
    result = subprocess.run(line, capture_output=True, text=True, check=False, env=environment())
    assert result.returncode == 0, result.stderr
    assert "pld" in result.stdout
