"""Which words a configuration may have at a place, for whoever wrote another one. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from msgspec import inspect

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def literal_values_at(kind: type[Any], path: str, *, is_key: bool = False) -> list[str]:
    """The words that may be at a path as msgspec writes it, like ".pools[...].role".

    Args:
        kind: What the path begins in.
        path: To the place.
        is_key: Whether it is about a key of what is there, not about what is there.

    Returns:
        Nothing where no word is wanted.
    """
    kinds: Iterable[inspect.Type] = [inspect.type_info(kind)]
    for field in re.findall(r"\.(\w+)|\[[^]]*\]", path):
        kinds = [below for each in _members(kinds) for below in _below(each, field)]
    if is_key:
        kinds = [each.key_type for each in _members(kinds) if isinstance(each, inspect.DictType)]
    found = [each for each in _members(kinds) if isinstance(each, inspect.LiteralType)]
    return [str(word) for literal in found for word in literal.values]


def _members(kinds: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    """The same, with the members of unions in their place."""
    for kind in kinds:
        yield from kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _below(kind: inspect.Type, field: str) -> list[inspect.Type]:
    """What a field is; each value where none is named."""
    if isinstance(kind, inspect.StructType):
        return [each.type for each in kind.fields if each.encode_name == field]
    if isinstance(kind, inspect.DictType):
        return [kind.value_type]
    return [kind.item_type] if isinstance(kind, inspect.ListType) else []
