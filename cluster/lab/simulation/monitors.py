"""Watchers of what passes between processes: they know the promises, not how they are kept.

Owner of their own small books, one run long. They see messages only, so that a core that breaks a
promise cannot talk them out of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.lab.simulation.failures import FailureTracker
from kv_transfer.lease import LeaseState
from kv_transfer.messages import Credit, Data, Fetch, LeaseInfo, Renew
from replicas.messages import (
    Abort,
    Accepted,
    Activate,
    AddRequest,
    KVLoaded,
    LendKV,
    LoadKV,
    NotGreeted,
    Refused,
    TokenOutput,
    UtilityResult,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.lab.simulation.clocks import WallClocks
    from cluster.lab.simulation.host import VirtualHost
    from cluster.lab.simulation.loop import VirtualLoop
    from cluster.lab.simulation.network import KVHost
    from cluster.lab.simulation.recorder import Recorder
    from cluster.lab.simulation.waits import WaitMonitor
    from kv_transfer.keys import KeyRing
    from kv_transfer.messages import ToConsumer, ToProducer
    from replicas.messages import ClientMessage, EngineEvent, EngineSnapshot, RequestMode

_MILLISECOND_S = 0.001
"""Leases are told in whole milliseconds."""

_EXPIRED = "has expired"
"""What a refusal for the age of a ticket says; see `KeyRing.unseal`."""
_STALL_NOTICE_S = 1.0
"""Within this time an ingress knows that an engine hangs: heartbeats say it."""
_ALWAYS_VALID_S = float("-inf")
"""A clock at which no ticket is too old: that is for the producer's own to say."""


@dataclass(slots=True)
class _SentRequest:
    """A request that an engine was asked to run and has not ended."""

    host: VirtualHost
    mode: RequestMode
    is_answered: bool = False
    epoch: int = -1
    is_activated: bool = False
    was_quiet: bool = False

    @property
    def decodes(self) -> bool:
        """Whether the request has, or gets, a decode slot there."""
        return self.mode != "prefill"


class ProtocolMonitor:
    """What one ingress and the engines say to each other; it passes everything on.

    A request is on an engine once, is not sent to one that hangs, its tickets have rising epochs,
    it is activated once, and when it ends at the ingress no engine goes on with it: each has said
    its last word or was told. A new ticket is too old for nobody whose clock is right. A second
    engine is asked to decode it only while the first one hands over, may fetch its KV meanwhile,
    and starts once that one was told to stop; or after the first one was quiet, and then whoever
    speaks first is heard.

    Attributes:
        failures: What engines have failed to do.
        num_left: How many decode engines each request has left that said that they stall.
    """

    def __init__(
        self, loop: VirtualLoop, recorder: Recorder, waits: WaitMonitor, clocks: WallClocks
    ) -> None:
        self._loop = loop
        self._recorder = recorder
        self._waits = waits
        self._clocks = clocks
        self._asked: dict[str, dict[str, _SentRequest]] = {}
        # When each engine was first asked for a request: what it refuses may be that.
        self._first_asked_s: dict[str, dict[str, float]] = {}
        # By engine and request, how many were stopped that it is yet to answer: in order.
        self._unanswered: Counter[tuple[str, str]] = Counter()
        # Engines that hand over, as far as this ingress has heard.
        self._leaving: set[str] = set()
        # For each request whose KV is lent, the number of that transfer.
        self._lent: dict[str, int] = {}
        self.failures = FailureTracker(loop)
        self.num_left: Counter[str] = Counter()

    @property
    def decoding_twice(self) -> dict[str, set[str]]:
        """Requests that two engines were asked to decode, and these."""
        several = [request_id for request_id, asked in self._asked.items() if len(asked) > 1]
        engines = {request_id: self._decoding(request_id) for request_id in several}
        return {request_id: those for request_id, those in engines.items() if len(those) > 1}

    def was_quiet(self, request_id: str) -> bool:
        """Whether an engine that was asked to decode a request has been quiet since then."""
        return self._heard_decoding(request_id) != self._decoding(request_id)

    def is_lent(self, request_id: str) -> bool:
        """Whether one engine lends another one what it has of a request."""
        return request_id in self._lent

    def sent(self, host: VirtualHost, message: ClientMessage, *, is_stalled: bool) -> None:
        """See `Recorder.sent`."""
        self._recorder.sent(host, message, is_stalled=is_stalled)
        self._waits.sent(host, message)
        match message:
            case AddRequest():
                asked = self._asked.setdefault(message.request.request_id, {})
                assert host.incarnation not in asked, (
                    f"{message.request.request_id} was sent to {host.incarnation} twice"
                )
                assert host.core.stuck_s <= _STALL_NOTICE_S, (
                    f"{message.request.request_id} was sent to {host!r}, which hangs"
                )
                self._check_successor(message, asked)
                self.failures.sent(host.incarnation, message.mode)
                asked[host.incarnation] = _SentRequest(host, message.mode)
                first_asked_s = self._first_asked_s.setdefault(message.request.request_id, {})
                first_asked_s.setdefault(host.incarnation, self._loop.time())
            case LendKV():
                decoding = self._asked.get(message.request_id, {}).get(host.incarnation)
                assert decoding is not None, f"{host!r} has nothing: {message}"
                assert decoding.decodes, f"{host!r} has a prompt only: {message}"
                assert host.incarnation in self._leaving, f"{host!r} does not hand over: {message}"
                self._lent[message.request_id] = message.epoch
            case LoadKV():
                reserved = self._reserved(host, message.request_id)
                assert message.epoch > reserved.epoch, f"an old ticket: {message}"
                reserved.epoch = message.epoch
            case Activate():
                reserved = self._reserved(host, message.request_id)
                assert not reserved.is_activated, (
                    f"{message.request_id} was activated on {host.incarnation} twice"
                )
                reserved.is_activated = True
                others = self._heard_decoding(message.request_id) - {host.incarnation}
                assert not others, f"{message.request_id} goes on on {host!r} and on {others}"
            case Abort():
                for request_id in message.request_ids:
                    asked_here = self._asked.get(request_id, {}).get(host.incarnation)
                    if asked_here is not None and asked_here.decodes and is_stalled:
                        self.num_left[request_id] += 1
                    if asked_here is not None and not asked_here.is_answered:
                        self._unanswered[host.incarnation, request_id] += 1
                    self._end(host, request_id)
            case _:
                pass

    def arrived(self, host: VirtualHost, event: EngineEvent) -> None:
        """An event has arrived."""
        self._recorder.arrived(host, event)
        if self._is_of_aborted_attempt(host, event):
            return
        self._waits.arrived(host, event)
        if isinstance(event, KVLoaded) and self._lent.get(event.request_id) == event.epoch:
            del self._lent[event.request_id]
        if isinstance(event, Refused) and _EXPIRED in event.message:
            self._check_age(host, event)
        if isinstance(event, TokenOutput) and event.token_ids and self._is_asked(host, event):
            self.failures.succeeded(host.incarnation)
        if isinstance(event, Refused) or (isinstance(event, TokenOutput) and event.finish_reason):
            self._end(host, event.request_id)
        elif isinstance(event, KVLoaded) and event.failure is None:
            # The copy is there: whoever computed it lets go by itself.
            asked = self._asked.get(event.request_id, {})
            for incarnation in [i for i, a in asked.items() if a.mode == "prefill"]:
                del asked[incarnation]

    def snapshot_received(self, host: VirtualHost, snapshot: EngineSnapshot) -> None:
        """A snapshot has arrived that is newer than all before it."""
        if snapshot.hands_over:
            self._leaving.add(host.incarnation)
        else:
            self._leaving.discard(host.incarnation)

    def became_unresponsive(self, host: VirtualHost) -> None:
        """Nothing was heard of an engine for a while."""
        self._recorder.became_unresponsive(host)
        for asked in self._asked.values():
            if host.incarnation in asked:
                asked[host.incarnation].was_quiet = True

    def lost(self, incarnation: str) -> None:
        """The connection to an engine is gone; the engine will notice."""
        self._waits.lost(incarnation)
        for request_id in [i for i in self._lent if incarnation in self._asked.get(i, ())]:
            del self._lent[request_id]
        self.failures.failed(incarnation)
        for owed in [owed for owed in self._unanswered if owed[0] == incarnation]:
            del self._unanswered[owed]
        for asked in self._asked.values():
            asked.pop(incarnation, None)

    def died(self) -> None:
        """The ingress is gone; engines will notice."""
        self._waits.died()
        self._asked.clear()
        self._unanswered.clear()
        self._lent.clear()
        self._first_asked_s.clear()

    def began(self, request_id: str) -> None:
        """A request has come to the ingress."""
        self._waits.began(request_id)

    def ended(self, request_id: str) -> None:
        """A request has ended at the ingress.

        Raises:
            AssertionError: An engine goes on with it.
        """
        self._waits.ended(request_id)
        self._lent.pop(request_id, None)
        asked = self._asked.pop(request_id, {})
        self._first_asked_s.pop(request_id, None)
        left = {a.host.incarnation: a.mode for a in asked.values()}
        assert not left, f"{request_id} has ended, but nobody told these engines: {left}"

    def describe_wait(self, request_id: str) -> str:
        """Which engines have a request, for a person."""
        asked = self._asked.get(request_id, {})
        return ", ".join(f"{a.mode} on {a.host!r}" for a in asked.values()) or "no engine"

    def _is_of_aborted_attempt(self, host: VirtualHost, event: EngineEvent) -> bool:
        """Whether an event is of what this engine was asked of the same request and told to stop.

        The request may have come back to it before it had read any of that.
        """
        if isinstance(event, UtilityResult | NotGreeted):
            return False
        asked = self._asked.get(event.request_id, {}).get(host.incarnation)
        if not isinstance(event, Accepted | Refused):
            return asked is not None and not asked.is_answered
        owed = host.incarnation, event.request_id
        if self._unanswered[owed]:
            self._unanswered -= Counter([owed])
            return True
        if asked is not None:
            asked.is_answered = True
        return False

    def _check_successor(self, message: AddRequest, asked: Mapping[str, _SentRequest]) -> None:
        """Who is asked while another engine decodes follows on one that hands over or is quiet."""
        others = [a for a in asked.values() if a.decodes]
        if message.mode != "prefill" and others:
            first = others[0]
            sent_on = f"{message.request.request_id} was sent on while it is on {others}"
            assert len(others) == 1, sent_on
            assert first.was_quiet or first.host.incarnation in self._leaving, sent_on

    def _decoding(self, request_id: str) -> set[str]:
        return {i for i, a in self._asked.get(request_id, {}).items() if a.decodes}

    def _heard_decoding(self, request_id: str) -> set[str]:
        decoding = self._asked.get(request_id, {})
        return {i for i, a in decoding.items() if a.decodes and not a.was_quiet}

    def _check_age(self, host: VirtualHost, refused: Refused) -> None:
        """A ticket was refused for its age: the clocks, or the time that it took, allow that."""
        asked_s = self._first_asked_s.get(refused.request_id, {}).get(host.incarnation)
        assert asked_s is None or self._clocks.may_expire(asked_s, self._loop.time()), (
            f"{host!r} takes a ticket of {asked_s:.6f} s for too old: {refused.message}"
        )

    def _is_asked(self, host: VirtualHost, event: TokenOutput) -> bool:
        """Whether anybody hears an event: what comes for an aborted request, nobody does."""
        return host.incarnation in self._asked.get(event.request_id, ())

    def _reserved(self, host: VirtualHost, request_id: str) -> _SentRequest:
        asked = self._asked.get(request_id, {}).get(host.incarnation)
        assert asked is not None, f"{host.incarnation} has no {request_id}"
        assert asked.mode == "decode", f"{request_id} on {host.incarnation}: {asked.mode}"
        return asked

    def _end(self, host: VirtualHost, request_id: str) -> None:
        self._lent.pop(request_id, None)
        self._asked.get(request_id, {}).pop(host.incarnation, None)


class LeaseMonitor:
    """What producers send: KV goes to whom a ticket names, within `lease_s` of its sign of life."""

    def __init__(self, loop: VirtualLoop, lease_s: float, keys: KeyRing) -> None:
        self._loop = loop
        self._lease_s = lease_s
        self._keys = keys
        # By producer, transfer and consumer: when the lease ends; None before it begins.
        self._end_s: dict[tuple[str, bytes, bytes], float | None] = {}

    def kv_sent(self, host: KVHost, peer: bytes, message: ToConsumer) -> None:
        """A producer sends a consumer a message."""
        key = (host.incarnation, message.transfer_id, peer)
        now_s = self._loop.time()
        end_s = self._end_s.get(key)
        if isinstance(message, LeaseInfo):
            is_first = key in self._end_s and end_s is None
            if is_first and message.state is LeaseState.SERVING:
                self._end_s[key] = now_s + message.left_ms / 1000 + _MILLISECOND_S
        elif isinstance(message, Data):
            assert key in self._end_s, f"{host.incarnation} sends KV to {peer!r} without a ticket"
            assert end_s is not None, f"{host.incarnation} sends KV that nobody has fetched"
            assert now_s <= end_s, (
                f"{host.incarnation} sends KV at {now_s:.6f} s, and the lease ended at {end_s:.6f}"
            )

    def kv_arrived(self, host: KVHost, peer: bytes, message: ToProducer) -> None:
        """A message of a consumer reaches a producer."""
        key = (host.incarnation, message.transfer_id, peer)
        now_s = self._loop.time()
        if isinstance(message, Fetch) and self._is_good(host, peer, message):
            self._end_s.setdefault(key, None)
        if isinstance(message, Fetch | Credit | Renew):
            end_s = self._end_s.get(key)
            if end_s is not None and now_s < end_s:
                self._end_s[key] = max(end_s, now_s + self._lease_s)

    def _is_good(self, host: KVHost, peer: bytes, fetch: Fetch) -> bool:
        ticket = self._keys.unseal(fetch.ticket, _ALWAYS_VALID_S)
        return (ticket.transfer_id, ticket.producer_incarnation, ticket.consumer.encode()) == (
            fetch.transfer_id,
            host.incarnation,
            peer,
        )
