"""JSON answers, and errors before the first byte, in the form of their path's API."""

from __future__ import annotations

import logging

import orjson
from starlette.responses import Response

from cluster.edge.apis import api_of
from cluster.errors import BadRequestError, InternalError, ServingError
from replicas.errors import InvalidRequestError

logger = logging.getLogger(__name__)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of Prometheus' text format."""
_DEFAULT_RETRY_AFTER_S = 1


def json_response(body: object, status: int = 200) -> Response:
    """Return a response with a JSON body."""
    return Response(orjson.dumps(body), status, media_type="application/json")


def error_response(error: ServingError, path: str, request_id: str | None = None) -> Response:
    """Return the response of an error, with `Retry-After` where a retry makes sense.

    Args:
        error: The error.
        path: The request's path, which decides the form of the answer.
        request_id: Id of the request; None if it was refused before it had one.
    """
    api = api_of(path)
    response = json_response(api.error_body(error, request_id), api.error_status(error))
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    retry_after_s = error.retry_after_s
    if retry_after_s is None and error.status == 429:
        retry_after_s = _DEFAULT_RETRY_AFTER_S
    if retry_after_s is not None:
        response.headers["retry-after"] = str(retry_after_s)
    return response


def to_serving_error(error: Exception, request_id: str) -> ServingError:
    """Return the error that the client sees for an exception; log an unexpected one."""
    if isinstance(error, ServingError):
        return error
    if isinstance(error, InvalidRequestError):
        return BadRequestError(str(error), param=error.param)
    logger.error("request %s failed with an internal error", request_id, exc_info=error)
    return InternalError(f"internal error; see the server's log for request {request_id}")
