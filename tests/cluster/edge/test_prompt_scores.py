"""An engine behind the HTTP interface scores prompts."""

from __future__ import annotations

import pytest
import torch

from cluster.edge.openai import Usage
from replicas.messages import AddRequest, TokenOutput
from replicas.output_processor import OutputProcessor
from replicas.tokenizer import Tokenizer
from tests.cluster.edge.fake_backend import FakeBackend
from tests.cluster.edge.test_routes import GENERATE, PROMPTS, call
from tests.engines import engine_core, make_config, take_events
from tests.models import chat_folder, oracle_of_all


@pytest.fixture(scope="module")
def backend():
    """A backend with an engine core behind it."""
    folder = chat_folder()
    with engine_core(make_config(folder, max_num_batched_tokens=8)) as core:

        async def run(request, emit):
            processor = OutputProcessor(found.tokenizer, request, frozenset())
            core.handle(b"edge", AddRequest(request), 0.0)
            while not processor.is_finished:
                core.step(0.0)
                for event in take_events(core).get(b"edge", []):
                    delta = processor.take(event) if isinstance(event, TokenOutput) else None
                    if delta is not None:
                        await emit(delta)
            return Usage(len(request.prompt_token_ids), processor.num_output_tokens)

        found = FakeBackend(run)
        found.tokenizer = Tokenizer.from_folder(folder)
        yield found


def test_an_engine_scores_the_prompt_of_an_echo(backend):
    prompt = "the quick brown fox"
    token_ids = backend.tokenizer.encode(prompt)
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "seed": 1}
    ask = {"echo": True, "logprobs": 2, "max_tokens": 3, "return_token_ids": True}
    [choice] = call(backend, "POST", "/v1/completions", {**body, **ask}).body["choices"]
    found, output = choice["logprobs"], choice["token_ids"]
    logits = oracle_of_all(chat_folder(), torch.float32, [*token_ids, *output])
    scores = logits.log_softmax(dim=-1)
    wanted = [scores[i, t].item() for i, t in enumerate([*token_ids, *output][1:])]
    assert len(token_ids) > 8, "more than one chunk"
    assert choice["text"].startswith(prompt)
    assert "".join(found["tokens"][: len(token_ids)]) == prompt
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    assert found["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-4)
    assert [len(likeliest) >= 2 for likeliest in found["top_logprobs"][1:]] == [True] * len(wanted)


@pytest.mark.parametrize("path", GENERATE)
def test_an_engine_scores_prompts(backend, path):
    body = {**PROMPTS[path], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    response = call(backend, "POST", path, {**body, "return_token_ids": True})
    holder = response.body["choices"][0] if path == "/v1/completions" else response.body
    request = backend.requests[-1]
    first, *rest = holder["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(request.prompt_token_ids) - 1
    logits = oracle_of_all(chat_folder(), torch.float32, request.prompt_token_ids)
    scores = logits.log_softmax(dim=-1)
    for i, (token_id, entries) in enumerate(zip(request.prompt_token_ids[1:], rest, strict=True)):
        assert entries[str(token_id)]["logprob"] == pytest.approx(
            scores[i, token_id].item(), abs=1e-4
        )
