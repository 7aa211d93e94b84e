"""Events of the prefix caches of an engine's DP groups for clients that follow them. Pure.

Owner: the DP groups, on the engine's core thread. No history is kept: a new follower, and one that
has missed a batch, starts with a listing of all cached blocks, and without followers no event is
recorded. Each event names its KV group, because a prefix is cached only if every group serves it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_transfer.block_hash import block_names
from replicas.messages import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from replicas.messages import KVEvent


class PrefixJournal:
    """Changes of a DP group's block pools since they were last taken, in order; written by these.

    Attributes:
        is_kept: Whether changes are recorded.
    """

    def __init__(self) -> None:
        self.is_kept = False
        # Runs of stored or removed hashes of one KV group; None: all pools were cleared.
        self._runs: list[tuple[type[BlockStored | BlockRemoved], int, list[bytes]] | None] = []

    def store(self, block_hash: bytes, group_idx: int = 0) -> None:
        """Record that a block of a KV group can be found."""
        self._add(BlockStored, group_idx, block_hash)

    def remove(self, block_hash: bytes, group_idx: int = 0) -> None:
        """Record that a block of a KV group can no longer be found."""
        self._add(BlockRemoved, group_idx, block_hash)

    def clear(self) -> None:
        """Record that no block of any KV group can be found; earlier changes are dropped."""
        self._runs = [None] if self.is_kept else []

    def take(self) -> list[KVEvent]:
        """Remove and return the changes."""
        runs, self._runs = self._runs, []
        return [AllBlocksCleared() if r is None else r[0](block_names(r[2]), r[1]) for r in runs]

    def _add(
        self, kind: type[BlockStored | BlockRemoved], group_idx: int, block_hash: bytes
    ) -> None:
        if not self.is_kept:
            return
        last = self._runs[-1] if self._runs else None
        if last is None or last[0] is not kind or last[1] != group_idx:
            last = kind, group_idx, []
            self._runs.append(last)
        last[2].append(block_hash)


class PrefixFeed:
    """Source of event batches for followers.

    Args:
        journals: One for each DP group.
        list_group: Returns for each KV group the hashes of all blocks that can be found now in a DP
            group.
    """

    def __init__(
        self,
        journals: Sequence[PrefixJournal],
        list_group: Callable[[int], Iterable[Iterable[bytes]]],
    ) -> None:
        self._journals = journals
        self._list_group = list_group
        self._seqs = [0] * len(journals)

    def follow(self, *, is_followed: bool) -> None:
        """Start or stop recording changes."""
        for journal in self._journals:
            journal.is_kept = is_followed
            if not is_followed:
                journal.take()

    def take(self) -> list[KVEventBatch]:
        """Return the changes since the last call, one batch for each DP group that has any."""
        batches = []
        for group, journal in enumerate(self._journals):
            events = journal.take()
            if events:
                self._seqs[group] += 1
                batches.append(KVEventBatch(self._seqs[group], group, events))
        return batches

    def listing(self) -> list[KVEventBatch]:
        """Return all blocks that can be found; call it directly after `take`."""
        return [
            KVEventBatch(
                seq,
                dp_group,
                [
                    BlockStored(block_names(hashes), group_idx)
                    for group_idx, hashes in enumerate(self._list_group(dp_group))
                ],
                True,
            )
            for dp_group, seq in enumerate(self._seqs)
        ]
