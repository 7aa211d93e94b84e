"""Changes the role of a running replica, prefill to decode or back: `ttserve flip`.

The model stays loaded. The engine takes no new requests and waits until its old role has ended: its
streams migrate where there is room, prompts are computed, and lent KV is fetched. Then it takes
requests in its new role, which ingresses learn from its snapshots. A restarted replica has the role
of its pool.

Concurrent changes do not check against each other: make one after the other.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

import ray
from ray import serve

from cluster.lifecycle.pool_handles import ServeReplicas
from cluster.lifecycle.ray_nodes import check_reach
from cluster.scaling.flip import FlipError, check_flip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.scaling.flip import Replicas
    from replicas.config import Role

_POLL_S = 1.0
_POOLS = frozenset({"prefill", "decode", "both"})


class FlipTimeoutError(FlipError):
    """The replica did not change its role in time; it continues to change it."""


def flip(
    replicas: Replicas, replica: str, role: Role, seconds: float, say: Callable[[str], None]
) -> None:
    """Change a replica's role, and wait until the change is complete.

    Args:
        replicas: Every running replica.
        replica: The replica's name, as in `/debug/slots`.
        role: The new role, prefill or decode.
        seconds: How long to wait.
        say: Called with progress messages.

    Raises:
        FlipError: The change is refused, the replica is gone, or time is up; see the subclass.
    """
    deadline_s = time.monotonic() + seconds
    check_flip(replicas.role_statuses(), replica, role)
    replicas.change_role(replica, role)
    is_announced = False
    while True:
        role_statuses = {
            role_status.replica: role_status for role_status in replicas.role_statuses()
        }
        found = role_statuses.get(replica)
        if found is not None and found.keeps == role:
            say(f"{replica} has role {role}")
            return
        if time.monotonic() >= deadline_s:
            raise FlipTimeoutError(
                f"after {seconds:g} s {replica} still has requests of its old role, or does not "
                "answer; it changes when they have ended; to cancel, flip it to its old role"
            )
        if not is_announced:
            say(f"{replica} takes no new requests and hands over its streams")
            is_announced = True
        time.sleep(_POLL_S)


@contextlib.contextmanager
def serve_replicas(address: str) -> Iterator[ServeReplicas]:
    """Connect to Ray and yield the pool replicas that Serve runs.

    Args:
        address: Address of Ray's control plane.

    Raises:
        ConnectionError: The control plane does not answer.
        FlipError: No application has pools.
    """
    check_reach(address)
    ray.init(address, namespace="serve", log_to_driver=False, logging_level=logging.ERROR)
    try:
        handles = {
            pool: serve.get_deployment_handle(pool, name)
            for name, application in serve.status().applications.items()
            for pool in application.deployments
            if pool in _POOLS
        }
        if not handles:
            raise FlipError("no application with pools is deployed; see `ttserve status`")
        yield ServeReplicas(handles)
    finally:
        ray.shutdown()
