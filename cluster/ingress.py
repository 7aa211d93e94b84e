"""The HTTP edge's backend: runs requests, and answers questions about the cluster.

Owner: one ingress's event loop. It connects the fleet of engines, the router, the tokenizer and the
metrics. Discovery adds engines to its fleet. It imports neither Ray nor HTTP.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from cluster.edge.departure import Departure
from cluster.edge.engine_metrics import render_engine_metrics
from cluster.edge.explain import RoutesView, route_view, short_form
from cluster.edge.metric_pages import merged_pages
from cluster.edge.openai import ModelCard, Usage
from cluster.edge.peers import NoPeers
from cluster.edge.quota_service import QUESTION as QUOTAS
from cluster.edge.quota_service import TenantQuotas
from cluster.edge.responses.archive import HAND_OVER, response_archive
from cluster.edge.responses.archive import QUESTION as RESPONSES
from cluster.edge.resume import ReplayCheck
from cluster.edge.slots import SlotsView, merged_views, slots_view
from cluster.edge.tenants import Tenant
from cluster.edge.transfers import transfers_view
from cluster.errors import SaturatedError
from cluster.routing.cost import CACHE_AWARE_POLICIES
from cluster.routing.fleet import Fleet
from cluster.routing.metrics import RouterMetrics
from cluster.routing.route_log import RouteLog
from cluster.routing.router import Router
from cluster.routing.tickets import TicketOffice
from replicas.async_client import AsyncMPClient
from replicas.errors import EngineError
from replicas.messages import TokenOutput
from replicas.model_name import model_name
from replicas.output_processor import OutputProcessor
from replicas.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from cluster.config.resolve import ClusterConfig
    from cluster.edge.api_keys import ApiKeys
    from cluster.edge.openai import Emit
    from cluster.edge.peers import Peers
    from cluster.edge.resume import StreamPosition
    from cluster.edge.transfers import TransfersView
    from cluster.routing.explain import Route
    from cluster.routing.pools import Member
    from kv_transfer.keys import KeyRing
    from replicas.messages import EngineRequest, FinishReason
    from replicas.output_processor import OutputDelta

T = TypeVar("T")

_SCRAPE_TIMEOUT_S = 2.0
_TRANSFERS_TIMEOUT_S = 1.0
_PROBE_TIMEOUT_S = 20.0
"""Long, because a step may compute a long prompt; SGLang uses the same."""
_MAX_ROUTE_IDS = 4
_ROUTES_TIMEOUT_S = 2.0
_VIEW_TIMEOUT_S = 1.0
_MAX_PROBE_WAITERS = 8
"""Bounded, because each keeps a request open until the slowest replica ends a step."""
ROUTES, METRICS, SLOTS = "routes", "metrics", "slots"
"""Questions to the other ingresses: the routes of the requests with a client's id, their own
metrics, and their requests by slot."""
MIN_ASK_INTERVAL_S = 0.5
"""Shortest time between two polls of all engines for the same data."""


class Ingress:
    """Implements `cluster.edge.backend.Backend`; make it inside the running event loop.

    Args:
        config: The cluster's configuration.
        keys: Secrets, shared with the engines, that seal tickets and authenticate connections.
        api_keys: Keys of clients, whose failed reads the metrics show; None without keys.
        peers: All ingresses of the application.

    Attributes:
        fleet: The engines. The ingress's creator must connect it to discovery.
        router: Places and runs requests.
        quotas: Counts requests against the limits of their tenants.
        responses: Keeps answers of /v1/responses.
        departure: The end of this ingress.
    """

    def __init__(
        self,
        config: ClusterConfig,
        keys: KeyRing,
        api_keys: ApiKeys | None = None,
        peers: Peers | None = None,
    ) -> None:
        self._config = config
        self.tokenizer = Tokenizer.from_folder(config.model_folder)
        self.metrics = RouterMetrics(config.served_model_name)
        self.fleet = Fleet(
            partial(AsyncMPClient, keys),
            keys,
            follows_prefixes=config.router.policy in CACHE_AWARE_POLICIES,
        )
        self.router = Router(
            self.fleet, config.router, self.metrics, TicketOffice(keys), secrets.randbits(63)
        )
        self._route_log: RouteLog | None = None
        if config.router.route_log is not None:
            folder, name = Path(config.router.route_log), self.metrics.ingress
            lost = self.metrics.lost_routes
            self._route_log = RouteLog(folder, name, config.router.policy, lost.inc)
            self.router.routes.log(self._route_log.write)
        self._shared_metrics = SharedAnswer(self._make_metrics, MIN_ASK_INTERVAL_S)
        self._shared_transfers = SharedAnswer(self._make_transfers_view, MIN_ASK_INTERVAL_S)
        self._shared_slots = SharedAnswer(self._make_slots_view, MIN_ASK_INTERVAL_S)
        self._shared_probe = SharedAnswer(self._make_probe, MIN_ASK_INTERVAL_S)
        self._last_probe: dict[str, bool] | None = None
        self._route_thread = ThreadPoolExecutor(1, "routes")
        self._shared_routes = SharedAnswerByKey(
            self._render_routes, MIN_ASK_INTERVAL_S, _MAX_ROUTE_IDS
        )
        self._api_keys = api_keys
        self._peers = peers or NoPeers()
        self._shared_peer_routes = SharedAnswerByKey(
            self._ask_for_routes, MIN_ASK_INTERVAL_S, _MAX_ROUTE_IDS
        )
        self.quotas = TenantQuotas(self._peers)
        self.responses = response_archive(
            config.ingress.response_store_bytes, config.ingress.response_store_age_s, self._peers
        )
        self.departure = Departure(config.ingress_drain_timeout_s)
        self._models = _model_cards(config, created_s=int(time.time()))
        self._had_every_pool = False

    def models(self) -> Sequence[ModelCard]:
        """Return the cards of the served model, one for each of its names."""
        return self._models

    async def generate(
        self,
        request: EngineRequest,
        emit: Emit,
        known: StreamPosition | None = None,
        token_ids: Sequence[int] = (),
    ) -> Usage:
        """Run a request; see `cluster.edge.backend.Backend.generate`."""
        processor = OutputProcessor(self.tokenizer, request, self.tokenizer.eos_token_ids)
        num_known = 0 if known is None else known.num_tokens
        replay = None if known is None else ReplayCheck(known)
        is_resumed = num_known > 0 or bool(token_ids)
        with _RequestMetrics(self.metrics, is_resumed=is_resumed) as request_metrics:

            async def deliver(output: TokenOutput) -> bool:
                for part in [output] if replay is None else split_into_tokens(output, num_known):
                    if replay is not None:
                        replay.check_next(part)
                    delta = processor.take(part)
                    if delta is None:
                        continue
                    if part.index >= num_known or delta.finish_reason is not None:
                        request_metrics.record_delta(delta)
                    await emit(delta)
                return not processor.has_ended(output.choice)

            if token_ids:
                await deliver(TokenOutput(request.request_id, 0, list(token_ids)))
            await self.router.run(request, deliver, token_ids)
            request_metrics.is_finished = True
        return Usage(
            len(request.prompt_token_ids), processor.num_output_tokens, processor.num_cached_tokens
        )

    def is_ready(self) -> tuple[bool, str]:
        """Return whether new requests can be served, and the reason if not.

        It becomes ready when every pool has had a replica, and stays so while any replica can
        decode, even one that is stalled at the moment.
        """
        pools = self.fleet.pools
        if not self._had_every_pool:
            missing = [pool for pool in self._config.pools if not pools.has_open(pool)]
            if missing:
                return False, f"no replica yet in pool {', '.join(missing)}"
            self._had_every_pool = True
        if not pools.may_decode:
            draining = f" ({pools.num_draining} draining)" if pools.num_draining else ""
            return False, f"no replica can decode{draining}"
        num_unresponsive = self.fleet.num_unresponsive
        return True, f"stalled replicas: {num_unresponsive}" if num_unresponsive else ""

    async def metrics_text(self) -> bytes:
        """Return the metrics of every ingress and every engine that answers."""
        return await self._shared_metrics.get()

    async def transfers(self) -> TransfersView:
        """Return all replicas' KV transfers; a replica that does not answer in time is silent."""
        return await self._shared_transfers.get()

    async def probe(self) -> dict[str, bool]:
        """Return for each replica whether it ended a step within the timeout.

        While `_MAX_PROBE_WAITERS` callers wait, others get the previous answer at once.

        Raises:
            SaturatedError: So many callers wait, and there is no previous answer.
        """
        if self._shared_probe.num_waiting < _MAX_PROBE_WAITERS:
            return await self._shared_probe.get()
        if self._last_probe is None:
            raise SaturatedError(
                "the first probe of the replicas is still running; try again later"
            )
        return self._last_probe

    async def slots(self) -> SlotsView:
        """Return all slots, with the requests of every ingress that answers."""
        return await self._shared_slots.get()

    async def routes(self, request_id: str) -> bytes | None:
        """Implement `cluster.edge.backend.Backend.routes`."""
        if self.router.routes.of_client_id(request_id) is None:
            return await self._shared_peer_routes.get(request_id)
        return await self._shared_routes.get(request_id)

    async def answer_peer(self, question: str, payload: bytes) -> bytes:
        """Answer an ingress of this application, perhaps this one.

        Args:
            question: `QUOTAS`, `RESPONSES`, `HAND_OVER`, `ROUTES`, `METRICS` or `SLOTS`.
            payload: Content of the question: a client's id for `ROUTES`, the asking ingress for
                `METRICS` and `SLOTS`.

        Returns:
            The answer; empty if there is none, as to a question of its own.
        """
        if question == QUOTAS:
            return self.quotas.answer(payload)
        if question in {RESPONSES, HAND_OVER}:
            archive = self.responses
            answer = archive.answer if question == RESPONSES else archive.take_over
            return await answer(payload)
        text = payload.decode()
        if question == ROUTES and self.router.routes.of_client_id(text) is not None:
            return await self._shared_routes.get(text) or b""
        if question == METRICS and text != self.metrics.ingress:
            return self._render_own_metrics()
        if question == SLOTS and text != self.metrics.ingress:
            return msgspec.json.encode(self._own_slots())
        return b""

    async def _ask_others(self, question: str) -> list[bytes]:
        name = self.metrics.ingress.encode()
        return list(filter(None, await self._peers.ask_all(question, name, _VIEW_TIMEOUT_S)))

    async def follow_peers(self) -> None:
        """Share the limits of tenants with the other ingresses, for ever."""
        if has_limits(self._config):
            await self.quotas.run()

    async def _ask_for_routes(self, request_id: str) -> bytes | None:
        answers = await self._peers.ask_all(ROUTES, request_id.encode(), _ROUTES_TIMEOUT_S)
        return next(filter(None, answers), None)

    def route_header(self, request: EngineRequest) -> str:
        """Implement `cluster.edge.backend.Backend.route_header`."""
        route = self.router.routes.get(request.request_id)
        return "" if route is None else short_form(route, self._replica_name)

    def _replica_name(self, incarnation: str) -> str:
        member = self.fleet.pools.member(incarnation)
        return incarnation if member is None else member.replica_id

    async def _render_routes(self, request_id: str) -> bytes | None:
        """Render the kept routes of a client's id as JSON, in the routes thread."""
        found = self.router.routes.of_client_id(request_id)
        if found is None:
            return None
        loop = asyncio.get_running_loop()
        members = self.fleet.pools.members()
        names = {member.description.incarnation: member.replica_id for member in members}
        # Copies, because the event loop still changes the routes of running requests.
        render = partial(
            _routes_json,
            [copy(route) for route in reversed(found.kept)],
            names,
            num_dropped=found.num_dropped,
            policy=self._config.router.policy,
            now_s=loop.time(),
        )
        return await loop.run_in_executor(self._route_thread, render)

    async def _make_slots_view(self) -> SlotsView:
        decode = partial(msgspec.json.decode, type=SlotsView)
        others = list(map(decode, await self._ask_others(SLOTS)))
        return merged_views(self._own_slots(), others)

    def _own_slots(self) -> SlotsView:
        admission = self.router.admission
        return slots_view(
            self.fleet.pools,
            self.router.parts(),
            num_queued=len(self.router.queue),
            num_awaiting_admission=0 if admission is None else len(admission),
            now_s=asyncio.get_running_loop().time(),
        )

    async def close(self) -> None:
        """Cancel responses in the background, and close every connection."""
        await self.responses.close()
        self._shared_metrics.close()
        self._shared_transfers.close()
        self._shared_slots.close()
        self._shared_probe.close()
        self._shared_routes.close()
        self._shared_peer_routes.close()
        self._route_thread.shutdown(wait=False, cancel_futures=True)
        self.fleet.close()
        await self.fleet.client.close()
        if self._route_log is not None:
            await asyncio.to_thread(self._route_log.close)

    async def _make_metrics(self) -> bytes:
        others, answers = await asyncio.gather(
            self._ask_others(METRICS), self._ask_all(self.fleet.client.metrics, _SCRAPE_TIMEOUT_S)
        )
        engines = [(member, metrics) for member, metrics in answers if metrics is not None]
        ingresses = merged_pages([self._render_own_metrics(), *others])
        return ingresses + render_engine_metrics(engines, self._config.served_model_name)

    def _render_own_metrics(self) -> bytes:
        num_awaiting_admission = 0 if self.router.admission is None else len(self.router.admission)
        self.metrics.num_queued.set(len(self.router.queue) + num_awaiting_admission)
        self.metrics.num_stalled.set(self.fleet.num_unresponsive)
        self.metrics.num_shut.set(self.fleet.pools.num_shut)
        if self._api_keys is not None:
            self.metrics.failed_key_reads.set(self._api_keys.num_failed_reads)
        return self.metrics.render()

    async def _make_transfers_view(self) -> TransfersView:
        return transfers_view(
            await self._ask_all(self.fleet.client.kv_transfers, _TRANSFERS_TIMEOUT_S)
        )

    async def _make_probe(self) -> dict[str, bool]:
        answers = await self._ask_all(self.fleet.client.probe, _PROBE_TIMEOUT_S)
        steps = {member.replica_id: answer is not None for member, answer in answers}
        self._last_probe = steps
        return steps

    async def _ask_all(
        self, ask: Callable[[str], Awaitable[T]], timeout_s: float
    ) -> list[tuple[Member, T | None]]:
        """Ask every member; None stands for an answer that did not come in time."""

        async def answer(member: Member) -> T | None:
            try:
                return await asyncio.wait_for(ask(member.description.incarnation), timeout_s)
            except (EngineError, msgspec.ValidationError, asyncio.TimeoutError):
                return None

        members = self.fleet.pools.members()
        answers = await asyncio.gather(*map(answer, members))
        return list(zip(members, answers, strict=True))


def _model_cards(config: ClusterConfig, created_s: int) -> list[ModelCard]:
    """Return the cards of the served model, one for each of its names."""
    root = model_name(str(config.model_folder))
    return [
        ModelCard(
            name,
            root,
            config.max_model_len,
            created_s,
            defaults=config.sampling_defaults,
            max_logprobs=config.max_logprobs,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            scheduling_policy=config.scheduling_policy,
            logprobs_mode=config.logprobs_mode,
        )
        for name in config.served_model_names
    ]


def has_limits(config: ClusterConfig) -> bool:
    """Return whether tenants may have limits that all ingresses share."""
    admission = config.router.admission
    tenants = {} if admission is None else admission.tenants
    limited = (Tenant.limited(name, entry).limits for name, entry in tenants.items())
    return config.ingress.api_keys is not None or any(limits is not None for limits in limited)


def split_into_tokens(output: TokenOutput, num_known: int) -> list[TokenOutput]:
    """Split an output into outputs of one token each.

    Text that is held back must not depend on how tokens are grouped. The finish reason comes with
    the last token, or in an output of its own if the client already has that token.

    Args:
        output: An output of a request with one choice.
        num_known: Number of tokens, from index 0 on, that the client already has.
    """
    logprobs = output.logprobs
    parts = [
        msgspec.structs.replace(
            output,
            index=output.index + i,
            token_ids=[token_id],
            finish_reason=None,
            stop_reason=None,
            error=None,
            logprobs=logprobs and logprobs[i : i + 1],
        )
        for i, token_id in enumerate(output.token_ids)
    ]
    if output.finish_reason is None:
        return parts
    end = output.index + len(parts)
    tokens = parts.pop().token_ids if parts and end > num_known else []
    ending = msgspec.structs.replace(
        output,
        index=end - len(tokens),
        token_ids=tokens,
        logprobs=logprobs and logprobs[len(logprobs) - len(tokens) :],
    )
    return [*parts, ending]


class SharedAnswer(Generic[T]):
    """An answer that concurrent callers share, computed at most once per interval.

    A caller never gets an answer that was complete before it asked. Owner: the task that computes
    the answer.

    Args:
        make: Computes an answer.
        interval_s: Least seconds between two starts; earlier callers wait.

    Attributes:
        num_waiting: Callers that wait for an answer.
    """

    def __init__(self, make: Callable[[], Awaitable[T]], interval_s: float) -> None:
        self._make = make
        self._interval_s = interval_s
        self._begun_s = -math.inf
        self._task: asyncio.Task[T] | None = None
        self.num_waiting = 0

    async def get(self) -> T:
        """Return the answer; raises the error of `make`."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._next())
        self.num_waiting += 1
        try:
            # A caller that is cancelled must not cancel the answer for the others.
            return await asyncio.shield(self._task)
        finally:
            self.num_waiting -= 1

    @property
    def is_busy(self) -> bool:
        """Whether an answer is being computed, or was started less than the interval ago."""
        if self._task is not None and not self._task.done():
            return True
        return time.monotonic() - self._begun_s < self._interval_s

    def close(self) -> None:
        """Cancel the computation, if one is running."""
        if self._task is not None:
            self._task.cancel()

    async def _next(self) -> T:
        await asyncio.sleep(self._begun_s + self._interval_s - time.monotonic())
        self._begun_s = time.monotonic()
        return await self._make()


class SharedAnswerByKey(Generic[T]):
    """A `SharedAnswer` for each key; at most `max_keys` are computed per `interval_s`.

    Args:
        make: Computes the answer for a key.
        interval_s: Least seconds between two starts for the same key.
        max_keys: Most keys that are being answered, or were started within `interval_s`.
    """

    def __init__(
        self, make: Callable[[str], Awaitable[T]], interval_s: float, max_keys: int
    ) -> None:
        self._make = make
        self._interval_s = interval_s
        self._max_keys = max_keys
        self._of_key: dict[str, SharedAnswer[T]] = {}

    async def get(self, key: str) -> T:
        """Return the answer for a key; raises the error of `make`.

        Raises:
            SaturatedError: `max_keys` other keys are busy.
        """
        shared = self._of_key.get(key)
        if shared is None:
            self._of_key = {k: s for k, s in self._of_key.items() if s.is_busy}
            if len(self._of_key) >= self._max_keys:
                raise SaturatedError(
                    f"{self._max_keys} routes are being looked up; try again in a moment"
                )
            shared = self._of_key[key] = SharedAnswer(partial(self._make, key), self._interval_s)
        return await shared.get()

    def close(self) -> None:
        """Cancel all computations."""
        for shared in self._of_key.values():
            shared.close()


def _routes_json(
    routes: Sequence[Route],
    names: Mapping[str, str],
    *,
    num_dropped: int,
    policy: str,
    now_s: float,
) -> bytes:
    """Render routes, the latest first; `names` maps incarnations to replica names."""
    views = [
        route_view(route, lambda i: names.get(i, i), policy=policy, now_s=now_s) for route in routes
    ]
    return msgspec.json.encode(RoutesView(routes=views, num_dropped=num_dropped))


class _RequestMetrics:
    """Context manager that records one request's latencies and outcome in the metrics.

    Attributes:
        is_finished: Whether the request completed; otherwise it failed, or its client left.
    """

    def __init__(self, metrics: RouterMetrics, *, is_resumed: bool) -> None:
        self._metrics = metrics
        # A resumed request first recomputes the client's tokens: not a time to first token.
        self._is_resumed = is_resumed
        self._arrived_s = self._last_s = time.monotonic()
        self._has_output = False
        self._reason: FinishReason | None = None
        self.is_finished = False

    def __enter__(self) -> _RequestMetrics:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        reason = "error" if isinstance(error, Exception) else "abort"
        if self.is_finished:
            self._metrics.e2e_latency.observe(time.monotonic() - self._arrived_s)
            reason = self._reason or reason
        self._metrics.requests.labels(reason).inc()

    def record_delta(self, delta: OutputDelta) -> None:
        """Record a delta's latency; the last choice to finish gives the request's reason."""
        now_s = time.monotonic()
        if self._has_output:
            self._metrics.inter_token_latency.observe(now_s - self._last_s)
        elif not self._is_resumed:
            self._metrics.time_to_first_token.observe(now_s - self._arrived_s)
        self._has_output, self._last_s = True, now_s
        self._reason = delta.finish_reason or self._reason
