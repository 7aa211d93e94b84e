"""Runs a beam search as many requests of one token.

Every step of a search extends its live sequences by one request each, which is placed as any other.
The requests of a search share a session, and what they share of their prompts is cached.
Source: vLLM 0.32 vllm/entrypoints/generate/beam_search/online.py.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cluster.edge.openai import Usage
from cluster.edge.run_all import run_all
from replicas.beam_search import BeamSearch
from replicas.output_processor import OutputDelta

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cluster.edge.openai import Emit
    from replicas.beam_search import BeamSearchParams
    from replicas.messages import EngineRequest, TokenLogprob
    from replicas.tokenizer import Tokenizer

    Generate = Callable[[EngineRequest, Emit], Awaitable[Usage]]


async def run_beam_search(
    generate: Generate,
    request: EngineRequest,
    params: BeamSearchParams,
    tokenizer: Tokenizer,
    max_model_len: int,
    emit: Emit,
) -> Usage:
    """Run a beam search, and emit each of its best sequences as one delta of its choice.

    Args:
        generate: Runs a request; see `cluster.edge.backend.Backend.generate`. It is cancelled for
            every running request if one of them fails, or the search is cancelled.
        request: The prompt. Its parameters say what the deltas have.
        params: Validated parameters of the search.
        tokenizer: The served model's tokenizer.
        max_model_len: Longest sequence of the model.
        emit: See `cluster.edge.backend.Backend.generate`.

    Raises:
        ServingError: A request of the search cannot run, or failed.
    """
    prompt, count = request.prompt_token_ids, request.sampling.logprobs
    search = BeamSearch(prompt, params, tokenizer.eos_token_ids, max_model_len)
    base = msgspec.structs.replace(
        request,
        sampling=params.one_token(count or 0),
        session=request.session or request.request_id,
    )
    numbers, num_cached_tokens = itertools.count(), 0
    while search.live:
        step = [
            _extend(generate, _extension(base, next(numbers), beam.tokens)) for beam in search.live
        ]
        answers = await run_all(step)
        if search.live[0].tokens is prompt:
            num_cached_tokens = answers[0].num_cached_tokens
        search.extend([answer.likeliest for answer in answers])
    best = search.best(tokenizer)
    for choice, beam in enumerate(best):
        end = None if count is None or count == -1 else 1 + count
        logprobs = None if count is None else [position[:end] for position in beam.logprobs]
        tokens = beam.tokens[len(prompt) :]
        await emit(OutputDelta(choice, beam.text, tokens, beam.finish_reason, logprobs=logprobs))
    num_tokens = sum(len(beam.tokens) - len(prompt) for beam in best)
    return Usage(len(prompt), num_tokens, num_cached_tokens)


class _Answer(NamedTuple):
    """The likeliest next tokens of a sequence, and how much of it was cached."""

    likeliest: list[TokenLogprob]
    num_cached_tokens: int


def _extension(base: EngineRequest, number: int, tokens: list[int]) -> EngineRequest:
    """Return the request that extends a sequence; the first one, of the prompt, keeps its id.

    The digits that the others append keep the id unique, and the client's id readable in it.
    """
    suffix = f"{number:x}" if number else ""
    return msgspec.structs.replace(
        base, request_id=base.request_id + suffix, prompt_token_ids=tokens
    )


async def _extend(generate: Generate, request: EngineRequest) -> _Answer:
    likeliest: list[TokenLogprob] = []

    async def emit(delta: OutputDelta) -> None:
        for _drawn, *entries in delta.logprobs or ():
            likeliest.extend(entries)

    usage = await generate(request, emit)
    return _Answer(likeliest, usage.cached_tokens)
