"""Parameters in the query of a request. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.edge.fields import bad_field, shown

if TYPE_CHECKING:
    from collections.abc import Mapping


def flag(query: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Return a boolean of a query.

    Raises:
        BadRequestError: It is neither true nor false.
    """
    value = query.get(name, str(default)).lower()
    if value not in {"true", "false", "1", "0"}:
        raise bad_field(name, f"must be true or false, got {shown(value)}")
    return value in {"true", "1"}
