"""Sampling parameters of one request: plain values, equal offline and online, validated once.

Names and ranges are vLLM's. Source: vLLM vllm/sampling_params.py `SamplingParams`.
"""

import functools
import json
import math
import struct
from collections.abc import Callable, Collection, Sized
from typing import Any, Literal, NamedTuple, Self, TypeAlias, get_type_hints

import msgspec
import numpy as np

from replicas.errors import InvalidRequestError

GREEDY_EPS = 1e-5
"""Temperatures below this are greedy, as in vLLM."""
LEAST_TEMPERATURE = 0.01
"""Lower temperatures that are not greedy are raised to this: dividing by them could overflow."""

MAX_CHOICES = 128
MAX_LOGPROBS = 20
"""Limits of OpenAI's and vLLM's interfaces; the second one is an engine's default."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
"""In each stop string. With every token, that many characters of the answer are searched again."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 256
"""Most words or token sequences, and tokens in each of them."""
MAX_BAD_WORD_CHARS = 1024
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_REPETITION_PENALTY = 1e20
"""Greater factors, and those below its inverse, act as these: float32 logits would overflow."""
MAX_REASONING_MARK_TOKENS = 32
"""Most tokens that begin and end the reasoning."""
MAX_GRAMMAR_BYTES = 256 * 2**10
"""Largest grammar or JSON schema of a request, in UTF-8."""
MAX_SCHEMA_VALUES = 10_000
"""Values in a JSON schema, or alternatives of a choice."""
GRAMMAR_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Fields of `StructuredOutputs`, of which a request gives one."""

GenerationConfigSource: TypeAlias = Literal["auto", "vllm"]
"""auto: the defaults of the model folder's generation_config.json.
vllm: neutral defaults, whatever the folder recommends."""

Pooling: TypeAlias = Literal["mean", "last"]
"""How hidden states become an embedding."""

_INT64 = 2**63


class _Rule(NamedTuple):
    """Range of one field: `text` follows its name in the error.

    `schema` says the same in keywords of JSON Schema, as far as these can.
    """

    name: str
    accepts: Callable[[Any], bool]
    text: str
    schema: dict[str, Any]

    def check(self, value: object) -> None:
        """Refuse a value outside the range."""
        if value is not None and not self.accepts(value):
            raise _refusal(self.name, f"{self.text}, got {_shown(value)}")


def _is_finite(biases: dict[int, float]) -> bool:
    return all(math.isfinite(bias) for bias in biases.values())


def _at_least(name: str, least: int) -> _Rule:
    return _Rule(name, lambda v: v >= least, f"must be at least {least}", {"minimum": least})


def _within(name: str, least: float, most: float) -> _Rule:
    schema = {"minimum": least, "maximum": most}
    return _Rule(name, lambda v: least <= v <= most, f"must be in [{least:g}, {most:g}]", schema)


def _has_at_most(name: str, most: int, what: str, keyword: str = "maxItems") -> _Rule:
    text = f"must have at most {most} {what}"
    return _Rule(name, lambda v: len(v) <= most, text, {keyword: most})


def _each_has_at_most(name: str, most: int, what: str, keyword: str) -> _Rule:
    text = f"must have at most {most} {what}"
    schema = {"items": {keyword: most}}
    return _Rule(name, lambda v: max(map(len, v), default=0) <= most, text, schema)


def _none_is_empty(name: str, what: str, keyword: str) -> _Rule:
    return _Rule(name, all, f"must not hold an empty {what}", {"items": {keyword: 1}})


_RULES = (
    _at_least("max_tokens", 1),
    _within("temperature", 0.0, 2.0),
    _Rule(
        "top_p", lambda v: 0.0 < v <= 1.0, "must be in (0, 1]",
        {"exclusiveMinimum": 0, "maximum": 1},
    ),
    _Rule("top_k", lambda v: v >= -1, "must be -1, 0 or at least 1", {"minimum": -1}),
    _within("min_p", 0.0, 1.0),
    _Rule(
        "n", lambda v: 1 <= v <= MAX_CHOICES, f"must be 1 to {MAX_CHOICES}",
        {"minimum": 1, "maximum": MAX_CHOICES},
    ),
    _Rule(
        "seed", lambda v: -_INT64 <= v < _INT64, "must fit in 64 bits", {"format": "int64"},
    ),
    _within("presence_penalty", -2.0, 2.0),
    _within("frequency_penalty", -2.0, 2.0),
    _Rule(
        "repetition_penalty", lambda v: 0.0 < v < math.inf, "must be above 0 and finite",
        {"exclusiveMinimum": 0},
    ),
    _at_least("min_tokens", 0),
    _none_is_empty("stop", "string", "minLength"),
    _has_at_most("stop", MAX_STOP_STRINGS, "strings"),
    _each_has_at_most("stop", MAX_STOP_CHARS, "characters in each string", "maxLength"),
    _has_at_most("logit_bias", MAX_LOGIT_BIASES, "entries", "maxProperties"),
    _Rule("logit_bias", _is_finite, "must have finite values", {}),
    _Rule("allowed_token_ids", bool, "must have at least one token id", {"minItems": 1}),
    _none_is_empty("bad_words", "string", "minLength"),
    _has_at_most("bad_words", MAX_BAD_WORDS, "words"),
    _each_has_at_most("bad_words", MAX_BAD_WORD_CHARS, "characters in each word", "maxLength"),
    _has_at_most("bad_words_token_ids", MAX_BAD_WORDS, "sequences"),
    _none_is_empty("bad_words_token_ids", "sequence", "minItems"),
    _each_has_at_most(
        "bad_words_token_ids", MAX_BAD_WORD_TOKENS, "tokens in each sequence", "maxItems"
    ),
    _has_at_most("logprob_token_ids", MAX_LOGPROB_TOKEN_IDS, "token ids"),
    _Rule(
        "truncate_prompt_tokens", lambda v: v == -1 or v >= 1, "must be -1 or at least 1",
        {"minimum": -1, "not": {"const": 0}},
    ),
)  # fmt: skip
"""The range of every field, for the engine, the HTTP edge and `LLM`; None is always accepted.

NaN fails every comparison, so no range accepts it.
"""

_RULES_OF = {name: [rule for rule in _RULES if rule.name == name] for name, *_ in _RULES}

_TOKEN_IDS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias")
"""Fields with token ids, besides `bad_words_token_ids`."""

_EMPTY: dict[str, object] = {
    "stop": (),
    "stop_token_ids": frozenset(),
    "logit_bias": {},
    "bad_words": (),
    "bad_words_token_ids": (),
    "logprob_token_ids": (),
}
"""Fields that vLLM's callers may set to None for nothing."""

_OFF_IF_GREEDY = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A grammar that an output must follow: exactly one of the first six is given.

    Two that are equal share a compiled grammar. Source: vLLM vllm/sampling_params.py
    `StructuredOutputsParams`.

    Attributes:
        json: A JSON schema, as text or as an object, which becomes text.
        regex: A regular expression for the whole output; no look-around.
        choice: The texts to choose from.
        grammar: A grammar in Lark's syntax, or EBNF in llama.cpp's.
        json_object: Any JSON object.
        structural_tag: Text with structures in it, as JSON with `triggers` and `structures`.
        disable_any_whitespace: Let JSON have no more white space than one blank after separators.
        disable_additional_properties: Let objects have the properties of their schema alone.
        whitespace_pattern: A regular expression for the white space of JSON.
        is_unambiguous: The rules of `grammar` read no text in two ways, so that they may be as wide
            as a schema's. Bodies of HTTP cannot say so.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    is_unambiguous: bool = False

    def __post_init__(self) -> None:
        """Replace objects by text, so that the parameters can be compared and hashed.

        Raises:
            ValueError: An object has no JSON form.
        """
        for name in ("json", "structural_tag"):
            value: object = getattr(self, name)
            if isinstance(value, dict):
                try:
                    text = json.dumps(value, allow_nan=False)
                except (TypeError, ValueError, RecursionError) as error:
                    raise ValueError(f"{name} is no JSON: {error}") from error
                msgspec.structs.force_setattr(self, name, text)
        choice: object = self.choice
        if isinstance(choice, list):
            msgspec.structs.force_setattr(self, "choice", tuple(choice))
        is_asked: object = self.json_object
        if is_asked is None:
            msgspec.structs.force_setattr(self, "json_object", False)

    @property
    def kind(self) -> str:
        """Return the name of the field that is given; `validate` must have passed."""
        return self._given()[0]

    def _given(self) -> list[str]:
        values = ((name, getattr(self, name)) for name in GRAMMAR_KINDS)
        return [name for name, value in values if value is not None and value is not False]

    def validate(self) -> None:
        """Check that exactly one grammar is given, and its size; `replicas.grammars` checks more.

        Raises:
            InvalidRequestError: The fields contradict each other, or one is too large.
        """
        given = self._given()
        if len(given) != 1:
            names = f"{', '.join(GRAMMAR_KINDS)}; got {' and '.join(given) or 'none'}"
            text = f"needs exactly one of {names}"
            raise _refusal("structured_outputs", text)
        [kind] = given
        value = getattr(self, kind)
        if kind == "choice" and not value:
            raise _refusal("structured_outputs.choice", "must have at least one text")
        texts = [*(value if kind == "choice" else (value,)), self.whitespace_pattern]
        try:
            num_bytes = sum(len(text.encode()) for text in texts if isinstance(text, str))
        except UnicodeEncodeError as error:
            raise _refusal(f"structured_outputs.{kind}", "has a lone surrogate") from error
        if num_bytes > MAX_GRAMMAR_BYTES:
            text = f"has {num_bytes} bytes, but may have {MAX_GRAMMAR_BYTES}"
            raise _refusal(f"structured_outputs.{kind}", text)


class ReasoningMarks(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """The tokens around the reasoning in an output.

    Attributes:
        start_token_ids: Tokens that begin it; empty if the output cannot begin it.
        end_token_ids: Tokens that end it.
        is_open: Whether the prompt has begun it.
    """

    start_token_ids: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...]
    is_open: bool = False


class ReasoningBudget(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Limit of an output's reasoning.

    Attributes:
        max_tokens: Most tokens of the reasoning, >= 0; then its end is forced.
        marks: The tokens around it.
    """

    max_tokens: int
    marks: ReasoningMarks

    def validate(self, vocab_size: int | None) -> None:
        """Check the ranges; raises InvalidRequestError, see `SamplingParams.validate`."""
        name, marks = "reasoning_budget", self.marks
        if self.max_tokens < 0:
            raise _refusal(name, f"must be at least 0, got {self.max_tokens}")
        if not marks.end_token_ids:
            raise _refusal(name, "must have tokens that end the reasoning")
        token_ids = (*marks.start_token_ids, *marks.end_token_ids)
        if len(token_ids) > MAX_REASONING_MARK_TOKENS:
            text = f"must have at most {MAX_REASONING_MARK_TOKENS} tokens around the reasoning"
            raise _refusal(name, f"{text}, got {len(token_ids)}")
        if vocab_size is not None:
            _check_vocabulary(name, token_ids, vocab_size)


def _bounded_penalty(penalty: float) -> float:
    if not _is_in_range("repetition_penalty", penalty):
        return penalty
    return min(max(penalty, 1.0 / MAX_REPETITION_PENALTY), MAX_REPETITION_PENALTY)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Parameters that control token choice and the end of generation.

    A new field must be appended: the order is that of the wire.

    Attributes:
        max_tokens: Most tokens to generate, >= 1.
        temperature: 0 (greedy) to 2. Greedy turns top_p, top_k and min_p off.
        top_p: Nucleus mass, in (0, 1]; 1 is off.
        top_k: Keep the k most likely tokens; 0 or -1 is off.
        seed: Key of the counter-based random numbers (int64); None or -1: the front end mints one.
        stop: Text that ends generation; cut from the output unless `include_stop_str_in_output`.
        stop_token_ids: Token ids that end generation, besides the model's own end tokens.
        ignore_eos: Do not end at the model's end tokens.
        skip_special_tokens: Leave special tokens out of the text.
        include_stop_str_in_output: Keep the stop string at the end of the text.
        n: Number of choices to generate; choice i draws with the seed plus i.
        logprobs: Number of likeliest tokens to report with each drawn one; -1 is the whole
            vocabulary, None reports nothing.
        presence_penalty: Subtracted from the logits of tokens in the output; in [-2, 2].
        frequency_penalty: Subtracted for each time that a token is in the output; in [-2, 2].
        repetition_penalty: Divides positive logits of tokens in prompt or output, and multiplies
            negative ones; > 0, 1 is off, clamped to [1e-20, 1e20].
        min_p: Keep tokens at least this likely relative to the likeliest; in [0, 1], 0 is off.
        min_tokens: Tokens before which neither an end token nor a stop string ends the output.
        logit_bias: Token id to the value that is added to its logit, clamped to [-100, 100].
        allowed_token_ids: The only tokens that may be drawn; None allows all.
        bad_words: Words that must not be generated. Front ends turn them into the next field.
        bad_words_token_ids: Token sequences that must not be generated.
        prompt_logprobs: As `logprobs`, for the tokens of the prompt.
        logprob_token_ids: Tokens whose log probabilities are reported instead of the likeliest.
        truncate_prompt_tokens: Most tokens of the prompt to keep; -1 is as many as the model takes.
        truncation_side: The side of the prompt that is cut off.
        skip_reading_prefix_cache: Compute the whole prompt, even where its KV is cached. None does
            so for `prompt_logprobs`, which need every position.
        structured_outputs: The grammar that the output follows; None is any text.
        reasoning_budget: Limit of the reasoning; None is no limit. Front ends make it of vLLM's
            `thinking_token_budget`.
        pooling: How the final hidden states of the prompt become its embedding: their mean, or that
            of the last token. The request's one token has no meaning then. None: no embedding.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    n: int = 1
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    skip_reading_prefix_cache: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    reasoning_budget: ReasoningBudget | None = None
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        """Replace other spellings of a value, and values that vLLM replaces, by one form.

        Values of a wrong type, or out of range, stay as they are: `checked` finds them.
        """
        put = functools.partial(msgspec.structs.force_setattr, self)
        stop: object = self.stop
        if isinstance(stop, str):
            put("stop", (stop,))
        for name, empty in _EMPTY.items():
            if getattr(self, name) is None:
                put(name, empty)
        if self.seed == -1:
            put("seed", None)
        if self.logit_bias:
            put("logit_bias", _clamped(self.logit_bias))
        if self.repetition_penalty != 1.0:
            put("repetition_penalty", _bounded_penalty(self.repetition_penalty))
        given: object = self.temperature
        temperature = given if isinstance(given, int | float) else math.inf
        if GREEDY_EPS <= temperature < LEAST_TEMPERATURE:
            put("temperature", LEAST_TEMPERATURE)
        is_greedy = 0.0 <= temperature < GREEDY_EPS
        for name in _OFF_IF_GREEDY if is_greedy else ():
            if _is_in_range(name, getattr(self, name)):
                put(name, _OFF_IF_GREEDY[name])

    def checked(self, vocab_size: int, max_logprobs: int = MAX_LOGPROBS) -> Self:
        """Return the same parameters with checked types, which a frozen struct does not check.

        Args:
            vocab_size: See `validate`.
            max_logprobs: See `validate`.

        Raises:
            InvalidRequestError: A value has a wrong type or is refused by `validate`; `param`
                names it.
        """
        given = {
            name: _typed(name, value, kind)
            for name, kind in _kinds().items()
            if (value := getattr(self, name)) is not getattr(_DEFAULTS, name)
        }
        checked = type(self)(**given)
        checked.validate(vocab_size, max_logprobs)
        return checked

    def validate(self, vocab_size: int | None = None, max_logprobs: int = MAX_LOGPROBS) -> None:
        """Check every range, and that no two fields contradict each other.

        Args:
            vocab_size: Token ids must be below this; None checks no token ids.
            max_logprobs: Most log probabilities for a token; -1 is no limit.

        Raises:
            InvalidRequestError: A value is outside its documented range; `param` names it.
        """
        for rule in _RULES:
            value = getattr(self, rule.name)
            # Most fields of most requests have their defaults, which are in range.
            if value is not getattr(_DEFAULTS, rule.name):
                rule.check(value)
        self._check_pairs()
        if self.structured_outputs is not None:
            self.structured_outputs.validate()
        if self.reasoning_budget is not None:
            self.reasoning_budget.validate(vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            _check_count(name, getattr(self, name), vocab_size, max_logprobs)
        if vocab_size is not None:
            for name in _TOKEN_IDS:
                if token_ids := getattr(self, name):
                    _check_vocabulary(name, token_ids, vocab_size)
            for token_ids in self.bad_words_token_ids:
                _check_vocabulary("bad_words_token_ids", token_ids, vocab_size)

    @property
    def reads_prefix_cache(self) -> bool:
        """Return whether KV that is cached or stored may stand for part of the prompt."""
        skips = self.skip_reading_prefix_cache
        return not self.needs_whole_prompt if skips is None else not skips

    @property
    def has_penalties(self) -> bool:
        """Return whether presence, frequency or repetition penalty changes logits."""
        given = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return given != (0.0, 0.0, 1.0)

    @property
    def needs_whole_prompt(self) -> bool:
        """Return whether every position of the prompt must be computed, even where its KV is."""
        return self.prompt_logprobs is not None or self.pooling == "mean"

    def check_supported(self) -> None:
        """Refuse fields that front ends must apply before an engine gets them.

        Raises:
            InvalidRequestError: Such a field is set; `param` names it.
        """
        if self.bad_words:
            raise _refusal("bad_words", "must come to an engine as bad_words_token_ids")
        if self.truncate_prompt_tokens is not None:
            raise _refusal("truncate_prompt_tokens", "must be applied before an engine is asked")

    def _check_pairs(self) -> None:
        if self.n > 1 and self.temperature < GREEDY_EPS:
            text = "must be 1 with temperature 0, where all choices would be equal"
            raise _refusal("n", f"{text}, got {self.n}")
        if self.min_tokens > self.max_tokens:
            text = f"must be at most max_tokens, which is {self.max_tokens}, got {self.min_tokens}"
            raise _refusal("min_tokens", text)
        num_listed = len(self.logprob_token_ids)
        if num_listed and self.logprobs not in {None, num_listed}:
            text = f"must be left out or {num_listed}, the length of logprob_token_ids"
            raise _refusal("logprobs", f"{text}, got {self.logprobs}")
        if self.needs_whole_prompt and self.skip_reading_prefix_cache is False:
            name = "pooling" if self.prompt_logprobs is None else "prompt_logprobs"
            text = f"must not be false with {name}, which needs the whole prompt computed"
            raise _refusal("skip_reading_prefix_cache", text)
        if self.pooling is not None:
            for name in ("max_tokens", "n"):
                if getattr(self, name) != 1:
                    raise _refusal(name, f"must be 1 with pooling, got {getattr(self, name)}")
            if self.prompt_logprobs is not None:
                raise _refusal("prompt_logprobs", "cannot be used together with pooling")


_DEFAULTS = SamplingParams()


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling values for requests that leave them out; attributes as in `SamplingParams`.

    Attributes:
        temperature: Temperature.
        top_p: Nucleus mass.
        top_k: Number of candidates.
        max_tokens: Most tokens of a request that states no limit; None is all the room left.
        min_p: Least relative probability.
        repetition_penalty: Repetition penalty.
    """

    temperature: float = SamplingParams().temperature
    top_p: float = SamplingParams().top_p
    top_k: int = SamplingParams().top_k
    max_tokens: int | None = None
    min_p: float = SamplingParams().min_p
    repetition_penalty: float = SamplingParams().repetition_penalty

    def params(self) -> SamplingParams:
        """Return the parameters of a request that states none."""
        params = SamplingParams(**{name: getattr(self, name) for name in DEFAULTED_FIELDS})
        if self.max_tokens is None:
            return params
        return msgspec.structs.replace(params, max_tokens=self.max_tokens)


DEFAULTED_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that a model's own defaults fill in; `max_tokens` depends on the interface."""


def check_range(name: str, value: object) -> None:
    """Check the range of one field apart from the others, before work that depends on it.

    Raises:
        InvalidRequestError: `SamplingParams.validate` would refuse the value.
    """
    for rule in _RULES_OF.get(name, ()):
        rule.check(value)


def range_schema(name: str) -> dict[str, Any]:
    """Return the range of one field in keywords of JSON Schema, as far as these can say it."""
    schema: dict[str, Any] = {}
    for rule in _RULES_OF.get(name, ()):
        items = {**schema.get("items", {}), **rule.schema.get("items", {})}
        schema |= {**rule.schema, **({"items": items} if items else {})}
    return schema


def are_below(token_ids: Collection[int], limit: int) -> bool:
    """Return whether all token ids are in [0, limit)."""
    if not token_ids:
        return True
    try:
        # For long lists several times as fast as min and max.
        ids = np.frombuffer(struct.pack(f"{len(token_ids)}i", *token_ids), dtype=np.intc)
    except struct.error:  # does not fit 32 bits
        return False
    return bool(0 <= ids.min() <= ids.max() < limit)


def _check_vocabulary(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    if not are_below(token_ids, vocab_size):
        bad = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise _refusal(name, f"contains {bad}, outside the vocabulary of 0 to {vocab_size - 1}")
    if len(token_ids) > vocab_size:
        text = f"has {len(token_ids)} entries, more than the vocabulary of {vocab_size}"
        raise _refusal(name, text)


def _check_count(name: str, count: int | None, vocab_size: int | None, most: int) -> None:
    """Refuse more log probabilities for a token than an engine reports."""
    if count is None or count == most == -1:
        return
    if count < -1:
        raise _refusal(name, f"must be -1 or at least 0, got {count}")
    wanted = vocab_size if count == -1 else count
    if most != -1 and (wanted is None or wanted > most):
        raise _refusal(name, f"must be 0 to {most}, got {count}")


def _is_in_range(name: str, value: object) -> bool:
    is_number = type(value) in {int, float}
    return is_number and all(rule.accepts(value) for rule in _RULES_OF[name])


def _clamped(biases: object) -> object:
    if not isinstance(biases, dict):
        return biases
    return {
        token_id: min(max(bias, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS)
        if isinstance(bias, int | float)
        else bias
        for token_id, bias in biases.items()
    }


def _refusal(name: str, text: str) -> InvalidRequestError:
    return InvalidRequestError(name, f"{name} {text}")


def _shown(value: object) -> str:
    """Return a number as it is, and the number of entries of a container, which may be large."""
    return f"{len(value)} entries" if isinstance(value, Sized) else str(value)


@functools.cache
def _kinds() -> dict[str, Any]:
    """Return the type of each field."""
    return get_type_hints(SamplingParams)


def _typed(name: str, value: object, kind: Any) -> Any:  # noqa: ANN401 - a field's
    try:
        found = msgspec.convert(_plain(value), kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(name, f"{name} has a wrong type: {error}") from error
    try:
        msgspec.msgpack.encode(found)
    except (OverflowError, UnicodeEncodeError) as error:
        # A number over 64 bits, or half of a surrogate pair.
        raise InvalidRequestError(name, f"{name} cannot be sent to an engine: {error}") from error
    return found


def _plain(value: object) -> object:
    """Return a value of plain types: numpy's scalars and a grammar's struct are replaced."""
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, StructuredOutputs | ReasoningBudget | ReasoningMarks):
        return [_plain(getattr(value, name)) for name in value.__struct_fields__]
    return value.item() if isinstance(value, np.generic) else value
