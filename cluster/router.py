"""Router shell: reserve a decode slot, have the prompt prefilled, activate, pass tokens on.

Owner: one ingress's event loop. The order of one disaggregated request (decode slot first, so that
a finished prefill never waits for a decoder):

1. wait for a DP group with room, hold it, send RESERVE; refused or dead: another group
2. choose a prefill engine, mint a ticket, send PREFILL to it and LOAD to the decode engine
3. the first token comes from prefill: pass it on at once, ACTIVATE the reservation with it
4. the decode engine says that the KV is loaded: let go of prefill. Its tokens start at index 1

A prefill engine that refuses or dies before step 3 costs another ticket, at last a local prefill on
the decode engine. A decode engine that dies costs a new reservation as long as the client has no
token yet.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from typing import TYPE_CHECKING, Protocol

from cluster.errors import (
    BadRequestError,
    InternalError,
    QueueTimeoutError,
    ReplicaLostError,
    SaturatedError,
)
from cluster.placement import make_policy
from cluster.slot_queue import RETRY_AFTER_S, SlotQueue
from kv_transfer.ticket import Ticket
from replicas.errors import EngineDeadError
from replicas.messages import (
    LAPSED,
    Accepted,
    Activate,
    AddRequest,
    KVLoaded,
    LoadKV,
    Refused,
    TokenOutput,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from cluster.config import RouterConfig
    from cluster.metrics import RouterMetrics
    from cluster.placement import Placement
    from cluster.pools import PoolState
    from replicas.messages import (
        ClientMessage,
        EngineDescription,
        EngineEvent,
        EngineRequest,
        RequestMode,
    )
    from replicas.streams import EngineStream, Inbox

_NO_ROOM = frozenset({"no_slot", "no_blocks", "queue_full"})
"""Refusals that mean that somebody else was faster: the request waits on, where it stood."""


def _random_transfer_id() -> bytes:
    return secrets.token_bytes(16)


class EngineClient(Protocol):
    """What a router needs of the connections to the engines."""

    def open_stream(
        self, incarnation: str, request_id: str, message: ClientMessage, inbox: Inbox | None = None
    ) -> EngineStream:
        """See `AsyncMPClient.open_stream`."""
        ...

    def send(self, incarnation: str, message: ClientMessage) -> None:
        """See `AsyncMPClient.send`."""
        ...


class Router:
    """Places requests and runs them; see the module docstring.

    Args:
        client: Connections to the engines.
        pools: What this ingress believes of them.
        config: Bounds and thresholds.
        metrics: Counts what is decided.
        new_transfer_id: Makes 16 bytes that nobody can guess, for a ticket.
    """

    def __init__(
        self,
        client: EngineClient,
        pools: PoolState,
        config: RouterConfig,
        metrics: RouterMetrics,
        new_transfer_id: Callable[[], bytes] = _random_transfer_id,
    ) -> None:
        self.client = client
        self.pools = pools
        self.config = config
        self.metrics = metrics
        self.new_transfer_id = new_transfer_id
        self.policy = make_policy(config.policy)
        self.queue = SlotQueue(
            pools, self.policy, config.max_queued_requests, config.queue_timeout_s
        )

    def capacity_changed(self) -> None:
        """Call when a slot may be free: a new snapshot, a replica came or went."""
        self.queue.capacity_changed()

    @property
    def num_queued(self) -> int:
        """Requests that wait for a decode slot."""
        return len(self.queue)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenOutput, None]:
        """Run a request; yields its tokens in order of their index, the last with a finish reason.

        Closing the generator early aborts the request wherever it is.

        Raises:
            ServingError: It cannot run, or stopped midway.
        """
        run = _Run(self, request)
        try:
            async for output in run.outputs():
                yield output
        finally:
            run.close()


class _DecodeLostError(Exception):
    """The engine that holds the request's decode slot is gone."""


class _Run:
    """One request on its way through the engines; used by one coroutine."""

    def __init__(self, router: Router, request: EngineRequest) -> None:
        self._router = router
        self._client = router.client
        self._pools = router.pools
        self._request = request
        self._id = request.request_id
        self._inbox: Inbox = asyncio.Queue()
        self._decode: EngineStream | None = None
        self._prefill: EngineStream | None = None
        # What the decode engine said while prefill was waited for.
        self._early: deque[EngineEvent] = deque()
        # Of the last ticket: news of an earlier one must not end the transfer under way.
        self._epoch = 0
        self._has_output = False

    async def outputs(self) -> AsyncGenerator[TokenOutput, None]:
        """Tokens until the finish; starts over while nothing has been passed on."""
        for _ in range(self._router.config.max_attempts):
            is_remote = await self._reserve()
            try:
                if is_remote:
                    output = await self._prefill_remotely()
                    if output is not None:
                        self._has_output = True
                        yield output
                        if output.finish_reason is not None:
                            return
                async for output in self._decode_outputs():
                    self._has_output = True
                    yield output
            except _DecodeLostError as error:
                self.close()
                if self._has_output:
                    raise ReplicaLostError(
                        f"the decode replica was lost mid-request: {error}"
                    ) from None
                self._router.metrics.retries.labels("decode_lost").inc()
            else:
                return
        raise ReplicaLostError(
            f"{self._router.config.max_attempts} decode replicas were lost one after the other",
            retry_after_s=RETRY_AFTER_S,
        )

    def close(self) -> None:
        """Abort what is still open and drop every hold. Idempotent."""
        self._pools.release_everywhere(self._id)
        for stream in (self._decode, self._prefill):
            if stream is not None:
                stream.close(abort=True)
        self._decode = self._prefill = None
        self._early.clear()
        self._inbox = asyncio.Queue()

    # --- decode side ---------------------------------------------------------------------------

    async def _reserve(self) -> bool:
        """Get a decode slot; returns whether the prompt is to be prefilled elsewhere.

        Raises:
            ServingError: There is none to be had.
        """
        now_s = asyncio.get_running_loop().time
        started_s = now_s()
        num_blocks = -(-(len(self._request.prompt_token_ids) + 1) // self._pools.block_size)
        place = self._router.queue.new_place()
        num_failures = 0
        while True:
            placement = await self._router.queue.hold(self._id, num_blocks, place)
            is_remote = self._is_remote(placement)
            answer = await self._ask(placement, "decode" if is_remote else "local")
            if isinstance(answer, Accepted):
                self._router.metrics.queue_time.observe(now_s() - started_s)
                return is_remote
            self._drop_decode()
            self._router.metrics.refusals.labels(answer.reason).inc()
            if answer.reason == "invalid":
                raise BadRequestError(answer.message, param="prompt")
            place.refused.add(placement)
            if answer.reason in _NO_ROOM:
                continue
            num_failures += 1
            if num_failures == self._router.config.max_attempts:
                raise SaturatedError(
                    f"{num_failures} placements were refused; the last: {answer.message}",
                    retry_after_s=RETRY_AFTER_S,
                )

    async def _ask(self, placement: Placement, mode: RequestMode) -> Accepted | Refused:
        """Send the request to a decode engine and wait for its answer; a dead one refuses."""
        message = AddRequest(self._request, mode, placement.dp_group)
        try:
            self._decode = self._client.open_stream(
                placement.incarnation, self._id, message, self._inbox
            )
            return await self._answer(self._decode)
        except (EngineDeadError, _DecodeLostError) as error:
            return Refused(self._id, "draining", str(error))
        finally:
            self._pools.release(self._id, placement.incarnation)
            self._router.capacity_changed()

    def _is_remote(self, placement: Placement) -> bool:
        """Whether another engine prefills: there is one, and the prompt is long enough to move."""
        member = self._pools.member(placement.incarnation)
        return (
            member is not None
            and member.role == "decode"
            and len(self._request.prompt_token_ids) >= self._router.config.min_remote_prefill_tokens
            and self._pools.has_open(("prefill",))
        )

    async def _answer(self, stream: EngineStream) -> Accepted | Refused:
        """Wait for an engine's answer to `AddRequest`.

        Raises:
            _DecodeLostError: The decode engine died first.
            EngineDeadError: The asked engine, another one, did.
        """
        while True:
            event = await self._next_of(stream)
            if isinstance(event, Accepted | Refused):
                return event

    async def _decode_outputs(self) -> AsyncGenerator[TokenOutput, None]:
        """Tokens from the decode engine until the finish; meanwhile the prefill side is let go of.

        Raises:
            _DecodeLostError: The decode engine died.
            ServingError: The engine says that the request failed.
        """
        assert self._decode is not None
        while True:
            event = await self._next_of(self._decode)
            if isinstance(event, KVLoaded):
                if event.epoch != self._epoch:
                    continue
                self._drop_prefill(abort=event.failure is not None)
                if event.failure is not None:
                    self._router.metrics.retries.labels("kv_" + event.failure).inc()
            elif isinstance(event, TokenOutput):
                yield event
                if event.finish_reason is not None:
                    self._drop_decode()
                    return

    # --- prefill side --------------------------------------------------------------------------

    async def _prefill_remotely(self) -> TokenOutput | None:
        """Have the prompt computed by the prefill pool and activate the reservation.

        Returns:
            The first token; None when no prefill engine gave one and the decode engine does it all.

        Raises:
            _DecodeLostError: The decode engine died.
        """
        assert self._decode is not None
        tried: set[str] = set()
        for epoch in range(self._router.config.max_attempts):
            target = self._router.policy.place_prefill(self._pools.prefill_views(), tried)
            if target is None:
                break
            output = await self._first_token(target, epoch)
            if output is None:
                tried.add(target)
                self._router.metrics.retries.labels("prefill").inc()
                continue
            if output.finish_reason is None:
                self._send_decode(Activate(self._id, output.token_ids))
            return output
        self._send_decode(Activate(self._id, []))
        return None

    async def _first_token(self, target: str, epoch: int) -> TokenOutput | None:
        """Ask one prefill engine; None when it refuses or dies.

        Raises:
            _DecodeLostError: The decode engine died.
        """
        ticket = self._mint(target, epoch)
        if ticket is None:
            return None
        self._pools.hold_prefill(self._id, target, len(self._request.prompt_token_ids))
        try:
            self._prefill = self._client.open_stream(
                target, self._id, AddRequest(self._request, "prefill", -1, ticket), self._inbox
            )
            self._send_decode(LoadKV(self._id, ticket))
            while True:
                event = await self._next_of(self._prefill)
                if isinstance(event, TokenOutput):
                    return event
                self._pools.release(self._id, target)
                if isinstance(event, Refused):
                    self._router.metrics.refusals.labels(event.reason).inc()
                    break
        except EngineDeadError:
            pass
        finally:
            self._pools.release(self._id, target)
        self._drop_prefill(abort=True)
        return None

    def _mint(self, target: str, epoch: int) -> Ticket | None:
        """A ticket from a prefill engine to the decode engine; None if one is unknown by now."""
        assert self._decode is not None
        producer = self._description(target)
        consumer = self._description(self._decode.incarnation)
        if producer is None or consumer is None or producer.kv_endpoint is None:
            return None
        self._epoch = epoch
        return Ticket(
            transfer_id=self._router.new_transfer_id(),
            request_id=self._id,
            epoch=epoch,
            producer_endpoint=producer.kv_endpoint,
            producer_incarnation=producer.incarnation,
            consumer=consumer.incarnation,
            num_tokens=len(self._request.prompt_token_ids),
            layout_hash=consumer.kv_layout_hash or "",
        )

    def _description(self, incarnation: str) -> EngineDescription | None:
        member = self._pools.member(incarnation)
        return member.description if member is not None else None

    # --- streams -------------------------------------------------------------------------------

    async def _next_of(self, wanted: EngineStream) -> EngineEvent:
        """The next event of one stream; what the decode engine says meanwhile is kept for later.

        Raises:
            _DecodeLostError: The decode engine died.
            EngineDeadError: The wanted prefill engine died.
            QueueTimeoutError: The reservation lapsed before it was activated.
            InternalError: An engine gave the request up.
        """
        if wanted is self._decode and self._early:
            return self._early.popleft()
        while True:
            stream, event = await self._inbox.get()
            if isinstance(event, EngineDeadError):
                if stream is self._decode:
                    raise _DecodeLostError(str(event))
                if stream is wanted:
                    raise event
            elif (
                isinstance(event, TokenOutput)
                and event.finish_reason == "error"
                and stream is self._decode
                and (wanted is self._prefill or event.error == LAPSED)
            ):
                # It lapsed while the prompt waited for a prefill engine; that may be heard of only
                # after the activation was sent.
                raise QueueTimeoutError(
                    f"decoding did not start in time: {event.error}; retry later",
                    retry_after_s=RETRY_AFTER_S,
                )
            elif isinstance(event, TokenOutput) and event.finish_reason == "error":
                raise InternalError(event.error or "the engine ended the request")
            elif stream is wanted:
                return event
            elif stream is self._decode:
                self._early.append(event)

    def _send_decode(self, message: LoadKV | Activate) -> None:
        assert self._decode is not None
        try:
            self._client.send(self._decode.incarnation, message)
        except EngineDeadError as error:
            raise _DecodeLostError(str(error)) from None

    def _drop_decode(self) -> None:
        if self._decode is not None:
            self._decode.close(abort=False)
            self._decode = None

    def _drop_prefill(self, *, abort: bool) -> None:
        if self._prefill is not None:
            self._prefill.close(abort=abort)
            self._prefill = None
