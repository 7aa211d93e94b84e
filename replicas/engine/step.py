"""Messages between the engine core and its worker: facts at start, then data of each step.

Plain records that could cross a process boundary: a row is sent completely once, afterwards only
its changes.
"""

from typing import Literal

import msgspec

from replicas.kv_groups import KVGroup
from replicas.messages import TokenLogprob
from replicas.sampling_params import SamplingParams

StepKind = Literal["mixed", "prefill", "decode"]
"""mixed: chunks and decodes in one flat pass. prefill, decode: a TT generator's two calls."""


class NewRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row that the worker does not know, or must replace; sent whole, once.

    Attributes:
        slot: Its row of the persistent batch.
        dp_group: The lane that holds its blocks.
        token_ids: Prompt and output so far.
        num_prompt_tokens: How many of them are the prompt.
        num_computed_tokens: How many have their KV in the cache.
        block_ids: For each KV group its block table.
        sampling: Its parameters, of which the worker reads each one where it acts.
    """

    slot: int
    dp_group: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[list[int]]
    sampling: SamplingParams


class ScheduledBatch(msgspec.Struct, frozen=True, array_like=True):
    """One step's work.

    Attributes:
        kind: Which call of the generator runs it.
        slots: Rows that run, in scheduling order.
        num_scheduled_tokens: Tokens to compute for each of `slots`: known ones, then drafts.
        new: Rows to take over first; all their slots are in `slots`.
        appended_blocks: For rows known already: (slot, for each KV group the block ids to append).
        num_passes: Forward passes of the step. In all but the first each row computes the token
            that the pass before has given it.
        gone: Slots whose rows have left since the last step. A row of `new` may follow in one.
        max_drafts: The most drafts that the worker may propose for each row after the step.
    """

    kind: StepKind
    slots: list[int]
    num_scheduled_tokens: list[int]
    new: list[NewRow]
    appended_blocks: list[tuple[int, list[list[int]]]]
    num_passes: int = 1
    gone: list[int] = []
    max_drafts: int = 0


class RowFailure(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row that ends because no token could be drawn for it.

    Attributes:
        row: Its index among the batch's slots.
        reason: "no_distribution": its logits have NaN, or are infinite. "no_allowed_token": its
            parameters forbid every token.
    """

    row: int
    reason: Literal["no_distribution", "no_allowed_token"]


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log probabilities of a row's run, or of a part of its prompt.

    Attributes:
        row: Its index among the batch's slots.
        positions: For each token of the run as in `TokenOutput.logprobs`; for each token of the
            part as in `TokenOutput.prompt_logprobs`.
    """

    row: int
    positions: list[list[TokenLogprob]]


class RowHidden(msgspec.Struct, frozen=True, array_like=True):
    """Hidden states of a row's part of a prompt, for its embedding.

    Attributes:
        row: Its index among the batch's slots.
        total: (N,) float32, little-endian: the sum of the states that the embedding pools.
    """

    row: int
    total: bytes


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """Result of one step.

    Attributes:
        token_ids: The new tokens of all rows: one run for each of the batch's slots, in order.
        passes_s: Seconds inside the generator, of each forward pass.
        counts: Length of each run: 0 where the prompt is not complete yet, or the row has failed.
            Empty: every row has one token.
        failed: Rows that end without a token.
        sample_s: Seconds of sampling from the generator's output, and of proposing drafts.
        num_drafts: For each of the batch's slots the drafts that the worker holds for the next
            step, which may verify fewer or none. Empty: there are none.
        logprobs: Log probabilities of the runs of those rows that ask for them.
        prepare_s: Seconds of building inputs and calling the generator, without the time inside it.
        prompt_logprobs: Those of prompt tokens, of the rows that ask for them and compute a part of
            their prompt: for each computed token those of the next one, if that is in the prompt.
            The first part begins with the prompt's first token, which has none.
        hidden: Of the rows that ask for embeddings and compute states that these pool.
        on_host: Rows among the new ones that the host draws for, on a device that continues from
            its own tokens: it cannot continue with them before the host has drawn.
    """

    token_ids: list[int]
    passes_s: list[float]
    counts: list[int] = []
    failed: list[RowFailure] = []
    sample_s: float = 0.0
    num_drafts: list[int] = []
    logprobs: list[RowLogprobs] = []
    prepare_s: float = 0.0
    prompt_logprobs: list[RowLogprobs] = []
    hidden: list[RowHidden] = []
    on_host: list[int] = []

    @property
    def device_s(self) -> float:
        """Return the seconds inside the generator."""
        return sum(self.passes_s)


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a loaded model for the engine core.

    Attributes:
        max_position_embeddings: Longest context of the model, in tokens.
        vocab_size: Token ids are below this.
        eos_token_ids: End tokens of the model's configuration.
        kv_groups: Its KV groups, with as many blocks as fit.
        supports_mixed_batch: Prefill chunks and decodes may share a pass.
        supports_chunked_prefill: A prompt may be computed over several calls.
        supports_prefix_caching: A prefill may start after cached tokens.
        supports_drafts: A pass can verify drafts: it gives the logits of several tokens of a row.
        supports_prompt_logprobs: A mixed pass can give the logits of a prompt in portions.
        supports_async_decode: A decode step may be submitted before the previous one is over.
        tokens_per_pass: The most tokens that a decode pass gives a row.
        kv_tokens_per_pass: Tokens behind a row's computed ones whose KV a pass may write.
        chunk_alignment: A chunk that does not complete its prompt should end on a multiple of this
            many tokens: a mesh writes KV in whole blocks, and would recompute a partial one.
    """

    max_position_embeddings: int
    vocab_size: int
    eos_token_ids: list[int]
    kv_groups: tuple[KVGroup, ...]
    supports_mixed_batch: bool
    supports_chunked_prefill: bool
    supports_prefix_caching: bool
    supports_drafts: bool = False
    supports_prompt_logprobs: bool = False
    supports_async_decode: bool = False
    tokens_per_pass: int = 1
    kv_tokens_per_pass: int = 1
    chunk_alignment: int = 1
