"""Lets a replica take another role, prefill for decode or back, while it runs: `ttserve flip`.

The model stays loaded. The engine takes nothing new, its streams go on elsewhere where there is
room, prompts and KV that is lent end there; then it takes requests in its new role, and ingresses
learn of it by its snapshots. A replica that is started again begins with the role of its pool.

Two orders at one moment are not told of each other: give them one after the other.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import ray
from ray import serve

from cluster.lifecycle.ray_nodes import check_reach
from cluster.scaling.flip import FlipError, RoleStatus, check_flip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ray.serve.handle import DeploymentHandle

    from replicas.config import Role

_POLL_S = 1.0
_ANSWER_S = 5.0
_POOLS = frozenset({"prefill", "decode", "both"})


class Replicas(Protocol):
    """Whoever can be told to change a role."""

    def role_statuses(self) -> list[RoleStatus]:
        """What each replica that answers does."""
        ...

    def change_role(self, replica: str, role: Role) -> None:
        """Tell one of them."""
        ...


class FlipTimeoutError(FlipError):
    """It was told, and has not changed in time; it goes on with that."""


def flip(
    replicas: Replicas, replica: str, role: Role, seconds: float, say: Callable[[str], None]
) -> None:
    """Let a replica take a role, and wait until it has.

    Args:
        replicas: All that run.
        replica: Its name, as in `/debug/slots`.
        role: Prefill or decode.
        seconds: How long to wait.
        say: Told how far it is.

    Raises:
        FlipError: It may not, is gone, or has not in time; which kind says why.
    """
    deadline_s = time.monotonic() + seconds
    check_flip(replicas.role_statuses(), replica, role)
    replicas.change_role(replica, role)
    is_told = False
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
                "answer; it changes when they have ended, and flip with its old role takes it back"
            )
        if not is_told:
            say(f"{replica} takes nothing new, and hands over what it has")
            is_told = True
        time.sleep(_POLL_S)


class ServeReplicas:
    """The pool replicas of a Serve application, asked through their deployments' handles.

    Args:
        handles: Of the pools, by name.
    """

    def __init__(self, handles: dict[str, DeploymentHandle[Any]]) -> None:
        self._handles = handles

    def role_statuses(self) -> list[RoleStatus]:
        """See `Replicas`."""
        answers = [
            answer for handle in self._handles.values() for answer in _ask(handle, "role_status")
        ]
        return [msgspec.convert(answer, RoleStatus) for answer in answers]

    def change_role(self, replica: str, role: Role) -> None:
        """See `Replicas`: all are told, each knows its name."""
        for handle in self._handles.values():
            _ask(handle, "change_role", replica, role)


@contextlib.contextmanager
def serve_replicas(address: str) -> Iterator[ServeReplicas]:
    """The pool replicas that Serve runs.

    Args:
        address: Of Ray's control plane.

    Raises:
        ConnectionError: It does not answer.
        FlipError: No application there has pools.
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


def _ask(handle: DeploymentHandle[Any], method: str, *args: str) -> list[Any]:
    """What the replicas of a pool answer; nothing of those that start, die or hang."""
    try:
        answers = handle.broadcast(method, *args).results(
            timeout_s=_ANSWER_S, return_exceptions=True
        )
    except TimeoutError:
        return []
    return [answer for answer in answers if not isinstance(answer, BaseException)]
