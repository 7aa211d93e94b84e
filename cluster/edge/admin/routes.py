"""Table of the admin routes, and the OpenAPI document made from it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from cluster.edge.admin.cluster import MAX_PROFILE_S, ReplicaView
from cluster.edge.openapi_schemas import SCHEMAS, ref
from replicas.messages import PAUSE_MODES

if TYPE_CHECKING:
    from cluster.edge.openapi_schemas import JsonSchema

_FLAG: JsonSchema = {"enum": ["true", "false", "1", "0"]}
_NAME: JsonSchema = {"type": "string"}
_TARGET = {"replica": _NAME, "pool": _NAME}
_JSON = "application/json"


class RoleChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a change of role.

    Attributes:
        role: The new role.
    """

    role: Literal["prefill", "decode"]


class Replicas(msgspec.Struct, frozen=True):
    """All replicas.

    Attributes:
        replicas: Sorted by name.
    """

    replicas: list[ReplicaView]


class Done(msgspec.Struct, frozen=True):
    """Answer to an order that all replicas have carried out.

    Attributes:
        status: paused, resumed or reset.
    """

    status: str


class Paused(msgspec.Struct, frozen=True):
    """Whether engines are paused.

    Attributes:
        is_paused: Whether all are.
        replicas: Whether each one is, by name.
    """

    is_paused: bool
    replicas: dict[str, bool]


@dataclass(frozen=True, slots=True)
class AdminRoute:
    """One admin route.

    Attributes:
        name: Name of its handler.
        path: Starlette's path pattern.
        summary: Its purpose, in a few words.
        method: Its method; a POST changes something in the cluster, and is logged.
        answer: Its answer; None: the body is empty, or any JSON.
        body: Its body; None: it needs none.
        query: Parameters of the query.
        statuses: Statuses of its errors, besides those of all routes.
        is_open: Whether it needs no key.
        is_for_all_keys: Whether the key of any tenant will do, not only of an admin.
    """

    name: str
    path: str
    summary: str
    method: Literal["GET", "POST"] = "GET"
    answer: type[msgspec.Struct] | None = None
    body: type[msgspec.Struct] | None = None
    query: dict[str, JsonSchema] = field(default_factory=dict)
    statuses: tuple[int, ...] = ()
    is_open: bool = False
    is_for_all_keys: bool = False


def _order(name: str, summary: str, **query: JsonSchema) -> AdminRoute:
    return AdminRoute(
        name, f"/{name}", summary, "POST", Done, query={**_TARGET, **query}, statuses=(404, 503)
    )


def _change(name: str, summary: str, body: type[msgspec.Struct] | None = None) -> AdminRoute:
    path = f"/replicas/{{replica}}/{name}"
    return AdminRoute(name, path, summary, "POST", ReplicaView, body, statuses=(404, 409, 503))


ROUTES = (
    AdminRoute("replicas", "/replicas", "List the replicas and their states", answer=Replicas),
    AdminRoute(
        "replica", "/replicas/{replica}", "Show a replica", answer=ReplicaView, statuses=(404, 503)
    ),
    _change("drain", "Take no more requests, and hand over those that run"),
    _change("undrain", "Take requests again"),
    _change("role", "Take another role, once requests of the old one have ended", RoleChange),
    AdminRoute(
        "profile", "/replicas/{replica}/profile",
        "Profile an engine: stacks of its core thread, in the folded form of flame graphs", "POST",
        query={"seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_PROFILE_S}},
        statuses=(404, 503),
    ),
    # The names and parameters of vLLM's routes; replica and pool are ours.
    _order("pause", "Pause engines", mode={"enum": [*PAUSE_MODES]}, clear_cache=_FLAG),
    _order("resume", "End the pause of engines"),
    AdminRoute(
        "is_paused", "/is_paused", "Tell which engines are paused", answer=Paused, query=_TARGET,
        statuses=(404, 503),
    ),
    _order("reset_prefix_cache", "Forget cached blocks", reset_running_requests=_FLAG),
    AdminRoute("live", "/live", "Tell whether the admin server runs", is_open=True),
    AdminRoute("metrics", "/metrics", "Show this server's metrics", is_for_all_keys=True),
    AdminRoute("openapi", "/openapi.json", "Show this document"),
)  # fmt: skip


def openapi_document(version: str, *, has_keys: bool) -> dict[str, Any]:
    """Return the OpenAPI document of the admin routes.

    Args:
        version: ttserve's version.
        has_keys: Whether routes need an API key.
    """
    structs = [ReplicaView, Replicas, Done, Paused, RoleChange]
    _, schemas = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    components: dict[str, Any] = {"schemas": {**schemas, "Error": SCHEMAS["Error"]}}
    if has_keys:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths[route.path] = {route.method.lower(): _operation(route, has_keys=has_keys)}
    info = {"title": "ttserve admin", "version": version}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _operation(route: AdminRoute, *, has_keys: bool) -> dict[str, Any]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": _NAME}
        for name in re.findall(r"{(\w+)}", route.path)
    ]
    in_query = [{"name": n, "in": "query", "schema": schema} for n, schema in route.query.items()]
    answer: dict[str, Any] = {"description": "The answer."}
    if route.answer is not None:
        answer["content"] = {_JSON: {"schema": ref(route.answer.__name__)}}
    statuses = {400, 421, 500, *route.statuses}
    if route.method == "POST":
        statuses |= {408, 413, 415}
    described: dict[str, Any] = {
        "operationId": route.name, "summary": route.summary, "parameters": [*in_path, *in_query],
    }  # fmt: skip
    if has_keys and not route.is_open:
        statuses |= {401, 403}
        described["security"] = [{"bearer": []}]
    if route.body is not None:
        content = {_JSON: {"schema": ref(route.body.__name__)}}
        described["requestBody"] = {"required": True, "content": content}
    elif route.method == "POST":
        described["requestBody"] = {"content": {_JSON: {"schema": {"type": "object"}}}}
    error = {"description": "An error.", "content": {_JSON: {"schema": ref("Error")}}}
    answers = {"200": answer}
    if route.method == "POST" and route.answer is ReplicaView:
        answers["202"] = {**answer, "description": "The change is ordered and not complete yet."}
    described["responses"] = {**answers, **{str(s): error for s in sorted(statuses)}}
    return described
