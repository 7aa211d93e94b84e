"""Embeddings of prompts: values, chunks, cached prefixes, preemption, and refusals."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import torch
import transformers

from replicas import LLM
from replicas.errors import InvalidRequestError
from replicas.messages import AddRequest, EngineRequest
from replicas.sampling_params import SamplingParams
from tests.engines import CLIENT, engine_core, generate, make_config, num_preemptions, take_events
from tests.models import chat_folder, model_folder
from tests.replicas.engine.test_prompt_logprobs import (
    PLAIN,
    PROMPT,
    WITHOUT_HIDDEN_STATES,
    outputs_of,
    tokens_of,
)

if TYPE_CHECKING:
    from replicas.messages import TokenOutput

MEAN = SamplingParams(max_tokens=1, temperature=0.0, pooling="mean", seed=0)
LAST = msgspec.structs.replace(MEAN, pooling="last")


@pytest.fixture(scope="module")
def folder():
    return model_folder("llama-gqa")


@cache
def states_of(folder: str, token_ids: tuple[int, ...]) -> np.ndarray:
    """(n, N) transformers' last hidden states, float32."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([token_ids])).last_hidden_state[0].numpy()


def expected(folder: str, prompt: list[int], pooling: str | None) -> np.ndarray:
    states = states_of(folder, tuple(prompt))
    pooled = states.mean(axis=0) if pooling == "mean" else states[-1]
    return pooled / np.linalg.norm(pooled)


def vector_of(outputs: list[TokenOutput]) -> np.ndarray:
    """The embedding, which comes once, with the end."""
    [output] = outputs
    assert output.finish_reason == "length"
    return np.frombuffer(output.embedding, dtype="<f4")


@pytest.mark.parametrize("params", [MEAN, LAST], ids=["mean", "last"])
@pytest.mark.parametrize("budget", [None, 64, 33])
def test_vectors_are_those_of_transformers_in_chunks_and_as_a_whole(folder, budget, params):
    prompts = [PROMPT, PROMPT[:1], PROMPT[::-1]]
    with engine_core(make_config(folder, max_num_batched_tokens=budget)) as core:
        found = outputs_of(core, *((prompt, params) for prompt in prompts))
    for prompt, outputs in zip(prompts, found, strict=True):
        vector = vector_of(outputs)
        np.testing.assert_allclose(vector, expected(folder, prompt, params.pooling), atol=1e-4)
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("budget", [None, 33, 95])
def test_a_prompt_may_be_as_long_as_a_sequence(folder, budget):
    prompt = (PROMPT * 3)[:96]
    config = make_config(folder, max_model_len=96, max_num_batched_tokens=budget)
    with engine_core(config) as core:
        [outputs] = outputs_of(core, (prompt, MEAN))
        core.handle(CLIENT, AddRequest(EngineRequest("long", [*prompt, 5], MEAN)), 0.0)
        core.handle(CLIENT, AddRequest(EngineRequest("text", prompt, PLAIN)), 0.0)
        refused = take_events(core)[CLIENT]
    np.testing.assert_allclose(vector_of(outputs), expected(folder, prompt, "mean"), atol=1e-4)
    assert [event.request_id for event in refused] == ["long", "text"]
    assert all("max_model_len is 96" in event.message for event in refused)


def test_the_offline_interface_takes_such_a_prompt_too(folder):
    prompt = (PROMPT * 3)[:96]
    with LLM(folder, multiprocess=False, skip_tokenizer_init=True, max_model_len=96) as llm:
        [whole, cut] = llm.embed([prompt, [*prompt, 5]], truncate_prompt_tokens=96, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="97 tokens and max_model_len is 96"):
            llm.embed([[*prompt, 5]], use_tqdm=False)
    np.testing.assert_allclose(whole, expected(folder, prompt, "last"), atol=1e-4)
    np.testing.assert_allclose(cut, expected(folder, [*prompt, 5][-96:], "last"), atol=1e-4)


@pytest.mark.parametrize("params", [MEAN, LAST], ids=["mean", "last"])
def test_a_cached_prefix_changes_nothing(folder, params):
    with engine_core(make_config(folder)) as core:
        generate(core, [PROMPT], PLAIN)
        [[output]] = outputs_of(core, (PROMPT, params))
    # The mean needs states that the cache does not have.
    assert (output.num_cached_tokens == 0) == (params is MEAN)
    wanted = expected(folder, PROMPT, params.pooling)
    np.testing.assert_allclose(vector_of([output]), wanted, atol=1e-4)


def test_a_preempted_request_counts_no_state_twice(folder):
    other = msgspec.structs.replace(PLAIN, max_tokens=30)
    requests = ([5] * 30, other), (PROMPT, MEAN)
    config = make_config(folder, max_num_batched_tokens=16, max_batch_size=2, num_blocks=6)
    with engine_core(config) as core:
        [_, outputs] = outputs_of(core, *requests)
        assert num_preemptions(core) == 1
    wanted = expected(folder, PROMPT, "mean")
    np.testing.assert_allclose(vector_of(outputs), wanted, atol=1e-4)


def test_neighbours_draw_the_same_tokens(folder):
    scored = msgspec.structs.replace(PLAIN, prompt_logprobs=1)
    requests = [(PROMPT[:9], PLAIN), (PROMPT[:40], scored), (PROMPT, MEAN), (PROMPT[3:50], LAST)]
    with engine_core(make_config(folder, max_num_batched_tokens=48)) as core:
        wanted = [tokens_of(outputs_of(core, request)[0]) for request in requests[:2]]
        found = outputs_of(core, *requests)
    assert [tokens_of(outputs) for outputs in found[:2]] == wanted
    for (prompt, params), outputs in zip(requests[2:], found[2:], strict=True):
        wanted_vector = expected(folder, prompt, params.pooling)
        np.testing.assert_allclose(vector_of(outputs), wanted_vector, atol=1e-4)


@WITHOUT_HIDDEN_STATES
def test_they_are_refused_by_name_where_there_are_no_hidden_states(folder, changes):
    with engine_core(make_config(folder, **changes)) as core:
        core.handle(CLIENT, AddRequest(EngineRequest("r", PROMPT, LAST)), 0.0)
        [refused] = take_events(core)[CLIENT]
        assert refused.reason == "invalid"
        assert refused.message.startswith("embeddings need mixed_batches")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 2}, "max_tokens"),
        ({"n": 2, "temperature": 1.0}, "n"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"skip_reading_prefix_cache": False}, "skip_reading_prefix_cache"),
        ({"pooling": "max"}, "pooling"),
    ],
)
def test_fields_that_contradict_an_embedding_are_refused_by_name(fields, param):
    with pytest.raises(InvalidRequestError) as caught:
        msgspec.structs.replace(MEAN, **fields).checked(1000)
    assert caught.value.param == param


def test_texts_are_embedded_offline():
    folder = chat_folder()
    with LLM(folder, multiprocess=False) as llm:
        texts = ["hello world", "the world"]
        found = llm.embed(texts, pooling="mean", use_tqdm=False)
        cut = llm.embed(texts[0], truncate_prompt_tokens=2, use_tqdm=False)
        ids = [llm.get_tokenizer().encode(text) for text in texts]
    for vector, token_ids in zip(found, ids, strict=True):
        np.testing.assert_allclose(vector, expected(folder, token_ids, "mean"), atol=1e-4)
    np.testing.assert_allclose(cut[0], expected(folder, ids[0][-2:], "last"), atol=1e-4)
