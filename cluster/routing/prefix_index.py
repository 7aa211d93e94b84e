"""Which leading blocks of a prompt DP groups hold, as reported or as expected. Pure.

Owner: one ingress's event loop, by `Prefixes`. An index is for engines with KV groups of one shape.
Blocks are named by 64 bits of their chain hashes (`kv_transfer.block_hash.block_names`). A name
stands for every token from the first one on. A holder has a prefix of a prompt if each KV group of
full attention has the unbroken run of its blocks, and each group with a window or of states those
blocks that the token behind the prefix sees. This is the rule of the engine's own prefix cache.

A group's reports (`KVEventBatch`) are exact: a batch that arrives twice or late changes nothing. A
missing batch voids earlier reports until a listing comes. A prompt sent to a group is a guess that
expires. Above `max_entries` the group with the most entries loses the newest of them: ends of
prefixes, never their beginnings. Whatever is lost, a prefix is only ever believed to be shorter
than it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from math import lcm
from typing import TYPE_CHECKING

from replicas.kv_groups import served_by_windows
from replicas.messages import BlockRemoved, BlockStored

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence, Set

    from cluster.routing.placement import Placement
    from replicas.kv_groups import KVGroup
    from replicas.messages import KVEventBatch

MAX_ENTRIES = 2**20
"""Limit of entries; a block that two groups hold counts twice.

`benchmarks/placement.py` prints the memory of one.
"""
ASK_AGAIN = 64
"""After a missed batch, a listing is requested again each time this many more batches came."""
_NAME_BITS = 64
_MAX_MASKS = 2**16
_FORGOTTEN_SHARE = 16


@dataclass(slots=True, eq=False)
class _Holder:
    """A DP group, or an engine as a whole, and the blocks that it holds.

    Attributes:
        bit: Its bit in masks.
        reported: Blocks that it has reported, oldest first; as `_entries` names them.
        routed: Blocks that were sent there, with the time until which they are assumed to be there;
            in that order.
        seq: Sequence number of the last batch that was taken or seen; -1 before the first.
        num_missed: Batches ignored since one was missed; 0 if none was missed.
        is_listed: Whether `reported` is complete.
    """

    placement: Placement
    bit: int
    reported: dict[int, None] = field(default_factory=dict)
    routed: dict[int, float] = field(default_factory=dict)
    seq: int = -1
    num_missed: int = 0
    is_listed: bool = False


class PrefixIndex:
    """Holders of blocks of one shape.

    Args:
        kv_groups: KV groups of the engines; the numbers of blocks are not read.
        max_entries: Limit of entries.
    """

    def __init__(self, kv_groups: Sequence[KVGroup], max_entries: int = MAX_ENTRIES) -> None:
        self._kv_groups = kv_groups
        self._block_multiple = lcm(*(kv_group.block_size for kv_group in kv_groups))
        self._max_entries = max_entries
        self._num_entries = 0
        self._holders: dict[Placement, _Holder] = {}
        self._by_bit: list[_Holder | None] = []
        # Holders of each block, as a mask. Equal masks are one object where possible: a look-up
        # compares those of neighbours by identity.
        self._masks: dict[int, int] = {}
        self._same: dict[int, int] = {}

    def __len__(self) -> int:
        return self._num_entries

    def __repr__(self) -> str:
        return f"PrefixIndex({self._num_entries} entries of {len(self._holders)} holders)"

    def is_listed(self, placement: Placement) -> bool:
        """Return whether a group's reports are complete."""
        holder = self._holders.get(placement)
        return holder is not None and holder.is_listed

    def reported(self, placement: Placement, group_idx: int) -> Set[int]:
        """Return the names of the blocks of a KV group that a DP group has reported."""
        holder = self._holders.get(placement)
        if holder is None:
            return frozenset()
        first = group_idx << _NAME_BITS
        return {entry - first for entry in holder.reported if entry >> _NAME_BITS == group_idx}

    def take(self, placement: Placement, batch: KVEventBatch) -> bool:
        """Add a group's report; return whether a listing has to be requested from it."""
        holder = self._holder(placement)
        if batch.is_listing and batch.seq >= holder.seq:
            self._forget_all(holder)
            holder.is_listed, holder.num_missed = True, 0
        elif batch.seq <= holder.seq:
            return False
        elif not holder.is_listed or batch.seq != holder.seq + 1:
            self._forget_told(holder)
            holder.seq, holder.is_listed = batch.seq, False
            holder.num_missed += 1
            return holder.num_missed % ASK_AGAIN == 1
        holder.seq = batch.seq
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._store(holder, _entries(event.block_hashes, event.group_idx))
            elif isinstance(event, BlockRemoved):
                self._remove(holder, _entries(event.block_hashes, event.group_idx))
            else:
                self._forget_told(holder)
        self._keep_bound()
        return False

    def route(self, placement: Placement, names: Sequence[Sequence[int]], until_s: float) -> None:
        """Assume until `until_s` that a group caches a prompt sent there.

        Args:
            placement: The DP group, or the whole engine.
            names: For each KV group the names of the prompt's blocks.
            until_s: Monotonic clock.
        """
        holder = self._holder(placement)
        routed, reported = holder.routed, holder.reported
        for name in chain.from_iterable(_entries(of, i) for i, of in enumerate(names)):
            if name not in reported:
                if routed.pop(name, None) is None:
                    self._num_entries += 1
                    self._hold(holder, name)
                routed[name] = until_s
        self._keep_bound()

    def expire(self, now_s: float) -> None:
        """Forget sent prompts whose time is over."""
        for holder in self._holders.values():
            routed = holder.routed
            while routed:
                name = next(iter(routed))
                if routed[name] > now_s:
                    break
                del routed[name]
                self._drop(holder, name)

    def forget(self, incarnation: str) -> None:
        """Forget an engine that is gone, and all that it held."""
        for placement in [p for p in self._holders if p.incarnation == incarnation]:
            holder = self._holders.pop(placement)
            self._forget_all(holder)
            self._by_bit[holder.bit.bit_length() - 1] = None

    def look_up(self, names: Sequence[Sequence[int]]) -> dict[Placement, int]:
        """Return for each holder of a prefix of a prompt the longest one, in tokens.

        Args:
            names: For each KV group the names of the prompt's blocks that may be hit.
        """
        entries = [_entries(of, i) for i, of in enumerate(names)]
        most = min(len(e) * g.block_size for e, g in zip(entries, self._kv_groups, strict=True))
        found: dict[Placement, int] | None = None
        for kv_group, of in zip(self._kv_groups, entries, strict=True):
            if not kv_group.is_rolling:
                size = kv_group.block_size
                held = {p: num * size for p, num in self._leading_blocks(of).items()}
                if found is not None:
                    held = {p: min(held[p], found[p]) for p in held.keys() & found.keys()}
                found = held
        if found is None:
            found = dict.fromkeys(self._holders_of_any(entries), most)
        elif len(self._kv_groups) == 1:
            return found
        multiple = self._block_multiple
        served = {p: self._served(p, entries, n - n % multiple) for p, n in found.items()}
        return {placement: num_tokens for placement, num_tokens in served.items() if num_tokens}

    def _served(
        self, placement: Placement, entries: Sequence[Sequence[int]], num_tokens: int
    ) -> int:
        """Return the longest prefix of at most `num_tokens` that a holder's windows serve."""
        masks, bit = self._masks, self._holders[placement].bit
        return served_by_windows(
            self._kv_groups,
            num_tokens,
            lambda index, number: bool(masks.get(entries[index][number], 0) & bit),
        )

    def _holders_of_any(self, entries: Iterable[Iterable[int]]) -> list[Placement]:
        """Return the holders of any of these blocks."""
        found: dict[Placement, int] = {}
        holding = 0
        for entry in chain.from_iterable(entries):
            holding |= self._masks.get(entry, 0)
        self._note(found, holding, 0)
        return list(found)

    def _leading_blocks(self, names: Iterable[int]) -> dict[Placement, int]:
        """Return for each holder of the first block how many of the leading blocks it holds."""
        found: dict[Placement, int] = {}
        # A run of equal masks, which most of a prompt is, costs one comparison for each block.
        holding = last = -1
        depth = 0
        for depth, mask in enumerate(map(self._masks.get, names)):
            if mask is last:
                continue
            if mask is None:
                break
            left = holding & mask if holding >= 0 else mask
            if left != holding:
                if holding >= 0:
                    self._note(found, holding ^ left, depth)
                holding = left
                if not left:
                    break
            last = mask
        else:
            depth += 1
        if holding > 0:
            self._note(found, holding, depth)
        return found

    def check_invariants(self) -> None:
        """Assert that masks, holders and the count agree, and the limit is kept."""
        masks: dict[int, int] = {}
        for placement, holder in self._holders.items():
            assert holder.placement == placement
            assert self._by_bit[holder.bit.bit_length() - 1] is holder
            assert not holder.reported.keys() & holder.routed.keys()
            assert list(holder.routed.values()) == sorted(holder.routed.values())
            for name in (*holder.reported, *holder.routed):
                masks[name] = masks.get(name, 0) | holder.bit
        assert masks == self._masks
        assert self._num_entries == sum(
            len(h.reported) + len(h.routed) for h in self._holders.values()
        )
        assert self._num_entries <= self._max_entries

    # --- internals -----------------------------------------------------------------------------

    def _holder(self, placement: Placement) -> _Holder:
        holder = self._holders.get(placement)
        if holder is None:
            if None not in self._by_bit:
                self._by_bit.append(None)
            index = self._by_bit.index(None)
            holder = self._holders[placement] = _Holder(placement, 1 << index)
            self._by_bit[index] = holder
        return holder

    def _note(self, found: dict[Placement, int], bits: int, depth: int) -> None:
        while bits:
            bit = bits & -bits
            bits ^= bit
            holder = self._by_bit[bit.bit_length() - 1]
            assert holder is not None
            found[holder.placement] = depth

    def _store(self, holder: _Holder, names: Iterable[int]) -> None:
        reported, routed = holder.reported, holder.routed
        for name in names:
            if name not in reported:
                reported[name] = None
                if routed.pop(name, None) is None:
                    self._num_entries += 1
                    self._hold(holder, name)

    def _remove(self, holder: _Holder, names: Iterable[int]) -> None:
        reported = holder.reported
        for name in names:
            if name in reported:
                del reported[name]
                self._drop(holder, name)

    def _forget_told(self, holder: _Holder) -> None:
        reported, holder.reported = holder.reported, {}
        for name in reported:
            self._drop(holder, name)

    def _forget_all(self, holder: _Holder) -> None:
        self._forget_told(holder)
        while holder.routed:
            self._drop(holder, holder.routed.popitem()[0])

    def _hold(self, holder: _Holder, name: int) -> None:
        """Record that a block has one holder more."""
        mask = self._masks.get(name, 0) | holder.bit
        if len(self._same) >= _MAX_MASKS:
            self._same.clear()
        self._masks[name] = self._same.setdefault(mask, mask)

    def _drop(self, holder: _Holder, name: int) -> None:
        """Record that a block has one holder less; the caller has updated the holder's lists."""
        self._num_entries -= 1
        mask = self._masks[name] ^ holder.bit
        if mask:
            self._masks[name] = self._same.setdefault(mask, mask)
        else:
            del self._masks[name]

    def _keep_bound(self) -> None:
        while self._num_entries > self._max_entries:
            fullest = max(self._holders.values(), key=lambda h: len(h.reported) + len(h.routed))
            # Drop many at once, because finding the fullest holder looks at all of them.
            most = len(fullest.reported) + len(fullest.routed)
            excess = self._num_entries - self._max_entries
            for _ in range(min(max(excess, most // _FORGOTTEN_SHARE), most)):
                entries = fullest.routed or fullest.reported
                self._drop(fullest, entries.popitem()[0])


def _entries(names: Sequence[int], group_idx: int) -> Sequence[int]:
    """Return names of blocks that no other KV group has; those of the first group are unchanged."""
    first = group_idx << _NAME_BITS
    return [first | name for name in names] if first else names
