"""Finds this user's Ray nodes on this host in the process table, without importing Ray.

A command that connects to a cluster needs the cluster's token, and its setting for loopback
addresses. Ray reads both from the environment, the latter when it is imported. Therefore a command
calls `find_node` and applies its variables before it imports Ray.

Nodes of other users are ignored: their processes could name any file as the token, and this user's
command would then send them its content.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cluster.config.front import is_loopback
from cluster.config.ray_auth import VARIABLES
from cluster.lifecycle.processes import process_environ, process_table

if TYPE_CHECKING:
    from collections.abc import Mapping

ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Makes Ray use a loopback address. Passed as an argument, Ray would replace it with the host's own
address. Source: Ray 2.60, `services.get_node_ip_address`."""

ADDRESS = "RAY_ADDRESS"
_RAYLET = re.compile(r"/raylet/raylet .*--node_id=(\w+)")
_GCS = re.compile(r"--gcs-address=([^\s\"]+)")


class NoNodeError(Exception):
    """No Ray node of this user runs here, or more than one does; the message says what to do."""


class LocalNode(NamedTuple):
    """A Ray node of this user.

    Attributes:
        node_id: Its id, in hexadecimal.
        address: Address of its cluster's control plane, host:port.
        variables: Environment variables with which Ray connects to that cluster.
    """

    node_id: str
    address: str
    variables: dict[str, str]


def find_node(environment: Mapping[str, str], proc: Path = Path("/proc")) -> LocalNode:
    """Return the only node here, or the only one of the cluster that RAY_ADDRESS names.

    Args:
        environment: The environment of this process.
        proc: Mount point of the kernel's process file system.

    Raises:
        NoNodeError: There is no such node, or more than one.
    """
    nodes = _nodes(proc)
    if environment.get(ADDRESS):
        nodes = [node for node in nodes if node.address == environment[ADDRESS]] or nodes
    if not nodes:
        raise NoNodeError(
            "no Ray node of this user runs here; run the command on the host, or inside the pod, "
            "where `ttserve serve` or `ray start` ran"
        )
    if len(nodes) > 1:
        addresses = ", ".join(sorted(node.address for node in nodes))
        raise NoNodeError(
            f"{len(nodes)} Ray nodes run here: choose one by setting {ADDRESS} to one of "
            f"{addresses}"
        )
    return nodes[0]


def _nodes(proc: Path) -> list[LocalNode]:
    nodes = []
    for process_id, process in process_table(proc).items():
        raylet, gcs = _RAYLET.search(process.command), _GCS.search(process.command)
        if raylet is None or gcs is None:
            continue
        # The process may have ended since it was listed.
        with contextlib.suppress(OSError):
            if (proc / str(process_id)).stat().st_uid == os.geteuid():
                started_with = process_environ(process_id, proc)
                variables = {k: v for k, v in started_with.items() if k in VARIABLES}
                if is_loopback(gcs[1].rpartition(":")[0]):
                    variables |= ON_LOOPBACK
                nodes.append(LocalNode(raylet[1], gcs[1], variables))
    return nodes
