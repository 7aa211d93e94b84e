"""What an ingress believes of an engine that changes its role: never more than was said of now."""

from cluster.routing.pools import PoolState
from replicas.messages import EngineSnapshot, GroupSnapshot
from tests.cluster.engines import make_member


def snapshot(seq, role, epoch, *, draining=False):
    group = GroupSnapshot(4, [64], 0, 0, 0)
    return EngineSnapshot(seq, draining, 0, 0, 0, [group], role, hands_over=draining, epoch=epoch)


def sides(pools):
    return len(pools.decode_views()), len(pools.prefill_views())


def known(role):
    pools = PoolState()
    pools.add(make_member(role, "e"))
    pools.take_snapshot("e", snapshot(1, role, 0))
    return pools


def test_an_engine_is_on_no_side_while_it_changes_and_then_on_the_other():
    pools = known("decode")
    seen = [sides(pools)]
    for taken in (snapshot(2, "decode", 0, draining=True), snapshot(3, "prefill", 1)):
        pools.take_snapshot("e", taken)
        pools.check_invariants()
        seen.append(sides(pools))
    assert seen == [(1, 0), (0, 0), (0, 1)]


def test_what_is_said_late_of_the_time_before_does_not_bring_it_back():
    pools = known("decode")
    pools.take_snapshot("e", snapshot(3, "prefill", 1))
    pools.take_snapshot("e", snapshot(2, "decode", 0))
    assert sides(pools) == (0, 1)


def test_a_refusal_shuts_an_engine_out_until_it_has_changed_and_not_after():
    pools = known("decode")
    asked_in = pools.epoch("e")
    pools.drains("e", asked_in)
    assert sides(pools) == (0, 0)
    pools.take_snapshot("e", snapshot(2, "prefill", 1))
    assert sides(pools) == (0, 1)
    pools.drains("e", asked_in)
    assert sides(pools) == (0, 1), "that was said of the time before"
