"""Tests reach internals of the training step through `inside` and `inside_parts` alone.

``python tests/test_inside.py [FOLDER]`` prints what else reaches them.

The rule: a definition (a test, a fixture, a helper, or a class or constant at the top of a test module) reaches
internals of the step if

* it names an attribute in ``STEP_ATTRIBUTES``, or the ``runs`` of an engine;
* it names, on anything but ``self`` or ``cls``, an attribute ``_x`` that dpengine defines. Exempt are names that torch
  or Python define too (``PUBLIC``), names that a part in ``EXEMPT_PARTS`` defines (numbers and files, which all tests
  may use), and names that package ``p`` defines, in the folder of the tests of ``p`` (``tests/p``);
* it uses a name imported from a module in ``STEP_MODULES``, or such a module, or a name in ``STEP_NAMES``
  (``batch_state`` is not among them: it is plain Python and is tested alone);
* it contains a string that does so: a script for another process, or a dotted path for ``monkeypatch``;
* it uses a definition that reaches them: by name, as a fixture, or as a method of a class of the tests.
"""

import ast
import functools
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from source_trees import tree_of

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "dpengine"

STEP_ATTRIBUTES = {"passes", "_step", "_dpengine", "_pending_passes", "_engine_ledger", "_built_step"}
STEP_MODULES = {
    "add_clipped",
    "amp_and_lr_schedulers",
    "argument_checks",
    "budget",
    "build_plan",
    "compiled_forward",
    "grad_writer",
    "optimizer",
    "pass_clipper",
    "per_sample",
    "rank_consistency",
    "run",
    "run_plan",
    "run_report",
    "shared_dataset_check",
    "step",
    "step_checks",
    "step_of",
    "pending_passes",
}
STEP_NAMES = {
    "PassClipper",
    "PrivateStep",
    "PendingPasses",
    "watch_model",
    "BookKeeping",
    "Reweight",
    "KeepAll",
    "live_probe",
    "probe",
    "modes",
}
ALLOWED_NAMES = {
    "MODES",
    "Sketches",
    "norm_of_sketch",
}  # MODES is public; the sketches are numerical code with tests of their own
EXEMPT_PARTS = {"accounting", "noise", "kernels", "data", "cli", "report", "plan", "ledger_file", "batch_selection"}
NOT_EXEMPT_IN_OWN_TESTS = {"compiled", "clipping"}  # packages whose own tests go through `inside_parts`, too
SKIPPED_FILES = {"inside.py", "inside_parts.py", "test_inside.py", "test_layering.py", "mutations"}  # not read
PUBLIC = {
    "_module",
    "_replace",
    "_parameters",
    "_modules",
    "_buffers",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
}
IN_STRINGS = re.compile(
    r"\.runs\[|\.passes\.|\b(?:_dpengine|_engine_ledger)\b|import (?:PassClipper|PrivateStep|PendingPasses)"
    rf"|\bdpengine\.(?:\w+\.)*(?:{'|'.join(sorted(STEP_MODULES))})\b"
)


@dataclass
class Definition:
    """A function, class or constant at the top of a module, and what it touches."""

    file: Path
    name: str
    line: int
    reasons: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)  # names and parameters
    methods: set[str] = field(default_factory=set)  # attributes that are read
    is_test: bool = False


@dataclass
class Module:
    """A module of the tests: its definitions, and what its imports bind."""

    file: Path
    definitions: list[Definition] = field(default_factory=list)
    bound: dict[str, tuple[str, str]] = field(default_factory=dict)  # local name: module, name
    of_step: set[str] = field(default_factory=set)


@functools.cache
def private_names(package: Path) -> dict[str, set[str]]:
    """The attributes ``_x`` that the package defines, each with the parts (folders or modules) that define it."""
    found: dict[str, set[str]] = {}
    for file in package.rglob("*.py"):
        part = file.relative_to(package).with_suffix("").parts[0]
        for node in ast.walk(tree_of(file.read_text())):
            names = set()
            if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
                names = {node.attr} if isinstance(node, ast.Attribute) else {node.id}
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names = {node.name}
            for name in names:
                if name.startswith("_") and not name.startswith("__") and name not in PUBLIC:
                    found.setdefault(name, set()).add(part)
    return {name: parts for name, parts in found.items() if not parts & EXEMPT_PARTS}


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def read_module(file: Path, private: Collection[str]) -> Module:
    """Returns the definitions and imports of a module."""
    module, tree = Module(file), tree_of(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                local = alias.asname or alias.name
                module.bound[local] = (node.module, alias.name)
                if _is_of_step(node.module, alias.name):
                    module.of_step.add(local)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.split(".")[0]
                module.bound[local] = (alias.name, "")
                if alias.asname and _is_of_step(alias.name, ""):
                    module.of_step.add(local)
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        module.definitions += _definitions(file, node, private, module.of_step)
    return module


def _is_of_step(module: str, name: str) -> bool:
    parts = module.split(".")
    if parts[0] != "dpengine" or (parts[1:2] == ["compat"] and not {"step_of", "pending_passes"} & {*parts, name}):
        return False
    if name in ALLOWED_NAMES:
        return False
    if len(parts) > 1 and (parts[-1] in STEP_MODULES or parts[-1] in STEP_NAMES):
        return True
    folder = PACKAGE.joinpath(*parts[1:])
    return name in STEP_NAMES or (name in STEP_MODULES and (folder / f"{name}.py").exists())


def _definitions(file: Path, node: ast.stmt, private: Collection[str], of_step: set[str]) -> Iterator[Definition]:
    if isinstance(node, ast.ClassDef):
        body = [one for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
        whole = _read(file, node.name, node, private, of_step, skip=body)
        for one in body:
            method = _read(file, f"{node.name}.{one.name}", one, private, of_step)
            if one.name.startswith("test"):
                method.is_test = True
                yield method
            elif one.name in {"__init__", "__post_init__"} or one.name.startswith("__"):
                whole.reasons += method.reasons
                whole.used |= method.used
                whole.methods |= method.methods
            else:
                yield method
        yield whole
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        found = _read(file, node.name, node, private, of_step)
        found.is_test = node.name.startswith("test")
        yield found
    else:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [one.id for target in targets if target for one in ast.walk(target) if isinstance(one, ast.Name)]
        yield _read(file, names[0] if names else "(module)", node, private, of_step)


def _read(
    file: Path, name: str, top: ast.stmt, private: Collection[str], of_step: set[str], skip: Collection[ast.stmt] = ()
) -> Definition:
    found = Definition(file, name, getattr(top, "lineno", 0))
    waiting: list[ast.AST] = [top]
    while waiting:
        node = waiting.pop()
        if node in skip:
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Name):
            found.used.add(node.id)
            if node.id in of_step:
                found.reasons.append(f"{node.id} (import)")
        elif isinstance(node, ast.arg):
            found.used.add(node.arg)
        elif isinstance(node, ast.Attribute):
            found.methods.add(node.attr)
            if _is_internal_attribute(node, private):
                found.reasons.append(f".{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if IN_STRINGS.search(node.value) and not _is_docstring(top, node):
                found.reasons.append("a string")
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.asname or alias.name for alias in node.names}
            found.reasons += [f"{one} (import)" for one in names & of_step]
    return found


def _is_internal_attribute(node: ast.Attribute, private: Collection[str]) -> bool:
    if node.attr == "runs":  # not those of a ledger file
        owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        return owner in {"engine", "plain"}
    return (node.attr in STEP_ATTRIBUTES or node.attr in private) and not _is_self(node.value)


def _is_docstring(top: ast.stmt, node: ast.Constant) -> bool:
    body = getattr(top, "body", None)
    return isinstance(body, list) and bool(body) and getattr(body[0], "value", None) is node


def touching(tests: Path, package: Path = PACKAGE) -> list[Definition]:
    """Every definition of the tests in a folder that touches internals of the step, on its own or through another."""
    private = private_names(package)
    files = [file for file in sorted(tests.rglob("*.py")) if not set(file.relative_to(tests).parts) & SKIPPED_FILES]
    modules = {}
    for file in files:
        folder = file.relative_to(tests).parts[0]
        its_own = (
            set() if folder in NOT_EXEMPT_IN_OWN_TESTS else {name for name, parts in private.items() if folder in parts}
        )
        modules[file] = read_module(file, private.keys() - its_own)
    by_path = {".".join(file.relative_to(tests).with_suffix("").parts): one for file, one in modules.items()}
    while True:
        before = sum(len(d.reasons) for m in modules.values() for d in m.definitions)
        for module in modules.values():
            _follow(module, by_path, modules, tests)
        if before == sum(len(d.reasons) for m in modules.values() for d in m.definitions):
            break
    return [d for m in modules.values() for d in m.definitions if d.reasons]


def _follow(module: Module, by_path: dict[str, Module], modules: dict[Path, Module], tests: Path) -> None:
    names = {d.name: d.name for d in module.definitions if d.reasons and "." not in d.name and not d.is_test}
    methods = {d.name.split(".")[1] for d in module.definitions if d.reasons and "." in d.name and not d.is_test}
    for local, (path, name) in module.bound.items():
        other = by_path.get(path) or by_path.get(f"{path}.{name}")
        if other is None:
            continue
        for d in other.definitions:
            if d.reasons and not d.is_test:
                if d.name == name:
                    names[local] = d.name
                elif "." in d.name:
                    methods.add(d.name.split(".")[1])
    folder = module.file.parent
    while True:
        if other := modules.get(folder / "conftest.py"):
            names |= {d.name: d.name for d in other.definitions if d.reasons and "." not in d.name}
        if folder == tests or folder == folder.parent:
            break
        folder = folder.parent
    for d in module.definitions:
        if not d.reasons:
            d.reasons += [f"{name} (of the tests)" for name in sorted((d.used & names.keys()) - {d.name})]
            d.reasons += [f".{name} (of the tests)" for name in sorted(d.methods & methods - {d.name.split(".")[-1]})]


def test_only_inside_touches_the_internals_of_the_step():
    """A refactoring of the step should change only ``inside`` and ``inside_parts``."""
    found = touching(TESTS)
    assert not found, "\n".join(f"{one.file.name}:{one.line} {one.name}: {one.reasons[0]}" for one in found)


PLANTED = {
    "helpers.py": "class Loop:\n    def std(self):\n        return self.engine.runs[0].release.plan.noise_std\n",
    "conftest.py": "import pytest\n@pytest.fixture\ndef flats(engine):\n    return engine.passes.buffer\n",
    "test_planted.py": """
from helpers import Loop
from dpengine.plan.run_plan import RunPlan
from dpengine.clipping import Flat, PassClipper
SCRIPT = "step = engine.runs[0].step"
def test_attribute(optimizer): assert optimizer.__dict__["_dpengine"]
def test_private(clipper): assert clipper._clipper
def test_import(): RunPlan()
def test_name(): PassClipper(Flat(1.0))
def test_script(): run(SCRIPT)
def test_path(monkeypatch): monkeypatch.setattr("dpengine.engine.argument_checks.calibration", None)
def test_fixture(flats): assert flats
def test_method(): assert Loop().std()
def test_allowed(engine, model): assert engine.ledger.steps and model._forward_hooks and Flat(1.0)
""",
}


def test_what_is_planted_is_found(tmp_path):
    """Each form of access that the rule names is found, and nothing else is."""
    for name, text in PLANTED.items():
        (tmp_path / name).write_text(text)
    found = {one.name for one in touching(tmp_path) if one.is_test}
    kinds = ("attribute", "private", "import", "name", "script", "path", "fixture", "method")
    assert found == {f"test_{kind}" for kind in kinds}


def main() -> None:
    """Prints what reaches internals of the step in a folder of tests, and how many tests do."""
    tests = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else TESTS
    found = touching(tests)
    for one in found:
        print(f"{one.file.relative_to(tests)}:{one.line} {one.name}: {', '.join(dict.fromkeys(one.reasons))}")
    number = sum(one.is_test for one in found)
    print(f"{number} tests and {len(found) - number} other definitions in {len({one.file for one in found})} files")


if __name__ == "__main__":
    main()
