"""An ingress's view of an engine that changes its role: only current reports count."""

from cluster.routing.cost import make_policies
from cluster.routing.demand import Demand
from cluster.routing.leg import Legs
from cluster.routing.metrics import RouterMetrics
from cluster.routing.placement import ANY_GROUP, Placement
from cluster.routing.pools import PoolState
from cluster.routing.slot_queue import SlotQueue
from cluster.routing.stalls import Stalls
from replicas.messages import AddRequest, EngineRequest, EngineSnapshot, GroupSnapshot
from replicas.streams import StreamTable
from tests.cluster.engines import make_member, sampling


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


def test_an_engine_is_on_no_side_while_its_role_changes():
    pools = known("decode")
    seen = [sides(pools)]
    for taken in (snapshot(2, "decode", 0, draining=True), snapshot(3, "prefill", 1)):
        pools.take_snapshot("e", taken)
        pools.check_invariants()
        seen.append(sides(pools))
    assert seen == [(1, 0), (0, 0), (0, 1)]


def test_a_late_snapshot_of_the_old_role_is_ignored():
    pools = known("decode")
    pools.take_snapshot("e", snapshot(3, "prefill", 1))
    pools.take_snapshot("e", snapshot(2, "decode", 0))
    assert sides(pools) == (0, 1)


def test_a_refusal_excludes_an_engine_until_its_role_has_changed():
    pools = known("decode")
    asked_in = pools.epoch("e")
    pools.drains("e", asked_in)
    assert sides(pools) == (0, 0)
    pools.take_snapshot("e", snapshot(2, "prefill", 1))
    assert sides(pools) == (0, 1)
    pools.drains("e", asked_in)
    assert sides(pools) == (0, 1), "that was said of the time before"


def test_a_refusal_of_an_older_epoch_excludes_only_until_the_next_snapshot():
    """The refusal has the name of a request that was sent again, and looks like its answer."""
    pools = known("prefill")
    pools.take_snapshot("e", snapshot(2, "decode", 1))
    pools.drains("e", pools.epoch("e"))
    assert sides(pools) == (0, 0)
    pools.take_snapshot("e", snapshot(2, "decode", 1))
    assert sides(pools) == (0, 0), "that was known already"
    pools.take_snapshot("e", snapshot(3, "decode", 1))
    assert sides(pools) == (1, 0)
    pools.check_invariants()


class Connection:
    """A client of one engine that never answers."""

    def __init__(self, description):
        self.sent = []
        self.table = StreamTable(description, self.sent.append, lambda *_: None, lambda *_: None)

    def open_stream(self, _incarnation, request_id, message, inbox=None):
        return self.table.open(request_id, message, inbox)


async def test_a_decode_hold_outlives_the_prefill_leg_on_the_same_engine():
    pools = known("prefill")
    connection = Connection(pools.member("e").description)
    request = EngineRequest("r", [1, 2, 3], sampling(4))
    demand = Demand.of(request, 0.0)
    queue = SlotQueue(pools, make_policies("least_delay").decode, 4, 10.0)
    legs = Legs(connection, pools, RouterMetrics("tiny"), Stalls(queue), demand, 1)
    whole = Placement("e", ANY_GROUP)
    pools.hold(demand, whole)
    legs.ask_to_prefill(whole, AddRequest(request, "prefill", ANY_GROUP, b""), None).answered()
    pools.take_snapshot("e", snapshot(2, "decode", 1))
    group = Placement("e", 0)
    pools.hold(demand, group)
    legs.ask_heir(group, AddRequest(request, "decode", 0))
    assert pools.holds() == [("e", "r")]
    assert pools.decode_views()[0].num_empty_slots == 3
    legs.drop_heir()
    assert not pools.holds()
