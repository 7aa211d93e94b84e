"""Reads Ray's record of its nodes and their actors, and drains nodes, without being a Ray driver.

A driver ends with the raylet that it is connected to, and a drained node may end its raylet at any
time. Ray's public functions all need a driver, so this module uses internal ones.
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray
from ray._private.state import GlobalState
from ray._raylet import GcsClient, GcsClientOptions  # type: ignore[attr-defined]
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from collections.abc import Iterator

_SERVE_PREFIX = "SERVE_"
_REACH_S = 5.0
_HEAD_RESOURCE = "node:__internal_head__"


class ControlLostError(Exception):
    """Ray's control plane does not answer, or refuses the request."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node that is alive.

    Attributes:
        node_id: Its id, in hexadecimal.
        host: Its address.
        is_head: Whether it runs the control plane.
    """

    node_id: str
    host: str
    is_head: bool


class RayNodes:
    """The nodes of one Ray cluster.

    Each method connects again, because a restarted head may have another address.

    Args:
        address: Address of the control plane, host:port.

    Attributes:
        address: The address of the control plane.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    def alive(self) -> list[RayNode]:
        """Return the nodes that are alive; raise ControlLostError if Ray does not answer."""
        with _asking():
            return [
                RayNode(
                    node["NodeID"], node["NodeManagerAddress"], _HEAD_RESOURCE in node["Resources"]
                )
                for node in self._state().node_table()  # type: ignore[no-untyped-call]
                if node["Alive"]
            ]

    def draining(self) -> dict[str, float]:
        """Return the seconds left to each draining node, by id; raises ControlLostError."""
        with _asking():
            deadlines = GcsClient(address=self.address).get_draining_nodes()
        return {node_id: ms / 1000 - time.time() for node_id, ms in deadlines.items()}

    def drain(self, node_id: str, seconds: float) -> None:
        """Drain a node: Ray schedules nothing new on it and announces its end in `seconds` seconds.

        Raises:
            ControlLostError: Ray does not answer, or refuses.
        """
        deadline_ms = int((time.time() + seconds) * 1000)
        # A busy node would refuse the other reason, which is that it is idle.
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        with _asking():
            is_taken, why_not = GcsClient(address=self.address).drain_node(
                node_id, reason, "ttserve leave", deadline_ms
            )
        if not is_taken:
            raise ControlLostError(why_not)

    def serving_on(self, node_id: str) -> list[str]:
        """Return the names of Serve's actors on a node, replicas and proxy.

        Raises:
            ControlLostError: Ray does not answer.
        """
        with _asking():
            actors = self._state().actor_table(None, actor_state_name="ALIVE")
        return sorted(
            actor["Name"]
            for actor in actors.values()
            if actor["Address"]["NodeID"] == node_id and actor["Name"].startswith(_SERVE_PREFIX)
        )

    def _state(self) -> GlobalState:
        state = GlobalState()  # type: ignore[no-untyped-call]
        state._initialize_global_state(  # noqa: SLF001 - as the module says
            GcsClientOptions.create(
                self.address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
            )
        )
        return state


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """Convert the various errors of Ray's functions to ControlLostError."""
    try:
        yield
    except (ray.exceptions.RayError, RuntimeError, ValueError) as error:
        raise ControlLostError(str(error)) from error


def check_reach(address: str) -> None:
    """Check that a control plane can be reached; Ray itself would try for minutes.

    Raises:
        ConnectionError: The address refuses connections or does not answer.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise ConnectionError(
            f"cannot reach Ray at {address}: {error}; is its cluster still running?"
        ) from error
