"""Mutable record of one request in the engine.

Owner: the scheduler, on the engine's core thread; only its parts write to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import msgspec

from replicas.messages import num_pairs

if TYPE_CHECKING:
    from kv_transfer.connector import TransferRequest
    from replicas.engine.block_pool import PrefixWalk
    from replicas.messages import EngineRequest, RequestMode


class SequenceStatus(Enum):
    """Where a sequence is; only the scheduler moves it."""

    WAITING = "waiting"
    """In the queue: no slot, no blocks."""
    RUNNING = "running"
    """Holds a slot and blocks and is advanced step by step."""
    LOADING = "loading"
    """Came from the queue; holds a slot and blocks for its whole prompt, some of whose KV comes."""
    RESERVED = "reserved"
    """Holds a slot and blocks for its whole prompt, whose KV comes from another engine."""
    FINISHED = "finished"
    """Over; its blocks may outlive it while another engine fetches them."""


@dataclass(slots=True, eq=False)
class KVLoad:
    """KV that a sequence waits for, or has waited for. Owner: `KVLoads`.

    Attributes:
        is_under_way: KV was asked for that may still come.
        end: Tokens whose KV is here once the load under way has succeeded.
        failure: Why the KV of the latest load did not come; None if it did, or may yet.
        deadline_s: Of a reservation: when it lapses.
        is_activated: Of a reservation: the client said to start.
        is_announced: Of a reservation: the connector knows of it.
        epoch: Of a reservation: the client's number of the ticket in use.
        next: Of a reservation: ticket and epoch that replace the transfer under way as soon as that
            has ended.
    """

    is_under_way: bool = False
    end: int = 0
    failure: str | None = None
    deadline_s: float = 0.0
    is_activated: bool = False
    is_announced: bool = False
    epoch: int = 0
    next: tuple[bytes, int] | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine.

    Attributes:
        request: What was asked; never changes.
        mode: Which part of it runs here.
        client: Opaque id of the client that gets its outputs.
        token_ids: Prompt, then output.
        num_computed_tokens: Tokens whose KV is in the cache once the steps under way are over.
        block_ids: For each KV group its block table, in which the block of token t is number
            `t // block_size` of that group; empty without blocks.
        capacity: Tokens for which it has blocks in every KV group.
        block_hashes: For each KV group chain hashes of the full blocks of `token_ids`; empty before
            anybody asked for them.
        walks: Until it is admitted: what of its prefix each DP group was found to have, in
            each KV group.
        num_indexed_tokens: Leading tokens whose full blocks the prefix index already knows.
        dp_group: Its DP group; the asked one or -1 until admitted.
        slot: Its slot, or -1.
        num_cached_tokens: Prompt tokens found when it was first admitted, in the prefix cache or by
            the connector.
        transfer: What a KV connector is told of it; None in an engine without one.
        load: What comes, or came, from elsewhere; None if it never waited for any KV.
        is_converted: Some of the KV in its blocks came in another dtype. That, and what is computed
            from it, is not what this engine computes: nobody else may find those blocks.
        is_aborted: The client gave it up; nobody may count on what it still holds.
        handle: Names it to its client in columns of tokens; 0 before it is accepted.
        is_told: Whether its client has its first tokens from here: those after it can be rows.
        num_preemptions: How often it lost its blocks.
        is_known_to_runner: Whether the runner's batch holds it; False makes the next step send it
            whole.
        is_decoding: Whether it is among the rows whose steps are all alike; see `RunningRows`.
        look_at: Of one that is: computed tokens with which it fills a block or ends.
        stop_ids: Of one that is: tokens that end it.
        request_id: The request's id.
        num_prompt_tokens: Tokens of the prompt.
    """

    request: EngineRequest
    mode: RequestMode
    client: bytes
    token_ids: list[int]
    dp_group: int = -1
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    block_ids: list[list[int]] = field(default_factory=list)
    capacity: int = 0
    block_hashes: list[list[bytes]] = field(default_factory=list)
    walks: dict[int, list[PrefixWalk]] = field(default_factory=dict)
    num_indexed_tokens: int = 0
    slot: int = -1
    num_cached_tokens: int = -1
    transfer: TransferRequest | None = None
    load: KVLoad | None = None
    is_converted: bool = False
    is_aborted: bool = False
    handle: int = 0
    is_told: bool = False
    num_preemptions: int = 0
    is_known_to_runner: bool = False
    is_decoding: bool = False
    look_at: int = 0
    stop_ids: frozenset[int] = frozenset()
    request_id: str = field(init=False)
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.num_prompt_tokens = len(self.request.prompt_token_ids)

    def transfer_with(self, ticket: bytes) -> TransferRequest:
        """What a KV connector is told of a transfer of all that it has, output too."""
        assert self.transfer is not None, "an engine without a connector transfers nothing"
        # A prompt stays as it is; output grows.
        tokens = [*self.token_ids] if self.num_output_tokens else self.transfer.prompt_token_ids
        return msgspec.structs.replace(self.transfer, ticket=ticket, prompt_token_ids=tokens)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, here or on the engine that did the prefill."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_new_tokens(self) -> int:
        """Known tokens that are not computed yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_new_pairs(self) -> int:
        """(token, token that it attends to) of these."""
        return num_pairs(self.num_computed_tokens, len(self.token_ids))
