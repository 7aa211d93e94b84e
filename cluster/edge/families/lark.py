"""Grammars of tool calls in llguidance's Lark syntax."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Lark:
    """A grammar under construction.

    Args:
        special_ids: Token ids of the special tokens by text. Only the token itself matches a
            special token's text in a grammar.
    """

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        texts = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._rules: list[str] = []

    def text(self, text: str) -> str:
        """Return an expression for a text, in which special tokens are themselves."""
        parts, end = [], 0
        for found in self._special.finditer(text):
            parts += [_literal(text[end : found.start()])] if found.start() > end else []
            parts.append(f"<[{self._special_ids[found[0]]}]>")
            end = found.end()
        parts += [_literal(text[end:])] if end < len(text) else []
        return " ".join(parts)

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for a JSON value of a schema, spaced as chat templates have it."""
        spaced = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        return f"%json {json.dumps({**schema, 'x-guidance': spaced})}"

    def arguments(self, schema: Mapping[str, Any]) -> str:
        """Return an expression for a JSON object of a schema."""
        return self.json({"type": "object", **schema})

    def sequence(self, *parts: str) -> str:
        """Return an expression for parts that follow each other."""
        return " ".join(part for part in parts if part)

    def any_of(self, options: Sequence[str]) -> str:
        """Return an expression for one of several."""
        return self.rule(" | ".join(options))

    def optional(self, part: str) -> str:
        """Return an expression for a part that may be missing."""
        return f"{self.rule(part)}?"

    def until(self, end: str) -> str:
        """Return an expression for any text up to the first `end`, and that."""
        if end in self._special_ids:
            return self.sequence(self.free(), self.text(end))
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}[suffix={_literal(end)}]: /(?s:.*)/")
        return name

    def free(self) -> str:
        """Return an expression for any text."""
        return "FREE_TEXT"

    def free_without(self, texts: Sequence[str]) -> str:
        """Return an expression for any text in which none of some texts is."""
        plain = [text for text in texts if text not in self._special_ids]
        if not plain:
            return self.free()
        inside = "|".join(map(_regex, plain))
        return self.terminal(f"/(?s:.*)/ & ~/(?s:.*)({inside})(?s:.*)/")

    def free_unless(self, beginnings: Sequence[str]) -> str:
        """Return an expression for any text that does not begin with one of some characters."""
        return self.terminal(f"/([^{''.join(map(_regex, beginnings))}](?s:.*))?/")

    def list_of(self, parts: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return an expression for parts in their order; one that is not required may be missing.

        Args:
            parts: The expression of each part, and whether it is required.
            separator: Text between two parts.
        """
        between = f"{self.text(separator)} " if separator else ""
        options: list[str] = []
        rest, is_optional = "", True
        for part, is_required in reversed(parts):
            options = [] if is_required else options
            options.append(self.sequence(part, rest))
            is_optional = is_optional and not is_required
            more = self.rule(f"{between}{part}")
            rest = self.rule(self.sequence(more if is_required else f"{more}?", rest))
        if not options:
            return ""
        return f"{self.any_of(options)}{'?' if is_optional else ''}"

    def text_value(self, schema: Mapping[str, Any], end: str) -> str:
        """Return an expression for a string of a schema without quotes, and the text behind it."""
        if "const" in schema or "enum" in schema:
            values = schema.get("enum", [schema.get("const")])
            texts = [self.text(value + end) for value in values if isinstance(value, str)]
            return self.any_of(texts)
        rules = []
        if "minLength" in schema or "maxLength" in schema:
            rules.append(f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/")
        if isinstance(schema.get("pattern"), str):
            pattern = schema["pattern"].replace("/", "\\/")
            begin = "" if pattern.startswith("^") else "(?s:.*)"
            behind = "" if pattern.endswith("$") else "(?s:.*)"
            rules.append(f"/{begin}({pattern.removeprefix('^').removesuffix('$')}){behind}/")
        if not rules:
            return self.until(end)
        if end in self._special_ids:
            return self.sequence(self.terminal(" & ".join(rules)), self.text(end))
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}[suffix={_literal(end)}]: {' & '.join(rules)}")
        return name

    def rule(self, expression: str) -> str:
        """Return the name of a rule for an expression."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def terminal(self, expression: str) -> str:
        """Return the name of a terminal."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def grammar(self, start: str) -> str:
        """Return the whole grammar."""
        rules = "\n".join([*self._rules, "FREE_TEXT: /(?s:.*)/"])
        return f"start: {start}\n{rules}\n"


def _literal(text: str) -> str:
    """Return a text as a string of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def _regex(text: str) -> str:
    """Return a regular expression for a text, in slashes' syntax."""
    escaped = re.sub(r"([\\.+*?()|\[\]{}^$#&\-~/])", r"\\\1", text)
    return escaped.replace("\n", "\\n")
