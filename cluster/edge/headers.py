"""Headers with a meaning: Ray Serve's and our own, which no client may send; those of admission."""

from __future__ import annotations

import math
from email.message import Message
from typing import TYPE_CHECKING

from cluster.config.schema import MAX_TENANT_CHARS
from cluster.errors import BadRequestError, UnsupportedMediaTypeError

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from cluster.config.schema import AdmissionConfig

SERVE_HEADERS = (
    "x-request-(timeout-seconds|disconnect-disabled)|serve[-_]multiplexed[-_]model[-_]id"
    "|x[-_]session[-_]id|x-serve-router-.*"
)
"""Regular expression over a name in lower case. These headers switch off Serve's deadline and its
watch for clients that leave, choose a replica, or claim to come from its router. Serve decodes them
as UTF-8 before the application could refuse them.

Source: serve/_private/constants.py and http_util.py of Ray 2.60.
"""

INTERNAL_HEADERS = f"^({SERVE_HEADERS}|x-ttserve-.*)$"
"""Regular expression over every name that the first server of ours removes from a request."""

LISTENER_HEADER = "x-ttserve-listener"
"""Which listener a request came by: `OPERATIONS`, or anything else for the public one."""
OPERATIONS = "operations"

PROOF_HEADER = "x-ttserve-front"
"""HAProxy's proof that it has set the others, see `cluster.config.ray_auth.front_proof`."""
BOUND_HEADER = "x-ttserve-bound"
"""`LOOPBACK` where that listener has a loopback address, which other hosts cannot reach."""
LOOPBACK = "loopback"

SOURCE_HEADER = "x-ttserve-source"
"""Address of the client, or of its IPv6 network of 64 bits, as the first server of ours saw it."""

DISABLE_SERVE_WATCH = (
    (b"x-request-disconnect-disabled", b"?1"),
    (b"x-request-timeout-seconds", b"0"),
)
"""Say to Serve that somebody else watches whether the client leaves, and has deadlines: for either
it would run the request in a task of its own, which nobody could end from outside."""

TTFT_HEADER, TPOT_HEADER = "x-slo-ttft-ms", "x-slo-tpot-ms"
"""What a request says of its own objectives, in milliseconds; the names are llm-d's."""


def is_enabled(headers: Headers, name: str) -> bool:
    """Whether a header is there, and says anything but no."""
    return headers.get(name, "0") not in {"", "0", "false"}


def require_json(headers: Headers) -> None:
    """Refuse a body that does not call itself JSON in UTF-8.

    A browser sends a page's `text/plain` or form to any host unasked; for `application/json` it
    first asks that host for permission, which this edge never gives.

    Raises:
        UnsupportedMediaTypeError: There is no content type, or one of another kind or charset.
    """
    given = headers.getlist("content-type")
    if not given or not all(map(_is_json, given)):
        raise UnsupportedMediaTypeError(
            "send the header Content-Type: application/json, and the body as JSON in UTF-8"
        )


def _is_json(content_type: str) -> bool:
    header = Message()
    header["content-type"] = content_type
    charset = header.get_param("charset", "utf-8")
    is_utf8 = isinstance(charset, str) and charset.lower() == "utf-8"
    return header.get_content_type() == "application/json" and is_utf8


def admission_fields(headers: Headers, admission: AdmissionConfig | None) -> dict[str, object]:
    """Fields of an `EngineRequest` that headers say: tenant and objectives, where these count.

    Raises:
        BadRequestError: An objective is no positive number.
    """
    if admission is None:
        return {}
    fields: dict[str, object] = {}
    if admission.tenant_header is not None:
        fields["tenant"] = _tenant(headers, admission.tenant_header)
    for name, field in ((TTFT_HEADER, "ttft_s"), (TPOT_HEADER, "tpot_s")):
        text = headers.get(name)
        if text is not None:
            fields[field] = _positive(name, text) / 1e3
    return fields


def encoding_share(
    headers: Headers, source: str, admission: AdmissionConfig | None
) -> tuple[str, float]:
    """Return on whose share a request's text is encoded, and the weight of that share.

    Args:
        headers: Of the request.
        source: The client's, as `cluster.edge.client_guard` has put it into the request's scope.
        admission: Says whether a header names tenants.

    Raises:
        BadRequestError: The header names more than one tenant.
    """
    if admission is not None and admission.tenant_header is not None:
        tenant = _tenant(headers, admission.tenant_header)
        if tenant:
            known = admission.tenants.get(tenant)
            return f"tenant {tenant}", 1.0 if known is None else known.weight
    return source, 1.0


def cache_salt(tenant: str, given: str, admission: AdmissionConfig | None) -> str:
    """Return the salt under which a request's KV is cached.

    Where a header names tenants the salt begins with the tenant, by its length, so that no salt
    that one tenant gives makes another's.

    Args:
        tenant: Of the request.
        given: The client's own `cache_salt`; "" is none.
        admission: Says whether tenants are named, and share their caches.
    """
    if admission is None or admission.tenant_header is None or admission.share_prefix_cache:
        return given
    return f"{len(tenant)}:{tenant}{given}"


def _tenant(headers: Headers, name: str) -> str:
    """Who is named; two names, or one that would have to be cut, might be somebody else's."""
    given = set(headers.getlist(name))
    # Whoever is between may write two headers as one.
    if len(given) > 1 or any("," in tenant for tenant in given):
        raise BadRequestError(f"the header {name} names more than one tenant", param=name)
    tenant = given.pop() if given else ""
    if len(tenant) > MAX_TENANT_CHARS:
        raise BadRequestError(
            f"the header {name} may have {MAX_TENANT_CHARS} characters", param=name
        )
    return tenant


def _positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise BadRequestError(f"the header {name} must be milliseconds, more than 0", param=name)
    return value
