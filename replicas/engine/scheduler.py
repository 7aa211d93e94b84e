"""Continuous batching: which sequences advance in the next step, and by how many tokens.

Owner of the waiting and running sequences and of the DP groups' slots and blocks; it lives on the
engine's core thread. Pure: time enters as `now_s`, KV bytes and tensors are elsewhere.
There is no prefill phase and no decode phase: a sequence has `num_computed_tokens`, and each step
advances it towards `num_tokens` within a token budget. Chunked prefill, prefix hits, resumption
after preemption and KV that came from another engine or from a store are all that one rule.
A sequence whose KV is still to come holds a slot and blocks for its whole prompt and is never
preempted: it ends or goes on without anybody else's doing, so that no two can wait for each other.
Source: vLLM v1/core/sched/scheduler.py (token accounting, running before waiting, preemption of the
last running sequence by recompute).
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from kv_transfer.errors import TransferError
from replicas.engine.groups import DPGroups
from replicas.engine.sequence import Sequence, SequenceStatus
from replicas.engine.step import NewSequence, ScheduledBatch
from replicas.messages import TokenOutput

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kv_transfer.connector import Failure, KVConnectorScheduler
    from replicas.config import EngineConfig
    from replicas.engine.step import StepKind, StepResult
    from replicas.messages import FinishReason, GroupCounters, GroupSnapshot, RefusalReason


_NO_TICKET = "no_ticket"
"""Why KV is missing that no ticket was good for: the request was activated as if it had come."""


def failure_word(error: TransferError) -> str:
    """Why KV does not come for a ticket that the connector cannot use.

    A word, not the error's text: it becomes a metric's label.
    """
    return error.reason.value if error.reason is not None else "bad_ticket"


class _Admission(Enum):
    """What became of a queued sequence's turn."""

    ADMITTED = "admitted"
    NO_ROOM = "no room"
    ASKING = "asking"
    """The connector does not know yet whether it can load anything; there may be room or not."""


class _StepPlan:
    """The step that is being put together."""

    def __init__(self, kind: StepKind, budget: int) -> None:
        self.kind = kind
        self.budget = budget
        self.sequences: list[Sequence] = []
        self.counts: list[int] = []
        self.appended: list[tuple[int, list[int]]] = []

    def takes(self, num_new_tokens: int) -> bool:
        """Whether a sequence with so many tokens to compute belongs into a step of this kind."""
        if self.kind == "mixed":
            return True
        return (num_new_tokens == 1) == (self.kind == "decode")

    def add(self, seq: Sequence, count: int) -> None:
        self.sequences.append(seq)
        self.counts.append(count)
        self.budget -= count


class Scheduler:
    """Decides each step; see the module docstring.

    Args:
        config: The engine's configuration, every None that depends on the generator decided.
        num_blocks: Blocks of each DP group, null block included.
        prefix_cache_key: See `DPGroups`.
        max_model_len: Longest sequence in tokens.
        eos_token_ids: The model's end tokens.
        connector: Scheduler side of the KV connector, if the engine has one.
        resumes_prefill: Whether the generator can compute a prompt from its middle on. One that
            cannot has no use for a part of a prompt's KV.
        chunk_alignment: A chunk that leaves a part of its prompt for later ends on a multiple of
            so many tokens, at most the token budget of a step: a whole budget always makes a chunk.
    """

    def __init__(  # noqa: PLR0913 - keyword-only: what the configuration alone cannot tell
        self,
        config: EngineConfig,
        *,
        num_blocks: int,
        prefix_cache_key: bytes,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        connector: KVConnectorScheduler | None = None,
        resumes_prefill: bool = True,
        chunk_alignment: int = 1,
    ) -> None:
        assert 1 <= chunk_alignment <= config.max_num_batched_tokens, f"{chunk_alignment=}"
        self._config = config
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._connector = connector
        self._resumes_prefill = resumes_prefill
        self._chunk_alignment = chunk_alignment
        self._groups = DPGroups(config, num_blocks, prefix_cache_key)
        self._sequences: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._reserved: dict[str, Sequence] = {}
        # Queued or reserved ones for which the connector cannot tell yet what it will load.
        self._asking: dict[str, Sequence] = {}
        self._loading: dict[str, Sequence] = {}
        # Finished here, but another engine still reads or writes their blocks.
        self._held: dict[str, Sequence] = {}
        self._num_waiting_tokens = 0
        # Queued sequences by the group that they ask for; index -1 counts those that ask for none.
        self._num_waiting_in = [0] * (len(self._groups) + 1)
        self._prefill_streak = 0
        self._num_recompute_tokens = 0
        self._draining = False

    def __repr__(self) -> str:
        return (
            f"Scheduler(waiting={len(self._waiting)}, running={len(self._running)}, "
            f"loading={len(self._loading)}, reserved={len(self._reserved)}, "
            f"held={len(self._held)}, {self._groups!r})"
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
        self._enqueue(seq)
        return None

    def reserve(self, seq: Sequence, now_s: float) -> RefusalReason | None:
        """Take a slot and blocks for a sequence whose prompt is computed elsewhere, or say why not.

        Blocks for the whole prompt and the first decode step are taken at once, so that a transfer
        never waits for memory. Leading blocks that are cached here need not be sent.
        """
        refusal = self._refusal(seq)
        if refusal is not None:
            return refusal
        place = self._groups.place(seq, seq.num_tokens + 1)
        if place is None:
            return "no_slot" if self._groups.choose(seq) is None else "no_blocks"
        group, hits = place
        self._groups.admit(seq, group, hits, seq.num_tokens + 1)
        self._sequences[seq.request_id] = self._reserved[seq.request_id] = seq
        seq.status = SequenceStatus.RESERVED
        seq.deadline_s = now_s + self._config.reservation_timeout_s
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
        seq = self._reserved.get(request_id)
        if seq is None or seq.transfer is None or self._connector is None:
            return
        if seq.is_loading:
            seq.next_load = (ticket, epoch)
            self._connector.cancel(request_id)
            return
        seq.load_epoch = epoch
        try:
            self._connector.on_new_request(
                msgspec.structs.replace(seq.transfer, ticket=ticket), now_s
            )
        except TransferError as error:
            seq.load_failure = failure_word(error)
            raise
        seq.load_failure = None
        seq.is_loading = seq.is_announced = True
        self._ask(self._connector, seq)

    def activate(self, request_id: str, token_ids: list[int], now_s: float) -> Sequence | None:
        """Let a reserved sequence run: from its KV once that is here, or on its own without tokens.

        Args:
            request_id: The reserved sequence; unknown ids are ignored.
            token_ids: Output tokens that the client has already; empty: compute the prompt here.
            now_s: Monotonic clock.

        Returns:
            The sequence if this ended it, because its KV did not come and must not be recomputed.
        """
        seq = self._reserved.get(request_id)
        if seq is None or seq.is_activated:
            return None
        seq.is_activated = True
        seq.token_ids.extend(token_ids)
        if self._connector is not None and seq.transfer is not None:
            if not token_ids and seq.is_loading:
                self._connector.cancel(request_id)
            elif not seq.is_announced:
                # Nobody sends its KV, but what is computed here may be kept.
                self._connector.on_new_request(seq.transfer, now_s)
        self._start_if_ready(seq)
        return seq if seq.status is SequenceStatus.FINISHED else None

    def kv_received(self, request_id: str, *, is_converted: bool = False) -> Sequence | None:
        """The asked KV is in the sequence's blocks; only now may anybody find those blocks.

        Args:
            request_id: The sequence.
            is_converted: Whether it came in another dtype, and nobody else may have it.

        Returns:
            The live sequence whose client should know, if any.
        """
        seq = self._sequences.get(request_id)
        if seq is None:
            self.release_held(request_id)
            return None
        if not seq.is_loading:
            return None
        seq.next_load = None
        self._end_load(seq, seq.load_end, is_converted=is_converted)
        if request_id in self._loading:
            self._run_loaded(seq)
            return None
        self._start_if_ready(seq)
        return seq

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
        seq = self._sequences.get(request_id)
        if seq is None:
            self.release_held(request_id)
            return None
        if not seq.is_loading:
            return None
        whole_blocks = failure.num_tokens - failure.num_tokens % self._config.block_size
        num_kept = whole_blocks if self._resumes_prefill else 0
        self._end_load(seq, num_kept, is_converted=is_converted)
        if request_id in self._loading:
            self._num_recompute_tokens += seq.load_end - seq.num_computed_tokens
            self._run_loaded(seq)
            return None
        seq.load_failure = failure.reason.value
        return self._go_on_without(seq, now_s)

    def release_held(self, request_id: str) -> None:
        """Free blocks that another engine has fetched, or will not fetch any more."""
        seq = self._held.pop(request_id, None)
        if seq is not None:
            self._groups.give_back_blocks(seq)

    def drain(self) -> None:
        """Refuse every new sequence from now on."""
        self._draining = True

    # --- requests out --------------------------------------------------------------------------

    def abort(self, request_id: str) -> None:
        """Drop a sequence wherever it is; unknown ids are ignored."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            seq.is_aborted = True
            self._finish(seq, "abort")
        elif request_id in self._held and self._connector is not None:
            self._held[request_id].is_aborted = True
            self._connector.cancel(request_id)

    def abort_client(self, client: bytes) -> int:
        """Drop every sequence of a client that is gone; returns how many were live."""
        live = [s.request_id for s in self._sequences.values() if s.client == client]
        held = [s.request_id for s in self._held.values() if s.client == client]
        for request_id in (*live, *held):
            self.abort(request_id)
        return len(live)

    def expire(self, now_s: float) -> list[Sequence]:
        """Give up reservations that nobody activated in time; returns them, finished."""
        lapsed = [
            s for s in self._reserved.values() if not s.is_activated and now_s >= s.deadline_s
        ]
        for seq in lapsed:
            self._finish(seq, "error")
        return lapsed

    # --- one step ------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch | None:
        """Put the next step together: running sequences first, then waiting ones.

        Returns:
            The step, or None when nothing can run now.
        """
        if self._connector is not None:
            for seq in list(self._asking.values()):
                if seq.status is SequenceStatus.RESERVED:
                    self._ask(self._connector, seq)
        kinds = deque(self._kinds_to_try())
        while kinds:
            kind = kinds.popleft()
            plan = _StepPlan(kind, self._config.max_num_batched_tokens)
            preempted = self._advance_running(plan)
            # Blocks that were just taken away are for those who needed them; if none of these can
            # run after all, others may, in groups that nobody waits for.
            if kind != "decode" and not (preempted and plan.sequences):
                self._admit_waiting(plan)
            if plan.sequences:
                self._prefill_streak = self._prefill_streak + 1 if kind == "prefill" else 0
                return self._build(plan)
            if preempted and kind == "decode":
                # It took everything from its own sequences: what they gave back may be enough.
                kinds.append("prefill")
        return None

    def update(
        self, batch: ScheduledBatch, result: StepResult
    ) -> list[tuple[Sequence, TokenOutput]]:
        """Take over what a step gave.

        Args:
            batch: What `schedule` returned.
            result: What the worker made of it.

        Returns:
            One output for each sequence that got a token.
        """
        by_slot = {seq.slot: seq for seq in self._running}
        outputs = []
        for slot, count, token_id in zip(
            batch.slots, batch.num_scheduled_tokens, result.token_ids, strict=True
        ):
            seq = by_slot[slot]
            seq.num_computed_tokens += count
            self._groups.cache_full_blocks(seq, seq.num_computed_tokens)
            if token_id >= 0:
                outputs.append((seq, self._append_token(seq, token_id)))
        return outputs

    # --- decode steps without a decision between them -------------------------------------------

    @property
    def is_steady(self) -> bool:
        """Whether all that is left to do is to decode what runs, and nobody fetches its KV."""
        return (
            bool(self._running)
            and not self._waiting
            and all(s.num_new_tokens == 1 and s.mode != "prefill" for s in self._running)
        )

    def num_repeats(self, batch: ScheduledBatch) -> int:
        """How often a step may run in a row before `schedule` would decide anything else.

        Until then no sequence ends and none fills or needs a block before the last of these steps,
        so that stepping once is the same: `update_run` takes over all of them together.

        Args:
            batch: What `schedule` has just returned.

        Returns:
            1 for a step that must be updated by itself.
        """
        if not self.is_steady or len(batch.slots) != len(self._running):
            return 1
        return max(1, min(self._num_plain_steps(seq) for seq in self._running))

    def _num_plain_steps(self, seq: Sequence) -> int:
        sampling = seq.request.sampling
        if not seq.num_output_tokens:
            return 1
        if sampling.stop_token_ids or not sampling.ignore_eos:
            return 1
        return min(
            len(seq.block_ids) * self._config.block_size - seq.num_computed_tokens,
            sampling.max_tokens - seq.num_output_tokens,
            self._max_model_len - seq.num_tokens,
        )

    def update_run(
        self, batch: ScheduledBatch, token_ids: list[list[int]]
    ) -> list[tuple[Sequence, TokenOutput]]:
        """Take over several repeats of one decode step.

        Args:
            batch: What `schedule` returned.
            token_ids: For each of its slots a token per step; at most `num_repeats` of them.

        Returns:
            One output for each sequence, with all of its tokens.
        """
        by_slot = {seq.slot: seq for seq in self._running}
        outputs = []
        for slot, tokens in zip(batch.slots, token_ids, strict=True):
            seq = by_slot[slot]
            earlier, last = tokens[:-1], tokens[-1]
            seq.num_computed_tokens += len(tokens)
            seq.token_ids.extend(earlier)
            self._groups.stats[seq.dp_group].generation_tokens += len(earlier)
            self._groups.cache_full_blocks(seq, seq.num_computed_tokens)
            output = self._append_token(seq, last)
            if earlier:
                output = msgspec.structs.replace(
                    output, index=output.index - len(earlier), token_ids=tokens
                )
            outputs.append((seq, output))
        return outputs

    # --- views ---------------------------------------------------------------------------------

    def progress(self, batch: ScheduledBatch) -> Iterable[tuple[Sequence, int]]:
        """Sequences whose prompt a step computes, with the tokens computed once it has run."""
        by_slot = {seq.slot: seq for seq in self._running}
        for slot, count in zip(batch.slots, batch.num_scheduled_tokens, strict=True):
            seq = by_slot[slot]
            if seq.num_computed_tokens < seq.num_prompt_tokens:
                yield seq, seq.num_computed_tokens + count

    def get(self, request_id: str) -> Sequence | None:
        """The live sequence of this id, if any."""
        return self._sequences.get(request_id)

    def is_of(self, client: bytes, request_id: str) -> bool:
        """Whether a live sequence, or one whose blocks are still held, is this client's."""
        seq = self._sequences.get(request_id) or self._held.get(request_id)
        return seq is not None and seq.client == client

    def next_deadline_s(self) -> float | None:
        """When the next reservation lapses."""
        waiting = (s.deadline_s for s in self._reserved.values() if not s.is_activated)
        return min(waiting, default=None)

    @property
    def is_draining(self) -> bool:
        """Whether new sequences are refused."""
        return self._draining

    def is_ending(self, request_id: str) -> bool:
        """Whether all that is left of this id is an aborted sequence's hold on its blocks."""
        seq = self._held.get(request_id)
        return seq is not None and seq.is_aborted

    @property
    def clients(self) -> set[bytes]:
        """Whose sequences are not finished."""
        return {seq.client for seq in self._sequences.values()}

    @property
    def num_live(self) -> int:
        """Sequences that are not finished, and finished ones whose blocks are still held."""
        return len(self._sequences) + len(self._held)

    @property
    def awaits_connector(self) -> bool:
        """Whether a sequence cannot go on, or a block not be freed, before the connector speaks."""
        return bool(self._held or self._loading or self._asking)

    @property
    def num_recompute_tokens(self) -> int:
        """Prompt tokens that are computed here because their KV did not come."""
        return self._num_recompute_tokens

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that the queued sequences have to compute."""
        return self._num_waiting_tokens

    def group_snapshots(self) -> list[GroupSnapshot]:
        """What each DP group has left."""
        running, reserved = self._count(self._running), self._count_awaiting_kv()
        return [
            self._groups.snapshot(g, running[g], reserved[g], self._num_waiting_in[g])
            for g in range(len(self._groups))
        ]

    def group_counters(self) -> list[GroupCounters]:
        """Totals and gauges of each DP group."""
        running, reserved = self._count(self._running), self._count_awaiting_kv()
        return [self._groups.counters(g, running[g], reserved[g]) for g in range(len(self._groups))]

    def reset_prefix_cache(self) -> None:
        """Forget every cached block; what runs is not touched."""
        self._groups.reset_prefix_cache()

    def check_invariants(self) -> None:
        """Every sequence is in exactly one place, and holds what that place means."""
        self._groups.check_invariants([*self._sequences.values(), *self._held.values()])
        awaiting = [*self._reserved.values(), *self._loading.values()]
        places = [*self._waiting, *self._running, *awaiting]
        assert len(places) == len(self._sequences)
        assert {id(s) for s in places} == {id(s) for s in self._sequences.values()}
        for seq in places:
            assert (seq.slot < 0) == (seq.status is SequenceStatus.WAITING)
            assert (not seq.block_ids) == (seq.status is SequenceStatus.WAITING)
        for seq in awaiting:
            # Nothing that comes may lack a place, whatever else wants blocks meanwhile.
            assert len(seq.block_ids) * self._config.block_size >= seq.num_prompt_tokens
        for seq in self._loading.values():
            assert seq.status is SequenceStatus.LOADING
            assert seq.is_loading
            assert seq.num_computed_tokens < seq.load_end <= seq.num_prompt_tokens
        for request_id, seq in self._asking.items():
            assert self._sequences[request_id] is seq
            assert seq.is_loading == (seq.status is SequenceStatus.RESERVED)
            assert seq.is_loading or seq.status is SequenceStatus.WAITING
        assert not any(s.is_loading for s in (*self._waiting, *self._running))
        assert all(s.slot < 0 for s in self._held.values())
        assert self._num_waiting_tokens == sum(s.num_new_tokens for s in self._waiting)

    # --- admission -----------------------------------------------------------------------------

    def _refusal(self, seq: Sequence) -> RefusalReason | None:
        if self._draining:
            return "draining"
        if seq.request_id in self._sequences or seq.request_id in self._held:
            return "duplicate"
        return None

    def _enqueue(self, seq: Sequence, *, front: bool = False) -> None:
        seq.status = SequenceStatus.WAITING
        self._count_waiting(seq, 1)
        if front:
            self._waiting.appendleft(seq)
        else:
            self._waiting.append(seq)

    def _count_waiting(self, seq: Sequence, sign: int) -> None:
        self._num_waiting_tokens += sign * seq.num_new_tokens
        self._num_waiting_in[seq.dp_group] += sign

    # --- KV from elsewhere ---------------------------------------------------------------------

    def _ask(self, connector: KVConnectorScheduler, seq: Sequence) -> None:
        """Let the connector load what it can for a reserved sequence, now or once it knows."""
        num_external, _ = connector.get_num_new_matched_tokens(
            seq.request_id, seq.num_computed_tokens
        )
        if num_external is None:
            self._asking[seq.request_id] = seq
            return
        self._asking.pop(seq.request_id, None)
        seq.load_end = seq.num_computed_tokens
        if seq.load_end + num_external > seq.num_prompt_tokens:
            # Of another prompt; the connector names it as cancelled.
            connector.cancel(seq.request_id)
            return
        seq.load_end += num_external
        connector.update_state_after_alloc(
            seq.request_id, seq.dp_group, seq.block_ids, num_external
        )

    def _num_external(self, seq: Sequence, num_local: int) -> int | None:
        """Tokens that the connector would load after the first `num_local`; None: not known yet."""
        if self._connector is None or not self._resumes_prefill:
            return 0
        num_external, _ = self._connector.get_num_new_matched_tokens(seq.request_id, num_local)
        if num_external is None:
            self._asking[seq.request_id] = seq
        else:
            self._asking.pop(seq.request_id, None)
        return num_external

    def _admit_loading(self, seq: Sequence, group: int, hits: list[int], num_external: int) -> None:
        """Give a queued sequence slot and blocks, and let the connector fill the first of them."""
        assert self._connector is not None
        self._groups.admit(seq, group, hits, seq.num_tokens)
        seq.load_end = seq.num_computed_tokens + num_external
        assert seq.load_end <= seq.num_prompt_tokens, f"{num_external=} of {seq.request_id}"
        seq.status = SequenceStatus.LOADING
        seq.is_loading = True
        self._loading[seq.request_id] = seq
        self._connector.update_state_after_alloc(
            seq.request_id, seq.dp_group, seq.block_ids, num_external
        )

    def _end_load(self, seq: Sequence, num_tokens: int, *, is_converted: bool) -> None:
        """Take over the first `num_tokens` of what was loaded; more than was asked for counts not.

        Others may find the blocks from now on, unless their KV was converted, and but for one with
        the last known token: that may be computed again, as in `_run`.
        """
        seq.is_loading = False
        self._asking.pop(seq.request_id, None)
        num_new = max(0, min(num_tokens, seq.load_end) - seq.num_computed_tokens)
        seq.num_computed_tokens += num_new
        if seq.status is SequenceStatus.LOADING and not seq.num_preemptions:
            seq.num_cached_tokens += num_new
        seq.is_converted |= is_converted and num_new > 0
        self._groups.cache_full_blocks(seq, min(seq.num_computed_tokens, seq.num_tokens - 1))

    def _start_if_ready(self, seq: Sequence) -> None:
        """Move a reserved sequence to running once it is activated and no transfer is under way.

        Or finish it, if its KV did not come and may not be computed here: because the transfer
        failed, or because there was none although the client has tokens, which then came from
        another engine. Without tokens the client has asked for the prompt to be computed here.
        """
        if not seq.is_activated or seq.is_loading or seq.request_id not in self._reserved:
            return
        num_missing = seq.num_prompt_tokens - seq.num_computed_tokens
        if num_missing > 0 and seq.num_output_tokens and seq.load_failure is None:
            seq.load_failure = _NO_TICKET
        if num_missing > 0 and seq.load_failure is not None:
            if self._config.kv_load_failure_policy == "fail" and seq.num_output_tokens:
                self._finish(seq, "error")
                return
            self._num_recompute_tokens += num_missing
        del self._reserved[seq.request_id]
        self._run(seq)

    def _go_on_without(self, seq: Sequence, now_s: float) -> Sequence | None:
        """Let a sequence whose load failed load with its next ticket, compute, or wait for either.

        Returns:
            The sequence if its client should know.
        """
        next_load, seq.next_load = seq.next_load, None
        if next_load is None or seq.is_activated:
            self._start_if_ready(seq)
            return seq
        try:
            self.load(seq.request_id, *next_load, now_s)
        except TransferError:
            return seq
        return None

    def _run_loaded(self, seq: Sequence) -> None:
        del self._loading[seq.request_id]
        self._run(seq)

    def _run(self, seq: Sequence) -> None:
        # The last known token is always computed here: its logits give the next one.
        seq.num_computed_tokens = min(seq.num_computed_tokens, seq.num_tokens - 1)
        seq.status = SequenceStatus.RUNNING
        self._running.append(seq)

    # --- planning ------------------------------------------------------------------------------

    def _kinds_to_try(self) -> tuple[StepKind, ...]:
        if self._config.mixed_batches:
            return ("mixed",)
        decodes_wait = any(s.num_new_tokens == 1 for s in self._running)
        if decodes_wait and self._prefill_streak >= self._config.prefill_steps_per_decode_step:
            return ("decode", "prefill")
        return ("prefill", "decode")

    def _advance_running(self, plan: _StepPlan) -> bool:
        """Schedule running sequences in order; returns whether any was preempted."""
        preempted = False
        for seq in list(self._running):
            if seq.status is not SequenceStatus.RUNNING or not plan.takes(seq.num_new_tokens):
                continue
            count = self._clip(seq.num_computed_tokens, seq.num_tokens, plan.budget)
            if count == 0:
                continue
            num_tokens = seq.num_computed_tokens + count
            while not self._groups.can_grow(seq, num_tokens):
                victim = self._last_running(seq.dp_group)
                self._preempt(victim)
                preempted = True
                if victim is seq:
                    break
            else:
                block_ids = self._groups.grow(seq, num_tokens)
                if block_ids and seq.is_known_to_runner:
                    plan.appended.append((seq.slot, block_ids))
                plan.add(seq, count)
        return preempted

    def _admit_waiting(self, plan: _StepPlan) -> None:
        """Admit queued sequences in order; a full DP group holds up only those that ask for it."""
        skipped: list[Sequence] = []
        full_groups: set[int] = set()
        while self._waiting and plan.budget > 0 and len(full_groups) < len(self._groups):
            seq = self._waiting.popleft()
            self._count_waiting(seq, -1)
            admission = self._try_admit(plan, seq, full_groups)
            if admission is _Admission.ADMITTED:
                continue
            skipped.append(seq)
            if admission is _Admission.ASKING:
                continue
            if seq.dp_group < 0:
                break
            full_groups.add(seq.dp_group)
        for seq in reversed(skipped):
            self._enqueue(seq, front=True)

    def _try_admit(self, plan: _StepPlan, seq: Sequence, full_groups: set[int]) -> _Admission:
        # Before a place is looked for: there may be many of these, in every step.
        if seq.request_id in self._asking and self._num_external(seq, 0) is None:
            return _Admission.ASKING
        # The whole prompt must fit, or two half-done prompts could starve each other.
        place = self._groups.place(seq, seq.num_tokens, full_groups)
        if place is None:
            return _Admission.NO_ROOM
        group, hits = place
        num_local = len(hits) * self._config.block_size
        num_external = self._num_external(seq, num_local)
        if num_external is None:
            return _Admission.ASKING
        if num_external:
            self._admit_loading(seq, group, hits, num_external)
            return _Admission.ADMITTED
        count = self._clip(num_local, seq.num_tokens, plan.budget)
        if count == 0:
            return _Admission.NO_ROOM
        self._groups.admit(seq, group, hits, seq.num_tokens)
        seq.status = SequenceStatus.RUNNING
        self._running.append(seq)
        plan.add(seq, count)
        return _Admission.ADMITTED

    def _clip(self, start: int, end: int, budget: int) -> int:
        """How many of the tokens from `start` to `end` a step may compute; 0: none now."""
        if end - start <= budget:
            return end - start
        if not self._config.enable_chunked_prefill:
            return 0
        stop = start + budget
        return max(stop - stop % self._chunk_alignment - start, 0)

    def _last_running(self, group: int) -> Sequence:
        return next(s for s in reversed(self._running) if s.dp_group == group)

    def _preempt(self, seq: Sequence) -> None:
        """Take everything from a sequence; it computes its tokens again when there is room."""
        self._running.remove(seq)
        if self._connector is not None:
            self._connector.request_preempted(seq.request_id)
        self._groups.give_back_slot(seq)
        self._groups.give_back_blocks(seq)
        seq.num_preemptions += 1
        self._groups.stats[seq.dp_group].num_preemptions += 1
        self._enqueue(seq, front=True)

    def _build(self, plan: _StepPlan) -> ScheduledBatch:
        new = []
        for seq in plan.sequences:
            if not seq.is_known_to_runner:
                new.append(_new_sequence(seq))
                seq.is_known_to_runner = True
        return ScheduledBatch(
            plan.kind, [s.slot for s in plan.sequences], plan.counts, new, plan.appended
        )

    # --- results and endings -------------------------------------------------------------------

    def _append_token(self, seq: Sequence, token_id: int) -> TokenOutput:
        index = seq.num_output_tokens
        seq.token_ids.append(token_id)
        stats = self._groups.stats[seq.dp_group]
        stats.generation_tokens += 1
        if index == 0:
            stats.prompt_tokens += seq.num_prompt_tokens
        reason, stop_reason = self._finish_reason(seq, token_id)
        output = TokenOutput(
            seq.request_id, index, [token_id], reason, stop_reason, max(seq.num_cached_tokens, 0)
        )
        if reason is not None:
            self._finish(seq, reason)
        elif seq.mode == "prefill":
            self._hand_over(seq)
        return output

    def _finish_reason(
        self, seq: Sequence, token_id: int
    ) -> tuple[FinishReason | None, int | None]:
        sampling = seq.request.sampling
        if token_id in self._eos_token_ids and not sampling.ignore_eos:
            return "stop", None
        if token_id in sampling.stop_token_ids:
            return "stop", token_id
        if seq.num_output_tokens >= sampling.max_tokens or seq.num_tokens >= self._max_model_len:
            return "length", None
        return None, None

    def _hand_over(self, seq: Sequence) -> None:
        """Prefill is done: free the slot, keep the blocks until the ticket's holder has them."""
        assert self._connector is not None
        self._running.remove(seq)
        del self._sequences[seq.request_id]
        self._count_finished(seq, "handed_over")
        self._retire(seq, hold=self._connector.request_finished(seq.request_id, seq.block_ids))

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence for good; every path out of the engine but `_hand_over` comes here."""
        if seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
            self._count_waiting(seq, -1)
        elif seq.status is SequenceStatus.RUNNING:
            self._running.remove(seq)
        for place in (self._reserved, self._asking, self._loading):
            place.pop(seq.request_id, None)
        del self._sequences[seq.request_id]
        self._count_finished(seq, reason)
        hold = False
        if self._connector is not None:
            # What was computed to the end may still be kept in a store; nobody comes to fetch it.
            if reason in {"abort", "error"} or seq.mode == "prefill":
                self._connector.cancel(seq.request_id)
            hold = self._connector.request_finished(seq.request_id, seq.block_ids)
        self._retire(seq, hold=hold)

    def _retire(self, seq: Sequence, *, hold: bool) -> None:
        seq.status = SequenceStatus.FINISHED
        self._groups.give_back_slot(seq)
        if hold:
            self._held[seq.request_id] = seq
        else:
            self._groups.give_back_blocks(seq)

    def _count_finished(self, seq: Sequence, reason: str) -> None:
        finished = self._groups.stats[max(seq.dp_group, 0)].finished
        finished[reason] = finished.get(reason, 0) + 1

    def _count_awaiting_kv(self) -> list[int]:
        """How many in each DP group hold a slot and wait for their KV."""
        return self._count([*self._reserved.values(), *self._loading.values()])

    def _count(self, sequences: Iterable[Sequence]) -> list[int]:
        """How many of these are in each DP group."""
        counts = [0] * len(self._groups)
        for seq in sequences:
            counts[seq.dp_group] += 1
        return counts


def _new_sequence(seq: Sequence) -> NewSequence:
    sampling = seq.request.sampling
    return NewSequence(
        slot=seq.slot,
        dp_group=seq.dp_group,
        token_ids=list(seq.token_ids),
        num_prompt_tokens=seq.num_prompt_tokens,
        num_computed_tokens=seq.num_computed_tokens,
        block_ids=list(seq.block_ids),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed or 0,
    )
