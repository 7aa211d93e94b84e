"""The cluster as operators see it: its replicas, orders to them, and why an order fails. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from cluster.errors import ServingError
from replicas.config import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replicas.messages import PauseMode

ReplicaState = Literal[
    "ready", "paused", "changing_role", "draining", "drained", "stopping", "unresponsive"
]
"""ready: takes requests.
paused: keeps new requests queued until it is resumed.
changing_role: takes requests again, in its new role, once those of its old role have ended.
draining: an operator drains it, and it still has requests.
drained: an operator drains it, and it has no request left.
stopping: ends after its last request, because Serve replaces or removes it.
unresponsive: its engine or its actor does not answer."""


class OrderFailedError(ServingError):
    """Some replicas did not carry out an order; the message names them."""

    status = 503
    type = "ServiceUnavailableError"
    code = "order_failed"


class ReplicaUnresponsiveError(ServingError):
    """The replica does not answer; it may hang, or have just ended."""

    status = 503
    type = "ServiceUnavailableError"
    code = "replica_unresponsive"


class ConflictError(ServingError):
    """The state of the cluster, or another change that is under way, forbids the change."""

    status = 409
    type = "ConflictError"
    code = "conflict"


MAX_PROFILE_S = 60.0
"""Longest profile of an engine."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas that an order is for: one, those of a pool, or all.

    Attributes:
        replica: Name of the only one; None: see `pool`.
        pool: Name of their pool; None: all replicas.
    """

    replica: str | None = None
    pool: str | None = None


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """One replica.

    Attributes:
        replica: Its name.
        pool: Its pool, named after the role that it began with.
        role: Its role; during a change, the old one.
        next_role: Its role after a change that is under way; null without one.
        state: Its state, see `ReplicaState`.
        is_paused: Whether it keeps new requests queued.
        slots: Its decode slots.
        empty_slots: Those that are free.
        running: Sequences that run.
        reserved: Slots that are reserved for sequences whose KV is under way.
        waiting: Sequences that are queued at it.
    """

    replica: str
    pool: str
    role: Role
    next_role: Role | None
    state: ReplicaState
    is_paused: bool
    slots: int
    empty_slots: int
    running: int
    reserved: int
    waiting: int


class Cluster(Protocol):
    """The cluster behind the admin routes. Each call ends within a bounded time.

    Every method with a target or a name raises `NotFoundError` if no such replica or pool runs.
    """

    async def replicas(self) -> list[ReplicaView]:
        """Return all replicas by name, those that do not answer included."""

    async def pause(self, target: Target, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause engines until nothing runs there.

        Args:
            target: The replicas.
            mode: What becomes of running requests.
            clear_cache: Whether to forget cached blocks then.

        Raises:
            OrderFailedError: On some nothing was paused, or requests still run.
        """

    async def resume(self, target: Target) -> None:
        """End the pause of engines.

        Raises:
            OrderFailedError: Some did not answer.
        """

    async def is_paused(self, target: Target) -> Mapping[str, bool]:
        """Return for each replica whether it is paused.

        Raises:
            OrderFailedError: Some did not answer.
        """

    async def reset_prefix_cache(self, target: Target, *, reset_running_requests: bool) -> None:
        """Forget cached blocks.

        Raises:
            OrderFailedError: Some did not answer, or requests keep KV from before.
        """

    async def profile(self, replica: str, seconds: float) -> str:
        """Profile a replica's engine; return folded stacks, a line each with its samples.

        Raises:
            OrderFailedError: Another profile is being made, or it did not answer.
        """

    async def change_role(self, replica: str, role: Role) -> ReplicaView:
        """Order a replica to take another role, and return it as it is then.

        Raises:
            ConflictError: Its configuration or the other replicas do not permit it now.
            ReplicaUnresponsiveError: It does not answer.
        """

    async def drain(self, replica: str) -> ReplicaView:
        """Order a replica to take no more requests and to hand over those that it has.

        Raises:
            ConflictError: The other replicas, or a change of its role, do not permit it now.
            ReplicaUnresponsiveError: It does not answer.
        """

    async def undrain(self, replica: str) -> ReplicaView:
        """Let a drained replica take requests again.

        Raises:
            ReplicaUnresponsiveError: It does not answer.
        """
