"""Writes the chart's values into docs/kubernetes.md, as a table made of their comments and schema.

    python scripts/values_table.py

A key's text is the comment above it. A key without a comment shares that of the key right above it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm/ttserve"
DOCUMENT = ROOT / "docs/kubernetes.md"
_BEGIN, _END = "<!-- values: begin -->\n", "<!-- values: end -->\n"
_MOST_CHOICES = 10


@dataclass(frozen=True, slots=True)
class Row:
    """One value.

    Attributes:
        path: Its keys, with dots.
        kind: Its type, or its choices.
        default: As YAML.
        text: Its meaning.
    """

    path: str
    kind: str
    default: str
    text: str


def rows(values: Path, schema: Path) -> list[Row]:
    """Return the table's rows, in the order of the file.

    Args:
        values: The chart's values, each key on a line of its own unless it is within braces.
        schema: Their JSON schema.
    """
    text = values.read_text()
    whole = json.loads(schema.read_text())
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    found = _walk(root, (), _Comments(text.splitlines()))
    return [replace(row, kind=_kind(whole, row.path) if row.default else "") for row in found]


def updated(document: str) -> str:
    """Return the document with a table from the current values.

    Raises:
        ValueError: It has no place for it.
    """
    if _BEGIN not in document or _END not in document:
        raise ValueError(f"no line {_BEGIN.strip()} with a line {_END.strip()} below it")
    head, _, rest = document.partition(_BEGIN)
    _, _, tail = rest.partition(_END)
    lines = ["| value | may be | default | meaning |", "|---|---|---|---|"]
    for row in rows(CHART / "values.yaml", CHART / "values.schema.json"):
        cells = (f"`{row.path}`", row.kind, row.default, row.text)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return head + _BEGIN + "\n".join(lines) + "\n" + _END + tail


class _Comments:
    """The comments of a file.

    Args:
        lines: The file.
    """

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def of(self, line: int, before: str) -> str:
        """The comment right above a line, as one text; `before` where there is a key instead."""
        mark = self._lines[line].partition(self._lines[line].strip())[0] + "#"
        first = line
        while first and self._lines[first - 1].startswith(mark):
            first -= 1
        if first == line:
            return before if line and self._lines[line - 1].strip() else ""
        return " ".join(text.strip().lstrip("#").strip() for text in self._lines[first:line])


def _walk(node: yaml.MappingNode, path: tuple[str, ...], comments: _Comments) -> Iterator[Row]:
    """Rows without kinds: of a section its text, of a value its default too."""
    text = ""
    for key, value in node.value:
        text = comments.of(key.start_mark.line, text)
        keys = (*path, key.value)
        name = ".".join(keys)
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            if text:
                yield Row(name, "", "", text)
            yield from _walk(value, keys, comments)
            text = ""
        else:
            yield Row(name, "", f"`{_one_line(value)}`", text)


def _one_line(value: yaml.Node) -> str:
    """Return a value as the file has it, or a list over several lines in flow style."""
    begin, end = value.start_mark, value.end_mark
    text = begin.buffer[begin.pointer : end.pointer].strip()
    if "\n" not in text:
        return text
    parsed = yaml.safe_load(" " * begin.column + text)
    return yaml.safe_dump(parsed, default_flow_style=True, width=1000).strip()


def _kind(schema: dict[str, Any], path: str) -> str:
    """Return a value's type or choices, in words."""
    whole, found = schema, schema
    for key in path.split("."):
        found = _plain(whole, found)
        found = found.get("properties", {}).get(key) or found["additionalProperties"]
    found = _plain(whole, found)
    if "enum" in found:
        choices = [json.dumps(choice) for choice in found["enum"]]
        return "a bound of the histogram" if len(choices) > _MOST_CHOICES else ", ".join(choices)
    kinds = found.get("type", [])
    return " or ".join(kinds if isinstance(kinds, list) else [kinds])


def _plain(whole: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without references; of a choice, the branch that describes keys."""
    for combination in ("allOf", "oneOf"):
        for part in schema.get(combination, []):
            plain = _plain(whole, part)
            if "properties" in plain or "items" in plain:
                return plain
    if "$ref" in schema:
        return _plain(whole, whole["$defs"][schema["$ref"].rpartition("/")[2]])
    return schema


def main() -> None:
    """Write the table."""
    DOCUMENT.write_text(updated(DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
