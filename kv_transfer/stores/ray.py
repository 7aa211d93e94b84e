"""KV units shared by all engines of a Ray cluster through Ray's object store.

A named actor, the directory, maps keys to objects and decides which values stay. On each node that
writes, an actor, the keeper, owns the objects, so that they outlive the engines. Every store, told
apart by its name, has actors of its own. They stay until the cluster ends. Reading makes no copy:
the value lies in the object store of this node.

An engine that uses this store is a Ray driver: it trusts the cluster, whose objects are pickled,
and like every driver it ends some time after the head node's control service has. The capacity
should stay well below the object store's, or Ray writes values to disk.
"""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import ray
import ray.exceptions
from numpy.typing import NDArray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kv_transfer.store import Lease, PutOutcome, StoreConfig, StoreCounters
from kv_transfer.stores.backoff import CallThread
from kv_transfer.stores.held import HeldLease
from kv_transfer.stores.table import ClientId, PutPlace, StoreTable

logger = logging.getLogger(__name__)

_NAMESPACE = "ttserve"
_DIRECTORY = "kv-store-directory"
_KEEPER = "kv-store-keeper"

_FETCH_SHARE = 0.8
"""Share of a call's time after which ``get`` returns the values that have come: when the whole time
is over, its caller has stopped waiting."""

_MAX_LATE = 64
"""Most values that did not come in time and whose loss is still to be checked."""

_ResultT = TypeVar("_ResultT")

Content = list[Any]
"""One ObjectRef, in a list so that Ray passes the reference and not the value."""


class Directory:
    """Map from keys to objects. Runs as an actor, the only owner of its table."""

    def __init__(self, capacity_bytes: int, lease_s: float) -> None:
        self._table = StoreTable(capacity_bytes, lease_s)
        self._lease_s = lease_s
        self._puts_since_s: dict[ClientId, float] = {}

    def num_present(self, keys: tuple[bytes, ...]) -> int:
        """Return how many of the leading keys are stored."""
        return self._table.num_present(keys)

    def get(self, client: ClientId, keys: tuple[bytes, ...]) -> list[tuple[int, Content]]:
        """Lease the leading values that are stored; return (lease id, content) of each."""
        grants = self._table.get(client, keys, time.monotonic())
        return [(grant.lease_id, _as_content(grant.content)) for grant in grants]

    def release(self, client: ClientId, lease_ids: list[int]) -> None:
        """End leases: the reader holds the objects now, so that Ray keeps their memory."""
        for lease_id in lease_ids:
            self._table.release(client, lease_id, time.monotonic())

    def begin_put(
        self, client: ClientId, key: bytes, num_bytes: int
    ) -> int | Literal["present", "dropped"]:
        """Reserve room for a put; return its id."""
        now_s = time.monotonic()
        # Deaths of engines are not reported. A lapsed put writes to no slab here, so it can end.
        for lapsed in [c for c, s in self._puts_since_s.items() if s + self._lease_s <= now_s]:
            self.abort(lapsed)
        place = self._table.begin_put(client, key, num_bytes, now_s)
        if not isinstance(place, PutPlace):
            return place
        self._puts_since_s[client] = now_s
        return place.put_id

    def commit(self, client: ClientId, put_id: int, content: Content) -> PutOutcome:
        """Store a value."""
        self._puts_since_s.pop(client, None)
        return self._table.commit(client, put_id, time.monotonic(), content)

    def abort(self, client: ClientId) -> None:
        """End a put without a value."""
        self._puts_since_s.pop(client, None)
        self._table.abort(client)

    def discard(self, key: bytes) -> None:
        """Remove the key."""
        self._table.discard(key)


class Keeper:
    """Owner of the objects of its node. The directory's references keep them alive."""

    def keep(self, value: NDArray[np.uint8]) -> Content:
        """Store a copy, and return a reference to it."""
        return [ray.put(value)]


class RayStore:
    """``KVStore`` in Ray's object store. Every call to Ray runs on a thread of its own."""

    def __init__(self, config: StoreConfig) -> None:
        """Start the thread; the first call connects to Ray."""
        self._config = config
        self._client: ClientId = secrets.randbits(62)
        self._counters = StoreCounters()
        self._thread = CallThread("kv-store-ray", config.timeout_s, self._counters)
        self._directory: Any = None
        self._keeper: Any = None
        self._is_driver = False
        self._late: deque[tuple[bytes, Content]] = deque(maxlen=_MAX_LATE)

    # ---- KVStore

    def num_present(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are stored."""
        num_present = self._call(lambda end_s: self._num_present(tuple(keys), end_s), 0)
        self._counters.misses += len(keys) - num_present
        return num_present

    def get(self, keys: Sequence[bytes]) -> list[Lease]:
        """Lease values, which lie in the object store."""
        values: list[NDArray[np.uint8]] = []
        values = self._call(lambda end_s: self._get(tuple(keys), end_s), values)
        self._counters.hits += len(values)
        self._counters.misses += len(keys) - len(values)
        return [HeldLease(value, _was_protected) for value in values]

    def put(self, key: bytes, value: NDArray[np.uint8]) -> PutOutcome:
        """Copy a value into the object store."""
        dropped: PutOutcome = "dropped"
        put = self._with_ray(lambda end_s: self._put(key, value, end_s))
        outcome = self._thread.put(put, dropped, value.nbytes)
        self._counters.puts += outcome == "stored"
        self._counters.drops += outcome == "dropped"
        return outcome

    def discard(self, key: bytes) -> None:
        """Remove the key."""
        self._call(lambda end_s: self._ask(end_s, "discard", key), None)

    def counters(self) -> StoreCounters:
        """Return the totals."""
        return self._counters

    def close(self) -> None:
        """Disconnect from Ray, if this store connected to it. The values stay for other engines."""
        self._thread.close(self._leave)

    # ---- the thread

    def _call(self, function: Callable[[float], _ResultT], default: _ResultT) -> _ResultT:
        return self._thread.call(self._with_ray(function), default)

    def _with_ray(self, function: Callable[[float], _ResultT]) -> Callable[[float], _ResultT]:
        def run(end_s: float) -> _ResultT:
            self._join()
            try:
                self._look_after_late()
                return function(end_s)
            except ray.exceptions.RayError:
                self._directory = self._keeper = None  # To find them again: one may have died.
                raise

        return run

    def _join(self) -> None:
        """Find the actors, or make them; connect to Ray first if this process is not."""
        if not ray.is_initialized():
            address = self._config.address or "auto"
            ray.init(address, namespace=_NAMESPACE, log_to_driver=False, configure_logging=False)
            self._is_driver = True
        if self._directory is not None:
            return
        node = ray.get_runtime_context().get_node_id()
        here = NodeAffinitySchedulingStrategy(node, soft=False)
        name = self._config.name
        keeper = _actor(Keeper, _actor_name(_KEEPER, name, node), scheduling_strategy=here)
        self._keeper = keeper.remote()
        self._directory = _actor(Directory, _actor_name(_DIRECTORY, name)).remote(
            self._config.capacity_bytes, self._config.lease_s
        )

    def _leave(self) -> None:
        if self._is_driver:
            ray.shutdown()

    def _ask(self, end_s: float, method: str, *arguments: object) -> Any:  # noqa: ANN401
        return _result(getattr(self._directory, method).remote(*arguments), end_s)

    def _num_present(self, keys: tuple[bytes, ...], end_s: float) -> int:
        return int(self._ask(end_s, "num_present", keys))

    def _get(self, keys: tuple[bytes, ...], end_s: float) -> list[NDArray[np.uint8]]:
        found = self._ask(end_s, "get", self._client, keys)
        end_s -= (1 - _FETCH_SHARE) * self._config.timeout_s
        values = []
        if found:
            references = [content[0] for _, content in found]
            ray.wait(references, num_returns=len(references), timeout=_left_s(end_s))
        for key, (_, content) in zip(keys, found, strict=False):
            value = self._fetch(key, content, end_s)
            if value is None:
                break
            values.append(value)
        self._directory.release.remote(self._client, [lease_id for lease_id, _ in found])
        return values

    def _fetch(self, key: bytes, content: Content, end_s: float) -> NDArray[np.uint8] | None:
        """Return a value as it lies in the object store; None if it is late or lost."""
        try:
            value = _result(content[0], end_s)
        except ray.exceptions.GetTimeoutError:
            self._late.append((key, content))
            return None
        except ray.exceptions.RayError as error:
            logger.warning("Ray has lost a KV value, discarding its key: %s", error)
            value = None
        if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 1:
            return value
        self._directory.discard.remote(key)
        return None

    def _look_after_late(self) -> None:
        """Discard the values that did not come in time because they are lost.

        Ray needs about a second to tell a lost object from a distant one.
        """
        for key, content in [self._late.popleft() for _ in range(len(self._late))]:
            is_lost = _is_lost(content)
            if is_lost is None:
                self._late.append((key, content))
            elif is_lost:
                self._directory.discard.remote(key)

    def _put(self, key: bytes, value: NDArray[np.uint8], end_s: float) -> PutOutcome:
        put_id = self._ask(end_s, "begin_put", self._client, key, value.nbytes)
        if isinstance(put_id, str):
            return "present" if put_id == "present" else "dropped"
        try:
            kept = self._keeper.keep.remote(value)
            # remote() has copied the value, which its caller may change after the deadline.
            if time.monotonic() >= end_s:
                raise ray.exceptions.GetTimeoutError("copying the value took too long")
            content = _result(kept, end_s)
        except ray.exceptions.RayError:
            self._directory.abort.remote(self._client)
            raise
        outcome: PutOutcome = self._ask(end_s, "commit", self._client, put_id, content)
        return outcome


def _actor_name(*parts: str) -> str:
    return "-".join(part for part in parts if part)


def _actor(kind: type, name: str, **options: object) -> Any:  # noqa: ANN401
    """Return a handle factory that makes or finds the one actor of this name."""
    return ray.remote(kind).options(
        name=name,
        namespace=_NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        **options,
    )


def _result(reference: Any, end_s: float) -> Any:  # noqa: ANN401
    return ray.get(reference, timeout=_left_s(end_s))


def _is_lost(content: Content) -> bool | None:
    """Return whether Ray has lost an object; None while it is looking for it."""
    try:
        ray.get(content[0], timeout=0)
    except ray.exceptions.GetTimeoutError:
        return None
    except ray.exceptions.RayError as error:
        logger.warning("Ray has lost a KV value, discarding its key: %s", error)
        return True
    return False


def _left_s(end_s: float) -> float:
    return max(0.0, end_s - time.monotonic())


def _was_protected() -> bool:
    """Return True: an object's memory lasts as long as any view of it."""
    return True


def _as_content(content: object) -> Content:
    assert isinstance(content, list), "the directory stores lists only"
    return content
