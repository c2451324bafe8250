"""The keywords of JSON Schema that ``schema.json`` uses, and no others."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def violations(value: Any, schema: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Says what in a value is against a schema.

    Args:
        value: Parsed JSON.
        schema: The schema, or a part of ours.
        where: The dotted name of the value.

    Yields:
        One sentence for each violation. What has a wrong type is not looked into.
    """
    allowed = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type")
    if allowed and not any(_is(value, name) for name in allowed):
        yield f"{where or 'the whole'} is {shortened(value)}, not of type {' or '.join(allowed)}"
        return
    for keyword, rule in schema.items():
        yield from _KEYWORDS[keyword](value, rule, where)


def shortened(value: Any) -> str:
    """JSON of a value, or its beginning."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


@functools.cache
def report_schema() -> dict[str, Any]:
    """The schema of ``privacy_report.json``."""
    text = resources.files("dpengine.report").joinpath("schema.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool) and name != "boolean":
        return False
    # A literal such as 1e999 is valid JSON that Python reads as infinity.
    return isinstance(value, _TYPES[name]) and not (isinstance(value, float) and not math.isfinite(value))


def _nothing(value: Any, rule: Any, where: str) -> Iterator[str]:
    yield from ()


def _required(value: Any, rule: Any, where: str) -> Iterator[str]:
    yield from (f"{_below(where, key)} is missing" for key in rule if key not in value)


def _properties(value: Any, rule: Any, where: str) -> Iterator[str]:
    for key, item in value.items():
        if key in rule:
            yield from violations(item, rule[key], _below(where, key))
        else:  # every object of ours says "additionalProperties": false
            yield f"{_below(where, key)} is not known"


def _items(value: Any, rule: Any, where: str) -> Iterator[str]:
    for index, item in enumerate(value or ()):  # null, where the type allows it
        yield from violations(item, rule, f"{where}[{index}]")


def _any_of(value: Any, rule: Any, where: str) -> Iterator[str]:
    if all(any(violations(value, part, where)) for part in rule):
        yield f"{where} is {shortened(value)}, which it cannot be"


def _ref(value: Any, rule: Any, where: str) -> Iterator[str]:
    yield from violations(value, report_schema()["$defs"][rule.rpartition("/")[2]], where)


def _one_of_these(value: Any, rule: Any, where: str) -> Iterator[str]:
    if not any(type(value) is type(choice) and value == choice for choice in rule):
        yield f"{where} is {shortened(value)}, not {' or '.join(map(shortened, rule))}"


def _const(value: Any, rule: Any, where: str) -> Iterator[str]:
    yield from _one_of_these(value, [rule], where)


def _bound(fits: Callable[[float, float], bool], words: str) -> Callable[[Any, Any, str], Iterator[str]]:
    def check(value: Any, rule: Any, where: str) -> Iterator[str]:
        size = len(value) if isinstance(value, list) else value
        if isinstance(size, (int, float)) and not fits(size, rule):
            yield f"{where} {'has' if size is not value else 'is'} {size!r}{words} {rule}"

    return check


def _below(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


_KEYWORDS: dict[str, Callable[[Any, Any, str], Iterator[str]]] = {
    **dict.fromkeys(("$schema", "$defs", "title", "description", "type", "additionalProperties"), _nothing),
    "required": _required,
    "properties": _properties,
    "items": _items,
    "anyOf": _any_of,
    "$ref": _ref,
    "enum": _one_of_these,
    "const": _const,
    "minimum": _bound(lambda size, limit: size >= limit, ", below"),
    "maximum": _bound(lambda size, limit: size <= limit, ", above"),
    "exclusiveMinimum": _bound(lambda size, limit: size > limit, ", not above"),
    "exclusiveMaximum": _bound(lambda size, limit: size < limit, ", not below"),
    "minItems": _bound(lambda size, limit: size >= limit, " items, fewer than"),
    "maxItems": _bound(lambda size, limit: size <= limit, " items, more than"),
}
