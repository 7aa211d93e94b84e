"""Continuous batching: which sequences advance in the next step, and by how many tokens.

There is no prefill phase and no decode phase: a sequence has `num_computed_tokens`, and each step
advances it towards `num_tokens` within a token budget. Chunked prefill, prefix hits, resumption
after preemption and KV that came from another engine or from a store are all that one rule.
Source: vLLM v1/core/sched/scheduler.py (token accounting, running before waiting, preemption of the
last running sequence by recompute).
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from replicas.engine.roster import Roster
from replicas.engine.sequence import Sequence, SequenceStatus
from replicas.engine.step import NewSequence, ScheduledBatch
from replicas.messages import TokenOutput

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kv_transfer.connector import KVConnectorScheduler
    from replicas.config import EngineConfig
    from replicas.engine.step import StepKind, StepResult
    from replicas.messages import FinishReason


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


class Scheduler(Roster):
    """Decides each step; see the module docstring. It owns what its `Roster` does.

    Args:
        config: See `Roster`.
        num_blocks: See `Roster`.
        prefix_cache_key: See `Roster`.
        max_model_len: Longest sequence in tokens.
        eos_token_ids: The model's end tokens.
        connector: See `Roster`.
        resumes_prefill: See `Roster`.
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
        super().__init__(
            config,
            num_blocks=num_blocks,
            prefix_cache_key=prefix_cache_key,
            connector=connector,
            resumes_prefill=resumes_prefill,
        )
        assert 1 <= chunk_alignment <= config.max_num_batched_tokens, f"{chunk_alignment=}"
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._chunk_alignment = chunk_alignment
        self._prefill_streak = 0

    # --- one step ------------------------------------------------------------------------------

    def schedule(self) -> ScheduledBatch | None:
        """Put the next step together: running sequences first, then waiting ones.

        Returns:
            The step, or None when nothing can run now.
        """
        self._loads.ask_again()
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
            seq = self._waiting.pop()
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
            self._waiting.push_front(seq)

    def _try_admit(self, plan: _StepPlan, seq: Sequence, full_groups: set[int]) -> _Admission:
        # Before a place is looked for: there may be many of these, in every step.
        if self._loads.is_asking(seq) and self._loads.num_external(seq, 0) is None:
            return _Admission.ASKING
        # The whole prompt must fit, or two half-done prompts could starve each other.
        place = self._groups.place(seq, seq.num_tokens, full_groups)
        if place is None:
            return _Admission.NO_ROOM
        group, hits = place
        num_local = len(hits) * self._config.block_size
        num_external = self._loads.num_external(seq, num_local)
        if num_external is None:
            return _Admission.ASKING
        if num_external:
            self._groups.admit(seq, group, hits, seq.num_tokens)
            self._loads.start(seq, num_external)
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
