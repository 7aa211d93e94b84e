"""JSON answers, and the form of an error that is sent before the first byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from starlette.responses import Response

from cluster.edge.openai_responses import error_body

if TYPE_CHECKING:
    from cluster.errors import ServingError

_DEFAULT_RETRY_AFTER_S = 1


def json_response(body: object, status: int = 200) -> Response:
    """Return a response with a JSON body."""
    return Response(orjson.dumps(body), status, media_type="application/json")


def error_response(error: ServingError) -> Response:
    """Return the response of an error, with `Retry-After` where a retry makes sense."""
    response = json_response(error_body(error), error.status)
    retry_after_s = error.retry_after_s
    if retry_after_s is None and error.status == 429:
        retry_after_s = _DEFAULT_RETRY_AFTER_S
    if retry_after_s is not None:
        response.headers["retry-after"] = str(retry_after_s)
    return response
