"""When a node has left: what Ray says of it, and how long is waited for that."""

import itertools

import pytest

from cluster.lifecycle import leave as leave_module
from cluster.lifecycle.leave import LeaveError, leave
from cluster.lifecycle.ray_nodes import ControlLostError, RayNode

NODE = "aa"


class Nodes:
    """A cluster whose control plane answers what it is told, the last answer for ever."""

    def __init__(self, *answers, is_head=False):
        self.drained = []
        self._is_head = is_head
        self._answers = itertools.chain(answers, itertools.repeat(answers[-1]))

    def alive(self):
        return [RayNode("bb", "192.0.2.1", True), RayNode(NODE, "192.0.2.2", self._is_head)]

    def drain(self, node_id, seconds):
        self._raise(self._next())
        self.drained.append((node_id, seconds))

    def serving_on(self, node_id):
        assert node_id == NODE
        return self._raise(self._next())

    def _next(self):
        return next(self._answers)

    def _raise(self, answer):
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def time_of_sleeps(monkeypatch):
    """Time that passes only in sleeps."""
    now_s = [1000.0]
    monkeypatch.setattr(leave_module.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(leave_module.time, "sleep", lambda s: now_s.__setitem__(0, now_s[0] + s))


REPLICA = "SERVE_REPLICA::ttserve#decode#x"


def test_leave_waits_until_no_actor_of_serve_is_left():
    nodes, said = Nodes(None, [REPLICA, "P"], [REPLICA, "P"], ["P"], []), []
    leave(nodes, NODE, 60, said.append)
    assert nodes.drained == [(NODE, 60)]
    assert said == [
        f"still here: {REPLICA}, P", "still here: P", "no actor of Ray Serve is left on this node",
    ]  # fmt: skip


def test_a_restarted_head_gets_the_remaining_time():
    lost = ControlLostError("gone")
    nodes, said = Nodes(lost, lost, None, lost, []), []
    leave(nodes, NODE, 60, said.append)
    assert nodes.drained == [(NODE, 58)]
    assert said[0] == "the head does not answer: gone"


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([None, [REPLICA]], f"after 5 s still here: {REPLICA}"),
        ([ControlLostError("gone")], "after 5 s the head does not answer: gone"),
    ],
)
def test_actors_left_at_the_deadline_are_named(answers, reason):
    with pytest.raises(LeaveError, match=reason):
        leave(Nodes(*answers), NODE, 5, lambda _: None)


def test_the_head_cannot_leave():
    nodes = Nodes([], is_head=True)
    with pytest.raises(LeaveError, match="the head node cannot leave"):
        leave(nodes, NODE, 5, lambda _: None)
    assert nodes.drained == []
