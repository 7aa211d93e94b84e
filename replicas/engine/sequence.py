"""Mutable record of one choice of a request in the engine, and the phases of its life.

Owner: the scheduler, on the engine's core thread. Only it and its parts write to a sequence, except
for `handle` (`RequestHandler`) and `has_sent_tokens` (`ClientEvents`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from replicas.messages import num_pairs

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt

    from kv_transfer.connector import TransferRequest
    from replicas.engine.block_pool import PrefixWalk
    from replicas.messages import EngineRequest, RequestMode, TokenLogprob
    from replicas.sampling_params import SamplingParams

_INT64 = 2**63


class Phase(Enum):
    """Phase of a sequence's life; see `TRANSITIONS`."""

    WAITING = "waiting"
    """Queued: no slot, no blocks."""
    LOADING = "loading"
    """Came from the queue; has a slot and blocks for its whole prompt; loads a part of its KV."""
    RESERVED = "reserved"
    """Has a slot and blocks for its whole prompt, whose KV comes from another engine."""
    PREFILL = "prefill"
    """Runs; more than its last token is to be computed, or the worker does not know it."""
    DECODE = "decode"
    """Runs; all but its last token is computed once the steps under way are over."""
    LEAVING = "leaving"
    """Over; a step under way still computes it, or another engine uses its blocks."""
    ENDED = "ended"
    """Over, without slot and blocks."""


TRANSITIONS: Mapping[Phase, frozenset[Phase]] = {
    # A queued sequence leaves if the connector has not forgotten its request yet.
    Phase.WAITING: frozenset({Phase.LOADING, Phase.PREFILL, Phase.LEAVING, Phase.ENDED}),
    Phase.LOADING: frozenset({Phase.PREFILL, Phase.LEAVING, Phase.ENDED}),
    Phase.RESERVED: frozenset({Phase.PREFILL, Phase.LEAVING, Phase.ENDED}),
    # A running sequence waits again when it is preempted.
    Phase.PREFILL: frozenset({Phase.DECODE, Phase.WAITING, Phase.LEAVING, Phase.ENDED}),
    Phase.DECODE: frozenset({Phase.WAITING, Phase.LEAVING, Phase.ENDED}),
    Phase.LEAVING: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
"""The phases that may follow each phase.

A sequence begins in WAITING, or in RESERVED if it is choice 0 of a request of mode decode.
"""


def transition(seq: Sequence, phase: Phase) -> None:
    """Let a sequence enter a phase that may follow its present one; called by `RequestTable`."""
    assert phase in TRANSITIONS[seq.phase], f"{seq.request_id}: from {seq.phase} to {phase}"
    seq.phase = phase


@dataclass(slots=True, eq=False)
class KVLoad:
    """State of a sequence's load of KV, under way or ended. Owner: `KVLoads`.

    The last three attributes are used only for reservations.

    Attributes:
        is_under_way: Whether requested KV may still come.
        end: Tokens whose KV is here if the load under way succeeds.
        failure: Why the KV of the latest load did not come; None if it came or may still come.
        is_announced: Whether the connector knows the request.
        epoch: The client's number of the ticket in use.
        next: Ticket and epoch that replace the transfer under way once it has ended.
    """

    is_under_way: bool = False
    end: int = 0
    failure: str | None = None
    is_announced: bool = False
    epoch: int = 0
    next: tuple[bytes, int] | None = None


def choice_params(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Return the parameters of one choice, as if it were a request of its own.

    Choice i draws with the request's seed plus i. Source: vLLM v1/engine/parallel_sampling.py
    `ParentRequest`. Only choice 0 reports log probabilities of the prompt, which all choices share.
    """
    if sampling.n == 1:
        return sampling
    seed = sampling.seed
    if seed is not None:
        seed = (seed + choice + _INT64) % (2 * _INT64) - _INT64
    wanted = None if choice else sampling.prompt_logprobs
    return msgspec.structs.replace(sampling, n=1, seed=seed, prompt_logprobs=wanted)


@dataclass(slots=True, eq=False)
class KVPlace:
    """A sequence's slot and blocks. Owner: `KVCacheManager`.

    Attributes:
        block_ids: For each KV group its block table, in which the block of token t is number
            `t // block_size` of that group; empty without blocks. Blocks behind the window of a
            group are null.
        num_behind: For each KV group the leading null blocks of its table.
        num_missing: For each KV group the leading tokens whose KV its blocks lack, because only
            that of the last window was loaded.
        num_without_states: See `Place`.
        capacity: Tokens for which it has blocks in every KV group.
        block_hashes: For each KV group chain hashes of the full blocks of `token_ids`; empty until
            they are needed.
        walks: Until admission: by DP group, the cached prefix found in each KV group.
        num_indexed_tokens: Leading tokens whose full blocks the prefix index already knows.
        dp_group: Its DP group; the asked one or -1 until admitted.
        slot: Its slot, or -1.
        num_cached_tokens: Prompt tokens found when it was first admitted, in the prefix cache or by
            the connector.
        is_converted: Whether some of its KV came in another dtype. Its blocks must not be shared,
            because this engine would have computed different KV.
    """

    dp_group: int = -1
    slot: int = -1
    block_ids: list[list[int]] = field(default_factory=list)
    num_behind: list[int] = field(default_factory=list)
    num_missing: list[int] = field(default_factory=list)
    num_without_states: int = 0
    capacity: int = 0
    block_hashes: list[list[bytes]] = field(default_factory=list)
    walks: dict[int, list[PrefixWalk]] = field(default_factory=dict)
    num_indexed_tokens: int = 0
    num_cached_tokens: int = -1
    is_converted: bool = False


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One choice of a request inside the engine.

    Only choice 0 loads KV, or is fetched by other engines: the connector knows requests, and all
    choices have one prompt.

    Attributes:
        request: The client's request; never changes.
        mode: Part of the request that runs here.
        client: Opaque id of the client that gets its outputs.
        token_ids: Prompt, then output.
        num_computed_tokens: Tokens whose KV is in the cache once the steps under way are over.
        place: Its slot and blocks.
        transfer: The request as the KV connector gets it; None in an engine without a connector,
            and for choices other than 0.
        load: Its load of KV; None if it never waited for KV.
        is_aborted: Whether the client has given it up. Its KV must not be used any more.
        choice: Index of the choice, from 0.
        handle: Its number in columns of tokens; 0 before it is accepted.
        has_sent_tokens: Whether its client has got its first tokens from here, so that column rows
            can follow.
        num_preemptions: How often it lost its blocks.
        is_known_to_runner: Whether the runner's batch holds it; False makes the next step send it
            whole.
        is_drawn_on_host: Whether its tokens are drawn on the host, on a device that continues from
            the tokens of others by itself.
        examine_at: While it decodes: computed tokens at which it fills a block or ends.
        stop_ids: While it decodes: tokens that end it.
        prompt_logprobs: Log probabilities of the part of the prompt that is computed, as in
            `TokenOutput`, until the first token takes them along; None if there are none.
        pooled: (N,) sum of the hidden states that its embedding pools, of the part of the prompt
            that is computed; None if there are none.
        order: Its number by arrival; later ones have higher numbers.
        parent: Choice 0, whose prompt blocks it may share; None for choice 0 itself.
        phase: Its phase; only `transition` changes it.
        sampling: The request's parameters with the seed of this choice.
        request_id: The request's id.
        num_prompt_tokens: Tokens of the prompt.
    """

    request: EngineRequest
    mode: RequestMode
    client: bytes
    token_ids: list[int]
    place: KVPlace = field(default_factory=KVPlace)
    num_computed_tokens: int = 0
    transfer: TransferRequest | None = None
    load: KVLoad | None = None
    is_aborted: bool = False
    choice: int = 0
    handle: int = 0
    has_sent_tokens: bool = False
    num_preemptions: int = 0
    is_known_to_runner: bool = False
    is_drawn_on_host: bool = False
    examine_at: int = 0
    stop_ids: frozenset[int] = frozenset()
    prompt_logprobs: list[list[TokenLogprob]] | None = None
    pooled: npt.NDArray[np.float32] | None = None
    order: int = 0
    parent: Sequence | None = None
    phase: Phase = field(init=False)
    sampling: SamplingParams = field(init=False)
    request_id: str = field(init=False)
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        is_reserved = self.mode == "decode" and self.parent is None
        self.phase = Phase.RESERVED if is_reserved else Phase.WAITING
        self.sampling = choice_params(self.request.sampling, self.choice)
        self.request_id = self.request.request_id
        self.num_prompt_tokens = len(self.request.prompt_token_ids)

    def __repr__(self) -> str:
        # Logs must not contain a client's tokens.
        return (
            f"Sequence({self.request_id!r}, choice={self.choice}, {self.phase.value}, "
            f"prompt={self.num_prompt_tokens}, tokens={self.num_tokens}, "
            f"computed={self.num_computed_tokens})"
        )

    def transfer_with(self, ticket: bytes) -> TransferRequest:
        """Return the connector's request for a transfer of all tokens, output included."""
        assert self.transfer is not None, "an engine without a connector transfers nothing"
        # Copied with output, because that grows.
        tokens = [*self.token_ids] if self.num_output_tokens else self.transfer.prompt_token_ids
        return msgspec.structs.replace(self.transfer, ticket=ticket, prompt_token_ids=tokens)

    @property
    def rank(self) -> tuple[int, int]:
        """Return its place in scheduling by priority: the lowest rank runs first."""
        return self.request.priority, self.order

    def num_shared_tokens(self, block_multiple: int) -> int:
        """Return the leading tokens whose blocks it can share with choice 0, its parent.

        These are full blocks of the prompt. At least one token is left to compute, because its
        logits are needed.

        Args:
            block_multiple: A multiple of this many tokens fills whole blocks in each KV group.
        """
        num_tokens = min(self.num_prompt_tokens, self.num_tokens - 1)
        return num_tokens - num_tokens % block_multiple

    @property
    def is_running(self) -> bool:
        """Return whether steps compute it."""
        return self.phase is Phase.DECODE or self.phase is Phase.PREFILL

    @property
    def is_over(self) -> bool:
        """Return whether it has ended; it may still have a slot or blocks."""
        return self.phase is Phase.LEAVING or self.phase is Phase.ENDED

    @property
    def num_tokens(self) -> int:
        """Return the number of known tokens: prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Return the number of tokens sampled so far, here or on another engine."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Return whether its whole prompt must be computed here, for its log probabilities.

        The engine that draws the first token reports them.
        """
        return self.sampling.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def needs_whole_prompt(self) -> bool:
        """Return whether its whole prompt must be computed here, even where KV is loaded."""
        return self.sampling.needs_whole_prompt and self.num_output_tokens == 0

    @property
    def num_new_tokens(self) -> int:
        """Return the number of known tokens that are not computed yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_new_pairs(self) -> int:
        """Return the number of pairs (new token, token that it attends to)."""
        return num_pairs(self.num_computed_tokens, len(self.token_ids))
