"""Metrics of the admin server, and the ASGI middleware that counts its calls.

Owner: an `AdminMetrics` belongs to one server, and only its event loop uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, generate_latest

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from typing import Any

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ROUTE = "ttserve.admin_route"


class AdminMetrics:
    """The metrics that the admin server counts since its start.

    Attributes:
        registry: Holds all of them.
        requests: Answered calls, by route and status.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "ttserve_admin_requests",
            "Answered calls of the admin server's routes, refused ones included",
            ["route", "status"],
            registry=self.registry,
        )

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def counting(self, app: ASGIApp) -> ASGIApp:
        """Return an application whose answers are counted, if `name_route` names their route."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            async def count_and_send(message: Message) -> None:
                if message["type"] == "http.response.start" and _ROUTE in scope:
                    self.requests.labels(scope[_ROUTE], message["status"]).inc()
                await send(message)

            await app(scope, receive, count_and_send)

        return counted


def name_route(scope: MutableMapping[str, Any], route: str) -> None:
    """Name the route of a call, by which it is counted."""
    scope[_ROUTE] = route
