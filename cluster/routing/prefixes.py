"""How much of a prompt's KV is cached on which engine, as one ingress knows it.

Owner: one ingress's event loop, by its `Fleet`. Engines that report the contents of their prefix
caches are known exactly. Until an engine's first listing has come, a prompt that it took is assumed
to stay for `ROUTED_S`. An engine's entries are removed with it. While secrets are rotated, an
engine with another first secret computes other hashes, so it appears to hold nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from cluster.routing.hot_prefixes import HotPrefixes
from cluster.routing.placement import Placement
from cluster.routing.prefix_index import PrefixIndex
from kv_transfer.block_hash import PREFIX_CACHE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence, Set

    from cluster.routing.demand import Demand
    from cluster.routing.pools import Member
    from kv_transfer.keys import KeyRing
    from replicas.kv_groups import KVGroup
    from replicas.messages import KVEventBatch

ROUTED_S = 120.0
"""Seconds for which a prompt counts as cached on an engine that has not listed its cache."""

_Shape: TypeAlias = "tuple[KVGroup, ...]"
"""KV groups without their numbers of blocks: equal for all engines of one model and block size."""


@dataclass(slots=True)
class _KnownBlocks:
    """Blocks of one shape: their holders, and how many requests use them."""

    index: PrefixIndex
    hot: HotPrefixes = field(default_factory=HotPrefixes)


class Prefixes:
    """The prefix caches of all engines.

    Args:
        keys: The deployment's secrets, at least one: engines hash with a key of the first.
        is_asked: Whether placement uses this; otherwise prompts that were sent are not hashed.
    """

    def __init__(self, keys: KeyRing, *, is_asked: bool = True) -> None:
        self._is_asked = is_asked
        self._key, *_ = keys.derive(PREFIX_CACHE)
        self._engines: dict[str, Member] = {}
        # For each pool, the decode slots of a DP group and the number of groups.
        self._pools: dict[str, tuple[int, int]] = {}
        self._shapes: dict[_Shape, _KnownBlocks] = {}
        # For each request that was looked up and has not ended, the counters that it is counted in.
        self._counted: dict[str, list[tuple[HotPrefixes, Sequence[int]]]] = {}

    def __repr__(self) -> str:
        return f"Prefixes({self._shapes}, {len(self._counted)} under way)"

    @property
    def num_counted(self) -> int:
        """Number of requests that count as under way."""
        return len(self._counted)

    def add(self, member: Member) -> None:
        """Add an engine."""
        self._engines[member.description.incarnation] = member
        shape = _shape(member)
        if shape not in self._shapes:
            self._shapes[shape] = _KnownBlocks(PrefixIndex(shape))
        self._measure(member.pool)

    def remove(self, incarnation: str) -> None:
        """Forget an engine and its blocks. Idempotent."""
        member = self._engines.pop(incarnation, None)
        if member is not None:
            self._index(member).forget(incarnation)
            self._measure(member.pool)

    def take(self, incarnation: str, batches: Iterable[KVEventBatch]) -> bool:
        """Add an engine's reports; return whether a listing has to be requested from it."""
        member = self._engines.get(incarnation)
        if member is None:
            return False
        index = self._index(member)
        asks = False
        for batch in batches:
            asks |= index.take(Placement(incarnation, batch.data_parallel_rank), batch)
        return asks

    def note_routed(self, demand: Demand, placement: Placement, now_s: float) -> None:
        """Record a request that an engine took; ignored for an engine that reports its cache."""
        member = self._engines.get(placement.incarnation)
        if member is None or not self._is_asked:
            return
        index = self._index(member)
        if not index.is_listed(Placement(placement.incarnation, max(placement.dp_group, 0))):
            index.route(placement, self._names(demand, _shape(member)), now_s + ROUTED_S)

    def reported(self, placement: Placement, group_idx: int) -> Set[int]:
        """Return the names of the blocks of a KV group that a DP group has reported."""
        member = self._engines.get(placement.incarnation)
        if member is None:
            return frozenset()
        return self._index(member).reported(placement, group_idx)

    def check_invariants(self) -> None:
        """Assert the invariants of each index; see `PrefixIndex.check_invariants`."""
        for blocks in self._shapes.values():
            blocks.index.check_invariants()

    def expire(self, now_s: float) -> None:
        """Forget prompts assumed to be cached until now at most; call it now and then."""
        for blocks in self._shapes.values():
            blocks.index.expire(now_s)

    def cached_tokens(self, demand: Demand) -> Mapping[Placement, int]:
        """Return for each place with cached tokens the leading tokens that it need not compute.

        A place is a DP group, or a whole engine if the prompt was sent there without a group. At
        least one token is always computed, because its logits are needed. A prefix that is too hot
        for its few holders (`hot_prefixes`) counts for less than is cached. The request counts as
        under way until `end`.
        """
        self._count(demand)
        found: dict[Placement, int] = {}
        for shape, blocks in self._shapes.items():
            if not len(blocks.index):
                continue
            names, size = self._names(demand, shape), shape[0].block_size
            pools: dict[str, dict[Placement, int]] = {}
            for placement, num_tokens in blocks.index.look_up(names).items():
                pool = self._engines[placement.incarnation].pool
                pools.setdefault(pool, {})[placement] = num_tokens // size
            for pool, held in pools.items():
                counts = blocks.hot.cool(names[0], held, *self._pools[pool])
                found.update({p: num_blocks * size for p, num_blocks in counts.items()})
        return found

    def end(self, demand: Demand) -> None:
        """Count a request as under way no more. Idempotent."""
        for hot, names in self._counted.pop(demand.request_id, ()):
            hot.leave(names)

    def _count(self, demand: Demand) -> None:
        if demand.request_id not in self._counted:
            counted = self._counted[demand.request_id] = [
                (blocks.hot, demand.block_names(shape[0].block_size, self._key))
                for shape, blocks in self._shapes.items()
            ]
            for hot, names in counted:
                hot.enter(names)

    def _index(self, member: Member) -> PrefixIndex:
        return self._shapes[_shape(member)].index

    def _names(self, demand: Demand, shape: _Shape) -> list[Sequence[int]]:
        return [demand.block_names(kv_group.block_size, self._key) for kv_group in shape]

    def _measure(self, pool: str) -> None:
        """Count a pool's slots and groups again after an engine came or went."""
        engines = [m.description for m in self._engines.values() if m.pool == pool]
        slots = min((engine.slots_per_group for engine in engines), default=1)
        self._pools[pool] = slots, sum(engine.dp_groups for engine in engines)


def _shape(member: Member) -> _Shape:
    return tuple(
        msgspec.structs.replace(kv_group, num_blocks=0) for kv_group in member.description.kv_groups
    )
