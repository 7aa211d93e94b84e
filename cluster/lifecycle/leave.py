"""Removes the Ray node of this host or pod from its cluster without failing requests.

`leave` drains the node in Ray with a deadline, then waits until no actor of Ray Serve is left here.
Ray Serve reacts to the drain:

- It starts a successor elsewhere for each replica of this node. The replica drains once its
  successor runs, or when only its drain time is left until the deadline. Without room for
  successors, the other replicas of the pool take over.
- A draining replica takes no new requests and ends after its last one. Streams that would outlast
  the drain migrate.
- HAProxy of this node answers /health with 503 and continues to serve. Load balancers send it no
  new requests, and it passes those it has to any ingress. Serve ends it after its last stream, 30 s
  after the start at the earliest.

Limit: if this node has the only replica of a pool and there is no room for a successor, the pool
serves nothing until a new host joins.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cluster.lifecycle.ray_nodes import ControlLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.lifecycle.ray_nodes import RayNodes

_POLL_S = 1.0


class LeaveError(Exception):
    """This node cannot leave, or did not leave in time; the message has the reason."""


def leave(nodes: RayNodes, node_id: str, seconds: float, say: Callable[[str], None]) -> None:
    """Drain a Ray node and wait until nothing of Ray Serve is left on it.

    Args:
        nodes: The nodes of the cluster.
        node_id: The node's id, in hexadecimal.
        seconds: Deadline of the drain. Successors have this time, less the replicas' drain time,
            to start.
        say: Called with progress messages.

    Raises:
        LeaveError: The node is the head, or actors of Serve still run on it at the deadline.
    """
    deadline_s = time.monotonic() + seconds
    last, is_draining = "", False
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            if not is_draining:
                _drain(nodes, node_id, left_s)
                is_draining = True
            here = nodes.serving_on(node_id)
            what = f"still here: {', '.join(here)}"
        except ControlLostError as error:
            # Streams continue without the control plane, and it may be back in time.
            here, what = None, f"the head does not answer: {error}"
        if here == []:
            say("no actor of Ray Serve is left on this node")
            return
        if left_s <= 0:
            raise LeaveError(f"after {seconds:g} s {what}")
        if what != last:
            say(what)
            last = what
        time.sleep(_POLL_S)


def _drain(nodes: RayNodes, node_id: str, seconds: float) -> None:
    if any(node.is_head for node in nodes.alive() if node.node_id == node_id):
        raise LeaveError("the head node cannot leave: it runs the control planes of Ray and Serve")
    nodes.drain(node_id, seconds)
