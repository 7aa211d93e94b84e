"""Tools in request bodies: `tools`, `tool_choice`, and calls in earlier messages. Pure.

Source: OpenAI API reference; vLLM 0.32 `ChatCompletionToolsParam`, `ToolCall`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from cluster.edge.families.message import Tool
from cluster.edge.openai_fields import (
    CALLED_FUNCTION_FIELDS,
    FUNCTION_FIELDS,
    TOOL_CALL_FIELDS,
    TOOL_FIELDS,
    bad_field,
    one_of,
    read_fields,
    shown,
)
from cluster.edge.tool_schemas import check_tool_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_CHOICES = one_of("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request and how they may be called.

    Attributes:
        tools: The offered tools.
        choice: "auto", "none" or "required".
        is_parallel: Whether one message may have several calls.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = "none"
    is_parallel: bool = True

    @property
    def can_call(self) -> bool:
        """Return whether the answer may have calls."""
        return bool(self.tools) and self.choice != "none"

    @property
    def is_constrained(self) -> bool:
        """Return whether a grammar decides on the calls."""
        is_strict = any(tool.is_strict for tool in self.tools)
        return self.can_call and (self.choice == "required" or is_strict)


NO_TOOLS = ToolUse()
"""The tools of a request that offers none."""


def read_tool_use(values: Mapping[str, Any]) -> ToolUse:
    """Return the tools of a chat's checked fields.

    Raises:
        BadRequestError: A tool or the choice is wrong; `param` is its path.
    """
    tools = _tools(values)
    names = [tool.name for tool in tools]
    choice = values.get("tool_choice", "auto" if tools else "none")
    is_parallel = values.get("parallel_tool_calls", True)
    if isinstance(choice, dict):
        name = _named_tool(choice)
        if name not in names:
            raise bad_field("tool_choice.function.name", f"is {shown(name)}, which no tool has")
        named = tuple(tool for tool in tools if tool.name == name)
        return ToolUse(named, "required", is_parallel=False)
    _CHOICES(choice, "tool_choice")
    if choice == "required" and not tools:
        raise bad_field("tool_choice", 'is "required", but there are no tools')
    return ToolUse(tools, choice, is_parallel)


def template_tools(values: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools of checked fields as chat templates take them; None if there are none.

    Raises:
        BadRequestError: A tool is wrong; `param` is its path.
    """
    _tools(values)
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
    for name in ("type", "function"):
        if name not in values:
            raise bad_field(f"{path}.{name}", "is required")
    function = read_fields(values["function"], FUNCTION_FIELDS, f"{path}.function.")
    name = _name(function, f"{path}.function")
    parameters = function.get("parameters", {})
    check_tool_schema(parameters, f"{path}.function.parameters")
    return Tool(name, parameters, function.get("strict", False))


def _named_tool(choice: Mapping[str, Any]) -> str:
    values = read_fields(choice, TOOL_FIELDS, "tool_choice.")
    if "function" not in values:
        raise bad_field("tool_choice.function", "is required")
    fields = read_fields(values["function"], CALLED_FUNCTION_FIELDS, "tool_choice.function.")
    return _name(fields, "tool_choice.function")


def _call(body: Mapping[str, Any], path: str) -> dict[str, Any]:
    values = read_fields(body, TOOL_CALL_FIELDS, f"{path}.")
    if "function" not in values:
        raise bad_field(f"{path}.function", "is required")
    function = read_fields(values["function"], CALLED_FUNCTION_FIELDS, f"{path}.function.")
    name = _name(function, f"{path}.function")
    arguments = _arguments(function.get("arguments", ""), f"{path}.function.arguments")
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": values["id"], **call} if "id" in values else call


def _name(function: Mapping[str, Any], path: str) -> str:
    name: str | None = function.get("name")
    if name is None:
        raise bad_field(f"{path}.name", "is required")
    if _NAME.fullmatch(name) is None:
        text = "must have 1 to 128 letters, digits, dots, underscores and hyphens"
        raise bad_field(f"{path}.name", f"{text}, got {shown(name)}")
    return name


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
