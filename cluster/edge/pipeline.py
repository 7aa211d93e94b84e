"""The way of a generating request from its body to its answer, the same for every API.

Cheap checks come first, so that a bad request costs little: the body's fields, the model, the
grammar, then the prompt's tokens. The request runs in the backend, and its answer is streamed or
sent whole. It is cancelled in the backend as soon as the client disconnects.

Owner: this module keeps no state between requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import secrets
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request

from cluster.edge.answers import json_response, to_serving_error
from cluster.edge.batch import run_batch
from cluster.edge.beam_search import run_beam_search
from cluster.edge.explain import ROUTE_HEADER, engine_request_id
from cluster.edge.fair_scheduler import Priority
from cluster.edge.families.table import REASONING_FORMATS, TOOL_FORMATS
from cluster.edge.field_names import naming_fields
from cluster.edge.headers import admission_fields, is_enabled
from cluster.edge.json_bodies import read_json_body
from cluster.edge.message_output import BUDGET_FIELD, PROMPT_END_TOKENS, message_output
from cluster.edge.openai import AnsweredPrompt, BackgroundWork
from cluster.edge.openai_limits import BodyLimits, prompt_too_long
from cluster.edge.openai_requests import (
    ChatPrompt,
    bad_words_cost,
    beam_search_params,
    build_request,
    check_own_template,
    echoed_text,
    encode_bad_words,
    encoding_cost,
    resolve_model,
    response_spec,
    truncate_prompt,
)
from cluster.edge.quota_service import lease_of
from cluster.edge.responses.truncation import possible_begins, without_oldest
from cluster.edge.resume import LAST_EVENT_ID, ResumableChunks, resume_request
from cluster.edge.sse import EventStream, run_in_time, run_until_disconnect
from cluster.edge.tenants import cache_salt, set_tenant, tenant_of
from cluster.edge.text_jobs import MAX_INLINE_COST
from cluster.errors import BadRequestError, NotReadyError
from replicas.text_pieces import NoCutError
from replicas.tokenizer import TooManyTokensError
from replicas.truncation import most_prompt_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from starlette.responses import Response

    from cluster.config.schema import AdmissionConfig, IngressConfig
    from cluster.edge.api import Api, Body
    from cluster.edge.backend import Backend
    from cluster.edge.departure import Departure
    from cluster.edge.families.parser import OutputParser
    from cluster.edge.gate import RequestGate
    from cluster.edge.message_output import MessageOutput
    from cluster.edge.openai import Emit, ModelCard, ResponseSpec, StartBackground, Usage
    from cluster.edge.openai_requests import ParsedRequest
    from cluster.edge.quota_service import QuotaLease, TenantQuotas
    from cluster.edge.responses.api import ResponsesApi
    from cluster.edge.responses.moves import MovedRequest
    from cluster.edge.text_jobs import TextJobs
    from replicas.beam_search import BeamSearchParams
    from replicas.messages import EngineRequest
    from replicas.output_processor import OutputDelta
    from replicas.sampling_params import ReasoningMarks


@dataclass(frozen=True, slots=True)
class _ReadyRequest:
    """A request that can run; the body and its texts are gone.

    Attributes:
        requests: The engines' requests, one for each prompt.
        spec: Options of the answer.
        card: The model that it names.
        beams: Parameters of each prompt's beam search by request id; empty: tokens are drawn.
        token_ids: Output of a single request so far, after which it continues.
    """

    requests: list[EngineRequest]
    spec: ResponseSpec
    card: ModelCard
    beams: dict[str, BeamSearchParams]
    token_ids: tuple[int, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt_token_ids) for request in self.requests)


class Pipeline:
    """Turns the HTTP requests of generating APIs into answers.

    Args:
        backend: Backend that runs the requests.
        ingress: Limits, and optional details of answers.
        admission: Headers of objectives; None: no header counts.
        jobs: Tokenizer and grammar work.
        gate: Counts open requests; each prompt beyond the first counts as one.
        departure: Ends open requests when the ingress ends.
        has_tenants: Whether requests have tenants, whose caches are apart unless they share them.
    """

    def __init__(  # noqa: PLR0913 - shared with the rest of the application
        self,
        backend: Backend,
        ingress: IngressConfig,
        admission: AdmissionConfig | None,
        jobs: TextJobs,
        gate: RequestGate,
        *,
        departure: Departure,
        has_tenants: bool,
    ) -> None:
        self._backend = backend
        self._departure = departure
        self._gate = gate
        self._admission = admission
        self._jobs = jobs
        self._is_cache_shared = ingress.share_prefix_cache or not has_tenants
        self._ingress = ingress

    async def respond(self, http_request: Request, api: Api) -> Response:
        """Return the answer of a request; a streamed one runs when it is sent.

        Raises:
            ServingError: The request is wrong, cannot run, or failed.
            ClientGoneError: The client disconnected before the answer.
        """
        ready = await self._read_request(http_request, api)
        if ready.spec.start_background is not None:
            return self._start_background(ready, ready.spec.start_background, http_request)
        if ready.spec.stream:
            return self._stream(ready, http_request, api)
        return await self._whole(ready, http_request, api)

    async def _read_request(self, http_request: Request, api: Api) -> _ReadyRequest:
        models = self._backend.models()
        limits = BodyLimits.of_models(models, self._backend.tokenizer)
        body = await read_json_body(http_request, api.fields, limits, self._ingress)
        tenant = tenant_of(http_request.scope)
        parsed = await api.parse(body, tenant.name)
        with naming_fields(parsed.field_names):
            card = resolve_model(parsed.values.get("model"), tenant.visible(models))
            return await self._prepare(parsed, card, http_request)

    async def _prepare(
        self, parsed: ParsedRequest, card: ModelCard, http_request: Request
    ) -> _ReadyRequest:
        """Encode a parsed request, and check what depends on its tokens.

        Raises:
            ServingError: It cannot run; `param` is a path in the parsed request.
        """
        new_parser = marks = None
        if parsed.more_prompts:
            last = dataclasses.replace(parsed, prompt=parsed.more_prompts[-1])
            param = last.prompt_param.partition("[")[0]
            self._gate.check_prompts(1 + len(parsed.more_prompts), param)
        check_own_template(parsed.prompt, is_trusted=self._ingress.trust_request_chat_template)
        output = _message_output(parsed, card)
        await self._jobs.check_grammar(parsed.grammar, http_request)
        if output is not None:
            grammar = await self._jobs.message_grammar(output, parsed.grammar, None, http_request)
            await self._jobs.check_grammar(grammar, http_request)
        parsed = await self._encode_bad_words(with_history(parsed, card), http_request)
        prompts = (parsed.prompt, *parsed.more_prompts)
        total_cost = sum(map(encoding_cost, prompts)) if len(prompts) > 1 else 0
        requests, answered, beams = [], [], {}
        for prompt in prompts:
            one = parsed if len(prompts) == 1 else dataclasses.replace(parsed, prompt=prompt)
            prompt_ids = await self._encode_within(card, one, http_request, total_cost)
            if output is not None:
                parsed, new_parser, marks = await self._prepare_output(
                    output, parsed, prompt_ids, http_request
                )
                one = parsed
            request = self._engine_request(one, prompt_ids, card, http_request)
            requests.append(request)
            vocab_size = self._backend.tokenizer.vocab_size
            search = beam_search_params(one, request.sampling, card, vocab_size)
            if search is not None:
                beams[request.request_id] = search
            echo = await self._echoed_text(one, prompt_ids, http_request)
            answered.append(AnsweredPrompt(prompt_ids, echo))
        spec = response_spec(
            parsed,
            card.id,
            request_id=http_request.scope["request_id"],
            created=_unix_time_s(),
            prompt_tokens_details=self._ingress.prompt_tokens_details,
            echo=answered[0].echo,
            new_parser=new_parser,
            reasoning_marks=marks,
            prompts=tuple(answered) if len(answered) > 1 else (),
        )
        if spec.return_prompt_text:
            text = await self._text_of(parsed, answered[0].token_ids, http_request)
            spec = dataclasses.replace(spec, prompt_text=text)
        return _ReadyRequest(requests, spec, card, beams)

    def _engine_request(
        self, parsed: ParsedRequest, prompt_ids: list[int], card: ModelCard, http_request: Request
    ) -> EngineRequest:
        """Return the engines' request of one prompt; see `build_request`."""
        tenant = tenant_of(http_request.scope)
        fields = admission_fields(http_request.headers, tenant, self._admission)
        request = build_request(
            parsed,
            prompt_ids,
            card,
            vocab_size=self._backend.tokenizer.vocab_size,
            request_id=engine_request_id(http_request.scope["request_id"], uuid.uuid4().hex),
            seed=secrets.randbits(63),
        )
        is_ordered = card.scheduling_policy == "priority"
        return msgspec.structs.replace(
            request,
            timeout_s=self._ingress.request_timeout_s,
            priority=tenant.clamped(request.priority) if is_ordered else 0,
            cache_salt=cache_salt(tenant.name, request.cache_salt, is_shared=self._is_cache_shared),
            **fields,
        )

    def _stream(self, ready: _ReadyRequest, http_request: Request, api: Api) -> Response:
        request, spec = ready.requests[0], ready.spec
        lease = lease_of(http_request.scope)
        generate = self._runner(ready, lease)
        last_event_id = http_request.headers.get(LAST_EVENT_ID)
        if last_event_id is None:
            writer = api.stream(request, spec)
        else:
            if not api.is_resumable or len(ready.requests) > 1:
                what = "streams of several prompts" if api.is_resumable else "streams of this path"
                text = f"{what} cannot be resumed; leave the header {LAST_EVENT_ID} out"
                raise BadRequestError(text, param=LAST_EVENT_ID)
            request, position = resume_request(request, last_event_id)
            writer = ResumableChunks(api.stream(request, spec), request, position)
            generate = functools.partial(self._backend.generate, request, known=position)
        return EventStream(
            generate if lease is None else lease.count_tokens(generate, ready.num_prompt_tokens),
            writer,
            to_serving_error,
            timeout_s=request.timeout_s,
            keep_alive_s=self._ingress.stream_keep_alive_s,
            departure=self._departure,
            more_headers=self._more_headers(request, http_request),
        )

    async def _whole(self, ready: _ReadyRequest, http_request: Request, api: Api) -> Response:
        request = ready.requests[0]
        deltas: list[OutputDelta] = []

        async def emit(delta: OutputDelta) -> None:
            deltas.append(delta)

        lease = lease_of(http_request.scope)
        generate = self._runner(ready, lease)
        if lease is not None:
            generate = lease.count_tokens(generate, ready.num_prompt_tokens)
        generating = generate(emit)
        usage = await run_until_disconnect(
            http_request.receive, generating, request.timeout_s, self._departure
        )
        body: Body | None = None
        for body in api.whole_steps(request, ready.spec, deltas, usage):
            if body is None:
                await asyncio.sleep(0)
        response = json_response(body)
        response.raw_headers += self._more_headers(request, http_request)()
        return response

    def _start_background(
        self, ready: _ReadyRequest, start: StartBackground, http_request: Request
    ) -> Response:
        """Start a request that its connection does not end; it still counts as an open one."""
        lease = lease_of(http_request.scope)
        work = self._background_work(ready, http_request, lease, ready.num_prompt_tokens)
        started = start(ready.requests[0], ready.spec, work)
        if not ready.spec.stream:
            return json_response(started.body)
        followed = started.events()
        return EventStream(
            followed.run,
            followed.writer,
            to_serving_error,
            timeout_s=None,
            keep_alive_s=self._ingress.stream_keep_alive_s,
            departure=self._departure,
        )

    async def continue_background(
        self, moved: MovedRequest, api: ResponsesApi, quotas: TenantQuotas
    ) -> None:
        """Continue a request that another ingress ran in its background.

        Args:
            moved: The request.
            api: Its API.
            quotas: Counts it as an open one of its tenant.

        Raises:
            ServingError: It cannot run here.
        """
        is_ready, reason = self._backend.is_ready()
        if not is_ready:
            raise NotReadyError(reason)
        scope = {
            "type": "http",
            "headers": [],
            "client": (moved.source, 0),
            "request_id": moved.request_id,
        }
        set_tenant(scope, moved.tenant)
        http_request = Request(scope)
        parsed = api.parse_moved(moved)
        models = moved.tenant.visible(self._backend.models())
        card = resolve_model(parsed.values.get("model"), models)
        ready = await self._prepare(parsed, card, http_request)
        request_id = engine_request_id(moved.request_id, uuid.uuid4().hex)
        request = msgspec.structs.replace(
            moved.request, request_id=request_id, timeout_s=moved.left_s
        )
        ready = _ReadyRequest(
            [request],
            dataclasses.replace(ready.spec, created=moved.created),
            card,
            dict.fromkeys([request_id], *ready.beams.values()) if ready.beams else {},
            tuple(moved.token_ids),
        )
        # Its prompt and its output so far have been charged, and charge again as they are emitted.
        lease = quotas.lease(moved.tenant)
        work = self._background_work(ready, http_request, lease, -len(moved.token_ids))
        assert ready.spec.start_background is not None, "only such requests move"
        ready.spec.start_background(request, ready.spec, work)

    def _background_work(
        self,
        ready: _ReadyRequest,
        http_request: Request,
        lease: QuotaLease | None,
        num_charged: int,
    ) -> BackgroundWork:
        """Return what runs a request without its connection, and count it as an open one.

        Raises:
            SaturatedError: Too many requests are open.
        """
        timeout_s = ready.requests[0].timeout_s
        request_id = http_request.scope["request_id"]
        generate = self._runner(ready, lease)
        if lease is not None:
            generate = lease.count_tokens(generate, num_charged)
        begun_s = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._gate.count_more(1))
            if lease is not None:
                stack.enter_context(lease.extend())
            return BackgroundWork(
                run=lambda emit: run_in_time(generate(emit), timeout_s),
                to_serving_error=lambda error: to_serving_error(error, request_id),
                release=stack.pop_all().close,
                tenant=tenant_of(http_request.scope),
                source=http_request.client.host if http_request.client else "",
                can_continue=not ready.beams,
                left_s=lambda: (
                    None if timeout_s is None else max(begun_s + timeout_s - time.monotonic(), 0.0)
                ),
            )

    def _runner(
        self, ready: _ReadyRequest, lease: QuotaLease | None
    ) -> Callable[[Emit], Coroutine[Any, Any, Usage]]:
        """Return what runs all prompts of a request."""
        generate = (
            functools.partial(self._search, ready.beams, ready.card)
            if ready.beams
            else self._backend.generate
        )
        if ready.token_ids:
            return functools.partial(
                self._backend.generate, ready.requests[0], token_ids=ready.token_ids
            )
        if len(ready.requests) == 1:
            return functools.partial(generate, ready.requests[0])

        num_further = len(ready.requests) - 1
        holding = contextlib.nullcontext() if lease is None else lease.hold_further(num_further)

        async def run(emit: Emit) -> Usage:
            with self._gate.count_more(num_further):
                async with holding:
                    return await run_batch(generate, ready.requests, emit)

        return run

    def _more_headers(
        self, request: EngineRequest, http_request: Request
    ) -> Callable[[], list[tuple[bytes, bytes]]]:
        """Return what makes the headers that show a request's route, once it has one."""
        if not (self._ingress.route_header and is_enabled(http_request.headers, ROUTE_HEADER)):
            return list

        def more_headers() -> list[tuple[bytes, bytes]]:
            return [(ROUTE_HEADER.encode(), self._backend.route_header(request).encode())]

        return more_headers

    async def _prepare_output(
        self,
        output: MessageOutput,
        parsed: ParsedRequest,
        prompt_ids: list[int],
        http_request: Request,
    ) -> tuple[ParsedRequest, Callable[[], OutputParser], ReasoningMarks | None]:
        """Return a request with the limits of its output, what makes parsers of that, and marks.

        The marks are the tokens around the reasoning.
        """
        tokenizer = self._backend.tokenizer
        special_ids = tokenizer.special_token_ids
        prompt_end = tokenizer.decode(prompt_ids[-PROMPT_END_TOKENS:], skip_special_tokens=False)
        grammar = await self._jobs.message_grammar(output, parsed.grammar, prompt_end, http_request)
        hidden = special_ids if parsed.values.get("skip_special_tokens", True) else {}
        parser = output.parser(hidden, prompt_end)
        budget, most = None, parsed.values.get(BUDGET_FIELD)
        if most is not None and output.reasoning is not None:
            dropped = (BadRequestError,) if parsed.has_soft_budget else ()
            with contextlib.suppress(*dropped):
                budget = output.reasoning_budget(most, tokenizer.mark_token_ids, prompt_end)
        parsed = dataclasses.replace(
            parsed, grammar=grammar, is_parsed=True, reasoning_budget=budget
        )
        return parsed, parser, output.reasoning_marks(tokenizer.mark_token_ids, prompt_end)

    async def _search(
        self,
        beams: Mapping[str, BeamSearchParams],
        card: ModelCard,
        request: EngineRequest,
        emit: Emit,
    ) -> Usage:
        generate, tokenizer = self._backend.generate, self._backend.tokenizer
        params, max_len = beams[request.request_id], card.max_model_len
        return await run_beam_search(generate, request, params, tokenizer, max_len, emit)

    async def _encode_within(
        self, card: ModelCard, parsed: ParsedRequest, request: Request, total_cost: int
    ) -> list[int]:
        most = None if parsed.is_truncated else card.max_model_len
        prompt = parsed.prompt
        try:
            if parsed.drops_messages and isinstance(prompt, ChatPrompt):
                return await self._encode_newest(card, parsed, prompt, request)
            ids = await self._jobs.encode(prompt, most, Priority.PROMPT, request, total_cost)
        except TooManyTokensError as error:
            raise prompt_too_long(
                error.num_tokens,
                card.max_model_len,
                parsed.prompt_param,
                is_whole=error.is_whole,
                num_output=parsed.num_reserved != 0,
            ) from error
        except NoCutError as error:
            raise BadRequestError(str(error), param=parsed.prompt_param) from error
        return truncate_prompt(parsed, ids, card.max_model_len)

    async def _encode_newest(
        self, card: ModelCard, parsed: ParsedRequest, prompt: ChatPrompt, request: Request
    ) -> list[int]:
        """Encode a conversation without its oldest messages, as few as leave room for the output.

        Raises:
            TooManyTokensError: Its instructions and its last message are too long.
        """
        # `build_request` refuses an output that is longer than the model's longest sequence.
        room = parsed.max_tokens if (parsed.max_tokens or 0) < card.max_model_len else None
        most = most_prompt_tokens(-1, room, card.max_model_len)
        begins = possible_begins(prompt.messages)
        found: list[int] | None = None
        # Most conversations fit; otherwise halve the range of what is dropped.
        middle, low, high = 0, 0, len(begins) - 1
        while low <= high:
            messages = without_oldest(prompt.messages, begins[middle])
            shorter = dataclasses.replace(prompt, messages=messages)
            try:
                found = await self._jobs.encode(shorter, most, Priority.PROMPT, request)
                high = middle - 1
            except TooManyTokensError:
                low = middle + 1
                if low > high and found is None:
                    raise
            middle = (low + high) // 2
        assert found is not None
        return found

    async def _echoed_text(self, parsed: ParsedRequest, ids: list[int], request: Request) -> str:
        text = echoed_text(parsed)
        return await self._text_of(parsed, ids, request) if text is None else text

    async def _text_of(self, parsed: ParsedRequest, ids: list[int], request: Request) -> str:
        decode = functools.partial(self._backend.tokenizer.decode, ids, skip_special_tokens=False)
        # Of several prompts each may be short, but not all of them together.
        cost = max(len(ids), MAX_INLINE_COST + 1) if parsed.more_prompts else len(ids)
        return await self._jobs.run(decode, cost, request)

    async def _encode_bad_words(self, parsed: ParsedRequest, request: Request) -> ParsedRequest:
        if "bad_words" not in parsed.values:
            return parsed
        encode = functools.partial(encode_bad_words, parsed, self._backend.tokenizer)
        return await self._jobs.run(encode, bad_words_cost(parsed), request)


def with_history(parsed: ParsedRequest, card: ModelCard) -> ParsedRequest:
    """Return a request whose prompt is as the chat template of the model's family takes it."""
    prompt, variables = parsed.prompt, parsed.values.get("chat_template_kwargs") or {}
    if not isinstance(prompt, ChatPrompt):
        return parsed
    own = prompt
    effort = parsed.values.get("reasoning_effort")
    if card.reasoning_parser and effort is not None and "reasoning_effort" not in variables:
        level = REASONING_FORMATS[card.reasoning_parser].known_effort(effort)
        known = {**(prompt.template_kwargs or {}), "reasoning_effort": level}
        prompt = dataclasses.replace(prompt, template_kwargs=known)
    if card.tool_call_parser is not None:
        family = TOOL_FORMATS[card.tool_call_parser]
        messages = [family.rendered_message(message) for message in prompt.messages]
        prompt = dataclasses.replace(prompt, messages=messages)
    return parsed if prompt is own else dataclasses.replace(parsed, prompt=prompt)


def _message_output(parsed: ParsedRequest, card: ModelCard) -> MessageOutput | None:
    """Return the formats of a chat's output; None if all of it is content."""
    if not isinstance(parsed.prompt, ChatPrompt):
        return None
    has_budget = BUDGET_FIELD in parsed.values and not parsed.has_soft_budget
    return message_output(parsed.tool_use, card, parsed.grammar, has_budget=has_budget)


def _unix_time_s() -> int:
    """Return the wall clock's time, for `created` in responses."""
    return time.time_ns() // 10**9
