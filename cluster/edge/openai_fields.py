"""Every request field that OpenAI or vLLM documents, once, with its schema and its support here.

- SUPPORTED fields act.
- NO_EFFECT fields are checked for their type and ignored, because ignoring them alters no answer.
- NOT_YET fields would alter the answer. They are accepted at their neutral value and refused at any
  other.

Source: OpenAI API reference (openai-python 3.51 request types); vLLM 0.32 protocol classes.
"""

from __future__ import annotations

import dataclasses
import re
from hashlib import blake2b

from cluster.edge.families.formats import EFFORTS
from cluster.edge.fields import (
    ANYTHING,
    ARRAY,
    BOOLEAN,
    INT64,
    INTEGER,
    NUMBER,
    OBJECT,
    STRING,
    Field,
    FieldTable,
    acts,
    any_of,
    array_of,
    bad_field,
    choice,
    no_effect,
    not_yet,
    sampled,
    shown,
)

REASONING_EFFORTS = EFFORTS
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_SALT_CHARS = 256
MAX_TEMPLATE_CHARS = 2**16
_TOKEN_ID = re.compile("-?[0-9]{1,18}")
_TOKEN_IDS = array_of(INTEGER)
_FUNCTION_NAME = {
    "type": "string",
    "pattern": r"^[A-Za-z0-9_.-]{1,128}$",
    "description": "1 to 128 letters, digits, dots, underscores and hyphens",
}


def _as_tuple(value: str | list[str], path: str) -> tuple[str, ...]:
    """Return one string or several as a tuple."""
    del path
    return (value,) if isinstance(value, str) else tuple(value)


def _session_name(given: str, path: str) -> str:
    """Return a hash of the client's name, which may be as large as the body; "" for no name.

    Requests that wait for their prompt to be encoded keep their fields in memory.
    """
    del path
    return blake2b(given.encode(), digest_size=16).hexdigest() if given else ""


def _logit_biases(given: dict[str, float], path: str) -> dict[int, float]:
    """Return biases by token id; JSON spells the ids as strings."""
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if _TOKEN_ID.fullmatch(key) is None:
            raise bad_field(path, f"has the key {shown(key)}, which is no token id")
        biases[int(key)] = bias
    return biases


# --- objects within bodies ------------------------------------------------------------------------

STREAM_OPTIONS_FIELDS = FieldTable(
    "StreamOptions",
    {
        "include_usage": acts(BOOLEAN, "A last event has the token counts."),
        "continuous_usage_stats": acts(BOOLEAN, "Every event has the token counts so far."),
        "include_obfuscation": no_effect(BOOLEAN, "Events are never padded."),
    },
)

JSON_SCHEMA_FIELDS = FieldTable(
    "ResponseFormatJsonSchema",
    {
        "schema": acts(OBJECT, "The JSON schema that the answer follows.", is_required=True),
        "name": no_effect(STRING, "For the client's own use."),
        "description": no_effect(STRING, "For the client's own use."),
        "strict": no_effect(BOOLEAN, "Every schema is followed strictly."),
    },
)

RESPONSE_FORMAT_FIELDS = FieldTable(
    "ResponseFormat",
    {
        "type": acts(
            choice("text", "json_object", "json_schema", "structural_tag"),
            "Form of the answer.",
            is_required=True,
        ),
        "json_schema": acts(JSON_SCHEMA_FIELDS, "With type json_schema: the schema."),
        "triggers": acts(array_of(STRING), "With type structural_tag: texts that begin a tag."),
        "structures": acts(array_of(OBJECT), "With type structural_tag: the tags."),
        "format": not_yet(ANYTHING, "A structural tag in xgrammar's form."),
    },
)

STRUCTURED_OUTPUTS_FIELDS = FieldTable(
    "StructuredOutputs",
    {
        "json": acts(any_of(STRING, OBJECT), "A JSON schema, as an object or as text."),
        "regex": acts(STRING, "A regular expression for the whole output."),
        "choice": acts(array_of(STRING), "Texts, one of which is the output."),
        "grammar": acts(STRING, "A grammar in Lark's syntax or in llama.cpp's EBNF."),
        "json_object": acts(BOOLEAN, "The output is any JSON object."),
        "structural_tag": acts(any_of(STRING, OBJECT), "Text with structures in it."),
        "disable_any_whitespace": acts(BOOLEAN, "JSON has one blank at most between values."),
        "disable_additional_properties": acts(
            BOOLEAN, "Objects have the properties of their schema alone."
        ),
        "whitespace_pattern": acts(STRING, "A regular expression for the white space of JSON."),
    },
)

FUNCTION_FIELDS = FieldTable(
    "FunctionDefinition",
    {
        "name": acts(_FUNCTION_NAME, "Name of the function.", is_required=True),
        "description": acts(STRING, "What it does, for the model."),
        "parameters": acts(OBJECT, "A JSON schema of its arguments."),
        "strict": acts(BOOLEAN, "A grammar makes arguments follow the schema."),
    },
)

TOOL_FIELDS = FieldTable(
    "Tool",
    {
        "type": acts(choice("function"), "Kind of the tool.", is_required=True),
        "function": acts(FUNCTION_FIELDS, "The function.", is_required=True),
    },
)

CALLED_FUNCTION_FIELDS = FieldTable(
    "CalledFunction",
    {
        "name": acts(_FUNCTION_NAME, "Name of the function.", is_required=True),
        "arguments": acts(STRING, "Its arguments, a JSON object as text."),
    },
)

TOOL_CALL_FIELDS = FieldTable(
    "ToolCall",
    {
        "id": acts(STRING, "Id by which a message of the role tool names the call."),
        "type": acts(choice("function"), "Kind of the tool."),
        "function": acts(CALLED_FUNCTION_FIELDS, "The called function.", is_required=True),
        "index": no_effect(INTEGER, "Streamed calls have it, and some clients send it back."),
    },
)
"""Fields of a call in an earlier message of the assistant."""

NAMED_FUNCTION_FIELDS = FieldTable(
    "NamedFunction", {"name": acts(_FUNCTION_NAME, "Name of the function.", is_required=True)}
)

NAMED_TOOL_FIELDS = FieldTable(
    "NamedTool",
    {
        "type": acts(choice("function"), "Kind of the tool."),
        "function": acts(NAMED_FUNCTION_FIELDS, "The function.", is_required=True),
    },
)

ALLOWED_TOOLS_FIELDS = FieldTable(
    "AllowedTools",
    {
        "mode": acts(choice("auto", "required"), "Whether one must be called.", is_required=True),
        "tools": acts(
            array_of(NAMED_TOOL_FIELDS, minItems=1), "Those of the tools.", is_required=True
        ),
    },
)

TOOL_CHOICE_FIELDS = FieldTable(
    "ToolChoice",
    {
        "type": acts(choice("function", "allowed_tools"), "Kind of the choice."),
        "function": acts(NAMED_FUNCTION_FIELDS, "With type function: the one to call."),
        "allowed_tools": acts(
            ALLOWED_TOOLS_FIELDS, "With type allowed_tools: those that may be called."
        ),
    },
)

CONTENT_PART_FIELDS = FieldTable(
    "ContentPart",
    {
        "type": acts(STRING, "Kind of the part; only text is served.", is_required=True),
        "text": acts(STRING, "The text.", is_required=True),
    },
)

MESSAGE_FIELDS = FieldTable(
    "Message",
    {
        "role": acts(choice(*ROLES), "Who speaks.", is_required=True),
        "content": acts(
            any_of(STRING, array_of(CONTENT_PART_FIELDS)),
            "A text, or text parts, which are joined by line breaks.",
        ),
        "name": acts(
            STRING,
            "Name of the speaker, for the chat template; with the role function, the called one.",
        ),
        "reasoning": acts(STRING, "Reasoning of an earlier answer, for the chat template."),
        "reasoning_content": acts(STRING, "The same as reasoning, under its other name."),
        "tool_calls": acts(array_of(TOOL_CALL_FIELDS), "Calls of an earlier answer."),
        "tool_call_id": acts(STRING, "The call whose result a message of the role tool is."),
        "refusal": no_effect(STRING, "Part of an answer that a client may send back."),
        "annotations": no_effect(ARRAY, "Part of an answer that a client may send back."),
        "audio": not_yet(OBJECT, "An earlier answer in sound."),
        "function_call": acts(CALLED_FUNCTION_FIELDS, "The former name of tool_calls: one call."),
    },
)

# --- bodies ---------------------------------------------------------------------------------------

_GENERATION: dict[str, Field] = {
    "model": acts(STRING, "Name of a served model; without it the first one answers."),
    "stream": acts(BOOLEAN, "The answer comes as server-sent events."),
    "stream_options": acts(STREAM_OPTIONS_FIELDS, "Options of a stream."),
    "max_tokens": acts(INTEGER, "Most tokens of the output."),
    "min_tokens": sampled("min_tokens", INTEGER, "No end before this many tokens."),
    "n": sampled("n", INTEGER, "Number of choices."),
    "temperature": sampled("temperature", NUMBER, "0 takes the likeliest token."),
    "top_p": sampled("top_p", NUMBER, "Draw among the likeliest tokens of this mass."),
    "top_k": sampled("top_k", INTEGER, "Draw among this many likeliest tokens; 0 or -1: all."),
    "min_p": sampled("min_p", NUMBER, "Least probability, relative to the likeliest token's."),
    "seed": sampled("seed", INTEGER, "Equal requests with a seed draw equal tokens; -1: none."),
    "presence_penalty": sampled("presence_penalty", NUMBER, "Against tokens of the output."),
    "frequency_penalty": sampled(
        "frequency_penalty", NUMBER, "Against tokens of the output, for each time they occur."
    ),
    "repetition_penalty": sampled(
        "repetition_penalty", NUMBER, "Against tokens of prompt and output, as a factor."
    ),
    "logit_bias": sampled(
        "logit_bias",
        {"type": "object", "additionalProperties": NUMBER},
        "Added to the logits of tokens; the keys are token ids.",
        then=_logit_biases,
    ),
    "stop": sampled(
        "stop", any_of(STRING, array_of(STRING)), "Texts that end the output.", then=_as_tuple
    ),
    "stop_token_ids": sampled("stop_token_ids", _TOKEN_IDS, "Tokens that end the output."),
    "include_stop_str_in_output": acts(BOOLEAN, "The output keeps the text that has ended it."),
    "ignore_eos": acts(BOOLEAN, "The model's end token does not end the output."),
    "allowed_token_ids": sampled("allowed_token_ids", _TOKEN_IDS, "Draw among these tokens."),
    "bad_words": sampled("bad_words", array_of(STRING), "Words that the output never has."),
    "logprob_token_ids": sampled(
        "logprob_token_ids", _TOKEN_IDS, "Log probabilities of these tokens at each position."
    ),
    "prompt_logprobs": sampled(
        "prompt_logprobs", INTEGER, "So many likeliest tokens at each position of the prompt."
    ),
    "use_beam_search": acts(BOOLEAN, "Search for the likeliest outputs; n is the width."),
    "length_penalty": acts(NUMBER, "Exponent of the length in a beam search's score."),
    "echo": acts(BOOLEAN, "The answer begins with the prompt, or with the turn it continues."),
    "response_format": acts(RESPONSE_FORMAT_FIELDS, "Form of the answer, such as a JSON schema."),
    "structured_outputs": acts(STRUCTURED_OUTPUTS_FIELDS, "A grammar that the output follows."),
    "truncate_prompt_tokens": sampled(
        "truncate_prompt_tokens", INTEGER, "Keep so many tokens of the prompt; -1: what fits."
    ),
    "truncation_side": acts(choice("left", "right"), "Side from which a prompt is truncated."),
    "add_special_tokens": acts(BOOLEAN, "The tokenizer adds its special tokens to the prompt."),
    "skip_special_tokens": acts(BOOLEAN, "The answer leaves out special tokens."),
    "return_token_ids": acts(BOOLEAN, "The answer has the token ids of prompt and output."),
    "priority": acts(INT64, "Lower values run first; refused unless engines schedule by priority."),
    "cache_salt": acts(
        {"type": "string", "minLength": 1, "maxLength": MAX_SALT_CHARS},
        "Only requests with the same salt share cached KV.",
    ),
    "session_id": acts(STRING, "Requests of one session prefer one engine.", then=_session_name),
    "user": no_effect(STRING, "For the client's own records."),
    "request_id": no_effect(STRING, "The header x-request-id names a request."),
    "spaces_between_special_tokens": no_effect(BOOLEAN, "An option of slow tokenizers only."),
    "stream_interval": acts(
        {"type": "integer", "minimum": 1}, "Least tokens in an event of a stream."
    ),
    "thinking_token_budget": not_yet(INTEGER, "Most tokens of the reasoning."),
    "return_tokens_as_token_ids": acts(BOOLEAN, "Log probabilities name tokens as token_id:7."),
    "return_token_offsets": no_effect(BOOLEAN, "vLLM has them in its rendering routes only."),
    "vllm_xargs": not_yet(OBJECT, "Arguments of vLLM's plugins.", neutral=({},)),
    "kv_transfer_params": not_yet(OBJECT, "The cluster itself moves KV between its engines."),
    "ec_transfer_params": not_yet(OBJECT, "Transfer of an encoder's output."),
    "repetition_detection": not_yet(OBJECT, "Ends outputs that repeat themselves."),
    "watermarking": not_yet(ANYTHING, "Marks the output.", neutral=(False,)),
    "mm_payload": not_yet(ANYTHING, "Images, sound or video, preprocessed."),
    "routed_experts_prompt_start": not_yet(
        INTEGER, "Where the answer's list of routed experts starts.", neutral=(0,)
    ),
}
"""Fields that /v1/completions and /v1/chat/completions share."""

COMPLETION_FIELDS = FieldTable(
    "CompletionRequest",
    {
        "prompt": acts(
            any_of(
                STRING,
                array_of(STRING),
                array_of(INTEGER),
                array_of(array_of(INTEGER)),
            ),
            "A text or token ids, or up to 256 of either.",
            is_required=True,
        ),
        **_GENERATION,
        "logprobs": acts(INTEGER, "Log probabilities of so many likeliest tokens."),
        "best_of": acts(INTEGER, "Choices to generate: 1 or n, as no others are dropped."),
        "suffix": not_yet(STRING, "Text behind the output."),
        "prompt_embeds": not_yet(ANYTHING, "A prompt as embeddings."),
    },
)

CHAT_FIELDS = FieldTable(
    "ChatCompletionRequest",
    {
        "messages": acts(
            array_of(MESSAGE_FIELDS, minItems=1), "The conversation.", is_required=True
        ),
        **_GENERATION,
        "max_completion_tokens": acts(INTEGER, "Most tokens of the output."),
        "logprobs": acts(BOOLEAN, "The answer has log probabilities."),
        "top_logprobs": acts(INTEGER, "Log probabilities of so many likeliest tokens, too."),
        "add_generation_prompt": acts(BOOLEAN, "The prompt ends with the assistant's turn."),
        "chat_template_kwargs": acts(OBJECT, "Variables of the chat template."),
        "tools": acts(array_of(TOOL_FIELDS), "Functions that the model may call."),
        "tool_choice": acts(
            any_of(choice("auto", "none", "required"), TOOL_CHOICE_FIELDS),
            "Whether, or which of, the tools are called.",
        ),
        "parallel_tool_calls": acts(BOOLEAN, "False: one call in a message at most."),
        "include_reasoning": acts(BOOLEAN, "False leaves the reasoning out of the answer."),
        "thinking_token_budget": acts(
            {"type": "integer", "minimum": 0}, "Most tokens of the reasoning; then it is ended."
        ),
        "reasoning_effort": acts(
            choice(*REASONING_EFFORTS), "A variable of the chat template; none turns reasoning off."
        ),
        "prompt_cache_key": acts(STRING, "The same as session_id.", then=_session_name),
        "prompt_cache_retention": no_effect(STRING, "A hint about cost that is not used here."),
        "prompt_cache_options": no_effect(OBJECT, "A hint about cost that is not used here."),
        "service_tier": acts(STRING, "There is one tier; the answer then names it: default."),
        "safety_identifier": no_effect(STRING, "For the client's own records."),
        "metadata": no_effect(OBJECT, "For the client's own records; nothing is stored."),
        "store": no_effect(BOOLEAN, "Nothing is stored."),
        "prediction": no_effect(OBJECT, "A guess at the answer that only affects speed."),
        "continue_final_message": acts(BOOLEAN, "The answer continues the last message."),
        "return_prompt_text": acts(BOOLEAN, "The answer has the text of the rendered prompt."),
        "chat_template": acts(
            {"type": "string", "maxLength": MAX_TEMPLATE_CHARS},
            "A template of the client's own; refused unless the server trusts its clients.",
        ),
        "documents": acts(array_of(OBJECT), "Documents for the chat template."),
        "functions": acts(
            array_of(FUNCTION_FIELDS), "The former name of tools; the answer has a function_call."
        ),
        "function_call": acts(
            any_of(choice("none", "auto"), NAMED_FUNCTION_FIELDS),
            "The former name of tool_choice.",
        ),
        "modalities": not_yet(ARRAY, "Forms of the answer besides text.", neutral=(["text"],)),
        "audio": not_yet(OBJECT, "Options of spoken answers."),
        "verbosity": acts(
            choice("low", "medium", "high"), "A variable of the chat template, if it knows it."
        ),
        "moderation": not_yet(OBJECT, "Moderation of the conversation."),
        "web_search_options": not_yet(OBJECT, "Search in the web."),
        "media_io_kwargs": not_yet(OBJECT, "Options of loading media.", neutral=({},)),
        "mm_processor_kwargs": not_yet(OBJECT, "Options of a media processor.", neutral=({},)),
    },
)

_TOKENIZE_AS_CHAT = (
    "add_generation_prompt", "chat_template_kwargs", "continue_final_message",
    "chat_template", "tools", "media_io_kwargs", "mm_processor_kwargs",
)  # fmt: skip
TOKENIZE_FIELDS = FieldTable(
    "TokenizeRequest",
    {
        "model": acts(STRING, "Name of a served model."),
        "prompt": acts(STRING, "A text; either this or messages."),
        "messages": dataclasses.replace(CHAT_FIELDS["messages"], is_required=False),
        "add_special_tokens": acts(BOOLEAN, "The tokenizer adds its special tokens."),
        "return_token_strs": acts(BOOLEAN, "The answer has the tokens as text, too."),
        **{name: CHAT_FIELDS[name] for name in _TOKENIZE_AS_CHAT},
    },
)

DETOKENIZE_FIELDS = FieldTable(
    "DetokenizeRequest",
    {
        "model": acts(STRING, "Name of a served model."),
        "tokens": acts(_TOKEN_IDS, "The token ids.", is_required=True),
    },
)
