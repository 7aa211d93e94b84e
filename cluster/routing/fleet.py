"""The engines that one ingress knows: discovered, connected, described by snapshots, lost.

Owner: one ingress's event loop. This is the one place where discovery (which replicas exist),
connections (which ones answer) and the pool state (fed by their snapshots) meet. The ingress of a
cluster, the simulator and the tests use the same code.

A member's role and whether it drains come from its snapshots. It leaves when its connection breaks,
not when discovery stops listing it: a draining replica is listed no more, and still has requests to
finish.

An ingress that was suspended for seconds has lost every connection but no replica. Until discovery
has answered, its requests wait instead of failing as if there were no replicas.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from cluster.routing.leg import EngineClient
from cluster.routing.pools import PoolState
from cluster.routing.prefixes import Prefixes
from replicas.errors import EngineDeadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cluster.routing.pools import Member
    from kv_transfer.keys import KeyRing
    from replicas.messages import EngineDescription, EngineSnapshot
    from replicas.streams import OnKVEvents

logger = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 2.0
"""Seconds that a replica may take to describe itself."""
DISCOVERY_S = 0.5
"""Interval of discovery while members are missing."""
DISCOVERY_IDLE_S = 2.0
"""Interval of discovery while none is missing."""
DISCOVERY_FAILED_S = 10.0
"""Longest interval of discovery while it fails; each failure doubles it up to this."""
LOST_S = 60.0
"""An ingress without replicas whose discovery has failed for this long is of no use."""


class Discovery(Protocol):
    """Finds the replicas of a deployment."""

    async def find(self) -> list[Member]:
        """Return the replicas that answer now; any exception counts as a failure and is retried."""
        ...

    async def num_wanted(self) -> int | None:
        """Return how many there should be, None if unknown; called when something changes."""
        ...


class Connections(EngineClient, Protocol):
    """The client of the engines, as a fleet uses it; see `AsyncMPClient`."""

    async def connect(self, description: EngineDescription) -> None:
        """Connect, and wait for the first snapshot.

        Raises:
            EngineDeadError: The engine does not answer.
        """
        ...

    @property
    def incarnations(self) -> frozenset[str]:
        """The engines that are connected."""
        ...


ClientT_co = TypeVar("ClientT_co", bound=Connections, covariant=True)


class Fleet(Generic[ClientT_co]):
    """The replicas of one ingress and its connections to them.

    Args:
        make_client: Makes the connections from four callbacks: one called with (incarnation,
            snapshot); one called once with (incarnation, reason) when an engine is lost; one called
            with (incarnation, moves) when a stall begins or ends; and one called with (incarnation,
            batches) of prefix cache events, which returns whether it needs a listing.
        keys: The deployment's secrets, with which engines hash blocks.
        follows_prefixes: Whether `prefixes` is used; otherwise engines need not send such events.

    Attributes:
        client: The connections.
        pools: The state that their snapshots report.
        prefixes: The contents of their prefix caches.
        on_change: Called when there may be more room, or less; set by the router.
    """

    def __init__(
        self,
        make_client: Callable[
            [
                Callable[[str, EngineSnapshot], None],
                Callable[[str, str], None],
                Callable[[str, bool], None],
                OnKVEvents | None,
            ],
            ClientT_co,
        ],
        keys: KeyRing,
        *,
        follows_prefixes: bool = True,
    ) -> None:
        self.pools = PoolState()
        self.prefixes = Prefixes(keys, is_asked=follows_prefixes)
        self.client = make_client(
            self._take_snapshot,
            self._lose,
            self._set_moves,
            self.prefixes.take if follows_prefixes else None,
        )
        self.on_change: Callable[[], None] = lambda: None
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._is_complete = False
        self._is_followed = False
        # Start and number of consecutive failures of discovery.
        self._failing_since_s: float | None = None
        self._num_failures = 0
        # Set when discovery should be asked.
        self._look = asyncio.Event()
        # While lost replicas are looked for: found ones that have neither sent a snapshot nor
        # failed to connect. None before discovery has answered.
        self._sought: set[str] | None = None
        # Replicas that were lost or cannot be reached, as long as discovery lists them.
        self._unreachable: set[str] = set()
        # Whether `_settle` is about to be called.
        self._is_settling = False
        # Timers at which replicas that failed requests are tried again.
        self._reopenings: dict[str, asyncio.TimerHandle] = {}
        self.pools.on_shut = self._reopen_at
        self.pools.on_admit = lambda: self.on_change()  # noqa: PLW0108 - set later

    def __repr__(self) -> str:
        return f"Fleet({self.pools!r}, {len(self._connecting)} connecting)"

    async def follow(self, discovery: Discovery) -> None:
        """Follow discovery for ever; ask it at once when a replica was lost.

        A failed question is repeated; known replicas serve on.
        """
        self._is_followed = True
        self._begin_search()
        while True:
            self._look.clear()
            try:
                await self._find(discovery)
            except Exception:  # noqa: BLE001 - nothing that others answer may end a healthy ingress
                wait_s = self._note_failure()
                self._seek()
            else:
                self._failing_since_s, self._num_failures = None, 0
                wait_s = DISCOVERY_IDLE_S if self._is_complete else DISCOVERY_S
            now_s = asyncio.get_running_loop().time()
            self.prefixes.expire(now_s)
            self._expire(now_s)
            # Not asyncio.wait_for: before Python 3.12 it can swallow a cancellation.
            timer = asyncio.get_running_loop().call_later(wait_s, self._look.set)
            try:
                await self._look.wait()
            finally:
                timer.cancel()

    @property
    def num_unresponsive(self) -> int:
        """Number of replicas without new requests: stalled, silent or unreachable ones."""
        return len(self._unreachable | self.pools.stalled)

    @property
    def is_lost(self) -> bool:
        """Whether no replica is known and discovery has failed for `LOST_S`.

        A new ingress process may do better. If replicas only take long to start, discovery does not
        fail.
        """
        since_s = self._failing_since_s
        if since_s is None or self.pools.num_open:
            return False
        return asyncio.get_running_loop().time() - since_s >= LOST_S

    async def _find(self, discovery: Discovery) -> None:
        """Ask discovery once for replicas, and for their number where that may have changed."""
        found = await discovery.find()
        self._unreachable &= {member.description.incarnation for member in found}
        num_new = self.add(found)
        self._seek()
        if num_new or not self._is_complete:
            num_wanted = await discovery.num_wanted()
            self._is_complete = num_wanted is not None and self.pools.num_open >= num_wanted

    def _note_failure(self) -> float:
        """Count a failure of discovery; return the seconds until the next question."""
        if self._failing_since_s is None:
            self._failing_since_s = asyncio.get_running_loop().time()
        self._num_failures += 1
        num = self._num_failures
        if num & (num - 1) == 0:  # Log the first, second, fourth, ... failure.
            logger.exception("discovery of replicas failed (failures in a row: %d)", num)
        return min(DISCOVERY_S * 2.0 ** min(num - 1, 16), DISCOVERY_FAILED_S)

    def add(self, members: Iterable[Member]) -> int:
        """Start to connect to new engines; return how many are new."""
        new = [member for member in members if self._is_new(member.description.incarnation)]
        for member in new:
            task = asyncio.create_task(self.connect(member))
            self._connecting[member.description.incarnation] = task
        return len(new)

    async def connect(self, member: Member) -> None:
        """Connect to one engine; it gets requests from its first snapshot on."""
        incarnation = member.description.incarnation
        self.pools.add(member)
        self.prefixes.add(member)
        try:
            await self.client.connect(member.description)
            logger.info("connected to replica=%s", member.replica_id)
        except BaseException as error:
            self._forget(incarnation)
            self._found(incarnation)
            self._is_complete = False
            if not isinstance(error, EngineDeadError):
                raise
            self._tell(incarnation, "cannot reach replica=%s: %s", member.replica_id, error)
            self._unreachable.add(incarnation)
        finally:
            self._connecting.pop(incarnation, None)

    def close(self) -> None:
        """Stop connecting; the creator of the client closes it."""
        for task in self._connecting.values():
            task.cancel()
        for timer in self._reopenings.values():
            timer.cancel()

    def _is_new(self, incarnation: str) -> bool:
        return incarnation not in self._connecting and incarnation not in self.client.incarnations

    def _take_snapshot(self, incarnation: str, snapshot: EngineSnapshot) -> None:
        self.pools.take_snapshot(incarnation, snapshot)
        self._unreachable.discard(incarnation)
        self._found(incarnation)
        self.on_change()
        if not self._is_settling:
            self._is_settling = True
            # Settle after the tasks that this snapshot, and the tokens received with it, have
            # woken: no request should wait for it. The second `call_soon` runs after them.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._settle)

    def _settle(self) -> None:
        self._is_settling = False
        self.pools.settle()

    def _set_moves(self, incarnation: str, moves: bool) -> None:
        member = self.pools.member(incarnation)
        replica = member.replica_id if member else incarnation
        if moves:
            logger.info("replica=%s has recovered from its stall", replica)
        else:
            self._tell(
                incarnation, "replica=%s is stalled; not routing new requests to it", replica
            )
        self.pools.set_moves(incarnation, moves)
        self.on_change()

    def _tell(self, incarnation: str, text: str, *values: object) -> None:
        """Log a warning about a replica; at debug level while it cannot be reached.

        Connecting to such a replica is retried every few seconds.
        """
        level = logging.DEBUG if incarnation in self._unreachable else logging.WARNING
        logger.log(level, text, *values)

    def _reopen_at(self, incarnation: str, until_s: float) -> None:
        """Try a replica again at this time, however long discovery takes to answer."""
        before = self._reopenings.pop(incarnation, None)
        if before is not None:
            before.cancel()
        loop = asyncio.get_running_loop()
        self._reopenings[incarnation] = loop.call_at(until_s, self._reopen, incarnation, until_s)

    def _reopen(self, incarnation: str, until_s: float) -> None:
        del self._reopenings[incarnation]
        # A timer may come early by the clock's resolution.
        self._expire(max(asyncio.get_running_loop().time(), until_s))

    def _expire(self, now_s: float) -> None:
        if self.pools.expire(now_s):
            self.on_change()

    def _lose(self, incarnation: str, reason: str) -> None:
        member = self.pools.member(incarnation)
        name = member.replica_id if member else incarnation
        self._tell(incarnation, "lost replica=%s: %s", name, reason)
        self._unreachable.add(incarnation)
        if self._is_followed:
            self._begin_search()
        self._forget(incarnation)
        # Only after `_forget`: if all others fail too, the lost replica would get the waiting
        # requests.
        self.pools.failed(incarnation, asyncio.get_running_loop().time())
        self._is_complete = False
        self._look.set()

    def _begin_search(self) -> None:
        self._sought, self.pools.is_looked_for = None, True

    def _seek(self) -> None:
        """After discovery has answered or failed, wait once for each replica being connected."""
        if self.pools.is_looked_for and self._sought is None and not self._look.is_set():
            self._sought = set(self._connecting)
            self._end_search()

    def _found(self, incarnation: str) -> None:
        """Stop waiting for a replica that has sent a snapshot or failed to connect."""
        if self._sought is not None:
            self._sought.discard(incarnation)
            self._end_search()

    def _end_search(self) -> None:
        if self.pools.is_looked_for and not self._sought:
            self.pools.is_looked_for = False
            self.on_change()

    def _forget(self, incarnation: str) -> None:
        self.pools.remove(incarnation)
        self.prefixes.remove(incarnation)
        self.on_change()
