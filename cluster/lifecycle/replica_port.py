"""Guards the port that Ray Serve opens for each replica.

Each replica has a gRPC server that unpickles what it receives. Ray's token guards it, and Serve
binds it to every interface: no setting changes that (Ray 2.60, `serve/_private/replica.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray.util
from ray.serve._private import replica

from cluster.config.environment import process_environment
from cluster.config.front import is_loopback
from cluster.lifecycle.ray_token import require_private_token

if TYPE_CHECKING:
    from collections.abc import Callable

_EVERY_INTERFACE = "[::]:0"


def guard_replica_port() -> None:
    """Refuse a token that others could read, and bind this replica's gRPC server to loopback.

    Called in a replica's constructor, before Serve starts the server. If the node's address is not
    a loopback one, replicas on other hosts must connect, so the server keeps Serve's address.

    Raises:
        UnsafeFileError: Another user could read or replace the token.
        AttributeError: Serve has no function of this name any more, so the replica must not start.
    """
    require_private_token(process_environment())
    host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    if is_loopback(host):
        _bind_to(host, replica.add_port_to_grpc_server)  # type: ignore[attr-defined]


def _bind_to(host: str, bind: Callable[[object, str], int]) -> None:
    def bind_to_host(server: object, address: str) -> int:
        if address != _EVERY_INTERFACE:
            raise RuntimeError(f"Serve binds a replica's port to {address}, not {_EVERY_INTERFACE}")
        return bind(server, f"{host}:0")

    replica.add_port_to_grpc_server = bind_to_host  # type: ignore[attr-defined]
