"""Where a request may run: DP groups, and prefill engines as a whole, as this ingress sees them.

Pure values. `cost` chooses among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from replicas.config import Role
from replicas.kv_groups import KVGroup

if TYPE_CHECKING:
    from cluster.routing.demand import Demand

ANY_GROUP = -1
"""Stands for an engine as a whole, which picks the DP group itself."""


class Placement(NamedTuple):
    """A DP group, or an engine as a whole; the replica picks the slot."""

    incarnation: str
    dp_group: int


class EngineSummary(NamedTuple):
    """What an engine says of all of its places; `GroupView` has what each is.

    With the sequence number of the snapshot in which it says so.
    """

    role: Role
    kv_groups: tuple[KVGroup, ...]
    step_s: float
    seq: int = 0


class GroupView(msgspec.Struct, frozen=True, gc=False):
    """One DP group, or one prefill engine as a whole, as this ingress believes it to be.

    Attributes:
        incarnation: The engine that has it.
        dp_group: Its index there, or `ANY_GROUP`.
        role: What the engine takes now.
        kv_groups: KV groups of the model.
        step_s: Seconds of the engine's latest decode step; 0 before the first.
        index: Its place in the list of views.
        num_free_blocks: For each KV group the blocks that are free or evictable.
        num_empty_slots: Decode positions that are free.
        num_free_tokens: The longest sequence that has room in the blocks, in tokens.
        num_held_tokens: KV that sequences hold here, in tokens of the first KV group's blocks.
        num_active: Requests that it holds or was sent.
        num_waiting: Those of them that have not begun, as far as is known.
        spare_prompt_s: Seconds of a prompt that its engine computes beside those that it was sent
            for another DP group; of these, what is cached counts as well.
        spare_rows: Rows that it has less than the DP group of its engine that has most.
        spare_context_tokens: KV tokens likewise.
        max_context_tokens: The longest context of any DP group of its engine.
        num_rows: Sequences of its engine that hold a slot or are to get one.
        num_queued_tokens: Prompt tokens that its engine has not started on.
        own_prompt_s: Seconds of a prompt that its engine computes itself, whoever usually does.
        own_prompt_token_s: Of each of its tokens.
        own_prompt_pair_s: Of each (token, token that it attends to).
        row_s: Seconds by which a step becomes longer with a row more than the most.
        context_token_s: With a KV token more.
        longest_token_s: With a longest context that is a token longer.
        prompt_s: As `own_prompt_s`; this and the next two are 0 where others compute prompts.
        prompt_token_s: As `own_prompt_token_s`.
        prompt_pair_s: As `own_prompt_pair_s`.
        transfer_token_s: Of each token of a prompt whose KV comes from elsewhere.
        queue_s: Seconds of the prompts that are before a new one.
        next_step_s: Seconds of the next step of decodes.
    """

    incarnation: str
    dp_group: int
    role: Role
    kv_groups: tuple[KVGroup, ...]
    step_s: float
    index: int
    num_free_blocks: list[int]
    num_empty_slots: float
    num_free_tokens: float
    num_held_tokens: float
    num_active: float
    num_waiting: float
    spare_prompt_s: float
    spare_rows: float
    spare_context_tokens: float
    max_context_tokens: float
    num_rows: float
    num_queued_tokens: float
    own_prompt_s: float
    own_prompt_token_s: float
    own_prompt_pair_s: float
    row_s: float
    context_token_s: float
    longest_token_s: float
    prompt_s: float
    prompt_token_s: float
    prompt_pair_s: float
    transfer_token_s: float
    queue_s: float
    next_step_s: float

    @property
    def placement(self) -> Placement:
        """What a request is told that is placed here."""
        return Placement(self.incarnation, self.dp_group)


def fits(demand: Demand, view: GroupView) -> bool:
    """Whether a request can begin there at once; an engine as a whole has a queue of its own."""
    return view.dp_group == ANY_GROUP or (
        view.num_empty_slots >= demand.num_choices
        and view.num_free_tokens >= demand.num_first_tokens
    )
