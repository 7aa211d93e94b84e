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
    """All live sequences of an engine, and the moves between their places.

    Args:
        config: The engine's configuration, with every None that depends on the generator decided.
        kv_groups: See `DPGroups`.
        prefix_cache_key: See `DPGroups`.
        connector: Scheduler side of the KV connector, if the engine has one.
        resumes_prefill: Whether the generator can compute a prompt from its middle on. Otherwise a
            part of a prompt's KV is useless.
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
        """Queue a sequence of mode local or prefill, or return why it is refused.

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
        """Reserve a place for a sequence whose prompt is computed elsewhere, or return why not.

        Blocks for all its tokens and the first decode step are taken at once, so that a transfer
        never waits for memory. This includes output tokens that another engine has decoded already.
        Leading blocks that are cached here need not be sent.
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

        Unknown ids, and sequences that no longer wait for KV, are ignored.

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
        """Let another engine fetch the KV of a sequence while it continues to run here.

        Only full blocks that may be shared are sent, even if more is requested. The transfer ends
        if the sequence loses its blocks. If it finishes, its blocks are held for the transfer.
        Unknown ids are ignored.

        Args:
            request_id: The sequence.
            ticket: A sealed ticket.
            now_s: Monotonic clock.

        Raises:
            TransferError: The connector cannot use the ticket; the sequence continues.
        """
        seq = self._sequences.get(request_id)
        if seq is None or seq.transfer is None or self._connector is None:
            return
        num_final = 0
        if seq.status is SequenceStatus.RUNNING and not seq.is_converted:
            # Only steps that are over count; the last token's step may be under way.
            num_final = min(seq.num_computed_tokens, seq.num_tokens - 1)
        num_full = num_final - num_final % self._groups.block_multiple
        block_ids = tuple(map(tuple, seq.block_ids))
        self._connector.lend(
            seq.transfer_with(ticket),
            SaveProgress(request_id, seq.dp_group, block_ids, num_full),
            now_s,
        )

    def activate(self, request_id: str, token_ids: list[int], now_s: float) -> Sequence | None:
        """Let a reserved sequence run once its KV is here, or compute its prompt here.

        Args:
            request_id: The reserved sequence; unknown ids are ignored.
            token_ids: All output tokens that the client has, including those of the reservation.
                If empty, the prompt is computed here.
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
        """Note that the requested KV is in the sequence's blocks, which can now be indexed.

        Args:
            request_id: The sequence.
            is_converted: Whether the KV came in another dtype and so must not be shared.

        Returns:
            The live sequence whose client must be notified, if any.
        """
        return self._kv_ended(request_id, None, 0.0, is_converted=is_converted)

    def kv_failed(
        self, request_id: str, failure: Failure, now_s: float, *, is_converted: bool = False
    ) -> Sequence | None:
        """Note that a load has failed and writes nothing more; keep the verified part.

        A sequence from the queue continues from there at once. So does an activated one, unless
        `kv_load_failure_policy` is "fail", which ends it. Another reserved sequence continues with
        its next ticket, or waits for one.

        Args:
            request_id: The sequence.
            failure: The reason, and the number of tokens whose KV did arrive.
            now_s: Monotonic clock.
            is_converted: Whether that part came in another dtype and so must not be shared.

        Returns:
            The sequence whose client must be notified, if any.
        """
        return self._kv_ended(request_id, failure, now_s, is_converted=is_converted)

    def release_held(self, request_id: str) -> None:
        """Free blocks that another engine has fetched, or will not fetch."""
        self._departed.release(request_id)

    # --- requests out --------------------------------------------------------------------------

    def abort(self, request_id: str, reason: AbortReason = "abort") -> None:
        """Drop a sequence in any place, and count it as `reason`; unknown ids are ignored."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            seq.is_aborted = True
            self._finish(seq, reason)
        elif request_id in self._departed.held and self._connector is not None:
            held = self._departed.held[request_id]
            held.is_aborted = True
            self._connector.cancel(request_id)

    def abort_client(self, client: bytes) -> int:
        """Drop every sequence of a client that is gone; return the number of live ones."""
        live = [s.request_id for s in self._sequences.values() if s.client == client]
        held = [s.request_id for s in self._departed.held.values() if s.client == client]
        for request_id in (*live, *held):
            self.abort(request_id)
        return len(live)

    def expire(self, now_s: float) -> list[Sequence]:
        """End the reservations that were not activated in time, and return them."""
        lapsed = self._loads.lapsed(now_s)
        for seq in lapsed:
            self._finish(seq, "error")
        return lapsed

    # --- views ---------------------------------------------------------------------------------

    def get(self, request_id: str) -> Sequence | None:
        """Return the live sequence of this id, if any."""
        return self._sequences.get(request_id)

    def is_of(self, client: bytes, request_id: str) -> bool:
        """Return whether a sequence, live or with held blocks, belongs to this client."""
        seq = self._sequences.get(request_id) or self._departed.held.get(request_id)
        return seq is not None and seq.client == client

    def next_deadline_s(self) -> float | None:
        """Return when the next reservation lapses; None if there is none."""
        return self._loads.next_deadline_s()

    def is_ending(self, request_id: str) -> bool:
        """Return whether only the held blocks of an aborted sequence are left of this id."""
        seq = self._departed.held.get(request_id)
        return seq is not None and seq.is_aborted

    @property
    def clients(self) -> set[bytes]:
        """Return the clients with unfinished sequences."""
        return {seq.client for seq in self._sequences.values()}

    @property
    def num_live(self) -> int:
        """Return the number of unfinished sequences and of finished ones with blocks in use."""
        return len(self._sequences) + len(self._departed)

    @property
    def awaits_connector(self) -> bool:
        """Return whether a sequence or a held block needs news from the connector."""
        return bool(self._departed.held) or self._loads.awaits_connector

    @property
    def num_recompute_tokens(self) -> int:
        """Return the prompt tokens that are computed here because their KV did not come."""
        return self._loads.num_recompute_tokens

    @property
    def num_waiting(self) -> int:
        """Return the number of queued sequences."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Return the tokens that the queued sequences have to compute."""
        return self._waiting.num_tokens

    def group_rooms(self) -> list[GroupSnapshot]:
        """Return the free slots and blocks of each DP group, without its load.

        The load would cost a look at every sequence.
        """
        running, reserved = self._running.num_in, self._loads.num_in
        return [
            self._groups.snapshot(g, running[g], reserved[g], self._waiting.num_asking_for[g])
            for g in range(len(self._groups))
        ]

    def group_snapshots(self) -> list[GroupSnapshot]:
        """Return the free slots, free blocks and load of each DP group."""
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
        """Return totals and gauges of each DP group."""
        running, reserved = self._running.num_in, self._loads.num_in
        return [self._groups.counters(g, running[g], reserved[g]) for g in range(len(self._groups))]

    @property
    def prefix_feed(self) -> PrefixFeed:
        """Return the events of the prefix caches."""
        return self._groups.prefix_feed

    def reset_prefix_cache(self) -> None:
        """Forget every cached block; running sequences keep theirs."""
        self._groups.prefixes.reset()

    def check_invariants(self) -> None:
        """Assert that every sequence is in one place, with the slot and blocks of that place."""
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
        """Run or end a sequence that has waited for KV, if it need not wait longer."""
        match self._loads.verdict(seq):
            case Verdict.RUN:
                self._run(seq)
            case Verdict.FAIL:
                self._finish(seq, "error")
            case Verdict.WAIT:
                pass

    def _run(self, seq: Sequence) -> None:
        # The last known token is always computed here, because its logits give the next one.
        seq.num_computed_tokens = min(seq.num_computed_tokens, seq.num_tokens - 1)
        seq.status = SequenceStatus.RUNNING
        self._running.add(seq)

    def _preempt(self, seq: Sequence) -> None:
        """Take slot and blocks from a sequence; it recomputes its tokens when there is room."""
        self._running.remove(seq)
        if self._connector is not None:
            self._connector.request_preempted(seq.request_id)
        self._groups.give_back_slot(seq)
        self._groups.give_back_blocks(seq)
        seq.num_preemptions += 1
        self._groups.stats[seq.dp_group].num_preemptions += 1
        self._waiting.push_front(seq)

    def _hand_over(self, seq: Sequence) -> None:
        """After a prefill, free the slot and keep the blocks until the consumer has them."""
        assert self._connector is not None
        self._running.remove(seq)
        del self._sequences[seq.request_id]
        self._count_finished(seq, "handed_over")
        hold = self._connector.request_finished(seq.request_id, seq.block_ids)
        self._retire(seq, hold=hold)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence for good; every path out of the engine but `_hand_over` ends here."""
        if seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        elif seq.status is SequenceStatus.RUNNING:
            self._running.remove(seq)
        self._loads.forget(seq)
        del self._sequences[seq.request_id]
        self._count_finished(seq, reason)
        hold = False
        if self._connector is not None:
            # No consumer fetches these blocks. A normal end may still save its KV to a store.
            if seq.is_aborted or reason == "error" or seq.mode == "prefill":
                self._connector.cancel(seq.request_id)
            hold = self._connector.request_finished(seq.request_id, seq.block_ids)
        self._retire(seq, hold=hold)

    def _retire(self, seq: Sequence, *, hold: bool) -> None:
        self._departed.retire(seq, hold=hold, is_under_way=self._is_under_way(seq))

    @abstractmethod
    def _is_under_way(self, seq: Sequence) -> bool:
        """Return whether a step under way computes a sequence."""

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
