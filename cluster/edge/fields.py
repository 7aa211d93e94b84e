"""Tables of the fields of JSON objects, and the checks that their schemas stand for. Pure.

A `Field` has a fragment of JSON Schema. Its check is derived from that fragment, and the OpenAPI
document shows the same fragment, so the two cannot disagree. Checks know the keywords of
`_KEYWORDS`. What a schema cannot say is left to the code that reads the field.

`null` means "not given" in every object.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from cluster.errors import BadRequestError
from replicas.errors import InvalidRequestError
from replicas.sampling_params import check_range, range_schema

Schema: TypeAlias = Mapping[str, Any]
"""A JSON schema of one value. The value of `$ref` is a `FieldTable`."""

Check: TypeAlias = Callable[[Any, str], Any]
"""Takes a value and its path in the body; returns the value to use or raises BadRequestError."""

_MAX_SHOWN_CHARS = 64
_KEYWORDS = frozenset(
    {
        "type", "enum", "format", "anyOf", "$ref", "items", "additionalProperties",
        "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems",
        "pattern", "description",
    }
)  # fmt: skip


class Support(enum.Enum):
    """Degree of support of a documented field."""

    SUPPORTED = "acts as documented"
    NO_EFFECT = "accepted, changes nothing"
    NOT_YET = "accepted at its neutral value only"


@dataclass(frozen=True, slots=True)
class Field:
    """One documented field.

    Attributes:
        schema: Its JSON schema.
        check: The check of its values, derived from the schema.
        support: Its support.
        text: What it does, in a sentence.
        neutral: Accepted values of a NOT_YET field.
        is_required: Whether an object without it is refused.
    """

    schema: Schema
    check: Check
    support: Support
    text: str
    neutral: tuple[object, ...] = ()
    is_required: bool = False


class FieldTable(dict[str, Field]):
    """The documented fields of one kind of object, by name.

    Attributes:
        name: Name of the object's schema in the OpenAPI document.
        required: Names of the fields that must be given.
        nested: Fields that hold objects with tables of their own: the name, the table of the
            object if the field is one, and that of its entries if it is an array.
        is_optional: Tells of an object in an array whether it may be ignored as a whole, as unknown
            fields may; None: no object may.
    """

    def __init__(
        self,
        name: str,
        fields: Mapping[str, Field],
        *,
        is_optional: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> None:
        super().__init__(fields)
        self.name = name
        self.is_optional = is_optional
        self.required = tuple(name for name, field in self.items() if field.is_required)
        held = ((name, *_tables(field.schema)) for name, field in self.items())
        self.nested = tuple(each for each in held if each[1:] != (None, None))


def _tables(schema: Schema) -> tuple[FieldTable | None, FieldTable | None]:
    """Return the table of an object that a schema describes, and that of an array's entries."""
    of_object = schema.get("$ref")
    of_entries = schema.get("items", {}).get("$ref")
    for branch in schema.get("anyOf", ()):
        nested = _tables(branch)
        of_object, of_entries = of_object or nested[0], of_entries or nested[1]
    return of_object, of_entries


def shown(value: object) -> str:
    """Return a scalar as JSON, or the kind of a container, short enough for an error message."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, str) and len(value) > _MAX_SHOWN_CHARS:
        value = value[:_MAX_SHOWN_CHARS] + "…"
    return json.dumps(value, ensure_ascii=False)


def bad_field(path: str, text: str) -> BadRequestError:
    """Return the error "`path` `text`" about the field at `path`."""
    return BadRequestError(f"{path} {text}", param=path)


# --- checks from schemas --------------------------------------------------------------------------

_TYPES: dict[str, tuple[frozenset[type], str, str]] = {
    "boolean": (frozenset({bool}), "true or false", "booleans"),
    "integer": (frozenset({int}), "an integer", "integers"),
    "number": (frozenset({int, float}), "a number", "numbers"),
    "string": (frozenset({str}), "a string", "strings"),
    "object": (frozenset({dict}), "an object", "objects"),
    "array": (frozenset({list}), "an array", "arrays"),
}
"""The Python types of JSON's types, and their names in errors. Exact types: JSON's true is an
instance of int in Python, but never a number."""


def check_of(schema: Schema) -> Check:
    """Return the check of the values that a schema describes.

    Of `anyOf`, the branch with the type of a value counts. If several have it, only the type is
    checked. Objects with a table (`$ref`) are only checked to be objects; `read_fields` checks
    their fields.

    A `pattern` is anchored; the description of its schema says what a text must have.

    Raises:
        ValueError: The schema has a keyword that checks do not know.
    """
    if not schema.keys() <= _KEYWORDS:
        raise ValueError(f"no check knows the keywords {sorted(schema.keys() - _KEYWORDS)}")
    if "anyOf" in schema:
        return _any_of(schema["anyOf"])
    if "enum" in schema:
        return _one_of(*schema["enum"])
    kind = _type_of(schema)
    if kind is None:
        return _anything
    of_type, of_size = _of_type_and_items(kind, schema), _of_limits(kind, schema)
    return of_type if of_size is None else _both(of_type, of_size)


def _anything(value: object, path: str) -> object:
    """Accept any value."""
    del path
    return value


def _one_of(*choices: str) -> Check:
    """Return the check for one of several strings."""

    def check(value: object, path: str) -> str:
        if not isinstance(value, str) or value not in choices:
            raise bad_field(path, f"must be one of {', '.join(choices)}; got {shown(value)}")
        return value

    return check


def in_range(name: str, check: Check) -> Check:
    """Return a check of the type, and then of the range that a field of `SamplingParams` has."""

    def check_both(value: object, path: str) -> object:
        checked = check(value, path)
        try:
            check_range(name, checked)
        except InvalidRequestError as error:
            raise BadRequestError(str(error), param=path) from error
        return checked

    return check_both


def _type_of(schema: Schema) -> str | None:
    return "object" if "$ref" in schema else schema.get("type")


def _of_type_and_items(kind: str, schema: Schema) -> Check:
    if kind == "array" and "items" in schema:
        return _array_of(schema["items"])
    if kind == "object" and "additionalProperties" in schema:
        return _map_of(schema["additionalProperties"])
    return _of_type(kind)


def _of_limits(kind: str, schema: Schema) -> Check | None:
    """Return the check of the limits of a value that has the type; None if there are none."""
    if "pattern" in schema:
        return _matching(schema["pattern"], schema["description"])
    if schema.get("format") == "int64":
        return _check_int64
    if kind in {"integer", "number"}:
        return _within(schema.get("minimum"), schema.get("maximum"))
    keyword, unit = {"string": ("Length", "characters")}.get(kind, ("Items", "entries"))
    return _sized(schema.get(f"min{keyword}"), schema.get(f"max{keyword}"), unit)


def _of_type(kind: str) -> Check:
    types, name, _ = _TYPES[kind]
    is_integer = kind == "integer"

    def check(value: object, path: str) -> object:
        if type(value) in types:
            return value
        # JSON has one kind of number: 1.0 is an integer.
        if is_integer and isinstance(value, float) and value.is_integer():
            return int(value)
        raise bad_field(path, f"must be {name}, got {shown(value)}")

    return check


def _array_of(schema: Schema) -> Check:
    array, item = _of_type("array"), check_of(schema)
    # A plain type has no more to check, and arrays of token ids may be long.
    is_plain = schema.keys() <= {"type", "$ref"}
    kind = _type_of(schema)
    types = _TYPES[kind][0] if kind is not None and is_plain else frozenset()

    def check(value: object, path: str) -> list[Any]:
        entries: list[Any] = array(value, path)
        if set(map(type, entries)) <= types:
            return entries
        return [item(entry, f"{path}[{i}]") for i, entry in enumerate(entries)]

    return check


def _map_of(schema: Schema) -> Check:
    object_, item = _of_type("object"), check_of(schema)

    def check(value: object, path: str) -> dict[str, Any]:
        entries: dict[str, Any] = object_(value, path)
        for key, entry in entries.items():
            item(entry, f"{path}.{key[:_MAX_SHOWN_CHARS]}")
        return entries

    return check


def _any_of(branches: list[Schema]) -> Check:
    by_type: dict[type, Check] = {}
    for branch in branches:
        kind = _type_of(branch) or "string"  # an enum
        for of_value in _TYPES[kind][0]:
            by_type[of_value] = check_of(branch) if of_value not in by_type else _anything
    names = " or ".join(dict.fromkeys(map(_name, branches)))

    def check(value: object, path: str) -> object:
        branch = by_type.get(type(value))
        if branch is None:
            raise bad_field(path, f"must be {names}, got {shown(value)}")
        return branch(value, path)

    return check


def _name(schema: Schema) -> str:
    kind = _type_of(schema) or "string"
    items = _type_of(schema.get("items", {}))
    return _TYPES[kind][1] if items is None else f"an array of {_TYPES[items][2]}"


def _both(first: Check, second: Check) -> Check:
    return lambda value, path: second(first(value, path), path)


def _check_int64(value: int, path: str) -> int:
    if not -(2**63) <= value < 2**63:
        raise bad_field(path, f"must be an integer of 64 bits, got {shown(value)}")
    return value


def _matching(pattern: str, description: str) -> Check:
    compiled = re.compile(pattern)

    def check(value: str, path: str) -> str:
        if compiled.fullmatch(value) is None:
            raise bad_field(path, f"must have {description}, got {shown(value)}")
        return value

    return check


def _within(least: float | None, most: float | None) -> Check | None:
    if least is None and most is None:
        return None

    def check(value: float, path: str) -> float:
        if (least is not None and value < least) or (most is not None and value > most):
            raise bad_field(path, f"must be {_range(least, most)}, got {shown(value)}")
        return value

    return check


def _sized(least: int | None, most: int | None, unit: str) -> Check | None:
    if least is None and most is None:
        return None

    def check(value: str | list[Any], path: str) -> str | list[Any]:
        size = len(value)
        if (least is not None and size < least) or (most is not None and size > most):
            # Without the value, which may be a secret.
            limits = _range(least, most)
            raise bad_field(path, f"must have {limits} {unit}, got {size}")
        return value

    return check


def _range(least: float | None, most: float | None) -> str:
    if most is None:
        return f"at least {least}"
    return f"at most {most}" if least is None else f"{least} to {most}"


# --- reading --------------------------------------------------------------------------------------


def read_fields(body: Mapping[str, Any], table: FieldTable, path: str = "") -> dict[str, Any]:
    """Check an object against its table and return its supported fields.

    Args:
        body: The decoded JSON object.
        table: Its documented fields.
        path: The object's path in the request, with a final dot: "stream_options.".

    Returns:
        Checked values by field name, of the supported fields that are given and not null.

    Raises:
        BadRequestError: A field is not documented, has the wrong type, asks for something that is
            not supported yet, or is required and not given; `param` is its path.
    """
    values: dict[str, Any] = {}
    for name, value in body.items():
        where = path + name[:_MAX_SHOWN_CHARS]
        field = table.get(name)
        if field is None:
            raise bad_field(where, "is not a field that is documented here; remove it")
        if value is None:
            continue
        checked = field.check(value, where)
        if field.support is Support.SUPPORTED:
            values[name] = checked
        elif field.support is Support.NOT_YET and value not in field.neutral:
            neutral = " or ".join(json.dumps(v) for v in (*field.neutral, None))
            raise bad_field(where, f"is not supported yet: leave it out, or set it to {neutral}")
    for name in table.required:
        if name not in values:
            raise bad_field(path + name, "is required")
    return values


def remove_unknown_fields(body: dict[str, Any], table: FieldTable) -> list[str]:
    """Remove the fields of a decoded body, at any depth, that no table has, and optional entries.

    Args:
        body: The decoded JSON object, which is changed.
        table: Its documented fields.

    Returns:
        The paths of what was removed, in the body as it was; the client has chosen their names.
    """
    removed: list[str] = []
    if not body.keys() <= table.keys():
        unknown = [name for name in body if name not in table]
        for name in unknown:
            del body[name]
        removed += [name[:_MAX_SHOWN_CHARS] for name in unknown]
    for name, of_object, of_entries in table.nested:
        value = body.get(name)
        if isinstance(value, dict):
            if of_object is not None:
                below = remove_unknown_fields(value, of_object)
                removed += [f"{name}.{path}" for path in below]
        elif isinstance(value, list) and of_entries is not None:
            for i, entry in enumerate(value):
                # Paths are made for removed fields alone: a chat may have thousands of messages.
                if isinstance(entry, dict) and (below := remove_unknown_fields(entry, of_entries)):
                    removed += [f"{name}[{i}].{path}" for path in below]
            if of_entries.is_optional is not None:
                removed += _remove_optional(value, of_entries.is_optional, name)
    return removed


def _remove_optional(
    entries: list[Any], is_optional: Callable[[Mapping[str, Any]], bool], name: str
) -> list[str]:
    """Remove the optional entries of an array; return their paths."""
    removed = [i for i, each in enumerate(entries) if isinstance(each, dict) and is_optional(each)]
    for i in reversed(removed):
        del entries[i]
    return [f"{name}[{i}]" for i in removed]


# --- rows -----------------------------------------------------------------------------------------

BOOLEAN: Schema = {"type": "boolean"}
INTEGER: Schema = {"type": "integer"}
INT64: Schema = {"type": "integer", "format": "int64"}
NUMBER: Schema = {"type": "number"}
STRING: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
ARRAY: Schema = {"type": "array"}
ANYTHING: Schema = {}

number, string = check_of(NUMBER), check_of(STRING)
object_, array = check_of(OBJECT), check_of(ARRAY)


def array_of(items: Schema | FieldTable, **limits: int) -> Schema:
    """Return the schema of an array; `limits` are its own keywords."""
    return {"type": "array", "items": schema_of(items), **limits}


def any_of(*branches: Schema | FieldTable) -> Schema:
    """Return the schema of a value of one of several types."""
    return {"anyOf": [schema_of(branch) for branch in branches]}


def schema_of(value: Schema | FieldTable) -> Schema:
    """Return the schema of an object with a table; a schema as it is."""
    return {"$ref": value} if isinstance(value, FieldTable) else value


def choice(*choices: str) -> Schema:
    """Return the schema of one of several strings."""
    return {"type": "string", "enum": list(choices)}


def acts(
    schema: Schema | FieldTable, text: str, *, then: Check | None = None, is_required: bool = False
) -> Field:
    """Return the row of a field that acts.

    Args:
        schema: Its schema, or the table of an object.
        text: What it does.
        then: Reads a value that the schema accepts, and may refuse more.
        is_required: Whether an object without it is refused.
    """
    schema = schema_of(schema)
    check = check_of(schema) if then is None else _both(check_of(schema), then)
    return Field(schema, check, Support.SUPPORTED, text, is_required=is_required)


def sampled(name: str, schema: Schema, text: str, *, then: Check | None = None) -> Field:
    """Return the row of a field that `SamplingParams` has under the same name, with a range.

    Args:
        name: The field.
        schema: Its type, to which the range is added.
        text: What it does.
        then: Brings a value of the type into the form that `SamplingParams` has.
    """
    check = check_of(schema) if then is None else _both(check_of(schema), then)
    limits = range_schema(name)
    schema = _with_limits(schema, limits)
    return Field(schema, in_range(name, check), Support.SUPPORTED, text)


def _with_limits(schema: Schema, limits: Schema) -> Schema:
    """Return a schema with further limits; a text stands for an array of it."""
    if "anyOf" in schema:
        return {"anyOf": [_with_limits(branch, limits) for branch in schema["anyOf"]]}
    if "items" in schema and "items" in limits:
        items = {**schema["items"], **limits["items"]}
        return {**schema, **limits, "items": items}
    if schema.get("type") == "string":
        return {**schema, **limits.get("items", {})}
    return {**schema, **limits}


def no_effect(schema: Schema | FieldTable, text: str) -> Field:
    """Return the row of a field that changes nothing, which `text` explains."""
    schema = schema_of(schema)
    return Field(schema, check_of(schema), Support.NO_EFFECT, text)


def not_yet(
    schema: Schema | FieldTable,
    text: str,
    *,
    neutral: tuple[object, ...] = (),
    then: Check | None = None,
) -> Field:
    """Return the row of a field that only its neutral values may have, or null.

    Args:
        schema: Its schema, or the table of an object.
        text: What it does where it is supported.
        neutral: The accepted values.
        then: Refuses a value that the schema accepts with an error of its own.
    """
    schema = schema_of(schema)
    check = check_of(schema) if then is None else _both(check_of(schema), then)
    return Field(schema, check, Support.NOT_YET, text, neutral)
