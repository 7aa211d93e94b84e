"""The OpenAPI document: requests from the tables of fields, routes from the table of routes.

A field of a request shows the schema that its check is derived from. One that is not supported yet
shows the values that are accepted. `OPERATIONS` has the rest: that of a generating API is what the
API says of itself.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cluster import errors
from cluster.edge.anthropic.answers import OVERLOADED
from cluster.edge.anthropic.fields import COUNT_TOKENS_FIELDS
from cluster.edge.apis import APIS
from cluster.edge.fields import FieldTable, Support
from cluster.edge.json_bodies import IGNORED_FIELDS_HEADER
from cluster.edge.openai_fields import DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from cluster.edge.openapi_schemas import SCHEMAS, ref, view_schemas
from cluster.edge.responses.input_items import MAX_LIMIT
from cluster.edge.resume import LAST_EVENT_ID
from cluster.edge.route_table import ROUTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.edge.api import Api
    from cluster.edge.fields import Field, Schema
    from cluster.edge.openapi_schemas import JsonSchema
    from cluster.edge.route_table import Listener, RouteSpec

_VERSION = "3.1.0"
_JSON, _TEXT, _EVENTS = "application/json", "text/plain", "text/event-stream"
_FLAG: JsonSchema = {"enum": ["true", "false", "1", "0"]}
_PATH_PARAMETER = re.compile(r"{(\w+)(?::path)?}")


@dataclass(frozen=True, slots=True)
class Operation:
    """What the document says about a route, besides the route's own row.

    Attributes:
        summary: What it does.
        answer: Name of the schema of its answer; None: the body is empty, or not JSON.
        fields: The fields of its body; None: it has none.
        media: Content type of an answer without a schema; "" if the body is empty.
        is_streamed: Whether the answer may be a stream of events.
        is_resumable: Whether such a stream may be resumed.
        error: Name of the schema of its errors.
        query: Parameters of the query.
        statuses: Names of the schemas of further answers, by status.
        errors: Statuses of its own errors, besides those of all routes of its kind.
    """

    summary: str
    answer: str | None = None
    fields: FieldTable | None = None
    media: str = ""
    is_streamed: bool = False
    is_resumable: bool = True
    error: str = "Error"
    query: dict[str, JsonSchema] = field(default_factory=dict)
    statuses: dict[int, str] = field(default_factory=dict)
    errors: tuple[int, ...] = ()


def _generates(api: type[Api]) -> Operation:
    """Return the operation of a generating API."""
    conflicts = (409,) if api.is_resumable else ()
    return Operation(
        api.summary,
        api.answer_schema,
        api.fields,
        is_streamed="stream" in api.fields,
        is_resumable=api.is_resumable,
        error=api.error_schema,
        errors=(404, 503, *conflicts, *api.more_statuses),
    )


OPERATIONS: dict[str, Operation] = {
    **{api.route: _generates(api) for api in APIS},
    "count_tokens": Operation(
        "Count the tokens of such a conversation",
        "TokenCount",
        COUNT_TOKENS_FIELDS,
        error="AnthropicError",
        errors=(404, OVERLOADED),
    ),
    "compact_response": Operation("Not offered", "Error", errors=(404,)),
    "response": Operation(
        "Show a stored response, or its events",
        "Response",
        is_streamed=True,
        is_resumable=False,
        query={
            "stream": _FLAG,
            "starting_after": {"type": "integer", "minimum": 0},
            "include_obfuscation": _FLAG,
        },
        errors=(404, 429, 503),
    ),
    "response_input_items": Operation(
        "List the items that a stored response has been made from",
        "ResponseItems",
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT},
            "order": {"enum": ["asc", "desc"]},
            "after": {"type": "string"},
        },
        errors=(404, 429),
    ),
    "delete_response": Operation("Forget a stored response", "DeletedResponse", errors=(404, 429)),
    "cancel_response": Operation(
        "Cancel a response in the background", "Response", errors=(404, 429)
    ),
    "models": Operation("List the served models", "Models"),
    "model": Operation("Show a served model", "Model", errors=(404,)),
    "tokenize": Operation(
        "Return the tokens of a text or a conversation", "Tokens", TOKENIZE_FIELDS, errors=(404,)
    ),
    "detokenize": Operation("Return the text of tokens", "Text", DETOKENIZE_FIELDS, errors=(404,)),
    "health": Operation(
        "Tell whether requests can be served; a body says why not all is well",
        statuses={503: "Health"},
    ),
    "live": Operation("Tell whether the ingress runs"),
    "ping": Operation("The same as /health, for SageMaker", statuses={503: "Health"}),
    "post_ping": Operation("The same as /health, for SageMaker", statuses={503: "Health"}),
    "v2_ready": Operation("The same as /health, for KServe", statuses={503: "Health"}),
    "v2_live": Operation("The same as /live, for KServe"),
    "load": Operation("Show the number of open requests of this ingress", "Load"),
    "version": Operation("Show the version", "Version"),
    "openapi": Operation("Show this document", media=_JSON),
    "docs": Operation("Show this document as a page", media="text/html"),
    "health_generate": Operation(
        "Tell whether every replica ends a step; a body says which ones do not",
        statuses={503: "Health"},
        errors=(429,),
    ),
    "metrics": Operation("Show all metrics in Prometheus' text format", media=_TEXT),
    "kv": Operation("Show the KV transfers of all replicas", "TransfersView"),
    "slots": Operation(
        "Show all slots, and the requests of all ingresses that use them", "SlotsView"
    ),
    "route": Operation(
        "Show the routes of the requests with an id", "RoutesView", errors=(404, 429)
    ),
}
"""The operation of each route, by the route's name."""

_OF_ALL = (400, 421, 500)
"""Statuses of any request: the header of tenants, the host, a bug."""
_WITH_KEYS = (401, 403)
_WITH_BODY = (408, 413, 415, 429)


def openapi_document(
    version: str, listener: Listener, *, has_keys: bool, is_closed: bool
) -> dict[str, Any]:
    """Return the OpenAPI document of the routes on a listener.

    Args:
        version: ttserve's version.
        listener: "operations" for the routes on both listeners and for those of operators.
        has_keys: Whether routes need an API key.
        is_closed: Whether unknown fields are refused.
    """
    specs = [spec for spec in ROUTES if listener == "operations" or spec.listener == "both"]
    paths: dict[str, dict[str, Any]] = {}
    for spec in specs:
        path = _PATH_PARAMETER.sub(r"{\1}", spec.path)
        operation = _operation(spec, OPERATIONS[spec.name], has_keys=has_keys)
        paths.setdefault(path, {})[spec.method.lower()] = operation
    components: dict[str, Any] = {"schemas": _schemas(specs, is_closed=is_closed)}
    if has_keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    info = {
        "title": "ttserve",
        "version": version,
        "description": "Language models behind the interfaces of OpenAI, Anthropic and vLLM.",
    }
    return {"openapi": _VERSION, "info": info, "paths": paths, "components": components}


def table_schema(table: FieldTable, *, is_closed: bool) -> JsonSchema:
    """Return the schema of an object with a table; its fields refer to other tables by name."""
    schema: JsonSchema = {
        "type": "object",
        "properties": {name: _property(each) for name, each in table.items()},
        "additionalProperties": not is_closed,
    }
    return {**schema, "required": [*table.required]} if table.required else schema


def tables_of(table: FieldTable) -> dict[str, FieldTable]:
    """Return a table and all that it holds, by name."""
    found = {table.name: table}
    for _, of_object, of_entries in table.nested:
        for nested in (of_object, of_entries):
            if nested is not None and nested.name not in found:
                found |= tables_of(nested)
    return found


def _property(row: Field) -> JsonSchema:
    if row.support is Support.NOT_YET:
        return {"enum": [*row.neutral, None], "description": f"Not supported yet. {row.text}"}
    text = row.text if row.support is Support.SUPPORTED else f"Without effect. {row.text}"
    schema = _plain(row.schema)
    if not row.is_required:
        schema = _or_null(schema)
    return {**schema, "description": text}


def _or_null(schema: JsonSchema) -> JsonSchema:
    if "anyOf" in schema:
        return {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    if "enum" in schema:
        return {"enum": [*schema["enum"], None]}
    if "type" in schema:
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]} if schema else schema


def _plain(schema: Schema) -> JsonSchema:
    """Return a schema with references to tables by their names."""
    if "$ref" in schema:
        return ref(schema["$ref"].name)
    plain = dict(schema)
    for keyword in ("items", "additionalProperties"):
        if keyword in plain:
            plain[keyword] = _plain(plain[keyword])
    if "anyOf" in plain:
        plain["anyOf"] = [_plain(branch) for branch in plain["anyOf"]]
    return plain


def _schemas(specs: list[RouteSpec], *, is_closed: bool) -> dict[str, JsonSchema]:
    """Return all schemas that the operations of routes refer to."""
    tables: dict[str, FieldTable] = {}
    for spec in specs:
        fields = OPERATIONS[spec.name].fields
        if fields is not None:
            tables |= tables_of(fields)
    known = {
        **SCHEMAS,
        **view_schemas(),
        **{name: table_schema(table, is_closed=is_closed) for name, table in tables.items()},
    }
    names = {"Error", "Event", *tables}
    for spec in specs:
        operation = OPERATIONS[spec.name]
        names |= {operation.error, *operation.statuses.values()}
        if operation.answer is not None:
            names.add(operation.answer)
    left = [*names]
    while left:
        more = set(_references(known[left.pop()])) - names
        names |= more
        left += more
    return {name: known[name] for name in sorted(names)}


def _references(schema: object) -> Iterator[str]:
    """Yield the names of the schemas that a schema refers to."""
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref":
                yield value.rpartition("/")[2]
            else:
                yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _operation(spec: RouteSpec, operation: Operation, *, has_keys: bool) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": spec.name,
        "summary": operation.summary,
        "parameters": _parameters(spec, operation),
        "responses": _responses(spec, operation, has_keys=has_keys),
    }
    if operation.fields is not None:
        content = {_JSON: {"schema": ref(operation.fields.name)}}
        described["requestBody"] = {"required": True, "content": content}
    if has_keys and spec.access != "open":
        described["security"] = [{"bearer": []}, {"key": []}]
    return described


def _parameters(spec: RouteSpec, operation: Operation) -> list[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PATH_PARAMETER.findall(spec.path)
    ]
    in_query = [
        {"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()
    ]
    headers = {"x-request-id": "Name of the request in logs, and in the answer."}
    if operation.is_streamed and operation.is_resumable:
        headers[LAST_EVENT_ID] = "Last event of a stream that broke; 0 for one that may be resumed."
    in_header = [
        {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
        for name, text in headers.items()
    ]
    return [*in_path, *in_query, *in_header]


def _responses(spec: RouteSpec, operation: Operation, *, has_keys: bool) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content[_JSON] = {"schema": ref(operation.answer)}
    elif operation.media:
        content[operation.media] = {}
    if operation.is_streamed:
        content[_EVENTS] = {"schema": ref("Event")}
    headers: dict[str, Any] = {"x-request-id": {"schema": {"type": "string"}}}
    if operation.fields is not None:
        text = "Fields of the request that were ignored."
        ignored = {"description": text, "schema": {"type": "string"}}
        headers[IGNORED_FIELDS_HEADER] = ignored
    answer: dict[str, Any] = {"description": "The answer.", "headers": headers}
    responses = {"200": {**answer, "content": content} if content else answer}
    for status, name in operation.statuses.items():
        content = {_JSON: {"schema": {"anyOf": [ref(name), ref("Error")]}}}
        responses[str(status)] = {"description": "It failed.", "content": content}
    statuses = {*_OF_ALL, *operation.errors}
    if operation.fields is not None:
        statuses |= {*_WITH_BODY}
    if has_keys and spec.access != "open":
        statuses |= {*_WITH_KEYS}
    if spec.is_counted:
        statuses.add(429)
    for status in sorted(statuses - operation.statuses.keys()):
        responses[str(status)] = _error(status, operation.error)
    return responses


def _error(status: int, schema: str) -> dict[str, Any]:
    content = {_JSON: {"schema": ref(schema)}}
    error = {"description": _DESCRIPTIONS[status], "content": content}
    if status == 429:
        error["headers"] = {"retry-after": {"schema": {"type": "string"}}}
    return error


def _descriptions() -> dict[int, str]:
    """Return what each status says: the codes and first lines of its errors."""
    found: dict[int, list[str]] = {}
    for each in vars(errors).values():
        if inspect.isclass(each) and issubclass(each, errors.ServingError):
            text = inspect.cleandoc(each.__doc__ or "").partition("\n")[0]
            found.setdefault(each.status, []).append(f"`{each.code}`: {text}")
    descriptions = {status: " ".join(dict.fromkeys(texts)) for status, texts in found.items()}
    return {**descriptions, OVERLOADED: "There is no capacity."}


_DESCRIPTIONS = _descriptions()
