"""Reading of JSON bodies within their limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.edge.headers import require_json
from cluster.edge.openai_requests import parse_body
from cluster.errors import PayloadTooLargeError

if TYPE_CHECKING:
    from starlette.requests import Request

    from cluster.edge.openai_limits import BodyLimits


async def read_json_body(request: Request, max_bytes: int, limits: BodyLimits) -> dict[str, Any]:
    """Return the JSON object of a request's body.

    Raises:
        UnsupportedMediaTypeError: The content type is not JSON.
        PayloadTooLargeError: The body's declared or actual size exceeds `max_bytes`.
        BadRequestError: See `parse_body`.
    """
    require_json(request.headers)
    return parse_body(await _read(request, max_bytes), limits)


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
