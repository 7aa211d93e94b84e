"""Ray's own record of its nodes and of what runs on them, asked by one that is none of its drivers.

A driver ends with the raylet that it is connected to, and a node that is drained may end its raylet
at any moment. No public function of Ray's does without.
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
    """Ray's control plane does not answer now, or refuses."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node that is alive.

    Attributes:
        node_id: In hexadecimal.
        host: Its address.
        is_head: Whether the control plane runs there.
    """

    node_id: str
    host: str
    is_head: bool


class RayNodes:
    """The nodes of one Ray cluster.

    Every question makes a connection of its own: the head may come back at another address.

    Args:
        address: Of the control plane, host:port.

    Attributes:
        address: The same.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    def alive(self) -> list[RayNode]:
        """The nodes that are alive; raises ControlLostError."""
        with _asking():
            return [
                RayNode(
                    node["NodeID"], node["NodeManagerAddress"], _HEAD_RESOURCE in node["Resources"]
                )
                for node in self._state().node_table()  # type: ignore[no-untyped-call]
                if node["Alive"]
            ]

    def draining(self) -> dict[str, float]:
        """Seconds that each node which drains has left, by its id; raises ControlLostError."""
        with _asking():
            deadlines = GcsClient(address=self.address).get_draining_nodes()
        return {node_id: ms / 1000 - time.time() for node_id, ms in deadlines.items()}

    def drain(self, node_id: str, seconds: float) -> None:
        """Let a node take nothing new, and tell Ray Serve that it is gone in so many seconds.

        Raises:
            ControlLostError: Ray did not take it.
        """
        deadline_ms = int((time.time() + seconds) * 1000)
        # The other reason, that a node is idle, is refused by one that is not.
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        with _asking():
            is_taken, why_not = GcsClient(address=self.address).drain_node(
                node_id, reason, "ttserve leave", deadline_ms
            )
        if not is_taken:
            raise ControlLostError(why_not)

    def serving_on(self, node_id: str) -> list[str]:
        """Names of Ray Serve's actors on a node: replicas and proxy; raises ControlLostError."""
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
    """Whatever Ray says instead of an answer, as one error."""
    try:
        yield
    except (ray.exceptions.RayError, RuntimeError, ValueError) as error:
        raise ControlLostError(str(error)) from error


def check_reach(address: str) -> None:
    """Look whether a control plane can be reached: as its driver, Ray would try for minutes.

    Raises:
        ConnectionError: It cannot.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise ConnectionError(f"{address}: {error}; does its cluster still run?") from error
