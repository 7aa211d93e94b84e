"""What an engine has to do before a new request, and what that request would add to it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from replicas.messages import GroupSnapshot, num_pairs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.routing.demand import Demand
    from cluster.routing.step_time import StepCosts


Columns = dict[str, tuple[Any, ...]]
"""Of each field of a `GroupSnapshot` what all DP groups of an engine say, in their order."""
Prompts = tuple[list[int], list[int], list[int]]
"""How many there are, their tokens and their pairs of tokens; of each DP group."""


class Load(NamedTuple):
    """An engine's, as a request that asks for one of its DP groups finds it.

    DP groups step together: a request makes a step longer only where its group becomes the one that
    has most.

    Attributes:
        queue_s: Seconds of the prompts that are before a new one.
        step_s: Seconds of the next step of decodes.
        rows: Sequences of each group that hold a slot or are to get one.
        max_context_tokens: The longest context of any group.
        spare_rows: Rows that each group has less than the one that has most.
        spare_context_tokens: KV tokens likewise.
        spare_prompt_s: Seconds of prompts that no step can have begun yet, likewise.
    """

    queue_s: float
    step_s: float
    rows: list[int]
    max_context_tokens: int
    spare_rows: list[int]
    spare_context_tokens: list[int]
    spare_prompt_s: list[float]


def told_by(groups: Iterable[GroupSnapshot]) -> Columns:
    """What DP groups say, by fields: one pass in C, as an ingress does it for every decision."""
    rows = map(msgspec.structs.astuple, groups)
    return dict(zip(GroupSnapshot.__struct_fields__, zip(*rows, strict=True), strict=True))


def engine_load(
    told: Columns,
    sent: Iterable[tuple[int, Demand]],
    costs: StepCosts,
    max_step_tokens: int,
    *,
    computes_prompts: bool,
) -> Load:
    """What an engine has to do.

    Args:
        told: What its DP groups last said.
        sent: What it was sent since, with the DP group; one that is none is left out.
        costs: Of the parts of its steps.
        max_step_tokens: Tokens that a step may compute, over all groups.
        computes_prompts: Whether it computes the prompts that it is sent.
    """
    held = zip(told["num_running"], told["num_reserved"], told["num_waiting"], strict=True)
    rows = [running + reserved + waiting for running, reserved, waiting in held]
    tokens = list(told["num_context_tokens"])
    longest = max(told["max_context_tokens"])
    counts, lengths = list(told["num_prompts"]), list(told["num_prompt_tokens"])
    pairs = list(told["num_prompt_pairs"])
    # A snapshot comes before the step that begins what it tells of.
    waiting_s = [0.0] * len(rows)
    for dp_group, demand in sent:
        if dp_group >= 0:
            length = demand.num_prompt_tokens
            rows[dp_group] += demand.num_choices
            tokens[dp_group] += length * demand.num_choices
            longest = max(longest, length)
            if computes_prompts:
                counts[dp_group] += 1
                lengths[dp_group] += length
                pairs[dp_group] += num_pairs(0, length)
                waiting_s[dp_group] += costs.prompts_s(1, length, num_pairs(0, length))
    most_rows, most_tokens, most_s = max(rows), max(tokens), max(waiting_s)
    return Load(
        _queue_s((counts, lengths, pairs), costs, max_step_tokens) if any(counts) else 0.0,
        costs.decode_step_s(most_rows, most_tokens, longest),
        rows,
        longest,
        [most_rows - num_rows for num_rows in rows],
        [most_tokens - num_tokens for num_tokens in tokens],
        [most_s - seconds for seconds in waiting_s],
    )


def spread(num_groups: int, sent: Iterable[Demand]) -> list[tuple[int, Demand]]:
    """Where an engine puts what it was sent that left the DP group to it: all around."""
    return [(i % num_groups, demand) for i, demand in enumerate(sent)]


def _queue_s(prompts: Prompts, costs: StepCosts, max_step_tokens: int) -> float:
    """Seconds of all prompts: groups side by side, as far as a step's tokens feed them."""
    counts, tokens, _ = prompts
    *_, prompt_s, token_s, pair_s = costs
    each_s = [n * prompt_s + t * token_s + p * pair_s for n, t, p in zip(*prompts, strict=True)]
    longest_s: float = max(each_s)
    if len(each_s) == 1:
        return longest_s
    num_fed = min(max(max_step_tokens * sum(counts) / max(sum(tokens), 1), 1.0), len(each_s))
    together_s: float = sum(each_s) / num_fed
    return max(longest_s, together_s)
