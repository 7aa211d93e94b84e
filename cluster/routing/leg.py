"""A leg: one engine's part in one request, from the question until the leg is closed.

A leg owns its hold in the pool state, which ends when the engine has answered; its stream, until it
is closed; and the timer for the answer. Closing a leg releases all of them in any state.

A request leaves an engine that reports a stall, and this does not count as a loss:

- It leaves a stalled prefill engine as soon as its first token is waited for.
- It leaves a stalled decode engine only if another one has room, and only `max_leaves` times.
- Otherwise it waits until the engine moves again, is ended by its parent
  (`EngineConfig.step_timeout_s`), or the request times out (`EngineRequest.timeout_s`).

A busy engine is not stalled, however long its queue is: requests keep their place there.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
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
from cluster.routing.slot_queue import RETRY_AFTER_S
from replicas.errors import (
    EngineDeadError,
    EngineLateError,
    EngineLeavingError,
    EngineQuietError,
    EngineStalledError,
)
from replicas.messages import (
    BAD_GRAMMAR,
    GRAMMARS_BUSY,
    KV_TRANSFER_FAILED,
    LAPSED,
    NO_ALLOWED_TOKEN,
    Accepted,
    Activate,
    LendKV,
    LoadKV,
    Refused,
    TokenOutput,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
        FinishReason,
        RequestMode,
    )
    from replicas.sampling_params import SamplingParams
    from replicas.streams import EngineStream, Inbox, News


ANSWER_S = 60.0
"""Seconds within which an engine that is not stalled must accept or refuse a request.

That is a step or two. Later events have no deadline of their own: a queue and a prompt take as long
as they take.
"""


class DecodeLostError(Exception):
    """The engine that holds the request's decode slot is gone, or did not answer."""


class DecodeLeftError(Exception):
    """The request must move: its decode replica is stalled, draining or unresponsive.

    Args:
        reason: "stalled", "leaving" or "quiet".
        why: Details for the log.
    """

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


class ReservationEndedError(Exception):
    """The decode engine ended a reservation that had not been activated, as a pause may.

    Args:
        reason: The finish reason of its choices.
    """

    def __init__(self, reason: FinishReason) -> None:
        super().__init__(reason)
        self.reason: FinishReason = reason


class EngineClient(Protocol):
    """The connections to engines, as a leg uses them."""

    def open_stream(
        self, incarnation: str, request_id: str, message: ClientMessage, inbox: Inbox | None = None
    ) -> EngineStream:
        """Send a request and return its events; see `AsyncMPClient.open_stream`."""
        ...

    def send(self, incarnation: str, message: ClientMessage) -> None:
        """Send a message to an engine; see `AsyncMPClient.send`."""
        ...


class LegState(enum.Enum):
    """The states of a leg."""

    ASKED = "asked"
    """The engine was sent the request; a hold counts it in the engine's view."""
    OPEN = "open"
    """The engine has answered; its snapshots count the request from now on."""
    ACTIVATED = "activated"
    """A reservation was sent its activation."""
    CLOSED = "closed"
    """The stream is closed; later events are dropped."""


_SUCCESSORS = {
    LegState.ASKED: {LegState.OPEN, LegState.CLOSED},
    LegState.OPEN: {LegState.OPEN, LegState.ACTIVATED, LegState.CLOSED},
    LegState.ACTIVATED: {LegState.CLOSED},
    LegState.CLOSED: {LegState.CLOSED},
}


class Leg:
    """One engine's part in one request; creating it asks the engine. Owner: the request's `Legs`.

    Args:
        client: Connections to the engines.
        pools: The pool state that holds the request.
        placement: The place that it is sent to and held at.
        message: The message that the engine is sent.
        inbox: The queue for its events.
        offer: For a prefill leg: the transfer, if any, for which its engine keeps the prompt's KV
            until any decode engine fetches it.

    Attributes:
        state: Its state.
        mode: The part of the request that runs there.
        sampling: The request's parameters.
        incarnation: The engine.
        stream: Its events, which also go into the inbox.
        early: Events that came while another leg was waited for.
        has_tokens: Whether it has given a token.
        asked_s: When the engine was asked, on the event loop's clock.
        epoch: The engine's epoch, as known when it was asked; a refusal is valid in that epoch.
        offer: As given. Once a decode engine has begun to fetch it, the transfer ends with that
            engine, and prefill reports this to the next one.

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
        self.sampling = message.request.sampling
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
        """Record that the engine has answered, and release the hold. Idempotent."""
        self._timer.cancel()
        self._go(LegState.OPEN)
        self._pools.release(self._request_id, self.incarnation)

    @property
    def has_answered(self) -> bool:
        """Whether the engine has answered."""
        return self.state is not LegState.ASKED

    @property
    def is_reserved(self) -> bool:
        """Whether the engine has reserved a slot and waits for the activation."""
        return self.mode == "decode" and self.state is LegState.OPEN

    def keep(self, event: EngineEvent) -> None:
        """Keep an event until it is waited for; any event from prefill counts as its answer."""
        if self.mode == "prefill":
            self.answered()
        self.early.append(event)

    def load(self, ticket: bytes, epoch: int) -> None:
        """Tell a reservation's engine to fetch the prompt's KV; see `LoadKV`."""
        assert self.state is LegState.OPEN, f"{self!r} cannot load"
        self._send(LoadKV(self._request_id, ticket, epoch))

    def lend(self, ticket: bytes, epoch: int) -> None:
        """Let another engine fetch the KV that this one has of the stream; see `LendKV`."""
        assert self.has_tokens, f"{self!r} has nothing to lend"
        self._send(LendKV(self._request_id, ticket, epoch))

    def activate(self, token_ids: list[list[int]], ended: Iterable[int] = ()) -> None:
        """Start a reservation without the choices that have ended; see `Activate`."""
        for choice in ended:
            self.stream.stop_choice(choice)
        self._go(LegState.ACTIVATED)
        self._send(Activate(self._request_id, token_ids))

    def stop_choice(self, choice: int) -> None:
        """Let the engine drop one choice, which a stop string has ended."""
        self.stream.stop_choice(choice)

    def close(self, *, abort: bool, reason: AbortReason = "abort") -> None:
        """Release everything; with `abort`, the engine drops the request too. Idempotent."""
        self._timer.cancel()
        self._go(LegState.CLOSED)
        self._pools.end(self._request_id, self.incarnation)
        self.stream.close(abort=abort, reason=reason)

    def _wait_for_answer(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(ANSWER_S, self._expire)

    def _expire(self) -> None:
        """Report on the stream that no answer came in time."""
        if self.stream.stalled is not None:
            # A stalled engine cannot answer: it gets the full time again.
            self._timer = self._wait_for_answer()
        else:
            self.stream.put(
                EngineLateError(f"engine {self.incarnation} did not answer within {ANSWER_S:g} s")
            )

    def _send(self, message: ClientMessage) -> None:
        """Send the engine a message; if it is gone, the stream reports that."""
        with contextlib.suppress(EngineDeadError):
            self._client.send(self.incarnation, message)

    def _go(self, state: LegState) -> None:
        assert state in _SUCCESSORS[self.state], f"{self!r} cannot become {state.value}"
        self.state = state


class Legs:
    """The legs of one request and their common inbox.

    There is at most one decode leg, one prefill leg, and one heir that is to follow the decode leg.
    Owner: the request's `Run`.

    Args:
        client: Connections to the engines.
        pools: The pool state that holds the request.
        metrics: Counts lost engines.
        stalls: Knows whether another decode engine has room.
        demand: The demand that placement sees.
        max_leaves: How many decode engines the request may leave because they stall.

    Attributes:
        decode: The leg that has, or asks for, the decode slot.
        heir: The leg that replaces it once its engine has accepted.
        prefill: The leg that computes the prompt, or keeps its KV.
        demand: As given; extended by the output once the request has migrated.
        num_lost: Engines that died while they ran the request, or decode engines that did not
            answer.
        on_prompt: Called with each engine that is asked for the prompt.
        hands_over: Called when the decode engine drains or is silent. Returns whether the request
            stays there until another engine has accepted it.
        on_heir: Called with the events of the heir.
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
        """Start the decode leg; see `Leg`.

        An engine runs a request id once. If this engine prefilled the request before its role
        changed, its prefill leg is closed first; it may find the prompt in its prefix cache.
        """
        self._make_way(placement)
        self.decode = self._ask(placement, message)
        return self.decode

    def ask_heir(self, placement: Placement, message: AddRequest) -> None:
        """Start the leg that is to follow the decode leg, which continues; see `ask_to_decode`."""
        self._make_way(placement)
        self.heir = self._ask(placement, message)

    def adopt(self) -> Leg:
        """Make the heir the decode leg."""
        assert self.decode is None, "one decode leg at a time has the stream"
        assert self.heir is not None
        self.decode, self.heir = self.heir, None
        return self.decode

    def ask_to_prefill(
        self, placement: Placement, message: AddRequest, offer: Transfer | None
    ) -> Leg:
        """Start the prefill leg; see `Leg`."""
        self.prefill = self._ask(placement, message, offer)
        return self.prefill

    async def next_of(self, wanted: Leg) -> EngineEvent:
        """Return the next event of one leg; events of others are kept for later.

        Raises:
            DecodeLostError: The decode engine died, or did not answer in time.
            DecodeLeftError: It stalls, drains or is silent, and another one can take over.
            EngineDeadError: The wanted prefill engine died.
            EngineLateError: The wanted prefill engine did not answer in time.
            EngineStalledError: The wanted prefill engine stalls.
            ReservationEndedError: The decode engine dropped the request before its activation.
            ServingError: An engine gave the request up.
        """
        if wanted.early:
            return wanted.early.popleft()
        if wanted is self.prefill:
            # It may have stalled while the decode engine was waited for.
            self._check_away(wanted, wanted)
        while True:
            stream, event = await self._inbox.get()
            leg = self._leg_of(stream)
            if leg is None:
                continue  # The leg was dropped while the event was under way.
            self._judge(leg, event)
            leg.has_tokens |= isinstance(event, TokenOutput)
            if leg is self.heir:
                self._hear_heir(leg, event)
            elif isinstance(event, EngineDeadError | EngineLateError):
                self._lose(leg, wanted, event)
            elif isinstance(event, EngineStalledError | EngineLeavingError | EngineQuietError):
                self._check_away(leg, wanted)
            else:
                self._check_given_up(leg, wanted, event)
                if leg is wanted:
                    return event
                leg.keep(event)

    def check_lost(self, most: int) -> None:
        """Raise once this many engines were lost.

        Raises:
            ReplicaLostError: The next engine might die of the request, too.
        """
        if self.num_lost >= most:
            raise ReplicaLostError(
                f"{self.num_lost} replicas were lost while they ran the request; not trying more",
                retry_after_s=RETRY_AFTER_S,
            )

    def _hear_heir(self, heir: Leg, event: EngineEvent | News) -> None:
        """Handle an event of the heir.

        Raises:
            DecodeLeftError: The heir takes over.
        """
        if isinstance(event, EngineDeadError | EngineLateError):
            self._count_lost(heir.mode)
        if isinstance(event, Accepted):
            heir.answered()
        self.on_heir(event)

    async def answer_of(self, leg: Leg) -> Accepted | Refused:
        """Return an engine's answer to the question; see `next_of` for errors."""
        while True:
            event = await self.next_of(leg)
            if isinstance(event, Accepted | Refused):
                return event

    def _judge(self, leg: Leg, event: EngineEvent | Exception) -> None:
        """Report to the pools that an engine failed the request, drains, or gives tokens.

        A broken connection ends many requests at once; the fleet reports it instead. An engine that
        aborts a request without a token has neither failed nor shown that it works.
        """
        if isinstance(event, Refused) and event.reason == "draining":
            self._pools.drains(leg.incarnation, leg.epoch)
        if isinstance(event, TokenOutput):
            if event.finish_reason == "error":
                if _is_own_fault(event.error or ""):
                    self._pools.failed(leg.incarnation, asyncio.get_running_loop().time())
            elif not leg.has_tokens and (event.token_ids or event.finish_reason != "abort"):
                self._pools.succeeded(leg.incarnation)
        elif isinstance(event, EngineLateError) and leg.state is LegState.ASKED:
            self._pools.failed(leg.incarnation, asyncio.get_running_loop().time())

    def _check_given_up(self, leg: Leg, wanted: Leg, event: EngineEvent) -> None:
        """Raise at once if an engine gave the request up, on any leg that is waited for.

        Raises:
            ReservationEndedError: The engine dropped it before its activation.
            ServingError: It ended with an error.
        """
        if not isinstance(event, TokenOutput) or event.finish_reason is None:
            return
        if event.finish_reason == "error":
            if event.error == LAPSED:
                self._metrics.lapses.inc()
            is_waiting = leg is self.decode and wanted is self.prefill
            text = event.error or "the engine ended the request"
            raise _error(text, leg.sampling, is_waiting=is_waiting)
        if leg.is_reserved:
            # Nothing would read the prompt that is computed meanwhile.
            raise ReservationEndedError(event.finish_reason)

    def _lose(self, leg: Leg, wanted: Leg, error: EngineDeadError | EngineLateError) -> None:
        """Give up a leg whose engine died or did not answer in time.

        Lateness is ignored if the answer has arrived meanwhile.

        Raises:
            DecodeLostError: It is the decode leg.
            EngineDeadError: It is the prefill leg, and waited for.
            EngineLateError: Likewise.
        """
        is_late = isinstance(error, EngineLateError)
        if is_late and leg.has_answered:
            return
        self._count_lost(leg.mode)
        # A late prefill engine may just be slow; a dead one may have died of the request.
        self.num_lost += leg is self.decode or not is_late
        if leg is self.decode:
            raise DecodeLostError(str(error))
        if leg is wanted:
            raise error
        self.drop_prefill(abort=is_late)

    def _check_away(self, leg: Leg, wanted: Leg) -> None:
        """Leave the engine of a leg if it stalls or drains and there is something better.

        - A prefill leg is left only while it is waited for.
        - A decode leg stays while no other engine has room, and once `max_leaves` engines were
          left.
        - A stream whose engine drains or is silent continues there until a successor has accepted
          it.

        Raises:
            DecodeLeftError: It is the decode leg.
            EngineStalledError: It is the prefill leg.
        """
        stalled, error = leg.stream.stalled, leg.stream.away
        if error is None:
            # The stall is over, but the engine may be silent.
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
            # After its tokens the engine may still owe KV, which has deadlines of its own.
            self._metrics.stalled.labels("prefill").inc()
            raise stalled

    def _make_way(self, placement: Placement) -> None:
        """Close a prefill leg on the engine that is to decode, but keep the new hold there."""
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
        """Close the decode leg, if there is one; see `Leg.close`."""
        if self.decode is not None:
            self._stalls.forget(self.decode.stream)
            self.decode.close(abort=abort, reason=reason)
            self.decode = None

    def give_back(self, placement: Placement) -> None:
        """Release a hold at a place whose engine was not asked after all."""
        self._pools.end(self.demand.request_id, placement.incarnation)

    def drop_heir(self) -> None:
        """Close the heir, if there is one; see `Leg.close`."""
        if self.heir is not None:
            self.heir.close(abort=True)
            self.heir = None

    def drop_prefill(self, *, abort: bool) -> None:
        """Close the prefill leg, if there is one; see `Leg.close`."""
        if self.prefill is not None:
            self.prefill.close(abort=abort)
            self.prefill = None


def _is_own_fault(error: str) -> bool:
    """Return whether an engine that gave a request up is itself the cause."""
    is_of_request = error in {GRAMMARS_BUSY, LAPSED, NO_ALLOWED_TOKEN}
    return not is_of_request and not error.startswith((BAD_GRAMMAR, KV_TRANSFER_FAILED))


def _error(text: str, sampling: SamplingParams, *, is_waiting: bool) -> ServingError:
    """Return the client's error for a request that an engine gave up.

    Args:
        text: The engine's error.
        sampling: The request's parameters.
        is_waiting: Whether the leg is a reservation that had not been activated.
    """
    if text == NO_ALLOWED_TOKEN:
        return BadRequestError(text, param=_forbidding_field(sampling))
    if text.startswith(BAD_GRAMMAR):
        return BadRequestError(text, param="structured_outputs")
    if text == GRAMMARS_BUSY:
        return SaturatedError(text, retry_after_s=RETRY_AFTER_S)
    # The error of a lapsed reservation may arrive after its activation was sent.
    if is_waiting or text == LAPSED:
        return QueueTimeoutError(
            f"decoding did not start in time: {text}; retry later", retry_after_s=RETRY_AFTER_S
        )
    if text.startswith(KV_TRANSFER_FAILED):
        return KVTransferFailedError(f"{text}; retry", retry_after_s=RETRY_AFTER_S)
    return InternalError(text)


def _forbidding_field(sampling: SamplingParams) -> str | None:
    """Return the field that forbids every token; None if several could, and so share the blame."""
    fields = {
        "structured_outputs": sampling.structured_outputs,
        "allowed_token_ids": sampling.allowed_token_ids,
        "bad_words": sampling.bad_words_token_ids,
    }
    given = [name for name, value in fields.items() if value]
    return given[0] if len(given) == 1 else None
