"""A whole `ttserve serve` on a tiny model: clients' answers, and metrics."""

import asyncio
import http.client
import json
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import harness
import pytest
from tiny_server import (
    BLOCK_SIZE,
    GREEDY,
    LONG,
    MODEL,
    added,
    labels_of,
    metrics,
    total,
    wait_idle,
)
from typer.testing import CliRunner

from cluster.cli import app as cli
from examples import server_client
from kv_transfer.layout import ROW_TOKENS
from replicas import LLM
from replicas.async_llm import AsyncLLM
from replicas.tokenizer import Tokenizer
from tests.cluster.engines import MAX_MODEL_LEN, engine_config, model_folder, prompts, sampling

pytestmark = pytest.mark.ray

MESSAGES = [{"role": "user", "content": "How long is a block?"}]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(model_folder())


def offline(cases):
    """Tokens of one local engine for (prompt, sampling) cases, all at once."""
    config = {"dtype": "float32", "num_blocks": 513, "num_threads": 1, "block_size": BLOCK_SIZE}
    with LLM(str(model_folder()), multiprocess=False, **config) as llm:
        outputs = llm.generate([p for p, _ in cases], [s for _, s in cases], use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


async def combined(cases):
    """The same from one engine process that does both, with every request in flight."""
    config = engine_config("both", max_batch_size=32, tt_data_parallel=2, max_num_waiting=None)
    llm = await AsyncLLM.start(config)
    try:

        async def run(prompt, params):
            async for output in llm.generate(prompt, params):
                last = output
            return list(last.outputs[0].token_ids)

        return await asyncio.gather(*(run(*case) for case in cases))
    finally:
        await llm.shutdown()


# --- answers -----------------------------------------------------------------------------------


def test_the_example_client_is_served(server, capsys):
    arguments = ["--num-requests", "12", "--concurrency", "6", "--max-tokens", "8"]
    assert server_client.main(["--url", server.url, *arguments]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["num_requests"], figures["num_failed"]) == (12, 0)
    assert figures["output_tokens"] > 0


def test_server_says_what_it_serves(server, client):
    models = client.models.list().data
    assert [model.id for model in models] == [MODEL]
    assert client.models.retrieve(MODEL).max_model_len == MAX_MODEL_LEN
    assert harness.get_json(f"{server.url}/health") == (200, "")
    assert harness.get_json(f"{server.url}/live") == (200, "")


def test_replicas_tell_of_their_transfers_and_none_is_silent(server):
    with urllib.request.urlopen(f"{server.operations_url}/kv", timeout=60) as reply:
        replicas = json.load(reply)["replicas"]
    assert [replica["pool"] for replica in replicas] == ["decode", "decode", "prefill"]
    assert not any(replica["is_silent"] for replica in replicas)
    result = CliRunner().invoke(cli, ["kv", "--url", server.operations_url])
    assert result.exit_code == 0
    assert all(replica["replica"] in result.output for replica in replicas)


LONG_ENOUGH = 96
"""Tokens of an answer that comes in several events, though a fast engine has some at once."""


@pytest.mark.parametrize("ids", [False, True], ids=["text", "token_ids"])
def test_completion_streamed_or_not_is_the_offline_text(client, tokenizer, ids):
    text = "def answer():"
    prompt = tokenizer.encode(text)
    asked = {**GREEDY, "max_tokens": LONG_ENOUGH}
    (expected,) = offline([(prompt, sampling(LONG_ENOUGH))])
    given = prompt if ids else text
    whole = client.completions.create(model=MODEL, prompt=given, **asked)
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt=given,
            stream=True,
            stream_options={"include_usage": True},
            **asked,
        )
    )
    assert whole.choices[0].text == tokenizer.decode(expected)
    assert whole.choices[0].finish_reason == "length"
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage.model_dump() == whole.usage.model_dump() | {
        "prompt_tokens_details": chunks[-1].usage.model_dump()["prompt_tokens_details"]
    }
    counted = whole.usage.prompt_tokens, whole.usage.completion_tokens
    assert counted == (len(prompt), LONG_ENOUGH)
    assert len([c for c in chunks if c.choices]) > 6, "tokens come as they are made"


def test_chat_streamed_or_not_is_the_offline_text(client, tokenizer):
    prompt = tokenizer.encode(tokenizer.apply_chat_template(MESSAGES), False)
    (expected,) = offline([(prompt, sampling(12))])
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY)
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **GREEDY)
    )
    assert whole.choices[0].message.content == tokenizer.decode(expected)
    assert whole.choices[0].message.role == chunks[0].choices[0].delta.role == "assistant"
    assert whole.usage.prompt_tokens == len(prompt)
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_text_and_frees_the_slot(server, client, stream):
    options = {"model": MODEL, "prompt": "stop here", **GREEDY, "max_tokens": 200}
    text = client.completions.create(**options).choices[0].text
    stop = next(text[i : i + 2] for i in range(8, 190) if text[i : i + 2].isascii())
    answer = client.completions.create(**options, stop=[stop], stream=stream)
    choices = [part.choices[0] for part in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"
    wait_idle(server)


def test_seed_repeats_an_answer_and_another_seed_changes_it(client):
    def ask(seed):
        answer = client.completions.create(
            model=MODEL, prompt="dice", temperature=1.0, seed=seed, max_tokens=24
        )
        return answer.choices[0].text

    assert ask(1) == ask(1)
    assert len({ask(1), ask(2), ask(None), ask(None)}) == 4


def test_tokenize_and_detokenize_are_each_others_inverse(server, tokenizer):
    text = "größer than 'this'"
    status, body = harness.post_json(f"{server.url}/tokenize", {"model": MODEL, "prompt": text})
    assert (status, body["tokens"]) == (200, tokenizer.encode(text))
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), MAX_MODEL_LEN)
    status, back = harness.post_json(
        f"{server.url}/detokenize", {"model": MODEL, "tokens": body["tokens"]}
    )
    assert (status, back["prompt"]) == (200, text)
    status, chat = harness.post_json(
        f"{server.url}/tokenize", {"model": MODEL, "messages": MESSAGES}
    )
    expected = tokenizer.encode(tokenizer.apply_chat_template(MESSAGES), False)
    assert (status, chat["tokens"]) == (200, expected)


# --- the same tokens, and metrics --------------------------------------------------------------


def test_requests_in_flight_give_the_tokens_of_offline_and_combined_engines(server, client):
    before = wait_idle(server)
    cases = [
        (
            prompt,
            sampling(12 + i % 7)
            if i < 32
            else sampling(12, temperature=0.8, top_k=50, top_p=0.9, seed=i),
        )
        for i, prompt in enumerate(prompts(64, lengths=(3, 31, 32, 33, 64, 90, 130, 300)))
    ]

    def ask(case):
        prompt, params = case
        answer = client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            seed=params.seed,
            extra_body={"ignore_eos": True, "return_token_ids": True, "top_k": params.top_k},
        )
        return answer.choices[0].token_ids

    with ThreadPoolExecutor(32) as threads:
        answers = [*threads.map(ask, cases[:32]), *threads.map(ask, cases[32:])]
    assert answers == offline(cases)
    assert answers == asyncio.run(combined(cases))
    assert len({tuple(answer) for answer in answers}) > 32, "the prompts tell them apart"
    check_counts(before, wait_idle(server), cases)


def check_counts(before, after, cases):
    """Check `/metrics` after these requests, all of which went through both pools."""
    assert labels_of(after, "ttserve_slots", "pool", "dp_group") == {
        ("prefill", "0"),
        ("decode", "0"),
        ("decode", "1"),
    }
    assert len(labels_of(after, "ttserve_slots", "replica")) == 3
    num_rows = sum(-(-len(prompt) // ROW_TOKENS) for prompt, _ in cases)
    (block_bytes,) = {v for (name, _), v in after.items() if name == "ttserve_kv_block_bytes"}
    for pool, role in (("prefill", "producer"), ("decode", "consumer")):
        where = {"pool": pool, "role": role}
        ended = added(before, after, "ttserve_kv_transfers_total", outcome="ok", **where)
        assert ended == len(cases)
        assert added(before, after, "ttserve_kv_transfer_bytes_total", **where) == (
            num_rows * block_bytes * ROW_TOKENS // BLOCK_SIZE
        )
    for outcome in ("failed", "cancelled"):
        assert added(before, after, "ttserve_kv_transfers_total", outcome=outcome) == 0
    num_prompt = sum(len(prompt) for prompt, _ in cases)
    num_output = sum(params.max_tokens for _, params in cases)
    assert added(before, after, "vllm:prompt_tokens_total", pool="prefill") == num_prompt
    assert added(before, after, "vllm:prompt_tokens_total", pool="decode") == 0
    assert added(before, after, "vllm:generation_tokens_total") == num_output
    for group in ("0", "1"):
        group_tokens = added(
            before, after, "vllm:generation_tokens_total", pool="decode", dp_group=group
        )
        assert group_tokens > num_output / 4, "both lanes decode"
    done = "vllm:request_success_total"
    assert added(before, after, done, pool="decode", finished_reason="length") == len(cases)
    requests = "ttserve_ingress_requests_total"
    assert added(before, after, requests, finished_reason="length") == len(cases)
    assert added(before, after, "vllm:time_to_first_token_seconds_count") == len(cases)


# --- bad input ---------------------------------------------------------------------------------

PROMPT = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
TOO_LONG = [5] * MAX_MODEL_LEN
BAD = [
    ({**PROMPT, "model": "gpt-4"}, 404, "gpt-4"),
    ({**CHAT, "model": "gpt-4"}, 404, "gpt-4"),
    ({**PROMPT, "max_tokens": "two"}, 400, "max_tokens"),
    ({**PROMPT, "temperature": "hot"}, 400, "temperature"),
    ({**PROMPT, "temperature": 2.5}, 400, "temperature"),
    ({**PROMPT, "stream": 1}, 400, "stream"),
    ({**PROMPT, "seed": 0.5}, 400, "seed"),
    ({**CHAT, "messages": [{"role": "user", "contents": "x"}]}, 400, "content is required"),
    ({**CHAT, "messages": []}, 400, "messages"),
    ({**CHAT, "messages": "hi"}, 400, "messages"),
    ({**PROMPT, "prompt": ""}, 400, "prompt"),
    ({**PROMPT, "prompt": []}, 400, "prompt"),
    ({**PROMPT, "prompt": [10**6]}, 400, "prompt"),
    ({**PROMPT, "max_tokens": 0}, 400, "max_tokens"),
    ({**CHAT, "max_tokens": 0}, 400, "max_tokens"),
    ({**PROMPT, "max_tokens": 10**6}, 400, "max_tokens.* 1000000 .* 8192"),
    ({**PROMPT, "prompt": TOO_LONG}, 400, "8192 tokens.* 8192|8192.* 8192"),
    ({**PROMPT, "prompt": [*TOO_LONG, 5]}, 400, "8193 tokens.* 8192|8193.* 8192"),
    (b'{"model": "tiny", "prompt": "hi", "temperature": NaN}', 400, ""),
    (b'{"model": "tiny", "prompt": "hi", "temperature": Infinity}', 400, ""),
    (b'{"model": "tiny", "prompt": "hi", "temperature": 1e999}', 400, ""),
    (b'{"model": "tiny", "prompt": "hi"', 400, ""),
    (b"", 400, ""),
    (b"[]", 400, ""),
    (b"\xff\xfe", 400, ""),
    (b" " * 100_001, 413, ""),
]


@pytest.mark.parametrize(("body", "status", "reason"), BAD, ids=range(len(BAD)))
def test_bad_input_is_a_typed_error_that_names_its_field(server, body, status, reason):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    path = "/v1/chat/completions" if b"messages" in raw else "/v1/completions"
    found, answer = post(server, path, raw)
    assert found == status, answer
    error = answer["error"]
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")
    assert re.search(reason, error["message"]), error


def post(server, path, raw):
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    try:
        connection.request("POST", path, raw, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def test_bad_input_has_cost_nothing(server):
    samples = wait_idle(server)
    assert total(samples, "ttserve_ingress_requests_total", finished_reason="error") == 0


# --- the client leaves -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_client_that_leaves_frees_its_slot_and_blocks(server, stream):
    before = wait_idle(server)
    body = {"model": MODEL, "prompt": "gone", "max_tokens": LONG, "stream": stream}
    raw = json.dumps({**body, "ignore_eos": True, "temperature": 0})
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/completions", raw, {"Content-Type": "application/json"})
    if stream:
        reply = connection.getresponse()
        assert [reply.readline()[:5] for _ in range(3)] == [b"data:", b"\n", b"data:"]
        reply.close()
    else:
        harness.wait_for(
            lambda: total(metrics(server), "vllm:num_requests_running", pool="decode") == 1,
            180,
            "it decodes",
        )
    connection.close()
    after = wait_idle(server)
    done = "vllm:request_success_total"
    assert added(before, after, done, pool="decode", finished_reason="abort") == 1
    assert added(before, after, done, pool="decode", finished_reason="length") == 0
