"""Places where a request may run: DP groups and whole prefill engines, as this ingress sees them.

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
"""The index of an engine as a whole, which picks the DP group itself."""


class Placement(NamedTuple):
    """A DP group, or an engine as a whole; the replica picks the slot."""

    incarnation: str
    dp_group: int


class EngineSummary(NamedTuple):
    """The parts of an engine's snapshot that hold for all of its places, and its sequence number.

    `GroupView` documents the fields.
    """

    role: Role
    kv_groups: tuple[KVGroup, ...]
    step_s: float
    seq: int = 0


class GroupView(msgspec.Struct, frozen=True, gc=False):
    """One DP group, or one whole prefill engine, as this ingress sees it.

    Attributes:
        incarnation: Its engine.
        dp_group: Its index there, or `ANY_GROUP`.
        role: Current role of the engine.
        kv_groups: KV groups of the model.
        step_s: Seconds of the engine's latest decode step; 0 before the first.
        index: Its index in the list of views.
        num_free_blocks: Blocks of each KV group that are free or evictable.
        num_empty_slots: Free decode slots.
        num_free_tokens: Length of the longest sequence that fits into the blocks.
        num_held_tokens: KV that sequences hold here, in tokens of the first KV group's blocks.
        num_active: Requests that it has or was sent.
        num_waiting: Those of them that have not begun, as far as known.
        spare_prompt_s: Seconds of a prompt that its engine computes beside the prompts sent to its
            other DP groups, without making the step longer. Cached tokens of those prompts count as
            if they were computed.
        spare_rows: Rows that it has less than the fullest DP group of its engine.
        spare_context_tokens: KV tokens that it has less than the DP group of its engine with most.
        max_context_tokens: Longest context of any DP group of its engine.
        num_rows: Sequences of its engine that hold a slot or are about to get one.
        num_queued_tokens: Prompt tokens that its engine has not started on.
        own_prompt_s: Fixed seconds of a prompt that its own engine computes.
        own_prompt_token_s: Seconds of each token of such a prompt.
        own_prompt_pair_s: Seconds of each (token, token that it attends to) of such a prompt.
        row_s: Seconds by which a step grows with each row beyond the fullest group.
        context_token_s: Seconds by which a step grows with each KV token beyond the fullest group.
        longest_token_s: Seconds by which a step grows with each token of the longest context.
        prompt_s: As `own_prompt_s`; this and the next two are 0 where prefill engines compute
            prompts.
        prompt_token_s: As `own_prompt_token_s`.
        prompt_pair_s: As `own_prompt_pair_s`.
        transfer_token_s: Seconds of each prompt token whose KV is fetched.
        queue_s: Seconds of the prompts that are before a new one.
        next_step_s: Seconds of the next decode step.
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
        """The placement of a request that is placed here."""
        return Placement(self.incarnation, self.dp_group)


def fits(demand: Demand, view: GroupView) -> bool:
    """Return whether a request can start there at once; a whole engine has a queue of its own."""
    return view.dp_group == ANY_GROUP or (
        view.num_empty_slots >= demand.num_choices
        and view.num_free_tokens >= demand.num_first_tokens
    )
