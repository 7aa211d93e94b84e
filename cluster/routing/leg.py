"""A leg: one engine's part in one request, from the question to the moment it is let go of.

A leg owns its hold in the pool state, until the engine has answered, its stream, until it is
closed, and the timer of what it waits for; closing it gives all back whatever state it is in.

An engine that stalls, as it says itself, is left, and that is no loss: a prefill engine by whoever
waits for its first token, a decode engine only while another one has room, and only so often; else
it is waited for, until it moves again, its parent ends it
(`EngineConfig.step_timeout_s`), or the request's own time is over (`EngineRequest.timeout_s`). An
engine that is busy does not stall, however long its queue is: nobody loses his place there.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections import deque
from typing import TYPE_CHECKING, Protocol

from cluster.errors import (
    InternalError,
    KVTransferFailedError,
    QueueTimeoutError,
    ReplicaLostError,
)
from cluster.routing.slot_queue import RETRY_AFTER_S
from replicas.errors import (
    EngineDeadError,
    EngineLateError,
    EngineLeavingError,
    EngineQuietError,
    EngineStalledError,
)
from replicas.messages import (
    KV_TRANSFER_FAILED,
    LAPSED,
    Accepted,
    Activate,
    LendKV,
    LoadKV,
    Refused,
    TokenOutput,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.errors import ServingError
    from cluster.routing.demand import Demand
    from cluster.routing.metrics import RouterMetrics
    from cluster.routing.placement import Placement
    from cluster.routing.pools import PoolState
    from cluster.routing.stalls import Stalls
    from cluster.routing.tickets import Transfer
    from replicas.messages import (
        AbortReason,
        AddRequest,
        ClientMessage,
        EngineEvent,
        RequestMode,
    )
    from replicas.streams import EngineStream, Inbox, News


ANSWER_S = 60.0
"""How long an engine that does not stall may take to accept or refuse a request: a step or two.

What comes after has no deadline of its own: a queue and a prompt take as long as they take.
"""


class DecodeLostError(Exception):
    """The engine that holds the request's decode slot is gone, or does not hear what it is told."""


class DecodeLeftError(Exception):
    """The request must move: its decode replica is stalled, draining or unresponsive.

    Args:
        reason: "stalled", "leaving" or "quiet".
        why: Details for the log.
    """

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


class EngineClient(Protocol):
    """What a leg needs of the connections to the engines."""

    def open_stream(
        self, incarnation: str, request_id: str, message: ClientMessage, inbox: Inbox | None = None
    ) -> EngineStream:
        """See `AsyncMPClient.open_stream`."""
        ...

    def send(self, incarnation: str, message: ClientMessage) -> None:
        """See `AsyncMPClient.send`."""
        ...


class LegState(enum.Enum):
    """Where a leg is."""

    ASKED = "asked"
    """The engine was sent the request, which counts against its view."""
    OPEN = "open"
    """It has answered: its snapshots count the request from now on."""
    ACTIVATED = "activated"
    """A reservation that was told to start."""
    CLOSED = "closed"
    """Nobody listens to it any more."""


_SUCCESSORS = {
    LegState.ASKED: {LegState.OPEN, LegState.CLOSED},
    LegState.OPEN: {LegState.OPEN, LegState.ACTIVATED, LegState.CLOSED},
    LegState.ACTIVATED: {LegState.CLOSED},
    LegState.CLOSED: {LegState.CLOSED},
}


class Leg:
    """See the module docstring; making one asks the engine. Owner: the request's `Legs`.

    Args:
        client: Connections to the engines.
        pools: Where the request is held.
        placement: Where it goes, and is held.
        message: What the engine is asked.
        inbox: Where its events go.
        offer: For a prefill leg: the transfer, if any, that its engine keeps the KV of the prompt
            for until some decode engine comes.

    Attributes:
        state: Where it is.
        mode: Which part of the request runs there.
        incarnation: The engine.
        stream: Its events, as they come into the inbox.
        early: What the engine said while another leg was waited for.
        has_tokens: Whether a token of it has come.
        asked_s: When the engine was asked, on the event loop's clock.
        epoch: Of the engine, as it was believed then: what it refuses it refuses in that.
        offer: As given. Once a decode engine has begun to fetch it, the loss of that engine is the
            transfer's end, which the next one is told of by prefill.

    Raises:
        EngineDeadError: The engine is not connected.
    """

    def __init__(
        self,
        client: EngineClient,
        pools: PoolState,
        placement: Placement,
        message: AddRequest,
        inbox: Inbox,
        offer: Transfer | None = None,
    ) -> None:
        self.state = LegState.ASKED
        self.mode = message.mode
        self.incarnation = placement.incarnation
        self.early: deque[EngineEvent] = deque()
        self.has_tokens = False
        self.asked_s = asyncio.get_running_loop().time()
        self.offer = offer
        self.epoch = pools.epoch(self.incarnation)
        self._client = client
        self._pools = pools
        self._request_id = message.request.request_id
        try:
            self.stream = client.open_stream(self.incarnation, self._request_id, message, inbox)
        except BaseException:
            self._pools.end(self._request_id, self.incarnation)
            raise
        self._timer = self._wait_for_answer()

    def __repr__(self) -> str:
        return f"Leg({self.mode} on {self.incarnation}, {self.state.value})"

    def answered(self) -> None:
        """The engine has answered: let go of the hold. Idempotent."""
        self._timer.cancel()
        self._go(LegState.OPEN)
        self._pools.release(self._request_id, self.incarnation)

    @property
    def has_answered(self) -> bool:
        """Whether the engine has said that it takes the request."""
        return self.state is not LegState.ASKED

    def keep(self, event: EngineEvent) -> None:
        """Keep an event until it is waited for; whatever prefill says is an answer."""
        if self.mode == "prefill":
            self.answered()
        self.early.append(event)

    def load(self, ticket: bytes, epoch: int) -> None:
        """Let the engine of a reservation fetch the prompt's KV; see `LoadKV`."""
        assert self.state is LegState.OPEN, f"{self!r} cannot load"
        self._send(LoadKV(self._request_id, ticket, epoch))

    def lend(self, ticket: bytes, epoch: int) -> None:
        """Let another engine fetch what this one has of the stream; see `LendKV`."""
        assert self.has_tokens, f"{self!r} has nothing to lend"
        self._send(LendKV(self._request_id, ticket, epoch))

    def activate(self, token_ids: list[list[int]]) -> None:
        """Let a reservation start; see `Activate`."""
        self._go(LegState.ACTIVATED)
        self._send(Activate(self._request_id, token_ids))

    def close(self, *, abort: bool, reason: AbortReason = "abort") -> None:
        """Let go of everything; with `abort`, the engine drops the request too; see `Abort`.

        Idempotent.
        """
        self._timer.cancel()
        self._go(LegState.CLOSED)
        self._pools.end(self._request_id, self.incarnation)
        self.stream.close(abort=abort, reason=reason)

    def _wait_for_answer(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(ANSWER_S, self._expire)

    def _expire(self) -> None:
        """Whoever reads the stream learns that no answer has come in time."""
        if self.stream.stalled is not None:
            # It could not answer; it has its time once it moves again.
            self._timer = self._wait_for_answer()
        else:
            self.stream.put(
                EngineLateError(f"engine {self.incarnation} did not answer within {ANSWER_S:g} s")
            )

    def _send(self, message: ClientMessage) -> None:
        """Tell the engine more of the request; if it is gone the stream will say so."""
        with contextlib.suppress(EngineDeadError):
            self._client.send(self.incarnation, message)

    def _go(self, state: LegState) -> None:
        assert state in _SUCCESSORS[self.state], f"{self!r} cannot become {state.value}"
        self.state = state


class Legs:
    """The legs of one request, at most one on each side but for an heir, and their one inbox.

    Owner: the request's `Run`.

    Args:
        client: Connections to the engines.
        pools: Where the request is held.
        metrics: Counts the engines that die.
        stalls: Says whether another decode engine has room.
        demand: What the request needs there; the prompt and its output, once it has migrated.
        max_leaves: How many decode engines it may leave because they stall.

    Attributes:
        decode: The leg that has, or asks for, the decode slot.
        heir: The leg that is to follow on it, once its engine has accepted.
        prefill: The leg that computes the prompt, or keeps its KV.
        demand: See there.
        num_lost: How many engines died while the request was theirs, or lost it as they decode.
        on_prompt: Told which engine was asked for the prompt, each time.
        hands_over: Asked when the decode engine hands over, or is quiet: whether the request stays
            there until another one has accepted it.
        on_heir: Gets what is heard of the heir.
    """

    def __init__(
        self,
        client: EngineClient,
        pools: PoolState,
        metrics: RouterMetrics,
        stalls: Stalls,
        demand: Demand,
        max_leaves: int,
    ) -> None:
        self._client = client
        self._pools = pools
        self._metrics = metrics
        self._stalls = stalls
        self.demand = demand
        self._num_leaves_left = max_leaves
        self.num_lost = 0
        self._inbox: Inbox = asyncio.Queue()
        self.decode: Leg | None = None
        self.heir: Leg | None = None
        self.prefill: Leg | None = None
        self.hands_over: Callable[[], bool] = lambda: False
        self.on_heir: Callable[[EngineEvent | News], None] = lambda _event: None
        self.on_prompt: Callable[[str], None] = lambda _engine: None

    def __repr__(self) -> str:
        return f"{self.prefill!r}, {self.decode!r}, {self.heir!r}"

    def ask_to_decode(self, placement: Placement, message: AddRequest) -> Leg:
        """Begin the decode leg; see `Leg`.

        An engine knows a request once: if it prefilled this one, before its role changed, it is
        asked anew, and may find the prompt in its prefix cache.
        """
        self._make_way(placement)
        self.decode = self._ask(placement, message)
        return self.decode

    def ask_heir(self, placement: Placement, message: AddRequest) -> None:
        """Begin the leg that is to follow on the decode leg, which goes on; see `ask_to_decode`."""
        self._make_way(placement)
        self.heir = self._ask(placement, message)

    def adopt(self) -> Leg:
        """The heir is the decode leg from now on."""
        assert self.decode is None, "one decode leg at a time has the stream"
        assert self.heir is not None
        self.decode, self.heir = self.heir, None
        return self.decode

    def ask_to_prefill(
        self, placement: Placement, message: AddRequest, offer: Transfer | None
    ) -> Leg:
        """Begin the prefill leg; see `Leg`."""
        self.prefill = self._ask(placement, message, offer)
        return self.prefill

    async def next_of(self, wanted: Leg) -> EngineEvent:
        """The next event of one leg; what the other engine says meanwhile is kept for later.

        Raises:
            DecodeLostError: The decode engine died, or did not answer in time.
            DecodeLeftError: It stalls, hands over, or is quiet, and there is another one.
            EngineDeadError: The wanted prefill engine died.
            EngineLateError: It did not answer in time.
            EngineStalledError: It stalls.
            ServingError: An engine gave the request up.
        """
        if wanted.early:
            return wanted.early.popleft()
        if wanted is self.prefill:
            # It may have begun to while the decode engine was waited for.
            self._check_away(wanted, wanted)
        while True:
            stream, event = await self._inbox.get()
            leg = self._leg_of(stream)
            if leg is None:
                continue  # It was dropped; this was on its way.
            self._judge(leg, event)
            leg.has_tokens |= isinstance(event, TokenOutput)
            if leg is self.heir:
                self._hear_heir(leg, event)
            elif isinstance(event, EngineDeadError | EngineLateError):
                self._lose(leg, wanted, event)
            elif isinstance(event, EngineStalledError | EngineLeavingError | EngineQuietError):
                self._check_away(leg, wanted)
            elif isinstance(event, TokenOutput) and event.finish_reason == "error":
                is_waiting = leg is self.decode and wanted is self.prefill
                raise self._failure(event, is_waiting=is_waiting)
            elif leg is wanted:
                return event
            else:
                leg.keep(event)

    def check_lost(self, most: int) -> None:
        """Raise once so many engines were lost.

        Raises:
            ReplicaLostError: The next one might die of the request, too.
        """
        if self.num_lost >= most:
            raise ReplicaLostError(
                f"{self.num_lost} replicas were lost while they ran the request; not trying more",
                retry_after_s=RETRY_AFTER_S,
            )

    def _hear_heir(self, heir: Leg, event: EngineEvent | News) -> None:
        """Pass on what is heard of the heir.

        Raises:
            DecodeLeftError: It goes on.
        """
        if isinstance(event, EngineDeadError | EngineLateError):
            self._count_lost(heir.mode)
        if isinstance(event, Accepted):
            heir.answered()
        self.on_heir(event)

    async def answer_of(self, leg: Leg) -> Accepted | Refused:
        """What an engine says to being asked; see `next_of`."""
        while True:
            event = await self.next_of(leg)
            if isinstance(event, Accepted | Refused):
                return event

    def _judge(self, leg: Leg, event: EngineEvent | Exception) -> None:
        """Tell the pools what an engine is worth: that it failed the request, drains, gives tokens.

        A connection that breaks, which ends many at once, is told by whoever notices it.
        """
        if isinstance(event, Refused) and event.reason == "draining":
            self._pools.drains(leg.incarnation, leg.epoch)
        if isinstance(event, TokenOutput):
            if event.finish_reason == "error":
                if _is_own_fault(event.error or ""):
                    self._pools.failed(leg.incarnation, asyncio.get_running_loop().time())
            elif not leg.has_tokens:
                self._pools.succeeded(leg.incarnation)
        elif isinstance(event, EngineLateError) and leg.state is LegState.ASKED:
            self._pools.failed(leg.incarnation, asyncio.get_running_loop().time())

    def _failure(self, event: TokenOutput, *, is_waiting: bool) -> ServingError:
        """What a client is told of a request that an engine gave up; see `_error`."""
        if event.error == LAPSED:
            self._metrics.lapses.inc()
        return _error(event.error or "the engine ended the request", is_waiting=is_waiting)

    def _lose(self, leg: Leg, wanted: Leg, error: EngineDeadError | EngineLateError) -> None:
        """Give up a leg whose engine died, or has not answered, unless it has just done so.

        Raises:
            DecodeLostError: It is the decode leg.
            EngineDeadError: It is the prefill leg, and waited for.
            EngineLateError: Likewise.
        """
        is_late = isinstance(error, EngineLateError)
        if is_late and leg.has_answered:
            return
        self._count_lost(leg.mode)
        # One that computed the prompt too late may be slow; one that is gone may have died of it.
        self.num_lost += leg is self.decode or not is_late
        if leg is self.decode:
            raise DecodeLostError(str(error))
        if leg is wanted:
            raise error
        self.drop_prefill(abort=is_late)

    def _check_away(self, leg: Leg, wanted: Leg) -> None:
        """Leave a leg whose engine stalls, unless it is a prefill leg that is not waited for.

        So is a decode leg left whose engine hands over, unless it has a stream, which goes on until
        another engine has accepted it; a prompt ends there in time.

        A decode leg stays while nobody else has room, and once enough engines were left. Of an
        engine that is quiet it stays until the next one has begun.

        Raises:
            DecodeLeftError: It is the decode leg.
            EngineStalledError: It is the prefill leg.
        """
        stalled, error = leg.stream.stalled, leg.stream.away
        if error is None:
            # It moves again, unless it says nothing.
            if leg is self.decode and leg.has_answered and leg.stream.quiet is not None:
                self.hands_over()
            return
        if leg is self.decode:
            is_leaving = error is not stalled
            if is_leaving and leg.has_answered and self.hands_over():
                return
            if not is_leaving and not self._num_leaves_left:
                return
            if not self._stalls.has_room(self.demand):
                self._stalls.stay(leg.stream, self.demand)
                return
            if is_leaving:
                raise DecodeLeftError("leaving", str(error))
            self._num_leaves_left -= 1
            self._metrics.stalled.labels("decode").inc()
            raise DecodeLeftError("stalled", str(error))
        if leg is wanted and stalled is not None:
            # Not once it has given its tokens: KV that it still owes has deadlines of its own.
            self._metrics.stalled.labels("prefill").inc()
            raise stalled

    def _make_way(self, placement: Placement) -> None:
        """Let go of a prefill leg where the request is held to decode now; that hold stays."""
        if self.prefill is not None and self.prefill.incarnation == placement.incarnation:
            self.drop_prefill(abort=True)
            self._pools.hold(self.demand, placement)

    def _ask(self, placement: Placement, message: AddRequest, offer: Transfer | None = None) -> Leg:
        try:
            leg = Leg(self._client, self._pools, placement, message, self._inbox, offer)
        except EngineDeadError:
            self._count_lost(message.mode)
            raise
        if message.mode != "decode":
            self.on_prompt(placement.incarnation)
        return leg

    def _count_lost(self, mode: RequestMode) -> None:
        self._metrics.lost.labels("prefill" if mode == "prefill" else "decode").inc()

    def _leg_of(self, stream: EngineStream) -> Leg | None:
        for leg in (self.decode, self.prefill, self.heir):
            if leg is not None and leg.stream is stream:
                return leg
        return None

    def drop_decode(self, *, abort: bool, reason: AbortReason = "abort") -> None:
        """Let go of the decode leg, if there is one; see `Leg.close`."""
        if self.decode is not None:
            self._stalls.forget(self.decode.stream)
            self.decode.close(abort=abort, reason=reason)
            self.decode = None

    def give_back(self, placement: Placement) -> None:
        """Let go of what is held for the request where nobody was asked after all."""
        self._pools.end(self.demand.request_id, placement.incarnation)

    def drop_heir(self) -> None:
        """Let go of the leg that was to follow, if there is one; see `Leg.close`."""
        if self.heir is not None:
            self.heir.close(abort=True)
            self.heir = None

    def drop_prefill(self, *, abort: bool) -> None:
        """Let go of the prefill leg, if there is one; see `Leg.close`."""
        if self.prefill is not None:
            self.prefill.close(abort=abort)
            self.prefill = None


def _is_own_fault(error: str) -> bool:
    """Whether an engine that gave a request up so did it for no reason but its own."""
    return error != LAPSED and not error.startswith(KV_TRANSFER_FAILED)


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
