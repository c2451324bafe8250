"""Every command has help with an example. Exit codes: 0 for success, 1 for failure, 2 for a usage error."""

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import dpengine
from dpengine.cli import commands
from dpengine.cli.main import main
from dpengine.cli.main import main as main_module

ROOT = Path(__file__).resolve().parents[2]
NAMES = [command.name for command in commands.COMMANDS]


def exit_code(capsys, *argv):
    """Returns the exit code and the output of a command."""
    try:
        code = main(list(argv))
    except SystemExit as left:
        code = left.code
    return code, *capsys.readouterr()


@pytest.mark.parametrize("command", commands.COMMANDS, ids=lambda command: command.name)
def test_the_help_of_a_command_has_an_example_that_its_parser_accepts(capsys, command):
    code, out, err = exit_code(capsys, command.name, "--help")
    assert (code, err) == (0, "")
    (example,) = re.findall(r"^  dpengine (.+)$", out, flags=re.MULTILINE)
    parsed = main_module.__globals__["_parser"]().parse_args(shlex.split(example))
    assert parsed.command == command.name


@pytest.mark.parametrize(
    "command, action", [("ledger", "show"), ("ledger", "total"), ("audit", "one-run"), ("audit", "quick")]
)
def test_actions_have_an_example_too(capsys, command, action):
    code, out, _ = exit_code(capsys, command, action, "--help")
    assert code == 0
    assert f"  dpengine {command} {action}" in out


def test_the_help_lists_every_command(capsys):
    code, out, _ = exit_code(capsys, "--help")
    assert code == 0
    assert [name for name in NAMES if not re.search(rf"^  {name} ", out, flags=re.MULTILINE)] == []


def test_the_documented_commands_are_there():
    assert NAMES == ["calibrate", "epsilon", "report", "check", "ledger", "audit", "doctor"]


def test_the_version_is_that_of_the_package(capsys):
    assert exit_code(capsys, "--version")[:2] == (0, f"dpengine {dpengine.__version__}\n")


EPSILON = ["epsilon", "--sigma", "1", "--n", "1000", "--batch", "10", "--steps", "5"]
WRONG = {
    "no-command": [],
    "unknown-command": ["train"],
    "unknown-option": ["doctor", "--jsn"],
    "missing-option": ["calibrate", "--epsilon", "3"],
    "not-a-number": ["epsilon", "--sigma", "much", "--n", "10", "--batch", "2", "--epochs", "1"],
    "epochs-and-steps": ["epsilon", "--sigma", "1", "--n", "10", "--batch", "2", "--epochs", "1", "--steps", "3"],
    "delta-too-large": ["epsilon", "--sigma", "1", "--n", "10", "--batch", "2", "--epochs", "1", "--delta", "0.2"],
    "no-rows": ["epsilon", "--sigma", "1", "--n", "0", "--batch", "2", "--epochs", "1"],
    "negative-epsilon": ["calibrate", "--epsilon", "-1", "--n", "100", "--batch", "2", "--epochs", "1"],
    "not-a-factory": ["check", "torch"],
    "no-such-module": ["check", "no_such_module:model"],
    "no-such-name": ["check", "torch:no_such_name"],
    "not-a-model": ["check", "collections:OrderedDict"],
    "a-class-that-needs-arguments": ["check", "torch.nn:Linear"],
    "nothing-before-the-colon": ["check", ":make"],
    "a-relative-module": ["check", ".models:make"],
    "no-run": ["report", "no_such_folder"],
    "a-folder-without-report": ["report", str(ROOT / "docs")],
    "a-file-that-is-no-report": ["report", str(ROOT / "setup.py")],
    "a-picture": ["report", str(ROOT / "docs" / "report.png")],
    "report-into-a-file": ["report", str(ROOT), "--out", str(ROOT / "setup.py")],
    "gdp-with-sampling": [*EPSILON, "--accountant", "gdp"],
    "calibrate-gdp-with-sampling": ["calibrate", "--epsilon", "1", *EPSILON[3:], "--accountant", "gdp"],
    "rdp-with-replacement": [*EPSILON, "--accountant", "rdp", "--relation", "replace-one"],
    "monte-carlo": [*EPSILON, "--accountant", "monte_carlo"],
    "calibrate-monte-carlo": ["calibrate", "--epsilon", "1", *EPSILON[3:], "--accountant", "monte_carlo"],
    "more-epochs-than-can-be-counted": [*EPSILON[:-2], "--epochs", str(2**61)],
    "add-remove-without-constants": [*EPSILON, "--relation", "add-remove"],
    "unknown-relation": [*EPSILON, "--relation", "swap"],
    **{
        " ".join(change): [*EPSILON, *change]
        for change in (
            *[("--sigma", value) for value in ("-1", "nan", "inf", "")],
            *[("--n", value) for value in ("0", "-5", "1.5", "nan")],
            *[("--batch", value) for value in ("0", "-3", "1001", "2.5")],
            *[("--steps", value) for value in ("0", "-1", "1e-3", "1e99", str(2**62 + 1))],
            *[("--delta", value) for value in ("0", "1", "-1", "nan", "inf", "0.002")],
            *[("--sample-rate", value) for value in ("0", "-1", "1.5", "nan")],
        )
    },
    **{f"epsilon-{value}": ["calibrate", "--epsilon", value, *EPSILON[3:]] for value in ("0", "nan", "inf")},
    "no-epochs": ["epsilon", "--sigma", "1", "--n", "10", "--batch", "2", "--epochs", "0"],
}


@pytest.mark.parametrize("argv", WRONG.values(), ids=WRONG)
def test_a_usage_error_exits_with_2_and_a_message_without_a_traceback(capsys, argv):
    code, out, err = exit_code(capsys, *argv)
    assert (code, out) == (2, "")
    assert "dpengine" in err
    assert "Traceback" not in err
    assert len(err.split("dpengine", 1)[1].splitlines()[-1]) < 500


@pytest.mark.parametrize(
    ("option", "value"), [("--sigma", "-1"), ("--batch", "0"), ("--steps", "-2"), ("--delta", "0")], ids=str
)
def test_a_number_out_of_range_names_its_option(capsys, option, value):
    code, _, err = exit_code(capsys, *EPSILON, option, value)
    assert code == 2
    assert f"{option}: '{value}' is not" in err


FAILING = {
    "out-of-reach": [*"calibrate --epsilon 1e-4 --n 100 --batch 50 --epochs 90 --delta 1e-9 --accountant rdp".split()]
}


@pytest.mark.parametrize("argv", FAILING.values(), ids=FAILING)
def test_failures_exit_with_1_and_a_message(capsys, argv):
    code, out, err = exit_code(capsys, *argv)
    assert (code, out) == (1, "")
    assert err.startswith("dpengine: ")
    assert "Traceback" not in err


@pytest.mark.parametrize("option", ["--steps", "--n", "--batch"])
@pytest.mark.parametrize("digits", [31, 400, 5000])
def test_a_number_of_many_digits_is_rejected_in_one_line(capsys, option, digits):
    code, out, err = exit_code(capsys, *EPSILON, option, "9" * digits)
    assert (code, out) == (2, "")
    last = err.strip().splitlines()[-1]
    assert option in last and "2**62" in last and len(last) < 200


@pytest.mark.parametrize(
    "change", [("--accountant", "gdp"), ("--accountant", "rdp", "--relation", "replace-one")], ids=str
)
def test_an_error_names_the_option_and_not_the_python_argument(capsys, change):
    _, _, err = exit_code(capsys, *EPSILON, *change)
    assert "Use --accountant pld." in err and "accountant=" not in err


@pytest.mark.parametrize("rate", ["0.01", "1"])
@pytest.mark.parametrize("epsilon", ["1e10", "1e300", "1.7e308"])
def test_a_very_large_target_gets_the_least_noise(capsys, epsilon, rate):
    size = ["--n", "1000", "--batch", "10", "--sample-rate", rate, "--delta", "1e-5", "--steps", "5"]
    code, out, _ = exit_code(capsys, "calibrate", "--epsilon", epsilon, *size, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["epsilon"] <= float(epsilon)
    assert 0 < found["noise_multiplier"] <= 0.0101


@pytest.mark.parametrize("command", ["epsilon", "calibrate"])
def test_only_applicable_accountants_are_suggested(capsys, command):
    _, out, _ = exit_code(capsys, command, "--help")
    assert "dp_accounting_rdp" in out and "monte_carlo" not in out


def test_python_m_runs_the_same_program():
    command = [sys.executable, "-m", "dpengine", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout == f"dpengine {dpengine.__version__}\n"


def test_help_does_not_import_torch():
    script = (
        "import sys; from dpengine.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, cwd=ROOT)


@pytest.mark.slow
def test_a_closed_output_pipe_is_not_an_error():
    line = f"{shlex.quote(sys.executable)} -m dpengine doctor | true"
    result = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.stderr == ""


def test_a_terminal_without_the_letter_epsilon_gets_a_question_mark(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main("epsilon --sigma 1 --n 1000 --batch 10 --steps 5".split()) == 0
    terminal.flush()
    assert b"(? = " in terminal.buffer.getvalue()
