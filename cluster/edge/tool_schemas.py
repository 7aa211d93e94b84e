"""Shape of the JSON schemas of tools in request bodies. Pure.

Parsers and grammars of calls read some keywords themselves. They rely on the shapes checked here;
whether a grammar can follow a schema is found out when that is compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.edge.fields import (
    STRING,
    array,
    array_of,
    bad_field,
    check_of,
    number,
    object_,
    shown,
    string,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_DEPTH = 64
"""Schemas within schemas."""
_MAX_NAME_CHARS = 64
"""Characters of a property's name in a path."""
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TEXTS = ("pattern", "format", "$ref")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "additionalProperties", "not", "contains", "propertyNames")
_strings = check_of(array_of(STRING))


def check_tool_schema(schema: Mapping[str, Any], path: str) -> None:
    """Check the shape of a schema's keywords, at any depth; unknown ones may be anything.

    Args:
        schema: The schema, an object.
        path: Its path in the body.

    Raises:
        BadRequestError: A keyword has another shape than JSON Schema gives it, or the schema is
            nested too deep; `param` is its path.
    """
    _check(schema, path, 0)


def _check(schema: object, path: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if depth > MAX_DEPTH:
        raise bad_field(path, f"is nested deeper than {MAX_DEPTH} schemas")
    given: dict[str, Any] = object_(schema, path)
    _check_values(given, path)
    for each, its_path in _parts(given, path):
        _check(each, its_path, depth + 1)


def _parts(schema: Mapping[str, Any], path: str) -> Iterator[tuple[object, str]]:
    """Yield the schemas that a schema holds, each with its path."""
    for name in _LISTS:
        if name in schema:
            entries = _filled(schema[name], f"{path}.{name}")
            yield from ((each, f"{path}.{name}[{i}]") for i, each in enumerate(entries))
    for name in _MAPS:
        if name in schema:
            for key, each in object_(schema[name], f"{path}.{name}").items():
                yield each, f"{path}.{name}.{key[:_MAX_NAME_CHARS]}"
    for name in _SCHEMAS:
        if name in schema:
            yield schema[name], f"{path}.{name}"


def _check_values(schema: Mapping[str, Any], path: str) -> None:
    """Check the keywords that hold no schemas."""
    if "type" in schema:
        kind = schema["type"]
        kinds = _filled(kind, f"{path}.type") if isinstance(kind, list) else [kind]
        for each in kinds:
            string(each, f"{path}.type")
    if "enum" in schema:
        _filled(schema["enum"], f"{path}.enum")
    if "required" in schema:
        _strings(schema["required"], f"{path}.required")
    for name in _COUNTS:
        if name in schema:
            _check_count(schema[name], f"{path}.{name}")
    for names, check in ((_BOUNDS, number), (_TEXTS, string)):
        for name in names:
            if name in schema:
                check(schema[name], f"{path}.{name}")


def _filled(value: object, path: str) -> list[Any]:
    given: list[Any] = array(value, path)
    if not given:
        raise bad_field(path, "must have at least one entry")
    return given


def _check_count(value: object, path: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise bad_field(path, f"must be an integer of at least 0, got {shown(value)}")
