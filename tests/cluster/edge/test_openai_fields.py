import dataclasses

import pytest

from cluster.edge.fields import (
    Support,
    read_fields,
)
from cluster.edge.openai_fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    TOKENIZE_FIELDS,
)
from cluster.errors import BadRequestError


def names(text):
    return text.split()


# What the two APIs document, written down apart from the tables under test.
OPENAI_COMPLETION = names("""
    model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n
    presence_penalty seed stop stream stream_options suffix temperature top_p user
""")
OPENAI_CHAT = names("""
    messages model audio frequency_penalty function_call functions logit_bias logprobs
    max_completion_tokens max_tokens metadata modalities moderation n parallel_tool_calls
    prediction presence_penalty prompt_cache_key prompt_cache_options prompt_cache_retention
    reasoning_effort response_format safety_identifier seed service_tier stop store stream
    stream_options temperature tool_choice tools top_logprobs top_p user verbosity
    web_search_options
""")
VLLM_SHARED = names("""
    top_k min_p repetition_penalty length_penalty use_beam_search stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens add_special_tokens
    echo spaces_between_special_tokens truncate_prompt_tokens truncation_side
    allowed_token_ids prompt_logprobs logprob_token_ids bad_words response_format
    structured_outputs priority request_id session_id return_tokens_as_token_ids
    return_token_ids return_token_offsets cache_salt kv_transfer_params ec_transfer_params
    vllm_xargs repetition_detection thinking_token_budget stream_interval watermarking
    routed_experts_prompt_start mm_payload
""")
VLLM_CHAT = names("""
    add_generation_prompt continue_final_message documents chat_template chat_template_kwargs
    media_io_kwargs mm_processor_kwargs return_prompt_text include_reasoning
""")
VLLM_TOKENIZE = names("""
    model prompt add_special_tokens return_token_strs messages add_generation_prompt
    continue_final_message chat_template chat_template_kwargs tools
""")

SAMPLES = [True, False, 1, -1, 0.5, "text", "low", [], [1], ["a"], {}, {"type": "json_object"}]


def turn_on(monkeypatch, *names):
    """Let fields act that are not supported yet, where a table has them."""
    for table in (COMPLETION_FIELDS, CHAT_FIELDS):
        for name in table.keys() & set(names):
            acting = dataclasses.replace(table[name], support=Support.SUPPORTED)
            monkeypatch.setitem(table, name, acting)


NEEDED = {"prompt": "hi", "messages": [{}]}


def read(body, table):
    """The values of some fields, which are given beside those that every body needs."""
    values = read_fields({**{name: NEEDED[name] for name in table.required}, **body}, table)
    return {name: value for name, value in values.items() if name in body}


def outcome(body, table):
    try:
        return read(body, table), None
    except BadRequestError as error:
        return None, error


@pytest.mark.parametrize(
    ("table", "documented"),
    [
        (COMPLETION_FIELDS, {*OPENAI_COMPLETION, *VLLM_SHARED, "prompt_embeds"}),
        (CHAT_FIELDS, {*OPENAI_CHAT, *VLLM_SHARED, *VLLM_CHAT}),
        (TOKENIZE_FIELDS, {*VLLM_TOKENIZE, "media_io_kwargs", "mm_processor_kwargs"}),
        (DETOKENIZE_FIELDS, {"model", "tokens"}),
    ],
    ids=["completions", "chat", "tokenize", "detokenize"],
)
def test_every_documented_field_and_no_other_is_classified_once(table, documented):
    assert set(table) == documented
    assert all(isinstance(field.support, Support) for field in table.values())


def test_the_fields_of_the_installed_openai_client_are_all_known():
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    completion = completion_create_params.CompletionCreateParamsStreaming.__annotations__
    inherited = completion_create_params.CompletionCreateParamsBase.__annotations__
    assert {*completion, *inherited} <= set(COMPLETION_FIELDS)
    chat = chat_create_params.CompletionCreateParamsStreaming.__annotations__
    inherited = chat_create_params.CompletionCreateParamsBase.__annotations__
    assert {*chat, *inherited} <= set(CHAT_FIELDS)


@pytest.mark.parametrize("table", [COMPLETION_FIELDS, CHAT_FIELDS], ids=["completions", "chat"])
def test_a_field_that_is_not_supported_yet_passes_only_at_its_neutral_value(table):
    for name, field in table.items():
        if field.support is not Support.NOT_YET:
            continue
        assert all(read({name: v}, table) == {} for v in (*field.neutral, None))
        refusals = set()
        for value in SAMPLES:
            if value in field.neutral:
                continue
            with pytest.raises(BadRequestError) as refused:
                read({name: value}, table)
            assert refused.value.param.startswith(name)
            refusals.add("not supported yet" in refused.value.message)
        assert True in refusals, f"{name} is never refused as not supported yet"


@pytest.mark.parametrize("table", [COMPLETION_FIELDS, CHAT_FIELDS], ids=["completions", "chat"])
def test_a_field_without_effect_changes_nothing_but_must_have_its_type(table):
    for name, field in table.items():
        if field.support is not Support.NO_EFFECT:
            continue
        accepted = 0
        for value in [*SAMPLES, "left"]:
            values, error = outcome({name: value}, table)
            accepted += values == {}
            assert values == {} or (error.param == name and "must be" in error.message)
        assert 0 < accepted < len(SAMPLES)


@pytest.mark.parametrize("table", [COMPLETION_FIELDS, CHAT_FIELDS], ids=["completions", "chat"])
def test_null_is_the_same_as_leaving_a_field_out(table):
    assert read(dict.fromkeys(table.keys() - {*table.required}), table) == {}
