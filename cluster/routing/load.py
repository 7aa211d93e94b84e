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
        spare_prompt_s: Seconds of prompts that the next step computes in each group beside those of
            the one that has most, and grows no longer by.
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
    sent_s, num_sent_tokens = [0.0] * len(rows), 0
    for dp_group, demand in sent:
        if dp_group >= 0:
            length = demand.num_prompt_tokens
            rows[dp_group] += demand.num_choices
            tokens[dp_group] += length * demand.num_choices
            longest = max(longest, length)
            if computes_prompts:
                counts[dp_group] += 1
                lengths[dp_group] += length
                its_pairs = num_pairs(0, length)
                pairs[dp_group] += its_pairs
                sent_s[dp_group] += costs.prompts_s(1, length, its_pairs)
                num_sent_tokens += length
    most_rows, most_tokens = max(rows), max(tokens)
    num_prompts, nothing = sum(counts), [0.0] * len(rows)
    each_s = nothing
    if num_prompts:
        each_s = [costs.prompts_s(*its) for its in zip(counts, lengths, pairs, strict=True)]
    spare_prompt_s = nothing
    if num_sent_tokens:
        spare_prompt_s = _spares_s(
            sent_s,
            each_s,
            max(1.0 - max_step_tokens / max(sum(told["num_prompt_tokens"]), 1), 0.0),
            max(max_step_tokens / num_sent_tokens - 1.0, 0.0) * sum(sent_s),
        )
    return Load(
        _queue_s(each_s, num_prompts, sum(lengths), max_step_tokens),
        costs.decode_step_s(most_rows, most_tokens, longest),
        rows,
        longest,
        [most_rows - num_rows for num_rows in rows],
        [most_tokens - num_tokens for num_tokens in tokens],
        spare_prompt_s,
    )


def spread(num_groups: int, sent: Iterable[Demand]) -> list[tuple[int, Demand]]:
    """Where an engine puts what it was sent that left the DP group to it: all around."""
    return [(i % num_groups, demand) for i, demand in enumerate(sent)]


def _queue_s(each_s: list[float], num_prompts: int, num_tokens: int, max_step_tokens: int) -> float:
    """Seconds of all prompts: groups side by side, as far as a step's tokens feed them."""
    if not num_prompts:
        return 0.0
    longest_s = max(each_s)
    if len(each_s) == 1:
        return longest_s
    num_fed = min(max(max_step_tokens * num_prompts / max(num_tokens, 1), 1.0), len(each_s))
    return max(longest_s, sum(each_s) / num_fed)


def _spares_s(
    sent_s: list[float], each_s: list[float], share_late: float, left_s: float
) -> list[float]:
    """Seconds that each group has room for beside the prompts of the others.

    A snapshot comes before the step that begins what it tells of, as far as the step's tokens go:
    only beside what was sent since can a prompt be computed, and not before what its own group has
    yet to begin.

    Args:
        sent_s: Seconds of what was sent to each.
        each_s: Of all that it has to compute.
        share_late: How much of what was told no step can have begun.
        left_s: Of as many tokens as the step has left, if they take what those take that were sent.
    """
    late_s = [s + share_late * (all_s - s) for s, all_s in zip(sent_s, each_s, strict=True)]
    most_sent_s, most_late_s = max(sent_s), max(late_s)
    return [
        max(min(most_sent_s - its_sent_s, most_late_s - its_late_s, left_s), 0.0)
        for its_sent_s, its_late_s in zip(sent_s, late_s, strict=True)
    ]
