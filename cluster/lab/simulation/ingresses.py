"""The ingresses of a simulated cluster: starts, deaths, and the assignment of requests.

Owns every ingress. In place of Ray Serve it starts a successor of a dead ingress; in place of
HAProxy it sends that one's share of requests to the others meanwhile.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from cluster.lab.simulation.client import VirtualClient
from cluster.lab.simulation.ingress import VirtualIngress
from cluster.lab.simulation.loop import UNIX_S
from cluster.lab.simulation.simulated_replicas import KEYS
from cluster.routing.fleet import Fleet
from cluster.routing.metrics import RouterMetrics
from cluster.routing.router import Router
from cluster.routing.tickets import TicketOffice
from replicas.faults import INGRESS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from cluster.lab.simulation.invariants import Invariants
    from cluster.lab.simulation.network import Network
    from cluster.lab.simulation.options import SimulationOptions
    from cluster.lab.simulation.recorder import Recorder
    from cluster.lab.simulation.simulated_replicas import SimulatedReplicas
    from kv_transfer.config import TransferConfig
    from replicas.faults import ReplicaFaults
    from replicas.messages import EngineSnapshot
    from replicas.streams import OnKVEvents

    OnSnapshot = Callable[[str, EngineSnapshot], None]
    OnDead = Callable[[str, str], None]
    OnMoves = Callable[[str, bool], None]


class Ingresses:
    """All ingresses of a simulated cluster.

    Args:
        replicas: The cluster's replicas.
        transfer: Has the deadlines that determine a ticket's lifetime.
        invariants: Checks each ingress; None without checks.
    """

    def __init__(
        self,
        options: SimulationOptions,
        network: Network,
        recorder: Recorder,
        replicas: SimulatedReplicas,
        transfer: TransferConfig,
        invariants: Invariants | None,
    ) -> None:
        self._options = options
        self._network = network
        self._loop = network.loop
        self._recorder = recorder
        self._replicas = replicas
        self._transfer = transfer
        self._invariants = invariants
        self._transfer_ids = itertools.count(1)
        self._starts = itertools.count(options.ingresses)
        # By rank. A dead ingress stays until it has a successor.
        self._ingresses = [self._make(rank, rank) for rank in range(options.ingresses)]

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Let all ingresses discover engines."""
        for ingress in self._ingresses:
            self._follow(ingress)

    def schedule_faults(self) -> None:
        """Schedule the ingresses' faults of the fault plan."""
        for rank in range(len(self._ingresses)):
            for kill_s in self._faults(rank).kills():
                self._loop.call_at(kill_s, self._kill, rank)

    def lose(self, incarnation: str, reason: str) -> None:
        """End every connection to an engine."""
        for ingress in self.alive:
            ingress.fleet.client.lose(incarnation, reason)

    def mark_unresponsive(self, incarnation: str) -> None:
        """Tell every ingress that an engine has sent nothing for `QUIET_S`."""
        for ingress in self.alive:
            ingress.fleet.client.mark_unresponsive(incarnation)

    def _kill(self, rank: int) -> None:
        ingress = self._ingresses[rank]
        if ingress.is_alive:
            self._recorder.event("kill", ingress.name)
            ingress.die()
            if self._invariants is not None:
                self._invariants.forget(ingress)
            self._loop.call_later(self._options.restart_s, self._restart, rank)

    def _restart(self, rank: int) -> None:
        ingress = self._ingresses[rank] = self._make(rank, next(self._starts))
        self._recorder.event("start", ingress.name)
        self._follow(ingress)

    def _follow(self, ingress: VirtualIngress) -> None:
        follower = self._loop.create_task(ingress.fleet.follow(self._replicas))
        follower.add_done_callback(raise_failure)
        ingress.run(follower)

    # --- views ---------------------------------------------------------------------------------

    @property
    def alive(self) -> list[VirtualIngress]:
        """The ingresses whose process exists, by rank."""
        return [ingress for ingress in self._ingresses if ingress.is_alive]

    def take(self, number: int) -> VirtualIngress | None:
        """Return the ingress for the request of a number; None if no ingress is alive."""
        alive = self.alive
        return alive[number % len(alive)] if alive else None

    # --- one of them ---------------------------------------------------------------------------

    def _make(self, rank: int, start: int) -> VirtualIngress:
        name = f"{INGRESS}/{start}"
        observer = self._invariants.monitor(name) if self._invariants else self._recorder

        def make_client(
            on_snapshot: OnSnapshot,
            on_dead: OnDead,
            on_moves: OnMoves,
            on_kv_events: OnKVEvents | None,
        ) -> VirtualClient:
            def on_dead_or_lost(incarnation: str, reason: str) -> None:
                on_dead(incarnation, reason)
                self._on_lost(name, incarnation)

            hosts = self._replicas.alive
            return VirtualClient(
                name,
                self._network,
                hosts,
                observer,
                on_snapshot=on_snapshot,
                on_dead=on_dead_or_lost,
                on_moves=on_moves,
                on_kv_events=on_kv_events,
            )

        faults = self._faults(rank)

        def unix_now_s() -> float:
            """Return the wall clock's time, with the error that the fault plan sets."""
            return UNIX_S + self._loop.time() + faults.clock_shift_s(self._loop.time())

        fleet = Fleet(make_client, KEYS)
        tickets = TicketOffice(KEYS, self._transfer, self._new_transfer_id, unix_now_s)
        router = Router(fleet, self._options.router, RouterMetrics("simulated"), tickets)
        ingress = VirtualIngress(name, fleet, router)
        if self._invariants is not None:
            self._invariants.watch(ingress)
        return ingress

    def _faults(self, rank: int) -> ReplicaFaults:
        return self._options.faults.for_target(f"{INGRESS}/{rank}")

    def _new_transfer_id(self) -> bytes:
        return next(self._transfer_ids).to_bytes(16, "little")

    def _on_lost(self, ingress: str, incarnation: str) -> None:
        self._recorder.event("lost", ingress, incarnation)
        if self._invariants is not None:
            self._invariants.monitor(ingress).lost(incarnation)


def raise_failure(task: asyncio.Task[None]) -> None:
    """Raise a task's unexpected exception at once, which ends the run."""
    if not task.cancelled():
        task.result()
