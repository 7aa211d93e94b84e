"""A pool's replica whose engine is `benchmarks.timed_engine`, for `benchmarks.added_latency`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.lifecycle.deployments import PoolReplica
from replicas import launch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replicas.config import Role


class TimedReplica(PoolReplica):
    """See the module docstring. Ray imports it, by this name, where the replica is to run."""

    def __init__(self, args: Mapping[str, Any], role: Role) -> None:
        vars(launch).update(_ENGINE="benchmarks.timed_engine")
        super().__init__(args, role)
