"""Errors about a translated request, in the names of the client's own body. Pure."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from cluster.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager


class WholeField(str):
    """The client's path of a field that has no fields below it, and stands for all of them."""

    __slots__ = ()


def naming_fields(names: Mapping[str, str]) -> AbstractContextManager[None]:
    """Give each BadRequestError of the block the client's path of its field.

    Args:
        names: For a path in the translated request that of the client's body. A path also stands
            for all paths below it; the longest one counts. Paths without an entry stay.
    """
    return _naming_fields(names) if names else _UNCHANGED


_UNCHANGED = contextlib.nullcontext()


@contextlib.contextmanager
def _naming_fields(names: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except BadRequestError as error:
        renamed = _renamed(error, names)
        if renamed is error:
            raise
        raise renamed from error


def _renamed(error: BadRequestError, names: Mapping[str, str]) -> BadRequestError:
    path = error.param
    if path is None:
        return error
    above = [name for name in names if path == name or path.startswith((f"{name}.", f"{name}["))]
    if not above:
        return error
    longest = max(above, key=len)
    own = names[longest]
    if not isinstance(own, WholeField):
        own += path[len(longest) :]
    return BadRequestError(error.message.replace(path, own, 1), param=own)
