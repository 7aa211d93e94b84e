"""The OpenAPI document as one HTML page, without scripts and without requests to other hosts. Pure.

The page has one style of its own. Its Content-Security-Policy allows that style and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;width:100%}
td,th{border-bottom:1px solid #ddd;padding:.25rem .5rem;text-align:left;vertical-align:top}
code{font:13px ui-monospace,monospace;overflow-wrap:anywhere}
summary{cursor:pointer;padding:.4rem 0}
details{border-top:1px solid #ccc}
details>*:not(summary){margin-left:1rem}
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

DOCS_HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""Headers of the page's answer."""


def docs_page(document: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI document."""
    info, schemas = document["info"], document["components"]["schemas"]
    parts = [
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        f"<p>{escape(info['description'])}</p>",
        "<p>Machines read <a href='openapi.json'>openapi.json</a>.</p>",
        "<h2>Routes</h2>",
        *_routes(document["paths"]),
        "<h2>Schemas</h2>",
        *(_details(name, [_schema_table(schema)], name) for name, schema in schemas.items()),
    ]
    head = f"<meta charset=utf-8><title>{escape(info['title'])}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>"


def _routes(paths: Mapping[str, Any]) -> Iterator[str]:
    for path, operations in paths.items():
        for method, operation in operations.items():
            title = f"{method.upper()} {path}"
            yield _details(title, _operation(operation), "", operation["summary"])


def _operation(operation: Mapping[str, Any]) -> Iterator[str]:
    if parameters := operation["parameters"]:
        rows = (
            (escape(p["name"]), f"{p['in']} {_kind(p['schema'])}", _text(p)) for p in parameters
        )
        yield _table(("parameter", "type", ""), rows)
    if body := operation.get("requestBody"):
        yield f"<p>Body: {_content(body['content'])}</p>"
    answers = operation["responses"].items()
    rows = ((status, _content(each.get("content", {})), _text(each)) for status, each in answers)
    yield _table(("status", "body", ""), rows)


def _content(content: Mapping[str, Any]) -> str:
    kinds = (f"<code>{escape(m)}</code> {_kind(c.get('schema', {}))}" for m, c in content.items())
    return "<br>".join(kinds)


def _schema_table(schema: Mapping[str, Any]) -> str:
    properties = schema.get("properties")
    if properties is None:
        return f"<p>{_kind(schema)}</p>"
    required = schema.get("required", ())
    rows = (
        (
            f"<code>{escape(name)}</code>{' (required)' * (name in required)}",
            _kind(each),
            _text(each),
        )
        for name, each in properties.items()
    )
    return _table(("field", "type", ""), rows)


def _kind(schema: Mapping[str, Any]) -> str:
    """Return a schema in short, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if "items" in schema:
        return f"array of {_kind(schema['items'])}"
    known = {key: value for key, value in schema.items() if key != "description"}
    if not known:
        return "any"
    if "properties" in known:
        return "object"
    kind = known.pop("type", "")
    shown = " or ".join(kind) if isinstance(kind, list) else kind
    rest = ", ".join(f"{key}: {json.dumps(value)}" for key, value in known.items())
    return escape(", ".join(filter(None, (shown, rest))))


def _text(described: Mapping[str, Any]) -> str:
    return escape(described.get("description", ""))


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    titles = "".join(f"<th>{title}</th>" for title in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{titles}</tr>{body}</table>"


def _details(title: str, inner: Iterator[str] | list[str], anchor: str, text: str = "") -> str:
    named = f" id='{escape(anchor)}'" if anchor else ""
    summary = f"<summary><code>{escape(title)}</code> {escape(text)}</summary>"
    return f"<details{named}>{summary}{''.join(inner)}</details>"
