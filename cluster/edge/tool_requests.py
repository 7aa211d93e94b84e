"""Tools in request bodies: `tools`, `tool_choice`, and calls in earlier messages. Pure.

Source: OpenAI API reference; vLLM 0.32 `ChatCompletionToolsParam`, `ToolCall`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from cluster.edge.families.message import Tool
from cluster.edge.fields import (
    bad_field,
    read_fields,
    shown,
)
from cluster.edge.openai_fields import (
    ALLOWED_TOOLS_FIELDS,
    CALLED_FUNCTION_FIELDS,
    FUNCTION_FIELDS,
    NAMED_FUNCTION_FIELDS,
    NAMED_TOOL_FIELDS,
    TOOL_CALL_FIELDS,
    TOOL_CHOICE_FIELDS,
    TOOL_FIELDS,
)
from cluster.edge.tool_schemas import check_tool_schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request and how they may be called.

    Attributes:
        tools: The offered tools.
        choice: "auto", "none" or "required".
        is_parallel: Whether one message may have several calls.
        is_restricted: Whether the prompt names further tools, which must not be called.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = "none"
    is_parallel: bool = True
    is_restricted: bool = False

    @property
    def can_call(self) -> bool:
        """Return whether the answer may have calls."""
        return bool(self.tools) and self.choice != "none"

    @property
    def is_constrained(self) -> bool:
        """Return whether a grammar decides on the calls."""
        is_strict = self.is_restricted or any(tool.is_strict for tool in self.tools)
        return self.can_call and (self.choice == "required" or is_strict)


NO_TOOLS = ToolUse()
"""The tools of a request that offers none."""


def read_tool_use(values: Mapping[str, Any]) -> ToolUse:
    """Return the tools of a chat's checked fields.

    Raises:
        BadRequestError: A tool or the choice is wrong; `param` is its path.
    """
    tools = _tools(values)
    choice = values.get("tool_choice", "auto" if tools else "none")
    is_parallel = values.get("parallel_tool_calls", True)
    if isinstance(choice, dict):
        return _chosen(choice, tools, is_parallel=is_parallel)
    if choice == "required" and not tools:
        raise bad_field("tool_choice", 'is "required", but there are no tools')
    return ToolUse(tools, choice, is_parallel)


def template_tools(values: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return tools that `read_tool_use` has checked as chat templates take them, or None."""
    tools = []
    for body in values.get("tools", ()):
        function = {k: v for k, v in body["function"].items() if k != "strict" and v is not None}
        tools.append({"type": "function", "function": function})
    return tools or None


def read_calls(bodies: list[dict[str, Any]], path: str) -> list[dict[str, Any]]:
    """Return the calls of an earlier message as chat templates take them: arguments as objects.

    Raises:
        BadRequestError: A call is wrong; `param` is its path.
    """
    return [_call(body, f"{path}[{i}]") for i, body in enumerate(bodies)]


def read_function_call(body: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a call without an id as chat templates take it: arguments as an object.

    Raises:
        BadRequestError: The call is wrong; `param` is its path.
    """
    function = read_fields(body, CALLED_FUNCTION_FIELDS, f"{path}.")
    name: str = function["name"]
    arguments = _arguments(function.get("arguments", ""), f"{path}.arguments")
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _tools(values: Mapping[str, Any]) -> tuple[Tool, ...]:
    tools: dict[str, Tool] = {}
    for i, body in enumerate(values.get("tools", ())):
        tool = _tool(body, f"tools[{i}]")
        if tool.name in tools:
            raise bad_field(f"tools[{i}].function.name", f"repeats {shown(tool.name)}")
        tools[tool.name] = tool
    return tuple(tools.values())


def _tool(body: Mapping[str, Any], path: str) -> Tool:
    values = read_fields(body, TOOL_FIELDS, f"{path}.")
    function = read_fields(values["function"], FUNCTION_FIELDS, f"{path}.function.")
    name: str = function["name"]
    parameters = function.get("parameters", {})
    check_tool_schema(parameters, f"{path}.function.parameters")
    return Tool(name, parameters, function.get("strict", False))


def _chosen(choice: Mapping[str, Any], tools: Sequence[Tool], *, is_parallel: bool) -> ToolUse:
    """Return the use of the tools that a choice names."""
    values = read_fields(choice, TOOL_CHOICE_FIELDS, "tool_choice.")
    kind = values.get("type", "function")
    if kind not in values:
        raise bad_field(f"tool_choice.{kind}", "is required")
    if kind == "function":
        named = _named(values["function"], tools, "tool_choice.function.")
        return ToolUse((named,), "required", is_parallel=False)
    path = "tool_choice.allowed_tools."
    allowed = read_fields(values[kind], ALLOWED_TOOLS_FIELDS, path)
    found = {}
    for i, body in enumerate(allowed["tools"]):
        function = read_fields(body, NAMED_TOOL_FIELDS, f"{path}tools[{i}].")["function"]
        tool = _named(function, tools, f"{path}tools[{i}].function.")
        found[tool.name] = tool
    is_restricted = len(found) < len(tools)
    return ToolUse(tuple(found.values()), allowed["mode"], is_parallel, is_restricted)


def _named(function: Mapping[str, Any], tools: Sequence[Tool], path: str) -> Tool:
    """Return the tool that a choice names."""
    name = read_fields(function, NAMED_FUNCTION_FIELDS, path)["name"]
    for tool in tools:
        if tool.name == name:
            return tool
    raise bad_field(f"{path}name", f"is {shown(name)}, which no tool has")


def _call(body: Mapping[str, Any], path: str) -> dict[str, Any]:
    values = read_fields(body, TOOL_CALL_FIELDS, f"{path}.")
    call = read_function_call(values["function"], f"{path}.function")
    return {"id": values["id"], **call} if "id" in values else call


def _arguments(text: str, path: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}", parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise bad_field(path, "must be a JSON object as text") from error
    if not isinstance(arguments, dict):
        raise bad_field(path, f"must be a JSON object as text, got {shown(text)}")
    return arguments


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
