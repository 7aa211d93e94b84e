"""LLMEngine: requests in, whole outputs out, one `step` at a time, over any synchronous client.

Owner: the caller's thread.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from replicas.bad_words import encode_bad_words
from replicas.errors import InvalidRequestError, RequestRefusedError
from replicas.grammar_checks import GrammarChecker
from replicas.messages import check_priority, checked_request
from replicas.output_processor import OutputProcessor
from replicas.philox import mint_seed
from replicas.truncation import most_prompt_tokens, truncated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replicas.client import EngineFacts, SyncEngineClient
    from replicas.messages import EngineRequest, FinishReason, TokenLogprob, TokenOutput
    from replicas.output_processor import OutputDelta
    from replicas.sampling_params import SamplingParams
    from replicas.tokenizer import Tokenizer


Prompt = str | list[int]
"""Text, or token ids."""


@dataclass(slots=True)
class CompletionOutput:
    """Output of one choice of a request so far.

    Attributes:
        index: Index of the choice, from 0.
        token_ids: Its tokens, including an end token.
        finish_reason: Why it ended, or None while it runs.
        stop_reason: The stop string or token id that ended it, if one did.
        logprobs: For all tokens as in `OutputDelta`; None if not requested.
        processor: Processor that detokenizes the choice.
    """

    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[list[TokenLogprob]] | None = None
    processor: OutputProcessor | None = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str:
        """Its text, detokenized when read."""
        return self.processor.text(self.index) if self.processor is not None else ""


@dataclass(slots=True)
class RequestOutput:
    """Output of a request so far.

    Attributes:
        request_id: Its id.
        prompt: Its prompt as text; None if token ids were given.
        prompt_token_ids: Its prompt as tokens.
        outputs: One for each choice.
        finished: Whether the output is complete.
        num_cached_tokens: Prompt tokens found in the prefix cache.
        prompt_logprobs: If requested: for each token of the prompt itself first, then the
            likeliest; none for the first token.
        embedding: If requested: the prompt's embedding, as in `TokenOutput`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[list[TokenLogprob]] | None = None
    embedding: bytes | None = None

    @classmethod
    def of(
        cls, request: EngineRequest, prompt: Prompt, processor: OutputProcessor
    ) -> RequestOutput:
        """Create the empty output of a request that this processor will fill."""
        text = prompt if isinstance(prompt, str) else None
        choices = [CompletionOutput(i, processor=processor) for i in range(request.sampling.n)]
        return cls(request.request_id, text, request.prompt_token_ids, choices)

    def apply(self, delta: OutputDelta, processor: OutputProcessor) -> None:
        """Append one step's output for one choice, as produced by the request's processor."""
        output = self.outputs[delta.choice]
        output.token_ids.extend(delta.token_ids)
        output.finish_reason = delta.finish_reason
        output.stop_reason = delta.stop_reason
        if delta.finish_reason == "error":
            for other in self.outputs:
                other.finish_reason = other.finish_reason or "error"
        if delta.logprobs is not None:
            output.logprobs = [*(output.logprobs or []), *delta.logprobs]
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.embedding is not None:
            self.embedding = delta.embedding
        self.finished = processor.is_finished
        self.num_cached_tokens = processor.num_cached_tokens

    def abort(self) -> None:
        """End every choice that runs, for the reason "abort"."""
        for output in self.outputs:
            output.finish_reason = output.finish_reason or "abort"
        self.finished = True


def to_engine_input(
    prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer | None, facts: EngineFacts
) -> tuple[list[int], SamplingParams]:
    """Return a prompt and its parameters in the form that this engine takes.

    Raises:
        InvalidRequestError: The prompt or a parameter can never work, or needs a tokenizer and
            there is none.
    """
    params = _encoded_params(params, tokenizer, facts)
    token_ids = _encoded(prompt, tokenizer) if isinstance(prompt, str) else _plain_ids(prompt)
    if params.truncate_prompt_tokens is not None:
        most = most_prompt_tokens(
            params.truncate_prompt_tokens,
            params.max_tokens if params.pooling is None else 0,
            facts.max_model_len,
        )
        token_ids = truncated(token_ids, most, params.truncation_side)
        params = msgspec.structs.replace(params, truncate_prompt_tokens=None)
    _check_prompt(token_ids, facts, num_output=params.pooling is None)
    return token_ids, params


def grammar_checker(tokenizer: Tokenizer | None) -> GrammarChecker:
    """Return a new checker of grammars for a front end with this tokenizer."""
    return GrammarChecker(() if tokenizer is None else tokenizer.special_token_texts)


def _check_prompt(token_ids: list[int], facts: EngineFacts, *, num_output: int) -> None:
    """Refuse a prompt that the engine cannot run.

    Args:
        token_ids: The prompt.
        facts: What the engine is.
        num_output: Tokens of output for which there must be room.

    Raises:
        InvalidRequestError: The prompt is empty, leaves no room for output, or contains an invalid
            token id.
    """
    if not token_ids:
        raise InvalidRequestError("prompt", "the prompt is empty")
    if len(token_ids) + num_output > facts.max_model_len:
        raise InvalidRequestError(
            "prompt",
            f"the prompt has {len(token_ids)} tokens and max_model_len is {facts.max_model_len}: "
            "there is no room for output",
        )
    if not 0 <= min(token_ids) <= max(token_ids) < facts.vocab_size:
        place, bad = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < facts.vocab_size)
        raise InvalidRequestError(
            "prompt",
            f"prompt[{place}] is {bad}, outside the vocabulary of 0 to {facts.vocab_size - 1}",
        )


def _encoded_params(
    params: SamplingParams, tokenizer: Tokenizer | None, facts: EngineFacts
) -> SamplingParams:
    """Return checked parameters, with bad words as token sequences."""
    params = params.checked(facts.vocab_size, facts.max_logprobs)
    for name in ("stop", "bad_words"):
        if tokenizer is None and getattr(params, name):
            raise InvalidRequestError(name, f"{name} needs a tokenizer, and it was skipped")
    if tokenizer is None or not params.bad_words:
        return params
    found = (*params.bad_words_token_ids, *encode_bad_words(params.bad_words, tokenizer))
    params = msgspec.structs.replace(params, bad_words=(), bad_words_token_ids=found)
    params.validate(facts.vocab_size, facts.max_logprobs)
    return params


def _encoded(text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise InvalidRequestError("prompt", "a text prompt needs a tokenizer; give token ids")
    check_characters("prompt", text)
    return tokenizer.encode(text)


def check_characters(name: str, text: str) -> None:
    """Refuse half of a surrogate pair, which no tokenizer takes.

    Raises:
        InvalidRequestError: The text has one; the message says where.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"{name}[{error.start}]"
        raise InvalidRequestError(
            name, f"{where} is a lone surrogate, half of a character"
        ) from error


def _plain_ids(prompt: object) -> list[int]:
    if not isinstance(prompt, list | tuple):
        kind = type(prompt).__name__
        raise InvalidRequestError("prompt", f"a prompt is text or a list of token ids, got {kind}")
    if set(map(type, prompt)) <= {int}:
        return list(prompt)
    for place, token_id in enumerate(prompt):
        if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
            text = f"prompt[{place}] must be a token id, got {repr(token_id)[:80]}"
            raise InvalidRequestError("prompt", text)
    return [int(token_id) for token_id in prompt]


class LLMEngine:
    """Engine front end that runs requests to completion, step by step.

    Args:
        client: Client of the engine.
        tokenizer: The model's tokenizer; None works on token ids only.
        seed: Base seed for requests without a seed.

    Attributes:
        eos_token_ids: The model's end tokens; none are known without a tokenizer.
    """

    def __init__(
        self, client: SyncEngineClient, tokenizer: Tokenizer | None, seed: int = 0
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._seed = seed
        self._counter = itertools.count()
        self.eos_token_ids = tokenizer.eos_token_ids if tokenizer is not None else frozenset()
        self._requests: dict[str, tuple[RequestOutput, OutputProcessor]] = {}
        self._grammar_checker = grammar_checker(tokenizer)

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        return self._client.description.max_model_len

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> str:
        """Queue a request.

        Args:
            prompt: Text or token ids.
            sampling_params: Sampling parameters.
            request_id: Unique among live requests; None generates one.
            priority: Lower ones run first, with `scheduling_policy: priority`.

        Returns:
            The request's id.

        Raises:
            InvalidRequestError: The prompt or a parameter can never work.
        """
        facts = self._client.description
        token_ids, sampling_params = to_engine_input(
            prompt, sampling_params, self._tokenizer, facts
        )
        if sampling_params.structured_outputs is not None:
            self._grammar_checker.check(sampling_params.structured_outputs)
        count = next(self._counter)
        request_id = f"request-{count}" if request_id is None else request_id
        if request_id in self._requests:
            raise InvalidRequestError("request_id", f"request {request_id!r} is running already")
        if sampling_params.seed is None:
            seed = mint_seed(self._seed, count)
            sampling_params = msgspec.structs.replace(sampling_params, seed=seed)
        request = checked_request(request_id, token_ids, sampling_params, priority=priority)
        check_priority(priority, facts.scheduling_policy)
        processor = OutputProcessor(self._tokenizer, request, self.eos_token_ids, is_streamed=False)
        self._requests[request_id] = RequestOutput.of(request, prompt, processor), processor
        try:
            self._client.add_request(request)
        except BaseException:
            del self._requests[request_id]
            raise
        return request_id

    def close(self) -> None:
        """End the process that checks grammars, if there is one."""
        self._grammar_checker.close()

    def step(self) -> list[RequestOutput]:
        """Wait for the outputs of at least one engine step.

        Returns:
            The requests with new output; finished ones are dropped from the engine.

        Raises:
            EngineDeadError: The engine is gone.
            RequestRefusedError: The engine refused a request, which is dropped.
        """
        changed: dict[str, RequestOutput] = {}
        try:
            outputs = self._client.get_outputs()
        except RequestRefusedError as error:
            self._requests.pop(error.request_id, None)
            raise
        for output in outputs:
            self._take(output, changed)
        return list(changed.values())

    def has_unfinished_requests(self) -> bool:
        """Return whether any request is unfinished."""
        return bool(self._requests)

    def abort_request(self, request_ids: Sequence[str]) -> None:
        """Drop requests; unknown ids are ignored."""
        known = [r for r in request_ids if self._requests.pop(r, None) is not None]
        if known:
            self._client.abort(known)

    def _take(self, output: TokenOutput, changed: dict[str, RequestOutput]) -> None:
        found = self._requests.get(output.request_id)
        if found is None:
            return
        request_output, processor = found
        delta = processor.take(output)
        if delta is None:
            return
        request_output.apply(delta, processor)
        changed[output.request_id] = request_output
        if request_output.finished:
            del self._requests[output.request_id]
        if delta.finish_reason is not None and output.finish_reason is None:
            # A stop string, which engines do not look for, has ended the choice.
            self._client.stop_choice(output.request_id, output.choice)
