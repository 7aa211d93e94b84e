"""The replicas of a simulated cluster: starts, deaths, freezes, silences, restarts.

Owns every place in the pools, and the host that fills it. In place of Ray Serve it restarts dead
replicas and reports the running ones to the ingresses. It also applies the replicas' faults of the
fault plan.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from cluster.lab.simulation.host import VirtualHost
from cluster.lab.simulation.parent import VirtualParent
from cluster.routing.fleet import DESCRIBE_TIMEOUT_S
from cluster.routing.pools import Member
from cluster.scaling.flip import FlipError, check_flip, other_role
from kv_transfer.keys import KeyRing
from replicas.dealer import QUIET_S, SILENCE_S
from replicas.life import LifeState
from replicas.simulation.virtual_engine import VirtualDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cluster.lab.simulation.network import Network
    from cluster.lab.simulation.options import PoolSpec, SimulationOptions
    from cluster.lab.simulation.recorder import Recorder
    from replicas.config import Role
    from replicas.faults import ReplicaFaults

KEYS = KeyRing((b"one secret for all that is virtual",))
"""The keys that seal every ticket of a simulated cluster."""


@dataclass(slots=True, eq=False)
class _Place:
    """A place in a pool, and the host that fills it now.

    Attributes:
        taken_s: Time from which it occupies a machine.
        given_back_s: Time from which it no longer does; then nothing starts there.
        is_leaving: Whether its replica gets no successor.
    """

    name: str
    spec: PoolSpec
    taken_s: float
    given_back_s: float | None = None
    is_leaving: bool = False
    host: VirtualHost | None = None
    parent: VirtualParent | None = None
    silent_since_s: float | None = None
    # Actions of its process that wait until it thaws.
    at_thaw: list[Callable[[_Place], None]] = field(default_factory=list)

    @property
    def state(self) -> LifeState:
        """The state of its replica, running or starting."""
        return LifeState.STARTING if self.parent is None else self.parent.life.state


class SimulatedReplicas:
    """All replicas of a simulated cluster, as a `Discovery`.

    Args:
        lose: Called with (incarnation, reason) when every connection to an engine is over.
        mark_unresponsive: Called with an incarnation from which nothing arrived for `QUIET_S`.

    Attributes:
        hosts: Every start of a replica, in order.
        alive: The living hosts, by incarnation, in the order of their starts.
    """

    def __init__(
        self,
        pools: Sequence[PoolSpec],
        options: SimulationOptions,
        network: Network,
        recorder: Recorder,
        lose: Callable[[str, str], None],
        mark_unresponsive: Callable[[str], None],
    ) -> None:
        self._options = options
        self._network = network
        self._loop = network.loop
        self._recorder = recorder
        self._lose = lose
        self._mark_unresponsive = mark_unresponsive
        self._incarnations = itertools.count(1)
        self._specs: dict[Role, PoolSpec] = {spec.role: spec for spec in pools}
        self._ranks = {spec.role: itertools.count(spec.replicas) for spec in pools}
        self._places = [
            _Place(f"{spec.role}/{rank}", spec, self._loop.time())
            for spec in pools
            for rank in range(spec.replicas)
        ]
        self._left: list[_Place] = []
        self.hosts: list[VirtualHost] = []
        self.alive: dict[str, VirtualHost] = {}
        # Actions that a process takes itself: a frozen one takes them after it thaws.
        self._process_actions = (self._drop_link, self._heal, self._release_backpressure)

    @property
    def names(self) -> list[str]:
        """Pool and rank of every replica, as in a fault plan."""
        return [place.name for place in self._places]

    @property
    def unsettled(self) -> list[str]:
        """Places where no replica runs now, or one that is to be replaced."""
        return [place.name for place in self._places if place.state is not LifeState.READY]

    async def find(self) -> list[Member]:
        """See `Discovery`. A frozen engine's actor answers; one that is cut off does not.

        While a replica is cut off, discovery takes `DESCRIBE_TIMEOUT_S`. Draining replicas are not
        listed.
        """
        listed = [
            place.host
            for place in self._places
            if place.host is not None and place.state is LifeState.READY
        ]
        answering = [host for host in listed if not host.is_cut]
        is_whole = len(answering) == len(listed)
        latency_s = self._options.network.latency_s
        await asyncio.sleep(2 * latency_s if is_whole else DESCRIBE_TIMEOUT_S)
        # Leave out replicas that died while the answers were on their way.
        return [
            Member(host.role, host.name, host.engine.description)
            for host in answering
            if host.is_alive
        ]

    async def num_wanted(self) -> int:
        """See `Discovery`."""
        return sum(not place.is_leaving for place in self._places)

    # --- number of replicas --------------------------------------------------------------------

    @property
    def roles(self) -> list[Role]:
        """The pools' roles."""
        return list(self._specs)

    def num_replicas(self, role: Role) -> int:
        """Return the places of a pool that are not leaving, filled or not."""
        return len(self._staying(role))

    def scale(self, role: Role, count: int) -> None:
        """Set the number of replicas of a pool, as Serve does.

        A new replica is ready after its start and warm-up. Surplus replicas go in this order: those
        that have not started, then those with the fewest requests, which drain.
        """
        staying = self._staying(role)
        for _ in range(count - len(staying)):
            spec = self._specs[role]
            place = _Place(f"{role}/{next(self._ranks[role])}", spec, self._loop.time())
            self._places.append(place)
            self._start_later(place)
        for place in sorted(staying, key=_num_requests)[: max(len(staying) - count, 0)]:
            self._recorder.event("leave", place.name)
            place.is_leaving = True
            if place.host is None:
                self._give_back(place)
            else:
                self._replace(place)

    def replica_seconds(self, until_s: float) -> float:
        """Return the machine seconds of all places until `until_s`."""
        return sum(
            min(until_s, until_s if place.given_back_s is None else place.given_back_s)
            - max(place.taken_s, 0.0)
            for place in (*self._places, *self._left)
        )

    def _staying(self, role: Role) -> list[_Place]:
        return [p for p in self._places if p.spec.role == role and not p.is_leaving]

    def _give_back(self, place: _Place) -> None:
        """Give back a place that gets no successor."""
        place.given_back_s = self._loop.time()
        self._places.remove(place)
        self._left.append(place)

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Bring up every replica."""
        for place in self._places:
            self._start(place)

    def schedule_faults(self) -> None:
        """Schedule the replicas' faults of the fault plan."""
        for place in self._places:
            faults = self._options.faults.for_target(place.name)
            at = functools.partial(self._at, place)
            for action, moments_s in (
                (self._kill, faults.kills()),
                (self._replace, faults.replacements()),
                (self._flip, faults.flips()),
                (self._drop_link, faults.link_drops()),
            ):
                for moment_s in moments_s:
                    at(moment_s, action)
            for window in faults.freezes():
                at(window.start_s, self._freeze)
                at(window.end_s, self._thaw)
            for window in faults.silences():
                at(window.start_s, self._start_silence)
            for window in faults.gaps():
                at(window.end_s, self._heal)
            for window in faults.backpressures():
                at(window.end_s, self._release_backpressure)
            for window in (*faults.freezes(), *faults.hangs()):
                at(window.start_s, functools.partial(self._watch, until_s=window.end_s))

    def _start(self, place: _Place) -> None:
        """Start an engine in a place; it is ready at once."""
        if place.given_back_s is not None:
            return
        faults = self._options.faults.for_target(place.name)
        host = _new_host(place, next(self._incarnations), faults, self._options, self._network)
        end = functools.partial(self._end, place)
        place.host = host
        place.parent = VirtualParent(host, self._network, place.spec, end)
        for window in (*faults.freezes(), *faults.hangs()):
            if window.holds(self._loop.time()):
                place.parent.watch(window.end_s)
        place.silent_since_s = None
        place.at_thaw.clear()
        if faults.is_frozen(self._loop.time()):
            # A freeze window that is open now applies from the start.
            host.freeze()
        self.hosts.append(host)
        self._network.attach(host)
        self.alive[host.incarnation] = host
        self._recorder.event("start", place.name, host.incarnation)

    def _at(self, place: _Place, when_s: float, action: Callable[[_Place], None]) -> None:
        if when_s != float("inf"):
            self._loop.call_at(when_s, self._act, place, action)

    def _act(self, place: _Place, action: Callable[[_Place], None]) -> None:
        self._recorder.event(_name(action), place.name)
        if place.host is not None and place.host.is_frozen and action in self._process_actions:
            place.at_thaw.append(action)
        else:
            action(place)

    def _kill(self, place: _Place) -> None:
        if place.host is not None:
            self._end(place, place.host, 0.0)

    def _end(self, place: _Place, host: VirtualHost, last_words_s: float) -> None:
        """End an engine and start its successor, unless its place is leaving.

        Its connections break `last_words_s` later than those of a killed engine.
        """
        if place.host is not host:
            return
        host.kill()
        assert place.parent is not None
        place.parent.life.become(LifeState.DEAD)
        self._network.detach(host)
        del self.alive[host.incarnation]
        place.host = place.parent = None
        latency_s = self._options.network.latency_s
        self._loop.call_later(
            last_words_s + latency_s, self._lose, host.incarnation, "its connection broke"
        )
        if place.is_leaving:
            self._give_back(place)
        else:
            self._start_later(place)

    def _start_later(self, place: _Place) -> None:
        down_s = self._options.restart_s + place.spec.timing.warm_up_s()
        self._loop.call_later(down_s, self._start, place)

    def _replace(self, place: _Place) -> None:
        if place.parent is not None:
            place.parent.replace()

    def _flip(self, place: _Place) -> None:
        """Change an engine's role, unless `ttserve flip` would refuse that."""
        if place.state is not LifeState.READY:
            return
        assert place.parent is not None
        ready = [p.parent for p in self._places if p.parent and p.state is LifeState.READY]
        role = other_role(place.parent.role_status.next_role)
        try:
            if role is not None:
                check_flip((parent.role_status for parent in ready), place.name, role)
                place.parent.change_role(role)
        except FlipError as error:
            self._recorder.event(type(error).__name__, place.name)

    def _watch(self, place: _Place, *, until_s: float) -> None:
        if place.parent is not None:
            place.parent.watch(until_s)

    def _release_backpressure(self, place: _Place) -> None:
        if place.host is not None:
            place.host.release_backpressure()

    def _drop_link(self, place: _Place) -> None:
        if place.host is not None:
            self._network.break_kv_connections(place.host)

    def _freeze(self, place: _Place) -> None:
        if place.host is not None:
            place.host.freeze()
            self._start_silence(place)

    def _thaw(self, place: _Place) -> None:
        if place.host is not None:
            place.host.thaw()
            waiting, place.at_thaw = place.at_thaw, []
            for action in waiting:
                action(place)
            self._end_silence(place)

    def _heal(self, place: _Place) -> None:
        """End a partition: break the connections that outlived it, as they lost frames."""
        if place.host is not None:
            self._lose(place.host.incarnation, "its connection broke")
            self._end_silence(place)

    def _start_silence(self, place: _Place) -> None:
        """Start the silence of a replica: clients notice after `QUIET_S` and `SILENCE_S`."""
        host = place.host
        if host is not None and place.silent_since_s is None:
            place.silent_since_s = self._loop.time()
            self._loop.call_later(
                QUIET_S, self._report_unresponsive, place, host, place.silent_since_s
            )
            self._loop.call_later(SILENCE_S, self._declare_lost, place, host, place.silent_since_s)

    def _end_silence(self, place: _Place) -> None:
        if place.host is not None and place.host.is_answering:
            place.silent_since_s = None
            place.host.send_heartbeat()

    def _report_unresponsive(self, place: _Place, host: VirtualHost, since_s: float) -> None:
        if place.host is host and place.silent_since_s == since_s:
            self._mark_unresponsive(host.incarnation)

    def _declare_lost(self, place: _Place, host: VirtualHost, since_s: float) -> None:
        if place.host is not host or place.silent_since_s != since_s:
            return
        self._lose(host.incarnation, f"it sent nothing for {SILENCE_S:g} s")
        if host.is_frozen:
            # The heartbeats of its KV connections have stopped as well.
            self._network.break_kv_connections(host)


def _new_host(
    place: _Place,
    number: int,
    faults: ReplicaFaults,
    options: SimulationOptions,
    network: Network,
) -> VirtualHost:
    """Create the host that fills a place; `number` makes its incarnation unique."""
    spec = place.spec
    run_ahead = options.run_ahead and not options.faults.faults and not options.network.jitter_s
    return VirtualHost(
        name=place.name,
        role=spec.role,
        incarnation=f"{place.name.replace('/', '-')}.{number}",
        config=msgspec.structs.replace(spec.engine, keys=KEYS, role=spec.role),
        device=VirtualDevice(
            timing=spec.timing,
            facts=spec.facts,
            faults=faults,
            models_kv=options.models_kv,
            run_ahead=run_ahead,
            transfer=spec.transfer,
            seed=options.seed,
            chances=spec.chances,
        ),
        faults=faults,
        network=network,
    )


def _num_requests(place: _Place) -> int:
    """Return the requests of a place's engine; -1 if it has not started."""
    return -1 if place.host is None else place.host.engine.num_live


def _name(action: Callable[[_Place], None]) -> str:
    """Return the name of an action in the event log."""
    named = action.func if isinstance(action, functools.partial) else action
    return named.__name__.strip("_")
