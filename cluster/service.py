"""The cluster as the HTTP edge sees it: requests in, text out; members come and go.

Owner: one ingress's event loop. It joins the parts: connections to engines, the pool state that
their snapshots feed, the router, the tokenizer, the metrics. Who the members are it is told
(`add_members`); it knows nothing of Ray or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import TYPE_CHECKING

import msgspec

from cluster.metrics import RouterMetrics, render
from cluster.openai import Finished, ModelCard, TextDelta, Usage
from cluster.pools import PoolState
from cluster.router import Router
from cluster.tickets import TicketOffice
from cluster.transfers import transfers_view
from replicas.async_client import AsyncMPClient
from replicas.errors import EngineDeadError, EngineError
from replicas.messages import EngineRequest
from replicas.output_processor import OutputProcessor
from replicas.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from cluster.config.resolve import ClusterConfig
    from cluster.openai import GenerateRequest, GenerationEvent
    from cluster.pools import Member
    from cluster.transfers import TransfersView
    from kv_transfer.ticket import KeyRing
    from replicas.messages import EngineMetrics, EngineSnapshot, KVTransfers
    from replicas.output_processor import OutputDelta

logger = logging.getLogger(__name__)

_SCRAPE_TIMEOUT_S = 2.0
_LOOK_TIMEOUT_S = 1.0


class ClusterService:
    """Implements `cluster.ingress.ServingService`; make it inside the running event loop.

    Args:
        config: The cluster's configuration.
        keys: What seals tickets; the engines have the same.
    """

    def __init__(self, config: ClusterConfig, keys: KeyRing) -> None:
        self._config = config
        self.tokenizer = Tokenizer.from_folder(config.model_folder)
        self.max_model_len = config.max_model_len
        self.metrics = RouterMetrics(config.served_model_name)
        self._pools = PoolState()
        self._client = AsyncMPClient(self._take_snapshot, self._lose)
        self._router = Router(
            self._client, self._pools, config.router, self.metrics, TicketOffice(keys)
        )
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._created_s = int(time.time())
        self._was_complete = False
        self.members_lost = asyncio.Event()

    # --- ServingService ------------------------------------------------------------------------

    def models(self) -> Sequence[ModelCard]:
        """The one served model."""
        name = self._config.served_model_name
        root = self._config.model_folder.name
        return [ModelCard(name, root, self.max_model_len, self._created_s)]

    async def generate(
        self, request: GenerateRequest, request_id: str
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Run a request; see `cluster.ingress.ServingService.generate`."""
        sampling = request.sampling
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(63))
        engine_request = EngineRequest(
            request_id, request.prompt_token_ids, sampling, request.cache_salt
        )
        processor = OutputProcessor(self.tokenizer, engine_request, self.tokenizer.eos_token_ids)
        with _Watch(self.metrics) as watch:
            async with contextlib.aclosing(self._router.generate(engine_request)) as outputs:
                async for output in outputs:
                    delta = processor.take(output)
                    if delta is None:
                        continue
                    watch.saw_output()
                    if delta.finish_reason is None:
                        yield TextDelta(delta.text, tuple(delta.token_ids))
                        continue
                    watch.reason = delta.finish_reason
                    yield _finished(delta, processor, len(request.prompt_token_ids))
                    return

    def is_ready(self) -> tuple[bool, str]:
        """Ready once every pool has had a replica, and as long as one can decode."""
        if not self._was_complete:
            missing = [r for r in self._config.pools if not self._pools.has_open((r,))]
            if missing:
                return False, f"no replica yet in pool {', '.join(missing)}"
            self._was_complete = True
        if not self._pools.has_open(("decode", "both")):
            return False, "no replica can decode"
        return True, ""

    def is_live(self) -> bool:
        """True: whoever asks reached the event loop."""
        return True

    async def metrics_text(self) -> bytes:
        """This ingress's metrics and those of every engine that answers."""
        self.metrics.num_queued.set(self._router.num_queued)
        members = self._pools.members()
        answers = await asyncio.gather(*(self._scrape(m.description.incarnation) for m in members))
        engines = [(m, a) for m, a in zip(members, answers, strict=True) if a is not None]
        return render(self.metrics, engines, self._config.served_model_name)

    async def transfers(self) -> TransfersView:
        """What moves between the replicas now; one that does not answer soon is silent."""
        members = self._pools.members()
        answers = await asyncio.gather(*(self._look(m.description.incarnation) for m in members))
        return transfers_view(list(zip(members, answers, strict=True)))

    # --- members -------------------------------------------------------------------------------

    def add_members(self, members: Sequence[Member]) -> None:
        """Connect to engines that are new.

        One leaves when its connection breaks, not before: a replica that drains is listed no more,
        and still has requests to finish.
        """
        for member in members:
            incarnation = member.description.incarnation
            if incarnation not in self._client.incarnations and incarnation not in self._connecting:
                self._connecting[incarnation] = asyncio.create_task(self._connect(member))

    @property
    def is_complete(self) -> bool:
        """Whether as many replicas are connected as the configuration has."""
        wanted = sum(pool.replicas for pool in self._config.pools.values())
        return len(self._pools.members()) >= wanted

    async def close(self) -> None:
        """Close every connection."""
        for task in self._connecting.values():
            task.cancel()
        await self._client.close()

    async def _connect(self, member: Member) -> None:
        incarnation = member.description.incarnation
        self._pools.add(member)
        try:
            await self._client.connect(member.description)
            logger.info("connected replica=%s role=%s", member.replica_id, member.role)
        except EngineDeadError as error:
            self._forget(incarnation)
            logger.warning("cannot reach replica=%s: %s", member.replica_id, error)
        finally:
            self._connecting.pop(incarnation, None)

    def _take_snapshot(self, incarnation: str, snapshot: EngineSnapshot) -> None:
        self._pools.take_snapshot(incarnation, snapshot)
        self._router.capacity_changed()

    def _lose(self, incarnation: str, reason: str) -> None:
        member = self._pools.member(incarnation)
        logger.warning("lost replica=%s: %s", member.replica_id if member else incarnation, reason)
        self._forget(incarnation)
        self.members_lost.set()

    def _forget(self, incarnation: str) -> None:
        self._pools.remove(incarnation)
        self._router.capacity_changed()

    async def _scrape(self, incarnation: str) -> EngineMetrics | None:
        try:
            return await asyncio.wait_for(self._client.metrics(incarnation), _SCRAPE_TIMEOUT_S)
        except (EngineError, msgspec.ValidationError, asyncio.TimeoutError):
            return None

    async def _look(self, incarnation: str) -> KVTransfers | None:
        try:
            return await asyncio.wait_for(self._client.kv_transfers(incarnation), _LOOK_TIMEOUT_S)
        except (EngineError, msgspec.ValidationError, asyncio.TimeoutError):
            return None


class _Watch:
    """Times and ending of one request, for the metrics.

    Attributes:
        reason: How it finished; without one it failed, or its client left.
    """

    reason: str | None = None

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._arrived_s = self._last_s = time.monotonic()
        self._has_output = False

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self.reason is not None:
            self._metrics.e2e_latency.observe(time.monotonic() - self._arrived_s)
        failed = "error" if isinstance(error, Exception) else "abort"
        self._metrics.requests.labels(self.reason or failed).inc()

    def saw_output(self) -> None:
        now_s = time.monotonic()
        if self._has_output:
            self._metrics.inter_token_latency.observe(now_s - self._last_s)
        else:
            self._metrics.time_to_first_token.observe(now_s - self._arrived_s)
        self._has_output, self._last_s = True, now_s


def _finished(delta: OutputDelta, processor: OutputProcessor, num_prompt_tokens: int) -> Finished:
    assert delta.finish_reason in ("stop", "length"), delta.finish_reason
    usage = Usage(num_prompt_tokens, processor.num_output_tokens, processor.num_cached_tokens)
    return Finished(
        delta.finish_reason, delta.stop_reason, usage, delta.text, tuple(delta.token_ids)
    )
