"""How much of a prompt's KV is where, as one ingress believes: what placement asks.

Owner: one ingress's event loop, by its `Fleet`. Engines that tell what their prefix caches hold are
believed exactly. Of the others, whose models have several KV groups, it is believed that a prompt
which they took stays for `ROUTED_S`. An engine's entries go with it; one that is frozen costs
nothing but these. While secrets are rotated, an engine whose first secret is another hashes
otherwise, and is believed to hold nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.routing.hot_prefixes import HotPrefixes
from cluster.routing.placement import Placement
from cluster.routing.prefix_index import PrefixIndex
from kv_transfer.block_hash import PREFIX_CACHE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence, Set

    from cluster.routing.demand import Demand
    from cluster.routing.pools import Member
    from kv_transfer.keys import KeyRing
    from replicas.messages import KVEventBatch

ROUTED_S = 120.0
"""How long a prompt is believed to be in the prefix cache of an engine that tells nothing."""


@dataclass(slots=True)
class _KnownBlocks:
    """What is known of blocks of one size."""

    index: PrefixIndex = field(default_factory=PrefixIndex)
    hot: HotPrefixes = field(default_factory=HotPrefixes)


class Prefixes:
    """See the module docstring.

    Args:
        keys: The deployment's secrets, one at least: its engines hash with a key of the first.
        is_asked: Whether placement asks; prompts that were sent are not hashed for nobody.
    """

    def __init__(self, keys: KeyRing, *, is_asked: bool = True) -> None:
        self._is_asked = is_asked
        self._key, *_ = keys.derive(PREFIX_CACHE)
        self._engines: dict[str, Member] = {}
        # Of each pool the decode slots of a DP group, and how many groups there are.
        self._pools: dict[str, tuple[int, int]] = {}
        self._sizes: dict[int, _KnownBlocks] = {}
        # What each request was counted with that was asked about and has not ended.
        self._counted: dict[str, list[tuple[HotPrefixes, Sequence[int]]]] = {}

    def __repr__(self) -> str:
        return f"Prefixes({self._sizes}, {len(self._counted)} under way)"

    @property
    def num_counted(self) -> int:
        """Requests that are believed to be under way."""
        return len(self._counted)

    def add(self, member: Member) -> None:
        """Take an engine in."""
        self._engines[member.description.incarnation] = member
        self._sizes.setdefault(_block_size(member), _KnownBlocks())
        self._measure(member.pool)

    def remove(self, incarnation: str) -> None:
        """Forget an engine and what it held. Idempotent."""
        member = self._engines.pop(incarnation, None)
        if member is not None:
            self._sizes[_block_size(member)].index.forget(incarnation)
            self._measure(member.pool)

    def take(self, incarnation: str, batches: Iterable[KVEventBatch]) -> bool:
        """Take over what an engine told; whether it has to be asked for a listing."""
        member = self._engines.get(incarnation)
        if member is None:
            return False
        index = self._sizes[_block_size(member)].index
        asks = False
        for batch in batches:
            asks |= index.take(Placement(incarnation, batch.data_parallel_rank), batch)
        return asks

    def note_routed(self, demand: Demand, placement: Placement, now_s: float) -> None:
        """A request was taken there; says something where the engine itself says nothing."""
        member = self._engines.get(placement.incarnation)
        if member is None or not self._is_asked:
            return
        size = _block_size(member)
        index = self._sizes[size].index
        if not index.is_listed(Placement(placement.incarnation, max(placement.dp_group, 0))):
            names = demand.block_names(size, self._key)
            index.route(placement, names, now_s + ROUTED_S)

    def told(self, placement: Placement) -> Set[int]:
        """Names of the blocks that a DP group told that it has."""
        member = self._engines.get(placement.incarnation)
        if member is None:
            return frozenset()
        return self._sizes[_block_size(member)].index.told(placement)

    def check_invariants(self) -> None:
        """See `PrefixIndex.check_invariants`."""
        for blocks in self._sizes.values():
            blocks.index.check_invariants()

    def expire(self, now_s: float) -> None:
        """Believe no more what was to be believed until now; to be called now and then."""
        for blocks in self._sizes.values():
            blocks.index.expire(now_s)

    def cached_tokens(self, demand: Demand) -> Mapping[Placement, int]:
        """For everybody who holds some, the leading tokens that need not be computed there.

        A placement is a DP group, or an engine as a whole where that was all that was said when a
        prompt was sent there. One token of a prompt is always computed, as its logits are wanted.
        Less is said than is held where a prefix is too hot for so few (`hot_prefixes`): a request
        that is asked about counts as under way until `end`.
        """
        self._count(demand)
        found: dict[Placement, int] = {}
        for size, blocks in self._sizes.items():
            if not len(blocks.index):
                continue
            names = demand.block_names(size, self._key)
            pools: dict[str, dict[Placement, int]] = {}
            for placement, num_blocks in blocks.index.look_up(names).items():
                pool = self._engines[placement.incarnation].pool
                pools.setdefault(pool, {})[placement] = num_blocks
            for pool, held in pools.items():
                counts = blocks.hot.cool(names, held, *self._pools[pool])
                found.update({p: num_blocks * size for p, num_blocks in counts.items()})
        return found

    def end(self, demand: Demand) -> None:
        """A request is not under way any more. Idempotent."""
        for hot, names in self._counted.pop(demand.request_id, ()):
            hot.leave(names)

    def _count(self, demand: Demand) -> None:
        if demand.request_id not in self._counted:
            counted = self._counted[demand.request_id] = [
                (blocks.hot, demand.block_names(size, self._key))
                for size, blocks in self._sizes.items()
            ]
            for hot, names in counted:
                hot.enter(names)

    def _measure(self, pool: str) -> None:
        """An engine of a pool has come or gone."""
        engines = [m.description for m in self._engines.values() if m.pool == pool]
        slots = min((engine.slots_per_group for engine in engines), default=1)
        self._pools[pool] = slots, sum(engine.dp_groups for engine in engines)


def _block_size(member: Member) -> int:
    return member.description.kv_groups[0].block_size
