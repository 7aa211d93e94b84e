"""Parsing and validation of request bodies; bad input becomes a 400 or 404. Pure.

Three stages, cheapest first, so that a bad request costs little:

1. `parse_*` checks the fields.
2. `encode_prompt` and `encode_bad_words` run the chat template and the tokenizer. They are slow, so
   the routes move them to a thread if their cost is high.
3. `build_request` checks the values that depend on the number of prompt tokens.

`cluster.edge.openai_fields` has the fields, `cluster.edge.openai_limits` their size limits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import orjson

from cluster.edge.beam_search_fields import MAX_EXTENSIONS, read_length_penalty
from cluster.edge.fields import (
    INTEGER,
    array_of,
    bad_field,
    check_of,
    read_fields,
    shown,
)
from cluster.edge.openai import ResponseSpec
from cluster.edge.openai_fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    CONTENT_PART_FIELDS,
    DETOKENIZE_FIELDS,
    MESSAGE_FIELDS,
    STREAM_OPTIONS_FIELDS,
    TOKENIZE_FIELDS,
)
from cluster.edge.openai_limits import MAX_PROMPTS, check_sizes, check_structure, prompt_too_long
from cluster.edge.structured_outputs import read_grammar
from cluster.edge.tool_requests import (
    NO_TOOLS,
    ToolUse,
    read_calls,
    read_function_call,
    read_tool_use,
    template_tools,
)
from cluster.errors import BadRequestError, NotFoundError
from replicas import bad_words
from replicas.beam_search import BeamSearchParams
from replicas.errors import InvalidRequestError
from replicas.messages import EngineRequest, check_priority
from replicas.sampling_params import DEFAULTED_FIELDS, SamplingDefaults, SamplingParams
from replicas.tokenizer import cut_at_end_mark, with_end_mark
from replicas.truncation import most_prompt_tokens, truncated

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from cluster.edge.openai import ModelCard
    from cluster.edge.openai_limits import BodyLimits
    from cluster.edge.structured_outputs import Grammar
    from replicas.grammar_checks import GrammarChecker
    from replicas.sampling_params import ReasoningBudget
    from replicas.tokenizer import Tokenizer

_DEFAULT_COMPLETION_TOKENS = 16
_OWN_TEMPLATE_COST = 2**16
_CHARS_PER_ENTRY = 16
"""Least cost of a value in a message for the chat template, in characters to encode."""
_token_ids = check_of(array_of(INTEGER))
_NO_THINKING = {"enable_thinking": False, "thinking": False}
"""Variables by which chat templates turn reasoning off."""
_SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos", "skip_special_tokens",
    "include_stop_str_in_output", "n", "logprobs", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "min_p", "min_tokens", "logit_bias", "prompt_logprobs",
    "pooling",
)  # fmt: skip
_SAMPLING_LISTS = ("allowed_token_ids", "logprob_token_ids")
_RESPONSE_FIELDS = (
    "stream", "return_token_ids", "include_reasoning", "return_prompt_text", "service_tier",
    "stream_interval", "return_tokens_as_token_ids",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to encode without a template; `path` is its path in the body."""

    text: str
    add_special_tokens: bool = True
    path: str = "prompt"


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids that the client sent; `path` is their path in the body."""

    token_ids: list[int]
    path: str = "prompt"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the model's chat template; every content is plain text.

    Attributes:
        messages: The messages.
        add_generation_prompt: Whether the prompt ends with the head of the assistant's turn.
        template_kwargs: Further variables of the template.
        add_special_tokens: Whether the tokenizer adds its special tokens.
        tools: Tools as templates take them.
        documents: Documents for the template.
        continue_final_message: Whether the answer continues the last message.
        chat_template: The client's own template.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] | None = None
    add_special_tokens: bool = False
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    continue_final_message: bool = False
    chat_template: str | None = None


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A generation request with checked fields, before its prompt is encoded.

    Attributes:
        prompt: The prompt; of several ones the first.
        values: The checked fields, without nulls; `logprobs` is a number for both APIs.
        response_options: Options of the `ResponseSpec` that follow from the fields.
        max_tokens: The client's limit; None takes the model's default, or if it has none all the
            room that the prompt leaves.
        max_tokens_param: The field with `max_tokens`.
        bad_words_token_ids: Its `bad_words`, once they are encoded.
        grammar: The grammar that the output follows, if there is one; not compiled yet.
        tool_use: Its tools.
        is_parsed: Whether a parser reads the output, which then needs its special tokens.
        reasoning_budget: Limit of its reasoning, once the prompt is encoded.
        has_soft_budget: Whether a limit of the reasoning that the model cannot keep is dropped.
        length_penalty: That of the beam search that is asked for; None: tokens are drawn.
        drops_messages: Whether a conversation that is too long loses its oldest messages.
        more_prompts: Further prompts, each with as many choices.
        field_names: Names in the client's body of fields that another API translates, for errors;
            see `cluster.edge.field_names`.
    """

    prompt: Prompt
    values: Mapping[str, Any]
    response_options: Mapping[str, Any]
    max_tokens: int | None
    max_tokens_param: str = "max_tokens"
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    tool_use: ToolUse = NO_TOOLS
    is_parsed: bool = False
    reasoning_budget: ReasoningBudget | None = None
    has_soft_budget: bool = False
    length_penalty: float | None = None
    drops_messages: bool = False
    more_prompts: tuple[Prompt, ...] = ()
    field_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def prompt_param(self) -> str:
        """The field with the prompt."""
        return "messages" if isinstance(self.prompt, ChatPrompt) else self.prompt.path

    @property
    def num_reserved(self) -> int | None:
        """Most tokens of output; 0 for an embedding, whose one token needs no room."""
        return 0 if "pooling" in self.values else self.max_tokens or None

    @property
    def is_truncated(self) -> bool:
        """Whether the prompt may be longer than the model takes, because it will be truncated."""
        return "truncate_prompt_tokens" in self.values


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A /tokenize body."""

    model: str | None
    prompt: TextPrompt | ChatPrompt
    return_token_strs: bool


def parse_body(raw: bytes, limits: BodyLimits) -> dict[str, Any]:
    """Decode a request body, after checking its limits.

    Raises:
        BadRequestError: The body is not standard JSON (NaN, Infinity and numbers too large for a
            double are not), nested too deep, not an object, or exceeds a limit.
    """
    check_structure(raw, limits)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError(f"the body must be a JSON object, got {shown(body)}")
    check_sizes(body, limits)
    return body


def parse_completion(body: Mapping[str, Any]) -> ParsedRequest:
    """Check the fields of a /v1/completions body.

    Raises:
        BadRequestError: A field is wrong; `param` is its path.
    """
    values = read_fields(body, COMPLETION_FIELDS)
    length_penalty = read_length_penalty(values)
    max_tokens = values.get("max_tokens", _DEFAULT_COMPLETION_TOKENS)
    options = _response_options(values)
    if values.get("echo", False):
        options["echoes_logprobs"] = "logprobs" in values
        # As in vLLM an engine then gives one token, which the answer leaves out.
        options["drops_output"] = max_tokens == 0 and not values.get("stream", False)
        if "logprobs" in values:
            values.setdefault("prompt_logprobs", values["logprobs"])
    _prefer_listed_logprobs(values)
    best_of = values.pop("best_of", 1)
    if best_of not in {1, values.get("n", 1)}:
        raise bad_field("best_of", f"is {best_of}, but can only be 1 or n; ask for more choices")
    add_special_tokens = values.get("add_special_tokens", True)
    [prompt, *more_prompts] = read_prompts("prompt", values["prompt"], add_special_tokens)
    return ParsedRequest(
        prompt=prompt,
        more_prompts=tuple(more_prompts),
        values=values,
        response_options=options,
        max_tokens=1 if options.get("drops_output") else max_tokens,
        grammar=read_grammar(values),
        length_penalty=length_penalty,
    )


def parse_chat_completion(body: Mapping[str, Any]) -> ParsedRequest:
    """Check the fields of a /v1/chat/completions body.

    Raises:
        BadRequestError: A field is wrong; `param` is its path.
    """
    values = read_fields(body, CHAT_FIELDS)
    _join_logprobs(values)
    length_penalty = read_length_penalty(values)
    _prefer_listed_logprobs(values)
    tool_use = read_tool_use(values)
    if length_penalty is not None and tool_use.is_constrained:
        raise bad_field("tools", "that are required or strict cannot be used with use_beam_search")
    param = "max_completion_tokens" if "max_completion_tokens" in values else "max_tokens"
    return ParsedRequest(
        prompt=_chat_prompt(values),
        values=values,
        response_options=_response_options(values),
        max_tokens=values.get(param),
        max_tokens_param=param,
        grammar=read_grammar(values),
        tool_use=tool_use,
        length_penalty=length_penalty,
    )


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """Check the fields of a /tokenize body, of either form: `prompt` or `messages`.

    Raises:
        BadRequestError: A field is wrong, or neither or both forms are given.
    """
    values = read_fields(body, TOKENIZE_FIELDS)
    if ("prompt" in values) == ("messages" in values):
        raise BadRequestError("give either prompt or messages", param="prompt")
    read_tool_use(values)
    prompt = (
        _chat_prompt(values)
        if "messages" in values
        else TextPrompt(values["prompt"], values.get("add_special_tokens", True))
    )
    return TokenizeRequest(values.get("model"), prompt, values.get("return_token_strs", False))


def parse_detokenize(body: Mapping[str, Any]) -> tuple[str | None, list[int]]:
    """Check the fields of a /detokenize body; returns the model's name and the token ids.

    Raises:
        BadRequestError: A field is wrong or `tokens` is missing.
    """
    values = read_fields(body, DETOKENIZE_FIELDS)
    return values.get("model"), values["tokens"]


def resolve_model(name: str | None, served: Sequence[ModelCard]) -> ModelCard:
    """Return the served model that a request names; without a name the first one.

    Raises:
        NotFoundError: No model of that name is served.
    """
    for card in served:
        if name is None or card.id == name:
            return card
    if not served:
        raise NotFoundError("this API key may use no model that is served here", param="model")
    names = ", ".join(card.id for card in served)
    raise NotFoundError(
        f"the model {shown(name)} does not exist; served here: {names}", param="model"
    )


def encoding_cost(prompt: Prompt) -> int:
    """Return the approximate cost of `encode_prompt`, in characters of plain text."""
    if isinstance(prompt, TokenPrompt):
        return 0
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    cost = _cost(prompt.messages) + _cost(prompt.template_kwargs) + _cost(prompt.tools)
    if prompt.documents is not None:
        cost += _cost(prompt.documents)
    # The time of a client's own template is unknown, so it never runs on the event loop.
    return cost if prompt.chat_template is None else cost + _OWN_TEMPLATE_COST


def _cost(value: object) -> int:
    """Return the characters in a value at any depth, plus a fixed cost for each part."""
    cost, left = 0, [value]
    while left:
        part = left.pop()
        cost += _CHARS_PER_ENTRY
        if isinstance(part, str):
            cost += len(part)
        elif isinstance(part, dict):
            left += part.keys()
            left += part.values()
        elif isinstance(part, list):
            left += part
    return cost


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, max_tokens: int | None = None) -> list[int]:
    """Turn a prompt into token ids; may take a second per megabyte of text.

    Raises:
        InvalidRequestError: See `encode_steps`.
    """
    ids: list[int] = []
    for ids in encode_steps(prompt, tokenizer, max_tokens):  # noqa: B007 - the last one has all
        pass
    return ids


def encode_steps(
    prompt: Prompt, tokenizer: Tokenizer, max_tokens: int | None = None
) -> Iterator[list[int]]:
    """Turn a prompt into token ids in steps of bounded work.

    Yields:
        The ids so far; the last list is complete.

    Raises:
        NoCutError: A text is too long for the tokenizer.
        TooManyTokensError: A text has more than `max_tokens`.
        BadRequestError: The chat template refuses the messages, or an id is not in the vocabulary.
    """
    if isinstance(prompt, TokenPrompt):
        check_vocabulary(prompt.token_ids, tokenizer.vocab_size, prompt.path)
        yield prompt.token_ids
        return
    if isinstance(prompt, TextPrompt):
        text = prompt.text
    else:
        try:
            is_continued = prompt.continue_final_message
            text = tokenizer.apply_chat_template(
                with_end_mark(prompt.messages) if is_continued else prompt.messages,
                prompt.add_generation_prompt,
                prompt.template_kwargs,
                prompt.tools,
                documents=prompt.documents,
                chat_template=prompt.chat_template,
            )
            if is_continued:
                text = cut_at_end_mark(text)
        except InvalidRequestError as error:
            raise BadRequestError(str(error), param=error.param) from error
        yield []
    yield from tokenizer.encode_steps(text, prompt.add_special_tokens, max_tokens)


def truncate_prompt(
    parsed: ParsedRequest, prompt_token_ids: list[int], max_model_len: int
) -> list[int]:
    """Return the part of an encoded prompt that its request keeps.

    Raises:
        BadRequestError: `truncate_prompt_tokens` is out of range, or leaves no room for output.
    """
    asked = parsed.values.get("truncate_prompt_tokens")
    if asked is None:
        return prompt_token_ids
    try:
        most = most_prompt_tokens(asked, parsed.num_reserved, max_model_len)
    except InvalidRequestError as error:
        raise BadRequestError(str(error), param=error.param) from error
    return truncated(prompt_token_ids, most, parsed.values.get("truncation_side", "left"))


def echoed_text(parsed: ParsedRequest) -> str | None:
    """Return the text that precedes an answer; None if it is that of the encoded prompt."""
    if not parsed.values.get("echo", False):
        return ""
    if isinstance(parsed.prompt, ChatPrompt):
        # Source: vLLM repeats the last message if the answer continues it, which has its role.
        last = parsed.prompt.messages[-1]
        return str(last.get("content") or "") if last.get("role") == "assistant" else ""
    if isinstance(parsed.prompt, TextPrompt) and not parsed.is_truncated:
        return parsed.prompt.text
    return None


def bad_words_cost(parsed: ParsedRequest) -> int:
    """Return the approximate cost of `encode_bad_words`, in characters of plain text."""
    return 2 * _cost(parsed.values.get("bad_words", []))


def encode_bad_words(parsed: ParsedRequest, tokenizer: Tokenizer) -> ParsedRequest:
    """Return a request with its bad words as token sequences.

    Raises:
        BadRequestError: There are too many, or one is empty, too long or has no tokens.
    """
    try:
        found = bad_words.encode_bad_words(parsed.values.get("bad_words", ()), tokenizer)
    except InvalidRequestError as error:
        raise BadRequestError(str(error), param=error.param) from error
    return replace(parsed, bad_words_token_ids=found)


def check_vocabulary(ids: Collection[int], vocab_size: int, path: str) -> None:
    """Refuse token ids that the model has no embedding for.

    Raises:
        BadRequestError: Names the first such id and its place.
    """
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        i, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        text = f"is {bad}, outside the vocabulary of 0 to {vocab_size - 1}"
        raise bad_field(f"{path}[{i}]", text)


def build_request(
    parsed: ParsedRequest,
    prompt_token_ids: list[int],
    card: ModelCard,
    *,
    vocab_size: int,
    request_id: str,
    seed: int,
) -> EngineRequest:
    """Check what depends on the prompt's length, and clip `max_tokens` to the room left.

    Args:
        parsed: The body's checked fields.
        prompt_token_ids: The prompt, each id inside the vocabulary.
        card: The model that the body names.
        vocab_size: Size of the tokenizer's vocabulary.
        request_id: An id that no other request has; clients may repeat theirs.
        seed: Seed for a body without one, so that every engine that runs the request draws the
            same tokens.

    Raises:
        BadRequestError: The prompt is empty or leaves no room, `max_tokens` is larger than
            `max_model_len`, a sampling value is out of range, or the request has a priority and
            the model's engines ignore it. Messages have both numbers.
    """
    values, max_model_len = parsed.values, card.max_model_len
    room = max_model_len - len(prompt_token_ids)
    if not prompt_token_ids:
        raise BadRequestError("the prompt is empty: it has no tokens", param="prompt")
    num_output = 0 if "pooling" in values else 1  # the one token of an embedding has no meaning
    if room < num_output:
        num_prompt, param = len(prompt_token_ids), parsed.prompt_param
        raise prompt_too_long(num_prompt, max_model_len, param, num_output=num_output)
    max_tokens = parsed.max_tokens
    if max_tokens is None:
        max_tokens = min(room, card.defaults.max_tokens or room)
    if max_tokens > max_model_len:
        text = f"is {max_tokens} and max_model_len is {max_model_len}; ask for fewer tokens"
        raise bad_field(parsed.max_tokens_param, text)
    priority = values.get("priority", 0)
    try:
        check_priority(priority, card.scheduling_policy)
    except InvalidRequestError as error:
        raise BadRequestError(str(error), param=error.param) from error
    return EngineRequest(
        request_id,
        prompt_token_ids,
        _sampling(parsed, card, min(max_tokens, max(room, 1)), vocab_size, seed),
        cache_salt=values.get("cache_salt", ""),
        adapter="" if card.parent is None else card.id,
        priority=priority,
        session=values.get("prompt_cache_key") or values.get("session_id") or "",
    )


def beam_search_params(
    parsed: ParsedRequest, sampling: SamplingParams, card: ModelCard, vocab_size: int
) -> BeamSearchParams | None:
    """Return the parameters of the beam search that a body asks for; None without one.

    Args:
        parsed: The body's checked fields.
        sampling: The parameters of `build_request`.
        card: The model that the body names.
        vocab_size: Size of the tokenizer's vocabulary.

    Raises:
        BadRequestError: A value is out of range, the search would need too many requests, or
            engines report no log probabilities.
    """
    if parsed.length_penalty is None:
        return None
    params = BeamSearchParams(
        beam_width=sampling.n,
        max_tokens=sampling.max_tokens,
        ignore_eos=sampling.ignore_eos,
        length_penalty=parsed.length_penalty,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
    )
    # A search that can keep as many sequences as its width has as many choices at its end.
    most = vocab_size if card.max_logprobs == -1 else min(card.max_logprobs, vocab_size)
    try:
        params.validate(most, card.logprobs_mode)
    except InvalidRequestError as error:
        names = {"beam_width": "n", "beam_search": "use_beam_search"}
        param = names.get(error.param, error.param)
        text = str(error).replace(error.param, param, 1)
        where = "" if param == "use_beam_search" else ", with use_beam_search"
        raise BadRequestError(f"{text}{where}", param=param) from error
    num_prompts = 1 + len(parsed.more_prompts)
    num_extensions = params.beam_width * params.max_tokens * num_prompts
    if num_extensions > MAX_EXTENSIONS:
        factors = "n and prompts" if parsed.more_prompts else "n"
        text = f"times {factors} is {num_extensions}, but may be at most {MAX_EXTENSIONS}"
        text += " with use_beam_search"
        raise bad_field(parsed.max_tokens_param, text)
    return params


def response_spec(
    parsed: ParsedRequest,
    model: str,
    **more: Any,  # noqa: ANN401 - attributes
) -> ResponseSpec:
    """Return the options of the response.

    Args:
        parsed: The body's checked fields.
        model: The served model's id.
        **more: Further attributes, which do not follow from the fields.
    """
    flags = {name: parsed.values[name] for name in _RESPONSE_FIELDS if name in parsed.values}
    return ResponseSpec(model=model, **more, **flags, **parsed.response_options)


def _sampling(
    parsed: ParsedRequest,
    card: ModelCard,
    max_tokens: int,
    vocab_size: int,
    seed: int,
) -> SamplingParams:
    values = parsed.values
    defaults = card.defaults if parsed.length_penalty is None else SamplingDefaults()
    given = {
        **{name: getattr(defaults, name) for name in DEFAULTED_FIELDS},
        **{name: values[name] for name in _SAMPLING_FIELDS if name in values},
        **{name: tuple(values[name]) for name in _SAMPLING_LISTS if name in values},
    }
    if parsed.is_parsed:
        given["skip_special_tokens"] = False
    if given.get("seed", -1) == -1:  # vLLM's spelling of "no seed"
        given["seed"] = seed
    given["top_k"] = min(given["top_k"], vocab_size)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        stop_token_ids=frozenset(values.get("stop_token_ids", ())),
        bad_words_token_ids=parsed.bad_words_token_ids,
        structured_outputs=None if parsed.grammar is None else parsed.grammar.spec,
        reasoning_budget=parsed.reasoning_budget,
        **given,
    )
    try:
        sampling.validate(vocab_size, card.max_logprobs)
        sampling.check_supported()
    except InvalidRequestError as error:
        raise BadRequestError(str(error), param=_spelled_param(parsed, error.param)) from error
    return sampling


def recall_grammar(grammar: Grammar, checker: GrammarChecker) -> bool:
    """Return whether a grammar is known to compile.

    Raises:
        BadRequestError: It is known not to; see `check_grammar`.
    """
    try:
        return checker.recall(grammar.spec)
    except InvalidRequestError as error:
        raise grammar.bad_request(error) from error


def check_grammar(grammar: Grammar, checker: GrammarChecker) -> Grammar:
    """Return a grammar that compiles; may take a second.

    Raises:
        BadRequestError: It does not, or takes too long; `param` is its path.
    """
    try:
        checker.check(grammar.spec)
    except InvalidRequestError as error:
        raise grammar.bad_request(error) from error
    return grammar


def _spelled_param(parsed: ParsedRequest, name: str) -> str:
    """Return the name in this body of a field of `SamplingParams`."""
    if name == "max_tokens":
        return parsed.max_tokens_param
    if name == "logprobs" and "messages" in parsed.values:
        return "top_logprobs"
    if name == "prompt_logprobs" and not parsed.response_options["prompt_logprobs"]:
        return "echo"
    return "bad_words" if name == "bad_words_token_ids" else name


def _join_logprobs(values: dict[str, Any]) -> None:
    """Join the two fields of chats, `logprobs` and `top_logprobs`, into one as in completions."""
    is_asked, count = values.pop("logprobs", False), values.pop("top_logprobs", 0)
    if is_asked:
        values["logprobs"] = count
    elif count:
        raise bad_field("top_logprobs", "needs logprobs: true")


def _prefer_listed_logprobs(values: dict[str, Any]) -> None:
    """Drop the number of likeliest tokens where `logprob_token_ids` lists others."""
    if values.get("logprob_token_ids") and values.pop("logprobs", None) is None:
        raise bad_field("logprob_token_ids", "needs logprobs")


def _response_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the response that both APIs have."""
    is_streamed, options = values.get("stream", False), values.get("stream_options")
    if options is not None and not is_streamed:
        raise bad_field("stream_options", "needs stream: true")
    if "prompt_logprobs" in values and is_streamed:
        raise bad_field("prompt_logprobs", "cannot be streamed; leave stream out")
    return {
        **read_fields(options or {}, STREAM_OPTIONS_FIELDS, "stream_options."),
        "prompt_logprobs": "prompt_logprobs" in values,
    }


def read_prompts(path: str, value: object, add_special_tokens: bool) -> list[Prompt]:
    """Return the prompts of a field: text, token ids, or a list of either.

    Raises:
        BadRequestError: There are too many, or one is wrong; `param` is its path.
    """
    if not (isinstance(value, list) and value and isinstance(value[0], (str, list))):
        return [_prompt(value, path, add_special_tokens)]
    if len(value) > MAX_PROMPTS:
        text = f"has {len(value)} prompts, but may have at most {MAX_PROMPTS}; send more requests"
        raise bad_field(path, text)
    return [_prompt(one, f"{path}[{i}]", add_special_tokens) for i, one in enumerate(value)]


def _prompt(value: object, path: str, add_special_tokens: bool) -> TextPrompt | TokenPrompt:
    """Check one prompt, text or token ids."""
    if not value and isinstance(value, (str, list)):
        raise bad_field(path, "is empty; give some text or token ids")
    if isinstance(value, str):
        return TextPrompt(value, add_special_tokens, path)
    if not isinstance(value, list):
        raise bad_field(path, f"must be a string or an array of token ids, got {shown(value)}")
    return TokenPrompt(_token_ids(value, path), path)


def check_own_template(prompt: Prompt, *, is_trusted: bool) -> None:
    """Refuse a client's own chat template, unless clients are trusted with it.

    Raises:
        BadRequestError: They are not.
    """
    if isinstance(prompt, ChatPrompt) and prompt.chat_template is not None and not is_trusted:
        text = "is refused by this server; leave it out, or send the rendered text as a prompt to"
        text += (
            " /v1/completions. An operator allows it by args.ingress.trust_request_chat_template"
        )
        raise bad_field("chat_template", text)


def _chat_prompt(values: Mapping[str, Any]) -> ChatPrompt:
    is_continued = values.get("continue_final_message", False)
    if is_continued and values.get("add_generation_prompt", False):
        text = "cannot be used with add_generation_prompt: true; set one of them"
        raise bad_field("continue_final_message", text)
    return ChatPrompt(
        messages=[_message(m, f"messages[{i}]") for i, m in enumerate(values["messages"])],
        add_generation_prompt=values.get("add_generation_prompt", not is_continued),
        template_kwargs=_template_variables(values),
        add_special_tokens=values.get("add_special_tokens", False),
        tools=template_tools(values),
        documents=values.get("documents"),
        continue_final_message=is_continued,
        chat_template=values.get("chat_template"),
    )


def _template_variables(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the variables of the chat template that a body sets."""
    given: Mapping[str, Any] | None = values.get("chat_template_kwargs")
    if "verbosity" in values:
        given = {"verbosity": values["verbosity"], **(given or {})}
    effort = values.get("reasoning_effort")
    if effort is None:
        return given
    # Source: vLLM passes the effort on; templates without levels only turn reasoning off.
    off = _NO_THINKING if effort == "none" else {}
    return {"reasoning_effort": effort, **off, **(given or {})}


def _message(body: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Check one message and join its content parts into one text."""
    message = read_fields(body, MESSAGE_FIELDS, f"{path}.")
    role = message["role"]
    if role == "function":
        # The former name of results, which templates do not know. They name the function.
        message["role"] = "tool"
        if "name" in message:
            message["tool_call_id"] = f"call_{message['name']}"
    calls = message.pop("tool_calls", None)
    if "function_call" in message:
        if role != "assistant" or calls:
            raise bad_field(f"{path}.function_call", "needs the role assistant, and no tool_calls")
        call = read_function_call(message.pop("function_call"), f"{path}.function_call")
        message["tool_calls"] = [{"id": f"call_{call['function']['name']}", **call}]
        message.setdefault("content", "")
    if calls:
        if role != "assistant":
            raise bad_field(f"{path}.tool_calls", "needs the role assistant")
        message["tool_calls"] = read_calls(calls, f"{path}.tool_calls")
        message.setdefault("content", "")
    if "reasoning" in message:
        # Templates know either of the two names.
        message.setdefault("reasoning_content", message["reasoning"])
    if "content" in message:
        message["content"] = _content(message["content"], f"{path}.content")
    elif role != "assistant":
        raise bad_field(f"{path}.content", "is required")
    return message


def _content(value: str | list[dict[str, Any]], path: str) -> str:
    """Return a message's content as one text; text parts are joined by line breaks."""
    if isinstance(value, str):
        return value
    return "\n".join(_part(part, f"{path}[{i}]") for i, part in enumerate(value))


def _part(part: Mapping[str, Any], path: str) -> str:
    if part.get("type") != "text":
        text = f"{shown(part.get('type'))} is not supported yet; send text"
        raise bad_field(f"{path}.type", text)
    return cast("str", read_fields(part, CONTENT_PART_FIELDS, f"{path}.")["text"])
