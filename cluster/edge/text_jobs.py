"""Tokenizer and grammar work of requests: short work inline, long work in threads.

Owner: a `TextJobs` owns the threads of one application.
"""

from __future__ import annotations

import functools
import hashlib
import json
from typing import TYPE_CHECKING, TypeVar

from cluster.edge.fair_scheduler import SLICE_CHARS, Job, Priority
from cluster.edge.grammar_cache import GrammarCache
from cluster.edge.heavy_work import HeavyWork
from cluster.edge.openai_requests import (
    check_grammar,
    encode_prompt,
    encode_steps,
    encoding_cost,
    recall_grammar,
)
from cluster.edge.tenants import tenant_of
from replicas.grammar_checks import GrammarChecker, special_ids_for_checks

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from cluster.edge.message_output import MessageOutput
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
        special_tokens = tokenizer.special_token_texts
        self._grammar_checker = GrammarChecker(special_tokens)
        self._special_ids_for_checks = special_ids_for_checks(special_tokens)
        self._grammars = GrammarCache()

    async def encode(
        self,
        prompt: Prompt,
        max_tokens: int | None,
        priority: Priority,
        request: Request,
        total_cost: int = 0,
    ) -> list[int]:
        """Return the token ids of a prompt; for errors see `encode_steps`.

        Args:
            prompt: The prompt.
            max_tokens: Most tokens; None: any number.
            priority: The lane of the threads.
            request: The request that it is for.
            total_cost: Cost of all prompts of the request, if it has several.
        """
        cost = encoding_cost(prompt)
        if cost == 0 or max(cost, total_cost) <= MAX_INLINE_COST:
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

    async def message_grammar(
        self, output: MessageOutput, own: Grammar | None, prompt_end: str | None, request: Request
    ) -> Grammar | None:
        """Return the grammar of a chat's output; None if that is free. See `MessageOutput.grammar`.

        Args:
            output: Formats of the output.
            own: The request's own grammar.
            prompt_end: Text of the prompt's last tokens. None: it is not there yet, and the grammar
                is for `check_grammar` alone.
            request: The request.

        Raises:
            BadRequestError: See `MessageOutput.grammar`.
        """
        ids = self._special_ids_for_checks
        if prompt_end is not None:
            ids = self._tokenizer.special_token_ids
        end = output.shortened(prompt_end or "")
        if own is not None or not output.has_call_grammar:
            return output.grammar(own, ids, end)
        use = output.use
        tools = json.dumps([(tool.name, tool.parameters, tool.is_strict) for tool in use.tools])
        digest = hashlib.blake2b(tools.encode()).digest()
        whom = (output.tools, output.reasoning, prompt_end is None)
        key = (*whom, digest, use.choice, use.is_parallel, end)
        found = self._grammars.get(key)
        if found is None:
            build = functools.partial(output.grammar, None, ids, end)
            cost = len(tools)
            if cost <= MAX_INLINE_COST:
                found = build()
            else:
                job = self._job(Priority.OTHER, cost, request, slice_chars=cost)
                found = await self._grammar_work.run(job, (build() for _ in range(1)))
            assert found is not None
            self._grammars.add(key, found)
        return found

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
