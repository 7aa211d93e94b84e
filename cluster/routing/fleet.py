"""The engines that one ingress knows: found, connected, believed, lost.

Owner: one ingress's event loop. Discovery says who is there, connections say who answers, and what
comes over them feeds the pool state: the one place where these three meet, for the ingress of a
cluster, for the simulator and for tests. What a member does, and whether it drains, its snapshots
say; it leaves when its connection breaks, not before: a replica that drains is listed no more, and
still has requests to finish.

An ingress that was stopped for seconds has lost every connection and no replica: until it has asked
who is there, requests wait for what it finds instead of being told that there is nobody.
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
"""How long a replica may take to say what it is."""
DISCOVERY_S = 0.5
"""How often it is asked who is there while members are missing."""
DISCOVERY_IDLE_S = 2.0
"""And how often when none is."""
DISCOVERY_FAILED_S = 10.0
"""And at the least while asking fails, twice as long each time."""
LOST_S = 60.0
"""An ingress that knows nobody, and whose questions have failed for so long, is of no use."""


class Discovery(Protocol):
    """Knows which replicas there are, and how many there should be."""

    async def find(self) -> list[Member]:
        """The replicas that answer now; may fail in any way, and is asked again."""
        ...

    async def num_wanted(self) -> int | None:
        """How many there should be, None if nobody can say now; asked when something changes."""
        ...


class Connections(EngineClient, Protocol):
    """What a fleet needs of its client; see `AsyncMPClient`."""

    async def connect(self, description: EngineDescription) -> None:
        """Connect, and wait for the first snapshot.

        Raises:
            EngineDeadError: The engine does not answer.
        """
        ...

    @property
    def incarnations(self) -> frozenset[str]:
        """Engines that are connected."""
        ...


ClientT_co = TypeVar("ClientT_co", bound=Connections, covariant=True)


class Fleet(Generic[ClientT_co]):
    """See the module docstring.

    Args:
        make_client: Makes the connections, from what to call with (incarnation, snapshot), what to
            call with (incarnation, reason) once when an engine is lost, what to call with
            (incarnation, whether it moves) when that changes, and with (incarnation, batches) of
            its prefix caches' events, which says whether it needs a listing.
        keys: The deployment's secrets, by which engines hash blocks.
        follows_prefixes: Whether anybody asks `prefixes`; otherwise no engine has to tell anything.

    Attributes:
        client: The connections.
        pools: What their snapshots say.
        prefixes: What their prefix caches hold.
        on_change: Called when there may be more room, or less; whoever places requests sets it.
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
        # Since when every question to discovery has failed, and how many have.
        self._failing_since_s: float | None = None
        self._num_failures = 0
        # Set when it is time to look who is there.
        self._look = asyncio.Event()
        # While lost ones are looked for: found ones that have yet to say what they have, or not to
        # answer; None before discovery has said who is there.
        self._sought: set[str] | None = None
        # Those that were lost or do not answer, as long as discovery has them.
        self._unreachable: set[str] = set()
        # Whether `_settle` is about to be called.
        self._is_settling = False
        # When a replica is tried again that has failed requests.
        self._reopenings: dict[str, asyncio.TimerHandle] = {}
        self.pools.on_shut = self._reopen_at
        self.pools.on_admit = lambda: self.on_change()  # noqa: PLW0108 - whoever it is by then

    def __repr__(self) -> str:
        return f"Fleet({self.pools!r}, {len(self._connecting)} connecting)"

    async def follow(self, discovery: Discovery) -> None:
        """Take in whoever comes, for ever; looks at once when somebody was lost.

        A question that fails, however it does, is asked again: whoever is known serves on.
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
            # Why no asyncio.wait_for: before Python 3.12 it can swallow a cancellation.
            timer = asyncio.get_running_loop().call_later(wait_s, self._look.set)
            try:
                await self._look.wait()
            finally:
                timer.cancel()

    @property
    def num_still(self) -> int:
        """How many replicas get nothing new because they do not move, or cannot be reached."""
        return len(self._unreachable | self.pools.stalled)

    @property
    def is_lost(self) -> bool:
        """Whether no replica is known and nobody has said for `LOST_S` who there is.

        One that starts with the next ingress may do better; replicas that only take long to start
        are found by this one as well.
        """
        since_s = self._failing_since_s
        if since_s is None or self.pools.num_open:
            return False
        return asyncio.get_running_loop().time() - since_s >= LOST_S

    async def _find(self, discovery: Discovery) -> None:
        """Ask once who is there, and how many there should be where that may have changed."""
        found = await discovery.find()
        self._unreachable &= {member.description.incarnation for member in found}
        num_new = self.add(found)
        self._seek()
        if num_new or not self._is_complete:
            num_wanted = await discovery.num_wanted()
            self._is_complete = num_wanted is not None and self.pools.num_open >= num_wanted

    def _note_failure(self) -> float:
        """Count the failure that is being handled; when to ask again."""
        if self._failing_since_s is None:
            self._failing_since_s = asyncio.get_running_loop().time()
        self._num_failures += 1
        num = self._num_failures
        if num & (num - 1) == 0:  # A line for the first, the second, the fourth.
            logger.exception("discovery of replicas failed (failures in a row: %d)", num)
        return min(DISCOVERY_S * 2.0 ** min(num - 1, 16), DISCOVERY_FAILED_S)

    def add(self, members: Iterable[Member]) -> int:
        """Begin to connect to engines that are new; says how many these are."""
        new = [member for member in members if self._is_new(member.description.incarnation)]
        for member in new:
            task = asyncio.create_task(self.connect(member))
            self._connecting[member.description.incarnation] = task
        return len(new)

    async def connect(self, member: Member) -> None:
        """Connect to one engine; it takes requests from its first snapshot on."""
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
        """Connect to nobody any more; whoever made the client closes it."""
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
            # No request should be who waits for that, nor the tokens that came with it: whoever
            # they are handed to goes on before what is called the second time.
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
        """Warn of a replica, once: one that cannot be reached is tried again every few seconds."""
        level = logging.DEBUG if incarnation in self._unreachable else logging.WARNING
        logger.log(level, text, *values)

    def _reopen_at(self, incarnation: str, until_s: float) -> None:
        """Let a request try a replica again then, however long discovery takes to answer."""
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
        # Only now: where all others fail, too, it would be the one that waiting requests get.
        self.pools.failed(incarnation, asyncio.get_running_loop().time())
        self._is_complete = False
        self._look.set()

    def _begin_search(self) -> None:
        self._sought, self.pools.is_looked_for = None, True

    def _seek(self) -> None:
        """Discovery has said who is there, or failed: wait for each of them once, if for any."""
        if self.pools.is_looked_for and self._sought is None and not self._look.is_set():
            self._sought = set(self._connecting)
            self._end_search()

    def _found(self, incarnation: str) -> None:
        """Somebody has said what it has, or does not answer: it is tried again, and not sought."""
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
