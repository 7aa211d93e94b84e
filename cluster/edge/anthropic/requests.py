"""Translation of bodies of /v1/messages into those of /v1/chat/completions. Pure.

The chat's own checks follow, so a body means the same in both APIs. Errors name the fields of the
client's body.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from cluster.edge.anthropic.blocks import model_call_id
from cluster.edge.anthropic.fields import (
    CONTENT_BLOCK_FIELDS,
    COUNT_TOKENS_FIELDS,
    MESSAGE_FIELDS,
    MESSAGES_FIELDS,
    OUTPUT_CONFIG_FIELDS,
    OUTPUT_FORMAT_FIELDS,
    RESULT_BLOCK_FIELDS,
    THINKING_FIELDS,
    TOOL_CHOICE_FIELDS,
    TOOL_FIELDS,
)
from cluster.edge.field_names import naming_fields
from cluster.edge.fields import bad_field, read_fields, shown
from cluster.edge.openai_requests import parse_chat_completion

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cluster.edge.fields import FieldTable
    from cluster.edge.openai_requests import ParsedRequest

_SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")
_REASONING_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates turn reasoning on and off."""
_BILLING_HEADER = "x-anthropic-billing-header"
"""Begins a system block of Claude Code that differs in every request, so that no two would share
cached KV. It is for Anthropic's accounting. Source: vLLM drops it, too."""
_USER_BLOCKS = ("text", "tool_result")
_ASSISTANT_BLOCKS = ("text", "tool_use", "thinking", "redacted_thinking")


class Translation(NamedTuple):
    """A body in the form of another API.

    Attributes:
        body: The body of /v1/chat/completions.
        field_names: The client's paths of its fields, see `cluster.edge.field_names`.
    """

    body: dict[str, Any]
    field_names: dict[str, str]


def parse_messages(body: Mapping[str, Any]) -> ParsedRequest:
    """Check the fields of a /v1/messages body.

    Raises:
        BadRequestError: A field is wrong; `param` is its path.
        ThreadsUnsupportedError: A conversation is to be kept.
    """
    return _parsed(translate(read_fields(body, MESSAGES_FIELDS)))


def parse_count_tokens(body: Mapping[str, Any]) -> ParsedRequest:
    """Check the fields of a /v1/messages/count_tokens body.

    Raises:
        BadRequestError: A field is wrong; `param` is its path.
    """
    return _parsed(translate(read_fields(body, COUNT_TOKENS_FIELDS)))


def _parsed(translated: Translation) -> ParsedRequest:
    with naming_fields(translated.field_names):
        parsed = parse_chat_completion(translated.body)
    # Clients send a budget along with every `thinking`, whatever the model.
    return replace(parsed, field_names=translated.field_names, has_soft_budget=True)


def translate(values: Mapping[str, Any]) -> Translation:
    """Return the chat that the checked fields of a body stand for.

    Raises:
        BadRequestError: A message or tool is wrong; `param` is its path.
    """
    names: dict[str, str] = {}
    body: dict[str, Any] = {name: values[name] for name in _SAME if name in values}
    body["messages"] = _messages(values, names)
    if body["messages"][-1]["role"] == "assistant":
        body["continue_final_message"] = True
    if "stop_sequences" in values:
        body["stop"] = values["stop_sequences"]
        names["stop"] = "stop_sequences"
    body.update(_tools(values, names))
    body.update(_reasoning(values, names))
    body.update(_response_format(values, names))
    return Translation(body, names)


# --- messages -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Conversation:
    """Messages of the chat so far.

    Consecutive texts of a user are one message: many chat templates refuse two, and Anthropic's
    API joins them.

    Attributes:
        messages: The messages.
        names: See `Translation.field_names`.
        late: Texts of system messages between calls and their results, which come first.
    """

    names: dict[str, str]
    messages: list[dict[str, Any]] = field(default_factory=list)
    late: list[str] = field(default_factory=list)

    @property
    def last_role(self) -> str:
        return str(self.messages[-1]["role"]) if self.messages else ""

    def add_text(self, role: str, text: str) -> None:
        """Add text of a role, to the last message if that has the same one."""
        if self.last_role == role:
            last = self.messages[-1]
            last["content"] = _joined(last["content"], text)
        else:
            self.messages.append({"role": role, "content": text})

    def add_system(self, text: str) -> None:
        """Add the text of a system message.

        Templates refuse system messages behind the first turn, or move them to the beginning, where
        each one would make all cached KV useless. So the text joins what the model reads last: that
        of the user or, as templates drop the reasoning before the last text of a user, the result
        of a tool. Source: vLLM's way with these messages of Claude Code.
        """
        if self.last_role in {"", "system"}:
            self.add_text("system", text)
        elif self.last_role == "tool":
            self.add_text("tool", text)
        elif self.messages[-1].get("tool_calls"):
            self.late.append(text)
        else:
            self.add_text("user", text)

    def add_late(self) -> None:
        """Add the texts that had to wait for the results of calls."""
        late, self.late = self.late, []
        for text in late:
            self.add_text("tool" if self.last_role == "tool" else "user", text)


def _messages(values: Mapping[str, Any], names: dict[str, str]) -> list[dict[str, Any]]:
    chat = _Conversation(names)
    if "system" in values:
        for text in _texts(values["system"], "system"):
            chat.add_system(text)
    if not values["messages"]:
        raise bad_field("messages", "must hold at least one message")
    for i, body in enumerate(values["messages"]):
        path = f"messages[{i}]"
        message = read_fields(body, MESSAGE_FIELDS, f"{path}.")
        content, path = message["content"], f"{path}.content"
        match message["role"]:
            case "system":
                for text in _texts(content, path):
                    chat.add_system(text)
            case "assistant":
                chat.add_late()
                _add_answer(chat, content, path)
            case _:
                _add_turn(chat, content, path)
    chat.add_late()
    if not chat.messages:
        raise bad_field("messages", "has no text; send a message with text")
    if chat.last_role == "assistant" and not chat.messages[-1]["content"]:
        text = "is of the assistant, but has no text that an answer could continue"
        raise bad_field(f"messages[{len(values['messages']) - 1}]", text)
    return chat.messages


def _texts(content: str | list[Any], path: str) -> Iterator[str]:
    """Yield the texts of a system prompt or message."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    for block, where in _blocks(content, path, ("text",)):
        text = _required(block, "text", where)
        if not text.startswith(_BILLING_HEADER):
            yield text


def _add_turn(chat: _Conversation, content: str | list[Any], path: str) -> None:
    """Add a turn of the user: texts and results of tools."""
    if isinstance(content, str):
        chat.add_late()
        chat.add_text("user", content)
        return
    for block, where in _blocks(content, path, _USER_BLOCKS):
        if block["type"] == "tool_result":
            chat.messages.append(_result(block, where))
        else:
            chat.add_late()
            chat.add_text("user", _required(block, "text", where))
    chat.add_late()


def _result(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    call_id = model_call_id(_required(block, "tool_use_id", path))
    content = block.get("content", "")
    if not isinstance(content, str):
        where = f"{path}.content"
        blocks = _blocks(content, where, ("text",), RESULT_BLOCK_FIELDS)
        content = "\n".join(_required(each, "text", its_path) for each, its_path in blocks)
    if block.get("is_error", False):
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _add_answer(chat: _Conversation, content: str | list[Any], path: str) -> None:
    """Add an earlier answer: texts, reasoning and calls."""
    if chat.last_role != "assistant":
        chat.messages.append({"role": "assistant", "content": ""})
    message, at = chat.messages[-1], f"messages[{len(chat.messages) - 1}]"
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    for block, where in _blocks(content, path, _ASSISTANT_BLOCKS):
        match block["type"]:
            case "text":
                text = _required(block, "text", where)
                message["content"] = _joined(message["content"], text)
            case "thinking":
                text = _required(block, "thinking", where)
                message["reasoning"] = _joined(message.get("reasoning", ""), text)
            case "tool_use":
                calls = message.setdefault("tool_calls", [])
                chat.names[f"{at}.tool_calls[{len(calls)}].function"] = where
                calls.append(_call(block, where))
            case _:
                pass  # redacted thinking, which only Anthropic's servers can read


def _call(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    call_id = model_call_id(_required(block, "id", path))
    arguments = orjson.dumps(_required(block, "input", path)).decode()
    function = {"name": _required(block, "name", path), "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _blocks(
    content: list[Any],
    path: str,
    types: tuple[str, ...],
    table: FieldTable = CONTENT_BLOCK_FIELDS,
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the checked fields and the path of each block of a content.

    Raises:
        BadRequestError: A block is wrong, or of a type that is not in `types`.
    """
    for i, body in enumerate(content):
        where = f"{path}[{i}]"
        kind = body.get("type")
        if kind is not None and kind not in types:
            text = f"is {shown(kind)}, which is not supported here; send {' or '.join(types)}"
            raise bad_field(f"{where}.type", text)
        yield read_fields(body, table, f"{where}."), where


def _required(block: Mapping[str, Any], name: str, path: str) -> Any:  # noqa: ANN401 - a field's value
    if name not in block:
        raise bad_field(f"{path}.{name}", "is required")
    return block[name]


def _joined(before: str, text: str) -> str:
    return f"{before}\n{text}" if before and text else before or text


# --- tools, reasoning, form of the answer ---------------------------------------------------------


def _tools(values: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if values.get("tools"):
        fields["tools"] = [_tool(body, i, names) for i, body in enumerate(values["tools"])]
    if "tool_choice" not in values:
        return fields
    choice = read_fields(values["tool_choice"], TOOL_CHOICE_FIELDS, "tool_choice.")
    if choice["type"] in {"any", "tool"} and not fields:
        raise bad_field("tool_choice", f"is {shown(choice['type'])}, but there are no tools")
    if choice["type"] == "tool":
        name = _required(choice, "name", "tool_choice")
        names["tool_choice.function"] = "tool_choice"
        fields["tool_choice"] = {"type": "function", "function": {"name": name}}
    else:
        fields["tool_choice"] = "required" if choice["type"] == "any" else choice["type"]
    if choice.get("disable_parallel_tool_use", False):
        fields["parallel_tool_calls"] = False
    return fields


def _tool(body: Mapping[str, Any], index: int, names: dict[str, str]) -> dict[str, Any]:
    path = f"tools[{index}]"
    kind = body.get("type")
    if isinstance(kind, str) and kind != "custom":
        text = f"is {shown(kind)}, a tool of Anthropic's that is not offered here"
        raise bad_field(f"{path}.type", f"{text}; describe your own by name and input_schema")
    tool = read_fields(body, TOOL_FIELDS, f"{path}.")
    names[f"{path}.function"] = path
    names[f"{path}.function.parameters"] = f"{path}.input_schema"
    function: dict[str, Any] = {}
    function.update((name, tool[name]) for name in ("description", "strict") if name in tool)
    function["name"] = _required(tool, "name", path)
    function["parameters"] = _required(tool, "input_schema", path)
    return {"type": "function", "function": function}


def _reasoning(values: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return the fields that turn reasoning on or off.

    Without `thinking` answers have no thinking blocks, as in Anthropic's API: many clients take the
    first block for text.
    """
    thinking = {"type": "disabled"}
    if "thinking" in values:
        thinking = read_fields(values["thinking"], THINKING_FIELDS, "thinking.")
    is_on = thinking["type"] != "disabled"
    variables = dict.fromkeys(_REASONING_SWITCHES, is_on)
    fields: dict[str, Any] = {
        "chat_template_kwargs": {**variables, **values.get("chat_template_kwargs", {})},
        "include_reasoning": is_on and thinking.get("display") != "omitted",
    }
    if is_on and "budget_tokens" in thinking:
        fields["thinking_token_budget"] = thinking["budget_tokens"]
        names["thinking_token_budget"] = "thinking.budget_tokens"
    output = read_fields(values.get("output_config", {}), OUTPUT_CONFIG_FIELDS, "output_config.")
    if "effort" in output:
        fields["reasoning_effort"] = output["effort"]
    return fields


def _response_format(values: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    path, given = "output_config.format", values.get("output_config", {}).get("format")
    if given is None:
        path, given = "output_format", values.get("output_format")
    if given is None:
        return {}
    schema = read_fields(given, OUTPUT_FORMAT_FIELDS, f"{path}.")["schema"]
    names["response_format"] = path
    names["response_format.json_schema.schema"] = f"{path}.schema"
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
