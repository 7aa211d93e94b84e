"""Tokenizer and grammar work of requests: short work inline, long work in threads.

Owner: a `TextJobs` owns the threads of one application.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from cluster.edge.fair_scheduler import SLICE_CHARS, Job, Priority
from cluster.edge.heavy_work import HeavyWork
from cluster.edge.openai_requests import (
    check_grammar,
    encode_prompt,
    encode_steps,
    encoding_cost,
    recall_grammar,
)
from cluster.edge.tenants import tenant_of
from replicas.grammar_checks import GrammarChecker

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from cluster.edge.openai_requests import Prompt
    from cluster.edge.structured_outputs import Grammar
    from replicas.tokenizer import Tokenizer

T = TypeVar("T")

MAX_INLINE_COST = 4096
"""Largest text, in characters or tokens, that is encoded or decoded on the event loop: 3 ms."""
_NUM_THREADS = 2


class TextJobs:
    """Runs tokenizer and grammar work without blocking the event loop.

    Args:
        tokenizer: The served model's tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._heavy_work = HeavyWork(_NUM_THREADS)
        # A thread of its own, because it waits for the checker's child.
        self._grammar_work = HeavyWork(1)
        self._grammar_checker = GrammarChecker(tokenizer.special_token_texts)

    async def encode(
        self, prompt: Prompt, max_tokens: int | None, priority: Priority, request: Request
    ) -> list[int]:
        """Return the token ids of a prompt; for errors see `encode_steps`."""
        cost = encoding_cost(prompt)
        if cost <= MAX_INLINE_COST:
            return encode_prompt(prompt, self._tokenizer, max_tokens)
        steps = encode_steps(prompt, self._tokenizer, max_tokens)
        return await self._heavy_work.run(self._job(priority, cost, request), steps)

    async def run(self, work: Callable[[], T], cost: int, request: Request) -> T:
        """Run short work on the event loop, and long work, which would block it, in a thread.

        Args:
            work: The work.
            cost: Its cost, in characters of text to encode.
            request: The request that it is for.
        """
        if cost <= MAX_INLINE_COST:
            return work()
        once = (work() for _ in range(1))
        job = self._job(Priority.OTHER, cost, request, slice_chars=cost)
        return await self._heavy_work.run(job, once)

    async def check_grammar(self, grammar: Grammar | None, request: Request) -> None:
        """Refuse a request whose grammar does not compile, before any work for it.

        Raises:
            BadRequestError: The grammar does not compile.
        """
        if grammar is None or recall_grammar(grammar, self._grammar_checker):
            return
        once = (check_grammar(grammar, self._grammar_checker) for _ in range(1))
        cost = grammar.num_chars
        job = self._job(Priority.OTHER, cost, request, slice_chars=max(cost, 1))
        await self._grammar_work.run(job, once)

    def _job(
        self, priority: Priority, cost: int, request: Request, slice_chars: int = SLICE_CHARS
    ) -> Job:
        address = request.client.host if request.client else ""
        source, weight = tenant_of(request.scope).share(address)
        return Job(priority, source, cost, weight, slice_chars)
