"""The grammar of a whole message: reasoning, text and calls."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.edge.families.formats import WholeFormat
from cluster.edge.families.lark import Lark

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cluster.edge.families.formats import ReasoningFormat, ToolFormat
    from cluster.edge.families.message import Tool
    from replicas.sampling_params import StructuredOutputs

_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)
"""What cannot stand between slashes as it is, and escapes, in which slashes are escaped already."""


@dataclass(frozen=True, slots=True)
class CallRules:
    """Which calls a message may have.

    Attributes:
        tools: Tools that may be called.
        is_required: Whether the message is at least one call, and nothing but reasoning else. If
            not, it is text in which calls may be.
        is_parallel: Whether there may be several calls.
    """

    tools: Sequence[Tool]
    is_required: bool
    is_parallel: bool = True


def message_grammar(
    format_: ToolFormat,
    reasoning: ReasoningFormat | None,
    rules: CallRules,
    special_ids: Mapping[str, int],
    prompt_end: str = "",
) -> str:
    """Return the grammar of a message in llguidance's Lark syntax.

    Args:
        format_: Format of the calls.
        reasoning: Format of the reasoning that may precede them.
        rules: Which calls there may be.
        special_ids: See `Lark`.
        prompt_end: See `OutputContext`.
    """
    lark = Lark(special_ids)
    calls = lark.rule(format_.calls_expression(lark, rules.tools, is_parallel=rules.is_parallel))
    if isinstance(format_, WholeFormat):
        whole = format_.message(lark, calls, prompt_end, is_required=rules.is_required)
        return lark.grammar(lark.rule(whole))
    starts = format_.starts
    start = starts[0] if format_.start is None else format_.start
    if rules.is_required:
        more = f" ({lark.text(format_.separator + start)} {calls})*"
        has_more = rules.is_parallel and not format_.is_section
        body = lark.sequence(lark.text(start), calls) + (more if has_more else "")
    elif start:
        before, behind = lark.until(start, starts[1:]), lark.free_without(starts)
        body = f"({before} {calls}){'*' if rules.is_parallel else '?'} {behind}"
    else:
        thoughts = () if reasoning is None else reasoning.starts
        body = f"{calls} | {lark.free_unless((*format_.leading, *thoughts), starts)}"
    before = _reasoning(lark, reasoning, prompt_end, starts)
    return lark.grammar(lark.sequence(before, lark.rule(body)))


def _reasoning(
    lark: Lark, reasoning: ReasoningFormat | None, prompt_end: str, calls: Iterable[str] = ()
) -> str:
    """Return an expression for the reasoning at the beginning of the output.

    Args:
        lark: The grammar.
        reasoning: Format of the reasoning.
        prompt_end: See `OutputContext`.
        calls: Texts that begin a call. A call that would end the reasoning must not be in it.
    """
    if reasoning is None:
        return ""
    is_open = reasoning.opened_by(prompt_end)
    if is_open is False:
        return ""
    behind = lark.optional(lark.text("\n\n"))
    without = calls if reasoning.calls_end_it else ()
    until_end = lark.sequence(lark.until(reasoning.end, without), behind)
    if is_open:
        return until_end
    return lark.optional(lark.sequence(lark.text(reasoning.start), until_end))


def can_follow_reasoning(answer: StructuredOutputs) -> bool:
    """Return whether `answer_grammar` knows the kind of an answer's grammar, and its options."""
    is_known = answer.kind in ("json", "json_object", "regex", "choice")
    return is_known and not answer.disable_additional_properties


def answer_grammar(
    reasoning: ReasoningFormat,
    answer: StructuredOutputs,
    special_ids: Mapping[str, int],
    prompt_end: str = "",
) -> str | None:
    """Return the grammar of reasoning and an answer that follows a grammar of its own.

    Args:
        reasoning: Format of the reasoning.
        answer: Grammar of the answer, which has compiled by itself; `can_follow_reasoning` is true.
        special_ids: See `Lark`.
        prompt_end: See `OutputContext`.

    Returns:
        None if no reasoning can precede the answer.
    """
    lark = Lark(special_ids)
    if reasoning.whole is not None:
        whole = reasoning.whole.answer(lark, _answer(lark, answer), prompt_end)
        return lark.grammar(lark.rule(whole))
    before = _reasoning(lark, reasoning, prompt_end)
    return lark.grammar(lark.sequence(before, _answer(lark, answer))) if before else None


def _answer(lark: Lark, answer: StructuredOutputs) -> str:
    """Return an expression for an answer."""
    if answer.regex is not None:
        return lark.terminal(f"/{_SLASH.sub(_escaped, answer.regex)}/")
    if answer.choice is not None:
        return lark.terminal(" | ".join(map(json.dumps, answer.choice)))
    schema = {"type": "object"} if answer.json is None else json.loads(str(answer.json))
    options: dict[str, object] = {"whitespace_flexible": not answer.disable_any_whitespace}
    if answer.whitespace_pattern is not None:
        options["whitespace_pattern"] = answer.whitespace_pattern
    given = schema.get("x-guidance")
    options |= given if isinstance(given, dict) else {}
    return lark.rule(f"%json {json.dumps({**schema, 'x-guidance': options})}")


def _escaped(found: re.Match[str]) -> str:
    """Return a part of a regular expression as it may stand between slashes."""
    return {"/": "\\/", "\n": "\\n"}.get(found[0], found[0])
