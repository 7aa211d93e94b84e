"""What GET /debug/slots says."""

from cluster.edge.slots import merged_views, slots_view
from cluster.routing.demand import Demand
from cluster.routing.pools import PoolState
from cluster.routing.router import Part
from replicas.messages import EngineSnapshot, GroupSnapshot
from tests.cluster.engines import BLOCK_SIZE, make_member


def test_the_view_has_each_replicas_slots_and_attempts():
    pools = PoolState()
    for name in ("d", "quiet"):
        pools.add(make_member("decode", name))
    groups = [GroupSnapshot(2, [40], 1, 1, 0), GroupSnapshot(4, [64], 0, 0, 0)]
    pools.take_snapshot("d", EngineSnapshot(1, False, 0, 0, 9, groups, "decode"))
    pools.set_moves("quiet", moves=False)
    demand = Demand("secret", [7] * (2 * BLOCK_SIZE))
    parts = [
        Part(demand, "d", "decode", "open", 8.0),
        Part(Demand("older", [7]), "d", "decode", "activated", 3.0),
        Part(demand, "gone", "prefill", "asked", 9.0),
    ]
    view = slots_view(pools, parts, num_queued=2, num_awaiting_admission=5, now_s=10.0)
    assert (view.num_queued, view.num_awaiting_admission) == (2, 5)
    decode, quiet = view.replicas
    assert [(g.empty_slots, g.running, g.reserved) for g in decode.groups] == [(2, 1, 1), (4, 0, 0)]
    assert [(p.mode, p.state, p.age_s, p.num_blocks) for p in decode.attempts] == [
        ("decode", "activated", 7.0, 1),
        ("decode", "open", 2.0, 3),
    ]
    assert decode.attempts[1].request not in {"", "secret"}, "no client can name it to an engine"
    assert (quiet.is_responsive, quiet.role, quiet.groups, quiet.attempts) == (False, "", [], [])
    assert (decode.state, quiet.state) == ("ready", "starting")
    pools.take_snapshot("d", EngineSnapshot(2, True, 0, 0, 9, groups, "decode"))
    view = slots_view(pools, parts, num_queued=0, num_awaiting_admission=0, now_s=10.0)
    assert view.replicas[0].state == "draining"


def test_a_merged_view_has_the_requests_of_all_ingresses_and_the_asked_ones_replicas():
    views = []
    for name, sent_s in (("a", 3.0), ("b", 1.0), ("c", 6.0)):
        pools = PoolState()
        for replica in ("d", f"only-{name}"):
            pools.add(make_member("decode", replica))
        part = Part(Demand(name, [7]), "d", "decode", "open", sent_s)
        views.append(slots_view(pools, [part], num_queued=1, num_awaiting_admission=2, now_s=10.0))
    merged = merged_views(views[0], views[1:])
    assert (merged.num_queued, merged.num_awaiting_admission, merged.num_ingresses) == (3, 6, 3)
    assert [len(replica.attempts) for replica in merged.replicas] == [3, 0, 0, 0]
    assert [attempt.age_s for attempt in merged.replicas[0].attempts] == [9.0, 7.0, 4.0]
    assert merged_views(views[0], []) == views[0]
