"""Translation of /v1/responses bodies into chat bodies, with the client's name of each field. Pure.

The conversation of a response is a list of items. Neighbouring items of the assistant, such as its
reasoning and its calls, become one message of the chat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from cluster.edge.field_names import WholeField, naming_fields
from cluster.edge.fields import (
    array,
    bad_field,
    object_,
    read_fields,
    shown,
)
from cluster.edge.openai_limits import MAX_MESSAGES
from cluster.edge.responses.fields import (
    FORMAT_FIELDS,
    FUNCTION_CALL_FIELDS,
    FUNCTION_CALL_OUTPUT_FIELDS,
    LOGPROBS,
    MESSAGE_FIELDS,
    PART_FIELDS,
    PASSED_FIELDS,
    REASONING_FIELDS,
    REASONING_ITEM_FIELDS,
    TEXT_FIELDS,
    TOOL_CHOICE_FIELDS,
    TOOL_FIELDS,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_FUNCTION_FIELDS = ("description", "parameters", "strict")
_TEXT_PARTS = ("input_text", "output_text", "text")
_CONTINUED = "previous_response_id"
_INSTRUCTIONS_GAP = "\n\n"


@dataclass(frozen=True, slots=True)
class Translation:
    """A request as a chat.

    Attributes:
        chat: The body of the chat.
        field_names: The client's paths of the chat's fields, see `cluster.edge.field_names`.
        items: The request's own input.
        repeated: Fields of the answer that repeat the request.
        has_logprobs: Whether texts have log probabilities.
        namespaces: Of each function in a namespace, its fields of a call, by the chat's name of it.
    """

    chat: dict[str, Any]
    field_names: dict[str, str]
    items: list[dict[str, Any]]
    repeated: dict[str, Any]
    has_logprobs: bool
    namespaces: dict[str, dict[str, str]]


def translate(
    body: Mapping[str, Any],
    values: Mapping[str, Any],
    previous: Iterable[dict[str, Any]] = (),
) -> Translation:
    """Return the chat of a request.

    Args:
        body: Its body, whose values the fields of chats check again.
        values: The checked fields, by `RESPONSES_FIELDS`.
        previous: Items of the conversation that it continues.

    Raises:
        BadRequestError: A field is wrong; `param` is its path.
    """
    chat = {name: body[name] for name in ("model", *PASSED_FIELDS) if name in values}
    names = {"max_completion_tokens": "max_output_tokens"}
    if "max_output_tokens" in values:
        chat["max_completion_tokens"] = values["max_output_tokens"]
    items = _input_items(values["input"])
    conversation = _Conversation(names)
    with naming_fields({_CONTINUED: WholeField(_CONTINUED)}):
        for item in previous:
            conversation.add(item, _CONTINUED)
    for i, item in enumerate(items):
        path = "input" if isinstance(values["input"], str) else f"input[{i}]"
        conversation.add(item, path)
    chat["messages"] = conversation.finish(values.get("instructions"))
    has_logprobs = LOGPROBS in values.get("include", ()) or values.get("top_logprobs", 0) > 0
    if has_logprobs:
        chat |= {"logprobs": True, "top_logprobs": values.get("top_logprobs", 0)}
    text = _read_text(values.get("text", {}), chat, names)
    reasoning = read_fields(values.get("reasoning", {}), REASONING_FIELDS, "reasoning.")
    if "effort" in reasoning:
        chat["reasoning_effort"] = reasoning["effort"]
        names["reasoning_effort"] = "reasoning.effort"
    tools = _read_tools(values.get("tools", ()))
    allowed = _read_tool_choice(values.get("tool_choice", "auto"), chat, names)
    functions = list(_functions(tools))
    _offer_functions(functions, allowed, chat, names)
    return Translation(
        chat=chat,
        field_names=names,
        items=items,
        repeated={
            "instructions": values.get("instructions"),
            "max_output_tokens": values.get("max_output_tokens"),
            "max_tool_calls": values.get("max_tool_calls"),
            "metadata": values.get("metadata", {}),
            "parallel_tool_calls": values.get("parallel_tool_calls", True),
            "previous_response_id": values.get("previous_response_id"),
            "prompt_cache_key": body.get("prompt_cache_key"),
            "reasoning": {name: reasoning.get(name) for name in ("effort", "summary")},
            "safety_identifier": values.get("safety_identifier"),
            "text": text,
            "tool_choice": values.get("tool_choice", "auto"),
            "tools": tools,
            "top_logprobs": values.get("top_logprobs", 0),
            "truncation": values.get("truncation", "disabled"),
            "user": values.get("user"),
        },
        has_logprobs=has_logprobs,
        namespaces={
            each.name: {"name": each.tool["name"], "namespace": each.namespace}
            for each in functions
            if each.namespace is not None
        },
    )


def _input_items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of an input."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given


class _Conversation:
    """The messages of a chat, made from items one after the other.

    Args:
        names: Gets the client's paths of the messages' fields.
    """

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names
        self._messages: list[dict[str, Any]] = []
        self._paths: list[dict[str, str]] = []
        self._assistant: dict[str, Any] | None = None

    def add(self, item: Mapping[str, Any], path: str) -> None:
        """Add an item.

        Raises:
            BadRequestError: It is wrong; `param` is its path.
        """
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(read_fields(item, MESSAGE_FIELDS, f"{path}."), path)
        elif kind == "function_call":
            self._add_call(read_fields(item, FUNCTION_CALL_FIELDS, f"{path}."), path)
        elif kind == "function_call_output":
            result = read_fields(item, FUNCTION_CALL_OUTPUT_FIELDS, f"{path}.")
            text = _text(result["output"], f"{path}.output")
            message = {"role": "tool", "tool_call_id": result["call_id"], "content": text}
            self._append(message, path, {"tool_call_id": "call_id", "content": "output"})
        elif kind == "reasoning":
            self._add_reasoning(read_fields(item, REASONING_ITEM_FIELDS, f"{path}."), path)
        else:
            known = "message, function_call, function_call_output and reasoning"
            raise bad_field(f"{path}.type", f"{shown(kind)} is not supported: send {known}")

    def finish(self, instructions: str | None) -> list[dict[str, Any]]:
        """Return all messages, behind the instructions.

        Instructions and system messages at the beginning become one message, as many chat templates
        take only one.

        Raises:
            BadRequestError: There are too many messages.
        """
        count = 0
        while count < len(self._messages) and self._messages[count]["role"] == "system":
            count += 1
        texts = [message["content"] for message in self._messages[:count]]
        first_path = self._paths[0][""] if count else "instructions"
        if instructions is not None:
            texts, first_path = [instructions, *texts], "instructions"
        messages, paths = self._messages[count:], self._paths[count:]
        if texts:
            content = _INSTRUCTIONS_GAP.join(texts)
            messages = [{"role": "system", "content": content}, *messages]
            paths = [{"": first_path}, *paths]
        if len(messages) > MAX_MESSAGES:
            text = f"make {len(messages)} messages, but a conversation may have {MAX_MESSAGES}"
            raise bad_field("input", f"and what it continues {text}")
        for message in messages:
            # A turn may have reasoning alone.
            message.setdefault("content", "")
        self._names["messages"] = "input"
        for i, its_paths in enumerate(paths):
            for below, path in its_paths.items():
                is_previous = path.startswith(_CONTINUED)
                own = WholeField(_CONTINUED) if is_previous else path
                self._names[f"messages[{i}]{below}"] = own
        return messages

    def _append(
        self, message: dict[str, Any], path: str, fields: Mapping[str, str] | None = None
    ) -> None:
        self._messages.append(message)
        below = {f".{name}": f"{path}.{own}" for name, own in (fields or {}).items()}
        self._paths.append({"": path, **below})
        self._assistant = message if message["role"] == "assistant" else None

    def _add_message(self, item: dict[str, Any], path: str) -> None:
        text = _text(item["content"], f"{path}.content")
        if item["role"] != "assistant":
            # OpenAI's name of system messages for reasoning models; templates know this one.
            role = "system" if item["role"] == "developer" else item["role"]
            self._append({"role": role, "content": text}, path)
        elif self._assistant is None or "content" in self._assistant:
            self._append({"role": "assistant", "content": text}, path)
        else:
            self._assistant["content"] = text

    def _add_reasoning(self, item: dict[str, Any], path: str) -> None:
        if "content" not in item and "summary" not in item:
            raise bad_field(f"{path}.summary", "is required")
        name = "content" if item.get("content") else "summary"
        text = _text(item.get(name, []), f"{path}.{name}", ("reasoning_text", "summary_text"))
        if self._assistant is None or self._assistant.keys() & {"content", "tool_calls"}:
            self._append({"role": "assistant"}, path)
        assert self._assistant is not None
        if text:
            before = self._assistant.get("reasoning")
            self._assistant["reasoning"] = text if before is None else f"{before}\n{text}"

    def _add_call(self, item: dict[str, Any], path: str) -> None:
        if item.get("status") == "incomplete":
            return  # the beginning of a call, from a stream: its arguments are no object
        name = item["name"]
        if "namespace" in item:
            name = _full_name(item["namespace"], name)
        function = {"name": name, "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        if self._assistant is None:
            self._append({"role": "assistant"}, path)
        assert self._assistant is not None
        calls = self._assistant.setdefault("tool_calls", [])
        below = f".tool_calls[{len(calls)}]"
        calls.append(call)
        self._paths[-1][below] = path
        self._paths[-1][f"{below}.function"] = path


def _text(content: object, path: str, kinds: tuple[str, ...] = _TEXT_PARTS) -> str:
    """Return a text, or a list of parts with text, as one text."""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(array(content, path)):
        where = f"{path}[{i}]"
        kind = object_(part, where).get("type")
        name = "refusal" if kind == "refusal" and kinds is _TEXT_PARTS else "text"
        if kind not in kinds and name == "text":
            raise bad_field(f"{where}.type", f"{shown(kind)} is not supported: send {kinds[0]}")
        fields = read_fields(part, PART_FIELDS, f"{where}.")
        if name not in fields:
            raise bad_field(f"{where}.{name}", "is required")
        texts.append(fields[name])
    return "\n".join(texts)


def _read_text(
    given: Mapping[str, Any], chat: dict[str, Any], names: dict[str, str]
) -> dict[str, Any]:
    """Translate `text`; return what the answer repeats of it."""
    text = read_fields(given, TEXT_FIELDS, "text.")
    if "verbosity" in text:
        chat["verbosity"] = text["verbosity"]
        names["verbosity"] = "text.verbosity"
    own = read_fields(text.get("format", {"type": "text"}), FORMAT_FIELDS, "text.format.")
    names["response_format"] = "text.format"
    names["response_format.json_schema"] = "text.format"
    match own.get("type"):
        case None:
            raise bad_field("text.format.type", "is required")
        case "json_schema":
            for name in ("name", "schema"):
                if name not in own:
                    raise bad_field(f"text.format.{name}", "is required with type json_schema")
            schema = {name: value for name, value in own.items() if name != "type"}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
            own = {"description": None, "strict": False, **own}
        case kind:
            for name in ("name", "schema", "strict", "description"):
                if name in own:
                    raise bad_field(f"text.format.{name}", "needs the type json_schema")
            if kind != "text":
                chat["response_format"] = {"type": kind}
    return {"format": own, "verbosity": text.get("verbosity", "medium")}


class _Function(NamedTuple):
    """A function that a request offers.

    Attributes:
        name: Its name in the chat.
        tool: Its checked fields.
        path: Its path in the request.
        namespace: The namespace that holds it, if one does.
    """

    name: str
    tool: dict[str, Any]
    path: str
    namespace: str | None


def _full_name(namespace: str, name: str) -> str:
    """Return the name by which a chat knows a function in a namespace.

    Source: vLLM 0.32 `flat_namespace_tool_name`.
    """
    return f"{namespace}__{name}"


def _functions(tools: Iterable[dict[str, Any]]) -> Iterator[_Function]:
    """Return the functions of checked tools."""
    for i, tool in enumerate(tools):
        path = f"tools[{i}]"
        if tool["type"] == "function":
            yield _Function(tool["name"], tool, path, None)
            continue
        namespace = tool["name"]
        for j, function in enumerate(tool["tools"]):
            name = _full_name(namespace, function["name"])
            yield _Function(name, function, f"{path}.tools[{j}]", namespace)


def _read_tools(
    given: Iterable[Mapping[str, Any]], path: str = "tools", *, namespaces: bool = True
) -> list[dict[str, Any]]:
    """Return the checked tools as the answer repeats them.

    Args:
        given: The tools.
        path: Their path in the request.
        namespaces: Whether they may be namespaces.
    """
    tools = []
    for i, body in enumerate(given):
        where = f"{path}[{i}]"
        kind = body.get("type")
        if kind is None:
            raise bad_field(f"{where}.type", "is required")
        if kind != "function" and not (namespaces and kind == "namespace"):
            text = "a tool that OpenAI runs"
            if kind == "custom":
                text = "a tool without a JSON schema"
            elif kind == "namespace":
                text = "a namespace inside a namespace"
            text = f"is {text}, which is not offered here: send functions"
            raise bad_field(f"{where}.type", f"{shown(kind)} {text}")
        own = read_fields(body, TOOL_FIELDS, f"{where}.")
        if "name" not in own:
            raise bad_field(f"{where}.name", "is required")
        if kind == "namespace":
            held = _read_tools(own.get("tools", ()), f"{where}.tools", namespaces=False)
            tools.append({"description": None, **own, "tools": held})
        else:
            tools.append(
                {"type": kind, "description": None, "parameters": None, "strict": False, **own}
            )
    return tools


def _read_tool_choice(
    choice: str | dict[str, Any], chat: dict[str, Any], names: dict[str, str]
) -> list[str] | None:
    """Translate `tool_choice`; return the names of the tools that it allows, None for all."""
    if isinstance(choice, str):
        if choice != "auto":
            chat["tool_choice"] = choice
        return None
    fields = read_fields(choice, TOOL_CHOICE_FIELDS, "tool_choice.")
    kind = fields.get("type")
    if kind == "function":
        chat["tool_choice"] = {"type": "function", "function": {"name": fields.get("name")}}
        names["tool_choice.function"] = "tool_choice"
        return None
    if kind != "allowed_tools":
        text = "is not supported: send function or allowed_tools"
        raise bad_field("tool_choice.type", f"{shown(kind)} {text}")
    chat["tool_choice"] = fields.get("mode", "auto")
    allowed: list[str] = []
    for i, body in enumerate(fields.get("tools", ())):
        path = f"tool_choice.tools[{i}]"
        tool = read_fields(body, TOOL_CHOICE_FIELDS, f"{path}.")
        if tool.get("type") != "function":
            raise bad_field(f"{path}.type", f"must be function, got {shown(tool.get('type'))}")
        if "name" not in tool:
            raise bad_field(f"{path}.name", "is required")
        allowed.append(tool["name"])
    if not allowed:
        raise bad_field("tool_choice.tools", "must name at least one tool")
    return allowed


def _offer_functions(
    functions: list[_Function],
    allowed: list[str] | None,
    chat: dict[str, Any],
    names: dict[str, str],
) -> None:
    """Offer functions to the model; it does not see those that it may not call."""
    known = {each.name for each in functions}
    for i, name in enumerate(allowed or ()):
        if name not in known:
            raise bad_field(f"tool_choice.tools[{i}].name", f"is {shown(name)}, which no tool has")
    for each in functions:
        if allowed is not None and each.name not in allowed:
            continue
        given = {name: each.tool[name] for name in _FUNCTION_FIELDS if each.tool[name] is not None}
        offered = chat.setdefault("tools", [])
        names[f"tools[{len(offered)}].function"] = each.path
        offered.append({"type": "function", "function": {"name": each.name, **given}})
