"""Reading of JSON bodies within their limits, and of the fields in them that nothing reads."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from cluster.edge.fields import remove_unknown_fields
from cluster.edge.headers import require_json
from cluster.edge.openai_requests import parse_body
from cluster.errors import PayloadTooLargeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.requests import Request

    from cluster.config.schema import IngressConfig
    from cluster.edge.fields import FieldTable
    from cluster.edge.openai_limits import BodyLimits

IGNORED_FIELDS = "ignored_fields"
"""Key of a request's scope: value of `IGNORED_FIELDS_HEADER`."""
IGNORED_FIELDS_HEADER = "x-ttserve-ignored-fields"
"""Header of an answer that names the fields of the request that were ignored."""
_MAX_NAMED_FIELDS = 16
_MAX_PATH_CHARS = 96
_NOT_NAME = re.compile(r"[^A-Za-z0-9_.$\[\]-]")


async def read_json_body(
    request: Request, table: FieldTable, limits: BodyLimits, ingress: IngressConfig
) -> dict[str, Any]:
    """Return the JSON object of a request's body.

    Fields that no table has are removed, at any depth, unless the configuration refuses them. The
    request's scope then names them.

    Raises:
        UnsupportedMediaTypeError: The content type is not JSON.
        PayloadTooLargeError: The body's declared or actual size exceeds `ingress.max_body_bytes`.
        BadRequestError: See `parse_body`.
    """
    require_json(request.headers)
    body = parse_body(await _read(request, ingress.max_body_bytes), limits)
    if ingress.unknown_fields == "ignore":
        removed = remove_unknown_fields(body, table)
        if removed:
            request.scope[IGNORED_FIELDS] = _named(removed)
    return body


def _named(paths: Sequence[str]) -> bytes:
    """Return the first of several paths, which clients choose, as a safe value of a header."""
    names = [_NOT_NAME.sub("?", path[:_MAX_PATH_CHARS]) for path in paths[:_MAX_NAMED_FIELDS]]
    if len(paths) > _MAX_NAMED_FIELDS:
        names.append(f"and {len(paths) - _MAX_NAMED_FIELDS} more")
    return ", ".join(names).encode()


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise PayloadTooLargeError(max_bytes)
    chunks = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise PayloadTooLargeError(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)
