"""Runs one HTTP request's several prompts as one: they start together and end together.

Every prompt is a request of its own for the backend, so admission, quotas and the queue count each.
All of them arrive in one turn of the event loop, before an engine can answer any. If one is refused
or fails, the others are cancelled, and the whole request has that one's error.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from cluster.edge.openai import Usage
from cluster.edge.run_all import run_all

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from cluster.edge.openai import Emit
    from replicas.messages import EngineRequest
    from replicas.output_processor import OutputDelta

    Generate = Callable[[EngineRequest, Emit], Awaitable[Usage]]


async def run_batch(generate: Generate, requests: Sequence[EngineRequest], emit: Emit) -> Usage:
    """Run the requests of all prompts, which have the same number of choices.

    Args:
        generate: Runs one request; see `cluster.edge.backend.Backend.generate`.
        requests: One request for each prompt.
        emit: Receives the deltas of all prompts, one at a time. Choices are numbered through:
            choice c of prompt p is `p * n + c`.

    Returns:
        The sums of all token counts.

    Raises:
        ServingError: One of the requests cannot run, or failed.
    """
    lock = asyncio.Lock()

    async def run_one(first_choice: int, request: EngineRequest) -> Usage:
        async def emit_numbered(delta: OutputDelta) -> None:
            numbered = msgspec.structs.replace(delta, choice=first_choice + delta.choice)
            async with lock:
                await emit(numbered)

        try:
            return await generate(request, emit_numbered)
        except Exception:
            # The others are cancelled now, but not in the middle of an event that is being sent.
            async with lock:
                raise

    usages = await run_all(run_one(i * r.sampling.n, r) for i, r in enumerate(requests))
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
    )
