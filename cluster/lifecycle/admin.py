"""The admin server: a Serve deployment with a port of its own, on the head node.

Serve carries no request of it: its HTTP server is uvicorn, in a thread with its own event loop. So
it answers while HAProxy and ingresses are replaced, and no client of theirs can use up its
connections. Serve watches its replica, and starts another one if it ends. It keeps no state that a
successor would need.
"""

from __future__ import annotations

import asyncio
import errno
import importlib.metadata
import ipaddress
import logging
import socket
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import uvicorn
from ray import serve

from cluster.admin import ClusterAdmin
from cluster.config.front import is_loopback
from cluster.config.resolve import resolve
from cluster.edge.admin.app import create_admin_app
from cluster.edge.api_keys import shared_keys
from cluster.lifecycle.deployments import (
    PoolDirectory,
    bounded_deployment,
    suppress_logging_errors,
)
from cluster.lifecycle.pool_handles import ServeReplicas
from cluster.lifecycle.replica_port import guard_replica_port
from cluster.lifecycle.secret import deployment_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ray.serve import Deployment
    from ray.serve.handle import DeploymentHandle

    from cluster.config.schema import AdminConfig
    from cluster.routing.fleet import Discovery
    from cluster.scaling.flip import Replicas
    from kv_transfer.keys import KeyRing

logger = logging.getLogger(__name__)

ADMIN = "admin"
"""Name of the admin deployment."""
BIND_S = 30.0
"""Time for the port to become free: the predecessor of a replica may still have it."""
_BIND_POLL_S = 0.5
_MAX_CONNECTIONS = 64
_MAX_HEAD_BYTES = 16 * 2**10
_IDLE_S = 10
_STOP_S = 5
_HEAD_NODE = {"node:__internal_head__": 0.001}
"""Ray's own resource of the node with its control plane: the admin server's address is that of the
head, wherever ingresses and engines are."""


class AdminReplica:
    """The replica of the admin deployment.

    Args:
        args: The application's `args`.
        **pools: Handle of each pool's deployment, by role.

    Raises:
        ClusterConfigError: The file of secrets, or that of API keys, cannot be used.
        UnsafeFileError: Another user of this host could have Ray's token.
        OSError: The port is taken, or the certificate cannot be used.
    """

    def __init__(self, args: Mapping[str, Any], **pools: DeploymentHandle[Any]) -> None:
        suppress_logging_errors()
        guard_replica_port()
        config = resolve(args)
        assert config.admin is not None
        keys = deployment_keys(config, serve.get_replica_context().app_name)
        self._server = AdminServer(config.admin, keys, ServeReplicas(pools), PoolDirectory(pools))

    async def check_health(self) -> None:
        """Tell Serve whether the server runs.

        Raises:
            RuntimeError: It has ended.
        """
        if not self._server.is_running:
            raise RuntimeError("the admin server has ended; the log has the reason")

    async def __del__(self) -> None:
        """End the server. Serve awaits this before it ends the replica."""
        server = getattr(self, "_server", None)
        if server is not None:
            await asyncio.to_thread(server.stop)


class AdminServer:
    """The HTTP server of the admin routes, in a thread of its own.

    Args:
        config: Its address, keys and certificate.
        keys: Secrets that authenticate connections to engines.
        replicas: Reaches the actors of the replicas.
        discovery: Finds the replicas.

    Raises:
        ClusterConfigError: The file of API keys cannot be used.
        OSError: The port is taken, or the certificate cannot be used.
    """

    def __init__(
        self, config: AdminConfig, keys: KeyRing, replicas: Replicas, discovery: Discovery
    ) -> None:
        self._config = config
        self._keys = keys
        self._replicas = replicas
        self._discovery = discovery
        self._api_keys = None if config.api_keys is None else shared_keys(config.api_keys)
        self._started: Future[uvicorn.Server] = Future()
        self._socket = _listen(config.host, config.port)
        self._thread = threading.Thread(target=self._run, name="admin-server", daemon=True)
        self._thread.start()
        self._uvicorn = self._started.result()

    @property
    def is_running(self) -> bool:
        """Whether the server's thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the server after the requests that it has, for at most `_STOP_S`. Idempotent."""
        self._uvicorn.should_exit = True
        self._thread.join(2 * _STOP_S)

    def _run(self) -> None:
        with self._socket:
            try:
                asyncio.run(self._serve())
            except Exception as error:
                if not self._started.done():
                    self._started.set_exception(error)
                    return
                logger.exception("the admin server has failed")

    async def _serve(self) -> None:
        cluster = ClusterAdmin(self._keys, self._replicas)
        following = asyncio.create_task(cluster.follow(self._discovery))
        try:
            server = self._make_uvicorn(cluster)
            self._started.set_result(server)
            await server.serve(sockets=[self._socket])
        finally:
            following.cancel()
            await cluster.close()

    def _make_uvicorn(self, cluster: ClusterAdmin) -> uvicorn.Server:
        config = uvicorn.Config(
            create_admin_app(
                cluster,
                api_keys=self._api_keys,
                is_loopback=is_loopback(self._config.host),
                version=importlib.metadata.version("ttserve"),
            ),
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=_MAX_CONNECTIONS,
            h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=_STOP_S,
            ssl_certfile=self._config.certificate,
            ssl_keyfile=self._config.certificate,
        )
        config.load()
        return uvicorn.Server(config)


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; wait for up to `BIND_S` until the port is free.

    Raises:
        OSError: The port is taken, or this host does not have the address.
    """
    deadline_s = time.monotonic() + BIND_S
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=_MAX_CONNECTIONS)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline_s:
                raise OSError(
                    error.errno,
                    f"args.admin: the server cannot listen on {host}:{port}: {error.strerror}",
                ) from error
        time.sleep(_BIND_POLL_S)


def admin_deployment() -> Deployment:
    """Return the deployment of the admin server; calls are few, so it reserves no CPU."""
    return bounded_deployment(
        name=ADMIN,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "resources": _HEAD_NODE},
        graceful_shutdown_timeout_s=3.0 * _STOP_S,
    )(AdminReplica)
