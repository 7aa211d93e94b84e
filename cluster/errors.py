"""Errors that clients see, with their HTTP status, and the error of a bad configuration."""

from __future__ import annotations


class ServingError(Exception):
    """Base of every error that a client may see.

    Attributes:
        message: What happened and what to do, in one or two sentences.
        status: HTTP status, if nothing has been sent yet.
        type: The OpenAI-style error type.
        param: The request field at fault, or None.
        code: A stable word for programs.
        retry_after_s: Seconds after which a retry makes sense, or None.
    """

    status: int = 500
    type: str = "InternalServerError"
    code: str = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequestError(ServingError):
    """The request can never work as it stands."""

    status = 400
    type = "BadRequestError"
    code = "bad_request"


class ThreadsUnsupportedError(BadRequestError):
    """The request asks for a conversation that the server keeps; `code` is Anthropic's."""

    code = "thread_unsupported_request"

    def __init__(self) -> None:
        super().__init__("thread is not supported: send the whole conversation", param="thread")


class PayloadTooLargeError(ServingError):
    """The body is larger than the edge reads."""

    status = 413
    type = "BadRequestError"
    code = "payload_too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the body is larger than the limit of {limit_bytes} bytes")


class UnsupportedMediaTypeError(ServingError):
    """The content type is not JSON."""

    status = 415
    type = "BadRequestError"
    code = "unsupported_media_type"


class AuthenticationError(ServingError):
    """The request has no valid API key."""

    status = 401
    type = "AuthenticationError"
    code = "invalid_api_key"


class PermissionDeniedError(ServingError):
    """The request's API key is valid, but not for this route."""

    status = 403
    type = "PermissionDeniedError"
    code = "permission_denied"


class NotFoundError(ServingError):
    """The model, or the path, does not exist here."""

    status = 404
    type = "NotFoundError"
    code = "not_found"


class MethodNotAllowedError(ServingError):
    """The path exists, but not with this method."""

    status = 405
    type = "BadRequestError"
    code = "method_not_allowed"


class MisdirectedError(ServingError):
    """The `Host` header names another server."""

    status = 421
    type = "BadRequestError"
    code = "misdirected"


class SaturatedError(ServingError):
    """A limit is reached, such as the queue's or that of open requests."""

    status = 429
    type = "RateLimitError"
    code = "saturated"


class OverloadedError(ServingError):
    """The request would miss its objective and was not started."""

    status = 429
    type = "RateLimitError"
    code = "overloaded"


class QuotaError(ServingError):
    """The tenant has reached its limit of open requests, or of requests or tokens a minute."""

    status = 429
    type = "RateLimitError"
    code = "quota"


class QueueTimeoutError(ServingError):
    """The request waited too long for a slot."""

    status = 408
    type = "TimeoutError"
    code = "queue_timeout"


class BodyTimeoutError(ServingError):
    """The body took too long to arrive."""

    status = 408
    type = "TimeoutError"
    code = "body_timeout"


class DeadlineError(ServingError):
    """The request took longer than `request_timeout_s`."""

    status = 408
    type = "TimeoutError"
    code = "request_timeout"


class NotReadyError(ServingError):
    """No replica is ready to serve."""

    status = 503
    type = "ServiceUnavailableError"
    code = "not_ready"


class IngressLeavingError(ServingError):
    """The ingress of an open request ends, and the request was not done within its drain time."""

    status = 503
    type = "ServiceUnavailableError"
    code = "ingress_leaving"


class TokensDifferError(ServingError):
    """A broken stream cannot be resumed because the rerun has other tokens."""

    status = 409
    type = "ConflictError"
    code = "tokens_differ"


class ReplicaLostError(ServingError):
    """The replica that ran the request died and the request could not be moved."""

    status = 503
    type = "ReplicaLostError"
    code = "replica_lost"


class KVTransferFailedError(ServingError):
    """The prompt's KV did not arrive, and `kv_load_failure_policy` forbids recomputing it."""

    status = 503
    type = "KVTransferFailedError"
    code = "kv_transfer_failed"


class InternalError(ServingError):
    """A bug or an engine error; the log has the details under the request's id."""

    status = 500
    type = "InternalServerError"
    code = "internal_error"


class ClusterConfigError(Exception):
    """A cluster configuration that cannot work; the message names the key and what to change."""
