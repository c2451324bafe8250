"""Modules that an import loads; contents and requirements of a built wheel. No network."""

import ast
import email
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

import pytest

import dpengine

ROOT = Path(__file__).resolve().parents[2]

# Runs in a process of its own: imports the package while every foreign module but torch's own needs is refused
IMPORT_ALONE = """
import sys
import numpy, torch

sys.path.insert(0, {root!r})
before = set(sys.modules)

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in {allowed!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Refuse())
import dpengine
{then}
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*sorted(new - set(sys.stdlib_module_names)))
"""
REQUIRED = {"torch", "numpy", "scipy", "opt-einsum", "dp-accounting", "safetensors", "tqdm", "jinja2"}
HEAVY = {"scipy", "dp_accounting", "jinja2", "matplotlib", "transformers"}


def needs_of(package: str) -> set[str]:
    """The packages that this one requires, and those that they require, as import names where these differ."""
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
    script = IMPORT_ALONE.format(root=str(ROOT), allowed=allowed | {"dpengine"}, then=then)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd="/")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return set(result.stdout.split())


def test_importing_needs_nothing_but_torch_and_numpy():
    assert modules_loaded(allowed={"torch", "numpy"}) == {"dpengine"}


def test_importing_a_package_loads_neither_torch_nor_scipy():
    """Each ``__init__`` alone, and every name of accounting, whose functions load scipy when they are called."""
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
    # Names are lazy, so each is touched. Torch may then load what it requires itself.
    allowed = needs_of("torch") | {"torch", "numpy", "torchgen", "functorch", "mpmath"}
    loaded = modules_loaded(allowed=allowed - HEAVY, then="[getattr(dpengine, name) for name in dpengine.__all__]")
    assert not loaded & HEAVY
    assert {name for name in loaded if "cython" not in name} <= {"dpengine"} | allowed  # parts of NumPy


@pytest.mark.slow
def test_importing_leaves_the_root_logger_and_the_warnings_alone():
    then = (
        "import logging, warnings\nassert not logging.root.handlers\nassert logging.root.level == logging.WARNING\n"
        "assert all('dpengine' not in str(f) for f in warnings.filters)"
    )
    assert modules_loaded(allowed={"torch", "numpy"}, then=then) == {"dpengine"}


def setup_arguments() -> dict[str, object]:
    """The literal arguments of ``setup()``, read without running it."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (call,) = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "setup")
    literal = {}
    for keyword in call.keywords:
        try:
            literal[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            continue
    return literal


def test_an_installed_torch_is_left_alone():
    # A lower bound is the only condition on torch, so any newer one that is there satisfies it
    (torch_line,) = [line for line in setup_arguments()["install_requires"] if line.startswith("torch")]
    assert torch_line == "torch>=2.6"


def test_building_never_asks_for_torch():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (line,) = re.findall(r"^requires = (\[.*?\])", text, flags=re.MULTILINE)
    assert ast.literal_eval(line) == ["setuptools>=77"]
    assert "import torch" not in (ROOT / "setup.py").read_text(encoding="utf-8")


def test_the_version_is_the_same_in_both_places():
    assert setup_arguments()["version"] == dpengine.__version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the tree, without network."""
    spec = find_spec("setuptools")
    if spec is None:
        pytest.skip("setuptools is not installed")
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT / "dpengine", folder / "tree" / "dpengine", ignore=shutil.ignore_patterns("__pycache__"))
    for file in ["setup.py", "pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(ROOT / file, folder / "tree" / file)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    result = subprocess.run(
        [*command, "-w", str(folder), str(folder / "tree")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    (path,) = folder.glob("dpengine-*.whl")
    return zipfile.ZipFile(path)


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
