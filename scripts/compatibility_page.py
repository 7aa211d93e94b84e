"""Writes docs/openai-compatibility.md: what each documented field of the HTTP API does here.

python scripts/compatibility_page.py
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.edge.fields import Support
from cluster.edge.openapi import OPERATIONS, tables_of
from cluster.edge.route_table import ROUTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.edge.fields import Field, FieldTable

DOCUMENT = Path(__file__).resolve().parents[1] / "docs/openai-compatibility.md"

_INTRODUCTION = """# Compatibility of the HTTP API

What each request field does here that OpenAI, vLLM or another API of these routes documents. Made
from the tables that check requests by `python scripts/compatibility_page.py`; a test keeps it true.
A running server shows its own types and limits at `/docs` and `/openapi.json`.

- **acts**: as documented.
- **no effect**: accepted, because ignoring it alters no answer; its type is checked.
- **refused**: a 400 that names the field, unless it is `null` or has a value that changes nothing,
  which the table gives.

Fields that are in no table are ignored, at any depth, and the header `x-ttserve-ignored-fields` of
the answer names them. `args.ingress.unknown_fields: refuse` answers 400 instead. The model decides
about some fields that act: tools need a [format](tools.md), priorities a scheduling policy.
"""

_NOT_OFFERED = {
    "audio (`/v1/audio/*`, `/v1/realtime`), images, video": "models of text alone are served",
    "`/score`, `/classify`, `/pooling`": "models with heads of their own are not served",
    "`/v1/moderations`": "no such model is served",
    "`/v1/files`, `/v1/batches`, `/v1/uploads`": "nothing but responses is stored for clients",
    "`/v1/assistants`, `/v1/threads`, `/v1/vector_stores`, `/v1/conversations`": "nothing but"
    " responses is stored for clients",
    "`/v1/fine_tuning`, `/v1/evals`": "no training",
    "gRPC (`vllm serve --grpc`)": "HTTP only",
    "`/v1/load_lora_adapter`, `/sleep`, `/collective_rpc`, `/update_weights`": "the configuration"
    " decides; a rolling update changes it",
}
"""What vLLM or OpenAI offers, and why it is not here."""


def page() -> str:
    """Return the whole document."""
    operations = [(spec, OPERATIONS[spec.name]) for spec in ROUTES]
    bodies = [(spec, operation.fields) for spec, operation in operations if operation.fields]
    lines = [_INTRODUCTION, "## Routes", "", "| route | |", "|---|---|"]
    lines += [
        f"| {spec.method} `{_path(spec.path)}` | {operation.summary} |"
        for spec, operation in operations
    ]
    lines += ["", "## Fields in numbers", "", "| route | act | no effect | refused |"]
    lines += ["|---|---|---|---|", *(_counts(_path(spec.path), table) for spec, table in bodies)]
    nested: dict[str, FieldTable] = {}
    for spec, table in bodies:
        lines += ["", f"## {spec.method} `{_path(spec.path)}`", "", *_table(table)]
        nested |= {name: held for name, held in tables_of(table).items() if held is not table}
    lines += ["", "## Objects within bodies"]
    for name, table in nested.items():
        lines += ["", f"### {name}", "", *_table(table)]
    lines += ["", "## Not offered", "", "| | why |", "|---|---|"]
    lines += [f"| {what} | {why} |" for what, why in _NOT_OFFERED.items()]
    return "\n".join([*lines, ""])


def _path(path: str) -> str:
    return path.replace(":path", "")


def _counts(path: str, table: FieldTable) -> str:
    counts = Counter(field.support for field in table.values())
    numbers = (counts[support] for support in Support)
    return f"| `{path}` | {' | '.join(map(str, numbers))} |"


def _table(table: FieldTable) -> Iterator[str]:
    yield "| field | here | meaning |"
    yield "|---|---|---|"
    for name, field in sorted(table.items()):
        required = " (required)" if field.is_required else ""
        yield f"| `{name}`{required} | {_support(field)} | {_meaning(field)} |"


def _support(field: Field) -> str:
    if field.support is Support.SUPPORTED:
        return "acts"
    if field.support is Support.NO_EFFECT:
        return "no effect"
    neutral = " or ".join(f"`{json.dumps(value)}`" for value in field.neutral)
    return f"refused, unless {neutral}" if neutral else "refused"


def _meaning(field: Field) -> str:
    held = [table for table in (field.schema.get("$ref"), *_held(field)) if table is not None]
    names = ", ".join(f"[{table.name}](#{table.name.lower()})" for table in held)
    return f"{field.text} {names}".strip()


def _held(field: Field) -> Iterator[FieldTable | None]:
    yield field.schema.get("items", {}).get("$ref")
    for branch in field.schema.get("anyOf", ()):
        yield branch.get("$ref")
        yield branch.get("items", {}).get("$ref")


def main() -> None:
    """Write the page."""
    DOCUMENT.write_text(page())


if __name__ == "__main__":
    main()
