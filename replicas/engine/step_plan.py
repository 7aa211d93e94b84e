"""Plan of one step: its rows, their tokens, and what the worker must know of them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from replicas.engine.step import NewRow, ScheduledBatch
from replicas.messages import StepWork, num_pairs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from replicas.engine.request_table import DecodeRows
    from replicas.engine.sequence import Sequence
    from replicas.engine.step import StepKind


class StepPlan:
    """A step that is being planned, and then under way: decoding rows, then others.

    Args:
        kind: Kind of the step.
        budget: Tokens that it may still compute.
        decodes: Its decoding rows.

    Attributes:
        max_chunk: Most tokens of a prompt, see `PartialPrefillLimits`.
        sequences: The other rows, each with its number of tokens in `counts`.
        appended: Blocks that rows get which the worker knows, by slot.
        batch: The step for the worker, once it has begun.
        num_passes: Forward passes, each of which gives every decoding row a token.
        due_rows: Indices of decoding rows that with this step fill a block or reach their longest
            length.
        progress: Most progress of each decoding row if some verify drafts, or a pass gives several
            tokens; otherwise each makes `num_passes`.
        max_drafts: The most drafts that the worker may propose for each row after the step.
    """

    def __init__(self, kind: StepKind, budget: int, decodes: DecodeRows) -> None:
        self.kind = kind
        self.budget = budget
        self.max_chunk = budget
        self.decodes = decodes
        self.sequences: list[Sequence] = []
        self.counts: list[int] = []
        self.appended: list[tuple[int, list[list[int]]]] = []
        self.batch: ScheduledBatch | None = None
        self.num_passes = 1
        self.due_rows: list[int] = []
        self.progress: list[int] = []
        self.max_drafts = 0

    def __bool__(self) -> bool:
        return bool(self.sequences) or len(self.decodes) > 0

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self.decodes.sequences or seq in self.sequences

    def fits(self, seq: Sequence) -> bool:
        """Return whether a sequence's remaining tokens fit this kind of step."""
        return self.kind == "mixed" or (seq.num_new_tokens == 1) == (self.kind == "decode")

    def add(self, seq: Sequence, count: int) -> None:
        """Let a sequence compute so many of its tokens, as a row behind the decoding ones."""
        self.sequences.append(seq)
        self.counts.append(count)
        self.budget -= count

    def drop(self, seq: Sequence) -> None:
        """Take out a row that is preempted, if it is planned: others may use its tokens."""
        if seq in self.sequences:
            row = self.sequences.index(seq)
            del self.sequences[row]
            self.budget += self.counts.pop(row)
            self.appended = [(slot, ids) for slot, ids in self.appended if slot != seq.place.slot]

    @property
    def shares(self) -> Iterator[tuple[int, int]]:
        """Yield the tokens that each row but decoding ones lacks, and how many it gets."""
        for seq, count in zip(self.sequences, self.counts, strict=True):
            yield seq.num_new_tokens, count

    def note_blocks(self, seq: Sequence, block_ids: list[list[int]]) -> None:
        """Note blocks appended to a sequence that the runner knows; new ones are sent whole."""
        if block_ids and seq.is_known_to_runner:
            self.appended.append((seq.place.slot, block_ids))

    def work(self, num_groups: int) -> StepWork:
        """Return the work of the step's first pass, once it has begun."""
        decodes, prompts = [*self.decodes.sequences], []
        for seq, count in zip(self.sequences, self.counts, strict=True):
            if self.kind != "prefill" and count == 1:
                decodes.append(seq)
            else:
                prompts.append((seq, count))
        return step_work(decodes, prompts, num_groups, self.num_passes)

    def build(self, gone: list[int]) -> ScheduledBatch:
        """Make the step for the worker; `gone` are the slots whose rows have left."""
        decodes = self.decodes.plain
        new = [_new_row(seq) for seq in self.sequences if not seq.is_known_to_runner]
        slots, counts = decodes.slots, self.progress or decodes.num_scheduled_tokens
        if self.sequences:
            slots, counts = slots + [s.place.slot for s in self.sequences], counts + self.counts
        self.batch = ScheduledBatch(
            self.kind, slots, counts, new, self.appended, gone=gone, max_drafts=self.max_drafts
        )
        return self.batch


def _new_row(seq: Sequence) -> NewRow:
    sampling = seq.sampling
    if sampling.prompt_logprobs is not None and not seq.needs_prompt_logprobs:
        # They were reported with the first token, here or by another engine.
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    return NewRow(
        slot=seq.place.slot,
        dp_group=seq.place.dp_group,
        token_ids=list(seq.token_ids),
        num_prompt_tokens=seq.num_prompt_tokens,
        num_computed_tokens=seq.num_computed_tokens,
        block_ids=[list(block_ids) for block_ids in seq.place.block_ids],
        sampling=sampling,
    )


def step_work(
    decodes: Iterable[Sequence],
    prompts: Iterable[tuple[Sequence, int]],
    num_groups: int,
    num_passes: int = 1,
) -> StepWork:
    """Return the work of a begun step's first pass: each number of the DP group with the most.

    Args:
        decodes: Its rows that compute one token of their output.
        prompts: Its other rows, with the tokens that each computes.
        num_groups: DP groups of the engine.
        num_passes: Passes of the step, all of which its rows have counted as progress.
    """
    rows, contexts, longest = [0] * num_groups, [0] * num_groups, 0
    for seq in decodes:
        rows[seq.place.dp_group] += 1
        context = seq.num_computed_tokens - (num_passes - 1)
        contexts[seq.place.dp_group] += context
        longest = max(longest, context)
    chunks, tokens, pairs = [0] * num_groups, [0] * num_groups, [0] * num_groups
    for seq, count in prompts:
        chunks[seq.place.dp_group] += 1
        tokens[seq.place.dp_group] += count
        pairs[seq.place.dp_group] += num_pairs(
            seq.num_computed_tokens - count, seq.num_computed_tokens
        )
    return StepWork(max(rows), max(contexts), longest, max(chunks), max(tokens), max(pairs), 0.0)
