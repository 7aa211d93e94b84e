"""The load of an engine from its snapshot, the requests sent since, and its costs."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.demand import Demand
from cluster.routing.load import engine_load, group_columns, spread
from cluster.routing.placement import ANY_GROUP, Placement
from cluster.routing.pools import PoolState
from cluster.routing.step_time import StepCosts
from replicas.messages import EngineSnapshot, GroupSnapshot, StepWork
from tests.cluster.engines import make_member

COSTS = StepCosts(0.5, 0.125, 0.25, 0.0625, 1.0, 0.5, 0.25)
COUNTS = st.integers(0, 20)
GROUPS = st.lists(
    st.builds(
        GroupSnapshot, st.just(9), st.just([9]), *[COUNTS] * 8,
    ),
    min_size=1,
    max_size=3,
)  # fmt: skip
SENT = st.lists(st.tuples(st.integers(-1, 0), st.integers(1, 9)), max_size=4)


def told(groups, seq=0, **steps):
    return EngineSnapshot(seq, False, 0, 0, 0, groups, "both", **steps)


def demand(number, length):
    return Demand(f"r{number}", [7] * length)


@given(GROUPS, SENT, st.booleans())
def test_load_combines_the_engines_work_and_its_groups_spare_room(groups, sent, computes):
    demands = [(group, demand(i, length)) for i, (group, length) in enumerate(sent)]
    load = engine_load(group_columns(groups), demands, COSTS, 10**9, computes_prompts=computes)
    # Requests were sent to the first group, or without a group.
    here = [length for group, length in sent if group == 0]
    rows = [g.num_running + g.num_reserved + g.num_waiting for g in groups]
    rows[0] += len(here)
    tokens = [g.num_context_tokens for g in groups]
    tokens[0] += sum(here)
    longest = max([*here, *(g.max_context_tokens for g in groups)])
    assert load.rows == rows
    assert load.spare_rows == [max(rows) - n for n in rows]
    assert load.spare_context_tokens == [max(tokens) - n for n in tokens]
    assert load.max_context_tokens == longest
    assert load.step_s == pytest.approx(
        0.5 + 0.125 * max(rows) + 0.25 * max(tokens) + 0.0625 * longest
    )
    prompts_s = [
        g.num_prompts + 0.5 * g.num_prompt_tokens + 0.25 * g.num_prompt_pairs for g in groups
    ]
    # Prompts in the snapshot may have begun; those sent since have not. A step has room for all.
    sent_s = computes * sum(1.0 + 0.5 * n + 0.25 * (n * n // 2) for n in here)
    prompts_s[0] += sent_s
    assert load.spare_prompt_s == pytest.approx([0.0, *[sent_s] * (len(groups) - 1)])
    if any(g.num_prompts for g in groups) or (computes and here):
        most_s = max(prompts_s)  # A step has room for the prompts of all groups.
        assert load.queue_s == pytest.approx(most_s)
    else:
        assert load.queue_s == 0.0


def test_groups_queue_when_a_step_has_too_few_tokens_for_all():
    group = GroupSnapshot(9, [9], 0, 0, 1, 0, 0, 4096, 0, 1)
    costs = StepCosts(prompt_token_s=0.001)
    for max_step_tokens, queue_s in ((4096, 8.192), (8192, 4.096)):
        load = engine_load(
            group_columns([group] * 2), [], costs, max_step_tokens, computes_prompts=True
        )
        assert load.queue_s == pytest.approx(queue_s)


def spares_s(told_tokens, sent, max_step_tokens):
    """Return the spare seconds of two groups with these tokens, at 1 ms each."""
    groups = [GroupSnapshot(9, [9], 0, 0, 1, 0, 0, n, 0, 1) for n in told_tokens]
    demands = [(group, demand(i, length)) for i, (group, length) in enumerate(sent)]
    costs = StepCosts(prompt_token_s=0.001)
    told_by_them = group_columns(groups)
    load = engine_load(told_by_them, demands, costs, max_step_tokens, computes_prompts=True)
    return load.spare_prompt_s


def test_a_prompt_fits_beside_prompts_that_no_step_has_started():
    assert spares_s((900, 0), [], 8192) == [0.0, 0.0]
    assert spares_s((900, 0), [(1, 500)], 8192) == pytest.approx([0.5, 0.0])
    assert spares_s((0, 0), [(1, 500), (0, 200)], 8192) == pytest.approx([0.3, 0.0])


def test_a_prompt_cannot_pass_earlier_ones_of_its_group():
    assert spares_s((9000, 0), [(1, 50)], 4096) == [0.0, 0.0], "half of them wait for one more step"
    assert spares_s((0, 9000), [(1, 500)], 4096) == pytest.approx([0.5, 0.0])


def test_a_prompt_has_room_only_for_the_tokens_that_the_step_has_left():
    assert spares_s((0, 0), [(1, 4000)], 4096) == pytest.approx([0.096, 0.0])
    assert spares_s((0, 0), [(1, 5000)], 4096) == [0.0, 0.0]


def test_requests_without_a_group_are_spread_over_groups():
    demands = [demand(i, 4) for i in range(3)]
    assert spread(2, demands) == [(0, demands[0]), (1, demands[1]), (0, demands[2])]


def seconds(view):
    """Return the seconds of a prompt of 10,000 tokens there."""
    return view.prompt_s + 10_000 * view.prompt_token_s + 5 * 10**7 * view.prompt_pair_s


def step(**numbers):
    zero = StepWork(0, 0, 0, 0, 0, 0, 0.0)
    return msgspec.structs.replace(zero, **numbers)


DECODE = step(num_rows=4, num_context_tokens=1000, max_context_tokens=300, device_s=0.25)
PROMPT = step(num_prompts=1, num_prompt_tokens=10_000, num_prompt_pairs=5 * 10**7, device_s=4.0)


def pool(*roles):
    pools = PoolState()
    for role in roles:
        pools.add(make_member(role, role))
    return pools


def tell(pools, name, count, role="both"):
    """Take snapshots with different steps, with noise."""
    for seq in range(count):
        decode = msgspec.structs.replace(DECODE, num_rows=4 + seq % 2)
        prompt = msgspec.structs.replace(PROMPT, num_prompt_pairs=5 * 10**7 + seq % 2)
        snapshot = EngineSnapshot(
            seq, False, 0, 0, 0, [GroupSnapshot(9, [60], 0, 0, 0)], role, 0.25, decode, prompt
        )
        pools.take_snapshot(name, snapshot)


def test_prompt_costs_are_learned_from_a_replicas_steps():
    pools = pool("both")
    tell(pools, "both", 9)
    [view] = pools.decode_views()
    assert view.queue_s == 0.0
    assert seconds(view) == pytest.approx(4.0, rel=0.01)
    pools.hold(demand(0, 10_000), Placement("both", 0))
    [view] = pools.decode_views()
    assert view.queue_s == pytest.approx(4.0, rel=0.01)
    assert (view.num_rows, view.max_context_tokens) == (1, 10_000)
    pools.check_invariants()


def test_a_sent_prompt_leaves_room_beside_it_in_other_groups():
    pools = pool("both", "prefill")
    groups = [GroupSnapshot(9, [60], 0, 0, 0)] * 2
    for seq in range(40):
        prompt = msgspec.structs.replace(PROMPT, num_prompt_pairs=5 * 10**7 + seq % 2)
        pools.take_snapshot("both", told(groups, seq, prompt_step=prompt))
        snapshot = EngineSnapshot(seq, False, 0, 0, 0, groups, "prefill", prompt_step=prompt)
        pools.take_snapshot("prefill", snapshot)
    pools.set_moves("prefill", False)  # so that the other one computes its own
    pools.hold(demand(0, 50), Placement("both", 1))
    beside, behind = pools.decode_views()
    sent_s = beside.prompt_s + 50 * beside.prompt_token_s + 1250 * beside.prompt_pair_s
    assert sent_s > 0.0, "its pool has shown what a prompt takes"
    assert (beside.spare_prompt_s, beside.spare_rows) == (pytest.approx(sent_s), 1)
    assert (behind.spare_prompt_s, behind.spare_rows) == (0.0, 0)
    pools.set_moves("prefill", True)
    pools.hold(demand(1, 100), Placement("prefill", ANY_GROUP))
    [whole] = pools.prefill_views()
    assert whole.spare_prompt_s == 0.0, "which group it will be is the engine's to say"
    assert [view.spare_prompt_s for view in pools.decode_views()] == [0.0, 0.0]


def test_a_step_reported_by_two_snapshots_is_learned_once():
    pools = pool("both")
    for seq in range(9):
        snapshot = told([GroupSnapshot(9, [60], 0, 0, 0)], seq, prompt_step=PROMPT)
        pools.take_snapshot("both", snapshot)
    assert pools.num_steps_learned == 1


def test_a_replica_without_steps_is_assumed_to_be_like_the_others():
    pools = pool("both", "decode")
    tell(pools, "both", 9)
    tell(pools, "decode", 1, "decode")
    assert [seconds(view) for view in pools.decode_views()] == pytest.approx([4.0, 4.0], rel=0.02)


def test_replicas_of_a_pool_are_alike_except_an_unusual_one():
    factors = {"one": 1.1, "two": 0.9, "three": 1.0, "slow": 3.0}
    pools = PoolState()
    for name in factors:
        pools.add(make_member("both", name))
    for seq in range(400):
        for name, factor in factors.items():
            took_s = 4.0 * (factor if seq > 100 or name != "slow" else 1.0)
            pairs = 5 * 10**7 + seq % 2
            prompt = msgspec.structs.replace(PROMPT, num_prompt_pairs=pairs, device_s=took_s)
            group = GroupSnapshot(9, [60], 0, 0, 0)
            pools.take_snapshot(name, told([group], seq, prompt_step=prompt))
    one, two, three, slow = map(seconds, pools.decode_views())
    assert one == two == three == pytest.approx(4.0, rel=0.05)
    assert slow == pytest.approx(12.0, rel=0.1)


def test_prompts_load_the_engines_that_compute_them():
    pools = pool("decode", "prefill")
    tell(pools, "decode", 9, "decode")
    tell(pools, "prefill", 9, "prefill")
    pools.hold(demand(0, 10_000), Placement("decode", 0))
    pools.hold(demand(0, 10_000), Placement("prefill", ANY_GROUP))
    [decode], [prefill] = pools.decode_views(), pools.prefill_views()
    assert (seconds(decode), decode.queue_s) == (0.0, 0.0), "it computes none"
    assert prefill.queue_s == pytest.approx(4.0, rel=0.01)
    pools.remove("prefill")
    [decode] = pools.decode_views()
    assert seconds(decode) == pytest.approx(4.0, rel=0.01), "nobody else does"
    assert decode.queue_s == pytest.approx(4.0, rel=0.01)
