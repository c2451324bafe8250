"""The package has every name, argument, kind and default of Opacus that scripts may use, by a stored table."""

import importlib
import json
import subprocess
import sys

import pytest
from compat.opacus_facts import FACTS, NAMES, OPERATORS, VERSION, collect, facts_of, member_of, module_of

ROOT = "dpengine.compat.opacus"
TABLE = json.loads(FACTS.read_text(encoding="utf-8"))

# Members without an underscore that only Opacus itself calls. Scripts do not need them.
NOT_PROVIDED = {
    "capture_activations_hook",
    "capture_backprops_hook",
    "forward_layer",
    "has_cell_state",
    "initialize_cells",
    "iterate_layers",
    "iterate_submodules",
    "log_module_gradient_sample_mode",
    "rearrange_grad_samples",
    "set_pattern_param_sample_norm_sum",
    "unsqueeze_0_2",
}
# Functions that must reject a misspelled keyword: explicit keywords, no **kwargs.
EXPLICIT_KEYWORDS = {
    "privacy_engine:PrivacyEngine.make_private",
    "privacy_engine:PrivacyEngine.make_private_with_epsilon",
    "utils.adaptive_clipping.adaptive_clipping_utils:PrivacyEngineAdaptiveClipping.make_private",
    "utils.adaptive_clipping.adaptive_clipping_utils:PrivacyEngineAdaptiveClipping.make_private_with_epsilon",
}
BY_POSITION = ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD", "VAR_POSITIONAL")


def call_differences(theirs, ours, explicit=False):
    """Lists differences that would break a call that Opacus accepts. The package may have more optional arguments."""
    accepts_any = any(kind == "VAR_KEYWORD" for _, kind, _ in theirs)
    positional = [[one for one in call if one[1] in BY_POSITION] for call in (theirs, ours)]
    keywords = [{one[0]: one for one in call if one[1] not in (*BY_POSITION, "VAR_KEYWORD")} for call in (theirs, ours)]
    more = positional[1][len(positional[0]) :]
    if positional[0] != positional[1][: len(positional[0])] or any(default == "" for _, _, default in more):
        yield f"positional arguments are {positional[1]}, expected {positional[0]}"
    for name, one in keywords[0].items():
        if keywords[1].get(name) != one:
            yield f"keyword {one}, here {keywords[1].get(name, 'missing')}"
    needed = sorted(name for name, (_, _, default) in keywords[1].items() if name not in keywords[0] and default == "")
    if needed:
        yield f"needs more keywords: {needed}"
    if any(kind == "VAR_KEYWORD" for _, kind, _ in ours) and (explicit or not accepts_any):
        yield "has **kwargs"


def object_differences(key, theirs, value):
    """Lists the differences of our object for one key of the table."""
    ours = facts_of(value, "dpengine")
    if theirs["kind"] != ours["kind"]:
        yield f"is a {ours['kind']}, expected a {theirs['kind']}"
        return
    if "value" in theirs and theirs["value"] != ours["value"]:
        yield f"is {ours['value']}, expected {theirs['value']}"
    yield from call_differences(theirs.get("call", []), ours.get("call", []))
    for name, member in theirs.get("members", {}).items():
        if name in NOT_PROVIDED:
            continue
        if not hasattr(value, name):
            yield f".{name} is missing"
            continue
        mine = member_of(value, name)  # perhaps inherited from a class of torch
        if (mine["kind"] in ("attribute", "property")) != (member["kind"] in ("attribute", "property")):
            yield f".{name} is a {mine['kind']}, expected a {member['kind']}"
        elif "call" in member and mine["kind"] != member["kind"]:
            yield f".{name} is a {mine['kind']}, expected a {member['kind']}"
        elif not _is_operator_or_defined_by_torch(value, name):
            explicit = f"{key}.{name}" in EXPLICIT_KEYWORDS
            for difference in call_differences(member.get("call", []), mine.get("call", []), explicit):
                yield f".{name}: {difference}"


def _is_operator_or_defined_by_torch(value, name):
    """Returns True for operators other than ``__call__``, and for members that torch defines."""
    owner = next((base for base in value.__mro__ if name in vars(base)), value)
    return name in OPERATORS - {"__call__"} or owner.__module__.split(".")[0] == "torch"


def module_at(path):
    """Returns the package's module for a path. Only the one for Lightning may need a package that is not installed."""
    try:
        return module_of(ROOT, path)
    except ImportError as error:
        if path == "lightning" and error.name in {"pytorch_lightning", "lightning"}:
            pytest.skip("Lightning is not installed")
        raise


@pytest.mark.parametrize("path", NAMES, ids=lambda path: path or "root")
def test_every_name_of_a_path_has_its_arguments_kinds_and_defaults(path):
    module = module_at(path)
    found = []
    for name, key in TABLE["paths"][path].items():
        if not hasattr(module, name):
            found.append(f"{name} is missing")
            continue
        found += [
            f"{name} {difference}"
            for difference in object_differences(key, TABLE["objects"][key], getattr(module, name))
        ]
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_every_path_is_an_attribute_after_the_bare_import():
    reach = f"""
import {ROOT} as opacus, sys
missing = []
for path in {[path for path in NAMES if path not in ("", "lightning")]!r}:
    place = opacus
    try:
        for part in path.split("."):
            place = getattr(place, part)
    except AttributeError:
        missing.append(path)
print(" ".join(missing))
"""
    ran = subprocess.run([sys.executable, "-c", reach], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []


@pytest.mark.hazard("O66")
def test_star_imports_give_the_names_of_all():
    for path in NAMES:
        module = module_of(ROOT, path) if path != "lightning" else None
        missing = [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)]
        assert not missing, f"{path}: {missing}"


def test_the_table_has_the_mirrored_version():
    assert TABLE["version"] == VERSION == importlib.import_module(ROOT).__version__
    assert list(TABLE["paths"]) == list(NAMES)


def test_exempted_members_exist_in_opacus():
    there = {name for one in TABLE["objects"].values() for name in one.get("members", ())}
    assert there >= NOT_PROVIDED


def test_the_table_matches_the_installed_opacus():
    opacus = pytest.importorskip("opacus")
    if opacus.__version__ != VERSION:
        pytest.skip(f"Opacus {opacus.__version__} is installed, the table is about {VERSION}")
    assert collect() == TABLE


def _call(function):
    return facts_of(function, "dpengine")["call"]


DIFFERENT = {
    "name": (lambda a, *, b=1: None, lambda a, *, c=1: None),
    "default": (lambda a, *, b=1: None, lambda a, *, b=2: None),
    "kind": (lambda a, b=1: None, lambda a, *, b=1: None),
    "order": (lambda a, b: None, lambda b, a: None),
    "more": (lambda a: None, lambda a, *, b: None),
    "kwargs": (lambda a: None, lambda a, **kwargs: None),
}


@pytest.mark.parametrize("theirs, ours", DIFFERENT.values(), ids=DIFFERENT)
def test_a_different_signature_is_detected(theirs, ours):
    assert list(call_differences(_call(theirs), _call(ours)))


def test_explicit_keywords_may_replace_kwargs():
    theirs, ours = _call(lambda a, *, b=1, **kwargs: None), _call(lambda a, *, c=2, b=1: None)
    assert not list(call_differences(theirs, ours))
    assert list(call_differences(theirs, theirs, explicit=True))
    assert list(call_differences(theirs, ours[:1]))
