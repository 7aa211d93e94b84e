"""What the scheduler asks of the worker in one step, and what the worker answers.

Plain records that could cross a process: a sequence is sent whole once, afterwards only what
changed.
"""

from typing import Literal

import msgspec

StepKind = Literal["mixed", "prefill", "decode"]
"""mixed: chunks and decodes in one flat pass. prefill, decode: a TT generator's two calls."""


class NewSequence(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence that the worker does not know, or must forget and take anew.

    Attributes:
        slot: Its row of the persistent batch.
        dp_group: The lane that holds its blocks.
        token_ids: Prompt and output so far.
        num_prompt_tokens: How many of them are the prompt.
        num_computed_tokens: How many have their KV in the cache.
        block_ids: Its block table.
        temperature: See `SamplingParams`; below 1e-5 is greedy.
        top_k: 0 is off.
        top_p: 1 is off.
        seed: Key of its random numbers.
    """

    slot: int
    dp_group: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int


class ScheduledBatch(msgspec.Struct, frozen=True, array_like=True):
    """One step's work.

    Attributes:
        kind: Which call of the generator runs it.
        slots: Rows that run, in scheduling order.
        num_scheduled_tokens: Tokens to compute for each of `slots`.
        new: Sequences to take over first; all their slots are in `slots`.
        appended_blocks: For rows known already: (slot, block ids to append).
    """

    kind: StepKind
    slots: list[int]
    num_scheduled_tokens: list[int]
    new: list[NewSequence]
    appended_blocks: list[tuple[int, list[int]]]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(self.num_scheduled_tokens)


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What one step gave.

    Attributes:
        token_ids: For each of the batch's slots the sampled token, or -1 where the prompt is not
            complete yet.
        device_s: Seconds inside the generator.
    """

    token_ids: list[int]
    device_s: float
