"""No guard of the training step can be removed without a test that fails.

The default suite checks that the table is up to date. `make mutations` removes the guards one at a time, each in a copy
of the package, and runs the test that the table names.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import dpengine
from mutations.guards import GUARDS
from mutations.named_tests import TESTS, missing_tests

PACKAGE = Path(dpengine.__file__).resolve().parent
TIMEOUT = 300
A_BROKEN_MUTATION = {"ImportError", "ModuleNotFoundError", "SyntaxError", "NameError", "UnboundLocalError"}

# Runs tests in this process, and prints the phase and the exception type of each failure.
RUNNER = """
import json, sys
import pytest
import dpengine

copy, *arguments = sys.argv[1:]
assert dpengine.__file__.startswith(copy), dpengine.__file__

class FailureRecorder:
    failures = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.failed:
            self.failures.append((report.when, call.excinfo.type.__name__))
        return report

recorder = FailureRecorder()
code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "", *arguments], plugins=[recorder])
print("\\nRESULT " + json.dumps({"code": int(code), "failures": recorder.failures}))
"""


def texts():
    return {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def place_of(old, sources):
    """Returns the only file that contains a text."""
    found = Counter({path: text.count(old) for path, text in sources.items() if old in text})
    assert found.total() == 1, f"{old!r} occurs {found.total()} times, expected once: {list(map(str, found))}"
    return next(iter(found))


def run(copy, tests):
    """Runs tests against a copy of the package. Returns the exit status of pytest with the failures, and the output."""
    hidden = {"PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    # Bytecode of a mutated file must not outlive the mutation.
    environment |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    settings = ["-c", str(TESTS.parent / "pyproject.toml"), "--rootdir", str(TESTS.parent), "-o", "addopts="]
    arguments = [*settings, "--import-mode=importlib", "--strict-markers", *(str(TESTS / test) for test in tests)]
    command = [sys.executable, "-c", RUNNER, str(copy), *arguments]
    done = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert "\nRESULT " in done.stdout, f"pytest did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    output, _, result = done.stdout.rpartition("\nRESULT ")
    return json.loads(result), output


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(PACKAGE, folder / PACKAGE.name)
    return folder


def test_every_guard_is_in_the_package_exactly_once():
    sources = texts()
    assert len({guard.what for guard in GUARDS}) == len(GUARDS)
    for guard in GUARDS:
        for old, new in guard.pairs:
            assert old != new
            compile(sources[place_of(old, sources)].replace(old, new), guard.what, "exec")


def test_every_named_test_exists():
    assert missing_tests(guard.test for guard in GUARDS) == []


@pytest.mark.slow
def test_pytest_finds_every_named_test_with_its_parameters():
    """Takes 10 seconds, because many files are imported."""
    ids = [f"{TESTS}/{test}" for test in dict.fromkeys(guard.test for guard in GUARDS)]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "", "-p", "no:cacheprovider", *ids]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_missing_tests_reports_missing_files_and_functions():
    here = "mutations/test_guards.py::"
    wrong = ["mutations/test_gone.py::test_a", f"{here}test_gone[1]", f"{here}run", here]
    right = [f"{here}test_every_named_test_exists", f"{here}test_the_named_test_fails_without_the_guard[what]"]
    assert missing_tests([*wrong, *right]) == wrong


@pytest.mark.nightly
def test_the_named_tests_pass_with_all_guards(copy):
    result, output = run(copy, dict.fromkeys(guard.test for guard in GUARDS))
    assert result == {"code": 0, "failures": []}, output[-4000:]


@pytest.mark.nightly
@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.what)
def test_the_named_test_fails_without_the_guard(guard, copy):
    sources, changed = texts(), {}
    for old, new in guard.pairs:
        path = place_of(old, sources)
        changed[path] = changed.get(path, sources[path]).replace(old, new)
    try:
        for path, text in changed.items():
            (copy / PACKAGE.name / path.relative_to(PACKAGE)).write_text(text, encoding="utf-8")
        result, output = run(copy, [guard.test])
    finally:
        for path in changed:
            shutil.copy2(path, copy / PACKAGE.name / path.relative_to(PACKAGE))
    assert result["code"] == 1, f"{guard.test} passes without {guard.what}:\n{output[-2000:]}"
    assert {when for when, _ in result["failures"]} == {"call"}, output[-4000:]
    assert not {kind for _, kind in result["failures"]} & A_BROKEN_MUTATION, output[-4000:]
