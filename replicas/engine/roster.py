"""All sequences of an engine from arrival to end, with their places and resources.

Owner of all live sequences and of the DP groups' slots and blocks, on the engine's core thread.
Pure: time is an argument `now_s`; KV bytes and tensors are elsewhere. A sequence is in exactly one
place: queued, running, or waiting for KV. The scheduler decides which sequence runs next.

A sequence that waits for KV holds a slot and blocks for its whole prompt and is never preempted. It
ends or continues independently of other sequences, so no two can wait for each other.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import msgspec

from kv_transfer.connector import SaveProgress
from replicas.engine.departed import Departed
from replicas.engine.groups import DPGroups
from replicas.engine.loads import KVLoads, Verdict, is_loading
from replicas.engine.running import RunningRows
from replicas.engine.sequence import SequenceStatus
from replicas.engine.waiting import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from kv_transfer.connector import Failure, KVConnectorScheduler
    from replicas.config import EngineConfig
    from replicas.engine.prefix_feed import PrefixFeed
    from replicas.engine.sequence import Sequence
    from replicas.engine.step import StepKind
    from replicas.kv_groups import KVGroup
    from replicas.messages import (
        AbortReason,
        FinishReason,
        GroupCounters,
        GroupSnapshot,
        RefusalReason,
    )


class Roster(ABC):
    """See the module docstring.

    Args:
        config: The engine's configuration, every None that depends on the generator decided.
        kv_groups: See `DPGroups`.
        prefix_cache_key: See `DPGroups`.
        connector: Scheduler side of the KV connector, if the engine has one.
        resumes_prefill: Whether the generator can compute a prompt from its middle on. One that
            cannot has no use for a part of a prompt's KV.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        kv_groups: SequenceOf[KVGroup],
        prefix_cache_key: bytes,
        connector: KVConnectorScheduler | None = None,
        resumes_prefill: bool = True,
    ) -> None:
        self._config = config
        self._connector = connector
        self._groups = DPGroups(config, kv_groups, prefix_cache_key)
        self._loads = KVLoads(config, self._groups, connector, resumes_prefill=resumes_prefill)
        self._sequences: dict[str, Sequence] = {}
        self._waiting = WaitingQueue(len(self._groups))
        decode_kind: StepKind = "mixed" if config.mixed_batches else "decode"
        self._running = RunningRows(decode_kind, len(self._groups))
        self._departed = Departed(self._groups)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(waiting={len(self._waiting)}, running={len(self._running)}, "
            f"{self._departed!r}, {self._loads!r}, {self._groups!r})"
        )

    # --- requests in ---------------------------------------------------------------------------

    def add(self, seq: Sequence, now_s: float) -> RefusalReason | None:
        """Queue a sequence of mode local or prefill, or say why not.

        Args:
            seq: A new sequence; `dp_group` is the asked group or -1.
            now_s: Monotonic clock.

        Raises:
            TransferError: The connector cannot use its ticket; nothing was queued.
        """
        refusal = self._refusal(seq)
        if refusal is not None:
            return refusal
        limit = self._config.max_num_waiting
        if limit is not None and len(self._waiting) >= limit + self._groups.num_empty_slots:
            return "queue_full"
        if self._connector is not None and seq.transfer is not None:
            self._connector.on_new_request(seq.transfer, now_s)
        self._sequences[seq.request_id] = seq
        self._waiting.push(seq)
        return None

    def reserve(self, seq: Sequence, now_s: float) -> RefusalReason | None:
        """Take a slot and blocks for a sequence whose prompt is computed elsewhere, or say why not.

        Blocks for the whole prompt and the first decode step are taken at once, so that a transfer
        never waits for memory. Leading blocks that are cached here need not be sent. So it is with
        the tokens of one that another engine has begun to decode.
        """
        refusal = self._refusal(seq)
        if refusal is not None:
            return refusal
        place = self._groups.place(seq, seq.num_tokens + 1)
        if place is None:
            return "no_blocks" if self._groups.has_slot(seq) else "no_slot"
        self._groups.admit(seq, place, seq.num_tokens + 1)
        self._sequences[seq.request_id] = seq
        self._loads.reserve(seq, now_s)
        return None

    def load(self, request_id: str, ticket: bytes, epoch: int, now_s: float) -> None:
        """Start fetching a reserved sequence's KV, after the end of a transfer under way.

        Unknown ids, and sequences that wait for no KV any more, are ignored.

        Args:
            request_id: The reserved sequence.
            ticket: A sealed ticket.
            epoch: The client's number for it.
            now_s: Monotonic clock.

        Raises:
            TransferError: The connector cannot use the ticket; the reservation stands.
        """
        self._loads.load(request_id, ticket, epoch, now_s)

    def lend(self, request_id: str, ticket: bytes, now_s: float) -> None:
        """Let another engine fetch the KV of a sequence that runs here, and goes on.

        Only of blocks that are full, and that somebody else may have; of what is asked beyond them
        nothing goes. It ends with the sequence's blocks being taken away: unless it finishes, for
        then they are held. Unknown ids are ignored.

        Args:
            request_id: The sequence.
            ticket: A sealed ticket.
            now_s: Monotonic clock.

        Raises:
            TransferError: The connector cannot use the ticket; the sequence goes on.
        """
        seq = self._sequences.get(request_id)
        if seq is None or seq.transfer is None or self._connector is None:
            return
        num_final = 0
        if seq.status is SequenceStatus.RUNNING and not seq.is_converted:
            # Of steps that are over: that of the last token may be under way.
            num_final = min(seq.num_computed_tokens, seq.num_tokens - 1)
        num_full = num_final - num_final % self._groups.block_multiple
        block_ids = tuple(map(tuple, seq.block_ids))
        self._connector.lend(
            seq.transfer_with(ticket),
            SaveProgress(request_id, seq.dp_group, block_ids, num_full),
            now_s,
        )

    def activate(self, request_id: str, token_ids: list[int], now_s: float) -> Sequence | None:
        """Let a reserved sequence run: from its KV once that is here, or on its own without tokens.

        Args:
            request_id: The reserved sequence; unknown ids are ignored.
            token_ids: Output tokens that the client has already, those that it was reserved with
                among them; empty: compute the prompt here.
            now_s: Monotonic clock.

        Returns:
            The sequence if this ended it, because its KV did not come and must not be recomputed.
        """
        seq = self._loads.activate(request_id, token_ids, now_s)
        if seq is None:
            return None
        self._go_on(seq)
        return seq if seq.status is SequenceStatus.FINISHED else None

    def kv_received(self, request_id: str, *, is_converted: bool = False) -> Sequence | None:
        """The asked KV is in the sequence's blocks; only now may anybody find those blocks.

        Args:
            request_id: The sequence.
            is_converted: Whether it came in another dtype, and nobody else may have it.

        Returns:
            The live sequence whose client should know, if any.
        """
        return self._kv_ended(request_id, None, 0.0, is_converted=is_converted)

    def kv_failed(
        self, request_id: str, failure: Failure, now_s: float, *, is_converted: bool = False
    ) -> Sequence | None:
        """The asked KV will not come and nothing more is written; what was verified is kept.

        A sequence from the queue goes on from there at once, and so does an activated one unless
        the configuration forbids that: then it is finished. Another reserved one goes on with its
        next ticket, or waits for one.

        Args:
            request_id: The sequence.
            failure: Why, and how much of its prompt is here all the same.
            now_s: Monotonic clock.
            is_converted: Whether that part came in another dtype, and nobody else may have it.

        Returns:
            The sequence whose client should know, if any.
        """
        return self._kv_ended(request_id, failure, now_s, is_converted=is_converted)

    def release_held(self, request_id: str) -> None:
        """Free blocks that another engine has fetched, or will not fetch any more."""
        self._departed.release(request_id)

    # --- requests out --------------------------------------------------------------------------

    def abort(self, request_id: str, reason: AbortReason = "abort") -> None:
        """Drop a sequence wherever it is, and count it as `reason`; unknown ids are ignored."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            seq.is_aborted = True
            self._finish(seq, reason)
        elif request_id in self._departed.held and self._connector is not None:
            self._departed.held[request_id].is_aborted = True
            self._connector.cancel(request_id)

    def abort_client(self, client: bytes) -> int:
        """Drop every sequence of a client that is gone; returns how many were live."""
        live = [s.request_id for s in self._sequences.values() if s.client == client]
        held = [s.request_id for s in self._departed.held.values() if s.client == client]
        for request_id in (*live, *held):
            self.abort(request_id)
        return len(live)

    def expire(self, now_s: float) -> list[Sequence]:
        """Give up reservations that nobody activated in time; returns them, finished."""
        lapsed = self._loads.lapsed(now_s)
        for seq in lapsed:
            self._finish(seq, "error")
        return lapsed

    # --- views ---------------------------------------------------------------------------------

    def get(self, request_id: str) -> Sequence | None:
        """The live sequence of this id, if any."""
        return self._sequences.get(request_id)

    def is_of(self, client: bytes, request_id: str) -> bool:
        """Whether a live sequence, or one whose blocks are still held, is this client's."""
        seq = self._sequences.get(request_id) or self._departed.held.get(request_id)
        return seq is not None and seq.client == client

    def next_deadline_s(self) -> float | None:
        """When the next reservation lapses."""
        return self._loads.next_deadline_s()

    def is_ending(self, request_id: str) -> bool:
        """Whether all that is left of this id is an aborted sequence's hold on its blocks."""
        seq = self._departed.held.get(request_id)
        return seq is not None and seq.is_aborted

    @property
    def clients(self) -> set[bytes]:
        """Whose sequences are not finished."""
        return {seq.client for seq in self._sequences.values()}

    @property
    def num_live(self) -> int:
        """Sequences that are not finished, and finished ones whose blocks are still in use."""
        return len(self._sequences) + len(self._departed)

    @property
    def awaits_connector(self) -> bool:
        """Whether a sequence cannot go on, or a block not be freed, before the connector speaks."""
        return bool(self._departed.held) or self._loads.awaits_connector

    @property
    def num_recompute_tokens(self) -> int:
        """Prompt tokens that are computed here because their KV did not come."""
        return self._loads.num_recompute_tokens

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that the queued sequences have to compute."""
        return self._waiting.num_tokens

    def group_rooms(self) -> list[GroupSnapshot]:
        """What each DP group has left; nothing of its load, which looks at every sequence."""
        running, reserved = self._running.num_in, self._loads.num_in
        return [
            self._groups.snapshot(g, running[g], reserved[g], self._waiting.num_asking_for[g])
            for g in range(len(self._groups))
        ]

    def group_snapshots(self) -> list[GroupSnapshot]:
        """What each DP group has left, and has to do."""
        contexts: list[list[int]] = [[] for _ in range(len(self._groups))]
        prompts: list[list[Sequence]] = [[] for _ in contexts]
        for seq in itertools.chain(self._running, self._loads.awaiting):
            contexts[seq.dp_group].append(len(seq.token_ids))
        for seq in self._running.others:
            prompts[seq.dp_group].append(seq)
        return [
            _with_load(room, contexts[group], prompts[group], self._waiting.load_of(group))
            for group, room in enumerate(self.group_rooms())
        ]

    def group_counters(self) -> list[GroupCounters]:
        """Totals and gauges of each DP group."""
        running, reserved = self._running.num_in, self._loads.num_in
        return [self._groups.counters(g, running[g], reserved[g]) for g in range(len(self._groups))]

    @property
    def prefix_feed(self) -> PrefixFeed:
        """What the prefix caches have to tell."""
        return self._groups.prefix_feed

    def reset_prefix_cache(self) -> None:
        """Forget every cached block; what runs is not touched."""
        self._groups.prefixes.reset()

    def check_invariants(self) -> None:
        """Every sequence is in exactly one place, and holds what that place means."""
        self._groups.check_invariants([*self._sequences.values(), *self._departed])
        self._departed.check_invariants()
        self._waiting.check_invariants()
        self._loads.check_invariants()
        self._running.check_invariants()
        places = [*self._waiting, *self._running, *self._loads.awaiting]
        assert len(places) == len(self._sequences)
        assert {id(s) for s in places} == {id(s) for s in self._sequences.values()}
        for seq in places:
            assert (seq.slot < 0) == (seq.status is SequenceStatus.WAITING)
            assert (not seq.block_ids) == (seq.status is SequenceStatus.WAITING)
        assert not any(is_loading(s) for s in (*self._waiting, *self._running))

    # --- from place to place --------------------------------------------------------------------

    def _refusal(self, seq: Sequence) -> RefusalReason | None:
        is_known = seq.request_id in self._sequences or seq.request_id in self._departed.held
        return "duplicate" if is_known else None

    def _kv_ended(
        self, request_id: str, failure: Failure | None, now_s: float, *, is_converted: bool
    ) -> Sequence | None:
        seq = self._sequences.get(request_id)
        if seq is None:
            self.release_held(request_id)
            return None
        if not is_loading(seq):
            return None
        has_client = seq.status is SequenceStatus.RESERVED
        self._loads.end_load(seq, failure, is_converted=is_converted)
        if failure is not None and has_client and self._loads.try_next_ticket(seq, now_s):
            return None
        self._go_on(seq)
        return seq if has_client else None

    def _go_on(self, seq: Sequence) -> None:
        """Let a sequence that has waited for KV run or end, if it is time."""
        match self._loads.verdict(seq):
            case Verdict.RUN:
                self._run(seq)
            case Verdict.FAIL:
                self._finish(seq, "error")
            case Verdict.WAIT:
                pass

    def _run(self, seq: Sequence) -> None:
        # The last known token is always computed here: its logits give the next one.
        seq.num_computed_tokens = min(seq.num_computed_tokens, seq.num_tokens - 1)
        seq.status = SequenceStatus.RUNNING
        self._running.add(seq)

    def _preempt(self, seq: Sequence) -> None:
        """Take everything from a sequence; it computes its tokens again when there is room."""
        self._running.remove(seq)
        if self._connector is not None:
            self._connector.request_preempted(seq.request_id)
        self._groups.give_back_slot(seq)
        self._groups.give_back_blocks(seq)
        seq.num_preemptions += 1
        self._groups.stats[seq.dp_group].num_preemptions += 1
        self._waiting.push_front(seq)

    def _hand_over(self, seq: Sequence) -> None:
        """Prefill is done: free the slot, keep the blocks until the ticket's holder has them."""
        assert self._connector is not None
        self._running.remove(seq)
        del self._sequences[seq.request_id]
        self._count_finished(seq, "handed_over")
        hold = self._connector.request_finished(seq.request_id, seq.block_ids)
        self._retire(seq, hold=hold)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence for good; every path out of the engine but `_hand_over` comes here."""
        if seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        elif seq.status is SequenceStatus.RUNNING:
            self._running.remove(seq)
        self._loads.forget(seq)
        del self._sequences[seq.request_id]
        self._count_finished(seq, reason)
        hold = False
        if self._connector is not None:
            # What was computed to the end may still be kept in a store; nobody comes to fetch it.
            if seq.is_aborted or reason == "error" or seq.mode == "prefill":
                self._connector.cancel(seq.request_id)
            hold = self._connector.request_finished(seq.request_id, seq.block_ids)
        self._retire(seq, hold=hold)

    def _retire(self, seq: Sequence, *, hold: bool) -> None:
        self._departed.retire(seq, hold=hold, is_under_way=self._is_under_way(seq))

    @abstractmethod
    def _is_under_way(self, seq: Sequence) -> bool:
        """Whether a step that is under way has a sequence."""

    def _count_finished(self, seq: Sequence, reason: str) -> None:
        finished = self._groups.stats[max(seq.dp_group, 0)].requests_finished
        finished[reason] = finished.get(reason, 0) + 1


def _with_load(
    room: GroupSnapshot,
    contexts: list[int],
    prompts: list[Sequence],
    waiting: tuple[int, int, int],
) -> GroupSnapshot:
    num_waiting, num_tokens, num_pairs = waiting
    return msgspec.structs.replace(
        room,
        num_context_tokens=sum(contexts),
        max_context_tokens=max(contexts, default=0),
        num_prompt_tokens=num_tokens + sum(s.num_new_tokens for s in prompts),
        num_prompt_pairs=num_pairs + sum(s.num_new_pairs for s in prompts),
        num_prompts=num_waiting + len(prompts),
    )
