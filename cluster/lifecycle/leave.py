"""Takes the Ray node of this host, or pod, out of its cluster so that no request fails.

Ray's drain says that the node goes at a deadline; Ray Serve then does what there is to do:

- It starts replicas elsewhere for those that are here. Each of these goes once its successor runs,
  or once the deadline is no further away than it may take to drain: where there is no room for
  successors the other replicas do its work.
- A replica that goes takes nothing new, and ends when its requests have; those that would outlive
  its drain go on elsewhere.
- HAProxy here answers /health with 503 and serves on: load balancers send nothing more, and what
  they have sent goes to any ingress. Serve ends it when its last stream has ended, 30 s after the
  beginning at the earliest.

So `leave` says the deadline and waits until nothing of Serve is left here. What it cannot mend:
with the only replica of a pool, and room for no other, nobody serves before the next host comes.
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
    """This node cannot leave, or did not in time; the message says why."""


def leave(nodes: RayNodes, node_id: str, seconds: float, say: Callable[[str], None]) -> None:
    """Drain a Ray node and wait until nothing of Ray Serve is left on it.

    Args:
        nodes: Of its cluster.
        node_id: Which node, in hexadecimal.
        seconds: When it is gone at the latest. What this has beyond the time that replicas may
            take to drain is left for their successors to start in.
        say: Told how far it is.

    Raises:
        LeaveError: It is the head, or something still runs here after all that time.
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
            # Streams go on without the control plane, and it may be back in time.
            here, what = None, f"the head does not answer: {error}"
        if here == []:
            say("nothing of Ray Serve runs here any more")
            return
        if left_s <= 0:
            raise LeaveError(f"after {seconds:g} s {what}")
        if what != last:
            say(what)
            last = what
        time.sleep(_POLL_S)


def _drain(nodes: RayNodes, node_id: str, seconds: float) -> None:
    if any(node.is_head for node in nodes.alive() if node.node_id == node_id):
        raise LeaveError("the head cannot leave: Ray and Serve are controlled from there")
    nodes.drain(node_id, seconds)
