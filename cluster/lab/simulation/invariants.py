"""Invariants of every run: after each event, when no message is on its way, and at the end.

Each core checks itself (`check_invariants`). This module checks what no core can know alone: that
views agree with the engines, that no resource is left over, and that every request ended once, with
an outcome that its faults explain.
"""

from __future__ import annotations

import bisect
import gc
from types import AsyncGeneratorType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from cluster.lab.simulation.monitors import ProtocolMonitor
from cluster.lab.simulation.options import PLAIN
from cluster.lab.simulation.records import ABORTED, INGRESS_LOST, NO_INGRESS, OK
from cluster.lab.simulation.waits import WaitMonitor
from cluster.routing.leg import LegState
from cluster.routing.placement import Placement
from cluster.routing.pools import DECODING, PREFILLING
from replicas.dealer import SILENCE_S
from replicas.faults import INGRESS
from replicas.generators.simulated.tokens import GREEDY, draw_salt, expected_tokens
from replicas.launch import HAND_OVER_SHARE
from replicas.life import LifeState
from replicas.messages import BlockStored

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from cluster.lab.simulation.client import VirtualLink
    from cluster.lab.simulation.clocks import WallClocks
    from cluster.lab.simulation.host import VirtualHost
    from cluster.lab.simulation.ingress import VirtualIngress
    from cluster.lab.simulation.loop import VirtualLoop
    from cluster.lab.simulation.monitors import LeaseMonitor
    from cluster.lab.simulation.network import Network
    from cluster.lab.simulation.options import PoolSpec, RequestVariant, SimulationOptions
    from cluster.lab.simulation.recorder import Recorder
    from cluster.lab.simulation.records import RequestRecord
    from cluster.lab.simulation.waits import WaitLimits
    from replicas.faults import Fault

_QUIET_S = 0.05
"""An engine that has been idle for this long has sent every client its latest snapshot."""
_ROUNDING_S = 1e-6
_SLOT_RELEASE_S = 1.0
"""Upper bound of the time until an engine releases a slot, at the end of its present step."""
_RECHECK_EVENTS = 16
"""Every so many events everything is checked, even if it has not been marked as changed."""
_MAX_EVENTS_AT_ONCE = 20_000
"""More events at one virtual time than this count as an endless loop."""

_CLOSING_FAULTS = frozenset({"hang", "backpressure", "replace", "flip"})
"""Faults during which a replica takes no new requests, although it is not lost."""

_TRANSFER_COUNTERS = (
    "num_inflight_sends", "num_inflight_loads",
    "num_leased_blocks", "num_reserved_blocks", "num_quarantined_blocks",
)  # fmt: skip
"""Transfer counters that are 0 for an engine without requests."""


class Invariants:
    """The checks of one run.

    Args:
        hosts: Every start of a replica; grows.
        longest: Limits of a request's waits.
        clocks: Decides whether a ticket may be refused as expired.
    """

    def __init__(
        self,
        network: Network,
        hosts: list[VirtualHost],
        recorder: Recorder,
        leases: LeaseMonitor,
        longest: WaitLimits,
        clocks: WallClocks,
    ) -> None:
        self._clocks = clocks
        self._loop: VirtualLoop = network.loop
        self._hosts = hosts
        self._recorder = recorder
        self._longest = longest
        self._monitors: dict[str, ProtocolMonitor] = {}
        self._ingresses: list[VirtualIngress] = []
        self._moment_s = float("-inf")
        self._num_at_once = 0
        # Change counters of hosts, pools and links at their last successful check.
        self._hosts_seen: dict[str, int] = {}
        self._pools_seen: dict[VirtualIngress, tuple[int, int]] = {}
        self._links_seen: WeakKeyDictionary[VirtualLink, tuple[int, ...]] = WeakKeyDictionary()
        network.kv_observer = leases
        self._loop.after_event = self._after_event

    def monitor(self, ingress: str) -> ProtocolMonitor:
        """Return the monitor of an ingress's messages, which passes them on to the recorder."""
        if ingress not in self._monitors:
            waits = WaitMonitor(self._loop, self._longest)
            self._monitors[ingress] = ProtocolMonitor(
                self._loop, self._recorder, waits, self._clocks
            )
        return self._monitors[ingress]

    def watch(self, ingress: VirtualIngress) -> None:
        """Check an ingress from now on."""
        self._ingresses.append(ingress)

    def forget(self, ingress: VirtualIngress) -> None:
        """Stop checking an ingress, which has died."""
        self._ingresses.remove(ingress)
        self._pools_seen.pop(ingress, None)
        self.monitor(ingress.name).died()

    # --- after every event ----------------------------------------------------------------------

    def _after_event(self) -> None:
        self._check_progress()
        is_in_host = False
        for host in self._hosts:
            if host.num_done != self._hosts_seen.get(host.incarnation):
                self._hosts_seen[host.incarnation] = host.num_done
                is_in_host = True
                host.check_invariants()
        if not is_in_host:
            for ingress in self._ingresses:
                self._check_pools(ingress)
        for ingress in self._ingresses:
            _check_misrouted(ingress, self.monitor(ingress.name))
        if self._loop.is_settled:
            self._check_settled()

    def _check_pools(self, ingress: VirtualIngress) -> None:
        """Check an ingress's cached views after each change, and now and then in any case."""
        pools = ingress.fleet.pools
        seen = pools.num_changes, self._num_events_seen
        if seen != self._pools_seen.get(ingress):
            self._pools_seen[ingress] = seen
            pools.check_invariants()

    @property
    def _num_events_seen(self) -> int:
        """A counter that changes every `_RECHECK_EVENTS` events, which forces new checks."""
        return self._loop.num_events // _RECHECK_EVENTS

    def _check_progress(self) -> None:
        now_s = self._loop.time()
        if now_s > self._moment_s:
            self._moment_s, self._num_at_once = now_s, 0
        self._num_at_once += 1
        assert self._num_at_once <= _MAX_EVENTS_AT_ONCE, (
            f"time stands still at {now_s!r} s: {_MAX_EVENTS_AT_ONCE} events in one instant"
        )

    def _check_settled(self) -> None:
        """Check what must hold once all callbacks of this instant have run."""
        now_s = self._loop.time()
        for ingress in self._ingresses:
            ingress.router.queue.check_invariants()
            if ingress.router.admission is not None:
                ingress.router.admission.admission.check_invariants()
            ingress.fleet.pools.breakers.check_invariants(now_s)
            ingress.router.stalls.check_invariants()
            _check_probes(ingress)
            _check_successors(ingress, self.monitor(ingress.name))
            self._check_migration(ingress)
            for link in ingress.fleet.client.links:
                believed = ingress.fleet.pools.snapshot(link.host.incarnation)
                assert believed is link.newest or believed == link.newest, (
                    f"{ingress.name} has snapshot {believed} of {link.host.incarnation}, whose "
                    f"latest is {link.newest}"
                )
                seen = (
                    link.host.num_done,
                    link.num_heard,
                    ingress.fleet.pools.num_changes,
                    self._num_events_seen,
                )
                if (
                    link.newest is not None
                    and self._links_seen.get(link) != seen
                    and link.is_quiet
                    and _is_idle(link.host, now_s)
                ):
                    _check_view(ingress, link)
                    self._links_seen[link] = seen

    def _check_migration(self, ingress: VirtualIngress) -> None:
        """Check that no request stays on a stalled decode engine while another one has room."""
        stalled = {link.host.incarnation for link in ingress.fleet.client.links if link.is_stalled}
        if not stalled:
            return
        num_left = self.monitor(ingress.name).num_left
        most_left = ingress.router.config.max_attempts - 1
        for part in ingress.router.parts():
            request_id = part.demand.request_id
            if part.mode == "prefill" or part.incarnation not in stalled:
                continue
            stays = num_left[request_id] >= most_left
            assert stays or not ingress.router.queue.has_room(part.demand), (
                f"{request_id} stays on {part.incarnation}, which stalls, although {ingress.name} "
                f"knows of room elsewhere: {ingress.fleet!r}"
            )

    # --- at the end -----------------------------------------------------------------------------

    def check_end(self) -> None:
        """Check that every resource is free and that every view is right.

        Raises:
            AssertionError: Something is left over; the message says where.
        """
        for host in self._hosts:
            if host.is_alive and not host.is_frozen:
                _check_empty(host, self._loop.time())
        for ingress in self._ingresses:
            ingress.fleet.pools.check_invariants()
            assert not ingress.router.queue, f"{ingress.name}: {ingress.router.queue}"
            router = ingress.router
            admission = None if router.admission is None else router.admission.admission
            for core in (router.conditional, router.moments, admission):
                if core is not None:
                    core.check_empty()
            assert not ingress.fleet.prefixes.num_counted, f"{ingress.name}: {ingress.fleet!r}"
            for host in self._hosts:
                if host.is_answering:
                    assert host.incarnation in ingress.fleet.client.incarnations, (
                        f"{ingress.name} lost {host!r}"
                    )
            for link in ingress.fleet.client.links:
                assert not len(link.table), f"{ingress.name} has open streams of {link.host!r}"
                if link.host.is_answering:
                    assert not link.num_lost, (
                        f"{link.num_lost} messages of {ingress.name} to {link.host!r} were lost"
                    )
                    _check_view(ingress, link)


def _check_probes(ingress: VirtualIngress) -> None:
    """Check that every circuit breaker's probe request is still under way on its replica."""
    probes = ingress.fleet.pools.breakers.probes
    if probes:
        asked = {(part.incarnation, part.demand.request_id) for part in ingress.router.parts()}
        lost = {*probes} - asked - {*ingress.fleet.pools.holds()}
        assert not lost, f"{ingress.name} waits for probes that are over: {lost}"


def _check_misrouted(ingress: VirtualIngress, monitor: ProtocolMonitor) -> None:
    """Check that no request goes to a repeatedly failing replica while another one works."""
    misrouted, monitor.failures.misrouted = monitor.failures.misrouted, []
    pools = ingress.fleet.pools
    for incarnation, mode in misrouted:
        roles = PREFILLING if mode == "prefill" else DECODING
        others = [
            i
            for i in (member.description.incarnation for member in pools.members())
            if pools.state(i) is LifeState.READY and pools.moves(i)
            and (snapshot := pools.snapshot(i)) is not None and snapshot.role in roles
            and not monitor.failures.has_failed(i) and i != incarnation
        ]  # fmt: skip
        assert not others, (
            f"{ingress.name} sends a request to {incarnation}, which failed repeatedly, instead of "
            f"to one of {others}"
        )


def _check_successors(ingress: VirtualIngress, monitor: ProtocolMonitor) -> None:
    """Check that requests with two decode engines may have two.

    They may while the second engine has not answered or fetches the KV, and after the first was
    silent: then the first engine to send a token continues the request.
    """
    for request_id, engines in monitor.decoding_twice.items():
        parts = [
            p for p in ingress.router.parts()
            if p.demand.request_id == request_id and p.mode != "prefill"
        ]  # fmt: skip
        known = {part.incarnation for part in parts}
        assert known == engines, (
            f"{request_id} is on {engines}, but {ingress.name} knows of {known}"
        )
        num_asked = sum(part.state == LegState.ASKED.value for part in parts)
        assert len(parts) == 2, f"{request_id} is on more than two engines: {parts}"
        is_lent, was_quiet = monitor.is_lent(request_id), monitor.was_quiet(request_id)
        assert num_asked == 1 or is_lent or was_quiet, f"{request_id} has two decode slots: {parts}"


def _is_idle(host: VirtualHost, now_s: float) -> bool:
    """Return whether an engine is idle and has had time to report it."""
    since_s = host.core.idle_since_s
    is_quiet = since_s is not None and now_s - since_s > _QUIET_S
    # Frames of an engine that is cut off are missing until its connections break. The death of an
    # engine is not known at once.
    return is_quiet and host.is_answering and host.inbox.is_empty


def _check_view(ingress: VirtualIngress, link: VirtualLink) -> None:
    """Check that an ingress's view of an idle engine is exact, without holds."""
    host, pools = link.host, ingress.fleet.pools
    snapshot = host.engine.snapshot()
    groups = snapshot.groups
    if snapshot.role == "prefill":
        num_active = snapshot.num_waiting + sum(g.num_running for g in groups)
        truth: list[tuple[object, ...]] = [(snapshot.num_waiting_tokens, num_active)]
        believed: list[tuple[object, ...]] = [
            (v.num_queued_tokens, v.num_active)
            for v in pools.prefill_views()
            if v.incarnation == host.incarnation
        ]
    else:
        truth = [
            (
                i,
                max(g.num_empty_slots - g.num_waiting, 0),
                g.num_free_blocks,
                g.num_running + g.num_reserved + g.num_waiting,
            )
            for i, g in enumerate(groups)
        ]
        believed = [
            (v.dp_group, v.num_empty_slots, v.num_free_blocks, v.num_active)
            for v in pools.decode_views()
            if v.incarnation == host.incarnation
        ]
    if snapshot.draining:
        truth = []
    if pools.breakers.state(host.incarnation) != "closed":
        believed = truth  # An engine with an open breaker is not always in the views.
    assert believed == truth, f"{ingress.name} believes {believed}, but {host!r} has {truth}"
    _check_prefixes(ingress, host)


def _check_prefixes(ingress: VirtualIngress, host: VirtualHost) -> None:
    """Check that an ingress knows exactly the cached blocks of an idle engine."""
    prefixes = ingress.fleet.prefixes
    prefixes.check_invariants()
    for listing in host.engine.listing():
        group = Placement(host.incarnation, listing.data_parallel_rank)
        for stored in listing.events:
            assert isinstance(stored, BlockStored)
            known, truth = prefixes.reported(group, stored.group_idx), set(stored.block_hashes)
            assert known == truth, (
                f"{ingress.name} believes in {len(known - truth)} blocks that {group} does not "
                f"have, and does not know {len(truth - known)} that it has"
            )


def _check_empty(host: VirtualHost, now_s: float) -> None:
    """Check that all of an engine's slots and blocks are free and that it has no transfer."""
    metrics = host.engine.metrics(now_s)
    for group in metrics.groups:
        assert group.num_empty_slots == group.num_slots, f"{host!r}: {group}"
        assert group.num_free_blocks == group.num_blocks, f"{host!r}: {group}"
    transfer = metrics.transfer
    assert not metrics.num_waiting, f"{host!r}: {metrics.num_waiting=}"
    for name in _TRANSFER_COUNTERS:
        assert not getattr(transfer, name), f"{host!r}: {transfer}"
    assert not host.num_open_transfers, f"{host!r}: {host.num_open_transfers=}"


# --- outcomes of requests -----------------------------------------------------------------------


class Expectations:
    """The outcomes that a request may have.

    Args:
        options: The options of the run, with its faults and aborts.
        pools: The pools of the run.
        longest: Limits of a request's waits.
    """

    def __init__(
        self, options: SimulationOptions, pools: Sequence[PoolSpec], longest: WaitLimits
    ) -> None:
        self._longest_s = longest.request_s
        self._most_queued = options.router.max_queued_requests
        admission = options.router.admission
        self._has_objective = admission is not None and admission.ttft_s is not None
        self._bounds_tokens = admission is not None and admission.max_queued_tokens is not None
        reservation_timeout_s = min(spec.engine.reservation_timeout_s for spec in pools)
        self._patience_s = min(options.router.queue_timeout_s, reservation_timeout_s)
        self._aborts = options.aborts
        self._variants = options.variants
        self._most_choices = min(spec.engine.slots_per_group for spec in pools)
        chances = [spec.chances for spec in pools]
        self._has_late_grammars = any(c.slow_grammar for c in chances)
        self._has_bad_grammars = self._has_late_grammars or any(c.bad_grammar for c in chances)
        self._has_failed_rows = any(c.failed_row for c in chances)
        faults = options.faults
        engines = [
            (faults.entries_for(f"{spec.role}/{rank}"), spec)
            for spec in pools
            for rank in range(spec.replicas)
        ]
        names = [f"{spec.role}/{rank}" for spec in pools for rank in range(spec.replicas)]
        paused_s = [[p.at_s for p in options.pauses if p.target == name] for name in names]
        # For each replica, when it may first have been lost; for each that started as a decoder,
        # when it may first have been lost or stopped taking requests.
        self._lost_s = [_first_loss_s(entries, spec) for entries, spec in engines]
        self._closed_s = [
            min([lost_s, *(f.at_s for f in entries if f.kind in _CLOSING_FAULTS), *pauses_s])
            for lost_s, (entries, spec), pauses_s in zip(
                self._lost_s, engines, paused_s, strict=True
            )
            if spec.role != "prefill"
        ]
        # Each fault costs a request at most one engine, and a request may lose `max_attempts`.
        self._max_attempts = options.router.max_attempts
        self._troubles_s = sorted(f.at_s for entries, _ in engines for f in entries)
        self._first_ingress_s = min(
            (f.at_s for f in faults.faults if f.kind == "kill" and f.target.startswith(INGRESS)),
            default=float("inf"),
        )

    def check(
        self,
        number: int,
        record: RequestRecord,
        records: Sequence[RequestRecord],
        *,
        has_room: bool,
    ) -> None:
        """Check that the faults of the run explain the outcome of request `number`.

        `records` are those of all requests; `has_room` is whether its prompt leaves room for
        output.

        Raises:
            AssertionError: They do not.
        """
        times_s = record.token_times_s
        heard_s = (times_s[0] if len(times_s) else record.finished_s) - record.arrival_s
        assert heard_s <= self._longest_s, f"{record.request_id} got nothing for {heard_s:.1f} s"
        lost = any(lost_s <= record.finished_s for lost_s in self._lost_s)
        closed = [closed_s <= record.finished_s for closed_s in self._closed_s]
        has_waited = record.finished_s - record.arrival_s >= self._patience_s - _ROUNDING_S
        num_troubles = bisect.bisect_right(self._troubles_s, record.finished_s)
        is_stranded = all(closed) or has_waited or num_troubles >= self._max_attempts
        # An ingress that has just started knows no engine yet.
        has_new_ingress = self._first_ingress_s <= record.finished_s
        variant = self._variants.get(number, PLAIN)
        has_grammar = variant.grammar is not None
        # After its first tokens the next engine may not be able to compile its grammar.
        has_bad_grammar = has_grammar and self._has_bad_grammars
        may = {
            OK: True,
            ABORTED: number in self._aborts,
            INGRESS_LOST: has_new_ingress,
            NO_INGRESS: has_new_ingress,
            "BadRequestError": not has_room
            or variant.num_choices > self._most_choices
            or has_bad_grammar
            or self._has_failed_rows,
            "InternalError": self._has_failed_rows,
            "QueueTimeoutError": has_waited,
            "SaturatedError": any(closed)
            or self._bounds_tokens
            or (has_grammar and self._has_late_grammars)
            or self._num_beside(record, records) > self._most_queued,
            "OverloadedError": self._has_objective,
            "NotReadyError": all(closed) or has_new_ingress,
            # With another engine available it would have migrated.
            "ReplicaLostError": lost and (is_stranded or has_bad_grammar),
        }
        assert may.get(record.outcome, False), (
            f"{record.request_id} ended with {record.outcome} after "
            f"{record.finished_s - record.arrival_s:.3f} s, and nothing that happened explains it"
        )

    @staticmethod
    def _num_beside(record: RequestRecord, records: Sequence[RequestRecord]) -> int:
        """Return how many other requests were under way, or had a slot, when it ended."""
        moment_s = record.finished_s
        return sum(r.arrival_s <= moment_s <= r.finished_s + _SLOT_RELEASE_S for r in records) - 1


def _first_loss_s(faults: Sequence[Fault], spec: PoolSpec) -> float:
    """Return when clients may first have given up a replica; infinity if never."""
    silences = [f for f in faults if f.kind in {"freeze", "partition", "mute"}]
    silent_s = sum(map(_length_s, silences))
    # Connections that lost messages break when messages pass again.
    losses_s = [f.at_s for f in faults if f.kind in {"kill", "partition", "mute", "deaf"}]
    handed_over_s = HAND_OVER_SHARE * spec.drain_timeout_s
    replaced = [f for f in faults if f.kind == "replace"]
    losses_s += [f.at_s + handed_over_s for f in replaced]
    # Messages before a full inbox are lost if the engine ends, as it does not know of them.
    backpressures = [f.window for f in faults if f.kind == "backpressure"]
    losses_s += [
        f.at_s
        for f in replaced
        if any(
            w.start_s <= f.at_s + spec.drain_timeout_s and f.at_s < w.end_s for w in backpressures
        )
    ]
    if silent_s >= SILENCE_S:
        losses_s.extend(f.at_s for f in silences)
    # An engine that hangs this long reports it; requests without a token then go elsewhere.
    losses_s += [f.at_s for f in faults if f.kind == "hang" and _length_s(f) >= SILENCE_S]
    stuck = [f for f in faults if f.kind in {"freeze", "hang"}]
    if sum(map(_length_s, stuck)) >= spec.step_timeout_s:
        losses_s.extend(f.at_s for f in stuck)
    return min(losses_s, default=float("inf"))


def _length_s(fault: Fault) -> float:
    return fault.window.end_s - fault.window.start_s


def check_tokens(  # noqa: PLR0913, PLR0917 - what the tokens depend on
    record: RequestRecord,
    outputs: Sequence[Sequence[int]],
    prompt: Sequence[int],
    room: int,
    vocabulary: tuple[int, Sequence[int]],
    variant: RequestVariant,
    seed: int,
    *,
    is_cut: bool = False,
) -> None:
    """Check that every token follows from its whole context, and that the number is right.

    Args:
        record: The request.
        outputs: Tokens of each choice.
        prompt: Its prompt.
        room: Tokens for which the prompt leaves room.
        vocabulary: Its size, and its end token ids.
        variant: What the request asks for.
        seed: Its seed; a choice draws with the seed plus its number.
        is_cut: Whether an engine has dropped a choice of it, as pauses may.

    Raises:
        AssertionError: A token is wrong, missing, or superfluous.
    """
    asked = min(record.num_output_tokens_asked, max(room, 0))
    assert sum(map(len, outputs)) == len(record.token_times_s), record
    size, eos_token_ids = vocabulary
    for choice, output in enumerate(outputs):
        name = f"{record.request_id}, choice {choice}"
        salt = draw_salt(seed + choice) if len(outputs) > 1 else GREEDY
        most = asked if variant.stop_token_ids else min(asked, len(output))
        right = expected_tokens(prompt, most, size, eos_token_ids, salt)
        stops = (i for i, t in enumerate(right, 1) if t in variant.stop_token_ids)
        end = next(stops, asked)
        assert len(output) <= end, f"{name}: {len(output)} tokens, asked for {end}"
        if record.outcome == OK and not is_cut:
            is_stopped = choice == variant.stopped_choice
            least = min(end, variant.stop_at or end) if is_stopped else end
            assert len(output) >= least, f"{name}: {len(output)} tokens of {least}"
        wrong = next((i for i, t in enumerate(output) if t != right[i]), None)
        assert wrong is None, (
            f"{name}: output token {wrong} is {output[wrong or 0]} and should be "
            f"{right[wrong or 0]}: it was computed from a wrong context "
            f"({len(prompt)} prompt tokens, {record.num_cached_tokens} cached, "
            f"prefill {record.prefill_replica}, decode {record.replica})"
        )
    times_s = record.token_times_s
    assert all(times_s[1:] >= times_s[:-1]), f"{record.request_id}: tokens out of order"
    assert not len(times_s) or times_s[0] >= record.arrival_s, f"{record.request_id}: too early"


def describe_wait(task: asyncio.Task[None]) -> str:
    """Return the coroutines in which a task waits, the outermost first."""
    names: list[str] = []
    awaited: object = task.get_coro()
    while awaited is not None:
        name = getattr(awaited, "__qualname__", None)
        if name is not None:
            names.append(name)
        awaited = _awaited_by(awaited)
    return " > ".join(names) or "nothing"


def _awaited_by(waiting: object) -> object:
    for field in ("cr_await", "ag_await"):
        awaited = getattr(waiting, field, None)
        if awaited is not None:
            return awaited
    # The awaitable of an async generator's step has no reference to its generator's frame.
    return next((x for x in gc.get_referents(waiting) if isinstance(x, AsyncGeneratorType)), None)
