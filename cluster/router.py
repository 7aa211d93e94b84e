"""Router shell: reserve a decode slot, have the prompt prefilled, activate, pass tokens on.

Owner: one ingress's event loop. A disaggregated request in the order `decode_first`, in which a
finished prefill never waits for a decoder:

1. wait for a DP group with room, hold it, send RESERVE; refused or dead: another group
2. choose a prefill engine, seal a ticket, send PREFILL to it and LOAD to the decode engine
3. the first token comes from prefill: pass it on at once, ACTIVATE the reservation with it
4. the decode engine says that the KV is loaded: let go of prefill. Its tokens start at index 1

In the order `prefill_first` no decode slot waits for a prefill:

1. choose a prefill engine, seal a ticket that names no consumer, send PREFILL
2. the first token comes from prefill, which keeps the KV: pass it on at once
3. wait for a DP group with room, hold it, send RESERVE; refused or dead: another group
4. seal a ticket of the same transfer for it, send LOAD and ACTIVATE; further as above

A prefill engine that refuses or dies before the first token costs another ticket, at last a local
prefill on the decode engine; one that dies later costs the decode engine the prompt. A decode
engine that dies costs a new reservation as long as it has generated nothing: the first token stays.
Its KV stays only if it was offered to whichever decode engine comes and none has begun to fetch it:
the end of a consumer ends its transfer, and the next decode engine computes the prompt again, or
ends the request where its configuration forbids that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Protocol

from cluster.errors import (
    BadRequestError,
    InternalError,
    KVTransferFailedError,
    QueueTimeoutError,
    ReplicaLostError,
    SaturatedError,
)
from cluster.placement import make_policy
from cluster.slot_queue import RETRY_AFTER_S, SlotQueue
from replicas.errors import EngineDeadError
from replicas.messages import (
    KV_TRANSFER_FAILED,
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
    from collections.abc import AsyncGenerator

    from cluster.config.schema import RouterConfig
    from cluster.errors import ServingError
    from cluster.metrics import RouterMetrics
    from cluster.placement import Placement
    from cluster.pools import PoolState
    from cluster.tickets import TicketOffice, Transfer
    from replicas.messages import (
        ClientMessage,
        EngineEvent,
        EngineRequest,
        RequestMode,
    )
    from replicas.streams import EngineStream, Inbox

_NO_ROOM = frozenset({"no_slot", "no_blocks", "queue_full"})
"""Refusals that mean that somebody else was faster: the request waits on, where it stood."""


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
        tickets: Seals what lets a decode engine fetch from a prefill engine.
    """

    def __init__(
        self,
        client: EngineClient,
        pools: PoolState,
        config: RouterConfig,
        metrics: RouterMetrics,
        tickets: TicketOffice,
    ) -> None:
        self.client = client
        self.pools = pools
        self.config = config
        self.metrics = metrics
        self.tickets = tickets
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
        # Of the last transfer: news of an earlier one must not end the one under way.
        self._epoch = -1
        # What prefill computed, and the client has.
        self._first: TokenOutput | None = None
        # The transfer that prefill keeps for whichever decode engine comes; once one has begun to
        # fetch it, its loss is the transfer's end, which the next one is told of by prefill.
        self._offered: Transfer | None = None

    async def outputs(self) -> AsyncGenerator[TokenOutput, None]:
        """Tokens until the finish; a decode engine that is lost in time is replaced."""
        for _ in range(self._router.config.max_attempts):
            has_decoded = False
            try:
                for begin in (self._prefill_first, self._start_decode):
                    first = await begin()
                    if first is not None:
                        yield first
                        if first.finish_reason is not None:
                            return
                async for output in self._decode_outputs():
                    has_decoded = True
                    yield output
            except _DecodeLostError as error:
                self._lose_decode()
                if has_decoded:
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
        self._drop_decode(abort=True)
        self._drop_prefill(abort=True)

    # --- both sides ----------------------------------------------------------------------------

    async def _prefill_first(self) -> TokenOutput | None:
        """In that order: have the prompt computed while there is no decode slot yet.

        Returns:
            The first token, unless the client has it already or no prefill engine gave one.

        Raises:
            ServingError: There will be no decode slot for it.
        """
        is_first = self._router.config.order == "prefill_first" and self._has_prefill
        if self._first is not None or not is_first:
            return None
        self._router.queue.check_open()
        self._first = await self._prefill_remotely()
        return self._first

    async def _start_decode(self) -> TokenOutput | None:
        """Get a decode slot and let it run: from the first token, or on its own.

        Returns:
            The first token, if a prefill engine gave it meanwhile.

        Raises:
            _DecodeLostError: The decode engine died.
            ServingError: There is no slot to be had.
        """
        if not await self._reserve():
            return None
        if self._first is not None:
            self._hand_over(self._first)
            return None
        self._first = await self._prefill_remotely()
        if self._first is None:
            self._send_decode(Activate(self._id, []))
        elif self._first.finish_reason is None:
            self._send_decode(Activate(self._id, self._first.token_ids))
        return self._first

    @property
    def _has_prefill(self) -> bool:
        """Whether a prefill engine takes requests, and the prompt is long enough to move."""
        num_tokens = len(self._request.prompt_token_ids)
        is_long = num_tokens >= self._router.config.min_remote_prefill_tokens
        return is_long and self._pools.has_open(("prefill",))

    # --- decode side ---------------------------------------------------------------------------

    async def _reserve(self) -> bool:
        """Get a decode slot; returns whether the engine leaves the prompt to another one.

        Raises:
            ServingError: There is none to be had.
        """
        now_s = asyncio.get_running_loop().time
        started_s = now_s()
        num_blocks = -(-(len(self._request.prompt_token_ids) + 1) // self._pools.block_size)
        place = self._router.queue.new_place(is_promised=self._first is not None)
        num_failures = 0
        while True:
            placement = await self._router.queue.hold(self._id, num_blocks, place)
            is_remote = self._is_remote(placement)
            answer = await self._ask(placement, "decode" if is_remote else "local")
            if isinstance(answer, Accepted):
                self._router.metrics.queue_time.observe(now_s() - started_s)
                return is_remote
            self._drop_decode(abort=False)
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
        """Whether the engine waits to be activated instead of computing the prompt at once."""
        if self._first is not None:
            return True
        member = self._pools.member(placement.incarnation)
        is_decode = member is not None and member.role == "decode"
        # In the other order prefill engines have been asked, and gave nothing.
        return is_decode and self._router.config.order == "decode_first" and self._has_prefill

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
                    self._drop_decode(abort=False)
                    return

    def _hand_over(self, first: TokenOutput) -> None:
        """Let the reservation go on from the first token, with the KV if prefill keeps it for us.

        An engine that gets no KV, or finds that the transfer is over, computes the prompt itself.
        """
        assert self._decode is not None
        if self._offered is not None:
            ticket = self._router.tickets.seal(self._offered, self._decode.incarnation)
            self._send_decode(LoadKV(self._id, ticket, self._offered.epoch))
        self._send_decode(Activate(self._id, first.token_ids))

    # --- prefill side --------------------------------------------------------------------------

    async def _prefill_remotely(self) -> TokenOutput | None:
        """Have the prompt computed by the prefill pool, for the decode engine if there is one yet.

        Returns:
            The first token; None when no prefill engine gave one.

        Raises:
            _DecodeLostError: The decode engine died.
        """
        tried: set[str] = set()
        for _ in range(self._router.config.max_attempts):
            target = self._router.policy.place_prefill(self._pools.prefill_views(), tried)
            if target is None:
                break
            output = await self._first_token(target)
            if output is not None:
                return output
            tried.add(target)
            self._router.metrics.retries.labels("prefill").inc()
        return None

    async def _first_token(self, target: str) -> TokenOutput | None:
        """Ask one prefill engine; None when it refuses or dies.

        Raises:
            _DecodeLostError: The decode engine died.
        """
        member = self._pools.member(target)
        if member is None or not member.description.kv_endpoints:
            return None
        self._epoch += 1
        tickets = self._router.tickets
        transfer = tickets.begin(self._request, self._epoch, member.description)
        ticket = tickets.seal(transfer, self._decode.incarnation if self._decode else "")
        self._pools.hold_prefill(self._id, target, len(self._request.prompt_token_ids))
        try:
            self._prefill = self._client.open_stream(
                target, self._id, AddRequest(self._request, "prefill", -1, ticket), self._inbox
            )
            if self._decode is None:
                self._offered = transfer
            else:
                self._send_decode(LoadKV(self._id, ticket, transfer.epoch))
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

    # --- streams -------------------------------------------------------------------------------

    async def _next_of(self, wanted: EngineStream) -> EngineEvent:
        """The next event of one stream; what the decode engine says meanwhile is kept for later.

        Raises:
            _DecodeLostError: The decode engine died.
            EngineDeadError: The wanted prefill engine died.
            ServingError: An engine gave the request up.
        """
        if wanted is self._decode and self._early:
            return self._early.popleft()
        while True:
            stream, event = await self._inbox.get()
            if stream is not self._decode and stream is not self._prefill:
                continue  # It was dropped; this was on its way.
            if isinstance(event, EngineDeadError):
                if stream is self._decode:
                    raise _DecodeLostError(str(event))
                if stream is wanted:
                    raise event
                self._drop_prefill(abort=False)
            elif isinstance(event, TokenOutput) and event.finish_reason == "error":
                is_waiting = stream is self._decode and wanted is self._prefill
                raise _error(event.error or "the engine ended the request", is_waiting=is_waiting)
            elif stream is wanted:
                return event
            elif stream is self._decode:
                self._early.append(event)

    def _send_decode(self, message: LoadKV | Activate) -> None:
        """Send a message about the reservation; if its engine is gone the stream will tell."""
        assert self._decode is not None
        with contextlib.suppress(EngineDeadError):
            self._client.send(self._decode.incarnation, message)

    def _lose_decode(self) -> None:
        """Drop a decode engine that died, and the transfer that only it could fetch."""
        self._drop_decode(abort=True)
        if self._offered is None:
            self._drop_prefill(abort=True)

    def _drop_decode(self, *, abort: bool) -> None:
        if self._decode is not None:
            self._decode.close(abort=abort)
            self._decode = None
        self._early.clear()

    def _drop_prefill(self, *, abort: bool) -> None:
        if self._prefill is not None:
            self._prefill.close(abort=abort)
            self._prefill = None
        self._offered = None


def _error(text: str, *, is_waiting: bool) -> ServingError:
    """What a client is told of a request that an engine gave up.

    Args:
        text: What the engine said.
        is_waiting: Whether it was a reservation that had not been activated.
    """
    # It may be heard of only after the activation was sent.
    if is_waiting or text == LAPSED:
        return QueueTimeoutError(
            f"decoding did not start in time: {text}; retry later", retry_after_s=RETRY_AFTER_S
        )
    if text.startswith(KV_TRANSFER_FAILED):
        return KVTransferFailedError(f"{text}; retry", retry_after_s=RETRY_AFTER_S)
    return InternalError(text)
