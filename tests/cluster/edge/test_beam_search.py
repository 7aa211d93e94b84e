"""A beam search over HTTP finds what `LLM.beam_search` finds, and leaves no request behind."""

from __future__ import annotations

import asyncio

import pytest

from cluster.edge import openai_requests
from cluster.edge.openai import ModelCard, Usage
from cluster.errors import ReplicaLostError
from replicas import BeamSearchParams
from replicas.output_processor import OutputDelta
from replicas.sampling_params import SamplingDefaults
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.test_routes import Client, call, make_app
from tests.replicas.test_beam_search import EOS, PROMPT, TableLLM

PROMPTS = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}
BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 4}


def table_backend(vocab_size=256):
    """A backend whose model is a table, and the model."""
    llm = TableLLM(vocab_size, 2)

    async def script(request, emit):
        output = llm.answer(request.prompt_token_ids, request.sampling.logprobs)
        await asyncio.sleep(0)
        [choice] = output.outputs
        delta = OutputDelta(0, "x", choice.token_ids, "length", logprobs=choice.logprobs)
        await emit(delta)
        return Usage(len(request.prompt_token_ids), 1, 7 * len(service.requests))

    service = FakeBackend(script)
    service.tokenizer.eos_token_ids = frozenset({EOS})
    return service, llm


def search(service, path="/v1/completions", **fields):
    return call(service, "POST", path, {**PROMPTS[path], **BEAMS, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 1},
        {"length_penalty": 0},
        {"length_penalty": 2.5, "include_stop_str_in_output": True},
        {"ignore_eos": True},
        {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 5},
    ],
)
def test_the_choices_are_the_sequences_of_the_offline_search_best_first(fields):
    service, llm = table_backend()
    response = search(service, return_token_ids=True, **fields)
    names = ("length_penalty", "ignore_eos", "include_stop_str_in_output")
    options = {name: fields[name] for name in names if name in fields}
    width = fields.get("n", 3)
    params = BeamSearchParams(beam_width=width, max_tokens=4, **options)
    [expected] = llm.beam_search(PROMPT, params)
    choices = response.body["choices"]
    assert [c["index"] for c in choices] == list(range(width))
    assert [c["token_ids"] for c in choices] == [s.tokens[2:] for s in expected.sequences]
    assert [c["finish_reason"] for c in choices] == [s.finish_reason for s in expected.sequences]
    decode = service.tokenizer.decode
    for choice in choices:
        shown = choice["token_ids"]
        if shown[-1] == EOS and "ignore_eos" not in fields:
            shown = shown[:-1]
        assert choice["text"] == decode(shown)
    tokens = sum(len(s.tokens) - 2 for s in expected.sequences)
    usage = {"prompt_tokens": 2, "completion_tokens": tokens, "total_tokens": 2 + tokens}
    assert response.body["usage"] == usage


def test_a_chat_has_a_message_for_each_sequence():
    service, llm = table_backend()
    body = search(service, "/v1/chat/completions", max_completion_tokens=2).body
    prompt = service.requests[0].prompt_token_ids
    [expected] = llm.beam_search(prompt, BeamSearchParams(beam_width=3, max_tokens=2))
    tokens = [s.tokens[len(prompt) :] for s in expected.sequences]
    assert [c["message"]["content"] for c in body["choices"]] == [
        service.tokenizer.decode(ids) for ids in tokens
    ]


@pytest.mark.parametrize("count", [0, 2, 9])
def test_log_probabilities_are_those_of_each_token_and_as_many_as_asked(count):
    service, llm = table_backend()
    body = search(service, logprobs=count, ignore_eos=True, return_token_ids=True).body
    for choice in body["choices"]:
        shown = choice["logprobs"]
        tokens = [*PROMPT, *choice["token_ids"]]
        rows = [llm.logprobs[i, tokens[i - 1]] for i in range(2, len(tokens))]
        drawn = [float(row[token]) for row, token in zip(rows, tokens[2:], strict=True)]
        assert shown["token_logprobs"] == pytest.approx(drawn)
        assert all(len(top) in {count, count + 1} for top in shown["top_logprobs"])
    [asked] = {r.sampling.logprobs for r in service.requests}
    assert asked == max(2 * 3, count)


def test_every_step_is_a_request_for_each_sequence_in_one_session():
    service, _ = table_backend()
    search(service, ignore_eos=True)
    requests = service.requests
    assert [len(r.prompt_token_ids) for r in requests] == [2] + 3 * [3] + 3 * [4] + 3 * [5]
    assert len({r.request_id for r in requests}) == 10
    first = requests[0].request_id
    assert all(r.request_id.rpartition("-")[0] == first.rpartition("-")[0] for r in requests)
    assert {r.session for r in requests} == {first}
    assert {(r.sampling.max_tokens, r.sampling.temperature) for r in requests} == {(1, 0.0)}
    service, _ = table_backend()
    search(service, session_id="mine", cache_salt="pepper")
    [session] = {r.session for r in service.requests}
    assert session != service.requests[0].request_id
    assert {r.cache_salt for r in service.requests} == {"pepper"}


def test_the_counts_say_how_much_of_the_prompt_was_cached():
    service, _ = table_backend()
    app = make_app(service, prompt_tokens_details=True)
    body = {**PROMPTS["/v1/completions"], **BEAMS}
    response = asyncio.run(Client(app).request("POST", "/v1/completions", body))
    assert response.body["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}


def test_a_model_s_own_defaults_do_not_apply():
    service, _ = table_backend()
    service.defaults = SamplingDefaults(temperature=0.0, repetition_penalty=1.5)
    assert search(service).status == 200


def test_an_echo_precedes_every_sequence():
    service, _ = table_backend()
    texts = [choice["text"] for choice in search(service).body["choices"]]
    echoed = [choice["text"] for choice in search(service, echo=True).body["choices"]]
    assert echoed == [service.tokenizer.decode(PROMPT) + text for text in texts]


COMMON = [
    ("stream", True, "cannot be used with use_beam_search"),
    ("stop", "x", "cannot be used with use_beam_search"),
    ("stop_token_ids", [3], "cannot be used with use_beam_search"),
    ("min_tokens", 1, "cannot be used with use_beam_search"),
    ("presence_penalty", 1, "cannot be used with use_beam_search"),
    ("frequency_penalty", 0.5, "cannot be used with use_beam_search"),
    ("repetition_penalty", 1.1, "cannot be used with use_beam_search"),
    ("logit_bias", {"3": 1}, "cannot be used with use_beam_search"),
    ("allowed_token_ids", [3], "cannot be used with use_beam_search"),
    ("bad_words", ["x"], "cannot be used with use_beam_search"),
    ("prompt_logprobs", 1, "cannot be used with use_beam_search"),
    ("response_format", {"type": "json_object"}, "cannot be used with use_beam_search"),
    ("structured_outputs", {"regex": "a"}, "cannot be used with use_beam_search"),
    ("n", 11, "n must be at most 10, got 11"),
    ("length_penalty", 1e300, "length_penalty must be -10 to 10"),
    ("length_penalty", "1", "length_penalty must be a number"),
]


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize(("name", "value", "text"), COMMON)
def test_what_a_search_does_not_obey_is_refused_by_its_field(path, name, value, text):
    service, _ = table_backend()
    response = search(service, path, **{name: value})
    error = response.body["error"]
    assert (response.status, error["param"]) == (400, name)
    assert text in error["message"]
    assert service.requests == []


@pytest.mark.parametrize(
    "fields",
    [{"logprobs": 1, "logprob_token_ids": [3]}, {"logprobs": 1, "echo": True}],
)
def test_log_probabilities_of_prompts_and_of_given_tokens_are_refused(fields):
    service, _ = table_backend()
    response = search(service, **fields)
    assert (response.status, response.body["error"]["param"]) == (400, [*fields][-1])


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": False, "stop": [], "stop_token_ids": [], "min_tokens": 0, "logit_bias": {}},
        {"presence_penalty": 0, "repetition_penalty": 1.0, "bad_words": [], "stop": None},
        {"response_format": {"type": "text"}, "logprob_token_ids": []},
    ],
)
def test_neutral_values_are_accepted(fields):
    service, _ = table_backend()
    assert search(service, **fields).status == 200


def test_a_search_over_logits_is_refused_by_its_field():
    service, _ = table_backend()
    card = ModelCard("demo", "demo-folder", 64, 17, logprobs_mode="processed_logits")
    service.models = lambda: [card]
    response = search(service)
    error = response.body["error"]
    assert (response.status, error["param"]) == (400, "use_beam_search")
    assert "logprobs_mode is 'processed_logits'" in error["message"]
    assert service.requests == []


def test_tools_that_need_a_grammar_are_refused():
    service, _ = table_backend()
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    response = search(service, "/v1/chat/completions", tools=tools)
    assert (response.status, response.body["error"]["param"]) == (400, "tools")


def test_a_search_of_too_many_requests_is_refused_before_it_begins(monkeypatch):
    service, _ = table_backend()
    monkeypatch.setattr(openai_requests, "MAX_EXTENSIONS", 11)
    error = search(service).body["error"]
    assert error["param"] == "max_tokens"
    assert "max_tokens times n is 12, but may be at most 11" in error["message"]
    chat = search(service, "/v1/chat/completions", max_tokens=None).body["error"]
    assert chat["param"] == "max_tokens"
    assert service.requests == []


def test_a_request_that_fails_ends_the_others_and_the_search():
    async def script(request, emit):
        if len(request.prompt_token_ids) == 3:
            if request.prompt_token_ids[-1] == second:
                raise ReplicaLostError("the replica died")
            await asyncio.Event().wait()
        return await answer(request, emit)

    service, llm = table_backend()
    answer, service.script = service.script, script
    [found] = llm.beam_search(PROMPT, BeamSearchParams(beam_width=2, max_tokens=1, ignore_eos=True))
    second = found.sequences[1].tokens[-1]
    response = search(service, n=2)
    assert response.status == 503
    assert "the replica died" in response.body["error"]["message"]
    assert (len(service.requests), service.num_open) == (3, 0)


def test_a_client_that_leaves_ends_every_request_of_its_search():
    async def main():
        async def script(request, emit):
            if len(request.prompt_token_ids) == 4:
                is_running.set()
                await asyncio.Event().wait()
            return await answer(request, emit)

        is_running = asyncio.Event()
        service, _ = table_backend()
        answer, service.script = service.script, script
        client = Client(make_app(service))
        body = {**PROMPTS["/v1/completions"], **BEAMS}
        asking = asyncio.create_task(client.request("POST", "/v1/completions", body))
        await is_running.wait()
        assert service.num_open == 3
        client.gone.set()
        await asking
        return client.status, service.num_open

    assert asyncio.run(main()) == (499, 0)
