"""The grammar of a whole message: reasoning, text and calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.edge.families.formats import WholeFormat
from cluster.edge.families.lark import Lark

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cluster.edge.families.formats import ReasoningFormat, ToolFormat
    from cluster.edge.families.message import Tool


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
    calls = lark.rule(format_.calls(lark, rules.tools, is_parallel=rules.is_parallel))
    if isinstance(format_, WholeFormat):
        whole = format_.message(lark, calls, prompt_end, is_required=rules.is_required)
        return lark.grammar(lark.rule(whole))
    start = format_.starts[0] if format_.start is None else format_.start
    if rules.is_required:
        more = f" ({lark.text(format_.separator + start)} {calls})*"
        has_more = rules.is_parallel and not format_.is_section
        body = lark.sequence(lark.text(start), calls) + (more if has_more else "")
    elif start:
        before, behind = lark.until(start), lark.free_without(format_.starts)
        body = f"({before} {calls}){'*' if rules.is_parallel else '?'} {behind}"
    else:
        body = f"{calls} | {lark.free_unless(format_.leading)}"
    return lark.grammar(lark.sequence(_reasoning(lark, reasoning, prompt_end), lark.rule(body)))


def _reasoning(lark: Lark, reasoning: ReasoningFormat | None, prompt_end: str) -> str:
    """Return an expression for the reasoning at the beginning of the output."""
    if reasoning is None:
        return ""
    is_open = reasoning.opened_by(prompt_end)
    if is_open is False:
        return ""
    behind = lark.optional(lark.text("\n\n"))
    until_end = lark.sequence(lark.until(reasoning.end), behind)
    if is_open:
        return until_end
    return lark.optional(lark.sequence(lark.text(reasoning.start), until_end))
