"""Grammars of values of JSON schemas in Gemma 4's notation."""

from __future__ import annotations

import json
from itertools import combinations
from typing import TYPE_CHECKING, Any

from cluster.edge.families.lark import UnsupportedSchemaError
from cluster.edge.families.parameters import kinds, listed_properties, property_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.edge.families.lark import Lark

QUOTE = '<|"|>'
_MAX_DEPTH = 64
_MAX_SCHEMAS = 20_000
"""Schemas of one tool with those that references and combinations make."""
_MAX_OPTIONS = 64
"""Options of a `oneOf`, each of which is compared with each."""
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$comment", "$defs", "definitions", "$schema", "$id", "discriminator"}
)
_UNSUPPORTED = ("not", "if", "prefixItems", "contains", "patternProperties")
_IMPLIED = {
    "object": ("properties", "additionalProperties", "required"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Keywords that say something about one type only, so that a value of that type is meant."""


class SchemaGrammar:
    """Rules for the values of one tool's schemas.

    Args:
        lark: The grammar that gets the rules.
        root: Schema of the tool's arguments, which references are resolved in.
    """

    def __init__(self, lark: Lark, root: Mapping[str, Any]) -> None:
        self._lark = lark
        self._root = root
        self._num_schemas = 0
        self._references: dict[str, str] = {}
        self._any = ""

    def arguments(self) -> str:
        """Return an expression for the arguments.

        Raises:
            UnsupportedSchemaError: No expression permits valid values alone.
        """
        return self._value({**self._root, "type": "object"}, 0, ())

    def _value(self, schema: object, depth: int, chain: tuple[str, ...]) -> str:
        """Return an expression for a value.

        Args:
            schema: Its schema.
            depth: Arrays and objects around it.
            chain: References that have led here without an array or object between.
        """
        self._num_schemas += 1
        if depth > _MAX_DEPTH or self._num_schemas > _MAX_SCHEMAS:
            raise UnsupportedSchemaError("is nested too deep, or too large with its references")
        if schema is False:
            raise UnsupportedSchemaError("permits no value")
        said = _without_annotations(schema)
        for keyword in _UNSUPPORTED:
            if keyword in said:
                raise UnsupportedSchemaError(f"has {keyword}, which this format cannot follow")
        if "$ref" in said:
            return self._reference(said, depth, chain)
        for keyword in ("allOf", "anyOf", "oneOf"):
            if keyword in said:
                options = self._options(said, keyword)
                return self._lark.any_of([self._value(each, depth, chain) for each in options])
        if isinstance(said.get("type"), list):
            options = [{**said, "type": kind} for kind in said["type"]]
            return self._lark.any_of([self._value(each, depth, chain) for each in options])
        return self._plain_value(said, depth)

    def _plain_value(self, schema: Mapping[str, Any], depth: int) -> str:
        """Return an expression for a value whose schema combines no others."""
        lark = self._lark
        implied = (k for k, names in _IMPLIED.items() if any(name in schema for name in names))
        kind = schema.get("type") or next(implied, None)
        if "enum" in schema or "const" in schema:
            return self._one_of(schema)
        if kind == "string":
            return lark.sequence(lark.text(QUOTE), lark.text_value(schema, QUOTE))
        if kind in ("integer", "number", "boolean", "null"):
            return lark.json({**schema, "type": kind})
        if kind == "array":
            return lark.sequence(lark.text("["), self._items(schema, depth + 1), lark.text("]"))
        if kind == "object":
            return lark.sequence(lark.text("{"), self._members(schema, depth + 1), lark.text("}"))
        return self._any_value()

    def _reference(self, schema: Mapping[str, Any], depth: int, chain: tuple[str, ...]) -> str:
        """Return the rule of a reference, which may refer to itself within its values."""
        key = json.dumps(schema, sort_keys=True)
        if key in chain:
            raise UnsupportedSchemaError(f"has a $ref that is its own value: {key[:64]}")
        if key not in self._references:
            self._references[key] = name = self._lark.declared()
            merged = _merged(self._resolved(schema["$ref"]), {**schema, "$ref": None})
            self._lark.define(name, self._value(merged, depth, (*chain, key)))
        return self._references[key]

    def _resolved(self, reference: object) -> object:
        """Return the schema that a reference within the root names."""
        found: Any = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise UnsupportedSchemaError("has a $ref that does not begin with #")
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                raise UnsupportedSchemaError(f"has a $ref to nothing: {reference[:64]}")
            found = found[name]
        return found

    def _options(self, schema: Mapping[str, Any], keyword: str) -> list[object]:
        """Return schemas of which a value must follow one, for one that combines others."""
        others = schema[keyword]
        rest = {**schema, keyword: None}
        if not isinstance(others, list) or not others:
            raise UnsupportedSchemaError(f"has {keyword} without schemas")
        if keyword == "allOf":
            merged: object = rest
            for each in others:
                merged = _merged(each, merged)
            return [merged]
        if keyword == "oneOf":
            plain = [_without_annotations(self._target(each)) for each in others]
            pairs = combinations(plain[: _MAX_OPTIONS + 1], 2)
            if len(plain) > _MAX_OPTIONS or not all(_are_disjoint(a, b) for a, b in pairs):
                raise UnsupportedSchemaError("has oneOf with options that one value may follow")
        return [_merged(each, rest) for each in others if each is not False]

    def _target(self, schema: object) -> object:
        """Return what a schema refers to, or the schema."""
        if isinstance(schema, dict) and "$ref" in schema:
            return self._resolved(schema["$ref"])
        return schema

    def _one_of(self, schema: Mapping[str, Any]) -> str:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        allowed = kinds({"type": schema["type"]} if "type" in schema else {})
        written = [
            _written(each)
            for each in values
            if (kind := min(kinds({"const": each}))) in allowed
            or (kind == "integer" and "number" in allowed)
        ]
        if not written:
            raise UnsupportedSchemaError("has an enum without a value of its type")
        return self._lark.any_of([self._lark.text(each) for each in written])

    def _members(self, schema: Mapping[str, Any], depth: int) -> str:
        """Return an expression for the members of an object, sorted as the chat template does."""
        lark, required = self._lark, schema.get("required", ())
        names = listed_properties(schema)
        others = schema.get("additionalProperties", True)
        if not names and others is not False:
            key = lark.terminal(r"/[A-Za-z_][A-Za-z0-9_ ]{0,63}/")
            member = lark.rule(f"{key} {lark.text(':')} {self._value(others, depth, ())}")
            return f"({member} ({lark.text(',')} {member})*)?"
        parts = []
        for name in sorted(names, key=str.lower):
            value = self._value(property_schema(schema, name), depth, ())
            member = lark.sequence(lark.text(f"{_key(name)}:"), value)
            parts.append((lark.rule(member), name in required))
        return lark.list_of(parts, ",")

    def _items(self, schema: Mapping[str, Any], depth: int) -> str:
        """Return an expression for the items of an array."""
        lark = self._lark
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if schema.get("uniqueItems") and most not in (0, 1):
            raise UnsupportedSchemaError("has uniqueItems, which this format cannot follow")
        if most == 0 or (schema.get("items") is False and not least):
            return ""
        item = lark.rule(self._value(schema.get("items", {}), depth, ()))
        count = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        more = "" if most == 1 else f"({lark.text(',')} {item}){count}"
        return f"({lark.sequence(item, more)}){'' if least else '?'}"

    def _any_value(self) -> str:
        """Return the rule of any value."""
        if not self._any:
            lark = self._lark
            text = lark.sequence(lark.text(QUOTE), lark.until(QUOTE))
            scalar = lark.json({"type": ["number", "boolean", "null"]})
            name = lark.terminal(r"/[A-Za-z_][A-Za-z0-9_ ]{0,63}/")
            value = lark.rule(f"{text} | {scalar}")
            for _ in range(2):  # Nested values without a schema may be three levels deep.
                members = f"{name} {lark.text(':')} {value}"
                several = lark.rule(f"({members} ({lark.text(',')} {members})*)?")
                listed = lark.rule(f"({value} ({lark.text(',')} {value})*)?")
                braces = f"{lark.text('{')} {several} {lark.text('}')}"
                value = lark.rule(
                    f"{value} | {braces} | {lark.text('[')} {listed} {lark.text(']')}"
                )
            self._any = value
        return self._any


def _without_annotations(schema: object) -> dict[str, Any]:
    """Return the keywords of a schema that restrict values; none for `true`."""
    if not isinstance(schema, dict):
        return {}
    return {k: v for k, v in schema.items() if k not in _ANNOTATIONS and not k.startswith("x-")}


def _merged(a: object, b: object) -> object:
    """Return a schema of the values that follow two.

    Raises:
        UnsupportedSchemaError: Both say something different about one keyword.
    """
    if a is False or b is False:
        return False
    merged = _without_annotations(a)
    for keyword, value in _without_annotations(b).items():
        if keyword in ("$ref", "allOf", "anyOf", "oneOf") and value is None:
            continue  # It is what the caller replaces.
        if merged.setdefault(keyword, value) != value:
            raise UnsupportedSchemaError(f"combines schemas that differ in {keyword}")
    return merged


def _are_disjoint(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether it shows that no value follows both of two schemas."""
    of_a, of_b = (
        found | ({"integer"} if "number" in found else frozenset()) for found in map(kinds, (a, b))
    )
    values = [each.get("enum", [each["const"]] if "const" in each else None) for each in (a, b)]
    if not of_a & of_b:
        return True
    if values[0] is not None and values[1] is not None:
        return not any(value in values[1] for value in values[0])
    both = set(a.get("required", ())) & set(b.get("required", ()))
    return any(_are_disjoint(property_schema(a, name), property_schema(b, name)) for name in both)


def _key(name: str) -> str:
    """Return a key as the notation has it.

    Raises:
        UnsupportedSchemaError: It would be read otherwise.
    """
    if not name or name != name.strip() or any(mark in name for mark in (":", *"{}[]", QUOTE)):
        raise UnsupportedSchemaError(f"has the property {name[:64]!r}, which cannot be written")
    return name


def _written(value: object) -> str:
    """Return a value in the notation."""
    if isinstance(value, str):
        if QUOTE in value:
            raise UnsupportedSchemaError(f"has a value with {QUOTE}, which cannot be written")
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{_key(name)}:{_written(each)}' for name, each in value.items())}}}"
    return json.dumps(value)
