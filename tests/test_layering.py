"""Imports point up the table below. Also: no cycles, imports by module, lazy ``__init__`` files, and limits on
the size of files and functions and on the length of a chain of imports.
"""

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from source_trees import tree_of

PACKAGE = Path(__file__).resolve().parents[1] / "dpengine"

# A part is a file or a folder directly under the package. It may import itself and the parts above it, no others.
# Files import modules, never the names that the ``__init__`` of a part exports: those are for users. "__init__" is that
# of the whole: parts above it must not import it, but for `lazy_exports`, which each ``__init__`` calls.
ORDER = (
    "errors",
    "losses",
    "accounting",
    "kernels",
    "distributed",
    "ledger_file",
    "layers",
    "data",
    "sampling",
    "batch_selection",
    "capture",
    "grad_samplers",
    "grad_modes",
    "independence",
    "validation",
    "clipping",
    "noise",
    "functional",
    "plan",
    "report",
    "compiled",
    "engine",
    "checkpoint",
    "auditing",
    "__init__",
    "integrations",
    "compat",
    "cli",
    "__main__",
)
NEVER_IMPORTS = {"accounting": {"torch"}}  # numbers that must not depend on a device
MAX_LINES_OF_FILE = 400
MAX_LINES_OF_FUNCTION = 60
MAX_CHAIN = 20  # modules that import each other in a row, from the engine
MAX_PARAMETERS = 12
MORE_PARAMETERS = {
    "compat.opacus.privacy_engine.PrivacyEngine.make_private": "the signature of Opacus",
    "compat.opacus.privacy_engine.PrivacyEngine.make_private_with_epsilon": "the signature of Opacus",
    "engine.privacy_engine.PrivacyEngine.make_private": "its arguments are grouped in its docstring",
    "functional.clipped_gradients.clipped_grad": "the signature of JAX Privacy",
    "functional.clipped_gradients.clipped_fun": "the signature of JAX Privacy",
    "grad_samplers.sampler.GradSampler": "a record of functions",
}


@dataclass(frozen=True)
class Import:
    """One imported name. A target inside the package is written without the package's name, one outside with "//"."""

    line: int
    target: str
    relative: bool
    at_run_time: bool  # False under `if TYPE_CHECKING:`
    on_load: bool  # at run time, and not inside a function
    name: str  # as the module calls it
    exported: str = ""  # the name, where it is one that an __init__ exports


@dataclass(frozen=True)
class Source:
    """Contents of a package, by module: texts, trees, statements and imports."""

    name: str
    texts: dict[str, str]
    trees: dict[str, ast.Module]
    statements: dict[str, list[tuple[ast.AST, bool, bool]]]
    imports: dict[str, list[Import]]


def read(package: Path) -> Source:
    """The package in this folder."""
    paths = {_name(path, package): path for path in sorted(package.rglob("*.py"))}
    packages = {name for name, path in paths.items() if path.name == "__init__.py"}
    texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    trees = {name: tree_of(text) for name, text in texts.items()}
    statements = {name: list(_statements(tree)) for name, tree in trees.items()}
    imports = {name: list(_imports(name, packages, statements, package.name)) for name in texts}
    return Source(package.name, texts, trees, statements, imports)


def faults(source: Source) -> list[str]:
    """All that is wrong with a package, one line each."""
    parts = {_part(module) for module in source.texts}
    found = [f"{part}: a part without a row in ORDER" for part in sorted(parts - set(ORDER))]
    inner: dict[str, set[str]] = {}  # imports inside a part: a cycle across parts has an import that points down
    for module, imports in source.imports.items():
        found += [fault for one in imports for fault in _import_faults(module, one, source.name)]
        found += _size_faults(module, source.texts[module], source.statements[module])
        inner[module] = {
            one.target
            for one in imports
            if one.at_run_time and one.target in source.texts and _same_part(one.target, module)
        }
    return found + [f"{' -> '.join(cycle)}: an import cycle" for cycle in _cycles(inner)]


def longest_chain(source: Source, start: str) -> tuple[str, ...]:
    """The longest chain of modules from ``start`` of which each imports the next one when it is loaded."""

    def definer(one: Import) -> str:
        """The module that defines what is imported, also where an ``__init__`` exports it."""
        behind = [other for other in source.imports.get(one.target, ()) if one.exported and other.name == one.exported]
        return definer(behind[0]) if behind else one.target

    @functools.cache
    def longest(module: str) -> tuple[str, ...]:
        after = {definer(one) for one in source.imports.get(module, ()) if one.on_load} & source.texts.keys()
        return (module, *max(map(longest, sorted(after - {module})), key=len, default=()))

    return longest(start)


def _name(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _part(module: str) -> str:
    return module.split(".")[0]


def _same_part(one: str, other: str) -> bool:
    return _part(one) == _part(other)


def _statements(node: ast.AST, at_run_time: bool = True, on_load: bool = True) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Every statement below a node, those inside functions too; whether it runs, and whether it does on import."""
    on_load = on_load and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):  # no expressions: they are most of a tree
        runs = at_run_time and not (field == "body" and isinstance(node, ast.If) and _is_typing_only(node.test))
        for child in getattr(node, field, ()):
            yield child, runs, runs and on_load
            yield from _statements(child, runs, on_load)


def _is_typing_only(test: ast.expr) -> bool:
    return getattr(test, "id", getattr(test, "attr", "")) == "TYPE_CHECKING"


def _imports(
    module: str, packages: set[str], modules: Mapping[str, list[tuple[ast.AST, bool, bool]]], package: str
) -> Iterator[Import]:
    """Every import of a module, those inside its functions too."""
    is_package = module in packages
    for node, at_run_time, on_load in modules[module]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                target, name = _inside(alias.name, package), alias.asname or alias.name
                yield Import(node.lineno, target, False, at_run_time, on_load, name)
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(node, module, is_package, package)
            for alias in node.names:
                deeper = alias.name if origin == "__init__" else f"{origin}.{alias.name}"
                is_module = deeper in modules
                exported = alias.name if not is_module and origin in packages and origin != module else ""
                target, name = deeper if is_module else origin, alias.asname or alias.name
                yield Import(node.lineno, target, bool(node.level), at_run_time, on_load, name, exported)


def _origin(node: ast.ImportFrom, module: str, is_package: bool, package: str) -> str:
    if not node.level:
        return _inside(node.module or "", package)
    folders = [] if module == "__init__" else module.split(".")[: None if is_package else -1]
    folders = folders[: len(folders) - node.level + 1]
    return ".".join([*folders, *filter(None, [node.module])]) or "__init__"


def _inside(dotted: str, package: str) -> str:
    if dotted == package:
        return "__init__"
    return dotted.removeprefix(f"{package}.") if dotted.startswith(f"{package}.") else f"//{dotted}"


def _import_faults(module: str, one: Import, package: str) -> Iterator[str]:
    here, there = _part(module), _part(one.target)
    where = f"{module.replace('.', '/')} line {one.line}"
    if one.target.startswith("//"):
        if one.target[2:].split(".")[0] in NEVER_IMPORTS.get(here, ()):
            yield f"{where}: {here} must not import {one.target[2:]}"
        return
    if one.exported == "lazy_exports":
        return
    if one.exported and one.target != "__init__" and "compat" not in (here, there):  # compat mirrors another package
        yield f"{where}: imports {one.exported} from the package {one.target}: name the module that defines it"
    if here in ("__init__", there) or here not in ORDER or there not in ORDER:
        return  # a missing row has a line of its own
    if ORDER.index(there) > ORDER.index(here):
        yield f"{where}: {here} imports {there}, which comes after it in ORDER"
    if one.relative:
        yield f"{where}: across parts write `from {package}.{there} import ...`, not a relative import"


def _size_faults(module: str, text: str, statements: list[tuple[ast.AST, bool, bool]]) -> Iterator[str]:
    where = module.replace(".", "/")
    lines = len(text.splitlines())
    if lines > MAX_LINES_OF_FILE:
        yield f"{where}: {lines} lines, at most {MAX_LINES_OF_FILE}: split it by what it does"
    for node, _, _ in statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = _extent(node) - (_extent(node.body[0]) if ast.get_docstring(node) else 0)
            if lines > MAX_LINES_OF_FUNCTION:
                yield (
                    f"{where} line {node.lineno}: {node.name} has {lines} lines besides its docstring, "
                    f"at most {MAX_LINES_OF_FUNCTION}"
                )


def _extent(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """One cycle for each import that closes one in a depth-first walk."""
    cycles, done = [], set()

    def walk(module: str, path: list[str]) -> None:
        if module in path:
            cycles.append([*path[path.index(module) :], module])
        elif module not in done:
            for target in sorted(graph[module]):
                walk(target, [*path, module])
            done.add(module)

    for module in sorted(graph):
        walk(module, [])
    return cycles


@pytest.fixture(scope="module")
def source():
    return read(PACKAGE)


def test_the_package_keeps_its_order(source):
    found = faults(source)
    assert not found, "\n".join(found)


def test_the_architecture_page_lists_the_packages_in_the_order_of_imports():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("## Packages")[1].split("## ")[0]
    listed = re.findall(r"^\| `(\w+)/` \|", table, flags=re.MULTILINE)
    assert listed == [part for part in ORDER if not (PACKAGE / f"{part}.py").exists()]
    assert {path.parent.name for path in PACKAGE.glob("*/*.py")} == set(listed)


def test_the_top_level_has_three_modules():
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "__main__", "errors"}


def test_the_engine_imports_no_long_chain_of_modules(source):
    chain = longest_chain(source, "engine.privacy_engine")
    assert len(chain) <= MAX_CHAIN, f"{len(chain)} modules, at most {MAX_CHAIN}: {' -> '.join(chain)}"


GOOD = {
    "__init__.py": "from .engine.step import Step\nfrom dpengine.capture.hooks import hook",
    "errors.py": "",
    "capture/__init__.py": "from dpengine import lazy_exports\nfrom .hooks import hook",
    "capture/hooks.py": "from dpengine.errors import X\nfrom .record import Call\nimport torch",
    "capture/record.py": "",
    "accounting/__init__.py": "import math\nfrom dpengine.errors import X",
    "engine/__init__.py": "from .step import Step",
    "engine/step.py": "import dpengine.errors\nfrom dpengine.capture.hooks import hook",
    "cli/__init__.py": "",
    "cli/main.py": "import dpengine\nfrom dpengine.engine import step",
}


@pytest.fixture
def source_of(tmp_path):
    def build(**changes: str) -> Source:
        package = tmp_path / "dpengine"
        for file, text in (GOOD | changes).items():
            path = package / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return read(package)

    return build


@pytest.fixture
def faults_of(source_of):
    return lambda **changes: faults(source_of(**changes))


def test_a_sound_tree_has_no_faults(faults_of):
    assert faults_of() == []


DOWNWARD = [
    ("absolute", "from dpengine.engine.step import Step"),
    ("plain", "import dpengine.engine.step"),
    ("of-a-module", "from dpengine.engine import step"),
    ("inside-a-function", "def f():\n    from dpengine.engine.step import Step"),
    ("for-typing-only", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import dpengine.engine.step"),
]


@pytest.mark.parametrize("text", [text for _, text in DOWNWARD], ids=[name for name, _ in DOWNWARD])
def test_an_import_that_points_down_fails(faults_of, text):
    (fault,) = faults_of(**{"capture/record.py": text})
    assert "capture imports engine, which comes after it" in fault


def test_a_relative_import_that_points_down_fails(faults_of):
    found = faults_of(**{"capture/record.py": "from ..engine.step import Step"})
    assert any("capture imports engine, which comes after it" in fault for fault in found)


def test_modules_do_not_import_the_package_that_exports_them(faults_of):
    (fault,) = faults_of(**{"errors.py": "import dpengine"})
    assert "errors imports __init__, which comes after it" in fault


def test_a_relative_import_across_parts_fails(faults_of):
    (fault,) = faults_of(**{"capture/record.py": "from ..errors import X"})
    assert "not a relative import" in fault


def test_an_import_of_an_exported_name_fails(faults_of):
    (fault,) = faults_of(**{"engine/step.py": "from dpengine.capture import hook"})
    assert "imports hook from the package capture: name the module that defines it" in fault


def test_an_import_of_a_module_passes(faults_of):
    assert faults_of(**{"engine/step.py": "from dpengine.capture import hooks"}) == []


def test_a_cycle_inside_a_part_fails(faults_of):
    (fault,) = faults_of(**{"capture/record.py": "def f():\n    from .hooks import hook"})
    assert fault == "capture.hooks -> capture.record -> capture.hooks: an import cycle"


def test_a_cycle_for_typing_only_passes(faults_of):
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .hooks import hook"
    assert faults_of(**{"capture/record.py": text}) == []


def test_a_file_that_imports_its_own_package_fails(faults_of):
    faults = faults_of(**{"capture/record.py": "from dpengine.capture import hook"})
    assert any("import cycle" in fault for fault in faults)


@pytest.mark.parametrize("file", ["gadgets.py", "gadgets/__init__.py", "gadgets/deep/tool.py"])
def test_a_part_without_a_row_fails(faults_of, file):
    assert faults_of(**{file: ""}) == ["gadgets: a part without a row in ORDER"]


def test_accounting_must_not_import_torch(faults_of):
    (fault,) = faults_of(**{"accounting/rdp.py": "def f():\n    import torch.nn"})
    assert "accounting must not import torch.nn" in fault


def test_a_file_of_more_than_400_lines_fails(faults_of):
    assert faults_of(**{"errors.py": "x = 1\n" * 400}) == []
    (fault,) = faults_of(**{"errors.py": "x = 1\n" * 401})
    assert fault.startswith("errors: 401 lines, at most 400")


def test_a_function_of_more_than_60_lines_fails(faults_of):
    method = "class C:\n    def long(self):\n" + "        x = 1\n" * 59
    assert faults_of(**{"errors.py": method}) == []
    (fault,) = faults_of(**{"errors.py": method + "        x = 1\n"})
    assert fault == "errors line 2: long has 61 lines besides its docstring, at most 60"


def test_a_docstring_does_not_count_against_its_function(faults_of):
    lines = "    Line of a docstring.\n" * 100
    assert faults_of(**{"errors.py": f'def short():\n    """Sentence.\n\n{lines}    """\n    return 1\n'}) == []


def test_a_chain_leads_through_an_export_to_the_module_that_defines_it(source_of):
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from "
    changes = {
        "capture/__init__.py": f"{typed}.hooks import hook",
        "capture/hooks.py": "from .record import Call",
        "capture/record.py": f"{typed}dpengine.errors import X\ndef f():\n    import dpengine.errors",
        "engine/step.py": "from dpengine.capture import hook",
    }
    assert longest_chain(source_of(**changes), "engine.step") == ("engine.step", "capture.hooks", "capture.record")


def parameters_of(tree, module):
    """Yields the name and the number of parameters of each public function, and of each constructor."""
    for owner in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]:
        prefix = module if owner is tree else f"{module}.{owner.name}"
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and (node.name[0] != "_" or node.name == "__init__"):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                yield f"{prefix}.{node.name}", sum(argument.arg not in ("self", "cls") for argument in arguments)
        if owner is not tree and any("dataclass" in ast.unparse(one) for one in owner.decorator_list):
            fields = [node for node in owner.body if isinstance(node, ast.AnnAssign)]
            texts = [ast.unparse(node) for node in fields]
            yield prefix, sum("init=False" not in text and "ClassVar" not in text for text in texts)


def test_no_public_function_or_constructor_has_many_parameters(source):
    found = [one for module, tree in source.trees.items() for one in parameters_of(tree, module)]
    many = {name: count for name, count in found if count > MAX_PARAMETERS}
    assert sorted(many) == sorted(MORE_PARAMETERS), many
