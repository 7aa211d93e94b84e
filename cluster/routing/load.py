"""The work that an engine has before a new request, and its spare capacity. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from replicas.messages import GroupSnapshot, num_pairs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.routing.demand import Demand
    from cluster.routing.step_time import StepCosts


Columns = dict[str, tuple[Any, ...]]
"""For each field of `GroupSnapshot` its values in all DP groups of an engine, in their order."""


class Load(NamedTuple):
    """The load of an engine, as a new request for one of its DP groups finds it.

    DP groups step together: a request makes steps longer only where its group becomes the fullest.

    Attributes:
        queue_s: Seconds of the prompts that are before a new one.
        step_s: Seconds of the next decode step.
        rows: Sequences of each group that hold a slot or are about to get one.
        max_context_tokens: Longest context of any group.
        spare_rows: Rows that each group has less than the fullest one.
        spare_context_tokens: KV tokens that each group has less than the one with most.
        spare_prompt_s: Seconds of prompts that each group can compute in the next step, beside
            those of the group with most, without making it longer.
    """

    queue_s: float
    step_s: float
    rows: list[int]
    max_context_tokens: int
    spare_rows: list[int]
    spare_context_tokens: list[int]
    spare_prompt_s: list[float]


def group_columns(groups: Iterable[GroupSnapshot]) -> Columns:
    """Return the fields of DP groups as columns.

    It is one pass in C, because an ingress does it for every decision.
    """
    rows = map(msgspec.structs.astuple, groups)
    return dict(zip(GroupSnapshot.__struct_fields__, zip(*rows, strict=True), strict=True))


def engine_load(
    columns: Columns,
    sent: Iterable[tuple[int, Demand]],
    costs: StepCosts,
    max_step_tokens: int,
    *,
    computes_prompts: bool,
) -> Load:
    """Return the load of an engine.

    Args:
        columns: Last snapshot of its DP groups, as columns.
        sent: Requests sent since, with the DP group; those without one are left out.
        costs: Costs of the parts of its steps.
        max_step_tokens: Tokens that a step may compute, over all groups.
        computes_prompts: Whether it computes the prompts that it is sent.
    """
    held = zip(columns["num_running"], columns["num_reserved"], columns["num_waiting"], strict=True)
    rows = [running + reserved + waiting for running, reserved, waiting in held]
    tokens = list(columns["num_context_tokens"])
    longest = max(columns["max_context_tokens"])
    counts, lengths = list(columns["num_prompts"]), list(columns["num_prompt_tokens"])
    pairs = list(columns["num_prompt_pairs"])
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
            max(1.0 - max_step_tokens / max(sum(columns["num_prompt_tokens"]), 1), 0.0),
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
    """Assign requests that were sent without a DP group to groups in turn, as an engine does."""
    return [(i % num_groups, demand) for i, demand in enumerate(sent)]


def _queue_s(each_s: list[float], num_prompts: int, num_tokens: int, max_step_tokens: int) -> float:
    """Return the seconds of all prompts, groups side by side as far as a step's tokens allow."""
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
    """Return the seconds that each group can compute beside the prompts of the others.

    A snapshot is taken before the step that starts the prompts it counts, as far as the step's
    tokens go. So a new prompt can be computed only beside those sent since, and not before the rest
    of its own group's.

    Args:
        sent_s: Seconds of the prompts sent to each group since the snapshot.
        each_s: Seconds of all prompts of each group.
        share_late: Share of the snapshot's prompts that its step cannot have started.
        left_s: Seconds of as many tokens as the step has left, at the cost of those sent since.
    """
    late_s = [s + share_late * (all_s - s) for s, all_s in zip(sent_s, each_s, strict=True)]
    most_sent_s, most_late_s = max(sent_s), max(late_s)
    return [
        max(min(most_sent_s - its_sent_s, most_late_s - its_late_s, left_s), 0.0)
        for its_sent_s, its_late_s in zip(sent_s, late_s, strict=True)
    ]
