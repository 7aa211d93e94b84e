"""Grammars of structured outputs: conversion, checks of their size, and compilation by llguidance.

Front ends compile a request's grammar over an alphabet of bytes (`for_checks`), to refuse a bad one
before any work. Engines compile it again over the model's vocabulary, as they trust no client.

llguidance bounds its own work (`_LIMITS`), but not what precedes a grammar: counts bound the size
of a schema, and the conversion of EBNF. Some small inputs still take very long, such as the
intersection of many patterns, so a caller must bound the time. Calls release the interpreter lock.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from replicas.errors import InvalidRequestError
from replicas.sampling_params import MAX_SCHEMA_VALUES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from replicas.sampling_params import StructuredOutputs

MAX_SCHEMA_DEPTH = 64
MAX_PROPERTIES = 1_000
"""Properties of one object of a schema: the time to compile them grows with their square."""
MAX_PATTERN_PROPERTIES = 32
"""Patterns of property names of a schema, which are intersected with each other."""
MAX_EBNF_BYTES = 64 * 2**10
MAX_EBNF_WORK = 2**21
"""Rules of an EBNF grammar times its bytes, which bounds the conversion of its rules."""

_LIMITS: dict[str, Any] = {
    "max_grammar_size": 20_000,
    "initial_lexer_fuel": 500_000,
    "max_lexer_states": 50_000,
    "step_lexer_fuel": 50_000,
    # Verbose errors would put a client's text into logs.
    "verbose_errors": False,
}
_RULE_LIMITS: dict[str, Any] = {"max_items_in_row": 300, "step_max_items": 20_000}
"""Items of the parser, in one row and for one mask, with a client's own rules.

These may be ambiguous, and then a token takes time of the cube of a row: 26 ms at 300 items, half a
second at llguidance's 2,000.
"""
_OTHER_LIMITS: dict[str, Any] = {"max_items_in_row": 10_000, "step_max_items": 20_000}
"""The same for schemas, whose rows have four items for each optional property, all different."""
_MAX_ERROR_CHARS = 300
_LARK_LINE = re.compile(r"[ \t]*(%llguidance\b|start[ \t]*:(?!:=))")
# What is quoted in EBNF, or the name `start`. Unclosed quotes match too, so that time is linear.
_EBNF_START = re.compile(
    r'"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?|#[^\r\n]*|(?<![\w-])(?P<name>start)(?![\w-])',
    re.DOTALL,
)
_CRASHING_INTEGERS = range(-(2**63), -(2**63) + 513)
"""Those that become the double -2**63. In `enum` or `const` one ends the process of llguidance 1.9
by a stack overflow."""
_MAPS_OF_SCHEMAS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
_NO_SCHEMAS = frozenset({"enum", "const", "default", "examples"})
"""Keywords of a schema whose values are any JSON."""


class GrammarCompiler:
    """Compiles grammars over one vocabulary.

    Args:
        tokenizer: The vocabulary.
        special_tokens: Text of its special tokens, which a structural tag may begin with.
    """

    def __init__(self, tokenizer: LLTokenizer, special_tokens: Collection[str]) -> None:
        self.tokenizer = tokenizer
        self._special_tokens = frozenset(special_tokens)
        self._limits = LLParserLimits(**_LIMITS, **_OTHER_LIMITS)
        self._rule_limits = LLParserLimits(**_LIMITS, **_RULE_LIMITS)

    @classmethod
    def for_model(
        cls, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> GrammarCompiler:
        """Return the compiler for a model; takes a second for a vocabulary of 128k.

        Args:
            tokenizer_json: Text of the model's tokenizer.json.
            vocab_size: Width of its logits.
            eos_token_ids: Tokens that may end an output; if empty, the tokenizer's own.

        Raises:
            ValueError: The tokenizer is of a kind that llguidance does not know.
        """
        added = json.loads(tokenizer_json).get("added_tokens") or []
        width = max([vocab_size, *(token["id"] + 1 for token in added)])
        tokenizer = LLTokenizer(
            tokenizer_json, n_vocab=width, eos_token=sorted(eos_token_ids) or None
        )
        return cls(tokenizer, [token["content"] for token in added if token.get("special")])

    @classmethod
    def for_checks(cls, special_tokens: Collection[str]) -> GrammarCompiler:
        """Return a compiler whose grammars are only checked; takes milliseconds."""
        alphabet = _Bytes(sorted(special_tokens))
        return cls(LLTokenizer(TokenizerWrapper(alphabet)), special_tokens)

    def compile(self, spec: StructuredOutputs) -> LLMatcher:
        """Return a matcher at the beginning of an output.

        Raises:
            InvalidRequestError: The grammar is wrong, too large or not supported; `param` names its
                field, and the message says why.
        """
        kind = spec.kind
        may_be_ambiguous = kind == "grammar" and not spec.is_unambiguous
        limits = self._rule_limits if may_be_ambiguous else self._limits
        matcher = LLMatcher(self.tokenizer, self._text(kind, spec), log_level=0, limits=limits)
        if not matcher.is_error():
            # Some limits are exceeded only when the first mask is computed.
            matcher.compute_bitmask()
        if matcher.is_error():
            _refuse(kind, f"is no grammar that can be used: {_short(matcher.get_error())}")
        return matcher

    def _text(self, kind: str, spec: StructuredOutputs) -> str:
        """Return a grammar in llguidance's format."""
        value = getattr(spec, kind)
        if kind == "regex":
            return LLMatcher.grammar_from_regex(value)
        if kind == "choice":
            if len(value) > MAX_SCHEMA_VALUES:
                _refuse(kind, f"has {len(value)} entries, but may have {MAX_SCHEMA_VALUES}")
            # One terminal: as alternatives of a rule each text would be an item in the first row.
            texts = " | ".join(map(json.dumps, value))
            return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}")
        if kind == "grammar":
            return LLMatcher.grammar_from_lark(_lark(value))
        if kind == "structural_tag":
            return LLMatcher.grammar_from_lark(self._tags(_loads(kind, value), spec))
        schema = {"type": "object"} if kind == "json_object" else _loads(kind, value)
        return LLMatcher.grammar_from_json_schema(json.dumps(_schema(kind, schema, spec)))

    def _tags(self, body: dict[str, Any], spec: StructuredOutputs) -> str:
        """Return free text with structures in it, each begun by a trigger, as in vLLM."""
        kind = "structural_tag"
        try:
            given = msgspec.convert(body, _Tags)
        except msgspec.ValidationError as error:
            _refuse(kind, f"needs `triggers`, and `structures` of begin, schema and end: {error}")
        tags = []
        for structure in given.structures:
            begin = structure.begin
            trigger = next((t for t in given.triggers if t and begin.startswith(t)), None)
            if trigger is None:
                _refuse(kind, f"has no trigger for the structure that begins with {begin[:64]!r}")
            schema = _schema(kind, structure.schema, spec)
            tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=structure.end))
        if not tags:
            _refuse(kind, "needs at least one structure")
        in_brackets = [t.trigger for t in tags if t.trigger[0] == "<" and t.trigger[-1] == ">"]
        num_special = sum(trigger in self._special_tokens for trigger in in_brackets)
        if 0 < num_special < len(in_brackets):
            _refuse(kind, "must not mix special tokens with other triggers in angle brackets")
        return StructTag.to_grammar(tags, assume_special=num_special > 0)


class _Structure(msgspec.Struct):
    begin: str
    schema: dict[str, Any]
    end: str


class _Tags(msgspec.Struct):
    triggers: list[str]
    structures: list[_Structure]


class _Bytes:
    """An alphabet in the form that llguidance reads: bytes, special tokens, an end."""

    def __init__(self, special_tokens: list[str]) -> None:
        self.tokens = [bytes([i]) for i in range(256)]
        self.tokens += [token.encode(errors="replace") for token in special_tokens]
        self.tokens.append(b"<end of output>")
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id, self.bos_token_id = len(self.tokens) - 1, None

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _schema(kind: str, schema: dict[str, Any], spec: StructuredOutputs) -> dict[str, Any]:
    """Return a JSON schema with the options of a request, after counting its values."""
    _count(kind, schema)
    if spec.disable_additional_properties:
        schema = _closed(schema)
    given = schema.get("x-guidance")
    options: dict[str, Any] = {"whitespace_flexible": not spec.disable_any_whitespace}
    if spec.whitespace_pattern is not None:
        options["whitespace_pattern"] = spec.whitespace_pattern
    return {**schema, "x-guidance": {**options, **(given if isinstance(given, dict) else {})}}


def _count(kind: str, schema: dict[str, Any]) -> None:
    """Refuse a schema that is deeper or larger than its compilation is bounded for."""
    num_values, num_patterns, depth = 0, 0, 0
    level: list[Any] = [schema]
    while level:
        depth += 1
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                num_properties = _length(value.get("properties"))
                if num_properties > MAX_PROPERTIES:
                    text = f"has an object of {num_properties} properties, but may have"
                    _refuse(kind, f"{text} {MAX_PROPERTIES}")
                num_patterns += _length(value.get("patternProperties"))
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, int) and value in _CRASHING_INTEGERS:
                _refuse(kind, f"has the integer {value}, which is too small")
        num_values += len(level)
        if num_values > MAX_SCHEMA_VALUES or depth > MAX_SCHEMA_DEPTH:
            text = f"may have at most {MAX_SCHEMA_VALUES} values and {MAX_SCHEMA_DEPTH} levels"
            _refuse(kind, f"{text} in its schema")
        level = below
    if num_patterns > MAX_PATTERN_PROPERTIES:
        text = f"has {num_patterns} patterns of property names, but may have"
        _refuse(kind, f"{text} {MAX_PATTERN_PROPERTIES}")


def _closed(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return a schema whose objects take no further properties unless they say so."""
    if isinstance(value, list):
        return [_closed(item) for item in value]
    if not isinstance(value, dict):
        return value
    closed = {}
    for key, item in value.items():
        if key in _NO_SCHEMAS:
            closed[key] = item
        elif key in _MAPS_OF_SCHEMAS and isinstance(item, dict):
            closed[key] = {name: _closed(schema) for name, schema in item.items()}
        else:
            closed[key] = _closed(item)
    if "properties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def _lark(text: str) -> str:
    """Return a grammar in Lark's syntax, from that or from EBNF as llama.cpp has it (GBNF)."""
    # A line at a time: a search through white space of many lines takes quadratic time.
    if any(map(_LARK_LINE.match, text.splitlines())):
        return text
    num_bytes, num_rules = len(text.encode(errors="replace")), text.count("::=")
    if num_bytes > MAX_EBNF_BYTES or num_rules * num_bytes > MAX_EBNF_WORK:
        text = f"has {num_bytes} bytes and {num_rules} rules, too many for EBNF: at most"
        _refuse("grammar", f"{text} {MAX_EBNF_BYTES} bytes, and {MAX_EBNF_WORK} bytes times rules")
    try:
        return gbnf_to_lark(_without_start(text))
    except Exception as error:  # noqa: BLE001 - the converter raises plain exceptions for bad input
        _refuse("grammar", f"is no EBNF: {_short(str(error))}")


def _without_start(text: str) -> str:
    """Return EBNF whose rule `start` has another name, because Lark calls the root so."""
    longest = max(map(len, re.findall("start(0*)", text)), default=0)
    name = "start" + "0" * (longest + 1)
    return _EBNF_START.sub(lambda found: name if found["name"] else found[0], text)


def _loads(kind: str, text: str) -> dict[str, Any]:
    """Decode a client's JSON: llguidance would paste a text into the grammar unparsed."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        _refuse(kind, f"is no valid JSON: {_short(str(error))}")
    if not isinstance(value, dict):
        _refuse(kind, "must be a JSON object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _length(value: object) -> int:
    return len(value) if isinstance(value, dict) else 0


def _short(text: str) -> str:
    return text.replace("\n<non-verbose/>", "").strip()[:_MAX_ERROR_CHARS] or "too complex"


def _refuse(kind: str, text: str) -> NoReturn:
    raise InvalidRequestError(f"structured_outputs.{kind}", f"structured_outputs.{kind} {text}")
