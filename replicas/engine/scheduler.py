"""Continuous batching: which sequences advance in the next step, and by how many tokens.

Owner of all live sequences and of the DP groups' slots and blocks, on the engine's core thread.
Pure: time is an argument `now_s`; KV bytes and tensors are elsewhere. A sequence is in exactly one
place: queued, running, or waiting for KV.

A sequence that waits for KV holds a slot and blocks for its whole prompt and is never preempted. It
ends or continues independently of other sequences, so no two can wait for each other.

There are no separate prefill and decode phases: a sequence has `num_computed_tokens`, and each step
advances it towards `num_tokens` within a token budget. Chunked prefill, prefix hits, resumption
after preemption, and KV from another engine or a store all follow this one rule. Decoding rows are
planned together and examined only when something changes, see `DecodeRows`: the cost of a step
depends on its changes, with little per token.

Source: vLLM v1/core/sched/scheduler.py (token accounting, running before waiting, preemption by
recompute of the last running sequence, or by priority of the worst).
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from enum import Enum
from math import lcm
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kv_transfer.connector import SaveProgress
from replicas.engine.kv_cache import KVCacheManager
from replicas.engine.kv_loads import KVLoads, Verdict, is_loading
from replicas.engine.outputs import End, EndRules, StepOutputs
from replicas.engine.partial_prefills import PartialPrefillLimits
from replicas.engine.pause import Pause
from replicas.engine.preparations import Preparations
from replicas.engine.request_table import DecodeRows, RequestTable
from replicas.engine.sequence import Phase, Sequence
from replicas.engine.step_plan import StepPlan
from replicas.messages import KV_TRANSFER_FAILED, NO_ALLOWED_TOKEN, NO_LOGITS, DraftCounters
from replicas.speculation.controller import DraftController

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from collections.abc import Sequence as SequenceOf

    from kv_transfer.connector import Failure, KVConnectorScheduler
    from replicas.config import EngineConfig
    from replicas.engine.kv_cache import Place
    from replicas.engine.kv_events import PrefixFeed
    from replicas.engine.step import (
        RowFailure,
        RowHidden,
        RowLogprobs,
        ScheduledBatch,
        StepKind,
        StepResult,
    )
    from replicas.kv_groups import KVGroup
    from replicas.messages import (
        AbortReason,
        FinishReason,
        GroupCounters,
        GroupSnapshot,
        RefusalReason,
        StepWork,
        TokenLogprob,
    )
    from replicas.sampling.preparation import Prepared


_ROWS_PER_HOST_ROW = 4
"""A step with at least so many rows for each that the host draws for is followed by one without
the host's. Leaving out one row in four costs an eighth of the tokens, and saves its draws' time."""


class _Admission(Enum):
    """Result of an attempt to admit a queued sequence."""

    ADMITTED = "admitted"
    NO_ROOM = "no room"
    NOT_YET = "not yet"
    """It waits for its grammar, for the connector's answer, for the activation of its request, for
    the prompt's KV that choice 0 computes, or for other long prompts; room was not decided."""


class Scheduler:
    """All live sequences of an engine, and which of them advance in each step.

    Args:
        config: The engine's configuration, with every None that depends on the generator decided.
        kv_groups: See `KVCacheManager`.
        prefix_cache_key: See `KVCacheManager`.
        max_model_len: Longest sequence in tokens.
        eos_token_ids: The model's end tokens.
        connector: Scheduler side of the KV connector, if the engine has one.
        resumes_prefill: Whether the generator can compute a prompt from its middle on. Otherwise a
            part of a prompt's KV is useless.
        chunk_alignment: A chunk that does not complete its prompt ends on a multiple of this many
            tokens. At most the token budget of a step, so that a whole budget always fits a chunk.
        tokens_per_pass: The most tokens that a pass gives a row.
        kv_tokens_per_pass: Tokens behind its computed ones for which a row needs blocks in a pass.
    """

    def __init__(  # noqa: PLR0913 - keyword-only: what the configuration alone cannot tell
        self,
        config: EngineConfig,
        *,
        kv_groups: SequenceOf[KVGroup],
        prefix_cache_key: bytes,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        connector: KVConnectorScheduler | None = None,
        resumes_prefill: bool = True,
        chunk_alignment: int = 1,
        tokens_per_pass: int = 1,
        kv_tokens_per_pass: int = 1,
    ) -> None:
        self._token_budget = config.token_budget(max_model_len)
        assert 1 <= chunk_alignment <= self._token_budget, f"{chunk_alignment=}"
        self._config = config
        self._connector = connector
        max_pass_tokens = self._token_budget + kv_tokens_per_pass - 1
        # A stream can move if the last window of its full blocks is here, as of a block ago.
        num_kept = 2 * lcm(*(g.block_size for g in kv_groups)) if connector is not None else 0
        self._kv = KVCacheManager(config, kv_groups, prefix_cache_key, max_pass_tokens, num_kept)
        self.loads = KVLoads(config, self._kv, connector, resumes_prefill=resumes_prefill)
        self._resumes_prefill = resumes_prefill
        decode_kind: StepKind = "mixed" if config.mixed_batches else "decode"
        block_multiple = self._kv.block_multiple if resumes_prefill else None
        self.table = RequestTable(
            len(self._kv), decode_kind, config.scheduling_policy, block_multiple
        )
        self.preparations = Preparations()
        self.pause = Pause()
        self._end_rules = EndRules(max_model_len, eos_token_ids, tokens_per_pass)
        self._tokens_per_pass = tokens_per_pass
        self._kv_tokens_per_pass = kv_tokens_per_pass
        self._chunk_alignment = chunk_alignment
        self._partial_limits = PartialPrefillLimits.of(config, max_model_len, chunk_alignment)
        self._prefill_streak = 0
        self._no_decodes = DecodeRows("decode", [], len(self._kv))
        speculation = config.speculative_config
        self._draft_control = (
            None if speculation is None else DraftController(speculation.num_speculative_tokens)
        )
        # Drafts that the worker holds for the next step.
        self._drafts: dict[Sequence, int] = {}
        # Steps under way, oldest first.
        self._plans: deque[StepPlan] = deque()

    def __repr__(self) -> str:
        return f"Scheduler({self.table!r}, {self.loads!r}, {self._kv!r})"

    # --- requests in ---------------------------------------------------------------------------

    def add(
        self, seq: Sequence, now_s: float, siblings: SequenceOf[Sequence] = ()
    ) -> RefusalReason | None:
        """Queue the sequences of a request of mode local or prefill, or return why not.

        Choices other than 0 are admitted once that one has computed the prompt.

        Args:
            seq: A new sequence, choice 0; `dp_group` is the asked group or -1.
            now_s: Monotonic clock.
            siblings: The other choices, in order.

        Raises:
            TransferError: The connector cannot use its ticket; nothing was queued.
        """
        if self.table.is_known(seq.request_id):
            return "duplicate"
        if self._is_queue_full():
            return "queue_full"
        if self._connector is not None and seq.transfer is not None:
            self._connector.on_new_request(seq.transfer, now_s)
        self._queue_sequences(seq, *siblings)
        return None

    def reserve(
        self, seq: Sequence, now_s: float, siblings: SequenceOf[Sequence] = ()
    ) -> RefusalReason | None:
        """Reserve a place for a sequence whose prompt is computed elsewhere, or return why not.

        The place is that of choice 0. The other choices are queued until it has the prompt's KV.

        Blocks for all its tokens and the first decode step are taken at once, so that a transfer
        never waits for memory. This includes output tokens that another engine has decoded already.
        Leading blocks that are cached here need not be sent.
        """
        if self.table.is_known(seq.request_id):
            return "duplicate"
        if siblings and self._is_queue_full():
            return "queue_full"
        # Choices that are queued here have no claim to this slot. Routers see them as waiting and
        # leave slots for them, so they are overtaken only by requests placed with an old snapshot.
        num_needed = self._num_needed(seq.num_tokens)
        place = self._kv.find_place(seq, num_needed, is_whole=True)
        if place is None:
            return "no_blocks" if self._kv.has_slot(seq) else "no_slot"
        seq.num_computed_tokens = self._kv.admit(seq, place, num_needed)
        self._queue_sequences(seq, *siblings)
        self.loads.reserve(seq, now_s)
        return None

    def _is_queue_full(self) -> bool:
        """Return whether more sequences are queued than may be, beyond those with a free slot."""
        limit = self._config.max_num_waiting
        return limit is not None and len(self.table.queue) >= limit + self._kv.num_empty_slots

    def _queue_sequences(self, *sequences: Sequence) -> None:
        for seq in sequences:
            self.table.add(seq)
            self.preparations.add(seq)

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
        seq = self.table.get(request_id)
        if seq is None or seq.transfer is None or self._connector is None:
            return
        num_final = 0
        if seq.is_running and not seq.place.is_converted:
            # Only steps that are over count; the last token's step may be under way.
            num_final = min(seq.num_computed_tokens, seq.num_tokens - 1)
        num_full = num_final - num_final % self._kv.block_multiple
        block_ids = tuple(map(tuple, seq.place.block_ids))
        self._connector.lend(
            seq.transfer_with(ticket),
            SaveProgress(
                request_id, seq.place.dp_group, block_ids, num_full, self._kv.first_positions(seq)
            ),
            now_s,
        )

    def activate(
        self, request_id: str, token_ids: SequenceOf[list[int]], now_s: float
    ) -> Sequence | None:
        """Let a reserved request run once its KV is here, or compute its prompt here.

        Args:
            request_id: The reserved request. Ignored if unknown or activated before.
            token_ids: For each choice all output tokens that the client has, including those of
                the reservation. If empty, the prompt is computed here.
            now_s: Monotonic clock.

        Returns:
            Choice 0 if this ended the request, because its KV did not come and must not be
            recomputed.
        """
        if request_id not in self.loads.not_activated:
            return None
        for seq in self.table.choices(request_id) if token_ids else ():
            if seq.phase is Phase.WAITING:
                # Out of the queue meanwhile, which counts its tokens.
                self.table.queue.remove(seq)
                seq.token_ids += token_ids[seq.choice][seq.num_output_tokens :]
                self.table.queue.push(seq)
        first = token_ids[0] if token_ids else []
        reserved = self.loads.activate(request_id, now_s, has_tokens=bool(first))
        if reserved is None:
            return None
        reserved.token_ids.extend(first[reserved.num_output_tokens :])
        self._continue_after_load(reserved)
        return reserved if reserved.is_over else None

    def kv_ended(
        self, request_id: str, failure: Failure | None, now_s: float, *, is_converted: bool = False
    ) -> Sequence | None:
        """Note that a load has ended and writes nothing more; keep and index what arrived.

        After a failure a sequence from the queue continues from the verified part at once. So does
        an activated one, unless `kv_load_failure_policy` is "fail", which ends it. Another reserved
        sequence continues with its next ticket, or waits for one.

        Args:
            request_id: The sequence.
            failure: Why it failed, and the number of tokens whose KV did arrive; None: all came.
            now_s: Monotonic clock.
            is_converted: Whether the KV came in another dtype and so must not be shared.

        Returns:
            The live sequence whose client must be notified, if any.
        """
        seq = self.table.get(request_id)
        if seq is None:
            self.release_held(request_id)
            return None
        if not is_loading(seq):
            return None
        has_client = seq.phase is Phase.RESERVED
        num_new = self.loads.end_load(seq, failure)
        seq.num_computed_tokens += num_new
        assert seq.load is not None
        self._kv.note_loaded(seq, num_new, seq.load.end, is_converted=is_converted)
        if failure is not None and has_client and self.loads.try_next_ticket(seq, now_s):
            return None
        self._continue_after_load(seq)
        return seq if has_client else None

    def release_held(self, request_id: str) -> None:
        """Free blocks that another engine has fetched, or will not fetch."""
        seq = self.table.release_held(request_id)
        if seq is not None:
            self._kv.free_blocks(seq)

    # --- requests out --------------------------------------------------------------------------

    def abort(self, request_id: str, reason: AbortReason = "abort") -> None:
        """Drop a request in any place, and count it as `reason`; unknown ids are ignored."""
        is_held = request_id in self.table.held
        for seq in self.table.give_up(request_id):
            self._finish(seq, reason)
        if is_held and self._connector is not None:
            self._connector.cancel(request_id)

    def abort_choice(self, request_id: str, choice: int, reason: AbortReason) -> None:
        """Drop one choice of a request; the others continue. Unknown ones are ignored."""
        for seq in self.table.give_up(request_id, choice):
            self._finish(seq, reason)

    def abort_all(self) -> list[Sequence]:
        """Drop every live request, and return its sequences."""
        dropped = list(self.table)
        for request_id in dict.fromkeys(seq.request_id for seq in dropped):
            self.abort(request_id)
        return dropped

    def abort_client(self, client: bytes) -> int:
        """Drop every sequence of a client that is gone; return the number of live ones."""
        live = [s.request_id for s in self.table if s.client == client]
        held = [s.request_id for s in self.table.held.values() if s.client == client]
        for request_id in dict.fromkeys((*live, *held)):
            self.abort(request_id)
        return len(live)

    def expire(self, now_s: float) -> list[Sequence]:
        """End the requests that were not activated in time; return the first choice of each."""
        lapsed = [self.table.choices(request_id)[0] for request_id in self.loads.lapsed(now_s)]
        for seq in lapsed:
            self._finish(seq, "error")
        return lapsed

    def end_preparations(
        self, results: SequenceOf[Prepared], now_s: float
    ) -> list[tuple[Sequence, str]]:
        """Let sequences continue whose grammar is ready; end and return those whose is not.

        Args:
            results: Results of the worker.
            now_s: Monotonic clock.

        Returns:
            The ended sequences, each with the reason.
        """
        ended = self.preparations.end(results, now_s)
        failed = []
        for seq, error in ended.failed:
            if not seq.is_over:  # Another choice of its request may have failed before.
                self._finish(seq, "error")
                failed.append((seq, error))
        for seq in ended.ready:
            if seq.phase is Phase.RESERVED:
                self._continue_after_load(seq)
                if seq.is_over and seq.load is not None:
                    failed.append((seq, f"{KV_TRANSFER_FAILED}: {seq.load.failure}"))
        return failed

    # --- one step ------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch | None:
        """Plan the next step: running sequences first, then queued ones.

        No other step may be under way; see `schedule_ahead`.

        Returns:
            The step, or None if nothing can run now.
        """
        assert not self._plans, "a step is under way"
        if self.loads.asking:
            self.loads.ask_again()
        if self.pause.is_frozen:
            return None
        table = self.table
        if not (table.prefill_rows or table.short or table.queue.sequences):
            # Nothing but decoding rows, all of which have a block for their next token.
            if not table.rows:
                return None
            rows = table.decode_rows
            budget = self._token_budget - len(rows.sequences)
            if budget >= 0:
                self._prefill_streak = 0
                return self._begin(StepPlan(rows.plain.kind, budget, rows))
        kinds = deque(self._kinds_to_try())
        while kinds:
            kind = kinds.popleft()
            plan = self._new_plan(kind)
            preempted = not self._advance_all(plan) and self._advance_in_order(plan)
            # Blocks freed by preemption are for the sequences that needed them. Only if none of
            # these can run after all are queued sequences admitted.
            if kind != "decode" and not (preempted and plan):
                self._admit_waiting(plan)
            if plan:
                self._prefill_streak = self._prefill_streak + 1 if kind == "prefill" else 0
                return self._begin(plan)
            if preempted and kind == "decode":
                # All decoding sequences were preempted: a prefill step may fit into their blocks.
                kinds.append("prefill")
        return None

    def schedule_ahead(self) -> ScheduledBatch | None:
        """Plan the step after the one under way, if that does not depend on its tokens.

        This requires that all rows decode and no queued sequence might be admitted. A step with
        drafts has unknown progress, and one that proposes drafts is followed by such. Rows that end
        by length with the step under way are left out. A row that ends by a stop token is computed
        once more without effect; it keeps its slot and blocks meanwhile.

        A few rows that the host draws for are left out of the step after each of theirs: the device
        computes it for the others while the host draws. So they get a token in every second step.

        Returns:
            The step; None if the one under way must be updated first.
        """
        [before] = self._plans
        table = self.table
        if before.sequences or before.max_drafts or before.progress or table.prefill_rows:
            return None
        due = (before.decodes.sequences[row] for row in before.due_rows)
        ending = {seq for seq in due if self._ends_by_length(seq)}
        if table.queue.sequences:
            has_room = ending or table.outlived or self._kv.num_empty_slots
            if has_room and self._might_admit():
                return None
        kind, hosts = before.decodes.plain.kind, before.decodes.on_host
        left_out = ending
        if hosts and len(hosts) * _ROWS_PER_HOST_ROW <= len(before.decodes):
            left_out = ending.union(hosts)
        if not (left_out or table.short):
            rows = table.decode_rows
            budget = self._token_budget - len(rows.sequences)
            if rows.sequences and budget >= 0:
                return self._begin(StepPlan(kind, budget, rows))
        plan = StepPlan(kind, self._token_budget, self._no_decodes)
        return self._begin(plan) if self._advance_all(plan, left_out) and plan else None

    def update(self, batch: ScheduledBatch, result: StepResult) -> StepOutputs:
        """Apply the result of a step: append tokens, end or hand over sequences.

        Args:
            batch: The oldest step under way.
            result: The worker's result.
        """
        plan, table = self._plans[0], self.table
        assert plan.batch is batch, "another step is the oldest"
        failed = self._fail_rows(plan, result.failed) if result.failed else ()
        for row in result.on_host:
            # New rows are behind the decoding ones.
            seq = plan.sequences[row - len(plan.decodes)]
            seq.is_drawn_on_host = True
        self._plans.popleft()
        token_ids, counts = result.token_ids, result.counts
        if not plan.sequences:
            outputs = self._append_decoded(plan, token_ids, counts)
            if table.outlived:
                self._free_outlived()
            if self._draft_control is not None and not failed:
                seconds = (result.device_s + result.sample_s) / plan.num_passes
                num_rows = len(plan.decodes.sequences)
                self._draft_control.learn(num_rows, plan.max_drafts, plan.progress, counts, seconds)
        else:
            num_decodes = len(plan.decodes.sequences)
            num_decoded = sum(counts[:num_decodes]) if counts else num_decodes
            decoded = self._append_decoded(plan, token_ids[:num_decoded], counts[:num_decodes])
            if table.outlived:
                self._free_outlived()
            counts = counts[num_decodes:] or [1] * len(plan.sequences)
            outputs = self._append_prefilled(plan, decoded, token_ids[num_decoded:], counts)
        if result.num_drafts:
            rows = zip([*plan.decodes.sequences, *plan.sequences], result.num_drafts, strict=True)
            self._drafts = {seq: count for seq, count in rows if count}
        if result.logprobs:
            planned = [*plan.decodes.sequences, *plan.sequences]
            logprobs = {planned[found.row]: found.positions for found in result.logprobs}
            outputs = outputs._replace(logprobs=logprobs)
        if result.prompt_logprobs:
            found = self._collect_prompt_logprobs(plan, result.prompt_logprobs)
            outputs = outputs._replace(prompt_logprobs=found)
        if result.hidden:
            outputs = outputs._replace(embeddings=self._collect_embeddings(plan, result.hidden))
        return outputs._replace(failed=failed) if failed else outputs

    def _collect_prompt_logprobs(
        self, plan: StepPlan, found: list[RowLogprobs]
    ) -> dict[Sequence, list[list[TokenLogprob]]]:
        """Keep log probabilities of prompts' parts; return those of prompts with a first token."""
        first, complete = len(plan.decodes.sequences), {}
        for part in found:
            seq = plan.sequences[part.row - first]
            if seq.prompt_logprobs is None:
                seq.prompt_logprobs = []
            seq.prompt_logprobs.extend(part.positions)
            if seq.num_output_tokens:
                complete[seq], seq.prompt_logprobs = seq.prompt_logprobs, None
        return complete

    def _collect_embeddings(self, plan: StepPlan, found: list[RowHidden]) -> dict[Sequence, bytes]:
        """Add sums of hidden states; return the embeddings of prompts that are complete.

        An embedding has length 1, so the mean of states is the same as their sum.
        """
        first, complete = len(plan.decodes.sequences), {}
        for part in found:
            seq = plan.sequences[part.row - first]
            total = np.frombuffer(part.total, dtype="<f4")
            seq.pooled = total if seq.pooled is None else seq.pooled + total
            if seq.num_output_tokens:
                length = np.linalg.norm(seq.pooled)
                complete[seq] = (seq.pooled / (length or 1.0)).astype("<f4").tobytes()
                seq.pooled = None
        return complete

    def _free_outlived(self) -> None:
        """Free what ended sequences have, if no step under way computes them any more."""
        for seq in self.table.steps_are_over(self._is_under_way):
            self._kv.free_slot(seq)
            if seq.phase is Phase.ENDED:
                self._kv.free_blocks(seq)

    def work(self, batch: ScheduledBatch) -> StepWork | None:
        """Return the work of the first pass of a step under way.

        None if it verifies drafts: the time of such a step says nothing of plain decoding, nor of
        prompts.
        """
        [plan] = [plan for plan in self._plans if plan.batch is batch]
        return (
            None if plan.progress and self._draft_control is not None else plan.work(len(self._kv))
        )

    def first_positions(self, seq: Sequence) -> tuple[int, ...]:
        """Return for each KV group the first position whose KV the sequence's blocks hold."""
        return self._kv.first_positions(seq)

    def progress(self, batch: ScheduledBatch) -> Iterable[tuple[Sequence, int]]:
        """Yield sequences whose prompt a step computes, with their computed tokens after it.

        Choices other than 0 are left out: the connector has one prompt of a request.

        Args:
            batch: The oldest step under way.
        """
        plan = self._plan_of(batch)
        for seq, count in zip(plan.sequences, plan.counts, strict=True):
            if seq.parent is None and seq.num_computed_tokens - count < seq.num_prompt_tokens:
                yield seq, seq.num_computed_tokens

    # --- several passes in one step ------------------------------------------------------------

    def extend(
        self, batch: ScheduledBatch, max_passes: int, *, with_blocks: bool = False
    ) -> ScheduledBatch:
        """Let a step make further passes: all running sequences decode, and none has drafts.

        By default no pass may need a decision: no sequence is queued, none has a stop token, and
        none ends or fills a block before the last pass. A step that tells the worker about new rows
        or blocks makes one pass.

        Args:
            batch: The latest step under way; the worker does not have it yet.
            max_passes: The most passes that it may make.
            with_blocks: Allocate the blocks of all passes now, and let `update` cut the runs of
                rows that end within them. Queued sequences matter only if they might be admitted.

        Returns:
            The step to submit in its place; `batch` itself if it makes one pass.
        """
        plan = self._plans[-1]
        assert plan.batch is batch, "another step is the latest"
        sequences = plan.decodes.sequences
        # Running rows outside the plan end with the step before it.
        if not sequences or plan.sequences or self.table.prefill_rows:
            return batch
        if plan.progress or plan.max_drafts:
            return batch
        if with_blocks:
            num_more = self._allocate_passes(plan, max_passes - 1)
        elif self.table.queue.sequences or plan.appended or plan.due_rows or plan.decodes.stop_ids:
            return batch
        else:
            num_more = min(s.examine_at - s.num_computed_tokens for s in sequences)
            num_more = min(num_more, max_passes - 1)
        return self._add_passes(plan, num_more) if num_more > 0 else batch

    def _allocate_passes(self, plan: StepPlan, most: int) -> int:
        """Allocate blocks for further passes of a step; return how many it can make.

        As many as a row can use, or none if that would delay a queued sequence or take more blocks
        than are free. A row gets no block for what it computes behind its end: the KV of that goes
        to the null block, which pads its table.
        """
        sequences = plan.decodes.sequences
        if self.table.queue.sequences and self._kv.num_empty_slots and self._might_admit():
            return 0
        if any(_needs_single_passes(seq) for seq in sequences):
            return 0
        ends = [self._end_rules.longest(seq) - 1 for seq in sequences]
        rows = list(zip(sequences, ends, strict=True))
        num_more = min(most, max(end - seq.num_computed_tokens for seq, end in rows))
        wanted = ((seq, min(seq.num_computed_tokens + num_more, end)) for seq, end in rows)
        growing = [(seq, needed) for seq, needed in wanted if needed > seq.place.capacity]
        return num_more if not growing or self._grow(plan, growing) else 0

    def _add_passes(self, plan: StepPlan, num_more: int) -> ScheduledBatch:
        """Count the progress of further passes, and return the step that makes them."""
        plan.num_passes += num_more
        # A row that filled a block in an earlier pass need not be due in a later one.
        plan.due_rows = sorted({*plan.due_rows, *self._advance(plan.decodes.sequences, num_more)})
        assert plan.batch is not None
        plan.batch = msgspec.structs.replace(
            plan.batch, num_passes=plan.num_passes, appended_blocks=plan.appended
        )
        return plan.batch

    def shorten(self, batch: ScheduledBatch, num_passes: int) -> None:
        """Undo the progress of passes that a step will not make.

        Args:
            batch: The oldest step under way, before any other is planned.
            num_passes: The passes that it does make, at least one.
        """
        plan = self._plan_of(batch)
        assert len(self._plans) == 1, "a step ahead was planned from this progress"
        assert 1 <= num_passes <= plan.num_passes, f"{num_passes=} of {plan.num_passes}"
        num_less = plan.num_passes - num_passes
        if not num_less:
            return
        plan.num_passes = num_passes
        for seq in plan.decodes.sequences:
            seq.num_computed_tokens -= num_less
        due_rows, plan.due_rows = plan.due_rows, []
        for row in due_rows:
            seq = plan.decodes.sequences[row]
            if seq.is_running:
                self.table.short.pop(seq, None)
                self._continue_decoding(seq)

    def _plan_of(self, batch: ScheduledBatch) -> StepPlan:
        assert self._plans, "no step is under way"
        assert self._plans[0].batch is batch, "another step is under way"
        return self._plans[0]

    # --- planning ------------------------------------------------------------------------------

    def _new_plan(self, kind: StepKind) -> StepPlan:
        """Return an empty step; its prompts are limited if it could serve several sequences."""
        plan = StepPlan(kind, self._token_budget, self._no_decodes)
        if self._partial_limits is not None:
            rows = self.table.rows if kind == "mixed" else self.table.prefill_rows
            if len(rows) + len(self.table.queue) > 1:
                plan.max_chunk = self._partial_limits.max_chunk
        return plan

    def _kinds_to_try(self) -> tuple[StepKind, ...]:
        if self._config.mixed_batches:
            return ("mixed",)
        table = self.table
        decodes_wait = table.decode_rows or any(s.num_new_tokens == 1 for s in table.prefill_rows)
        if decodes_wait and self._prefill_streak >= self._config.prefill_steps_per_decode_step:
            return ("decode", "prefill")
        return ("prefill", "decode")

    def _advance_all(self, plan: StepPlan, left_out: Collection[Sequence] = ()) -> bool:
        """Schedule all running sequences but some; return False if they do not fit."""
        table = self.table
        decodes = self._no_decodes if plan.kind == "prefill" else table.decode_rows
        short = [] if plan.kind == "prefill" else list(table.short)
        if left_out:
            short = [s for s in short if s not in left_out]
            rows = [s for s in decodes.sequences if s not in left_out]
            decodes = DecodeRows(plan.kind, rows, len(self._kv))
        others = [s for s in table.prefill_rows if plan.fits(s)]
        budget = plan.budget - len(decodes)
        # This way serves all rows or none; `_advance_in_order` decides which get less.
        if sum(s.num_new_tokens for s in others) > budget:
            return False
        if self._partial_limits and any(s.num_new_tokens > plan.max_chunk for s in others):
            return False
        growing = [(s, self._num_needed(s.num_computed_tokens)) for s in short]
        growing += [(s, self._num_needed(s.num_tokens - 1)) for s in others]
        if growing and not self._grow(plan, growing):
            return False
        plan.decodes, plan.budget = decodes, budget
        for seq in others:
            plan.add(seq, seq.num_new_tokens)
        return True

    def _advance_in_order(self, plan: StepPlan) -> bool:
        """Schedule running sequences in their order; return whether any was preempted."""
        preempted = False
        # A copy, because preemption removes rows; `is_running` skips those.
        for seq in list(self.table.rows):
            if not seq.is_running or not plan.fits(seq):
                continue
            count = self._chunk(plan, seq, seq.num_computed_tokens)
            if count == 0:
                continue
            needed = self._num_needed(seq.num_computed_tokens + count - 1)
            while not self._grow(plan, [(seq, needed)]):
                # Blocks belong to a DP group, so only rows of the same group can help.
                victim = self.table.victim(seq.place.dp_group)
                plan.drop(victim)
                self._preempt(victim)
                preempted = True
                if victim is seq:
                    break
            else:
                plan.add(seq, count)
        return preempted

    def _grow(self, plan: StepPlan, wanted: list[tuple[Sequence, int]]) -> bool:
        """Give running sequences the blocks that they lack; return False if there are too few."""
        appended = self._kv.grow(wanted)
        if appended is None:
            return False
        for (seq, _), block_ids in zip(wanted, appended, strict=True):
            if block_ids:
                self.table.short.pop(seq, None)
                plan.note_blocks(seq, block_ids)
        return True

    def _admit_waiting(self, plan: StepPlan) -> None:
        """Admit queued sequences in order; a full DP group holds up only those that ask for it."""
        if self.pause.is_active:
            return
        queue, index = self.table.queue, 0
        full_groups = self._kv.without_slots()
        while index < len(queue) and plan.budget > 0 and len(full_groups) < len(self._kv):
            seq = queue[index]
            admission = self._try_admit(plan, seq, full_groups)
            if admission is _Admission.ADMITTED:
                continue
            index += 1
            if admission is _Admission.NOT_YET:
                continue
            if seq.place.dp_group < 0:
                # It may go to any group, and none has room: those behind it would starve it.
                break
            full_groups.add(seq.place.dp_group)

    def _try_admit(self, plan: StepPlan, seq: Sequence, full_groups: set[int]) -> _Admission:
        # Checked before the costly search for a place: many sequences may ask in every step.
        if self._is_undecided(seq):
            return _Admission.NOT_YET
        is_long = self._is_too_long(plan, self.table.queue.num_tokens_of(seq))
        num_needed, place = self._num_needed(seq.num_tokens - 1), None
        # Cached tokens may make it short.
        if not is_long or self._config.enable_prefix_caching:
            place = self._find_place(seq, num_needed, full_groups)
        if place is None or (
            is_long and self._is_too_long(plan, seq.num_tokens - place.num_tokens)
        ):
            return _Admission.NOT_YET if is_long else _Admission.NO_ROOM
        num_external = self.loads.num_external(seq, place.num_tokens)
        if num_external is None:
            return _Admission.NOT_YET
        if num_external:
            return self._start_load(seq, place, num_needed, num_external)
        count = self._chunk(plan, seq, place.num_tokens)
        if count == 0:
            return _Admission.NO_ROOM
        seq.num_computed_tokens = self._kv.admit(seq, place, num_needed)
        self.table.move(seq, Phase.PREFILL)
        plan.add(seq, count)
        return _Admission.ADMITTED

    def _start_load(
        self, seq: Sequence, place: Place, num_needed: int, num_external: int
    ) -> _Admission:
        """Give a queued sequence slot and blocks, and no tokens: the KV comes first."""
        whole = self._kv.whole_place(seq, place, num_needed)
        if whole is None:
            return _Admission.NO_ROOM
        seq.num_computed_tokens = self._kv.admit(seq, whole, num_needed)
        self.table.move(seq, Phase.LOADING)
        self.loads.start(seq, num_external)
        return _Admission.ADMITTED

    def _might_admit(self) -> bool:
        """Return whether a queued sequence waits for nothing but room."""
        if self.pause.is_active:
            return False
        return not all(map(self._is_undecided, self.table.queue))

    def _is_undecided(self, seq: Sequence) -> bool:
        """Return whether a queued sequence waits for its grammar, the connector or its request."""
        if seq in self.preparations.waiting:
            return True
        parent = seq.parent
        if parent is None:
            return self.loads.is_asking(seq) and self.loads.num_external(seq, 0) is None
        if seq.request_id in self.loads.not_activated:
            # Choice 0 may have been dropped before.
            return True
        if not self._resumes_prefill:
            # Such a generator cannot start behind shared blocks, so the choice computes the whole
            # prompt and need not wait for choice 0 to do so.
            return parent.phase is Phase.RESERVED
        return not (parent.phase is Phase.DECODE or parent.is_over)

    def _find_place(self, seq: Sequence, num_needed: int, full_groups: set[int]) -> Place | None:
        """Return room for a queued sequence, where it finds most of its KV."""
        # The whole prompt must fit, or two half-computed prompts could starve each other. In a
        # window it need not: the rows before it take what they need by preemption.
        prompt_tokens = self.table.prompt_tokens() if seq.place.dp_group < 0 else []
        place = self._kv.find_place(seq, num_needed, full_groups, prompt_tokens)
        parent = seq.parent
        if parent is not None and self._resumes_prefill and self._has_prompt(parent):
            fork = self._kv.fork(seq, parent, num_needed, full_groups)
            if fork is not None and (place is None or place.num_tokens < fork.num_tokens):
                return fork
        return place

    def _has_prompt(self, parent: Sequence) -> bool:
        """Return whether another choice can share the blocks of choice 0, its parent.

        After its end, too, while a step under way or another engine uses its blocks.
        """
        has_left = parent.phase is Phase.LEAVING and not parent.is_aborted
        return (parent.phase is Phase.DECODE or has_left) and bool(parent.place.block_ids)

    def _is_too_long(self, plan: StepPlan, num_new_tokens: int) -> bool:
        """Return whether a queued sequence is long and waits for other prompts of this step.

        Args:
            plan: The step.
            num_new_tokens: Tokens that the sequence has to compute.
        """
        limits = self._partial_limits
        if limits is None or num_new_tokens <= limits.threshold:
            return False
        return not limits.admit(num_new_tokens, plan.shares)

    def _chunk(self, plan: StepPlan, seq: Sequence, start: int) -> int:
        """Return how many tokens of a sequence from `start` on this step may compute; 0 if none."""
        num_new, most = seq.num_tokens - start, min(plan.budget, plan.max_chunk)
        if num_new <= most:
            return num_new
        if not self._config.enable_chunked_prefill:
            return 0
        if self._partial_limits is not None and not self._partial_limits.admit(
            num_new, plan.shares
        ):
            return 0
        stop = start + most
        # Rounded down, it may be nothing: the sequence then waits for a step with more budget.
        return max(stop - stop % self._chunk_alignment - start, 0)

    def _begin(self, plan: StepPlan) -> ScheduledBatch:
        """Begin a step: its tokens count as computed from now on."""
        kv = self._kv
        if self._draft_control is not None:
            has_drafts = bool(self._drafts)
            limit = self._draft_control.limit(len(plan.decodes), has_drafts=has_drafts)
            self._speculate(plan, limit)
        if plan.sequences or plan.appended or plan.progress or plan.max_drafts or kv.left_slots:
            batch = plan.build(kv.pop_left_slots())
            for seq in plan.sequences:
                seq.is_known_to_runner = True
        else:
            # The same rows as before: the batch that was built for them is sent again.
            batch = plan.batch = plan.decodes.plain
        if self._tokens_per_pass > 1:
            plan.progress = [self._tokens_per_pass] * len(plan.decodes)
        if plan.progress:
            # `update` examines every row, once it is known how many tokens each got.
            for seq, count in zip(plan.decodes.sequences, plan.progress, strict=True):
                seq.num_computed_tokens += count
        else:
            plan.due_rows = self._advance(plan.decodes.sequences, 1)
        for seq, count in zip(plan.sequences, plan.counts, strict=True):
            seq.num_computed_tokens += count
        self._plans.append(plan)
        return batch

    def _speculate(self, plan: StepPlan, max_drafts: int) -> None:
        """Add at most so many of the worker's drafts to each row, and let it propose as many.

        Drafts take what a planned step leaves: tokens of its budget, and free blocks. No sequence
        is preempted for them, and a step with prompts verifies none.
        """
        # The worker keeps drafts for one step only.
        drafts, self._drafts = self._drafts, {}
        if len(plan.decodes) or any(seq.mode != "prefill" for seq in plan.sequences):
            plan.max_drafts = max_drafts
        is_held = max_drafts and not drafts.keys().isdisjoint(plan.decodes.sequences)
        if plan.sequences or not is_held:
            return
        for seq in plan.decodes.sequences:
            count = min(drafts.get(seq, 0), max_drafts, plan.budget)
            if count:
                room = self._end_rules.longest(seq) - seq.num_tokens - 1
                count = min(count, room)
                end = seq.num_computed_tokens + 1 + count
                if end > seq.place.capacity and not self._grow(plan, [(seq, end)]):
                    count = seq.place.capacity - seq.num_computed_tokens - 1
                plan.budget -= count
            plan.progress.append(1 + count)

    def _advance(self, sequences: list[Sequence], count: int) -> list[int]:
        """Count tokens of decoding rows, and return the indices of those to examine."""
        due_rows = []
        for row, seq in enumerate(sequences):
            seq.num_computed_tokens = num_computed = seq.num_computed_tokens + count
            if num_computed >= seq.examine_at:
                due_rows.append(row)
        for row in due_rows:
            self._continue_decoding(sequences[row])
        return due_rows

    # --- results and endings -------------------------------------------------------------------

    def _fail_rows(
        self, plan: StepPlan, failures: list[RowFailure]
    ) -> tuple[tuple[Sequence, str], ...]:
        """End the rows of a step that failed, before the step is over; return them with reasons."""
        if not failures:
            return ()
        sequences, failed = [*plan.decodes.sequences, *plan.sequences], []
        for failure in failures:
            seq = sequences[failure.row]
            if not seq.is_running:
                continue
            if failure.reason == "no_distribution":
                # NaN may come from its KV, which no other sequence must find in the cache.
                self._kv.forget_blocks(seq)
                failed.append((seq, NO_LOGITS))
            else:
                failed.append((seq, NO_ALLOWED_TOKEN))
            self._finish(seq, "error")
        return tuple(failed)

    def _append_decoded(
        self, plan: StepPlan, token_ids: list[int], counts: list[int]
    ) -> StepOutputs:
        """Give decoding rows their tokens, and examine the rows that may end or fill a block."""
        decodes, sequences, due_rows = plan.decodes, plan.decodes.sequences, plan.due_rows
        count, stop_ids = plan.num_passes, decodes.stop_ids
        is_stopped = not stop_ids.isdisjoint(token_ids)
        # Without counts every row has one token, however many passes were made.
        is_even = counts.count(count) == len(counts) if counts else count == 1
        if (
            plan.progress
            or not is_even
            or (count > 1 and (is_stopped or self._exceeds_an_end(plan)))
        ):
            return self._append_runs(plan, token_ids, counts)
        if self.table.outlived:
            # Drop the tokens of sequences that have ended meanwhile.
            rows = [r for r, s in enumerate(sequences) if s.is_running]
            due_rows = [i for i, row in enumerate(rows) if row in plan.due_rows]
            sequences = [sequences[r] for r in rows]
            token_ids = [t for r in rows for t in token_ids[r * count : (r + 1) * count]]
            decodes = DecodeRows(decodes.plain.kind, sequences, len(self._kv))
        if count == 1:
            for seq, token_id in zip(sequences, token_ids, strict=True):
                seq.token_ids.append(token_id)
        else:
            for row, seq in enumerate(sequences):
                seq.token_ids += token_ids[row * count : (row + 1) * count]
        if is_stopped:
            due_rows = sorted({*due_rows, *(r for r, t in enumerate(token_ids) if t in stop_ids)})
        for stats, num_rows in zip(self._kv.stats, decodes.num_in, strict=True):
            stats.generation_tokens += count * num_rows
        ends: dict[int, End] = {}
        for row in due_rows:
            seq = sequences[row]
            end = self._end_rules.reason(seq, token_ids[(row + 1) * count - 1], seq.num_tokens)
            if end is not None:
                ends[row] = end
            self._finish_or_continue(seq, end)
        counts = [] if count == 1 else [count] * len(sequences)
        return StepOutputs(sequences, token_ids, ends, counts)

    def _exceeds_an_end(self, plan: StepPlan) -> bool:
        """Return whether a step makes more passes than a row has tokens left."""
        due = (plan.decodes.sequences[row] for row in plan.due_rows)
        return any(s.num_computed_tokens >= self._end_rules.longest(s) for s in due)

    def _append_runs(self, plan: StepPlan, token_ids: list[int], counts: list[int]) -> StepOutputs:
        """Give each decoding row its run up to its first end, and undo progress not made."""
        outputs, start = StepOutputs([], [], {}, []), 0
        sequences, due_rows, stats = plan.decodes.sequences, set(plan.due_rows), self._kv.stats
        # Where a pass touches several positions, a row lacks blocks before it has filled one.
        examines_all = self._kv_tokens_per_pass > 1
        planned = plan.progress or [plan.num_passes] * len(sequences)
        counts = counts or [1] * len(sequences)
        for row, (seq, wanted, count) in enumerate(zip(sequences, planned, counts, strict=True)):
            run = token_ids[start : start + count]
            start += count
            if not seq.is_running:
                continue
            if count < wanted:
                assert not self._plans, "a step ahead was planned from progress that was not made"
                seq.num_computed_tokens -= wanted - count
                self.table.short.pop(seq, None)
            is_due = row in due_rows or seq.num_computed_tokens >= seq.examine_at
            if is_due or examines_all or not seq.stop_ids.isdisjoint(run):
                self._append_run(outputs, seq, run)
                continue
            # The row neither ends nor fills a block.
            seq.token_ids += run
            outputs.sequences.append(seq)
            outputs.token_ids.extend(run)
            outputs.counts.append(count)
            stats[seq.place.dp_group].generation_tokens += count
        return outputs

    def _append_prefilled(
        self, plan: StepPlan, decoded: StepOutputs, token_ids: list[int], counts: list[int]
    ) -> StepOutputs:
        """Give rows that did not decode their tokens, behind those of the rows that did."""
        ones = [1] * len(decoded.sequences)
        outputs = decoded._replace(
            sequences=[*decoded.sequences],
            token_ids=[*decoded.token_ids],
            counts=decoded.counts or ones,
        )
        tokens = iter(token_ids)
        for seq, count in zip(plan.sequences, counts, strict=True):
            run = list(itertools.islice(tokens, count))
            if not seq.is_running:
                # It ended while the step was under way, as when another choice of it failed.
                continue
            if run:
                # The progress of the first token was planned.
                seq.num_computed_tokens += count - 1
                self._append_run(outputs, seq, run)
            else:
                self._settle(seq, seq.num_computed_tokens)
        has_runs = decoded.counts or max(counts) > 1
        return outputs if has_runs else outputs._replace(counts=[])

    def _append_run(self, outputs: StepOutputs, seq: Sequence, run: list[int]) -> None:
        """Give a sequence a run up to its first end, and add that to the outputs."""
        run, end = self._end_rules.cut(seq, run)
        stats = self._kv.stats[seq.place.dp_group]
        stats.generation_tokens += len(run)
        if seq.num_output_tokens == 0 and seq.parent is None:
            stats.prompt_tokens += seq.num_prompt_tokens
        seq.token_ids += run
        if end is not None:
            outputs.ends[len(outputs.sequences)] = end
        outputs.sequences.append(seq)
        outputs.token_ids.extend(run)
        outputs.counts.append(len(run))
        self._finish_or_continue(seq, end)

    def _finish_or_continue(self, seq: Sequence, end: End | None) -> None:
        """Settle a sequence's blocks after new tokens, then end, hand over or decode it."""
        self._settle(seq, seq.num_tokens - 1)
        if end is not None:
            self._finish(seq, end.reason)
        elif seq.mode == "prefill":
            self._hand_over(seq)
        else:
            self._continue_decoding(seq)

    def _settle(self, seq: Sequence, num_final_tokens: int) -> None:
        """Index a sequence's full blocks, and free those behind windows that no transfer reads."""
        first_read = None
        if self._connector is not None and seq.parent is None:
            first_read = self._connector.first_position_read(seq.request_id)
        self._kv.settle(seq, num_final_tokens, first_read)

    def _continue_decoding(self, seq: Sequence) -> None:
        """Let a sequence decode, and set when it must be examined next."""
        num_computed = seq.num_computed_tokens
        divisor = self._kv.block_divisor
        block_end = num_computed - num_computed % divisor + divisor
        seq.examine_at = min(block_end, self._end_rules.longest(seq) - 1)
        if self._num_needed(num_computed) > seq.place.capacity:
            self.table.short[seq] = None
        if seq.phase is Phase.PREFILL:
            # Once per decoding phase; the set is asked for every token of every step.
            seq.stop_ids = self._end_rules.stop_ids(seq)
            self.table.move(seq, Phase.DECODE)

    def _num_needed(self, num_computed: int) -> int:
        """Return the tokens for which a row needs blocks before its next pass.

        Args:
            num_computed: Its computed tokens before the token that gives the next ones.
        """
        longest = max(num_computed + 1, self._end_rules.max_model_len)
        return min(num_computed + self._kv_tokens_per_pass, longest)

    def _ends_by_length(self, seq: Sequence) -> bool:
        """Return whether the steps under way bring a sequence to its longest length."""
        return seq.num_computed_tokens >= self._end_rules.longest(seq) - 1

    # --- from place to place --------------------------------------------------------------------

    def _continue_after_load(self, seq: Sequence) -> None:
        """Run or end a sequence that has waited for KV, if it need not wait longer."""
        if seq in self.preparations.waiting:
            # `end_preparations` calls again when the grammar is ready.
            return
        match self.loads.verdict(seq):
            case Verdict.RUN:
                self._run(seq)
            case Verdict.FAIL:
                self._finish(seq, "error")
            case Verdict.WAIT:
                pass

    def _run(self, seq: Sequence) -> None:
        # The last known token is always computed here, because its logits give the next one.
        most = 0 if seq.needs_whole_prompt else seq.num_tokens - 1
        seq.num_computed_tokens = min(seq.num_computed_tokens, most)
        self.table.move(seq, Phase.PREFILL)

    def _preempt(self, seq: Sequence) -> None:
        """Take slot and blocks from a sequence; it recomputes its tokens when there is room."""
        if self._connector is not None and seq.parent is None:
            self._connector.request_preempted(seq.request_id)
        self._kv.free_slot(seq)
        self._kv.free_blocks(seq)
        seq.num_computed_tokens = 0
        # The prompt is computed again, and would be counted twice.
        seq.prompt_logprobs = seq.pooled = None
        seq.is_known_to_runner = False
        self._kv.stats[seq.place.dp_group].num_preemptions += 1
        self.table.requeue(seq)

    def _hand_over(self, seq: Sequence) -> None:
        """After a prefill, free the slot and keep the blocks until the consumer has them."""
        assert self._connector is not None
        self._count_finished(seq, "handed_over")
        hold = False
        if seq.parent is None:
            hold = self._connector.request_finished(seq.request_id, seq.place.block_ids)
        self._retire(seq, hold=hold)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence for good; every path out of the engine but `_hand_over` ends here."""
        self.loads.remove(seq)
        self._count_finished(seq, reason)
        hold = False
        if self._connector is not None and seq.parent is None:
            # No consumer fetches these blocks. A normal end may still save its KV to a store.
            if seq.is_aborted or reason == "error" or seq.mode == "prefill":
                self._connector.cancel(seq.request_id)
            hold = self._connector.request_finished(seq.request_id, seq.place.block_ids)
        self._retire(seq, hold=hold)
        others = self.table.choices(seq.request_id)
        if not others:
            self.loads.end_request(seq.request_id)
        elif reason == "error":
            # An error ends all choices, see `TokenOutput`.
            self._finish(others[0], reason)

    def _retire(self, seq: Sequence, *, hold: bool) -> None:
        self.preparations.remove(seq)
        is_under_way = self._is_under_way(seq)
        self.table.retire(seq, is_held=hold, is_under_way=is_under_way)
        # A step under way still writes to its slot and blocks: `_free_outlived` frees them later.
        if not is_under_way:
            self._kv.free_slot(seq)
            if not hold:
                self._kv.free_blocks(seq)

    def _is_under_way(self, seq: Sequence) -> bool:
        """Return whether a step under way computes a sequence."""
        return any(seq in plan for plan in self._plans)

    def _count_finished(self, seq: Sequence, reason: str) -> None:
        # One that ends in the queue may have no group (-1) yet; it is counted in the first.
        finished = self._kv.stats[max(seq.place.dp_group, 0)].requests_finished
        finished[reason] = finished.get(reason, 0) + 1

    # --- views ---------------------------------------------------------------------------------

    def next_deadline_s(self) -> float | None:
        """Return when the next reservation lapses or grammar is late; None if there is none."""
        deadlines = (self.loads.next_deadline_s(), self.preparations.next_deadline_s())
        return min((d for d in deadlines if d is not None), default=None)

    @property
    def awaits_connector(self) -> bool:
        """Return whether a sequence or a held block needs news from the connector."""
        return bool(self.table.held) or self.loads.awaits_connector

    def group_rooms(self) -> list[GroupSnapshot]:
        """Return the free slots and blocks of each DP group, without its load.

        The load would cost a look at every sequence.
        """
        running, reserved = self.table.num_running, self.table.num_reserved
        asking = self.table.queue.num_asking_for
        return [
            self._kv.snapshot(g, running[g], reserved[g], asking[g]) for g in range(len(self._kv))
        ]

    def group_snapshots(self) -> list[GroupSnapshot]:
        """Return the free slots, free blocks and load of each DP group."""
        contexts: list[list[int]] = [[] for _ in range(len(self._kv))]
        prompts: list[list[Sequence]] = [[] for _ in contexts]
        for seq in itertools.chain(self.table.rows, self.loads.awaiting):
            contexts[seq.place.dp_group].append(len(seq.token_ids))
        for seq in self.table.prefill_rows:
            prompts[seq.place.dp_group].append(seq)
        return [
            _with_load(room, contexts[group], prompts[group], self.table.queue.load_of(group))
            for group, room in enumerate(self.group_rooms())
        ]

    def group_counters(self) -> list[GroupCounters]:
        """Return totals and gauges of each DP group."""
        running, reserved = self.table.num_running, self.table.num_reserved
        return [self._kv.counters(g, running[g], reserved[g]) for g in range(len(self._kv))]

    @property
    def draft_counters(self) -> DraftCounters:
        """Return the totals of speculative decoding."""
        control = self._draft_control
        return DraftCounters() if control is None else copy.deepcopy(control.counters)

    @property
    def prefix_feed(self) -> PrefixFeed:
        """Return the events of the prefix caches."""
        return self._kv.prefix_feed

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget every cached block.

        Args:
            preempt_running: Whether running sequences lose their blocks, too. They are queued, and
                compute their tokens again. No step may be under way.

        Returns:
            Whether no sequence keeps KV from before; always True without `preempt_running`.
            Sequences that wait for KV, and those that another engine reads, keep theirs.
        """
        if preempt_running:
            assert not self._plans, "a step is under way"
            for seq in reversed(list(self.table.rows)):
                self._preempt(seq)
        self._kv.reset_prefix_cache()
        return not (preempt_running and (self.loads.awaiting or self.table.leaving()))

    def check_invariants(self) -> None:
        """Assert that every sequence is in one place, with the slot and blocks of that place."""
        self.table.check_invariants()
        self._kv.check_invariants([*self.table, *self.table.leaving()])
        self.loads.check_invariants()
        self.preparations.check_invariants()
        assert all(s.phase in (Phase.WAITING, Phase.RESERVED) for s in self.preparations.waiting)
        awaiting = {s for s in self.table if s.phase in (Phase.LOADING, Phase.RESERVED)}
        assert set(self.loads.awaiting) == awaiting
        for request_id in self.loads.not_activated:
            choices = self.table.choices(request_id)
            assert choices, f"the reservation of {request_id} is left behind"
            assert all(s.phase in (Phase.WAITING, Phase.RESERVED) for s in choices)
        assert not any(is_loading(s) for s in self.table if s not in awaiting)
        # The progress of steps of runs is that of their longest runs, until they are over.
        runs = (p for p in self._plans if p.progress or p.num_passes > 1)
        in_runs = {s for p in runs for s in p.decodes.sequences}
        for seq in (s for s in self.table.rows if s.phase is Phase.DECODE):
            assert seq in in_runs or seq.num_computed_tokens <= seq.examine_at
            assert self._plans or seq.num_new_tokens == 1
        assert not (self.pause.is_still and self._plans), "a step is under way in a pause"
        for plan in self._plans:
            self._check_limits(plan)

    def _check_limits(self, plan: StepPlan) -> None:
        """Assert that a step under way computes no more prompts in part than it may."""
        limits = self._partial_limits
        if limits is None:
            return
        # Its tokens count as computed already: what is left is what the step does not compute.
        parts = [
            (seq.num_new_tokens + count, count)
            for seq, count in zip(plan.sequences, plan.counts, strict=True)
            if seq.num_new_tokens and seq.is_running
        ]
        num_long = sum(num_left > limits.threshold for num_left, _ in parts)
        assert len(parts) <= limits.max_num, f"{len(parts)} prompts in part"
        assert num_long <= limits.max_num_long, f"{num_long} long prompts in part"
        if len(plan.sequences) > 1:
            assert all(count <= limits.max_chunk for _, count in parts), f"{parts}"


def _needs_single_passes(seq: Sequence) -> bool:
    """Return whether a row may be in no step of several passes.

    After its end a grammar allows no token, so that the row would fail. Log probabilities are
    returned once per step.
    """
    sampling = seq.sampling
    return (
        sampling.structured_outputs is not None
        or sampling.logprobs is not None
        or bool(sampling.logprob_token_ids)
    )


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
