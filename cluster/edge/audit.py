"""The audit log: one line for each call of a route that changes something in the cluster.

A line has no key, and of the body only checked values.
"""

from __future__ import annotations

import datetime
import json
import logging
from typing import TYPE_CHECKING

from cluster.edge.tenants import tenant_of

if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from typing import Any

logger = logging.getLogger("ttserve.audit")

_SCOPE_KEY = "ttserve.audit"
_MAX_QUERY_CHARS = 256


def mark(scope: MutableMapping[str, Any]) -> None:
    """Have a request logged when it is answered."""
    scope[_SCOPE_KEY] = {}


def add_detail(scope: MutableMapping[str, Any], name: str, value: str) -> None:
    """Add a checked value of the body to the line of a marked request."""
    scope[_SCOPE_KEY][name] = value


def record(scope: MutableMapping[str, Any], status: int) -> None:
    """Log a marked request that is answered with a status, also if it was refused."""
    if _SCOPE_KEY not in scope:
        return
    query = scope["query_string"].decode("latin-1")[:_MAX_QUERY_CHARS]
    call = {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds"),
        "tenant": tenant_of(scope).name,
        "source": (scope.get("client") or ("",))[0],
        "request_id": scope["request_id"],
        "call": f"{scope['method']} {scope['path']}" + (f"?{query}" if query else ""),
        **scope[_SCOPE_KEY],
        "status": status,
    }
    # A warning, because it is shown without any configuration of logging.
    logger.warning("admin call %s", json.dumps(call))
