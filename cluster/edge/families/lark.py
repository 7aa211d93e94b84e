"""Grammars of tool calls in llguidance's Lark syntax."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_SPACES = "".join(c for c in map(chr, range(0x3001)) if c.isspace())
"""The characters that parsers skip as white space; a regular expression's `\\s` lacks some."""
_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)
"""What cannot stand between slashes as it is, and escapes, in which slashes are escaped already."""
_PARTS = re.compile(r"\\.|.", re.DOTALL)
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf", "not", "if")


class UnsupportedSchemaError(Exception):
    """The format cannot write every value of a schema, or only such values, by a grammar."""


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

    def until(self, end: str, without: Iterable[str] = ()) -> str:
        """Return an expression for any text up to the first `end`, and that.

        Args:
            end: Text that ends it.
            without: Texts that must not be before the end.
        """
        return self._until(end, ["/(?s:.*)/"], without)

    def free_without(self, texts: Iterable[str]) -> str:
        """Return an expression for any text in which none of some texts is.

        A special token's text is excluded, too: plain tokens may spell it, and parsers see text.
        """
        return self.terminal(f"/(?s:.*)/{_excluding(texts)}")

    def free_unless(self, beginnings: Iterable[str], texts: Iterable[str]) -> str:
        """Return an expression for any text in which none of some texts is.

        Args:
            beginnings: Texts that must not be the first ones behind white space.
            texts: Texts that must not be anywhere.
        """
        first = "|".join(map(_regex, beginnings))
        spaces = "".join(map(_regex, _SPACES))
        return self.terminal(f"/(?s:.*)/{_excluding(texts)} & ~/[{spaces}]*({first})(?s:.*)/")

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

    def text_value(self, schema: Mapping[str, Any], end: str, without: Iterable[str] = ()) -> str:
        """Return an expression for a string of a schema without quotes, and the text behind it.

        Args:
            schema: The schema.
            end: Text behind the string.
            without: Texts that the parser would read as the end of the string.

        Raises:
            UnsupportedSchemaError: The schema combines others, or no value is left.
        """
        for keyword in _COMBINED:
            if keyword in schema:
                raise UnsupportedSchemaError(f"has {keyword} beside the type string")
        if "const" in schema or "enum" in schema:
            values = schema.get("enum", [schema.get("const")])
            texts = [value for value in values if _is_value(value, schema, (end, *without))]
            if not texts:
                raise UnsupportedSchemaError("has an enum without a string that can be written")
            return self.any_of([self.text(text + end) for text in texts])
        rules = []
        if "minLength" in schema or "maxLength" in schema:
            rules.append(f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/")
        if isinstance(schema.get("pattern"), str):
            rules.append(f"({_found(schema['pattern'])})")
        return self._until(end, rules or ["/(?s:.*)/"], without)

    def _until(self, end: str, rules: Sequence[str], without: Iterable[str]) -> str:
        """Return an expression for a text that all of some terminals match, and for its end."""
        body = " & ".join(rules)
        if self._special.match(end):
            # Only tokens end the text; plain tokens that spell them would mislead the parser.
            return self.sequence(self.terminal(body + _excluding([end, *without])), self.text(end))
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}[suffix={_literal(end)}]: {body}{_excluding(without)}")
        return name

    def rule(self, expression: str) -> str:
        """Return the name of a rule for an expression."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def declared(self) -> str:
        """Return the name of a rule whose expression follows, so that it may refer to itself."""
        return self.rule("")

    def define(self, name: str, expression: str) -> None:
        """Set the expression of a declared rule."""
        self._rules[int(name[1:])] = f"{name}: {expression}"

    def terminal(self, expression: str) -> str:
        """Return the name of a terminal."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def grammar(self, start: str) -> str:
        """Return the whole grammar."""
        return "\n".join([f"start: {start}", *self._rules, ""])


def _excluding(texts: Iterable[str]) -> str:
    """Return what keeps texts out of a terminal; empty without texts."""
    inside = "|".join(map(_regex, texts))
    return f" & ~/(?s:.*)({inside})(?s:.*)/" if inside else ""


def _is_value(value: object, schema: Mapping[str, Any], without: Iterable[str]) -> bool:
    """Return whether a value of an enumeration is a string that can be written and read."""
    if not isinstance(value, str) or any(text in value for text in without):
        return False
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    return len(value) >= least and (most is None or len(value) <= most)


def _found(pattern: str) -> str:
    """Return a terminal for the texts in which a pattern of a schema is found.

    Anchors are understood at both ends of the pattern, or of each of its alternatives.
    """
    return " | ".join(map(_found_one, _alternatives(pattern)))


def _found_one(pattern: str) -> str:
    inside, begin, behind = pattern, "(?s:.*)", "(?s:.*)"
    if inside.startswith("^"):
        inside, begin = inside[1:], ""
    num_escapes = len(inside) - 1 - len(inside[:-1].rstrip("\\"))
    if inside.endswith("$") and num_escapes % 2 == 0:
        inside, behind = inside[:-1], ""
    escaped = _SLASH.sub(lambda found: {"/": "\\/", "\n": "\\n"}.get(found[0], found[0]), inside)
    return f"/{begin}({escaped}){behind}/"


def _alternatives(pattern: str) -> list[str]:
    """Return the alternatives at the top of a pattern."""
    found, depth, in_class = [""], 0, False
    for part in _PARTS.findall(pattern):
        if in_class:
            in_class = part != "]"
        elif part == "[":
            in_class = True
        else:
            depth += {"(": 1, ")": -1}.get(part, 0)
        if part == "|" and depth == 0 and not in_class:
            found.append("")
        else:
            found[-1] += part
    return found


def _literal(text: str) -> str:
    """Return a text as a string of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def _regex(text: str) -> str:
    """Return a regular expression for a text, in slashes' syntax."""
    escaped = re.sub(r"([\\.+*?()|\[\]{}^$#&\-~/])", r"\\\1", text)
    return escaped.replace("\n", "\\n")
