"""Formats the state of a cluster, as Serve and Ray report it: `ttserve status`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import ray
from ray import serve

from cluster.lifecycle.ray_nodes import check_reach

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ray.serve.schema import ServeStatus

    from cluster.lifecycle.ray_nodes import RayNode


def serve_status(address: str) -> ServeStatus:
    """Return Serve's status of its applications.

    Raises:
        ConnectionError: Ray's control plane does not answer.
    """
    check_reach(address)
    ray.init(address, namespace="serve", log_to_driver=False, logging_level=logging.ERROR)
    try:
        return serve.status()
    finally:
        ray.shutdown()


def reason(message: str) -> str:
    """Return the last line of a message of Serve's, which is often a traceback."""
    return message.strip().splitlines()[-1] if message.strip() else ""


def is_whole(status: ServeStatus) -> bool:
    """Return whether there is an application and each one runs with all its replicas."""
    applications = status.applications.values()
    return bool(applications) and all(
        application.status == "RUNNING"
        and all(d.status == "HEALTHY" for d in application.deployments.values())
        for application in applications
    )


def status_text(status: ServeStatus, nodes: list[RayNode], draining: Mapping[str, float]) -> str:
    """Return one line for each application, deployment and host."""
    lines = [] if status.applications else ["no application is deployed"]
    for name, application in status.applications.items():
        lines.append(_line(f"{name}: {application.status.value}", application.message))
        for deployment, overview in sorted(application.deployments.items()):
            states = [f"{n} {state.lower()}" for state, n in overview.replica_states.items() if n]
            counts = f"  {deployment}: {overview.status.value}, {', '.join(states) or 'no replica'}"
            lines.append(_line(counts, overview.message))
    for node in sorted(nodes, key=lambda node: (not node.is_head, node.host)):
        proxy = status.proxies.get(node.node_id)
        words = [f"host {node.host}: HTTP {proxy.value.lower() if proxy else 'none'}"]
        words += ["head"] if node.is_head else []
        if node.node_id in draining:
            words.append(f"leaves within {max(draining[node.node_id], 0):.0f} s")
        lines.append(", ".join(words))
    return "".join(f"{line}\n" for line in lines)


def _line(text: str, message: str) -> str:
    why = reason(message)
    return f"{text}: {why}" if why else text
