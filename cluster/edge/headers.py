"""Request headers: those of Serve and ttserve, which no client may send, and those of admission."""

from __future__ import annotations

import math
from email.message import Message
from typing import TYPE_CHECKING

from cluster.config.schema import MAX_TENANT_CHARS
from cluster.edge.tenants import NO_TENANT, Tenant
from cluster.errors import BadRequestError, UnsupportedMediaTypeError

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from cluster.config.schema import AdmissionConfig

SERVE_HEADERS = (
    "x-request-(timeout-seconds|disconnect-disabled)|serve[-_]multiplexed[-_]model[-_]id"
    "|x[-_]session[-_]id|x-serve-router-.*"
)
"""Regular expression for Serve's headers, in lower case. They switch off Serve's deadline and its
watch for disconnects, choose a replica, or claim to come from Serve's router. Serve decodes them as
UTF-8 before the application could refuse them.

Source: serve/_private/constants.py and http_util.py of Ray 2.60.
"""

INTERNAL_HEADERS = f"^({SERVE_HEADERS}|x-ttserve-.*)$"
"""Regular expression for every header that the first server of the cluster removes."""

LISTENER_HEADER = "x-ttserve-listener"
"""Listener that accepted the request: `OPERATIONS`, or anything else for the public one."""
OPERATIONS = "operations"

PROOF_HEADER = "x-ttserve-front"
"""HAProxy's proof that it set the other headers, see `cluster.config.ray_auth.front_proof`."""
BOUND_HEADER = "x-ttserve-bound"
"""`LOOPBACK` if that listener has a loopback address, which other hosts cannot reach."""
LOOPBACK = "loopback"

SOURCE_HEADER = "x-ttserve-source"
"""Client address, or its IPv6 network of 64 bits, as the first server of the cluster saw it."""

DISABLE_SERVE_WATCH = (
    (b"x-request-disconnect-disabled", b"?1"),
    (b"x-request-timeout-seconds", b"0"),
)
"""Headers that switch off Serve's deadline and its watch for disconnects. For either, Serve would
run the request in a task of its own, which the client guard could not cancel."""

TTFT_HEADER, TPOT_HEADER = "x-slo-ttft-ms", "x-slo-tpot-ms"
"""A request's own objectives, in milliseconds; the names are those of llm-d."""


def is_enabled(headers: Headers, name: str) -> bool:
    """Return whether a header is present with a value other than "", "0" and "false"."""
    return headers.get(name, "0") not in {"", "0", "false"}


def require_json(headers: Headers) -> None:
    """Refuse a body whose content type is not JSON in UTF-8.

    A browser lets any page send `text/plain` or a form to any host. For `application/json` it first
    asks the host for permission (CORS). Only pages of `cors_origins` get it, and never for the
    operations routes.

    Raises:
        UnsupportedMediaTypeError: The content type is missing, or not JSON in UTF-8.
    """
    given = headers.getlist("content-type")
    if not given or not all(map(_is_json, given)):
        raise UnsupportedMediaTypeError(
            "send the header Content-Type: application/json, and the body as JSON in UTF-8"
        )


def _is_json(content_type: str) -> bool:
    if content_type == "application/json":  # as most clients send it
        return True
    header = Message()
    header["content-type"] = content_type
    charset = header.get_param("charset", "utf-8")
    is_utf8 = isinstance(charset, str) and charset.lower() == "utf-8"
    return header.get_content_type() == "application/json" and is_utf8


def admission_fields(
    headers: Headers, tenant: Tenant, admission: AdmissionConfig | None
) -> dict[str, object]:
    """Return the `EngineRequest` fields of admission: tenant, and objectives from headers.

    Raises:
        BadRequestError: An objective is not a positive number.
    """
    fields: dict[str, object] = {"tenant": tenant.name}
    if admission is None:
        return fields
    for name, field in ((TTFT_HEADER, "ttft_s"), (TPOT_HEADER, "tpot_s")):
        text = headers.get(name)
        if text is not None:
            fields[field] = _positive(name, text) / 1e3
    return fields


def header_tenant(headers: Headers, admission: AdmissionConfig | None) -> Tenant:
    """Return the tenant that a gateway names in the header of tenants, if there is one.

    Raises:
        BadRequestError: The header names more than one tenant.
    """
    if admission is None or admission.tenant_header is None:
        return NO_TENANT
    name = _tenant(headers, admission.tenant_header)
    known = admission.tenants.get(name)
    return Tenant(name) if known is None else Tenant.limited(name, known, weight=known.weight)


def _tenant(headers: Headers, name: str) -> str:
    """Return the tenant's name; refuse several or overlong ones, which could hit another tenant."""
    given = set(headers.getlist(name))
    # A proxy may join two headers into one, separated by a comma.
    if len(given) > 1 or any("," in tenant for tenant in given):
        raise BadRequestError(f"the header {name} names more than one tenant", param=name)
    tenant = given.pop() if given else ""
    if len(tenant) > MAX_TENANT_CHARS:
        raise BadRequestError(
            f"the header {name} must have at most {MAX_TENANT_CHARS} characters", param=name
        )
    return tenant


def _positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise BadRequestError(f"the header {name} must be milliseconds above 0", param=name)
    return value
