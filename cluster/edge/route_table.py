"""Table of an ingress's routes, shared by the application and HAProxy. Pure.

The application builds its routes from `ROUTES` (`cluster.edge.routes`), and HAProxy's rules are
generated from the same table (`cluster.lifecycle.haproxy`), so the two cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Listener = Literal["both", "operations"]
Method = Literal["GET", "POST", "DELETE"]
Access = Literal["open", "key", "admin"]

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
"""Methods whose requests may be repeated, on any path."""


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One route.

    Attributes:
        name: Name of its handler.
        path: Starlette's path pattern.
        method: Its method; GET includes HEAD.
        listener: "operations" if only operators may use it, else "both".
        is_counted: Whether an open request counts against `args.ingress.max_ongoing_requests`.
            Never for a health check, which a full ingress must answer, too.
        is_repeatable: Whether HAProxy may send a POST again if its ingress died without an answer.
            Only if doing the work twice has no visible effect.
        is_readiness: Whether it says if requests should come to this host; while the host leaves,
            HAProxy answers it with 503.
        access: With API keys, who may use it: all clients, any key, or a key of an admin.
    """

    name: str
    path: str
    method: Method = "GET"
    listener: Listener = "both"
    is_counted: bool = False
    is_repeatable: bool = False
    is_readiness: bool = False
    access: Access = "key"


def _post(name: str, path: str) -> RouteSpec:
    """Return a route that computes an answer; what it may store dies with its ingress."""
    return RouteSpec(name, path, "POST", is_counted=True, is_repeatable=True)


def _operations(name: str, path: str) -> RouteSpec:
    return RouteSpec(name, path, listener="operations", access="admin")


ROUTES = (
    _post("completions", "/v1/completions"),
    _post("chat_completions", "/v1/chat/completions"),
    _post("messages", "/v1/messages"),
    _post("count_tokens", "/v1/messages/count_tokens"),
    _post("generate_tokens", "/inference/v1/generate"),
    _post("responses", "/v1/responses"),
    # Else its path would be that of a response, which has no POST.
    RouteSpec("compact_response", "/v1/responses/compact", "POST"),
    RouteSpec("response", "/v1/responses/{response_id}"),
    RouteSpec("delete_response", "/v1/responses/{response_id}", "DELETE"),
    RouteSpec("response_input_items", "/v1/responses/{response_id}/input_items"),
    RouteSpec("cancel_response", "/v1/responses/{response_id}/cancel", "POST"),
    _post("embeddings", "/v1/embeddings"),
    _post("rerank", "/v1/rerank"),
    RouteSpec("models", "/v1/models"),
    RouteSpec("model", "/v1/models/{model_id:path}"),
    _post("tokenize", "/tokenize"),
    _post("detokenize", "/detokenize"),
    RouteSpec("health", "/health", is_readiness=True, access="open"),
    RouteSpec("live", "/live", access="open"),
    # The names of SageMaker and of KServe for the same.
    RouteSpec("ping", "/ping", is_readiness=True, access="open"),
    RouteSpec("post_ping", "/ping", "POST", is_readiness=True, access="open"),
    RouteSpec("v2_ready", "/v2/health/ready", is_readiness=True, access="open"),
    RouteSpec("v2_live", "/v2/health/live", access="open"),
    RouteSpec("load", "/load"),
    RouteSpec("version", "/version"),
    RouteSpec("openapi", "/openapi.json"),
    RouteSpec("docs", "/docs"),
    _operations("health_generate", "/health_generate"),
    # A monitoring system needs no rights of an admin.
    RouteSpec("metrics", "/metrics", listener="operations"),
    _operations("kv", "/kv"),
    _operations("slots", "/debug/slots"),
    _operations("route", "/debug/routes/{request_id:path}"),
)

KNOWN_METHODS = tuple(sorted({*SAFE_METHODS, *(spec.method for spec in ROUTES)}))
"""HAProxy refuses all other methods."""

_OPEN_CALLS = {(spec.method, spec.path) for spec in ROUTES if spec.access == "open"}


def is_open(method: str, path: str) -> bool:
    """Return whether a path, perhaps below a root path, ends as that of a route without keys."""
    return any(method == of_route and path.endswith(end) for of_route, end in _OPEN_CALLS)


REPEATABLE_PATHS = tuple(spec.path for spec in ROUTES if spec.is_repeatable)
"""Paths whose POST may be repeated."""

READINESS_PATHS = tuple(sorted({spec.path for spec in ROUTES if spec.is_readiness}))
"""Paths that are not ready while their host leaves."""
