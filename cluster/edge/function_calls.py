"""Chats with the former names of tools: `functions` and `function_call`. Pure.

The body is translated into one with tools, so both mean the same. At most one function is called,
and an answer has its call as `function_call`. In earlier messages the former names are read by
`cluster.edge.openai_requests`, whatever the body offers.

Source: OpenAI API reference, where these fields are deprecated. vLLM ignores them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cluster.edge.field_names import naming_fields
from cluster.edge.fields import bad_field
from cluster.edge.openai_fields import CHAT_FIELDS
from cluster.edge.openai_requests import parse_chat_completion

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.edge.openai_requests import ParsedRequest


def parse_functions(body: Mapping[str, Any]) -> ParsedRequest:
    """Check the fields of a chat that may have `functions` or `function_call`.

    The answer's `ResponseSpec.own` is whether its call is a `function_call`.

    Raises:
        BadRequestError: A field is wrong, or given under both names; `param` is its path.
    """
    body, names = dict(body), {}
    functions, choice = (
        None if body.get(name) is None else CHAT_FIELDS[name].check(body[name], name)
        for name in ("functions", "function_call")
    )
    for name, new_name, given in (
        ("functions", "tools", functions),
        ("function_call", "tool_choice", choice),
    ):
        body.pop(name, None)
        if given not in (None, []) and body.get(new_name):
            raise bad_field(name, f"is the former name of {new_name}; send one of them")
    if functions:
        body["tools"] = [{"type": "function", "function": each} for each in functions]
        body["parallel_tool_calls"] = False
        names["tools"] = "functions"
        names |= {f"tools[{i}].function": f"functions[{i}]" for i in range(len(functions))}
    if choice is not None:
        is_named = isinstance(choice, dict)
        body["tool_choice"] = {"type": "function", "function": choice} if is_named else choice
        names |= {"tool_choice": "function_call", "tool_choice.function": "function_call"}
    with naming_fields(names):
        parsed = parse_chat_completion(body)
    options = {**parsed.response_options, "own": bool(functions)}
    return replace(parsed, response_options=options, field_names=names)
