"""The names that each package exports: they load, they are the same for readers and type checkers, and documented."""

import ast
import importlib.util
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAZY = [path for path in sorted((ROOT / "dpengine").rglob("__init__.py")) if "lazy_exports(" in path.read_text("utf-8")]
each_package = pytest.mark.parametrize("path", LAZY, ids=lambda path: ".".join(path.relative_to(ROOT).parts[:-1]))


def name_of(path):
    return ".".join(path.relative_to(ROOT).parts[:-1])


def listed(path):
    """``(module, name)`` of each export, as the block for type checkers and as the table list them."""
    package = name_of(path)
    (block,) = [
        node
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    typed = [
        (f"{package}.{node.module}" if node.level else node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    (call,) = [node for one in block.orelse for node in ast.walk(one) if isinstance(node, ast.Call)]
    table = ast.literal_eval(call.args[1])
    resolved = {module: importlib.util.resolve_name(f".{module}", package) for module in table}
    return typed, [(resolved[module], name) for module, names in table.items() for name in names]


@each_package
def test_both_lists_of_a_package_have_the_same_names(path):
    typed, table = listed(path)
    assert sorted(typed) == sorted(table)
    assert len({name for _, name in table}) == len(table)


@each_package
def test_a_public_name_is_that_of_the_module_in_the_table(path):
    package = importlib.import_module(name_of(path))
    _, table = listed(path)
    assert package.__all__ == sorted(name for _, name in table)
    for module, name in table:
        assert getattr(package, name) is getattr(importlib.import_module(module), name), name


@each_package
def test_no_public_name_is_that_of_a_submodule(path):
    """An import of the submodule would replace the name."""
    _, table = listed(path)
    assert not {name for _, name in table} & {module.name for module in pkgutil.iter_modules([str(path.parent)])}


def faults_of(name, function, doc):
    """Yields the gaps in the docstring of a function or class; one line alone need not name arguments."""
    lines = inspect.cleandoc(doc).splitlines()
    if len(lines) == 1:
        return
    called = function.__init__ if inspect.isclass(function) else function
    if not getattr(called, "__module__", "").startswith("dpengine"):
        return  # a constructor of torch, or none
    docs = [one.__doc__ or "" for one in inspect.getmro(function)] if inspect.isclass(function) else [doc]
    signature = inspect.signature(called)
    for parameter in signature.parameters:
        described = rf"^ +\*{{0,2}}{parameter}( \(.*\))?: "
        if parameter not in ("self", "cls") and parameter[0] != "_":
            if not any(re.search(described, text, re.MULTILINE) for text in docs):
                yield f"{name}: no description of the argument {parameter}"
    gives = signature.return_annotation not in (None, "None", "NoReturn", signature.empty)
    if gives and not inspect.isclass(function) and re.search(r"^ +(return|yield) ", inspect.getsource(called), re.M):
        if not lines[0].startswith(("Returns ", "Yields ")) and not re.search(r"^ *(Returns|Yields):$", doc, re.M):
            yield f"{name}: no Returns"


def callables_of(name, value):
    """A function, or a class and its public methods."""
    yield name, value
    if inspect.isclass(value):
        for attribute, found in vars(value).items():
            method = getattr(found, "__func__", found)
            if inspect.isfunction(method) and attribute[0] != "_":
                yield f"{name}.{attribute}", method


def faults(package):
    for name in package.__all__:
        value = getattr(package, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        if not value.__doc__:
            yield f"{name}: no docstring"
        for full, function in callables_of(name, value):
            yield from faults_of(full, function, function.__doc__ or "-")


@each_package
def test_public_names_document_their_arguments_and_results(path):
    found = list(faults(importlib.import_module(name_of(path))))
    assert not found, "\n".join(found)


def undescribed(first: int) -> int:
    """Returns nothing of note.

    Of no use.
    """
    return first


def unsaid(first: int) -> int:
    """Adds one.

    Args:
        first: A number.
    """
    return first + 1


def test_a_gap_in_a_docstring_is_found():
    undescribed.__module__ = unsaid.__module__ = "dpengine"
    assert list(faults_of("f", undescribed, undescribed.__doc__)) == ["f: no description of the argument first"]
    assert list(faults_of("g", unsaid, unsaid.__doc__)) == ["g: no Returns"]
