"""The parent of an engine process in the simulator; stands for a pool replica's actor.

It ends an engine that hangs, drains and ends one that is replaced, and changes an engine's role.
The production's `HangWatch` detects hangs, and the engine itself reports when it is drained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.scaling.flip import RoleStatus
from replicas.launch import HAND_OVER_SHARE, LOOK_S, HangWatch, stop_timeout_s
from replicas.life import Life, LifeState

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.lab.simulation.host import VirtualHost
    from cluster.lab.simulation.network import Network
    from cluster.lab.simulation.options import PoolSpec
    from replicas.config import Role

_POLL_S = 0.2
"""Seconds between checks of a draining engine."""


class VirtualParent:
    """The parent of one engine process.

    Args:
        host: The engine process.
        spec: The replica's pool, with its timeouts.
        end: Called when the engine ends, with the host and how long its connections outlive it.

    Attributes:
        life: The life cycle of the replica.
    """

    def __init__(
        self,
        host: VirtualHost,
        network: Network,
        spec: PoolSpec,
        end: Callable[[VirtualHost, float], None],
    ) -> None:
        self.life = Life()
        self.life.become(LifeState.READY)
        self._host = host
        self._loop = network.loop
        self._longest_delay_s = network.longest_delay_s
        self._watch = HangWatch(spec.step_timeout_s)
        self._watches_until_s = float("-inf")
        self._next_role: Role | None = None
        self._drain_timeout_s = spec.drain_timeout_s
        self._stop_s = stop_timeout_s(spec.engine)
        self._end = end

    # --- an engine that may hang ---------------------------------------------------------------

    def watch(self, until_s: float) -> None:
        """Watch the engine for hangs until a virtual time; needed only around faults."""
        if self._watches_until_s <= self._loop.time():
            self._loop.call_later(LOOK_S, self._look)
        self._watches_until_s = max(self._watches_until_s, until_s + LOOK_S)

    def _look(self) -> None:
        host = self._host
        if not host.is_alive:
            return
        if self._watch.look([] if host.is_frozen else [host.core.pulse]) is not None:
            self._end(host, 0.0)
        elif self._loop.time() < self._watches_until_s:
            self._loop.call_later(LOOK_S, self._look)

    # --- an engine that changes its role ------------------------------------------------------

    @property
    def role_status(self) -> RoleStatus:
        """The engine's role status, as `ttserve flip` would get it."""
        config = self._host.config
        return RoleStatus(
            replica=self._host.name,
            role=self._host.engine.role,
            next_role=self._next_role or self._host.engine.role,
            has_connector=config.kv_connector is not None,
        )

    def change_role(self, role: Role) -> None:
        """Change the engine's role."""
        self._next_role = role
        self._host.do(self._host.change_role, role)

    # --- an engine that is to be replaced ------------------------------------------------------

    def replace(self) -> None:
        """Drain the engine, wait for its requests, end it. Idempotent."""
        if self.life.state is not LifeState.READY:
            return
        self.life.become(LifeState.DRAINING)
        self._host.do(self._host.drain)
        self._loop.call_later(HAND_OVER_SHARE * self._drain_timeout_s, self._hand_over)
        self._loop.call_later(_POLL_S, self._await_idle, self._loop.time() + self._drain_timeout_s)

    def _hand_over(self) -> None:
        if self._host.is_alive:
            self._host.do(self._host.hand_over)

    def _await_idle(self, deadline_s: float) -> None:
        host = self._host
        if not host.is_alive:
            return
        # The engine knows a turn's results when it begins, but sends them when it ends.
        is_idle = host.engine.is_drained and not host.core.is_working
        if self._loop.time() >= deadline_s or (is_idle and not host.is_frozen):
            self._await_end(self._loop.time() + self._stop_s)
        else:
            self._loop.call_later(_POLL_S, self._await_idle, deadline_s)

    def _await_end(self, kill_s: float) -> None:
        """Wait for the engine to end as requested; kill it at `kill_s`."""
        if not self._host.is_alive:
            return
        if not self._host.ignores_sigterm:
            # Its last frames reach clients before its connections close.
            self._end(self._host, self._longest_delay_s)
        elif self._loop.time() >= kill_s:
            self._end(self._host, 0.0)
        else:
            self._loop.call_later(_POLL_S, self._await_end, kill_s)
