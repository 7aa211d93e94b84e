"""The pool replicas of a Serve application, reached through the handles of their deployments."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.scaling.flip import RoleStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ray.serve.handle import DeploymentHandle

    from replicas.config import Role

ANSWER_S = 5.0
"""Longest time for the answers of all replicas to one question."""


class ServeReplicas:
    """Implements `cluster.scaling.flip.Replicas`.

    Args:
        handles: Handle of each pool's deployment, by the pool's name.
    """

    def __init__(self, handles: Mapping[str, DeploymentHandle[Any]]) -> None:
        self._handles = dict(handles)

    def role_statuses(self) -> list[RoleStatus]:
        """See `Replicas`."""
        return [msgspec.convert(answer, RoleStatus) for answer in self._ask("role_status")]

    def change_role(self, replica: str, role: Role) -> None:
        """See `Replicas`. Asks every replica; only the named one changes."""
        self._ask("change_role", replica, role)

    def set_draining(self, replica: str, is_draining: bool) -> None:
        """See `Replicas`. Asks every replica; only the named one changes."""
        self._ask("set_draining", replica, is_draining)

    def _ask(self, method: str, *args: object) -> list[Any]:
        """Return the answers of all replicas, without those that start, die or hang."""

        def ask(handle: DeploymentHandle[Any]) -> list[Any]:
            try:
                return handle.broadcast(method, *args).results(
                    timeout_s=ANSWER_S, return_exceptions=True
                )
            except (RayServeException, RayError, TimeoutError):
                return []

        # At once: a replica that hangs must not use up the time of another pool.
        with ThreadPoolExecutor(len(self._handles)) as threads:
            found = [
                answer for answers in threads.map(ask, self._handles.values()) for answer in answers
            ]
        return [answer for answer in found if not isinstance(answer, BaseException)]
