"""Modules that an import loads; contents and requirements of a built wheel. Uses no network."""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

import pytest

import dpengine

ROOT = Path(__file__).resolve().parents[2]

# Runs in a subprocess: imports the package and blocks all other modules except those that torch requires
ISOLATED_IMPORT = """
import sys
import numpy, torch

sys.path.insert(0, {root!r})
before = set(sys.modules)

class BlockedImports:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in {allowed!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, BlockedImports())
import dpengine
{then}
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*sorted(new - set(sys.stdlib_module_names)))
"""
REQUIRED = {"torch", "numpy", "scipy", "opt-einsum", "dp-accounting", "safetensors", "tqdm", "jinja2"}
HEAVY = {"scipy", "dp_accounting", "jinja2", "matplotlib", "transformers"}


def requirements_of(package: str) -> set[str]:
    """Returns the direct and transitive requirements of this package, as import names where these differ."""
    found, left = set(), [package]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            try:
                lines = [line for line in requires(name) or [] if "extra ==" not in line]
            except PackageNotFoundError:
                lines = []
            left += [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines]
    return {name.replace("-", "_").lower() for name in found}


def modules_loaded(*, allowed: set[str], then: str = "") -> set[str]:
    script = ISOLATED_IMPORT.format(root=str(ROOT), allowed=allowed | {"dpengine"}, then=then)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd="/")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return set(result.stdout.split())


@pytest.mark.slow
def test_importing_requires_only_torch_and_numpy():
    assert modules_loaded(allowed={"torch", "numpy"}) == {"dpengine"}


def test_importing_a_package_loads_neither_torch_nor_scipy():
    """Imports each ``__init__`` separately, and every name of accounting, whose functions load scipy when called."""
    packages = [path.parent.relative_to(ROOT) for path in sorted((ROOT / "dpengine").rglob("__init__.py"))]
    names = [".".join(path.parts) for path in packages if "opacus" not in path.parts]  # which mirrors eager packages
    script = (
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        "    if name == 'dpengine.accounting':\n"
        "        [getattr(sys.modules[name], one) for one in sys.modules[name].__all__]\n"
        "    print(*(f'{name} loads {one}' for one in ('torch', 'scipy', 'dp_accounting') if one in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not done.stdout.split(), done.stdout


@pytest.mark.slow
def test_every_public_name_loads_without_the_optional_packages():
    # Names load lazily, so each is accessed. Torch may then load its own requirements.
    allowed = requirements_of("torch") | {"torch", "numpy", "torchgen", "functorch", "mpmath"}
    loaded = modules_loaded(allowed=allowed - HEAVY, then="[getattr(dpengine, name) for name in dpengine.__all__]")
    assert not loaded & HEAVY
    assert {name for name in loaded if "cython" not in name} <= {"dpengine"} | allowed  # parts of NumPy


@pytest.mark.slow
def test_importing_does_not_change_the_root_logger_or_the_warnings():
    then = (
        "import logging, warnings\nassert not logging.root.handlers\nassert logging.root.level == logging.WARNING\n"
        "assert all('dpengine' not in str(f) for f in warnings.filters)"
    )
    assert modules_loaded(allowed={"torch", "numpy"}, then=then) == {"dpengine"}


METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_an_installed_torch_is_not_replaced():
    # A lower bound is the only condition on torch, so any newer version that is installed satisfies it
    (torch_line,) = [line for line in METADATA["project"]["dependencies"] if line.startswith("torch")]
    assert torch_line == "torch>=2.6"


def test_building_never_asks_for_torch():
    assert METADATA["build-system"]["requires"] == ["setuptools>=77"]
    assert "import torch" not in (ROOT / "setup.py").read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    (cited,) = re.findall(r"^version: (.+)$", citation, flags=re.MULTILINE)
    assert METADATA["project"]["version"] == dpengine.__version__ == cited


def test_the_demo_installs_no_test_tool(tmp_path):
    command = ["make", "--no-print-directory", "--dry-run", "demo", f"VENV={tmp_path}"]
    plan = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert plan.splitlines()[0].startswith("echo")  # shows progress at once
    assert re.findall(r"-e '\.\[(.*)\]'", plan) == ["plots"]


def run_command(*command: object, cwd: Path) -> str:
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(part) for part in command]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=settings)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """A source distribution built from a copy of the tree, and a wheel built from it, without network."""
    if find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    folder = tmp_path_factory.mktemp("build")
    others = shutil.ignore_patterns(".*", "__pycache__", "runs", "build", "dist", "*.so", "*.egg-info")
    shutil.copytree(ROOT, folder / "tree", ignore=others)
    script = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    run_command(sys.executable, "-c", script, cwd=folder / "tree")
    (source,) = folder.glob("dpengine-*.tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    run_command(*command, "-w", folder, source, cwd=folder)
    (wheel,) = folder.glob("dpengine-*.whl")
    return source, wheel


@pytest.fixture(scope="module")
def wheel(distributions):
    return zipfile.ZipFile(distributions[1])


@pytest.mark.slow
def test_a_source_distribution_holds_what_its_tests_need(distributions):
    with tarfile.open(distributions[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for file in ["Makefile", "docs/quickstart.md", "tests/conftest.py", "tutorials/demo/run.py", "CITATION.cff"]:
        assert file in names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


@pytest.mark.slow
def test_a_wheel_installs_in_an_empty_environment_and_its_command_runs(distributions, tmp_path):
    run_command(sys.executable, "-m", "venv", tmp_path / "empty", cwd=tmp_path)
    python = tmp_path / "empty" / "bin" / "python"
    run_command(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", distributions[1], cwd=tmp_path)
    where = Path(run_command(python, "-c", "import dpengine; print(dpengine.__file__)", cwd=tmp_path).strip())
    assert where.is_relative_to(tmp_path / "empty")
    (where.parents[1] / "others.pth").write_text(sysconfig.get_path("purelib"))  # what dpengine requires
    command = "epsilon --sigma 1.1 --n 1e4 --batch 100 --steps 100 --delta 1e-5"
    text = run_command(tmp_path / "empty" / "bin" / "dpengine", *command.split(), cwd=tmp_path)
    assert re.match(r"ε = \d\.\d+ \(δ = 1e-05, 100 steps", text)


@pytest.mark.slow
def test_a_built_wheel_holds_the_data_and_the_type_marker(wheel):
    names = set(wheel.namelist())
    for file in ["py.typed", "data/adult/adult.data.xz", "data/adult/adult.test.xz", "data/adult/SOURCE.md"]:
        assert f"dpengine/{file}" in names


@pytest.mark.slow
def test_a_built_wheel_holds_every_module_and_no_test(wheel):
    names = {name for name in wheel.namelist() if name.endswith(".py")}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "dpengine").rglob("*.py")}
    assert {name for name in names if name.startswith("dpengine/")} == modules
    assert not [name for name in names if not name.startswith("dpengine/")]


@pytest.mark.slow
def test_the_data_can_be_read_from_a_built_wheel(wheel, tmp_path):
    wheel.extractall(tmp_path)
    script = (
        "from dpengine.data import load_adult; d = load_adult(); print(d.__class__.__module__, len(d.train_labels))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.stdout.split() == ["dpengine.data.adult", "32561"], result.stderr


@pytest.mark.slow
def test_the_metadata_names_both_licences_and_the_requirements(wheel):
    (file,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(wheel.read(file))
    assert metadata["License-Expression"] == "Apache-2.0 AND CC-BY-4.0"
    assert set(metadata.get_all("License-File")) == {"LICENSE", "dpengine/data/adult/SOURCE.md"}
    assert metadata["Requires-Python"] == ">=3.11"
    lines = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    needed = {re.split(r"[^\w-]", line, maxsplit=1)[0] for line in lines}
    assert needed == REQUIRED
    assert "torch>=2.6" in metadata.get_all("Requires-Dist")
    (file,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "dpengine = dpengine.cli.main:main" in wheel.read(file).decode()
