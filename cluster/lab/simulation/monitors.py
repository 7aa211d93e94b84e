"""Monitors of the messages between processes: they check the protocol, not its implementation.

They keep their own state and see messages only, so an error of a core cannot mislead them.
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
"""Resolution of a lease's time in messages."""

_EXPIRED = "has expired"
"""Part of the message of a refusal because of a ticket's age; see `KeyRing.unseal`."""
_STALL_NOTICE_S = 1.0
"""Seconds within which an ingress learns from heartbeats that an engine hangs."""
_ALWAYS_VALID_S = float("-inf")
"""A time at which no ticket has expired: the producer checks the age with its own clock."""


@dataclass(slots=True)
class _SentRequest:
    """A request that was sent to an engine and has not ended there.

    `choices` are those that the engine has neither ended nor been asked to drop.
    """

    host: VirtualHost
    mode: RequestMode
    choices: set[int]
    is_answered: bool = False
    epoch: int = -1
    is_activated: bool = False
    was_quiet: bool = False

    @property
    def decodes(self) -> bool:
        """Whether the request has a decode slot there, or waits for one."""
        return self.mode != "prefill"


class ProtocolMonitor:
    """Checks the messages between one ingress and the engines, and passes them on.

    - A request is on an engine at most once, and is not sent to an engine that hangs.
    - The epochs of its tickets rise, and it is activated once on an engine.
    - When it ends at the ingress, every engine has finished all of its choices or was sent an
      abort.
    - A new ticket is not refused as expired, unless clocks are wrong.
    - A second engine is asked to decode it only while the first hands over, or after the first was
      silent. While the first hands over, the second may fetch its KV, and starts after the first
      was aborted. After a silence, the first engine to send a token continues the request.

    Attributes:
        failures: Failures of engines.
        num_left: How many stalled decode engines each request has left.
    """

    def __init__(
        self, loop: VirtualLoop, recorder: Recorder, waits: WaitMonitor, clocks: WallClocks
    ) -> None:
        self._loop = loop
        self._recorder = recorder
        self._waits = waits
        self._clocks = clocks
        self._asked: dict[str, dict[str, _SentRequest]] = {}
        # When each engine was first sent a request: a refusal may answer that first attempt.
        self._first_asked_s: dict[str, dict[str, float]] = {}
        # By engine and request, the number of aborted attempts that it has not answered yet. It
        # answers in order.
        self._unanswered: Counter[tuple[str, str]] = Counter()
        # When engines last gave requests up, by an error or in a pause. The router may be about to
        # read that.
        self._given_up_s: dict[tuple[str, str], float] = {}
        # Engines that hand over, according to the snapshots of this ingress.
        self._leaving: set[str] = set()
        # For each request whose KV is lent, the epoch of that transfer.
        self._lent: dict[str, int] = {}
        self.failures = FailureTracker(loop)
        self.num_left: Counter[str] = Counter()

    @property
    def decoding_twice(self) -> dict[str, set[str]]:
        """The engines of each request that several engines were asked to decode."""
        several = [request_id for request_id, asked in self._asked.items() if len(asked) > 1]
        engines = {request_id: self._decoding(request_id) for request_id in several}
        return {request_id: those for request_id, those in engines.items() if len(those) > 1}

    def was_quiet(self, request_id: str) -> bool:
        """Return whether an engine that decodes a request has been silent since it was asked."""
        return self._heard_decoding(request_id) != self._decoding(request_id)

    def is_lent(self, request_id: str) -> bool:
        """Return whether one engine lends its KV of a request to another."""
        return request_id in self._lent

    def sent(self, host: VirtualHost, message: ClientMessage, *, is_stalled: bool) -> None:
        """See `Recorder.sent`."""
        self._recorder.sent(host, message, is_stalled=is_stalled)
        self._waits.sent(host, message)
        if isinstance(message, LendKV | LoadKV | Activate) and self._is_given_up(host, message):
            return
        match message:
            case AddRequest():
                self._sent_request(host, message)
            case LendKV():
                decoding = self._asked.get(message.request_id, {}).get(host.incarnation)
                assert decoding is not None, f"{host!r} does not have the request: {message}"
                assert decoding.decodes, f"{host!r} has the request for prefill only: {message}"
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
                assert not others, f"{message.request_id} continues on {host!r} and on {others}"
            case Abort():
                for request_id in message.request_ids:
                    self._sent_abort(host, request_id, message, is_stalled=is_stalled)
            case _:
                pass

    def _sent_request(self, host: VirtualHost, message: AddRequest) -> None:
        request_id = message.request.request_id
        asked = self._asked.setdefault(request_id, {})
        assert host.incarnation not in asked, f"{request_id} was sent to {host.incarnation} twice"
        assert host.core.stuck_s <= _STALL_NOTICE_S, (
            f"{request_id} was sent to {host!r}, which hangs"
        )
        self._check_successor(message, asked)
        self.failures.sent(host.incarnation, message.mode)
        choices = set(range(message.request.sampling.n))
        asked[host.incarnation] = _SentRequest(host, message.mode, choices)
        first_asked_s = self._first_asked_s.setdefault(request_id, {})
        first_asked_s.setdefault(host.incarnation, self._loop.time())

    def _sent_abort(
        self, host: VirtualHost, request_id: str, message: Abort, *, is_stalled: bool
    ) -> None:
        for choice in message.choices:
            self._end_choice(host, request_id, choice)
        if message.choices:
            return
        asked = self._asked.get(request_id, {}).get(host.incarnation)
        if asked is not None and asked.decodes and is_stalled:
            self.num_left[request_id] += 1
        if asked is not None and not asked.is_answered:
            self._unanswered[host.incarnation, request_id] += 1
        self._end(host, request_id)

    def arrived(self, host: VirtualHost, event: EngineEvent) -> None:
        """Check an event that has arrived at the ingress."""
        self._recorder.arrived(host, event)
        if self._is_of_aborted_attempt(host, event):
            return
        self._waits.arrived(host, event)
        if isinstance(event, KVLoaded) and self._lent.get(event.request_id) == event.epoch:
            del self._lent[event.request_id]
        if isinstance(event, Refused) and _EXPIRED in event.message:
            self._check_age(host, event)
        if isinstance(event, TokenOutput):
            self._output_arrived(host, event)
        elif isinstance(event, Refused):
            self._end(host, event.request_id)
        elif isinstance(event, KVLoaded) and event.failure is None:
            # The consumer has the KV: the prefill engine releases its own without a message.
            asked = self._asked.get(event.request_id, {})
            for incarnation in [i for i, a in asked.items() if a.mode == "prefill"]:
                del asked[incarnation]

    def _output_arrived(self, host: VirtualHost, output: TokenOutput) -> None:
        if output.token_ids and self._is_asked(host, output):
            self.failures.succeeded(host.incarnation)
        if output.finish_reason in {"error", "abort"}:
            self._given_up_s[host.incarnation, output.request_id] = self._loop.time()
        if output.finish_reason == "error":
            # An error ends all choices.
            self._end(host, output.request_id)
        elif output.finish_reason is not None:
            self._end_choice(host, output.request_id, output.choice)

    def snapshot_received(self, host: VirtualHost, snapshot: EngineSnapshot) -> None:
        """Record a snapshot that is newer than all before it."""
        if snapshot.hands_over:
            self._leaving.add(host.incarnation)
        else:
            self._leaving.discard(host.incarnation)

    def became_unresponsive(self, host: VirtualHost) -> None:
        """Record that an engine has sent nothing for `QUIET_S`."""
        self._recorder.became_unresponsive(host)
        for asked in self._asked.values():
            if host.incarnation in asked:
                asked[host.incarnation].was_quiet = True

    def lost(self, incarnation: str) -> None:
        """Record that the connection to an engine is gone; the engine will notice, too."""
        self._waits.lost(incarnation)
        for request_id in [i for i in self._lent if incarnation in self._asked.get(i, ())]:
            del self._lent[request_id]
        self.failures.failed(incarnation)
        for owed in [owed for owed in self._unanswered if owed[0] == incarnation]:
            del self._unanswered[owed]
        for asked in self._asked.values():
            asked.pop(incarnation, None)

    def died(self) -> None:
        """Record that the ingress died; engines will notice."""
        self._waits.died()
        self._asked.clear()
        self._unanswered.clear()
        self._lent.clear()
        self._first_asked_s.clear()

    def began(self, request_id: str) -> None:
        """Record that a request arrived at the ingress."""
        self._waits.began(request_id)

    def ended(self, request_id: str) -> None:
        """Check that no engine continues a request that has ended at the ingress.

        Raises:
            AssertionError: An engine was not aborted.
        """
        self._waits.ended(request_id)
        self._lent.pop(request_id, None)
        asked = self._asked.pop(request_id, {})
        self._first_asked_s.pop(request_id, None)
        left = {a.host.incarnation: a.mode for a in asked.values()}
        assert not left, f"{request_id} has ended, but these engines were not aborted: {left}"

    def describe_wait(self, request_id: str) -> str:
        """Describe which engines have a request, for an error message."""
        asked = self._asked.get(request_id, {})
        return ", ".join(f"{a.mode} on {a.host!r}" for a in asked.values()) or "no engine"

    def _is_of_aborted_attempt(self, host: VirtualHost, event: EngineEvent) -> bool:
        """Return whether an event answers an earlier, aborted attempt of the request there.

        The request may have been sent to the engine again before the engine read the abort.
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
        """Check that a second decode engine is asked only if the first hands over or is silent."""
        others = [a for a in asked.values() if a.decodes]
        if message.mode != "prefill" and others:
            first = others[0]
            sent_on = f"{message.request.request_id} was sent to another engine while on {others}"
            assert len(others) == 1, sent_on
            assert first.was_quiet or first.host.incarnation in self._leaving, sent_on

    def _decoding(self, request_id: str) -> set[str]:
        return {i for i, a in self._asked.get(request_id, {}).items() if a.decodes}

    def _heard_decoding(self, request_id: str) -> set[str]:
        decoding = self._asked.get(request_id, {})
        return {i for i, a in decoding.items() if a.decodes and not a.was_quiet}

    def _check_age(self, host: VirtualHost, refused: Refused) -> None:
        """Check that a ticket refused as expired may have expired, by its age or by the clocks."""
        asked_s = self._first_asked_s.get(refused.request_id, {}).get(host.incarnation)
        assert asked_s is None or self._clocks.may_expire(asked_s, self._loop.time()), (
            f"{host!r} refuses a ticket of {asked_s:.6f} s as expired: {refused.message}"
        )

    def _is_asked(self, host: VirtualHost, event: TokenOutput) -> bool:
        """Return whether the request is on the engine; events of aborted requests are ignored."""
        return host.incarnation in self._asked.get(event.request_id, ())

    def _reserved(self, host: VirtualHost, request_id: str) -> _SentRequest:
        asked = self._asked.get(request_id, {}).get(host.incarnation)
        assert asked is not None, f"{host.incarnation} has no {request_id}"
        assert asked.mode == "decode", f"{request_id} on {host.incarnation}: {asked.mode}"
        return asked

    def _is_given_up(self, host: VirtualHost, message: LendKV | LoadKV | Activate) -> bool:
        """Return whether the news that an engine gave the request up arrived at this instant."""
        given_up_s = self._given_up_s.get((host.incarnation, message.request_id))
        return given_up_s == self._loop.time()

    def _end_choice(self, host: VirtualHost, request_id: str, choice: int) -> None:
        """Record that an engine has ended a choice, or was asked to drop it; it may be the last."""
        asked = self._asked.get(request_id, {}).get(host.incarnation)
        if asked is not None:
            asked.choices.discard(choice)
            if not asked.choices:
                self._end(host, request_id)

    def _end(self, host: VirtualHost, request_id: str) -> None:
        self._lent.pop(request_id, None)
        self._asked.get(request_id, {}).pop(host.incarnation, None)


class LeaseMonitor:
    """Checks that KV is sent only to a ticket's consumer, within `lease_s` of its last message."""

    def __init__(self, loop: VirtualLoop, lease_s: float, keys: KeyRing) -> None:
        self._loop = loop
        self._lease_s = lease_s
        self._keys = keys
        # By producer, transfer and consumer, the end of the lease; None before it begins.
        self._end_s: dict[tuple[str, bytes, bytes], float | None] = {}

    def kv_sent(self, host: KVHost, peer: bytes, message: ToConsumer) -> None:
        """Check a message from a producer to a consumer."""
        key = (host.incarnation, message.transfer_id, peer)
        now_s = self._loop.time()
        end_s = self._end_s.get(key)
        if isinstance(message, LeaseInfo):
            is_first = key in self._end_s and end_s is None
            if is_first and message.state is LeaseState.SERVING:
                self._end_s[key] = now_s + message.left_ms / 1000 + _MILLISECOND_S
        elif isinstance(message, Data):
            assert key in self._end_s, f"{host.incarnation} sends KV to {peer!r} without a ticket"
            assert end_s is not None, f"{host.incarnation} sends KV that was not fetched"
            assert now_s <= end_s, (
                f"{host.incarnation} sends KV at {now_s:.6f} s, but the lease ended at {end_s:.6f}"
            )

    def kv_arrived(self, host: KVHost, peer: bytes, message: ToProducer) -> None:
        """Record a consumer's message that arrived at a producer."""
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
