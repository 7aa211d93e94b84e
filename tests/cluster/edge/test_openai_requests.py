import contextlib
import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.edge.openai import ModelCard
from cluster.edge.openai_limits import BodyLimits
from cluster.edge.openai_requests import (
    ChatPrompt,
    TextPrompt,
    TokenPrompt,
    build_request,
    check_vocabulary,
    encode_bad_words,
    encode_prompt,
    parse_body,
    parse_chat_completion,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
    resolve_model,
    response_spec,
    truncate_prompt,
)
from cluster.errors import BadRequestError, NotFoundError
from replicas.sampling_params import (
    SamplingDefaults,
    SamplingParams,
    StructuredOutputs,
)
from tests.bad_sampling import BAD

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


LIMITS = BodyLimits(max_model_len=2**20, vocab_size=2**20, max_token_chars=8)
TOKENIZER = SimpleNamespace(encode=lambda text, add_special_tokens: [*text.strip().encode()])
SEED = 2**62
"""What the ingress mints in these tests."""


def build(body, num_prompt_tokens=4, max_model_len=64, parse=None, **defaults):
    parse = parse or (parse_chat_completion if "messages" in body else parse_completion)
    return build_request(
        encode_bad_words(parse(body), TOKENIZER),
        [7] * num_prompt_tokens,
        ModelCard("demo", "demo-folder", max_model_len, 17, defaults=SamplingDefaults(**defaults)),
        vocab_size=100,
        request_id="unique",
        seed=SEED,
    )


def outcome(body):
    try:
        return build(body), None
    except BadRequestError as error:
        return None, error


def refusal(body, **options):
    with pytest.raises(BadRequestError) as refused:
        build(body, **options)
    return refused.value


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"{'a': 1}", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}',
        b'{"a": 1e999}', b'{"a": -1e999}', b'{"a": "\\ud800"}', b'{"a": "\xff"}', b"[" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b"{} {}",
    ],
)  # fmt: skip
def test_a_body_that_is_not_standard_json_is_refused(raw):
    with pytest.raises(BadRequestError, match="not valid JSON"):
        parse_body(raw, LIMITS)


@pytest.mark.parametrize("raw", [b"[]", b'"x"', b"1", b"null", b"true"])
def test_a_body_that_is_not_an_object_is_refused(raw):
    with pytest.raises(BadRequestError, match="must be a JSON object"):
        parse_body(raw, LIMITS)


@given(st.binary())
def test_any_bytes_are_an_object_or_a_typed_refusal(raw):
    with contextlib.suppress(BadRequestError):
        assert isinstance(parse_body(raw, LIMITS), dict)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text() | st.floats(),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(), child, max_size=3),
    max_leaves=8,
)
NAMES = [
    "temperature", "top_k", "stop", "max_tokens", "n", "stream", "stream_options", "seed",
    "logit_bias", "stop_token_ids", "response_format", "user", "tools", "nonsense",
    "use_beam_search", "length_penalty",
]  # fmt: skip


@given(
    st.sampled_from([{"prompt": "x"}, CHAT]), st.dictionaries(st.sampled_from(NAMES), JSON), JSON
)
def test_any_values_give_a_valid_request_or_a_refusal_that_names_a_field(base, extra, content):
    bodies = [{**base, **extra}, {"prompt": content}, {"messages": content}]
    for body in [*bodies, {"messages": [{"role": "user", "content": content}]}]:
        request, error = outcome(body)
        assert request is not None or error.param


def test_a_request_without_options_has_the_documented_defaults():
    assert build({"prompt": "x"}).sampling == SamplingParams(max_tokens=16, seed=SEED)
    assert build(CHAT).sampling == SamplingParams(max_tokens=60, seed=SEED)


def test_the_models_own_defaults_fill_in_what_a_request_leaves_out():
    own = {
        "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1,
    }  # fmt: skip
    assert build(CHAT, **own).sampling == SamplingParams(max_tokens=60, seed=SEED, **own)
    given = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    asked = build({**CHAT, **given}, **own).sampling
    assert asked == SamplingParams(max_tokens=60, seed=SEED, **given)
    assert build({**CHAT, "temperature": None}, **own).sampling.temperature == 0.6
    assert build(CHAT, top_k=1000).sampling.top_k == 100, "no more than the vocabulary has"


def test_the_models_own_limit_is_for_chats_that_state_none():
    assert build(CHAT, max_tokens=9).sampling.max_tokens == 9
    assert build(CHAT, max_tokens=999).sampling.max_tokens == 60, "the room left"
    assert build({**CHAT, "max_tokens": 30}, max_tokens=9).sampling.max_tokens == 30
    assert build({"prompt": "x"}, max_tokens=9).sampling.max_tokens == 16


BOTH = pytest.mark.parametrize("base", [{"prompt": "x"}, CHAT], ids=["completions", "chat"])


@BOTH
def test_every_supported_field_reaches_the_request(base):
    body = {
        "stream": True, "max_tokens": 5, "temperature": 0.5, "top_p": 0.5, "top_k": 3,
        "seed": 2**63 - 1, "stop": ["a", "b"], "stop_token_ids": [3], "ignore_eos": True,
        "skip_special_tokens": False, "include_stop_str_in_output": True, "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "n": 2,
        "presence_penalty": 1, "frequency_penalty": -1.5, "repetition_penalty": 1.25, "min_p": 0.1,
        "min_tokens": 2, "logit_bias": {"5": 250, "6": -1}, "allowed_token_ids": [5, 6, 5],
        "bad_words": ["ab"], "logprob_token_ids": [8, 9],
    }  # fmt: skip
    logprobs = {"logprobs": 0} if "prompt" in base else {"logprobs": True}
    assert build({**base, **body, **logprobs}).sampling == SamplingParams(
        max_tokens=5, temperature=0.5, top_p=0.5, top_k=3, seed=2**63 - 1, stop=("a", "b"),
        stop_token_ids=frozenset({3}), ignore_eos=True, skip_special_tokens=False,
        include_stop_str_in_output=True, n=2, presence_penalty=1, frequency_penalty=-1.5,
        repetition_penalty=1.25, min_p=0.1, min_tokens=2, logit_bias={5: 100, 6: -1},
        allowed_token_ids=(5, 6, 5), bad_words_token_ids=((97, 98),), logprob_token_ids=(8, 9),
    )  # fmt: skip
    parse = parse_chat_completion if "messages" in base else parse_completion
    spec = response_spec(parse({**base, **body, **logprobs}), "demo", request_id="r1", created=17)
    flags = (spec.stream, spec.include_usage, spec.continuous_usage_stats)
    assert (*flags, spec.return_token_ids) == (True,) * 4


@pytest.mark.parametrize(
    ("extra", "param", "words"),
    [
        ({"temperature": "1"}, "temperature", "must be a number"),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"temperature": 2.01}, "temperature", "[0, 2]"),
        ({"temperature": -0.1}, "temperature", "[0, 2]"),
        ({"temperature": math.nan}, "temperature", "[0, 2]"),
        ({"top_p": 0}, "top_p", "(0, 1]"),
        ({"top_p": 1.1}, "top_p", "(0, 1]"),
        ({"top_k": -2}, "top_k", "-1, 0 or at least 1"),
        ({"top_k": 1.5}, "top_k", "must be an integer"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": -3}, "max_tokens", "at least 1"),
        ({"max_tokens": 65}, "max_tokens", "65 and max_model_len is 64"),
        ({"max_tokens": "9"}, "max_tokens", "must be an integer"),
        ({"seed": 2**63}, "seed", "64 bits"),
        ({"seed": 1.5}, "seed", "must be an integer"),
        ({"stop": ""}, "stop", "empty string"),
        ({"stop": ["a", ""]}, "stop", "empty string"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": ["a", 1]}, "stop[1]", "must be a string"),
        ({"stop": 1}, "stop", "a string or an array of strings"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]", "must be an integer"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]", "must be an integer"),
        ({"stop_token_ids": [3, 100]}, "stop_token_ids", "contains 100, outside the vocabulary"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": {}}, "stream_options", "needs stream"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "not a field"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "true or false",
        ),
        ({"n": "2"}, "n", "must be an integer"),
        ({"logit_bias": []}, "logit_bias", "must be an object"),
        ({"logit_bias": {"x": 1}}, "logit_bias", 'the key "x", which is no token id'),
        ({"logit_bias": {"1.0": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5", "must be a number"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids[0]", "must be an integer"),
        ({"bad_words": "word"}, "bad_words", "must be an array"),
        ({"bad_words": ["a", 1]}, "bad_words[1]", "must be a string"),
        ({"bad_words": [""]}, "bad_words", "must not hold an empty string"),
        ({"bad_words": [" "]}, "bad_words", "bad_words[0] has no tokens"),
        ({"min_p": True}, "min_p", "must be a number"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids", "needs logprobs"),
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"response_format": {}}, "response_format.type", "is required"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be one of text"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "is required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "is required",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {}}},
            "response_format.format",
            "not supported yet",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "one"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex", "must be a string"),
        ({"structured_outputs": {"json": []}}, "structured_outputs.json", "a string or an object"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml", "not a field"),
        (
            {"structured_outputs": {"regex": "a" * 2**18 + "a"}},
            "structured_outputs.regex",
            "262145 bytes",
        ),
        (
            {
                "structured_outputs": {"regex": "a"},
                "response_format": {"type": "json_object"},
            },
            "structured_outputs",
            "together with response_format",
        ),
        ({"max_token": 5}, "max_token", "not a field"),
        ({"x" * 500: 5}, "x" * 64, "not a field"),
    ],
)
@BOTH
def test_a_bad_field_is_refused_by_its_path(base, extra, param, words):
    error = refusal({**base, **extra})
    assert error.status == 400
    assert error.param == param
    assert words in error.message


SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
TAG = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}


@pytest.mark.parametrize(
    ("extra", "wanted"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            {"json": SCHEMA},
        ),
        ({"response_format": {"type": "structural_tag", **TAG}}, {"structural_tag": TAG}),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
            {"json": SCHEMA, "disable_any_whitespace": True},
        ),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ("a", "b")}),
    ],
)
@BOTH
def test_a_grammar_reaches_the_engine(base, extra, wanted):
    spec = None if wanted is None else StructuredOutputs(**wanted)
    assert build({**base, **extra}).sampling.structured_outputs == spec


def as_json(fields):
    """Fields of `SamplingParams` as a body has them."""
    lists = {k: list(v) for k, v in fields.items() if isinstance(v, (tuple, frozenset))}
    return {**json.loads(json.dumps({**fields, **lists}))}


# The edge drops `logprobs` where `logprob_token_ids` are given.
BAD_HERE = [row for row in BAD if not {"logprobs", "logprob_token_ids"} <= row[0].keys()]


@BOTH
@pytest.mark.parametrize(("fields", "param", "text"), BAD_HERE, ids=str)
def test_a_bad_value_is_refused_in_the_words_of_the_engine(base, fields, param, text):
    body = {**base, **as_json(fields)}
    if "logprob_token_ids" in body:
        body["logprobs"] = 1
    if "logprobs" in body and "messages" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
        param = "top_logprobs" if param == "logprobs" else param
    error = refusal(body)
    assert (error.status, error.param, error.message) == (400, param, text)


@BOTH
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2), ("min_p", 0.5), ("presence_penalty", 1), ("frequency_penalty", 1),
        ("repetition_penalty", 2), ("min_tokens", 1), ("logit_bias", {"5": 1}),
        ("allowed_token_ids", [5]), ("bad_words", ["a"]),
    ],
)  # fmt: skip
def test_each_sampling_field_reaches_the_engine(base, name, value):
    body = {**base, name: value}
    assert build(body) != build(base)


def test_the_model_limits_the_number_of_log_probabilities():
    card = ModelCard("demo", "demo-folder", 64, 17, max_logprobs=2)
    options = {"vocab_size": 100, "request_id": "r", "seed": SEED}
    for count in (2, 3):
        parsed = parse_completion({"prompt": "x", "logprobs": count})
        refused = pytest.raises(BadRequestError, match="logprobs must be 0 to 2, got 3")
        with refused if count == 3 else contextlib.nullcontext():
            assert build_request(parsed, [1], card, **options).sampling.logprobs == 2


@pytest.mark.parametrize("k", [-1, 0, 1, 100, 2**63])
def test_any_top_k_from_minus_one_up_is_taken(k):
    assert build({"prompt": "x", "top_k": k}).sampling.top_k == min(k, 100)


def test_a_seed_of_minus_one_is_no_seed():
    assert build({"prompt": "x", "seed": -1}).sampling.seed == SEED


@pytest.mark.parametrize("seed", [0, 7, -2, -(2**63)])
def test_a_seed_of_the_body_is_taken_instead_of_the_minted_one(seed):
    assert build({"prompt": "x", "seed": seed}).sampling.seed == seed


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", TextPrompt("hello")),
        (["hello"], TextPrompt("hello", path="prompt[0]")),
        ([1, 2], TokenPrompt([1, 2])),
        ([[1, 2]], TokenPrompt([1, 2], "prompt[0]")),
    ],
)
def test_the_four_forms_of_one_prompt(prompt, expected):
    assert parse_completion({"prompt": prompt}).prompt == expected


@pytest.mark.parametrize(
    ("prompt", "param", "words"),
    [
        ("", "prompt", "empty"),
        ([], "prompt", "empty"),
        ([""], "prompt[0]", "empty"),
        ([[]], "prompt[0]", "empty"),
        (["a", ""], "prompt[1]", "empty"),
        ([[1], 2], "prompt[1]", "must be a string or an array"),
        ([1, "a"], "prompt[1]", "must be an integer"),
        ([1, True], "prompt[1]", "must be an integer"),
        ([1.5], "prompt[0]", "must be an integer"),
        (5, "prompt", "must be a string or an array"),
        ({}, "prompt", "must be a string or an array"),
        (False, "prompt", "must be a string or an array"),
        (None, "prompt", "required"),
    ],
)
def test_a_bad_prompt_is_refused_by_its_path(prompt, param, words):
    error = refusal({"prompt": prompt})
    assert error.param == param
    assert words in error.message


@pytest.mark.parametrize("bad", [-1, 100, 2**40])
def test_a_token_id_outside_the_vocabulary_is_named(bad):
    with pytest.raises(BadRequestError) as refused:
        check_vocabulary([1, bad, 2], 100, "prompt")
    assert refused.value.param == "prompt[1]"
    assert f"is {bad}, outside the vocabulary of 0 to 99" in refused.value.message


def test_max_tokens_is_clipped_to_the_room_left():
    assert build({"prompt": "x", "max_tokens": 64}).sampling.max_tokens == 60
    assert build({"prompt": "x"}, num_prompt_tokens=63).sampling.max_tokens == 1


@pytest.mark.parametrize("num_tokens", [64, 65])
@pytest.mark.parametrize("base", [{"prompt": "x"}, CHAT], ids=["prompt", "messages"])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(base, num_tokens):
    error = refusal(base, num_prompt_tokens=num_tokens)
    assert error.param == next(iter(base))
    assert f"has {num_tokens} tokens and max_model_len is 64" in error.message


@pytest.mark.parametrize(
    ("extra", "kept"),
    [
        ({}, [*range(9)]),
        ({"truncate_prompt_tokens": 3}, [6, 7, 8]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [6, 7, 8]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [0, 1, 2]),
        ({"truncate_prompt_tokens": 9}, [*range(9)]),
        ({"truncate_prompt_tokens": 15}, [*range(9)]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 12}, [5, 6, 7, 8]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 16}, [8]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 1}, [*range(9)]),
    ],
)
def test_a_prompt_is_truncated_to_its_last_tokens_or_its_first(extra, kept):
    for base, parse in (({"prompt": "x"}, parse_completion), (CHAT, parse_chat_completion)):
        assert truncate_prompt(parse({**base, **extra}), [*range(9)], 16) == kept


def test_a_truncated_prompt_must_leave_room_for_output():
    with pytest.raises(BadRequestError, match="is 16 and max_model_len is 16") as refused:
        truncate_prompt(parse_completion({"prompt": "x", "truncate_prompt_tokens": 16}), [1], 16)
    assert refused.value.param == "truncate_prompt_tokens"


def test_a_prompt_that_encodes_to_nothing_is_refused():
    assert refusal({"prompt": "x"}, num_prompt_tokens=0).param == "prompt"


def test_max_completion_tokens_wins_over_max_tokens():
    request = build({**CHAT, "max_completion_tokens": 3, "max_tokens": 9})
    assert request.sampling.max_tokens == 3
    assert refusal({**CHAT, "max_completion_tokens": 0}).param == "max_completion_tokens"
    assert refusal({**CHAT, "max_completion_tokens": 99}).param == "max_completion_tokens"


def test_text_parts_become_the_lines_of_a_content():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts, "name": "ann"}
    prompt = parse_chat_completion({"messages": [message]}).prompt
    assert prompt == ChatPrompt([{"role": "user", "content": "a\nb", "name": "ann"}])


def test_an_answer_can_be_sent_back_unchanged():
    answer = {"role": "assistant", "content": "yes", "refusal": None, "annotations": [],
              "audio": None, "function_call": None, "tool_calls": None}  # fmt: skip
    prompt = parse_chat_completion({"messages": [answer]}).prompt
    assert prompt == ChatPrompt([{"role": "assistant", "content": "yes"}])


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        (None, "messages", "is required"),
        ([], "messages", "must have at least 1 entries, got 0"),
        ("hi", "messages", "must be an array"),
        (["hi"], "messages[0]", "must be an object"),
        ([{"content": "x"}], "messages[0].role", "is required"),
        ([{"role": "robot", "content": "x"}], "messages[0].role", "must be one of"),
        ([{"role": [], "content": "x"}], "messages[0].role", "must be one of"),
        ([{"role": "tool"}], "messages[0].content", "required"),
        ([{"role": "user"}], "messages[0].content", "required"),
        ([{"role": "user", "content": 5}], "messages[0].content", "or an array"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]", "must be an object"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
            "not supported yet",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "req"),
        ([{"role": "user", "content": "a", "mood": 1}], "messages[0].mood", "not a field"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{}]}],
            "messages[1].tool_calls[0].function",
            "required",
        ),
        (
            [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}],
            "messages[0].tool_calls",
            "needs the role assistant",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}],
            "messages[0].tool_calls[0].function.arguments",
            "must be a JSON object",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "a b"}}]}],
            "messages[0].tool_calls[0].function.name",
            "must have 1 to 128",
        ),
    ],
)
def test_a_bad_message_is_refused_by_its_path(messages, param, words):
    error = refusal({"messages": messages}, parse=parse_chat_completion)
    assert error.param == param
    assert words in error.message


def test_unknown_and_unnamed_models():
    served = [ModelCard(name, name, 64, 17) for name in ("a", "b")]
    assert resolve_model(None, served).id == "a"
    assert resolve_model("b", served).id == "b"
    with pytest.raises(NotFoundError, match=r'"c" does not exist; served here: a, b'):
        resolve_model("c", served)


def test_tokenize_takes_one_of_two_forms():
    assert parse_tokenize({"prompt": "x"}).prompt == TextPrompt("x")
    chat = parse_tokenize({**CHAT, "add_generation_prompt": False}).prompt
    assert chat == ChatPrompt(CHAT["messages"], add_generation_prompt=False)
    for body in ({}, {"prompt": "x", **CHAT}):
        with pytest.raises(BadRequestError, match="either prompt or messages"):
            parse_tokenize(body)


def test_detokenize_needs_tokens():
    assert parse_detokenize({"tokens": [1]}) == (None, [1])
    with pytest.raises(BadRequestError, match="tokens is required"):
        parse_detokenize({"model": "m"})


def test_a_large_list_of_token_ids_is_parsed_and_checked_as_it_is():
    body = parse_body(json.dumps({"prompt": [5] * 200_000}).encode(), LIMITS)
    prompt = parse_completion(body).prompt
    assert encode_prompt(prompt, _Vocabulary) is body["prompt"]


class _Vocabulary:
    vocab_size = 6


def test_choices_act():
    for base in ({"prompt": "x"}, CHAT):
        assert build({**base, "n": 3}).sampling.n == 3
        assert build(base).sampling.n == 1
        assert refusal({**base, "n": 0}).param == "n"


@pytest.mark.parametrize("base", [{"prompt": "x"}, CHAT])
def test_priority_acts_where_the_engines_schedule_by_it(base):
    card = ModelCard("demo", "demo-folder", 64, 17, scheduling_policy="priority")
    options = {"vocab_size": 100, "request_id": "r", "seed": SEED}
    parse = parse_completion if "prompt" in base else parse_chat_completion
    for priority in (0, -2, 2**63 - 1, -(2**63)):
        parsed = parse({**base, "priority": priority})
        assert build_request(parsed, [1], card, **options).priority == priority
    assert build({**base, "priority": 0}).priority == 0
    refused = refusal({**base, "priority": 1})
    assert refused.param == "priority"
    assert "scheduling_policy: priority" in refused.message
    for value in (2**63, -(2**63) - 1, 0.5, "low", True):
        assert refusal({**base, "priority": value}).param == "priority"


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"prompt": "x"}, None),
        ({"prompt": "x", "logprobs": 0}, 0),
        ({"prompt": "x", "logprobs": 5}, 5),
        (CHAT, None),
        ({**CHAT, "logprobs": False}, None),
        ({**CHAT, "logprobs": False, "top_logprobs": 0}, None),
        ({**CHAT, "logprobs": True}, 0),
        ({**CHAT, "logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_log_probabilities_act_as_soon_as_the_table_lets_them(body, count):
    assert build(body).sampling.logprobs == count


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({**CHAT, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({**CHAT, "top_logprobs": 2}, "top_logprobs"),
        ({**CHAT, "logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_a_bad_number_of_log_probabilities_is_refused_by_its_path(body, param):
    assert refusal(body).param == param
