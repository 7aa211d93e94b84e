"""What must hold in every run: after each event, when nothing is on its way, and at the end.

Owner of nothing but what the monitors have seen. Cores check themselves (`check_invariants`); here
is what no core can know alone: that two of them believe the same, that nothing is left over, and
that every request ended once, in a way that what happened to it allows.
"""

from __future__ import annotations

import bisect
import gc
from types import AsyncGeneratorType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from cluster.lab.simulation.monitors import ProtocolMonitor
from cluster.lab.simulation.records import ABORTED, INGRESS_LOST, NO_INGRESS, OK
from cluster.lab.simulation.waits import WaitMonitor
from cluster.routing.leg import LegState
from cluster.routing.placement import Placement
from cluster.routing.pools import DECODING, PREFILLING
from replicas.dealer import SILENCE_S
from replicas.faults import INGRESS
from replicas.generators.simulated.tokens import expected_tokens
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
    from cluster.lab.simulation.options import PoolSpec, SimulationOptions
    from cluster.lab.simulation.recorder import Recorder
    from cluster.lab.simulation.records import RequestRecord
    from cluster.lab.simulation.waits import WaitLimits
    from replicas.faults import Fault

_QUIET_S = 0.05
"""An engine that has had nothing to do for so long has told every client what it has left."""
_ROUNDING_S = 1e-6
_SLOT_RELEASE_S = 1.0
"""An engine gives a slot back, and says so, once it has ended the step that it is in."""
_RECHECK_EVENTS = 16
"""Within so many events everything is looked at, though nobody says that it has changed."""
_MAX_EVENTS_AT_ONCE = 20_000
"""So many events at one virtual time are a loop that never ends."""

_CLOSING_FAULTS = frozenset({"hang", "backpressure", "replace", "flip"})
"""What lets a replica take nothing new, though it is not lost."""

_TRANSFER_COUNTERS = (
    "num_inflight_sends", "num_inflight_loads",
    "num_leased_blocks", "num_reserved_blocks", "num_quarantined_blocks",
)  # fmt: skip
"""What an engine without requests has none of in its transfers."""


class Invariants:
    """The checks of one run; see the module docstring.

    Args:
        hosts: Every start of a replica; grows.
        longest: How long a request waits at most.
        clocks: Whether a ticket may be too old.
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
        # What there was of hosts, pools and links when they were last found to be right.
        self._hosts_seen: dict[str, int] = {}
        self._pools_seen: dict[VirtualIngress, tuple[int, int]] = {}
        self._links_seen: WeakKeyDictionary[VirtualLink, tuple[int, ...]] = WeakKeyDictionary()
        network.kv_observer = leases
        self._loop.after_event = self._after_event

    def monitor(self, ingress: str) -> ProtocolMonitor:
        """The watcher of what an ingress says; it also tells the recorder."""
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
        """An ingress has died: there is nothing to check of it any more."""
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
        """Kept views are right: whenever they should have changed, and now and then besides."""
        pools = ingress.fleet.pools
        seen = pools.num_changes, self._num_events_seen
        if seen != self._pools_seen.get(ingress):
            self._pools_seen[ingress] = seen
            pools.check_invariants()

    @property
    def _num_events_seen(self) -> int:
        """Changes now and then: whatever has been seen is looked at again."""
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
        """Everything that follows from what has happened so far has happened too."""
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
                    f"{ingress.name} believes {believed} of {link.host.incarnation}, which last "
                    f"said {link.newest}"
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
        """Nobody stays with a decode engine that stalls while another one has room."""
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
                f"{request_id} stays on {part.incarnation}, which stalls, and {ingress.name} knows "
                f"of room elsewhere: {ingress.fleet!r}"
            )

    # --- at the end -----------------------------------------------------------------------------

    def check_end(self) -> None:
        """Everything that was lent is back, and everybody believes the truth.

        Raises:
            AssertionError: Something is left over; says where.
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
                assert not len(link.table), f"{ingress.name} listens to {link.host!r}"
                if link.host.is_answering:
                    assert not link.num_lost, (
                        f"{link.num_lost} messages of {ingress.name} to {link.host!r} were lost"
                    )
                    _check_view(ingress, link)


def _check_probes(ingress: VirtualIngress) -> None:
    """Whoever tries a replica that has failed requests is still under way there."""
    probes = ingress.fleet.pools.breakers.probes
    if probes:
        asked = {(part.incarnation, part.demand.request_id) for part in ingress.router.parts()}
        lost = {*probes} - asked - {*ingress.fleet.pools.holds()}
        assert not lost, f"{ingress.name} waits for probes that are over: {lost}"


def _check_misrouted(ingress: VirtualIngress, monitor: ProtocolMonitor) -> None:
    """Nothing is sent to a replica that fails again and again while another one does not."""
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
            f"{ingress.name} asks {incarnation}, which has failed again and again, and not {others}"
        )


def _check_successors(ingress: VirtualIngress, monitor: ProtocolMonitor) -> None:
    """A request has two decode engines only while the second one has not answered.

    Or while it fetches the KV; or after the first one was quiet: whoever speaks first goes on.
    """
    for request_id, engines in monitor.decoding_twice.items():
        parts = [
            p for p in ingress.router.parts()
            if p.demand.request_id == request_id and p.mode != "prefill"
        ]  # fmt: skip
        known = {part.incarnation for part in parts}
        assert known == engines, (
            f"{request_id} is on {engines}, and {ingress.name} knows of {known}"
        )
        num_asked = sum(part.state == LegState.ASKED.value for part in parts)
        assert len(parts) == 2, f"{request_id} is on more than two engines: {parts}"
        is_lent, was_quiet = monitor.is_lent(request_id), monitor.was_quiet(request_id)
        assert num_asked == 1 or is_lent or was_quiet, f"{request_id} has two decode slots: {parts}"


def _is_idle(host: VirtualHost, now_s: float) -> bool:
    """Whether an engine has nothing to do, and has had the time to say so."""
    since_s = host.core.idle_since_s
    is_quiet = since_s is not None and now_s - since_s > _QUIET_S
    # Of one that is cut off frames are missing, until its connections break when that is over; of
    # one that has just died nobody has heard yet.
    return is_quiet and host.is_answering and host.inbox.is_empty


def _check_view(ingress: VirtualIngress, link: VirtualLink) -> None:
    """An ingress believes what an idle engine has, and holds nothing on it."""
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
        believed = truth  # one that has failed requests is not always looked at
    assert believed == truth, f"{ingress.name} believes {believed}, and {host!r} has {truth}"
    _check_prefixes(ingress, host)


def _check_prefixes(ingress: VirtualIngress, host: VirtualHost) -> None:
    """An ingress knows every block that an idle engine could find, and no other."""
    prefixes = ingress.fleet.prefixes
    prefixes.check_invariants()
    for listing in host.engine.listing():
        [stored] = listing.events
        assert isinstance(stored, BlockStored)
        group = Placement(host.incarnation, listing.data_parallel_rank)
        told, truth = set(prefixes.told(group)), set(stored.block_hashes)
        assert told == truth, (
            f"{ingress.name} believes in {len(told - truth)} blocks that {group} has not, and does "
            f"not know {len(truth - told)} that it has"
        )


def _check_empty(host: VirtualHost, now_s: float) -> None:
    """An engine has all of its slots and blocks again, and no transfer."""
    metrics = host.engine.metrics(now_s)
    for group in metrics.groups:
        assert group.num_empty_slots == group.num_slots, f"{host!r}: {group}"
        assert group.num_free_blocks == group.num_blocks, f"{host!r}: {group}"
    transfer = metrics.transfer
    assert not metrics.num_waiting, f"{host!r}: {metrics.num_waiting=}"
    for name in _TRANSFER_COUNTERS:
        assert not getattr(transfer, name), f"{host!r}: {transfer}"
    assert not host.num_open_transfers, f"{host!r}: {host.num_open_transfers=}"


# --- what requests came to ----------------------------------------------------------------------


class Expectations:
    """What a request may have come to.

    Args:
        options: How requests were placed, what went wrong and who left.
        pools: The replicas.
        longest: How long a request waits at most.
    """

    def __init__(
        self, options: SimulationOptions, pools: Sequence[PoolSpec], longest: WaitLimits
    ) -> None:
        self._longest_s = longest.request_s
        self._most_queued = options.router.max_queued_requests
        admission = options.router.admission
        self._has_objective = admission is not None and admission.ttft_s is not None
        tenants = {} if admission is None else admission.tenants
        self._has_quotas = any(t.max_requests is not None for t in tenants.values())
        self._bounds_tokens = admission is not None and admission.max_queued_tokens is not None
        reservation_timeout_s = min(spec.engine.reservation_timeout_s for spec in pools)
        self._patience_s = min(options.router.queue_timeout_s, reservation_timeout_s)
        self._aborts = options.aborts
        faults = options.faults
        engines = [
            (faults.entries_for(f"{spec.role}/{rank}"), spec)
            for spec in pools
            for rank in range(spec.replicas)
        ]
        # When each may first have been lost; when those that began as decoders so, or shut.
        self._lost_s = [_first_loss_s(entries, spec) for entries, spec in engines]
        self._closed_s = [
            min([lost_s, *(f.at_s for f in entries if f.kind in _CLOSING_FAULTS)])
            for lost_s, (entries, spec) in zip(self._lost_s, engines, strict=True)
            if spec.role != "prefill"
        ]
        # Each trouble costs a request one engine at most, and a request may lose so many.
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
        """Request `number` ended in a way that what happened to it allows.

        `records` are those of all requests; `has_room` says whether its prompt leaves room for
        output.

        Raises:
            AssertionError: It did not.
        """
        times_s = record.token_times_s
        heard_s = (times_s[0] if len(times_s) else record.finished_s) - record.arrival_s
        assert heard_s <= self._longest_s, f"{record.request_id} heard nothing for {heard_s:.1f} s"
        lost = any(lost_s <= record.finished_s for lost_s in self._lost_s)
        closed = [closed_s <= record.finished_s for closed_s in self._closed_s]
        has_waited = record.finished_s - record.arrival_s >= self._patience_s - _ROUNDING_S
        num_troubles = bisect.bisect_right(self._troubles_s, record.finished_s)
        is_stranded = all(closed) or has_waited or num_troubles >= self._max_attempts
        # One that has just come knows of no engine yet.
        has_new_ingress = self._first_ingress_s <= record.finished_s
        may = {
            OK: True,
            ABORTED: number in self._aborts,
            INGRESS_LOST: has_new_ingress,
            NO_INGRESS: has_new_ingress,
            "BadRequestError": not has_room,
            "QueueTimeoutError": has_waited,
            "SaturatedError": any(closed)
            or self._bounds_tokens
            or self._num_beside(record, records) > self._most_queued,
            "OverloadedError": self._has_objective,
            "QuotaError": self._has_quotas,
            "NotReadyError": all(closed) or has_new_ingress,
            # With somebody else to go on it would have migrated.
            "ReplicaLostError": lost and is_stranded,
        }
        assert may.get(record.outcome, False), (
            f"{record.request_id} ended with {record.outcome} after "
            f"{record.finished_s - record.arrival_s:.3f} s, and nothing that happened explains it"
        )

    @staticmethod
    def _num_beside(record: RequestRecord, records: Sequence[RequestRecord]) -> int:
        """How many other requests were there when it ended, or may still have had a slot."""
        moment_s = record.finished_s
        return sum(r.arrival_s <= moment_s <= r.finished_s + _SLOT_RELEASE_S for r in records) - 1


def _first_loss_s(faults: Sequence[Fault], spec: PoolSpec) -> float:
    """When a replica may first have been given up: infinity if never."""
    silences = [f for f in faults if f.kind in {"freeze", "partition", "mute"}]
    silent_s = sum(map(_length_s, silences))
    # Connections that live through lost messages break when they come through again.
    losses_s = [f.at_s for f in faults if f.kind in {"kill", "partition", "mute", "deaf"}]
    handed_over_s = HAND_OVER_SHARE * spec.drain_timeout_s
    replaced = [f for f in faults if f.kind == "replace"]
    losses_s += [f.at_s + handed_over_s for f in replaced]
    # What stands before a full inbox is lost with an engine that knows of nothing to end first.
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
    # One that hangs for so long says so, and whoever has no token yet goes elsewhere.
    losses_s += [f.at_s for f in faults if f.kind == "hang" and _length_s(f) >= SILENCE_S]
    stuck = [f for f in faults if f.kind in {"freeze", "hang"}]
    if sum(map(_length_s, stuck)) >= spec.step_timeout_s:
        losses_s.extend(f.at_s for f in stuck)
    return min(losses_s, default=float("inf"))


def _length_s(fault: Fault) -> float:
    return fault.window.end_s - fault.window.start_s


def check_tokens(
    record: RequestRecord,
    output: Sequence[int],
    prompt: Sequence[int],
    room: int,
    vocabulary: tuple[int, Sequence[int]],
) -> None:
    """Every token is the one that its whole context leads to, and there are as many as asked.

    The prompt leaves room for `room` tokens; `vocabulary` is its size and its end token ids.

    Raises:
        AssertionError: One is wrong, missing, or too many.
    """
    asked = min(record.num_output_tokens_asked, max(room, 0))
    assert len(output) == len(record.token_times_s), record
    assert len(output) <= asked, f"{record.request_id}: {len(output)} tokens, asked for {asked}"
    if record.outcome == OK:
        assert len(output) == asked, f"{record.request_id}: {len(output)} tokens of {asked}"
    size, eos_token_ids = vocabulary
    right = expected_tokens(prompt, len(output), size, eos_token_ids)
    wrong = next((i for i, (a, b) in enumerate(zip(output, right, strict=True)) if a != b), None)
    assert wrong is None, (
        f"{record.request_id}: output token {wrong} is {output[wrong or 0]} and should be "
        f"{right[wrong or 0]}: it was computed from a wrong context "
        f"({len(prompt)} prompt tokens, {record.num_cached_tokens} cached, "
        f"prefill {record.prefill_replica}, decode {record.replica})"
    )
    times_s = record.token_times_s
    assert all(times_s[1:] >= times_s[:-1]), f"{record.request_id}: tokens out of order"
    assert not len(times_s) or times_s[0] >= record.arrival_s, f"{record.request_id}: too early"


def describe_wait(task: asyncio.Task[None]) -> str:
    """Where a task stands, from the outside in, for a person."""
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
    # The step of an asynchronous generator does not tell whose it is.
    return next((x for x in gc.get_referents(waiting) if isinstance(x, AsyncGeneratorType)), None)
