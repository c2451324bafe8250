"""Reads and checks ``privacy_report.json``: its JSON schema, its digest, and its numbers."""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from dpengine.accounting.accountant import ACCOUNTANTS
from dpengine.errors import CorruptFileError, PrivacyError

from .document import SCHEMA_VERSION, digest_of, document_of, facts_of, figures_in
from .facts import RunFacts
from .figures import USER, figures_of, version_of
from .history_rows import public_text
from .other_versions import bound_violations

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_LIMITS: Mapping[str, tuple[Callable[[float, float], bool], str]] = {
    "minimum": (operator.ge, ", below"),
    "maximum": (operator.le, ", above"),
    "exclusiveMinimum": (operator.gt, ", not above"),
    "exclusiveMaximum": (operator.lt, ", not below"),
    "minItems": (operator.ge, " items, fewer than"),
    "maxItems": (operator.le, " items, more than"),
}


def violations(value: Any, schema: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Yields the violations of a schema by a value. Supports the keywords of ``schema.json``."""
    allowed = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type")
    if allowed and not any(_has_type(value, name) for name in allowed):
        yield f"{where or 'the document'} is {shortened(value)}, not of type {' or '.join(allowed)}"
        return
    if "$ref" in schema:
        yield from violations(value, report_schema()["$defs"][schema["$ref"].rpartition("/")[2]], where)
    if "anyOf" in schema and all(any(violations(value, part, where)) for part in schema["anyOf"]):
        yield f"{where} is {shortened(value)}, which matches none of the allowed forms"
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices and not any(type(value) is type(choice) and value == choice for choice in choices):
        yield f"{where} is {shortened(value)}, not {' or '.join(map(shortened, choices))}"
    for keyword, (fits, words) in _LIMITS.items():
        size = len(value) if isinstance(value, list) else value
        if keyword in schema and isinstance(size, (int, float)) and not fits(size, schema[keyword]):
            yield f"{where} {'has' if size is not value else 'is'} {size!r}{words} {schema[keyword]}"
    prefix = f"{where}." if where else ""
    yield from (f"{prefix}{key} is missing" for key in schema.get("required", ()) if key not in value)
    for key, item in value.items() if "properties" in schema else ():
        if key in schema["properties"]:
            yield from violations(item, schema["properties"][key], f"{prefix}{key}")
        else:  # every object of the schema has "additionalProperties": false
            yield f"{prefix}{key} is not known"
    for index, item in enumerate((value or ()) if "items" in schema else ()):  # the type may allow null
        yield from violations(item, schema["items"], f"{where}[{index}]")


def _has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool) and name != "boolean":
        return False
    # 1e999 is valid JSON that Python reads as infinity.
    return isinstance(value, _TYPES[name]) and not (isinstance(value, float) and not math.isfinite(value))


def shortened(value: Any) -> str:
    """Returns the JSON of a value, shortened to 80 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


@functools.cache
def report_schema() -> dict[str, Any]:
    """Returns the schema of ``privacy_report.json``."""
    text = resources.files("dpengine.report").joinpath("schema.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


REPORT_FILE = "privacy_report.json"

_REBUILD = "Use the file that the run wrote, or rebuild it: dpengine report RUN_DIR/privacy_state.json."
_NO_SIGNATURE = "The digest detects accidental changes; it is not a signature and does not show who wrote a report."
_TOLERANCE = 1e-8  # relative difference that another machine's rounding may cause


def read_file(path: Path) -> str:
    """Returns the text of a file."""
    file = path / REPORT_FILE if path.is_dir() else path
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CorruptFileError(f"{file} does not exist.", fix=f"Pass a {REPORT_FILE}, or its folder.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{file} cannot be read: {error}.", fix=_REBUILD) from error


def read_document(text: str, where: str) -> dict[str, Any]:
    """Reads and checks the JSON of a report.

    The document must match ``schema.json``, and its digest must match its content. If this version of dpengine wrote
    it, all derived values are recomputed from the history and the other facts, and compared. A document of another
    version may have other bounds and texts, but no number below the lower bound of this version.
    """
    document = _parsed(text, where)
    _check_schema(document, where)
    _check_digest(document, where)
    _check_content(document, where)
    return document


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text, parse_constant=_reject_constant, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        if error.pos >= len(text.rstrip()) or "Unterminated" in error.msg:
            _reject(where, f"the text ends early, in line {text.count(chr(10)) + 1}; the file was truncated")
        _reject(where, f"this is not JSON: {error}")
    except (ValueError, RecursionError) as error:
        _reject(where, f"this is not JSON as dpengine writes it: {error}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    duplicate = next((key for key in keys if keys.count(key) > 1), None)
    if duplicate is not None:
        raise ValueError(f"the key {duplicate!r} occurs twice")
    return dict(pairs)


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check_schema(document: Any, where: str) -> None:
    if not isinstance(document, dict) or "schema_version" not in document:
        _reject(where, "this is not a privacy report: it has no schema_version", f"Pass a {REPORT_FILE}.")
    version = document["schema_version"]
    if type(version) is int and version > SCHEMA_VERSION:
        problem = f"written by a newer dpengine, schema {version}; this one reads {SCHEMA_VERSION}: upgrade"
        _reject(where, problem, "pip install --upgrade dpengine")
    if type(version) is int and version < SCHEMA_VERSION:
        problem = f"written by an older dpengine, schema {version}; this one reads {SCHEMA_VERSION}"
        _reject(where, problem, "Rebuild it: dpengine report RUN_DIR/privacy_state.json.")
    problem = next(violations(document, report_schema()), "")
    if problem:
        _reject(where, f"not a report of schema {SCHEMA_VERSION}: {problem}")


def _check_digest(document: Mapping[str, Any], where: str) -> None:
    try:
        same = digest_of(document) == document["digest"]
    except UnicodeEncodeError:  # a lone surrogate, which dpengine never writes
        same = False
    if not same:
        _reject(where, f"it was edited: its content does not match its digest. {_NO_SIGNATURE}")


def _check_content(document: Mapping[str, Any], where: str) -> None:
    version, run_version = document["accounting"]["version"], document["run"]["dpengine"]
    if version != run_version:
        _reject(where, f"run.dpengine is {shortened(run_version)}, but accounting.version is {shortened(version)}")
    if not version or public_text(version) != version:
        _reject(where, f"accounting.version is {shortened(version)}, which is not a version")
    try:
        facts = facts_of(document)
        stated = figures_in(document)
        if stated.library == USER and stated.accountant in ACCOUNTANTS:
            raise ValueError(f"the user's accountant has the name {stated.accountant!r} of a built-in one")
        errors = [] if stated.recomputable else list(_errors_of_any_version(document, facts))
        if version == version_of("dpengine"):  # figures of a user's accountant cannot be recomputed
            recomputed = figures_of(facts) if stated.recomputable else stated
            errors += _differences(document, document_of(facts, recomputed))
    except (PrivacyError, ValueError, TypeError) as error:
        _reject(where, f"its content is inconsistent: {error}")
    for name, value, expected in errors:
        _reject(where, f"{name} is {shortened(value)}, but the rest of the report implies {shortened(expected)}")


def _errors_of_any_version(document: Mapping[str, Any], facts: RunFacts) -> Iterator[tuple[str, Any, Any]]:
    """Yields name, value and expected value of contents that are wrong in any version."""
    figures = figures_in(document)
    if document["mechanism"]["steps"] != facts.steps:
        yield "mechanism.steps", document["mechanism"]["steps"], facts.steps
    if figures.spent is not None and any(not charge.event.claimed for charge in facts.accounting.history):
        raise ValueError("it states an epsilon, but its history has a step for which no epsilon is claimed")
    for name, value, bound in bound_violations(facts, figures):
        raise ValueError(
            f"{name} is {value:.6g}, below {bound:.6g}, the lower bound of this dpengine {version_of('dpengine')}"
        )


def _differences(value: Any, expected: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(value, dict) and isinstance(expected, dict):
        for key in sorted(value.keys() | expected.keys()):
            if name or key != "digest":
                yield from _differences(value.get(key), expected.get(key), f"{name}.{key}" if name else key)
    elif isinstance(value, list) and isinstance(expected, list) and len(value) == len(expected):
        for index, (item, expected_item) in enumerate(zip(value, expected, strict=True)):
            yield from _differences(item, expected_item, f"{name}[{index}]")
    elif isinstance(value, float) and isinstance(expected, float):
        if not math.isclose(value, expected, rel_tol=_TOLERANCE):
            yield name, value, expected
    elif value != expected:
        yield name, value, expected


def _reject(where: str, problem: str, fix: str = _REBUILD) -> NoReturn:
    raise CorruptFileError(f"{where}: {problem.rstrip('.')}.", fix=fix) from None
