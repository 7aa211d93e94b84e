"""Allowed values of the `Literal` types in a schema, for error messages. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from msgspec import inspect

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def literal_values_at(kind: type[Any], path: str, *, is_key: bool = False) -> list[str]:
    """Return the literal values that the schema allows at a path.

    Args:
        kind: The type that the path starts from.
        path: Path as msgspec writes it, such as ".pools[...].role".
        is_key: Whether the keys of the mapping at the path are meant, not its value.

    Returns:
        The allowed values; empty if the type there is not a `Literal`.
    """
    kinds: Iterable[inspect.Type] = [inspect.type_info(kind)]
    for field in re.findall(r"\.(\w+)|\[[^]]*\]", path):
        kinds = [below for each in _members(kinds) for below in _below(each, field)]
    if is_key:
        kinds = [each.key_type for each in _members(kinds) if isinstance(each, inspect.DictType)]
    found = [each for each in _members(kinds) if isinstance(each, inspect.LiteralType)]
    return [str(word) for literal in found for word in literal.values]


def _members(kinds: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    """Yield the types, with each union replaced by its members."""
    for kind in kinds:
        yield from kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _below(kind: inspect.Type, field: str) -> list[inspect.Type]:
    """Return the types one path step below a type: of the named field, or of each item."""
    if isinstance(kind, inspect.StructType):
        return [each.type for each in kind.fields if each.encode_name == field]
    if isinstance(kind, inspect.DictType):
        return [kind.value_type]
    return [kind.item_type] if isinstance(kind, inspect.ListType) else []
