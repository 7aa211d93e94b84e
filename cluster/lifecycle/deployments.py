"""The Serve deployments: replicas of a pool, each with its engine process, and the ingress.

Serve carries the control plane only: life cycle, health, drain and discovery. Requests and tokens
go from the ingress to the engines over ZMQ. A `PoolReplica` owns one engine process. When the
engine dies, the replica ends at once and Serve starts a new one. Therefore a replica's description
never changes, except for its role, which ingresses learn from the engine's snapshots.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import ray.util
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, GangSchedulingConfig
from ray.serve.exceptions import RayServeException

from cluster.config.environment import process_environment
from cluster.config.resolve import replica_engine, resolve
from cluster.config.schema import NODE_HOST
from cluster.edge.api_keys import shared_keys
from cluster.edge.client_guard import INGRESS_VARIABLE
from cluster.edge.routes import create_app
from cluster.ingress import Ingress
from cluster.lifecycle import haproxy
from cluster.lifecycle.autoscaling import ingress_report, replica_report
from cluster.lifecycle.gangs import find_gang
from cluster.lifecycle.replica_end import call_at_end
from cluster.lifecycle.replica_port import guard_replica_port
from cluster.lifecycle.secret import deployment_keys
from cluster.routing.fleet import DESCRIBE_TIMEOUT_S
from cluster.routing.pools import Member
from cluster.scaling.flip import RoleStatus
from replicas.launch import start_engine, stop_timeout_s
from replicas.life import Life, LifeState
from replicas.messages import EngineDescription
from replicas.tt.boards import RESOURCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from ray.serve import Deployment
    from ray.serve.handle import DeploymentHandle
    from ray.serve.schema import ServeStatus
    from starlette.applications import Starlette

    from cluster.config.resolve import ClusterConfig
    from cluster.config.schema import PoolConfig
    from replicas.config import EngineConfig, Role
    from replicas.gang.hub import GangHub
    from replicas.launch import EngineHandle

logger = logging.getLogger(__name__)

INGRESS = "ingress"
"""Name of the ingress deployment; a pool's deployment is named after its role."""

bounded_deployment = partial(
    serve.deployment,
    health_check_period_s=1.0,
    health_check_timeout_s=10.0,
    graceful_shutdown_wait_loop_s=0.2,
    # A wrong configuration fails each time: two tries are enough to rule out an accident. Serve's
    # default is twenty.
    max_constructor_retry_count=2,
)
PROBE_S = 10.0
"""Seconds between probes: steps that an idle engine takes so that a hang is noticed."""
_INGRESS_VARIABLES = {
    # By default Serve runs the ingress on a second thread's event loop and passes every chunk of
    # every stream to the loop that sends it: a third of an ingress's cost per token. The middleware
    # in `cluster.edge.client_guard` relies on this setting too.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    haproxy.MIDDLEWARES_VARIABLE: haproxy.INGRESS_MIDDLEWARES,
}
"""Variables that Ray Serve reads when the process of an ingress starts."""
_NO_LIMIT_OF_SERVE = 2**20
"""More requests than an ingress can have connections, so that Serve never refuses one. The limit is
the application's (`cluster.edge.gate`): Serve's applies to health checks too, and refuses in plain
text."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class PoolReplica:
    """A replica of a pool: starts, watches, describes and drains one engine.

    Args:
        args: The application's `args`.
        role: The pool that it belongs to.

    Raises:
        EngineStartError: The engine could not start; carries its reason.
        UnsafeFileError: Another user of this host could have Ray's token.
        ClusterConfigError: The file of secrets cannot be used.
    """

    _engine: EngineHandle
    # The hub of its gang, if this replica is rank 0.
    _hub: GangHub | None = None

    def __init__(self, args: Mapping[str, Any], role: Role) -> None:
        # Serve also calls `__del__` after a failed constructor, when there is no engine to stop.
        self._life = Life()
        suppress_logging_errors()
        guard_replica_port()
        began_s = time.monotonic()
        config = resolve(args)
        self._role: Role = role
        self._drain_timeout_s = config.pools[role].drain_timeout_s
        self._stage = ""
        self._probed_s = began_s
        host, environment = config.data_host, process_environment()
        if host == NODE_HOST:
            host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        context = serve.get_replica_context()
        rank = context.rank.rank if config.fault_plan.faults else 0
        keys = deployment_keys(config, context.app_name)
        with find_gang(context.gang_context, keys, host) as (gang, self._hub):
            engine = replica_engine(config, role, rank, host=host, keys=keys, gang=gang)
            self._engine = start_engine(
                engine,
                host=host,
                env=engine_environment(engine, environment),
                progress=self._show_progress,
            )
        self._cold_start_s = time.monotonic() - began_s
        self._role_status = RoleStatus(
            replica=f"{role}-{self._engine.description.incarnation}",
            role=role,
            next_role=role,
            has_connector=engine.kv_connector is not None,
            in_gang=gang is not None,
            is_scaled=config.is_scaled,
        )
        self._life.become(LifeState.READY)
        self._engine.call_at_exit(self._on_engine_exit)

    async def describe(self) -> dict[str, Any]:
        """Return the engine's `EngineDescription` as plain values."""
        description: dict[str, Any] = msgspec.to_builtins(self._engine.description)
        return description

    async def role_status(self) -> dict[str, Any]:
        """Return the engine's `RoleStatus` as plain values."""
        engine = self._engine
        now = msgspec.structs.replace(
            self._role_status,
            role=engine.role,
            next_role=engine.next_role,
            is_draining=engine.is_evacuating,
            is_drained=engine.is_evacuated,
        )
        role_status: dict[str, Any] = msgspec.to_builtins(now)
        return role_status

    async def change_role(self, replica: str, role: Role) -> None:
        """Change the engine's role to prefill or decode, if `replica` names this replica."""
        if replica == self._role_status.replica:
            self._engine.change_role(role)

    async def set_draining(self, replica: str, is_draining: bool) -> None:
        """Drain the engine until it is undrained, or end that, if `replica` names this replica."""
        if replica == self._role_status.replica:
            self._engine.evacuate() if is_draining else self._engine.reopen()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return this replica's report for the application's autoscaling policy."""
        return replica_report(self._engine.description, self._cold_start_s)

    async def check_health(self) -> None:
        """Tell Serve whether the engine runs; a backstop, as the replica exits by itself.

        Also lets an idle engine take a step every `PROBE_S`. An engine that hangs in it gets no new
        requests and is killed (`replicas.launch`).

        Raises:
            RuntimeError: The engine has ended.
        """
        if not self._engine.is_alive:
            raise RuntimeError(str(self._engine.failure or "the engine process is gone"))
        if time.monotonic() >= self._probed_s + PROBE_S:
            self._probed_s = time.monotonic()
            self._engine.probe()

    async def __del__(self) -> None:
        """Drain, then stop the engine. Serve awaits this before it ends the replica."""
        if self._life.state is not LifeState.READY:
            return
        self._life.become(LifeState.DRAINING)
        if not await asyncio.to_thread(self._engine.drain, self._drain_timeout_s):
            logger.warning(
                "stopping the engine with requests running: drain_timeout_s is over role=%s",
                self._role,
            )
        await asyncio.to_thread(self._engine.stop)
        if self._hub is not None:
            self._hub.close()
        self._life.become(LifeState.DEAD)

    def _show_progress(self, stage: str, fraction: float) -> None:
        """Write one line per stage and quarter; Ray shows a worker's output to its driver."""
        line = f"{self._role}: {stage} {int(fraction * 4) * 25} %"
        if line != self._stage:
            self._stage = line
            _write_to_stderr(line)

    def _on_engine_exit(self, code: int) -> None:
        """End this process together with its engine; Serve notices within a second."""
        if self._life.state is LifeState.READY:
            reason = self._engine.failure or f"the engine process ended with code {code}"
            _write_to_stderr(f"{self._role}: {reason}")
            os._exit(1)


class IngressReplica:
    """An ingress: the ASGI app over a router that has found the pools' engines.

    Serve calls `__serve_build_asgi_app__` once after the constructor, runs the app's lifespan
    around the replica's life, and cancels a request's task the moment its client is gone.

    Args:
        args: The application's `args`.
        admin: Handle of the admin deployment, if there is one. It is not called: Serve makes the
            deployments of an application that the first one is bound to.
        **pools: Handle of each pool's deployment, by role.

    Raises:
        ClusterConfigError: The file of secrets, or that of API keys, cannot be used.
        UnsafeFileError: Another user of this host could have Ray's token.
    """

    def __init__(
        self,
        args: Mapping[str, Any],
        admin: DeploymentHandle[Any] | None = None,
        **pools: DeploymentHandle[Any],
    ) -> None:
        del admin
        suppress_logging_errors()
        guard_replica_port()
        self._config = resolve(args)
        self._keys = deployment_keys(self._config, serve.get_replica_context().app_name)
        key_file = self._config.ingress.api_keys
        self._api_keys = None if key_file is None else shared_keys(key_file)
        self._directory = PoolDirectory(pools)
        self._ingress: Ingress | None = None

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return this ingress's report for the application's autoscaling policy."""
        return {} if self._ingress is None else ingress_report(self._ingress.router)

    async def check_health(self) -> None:
        """Tell Serve whether this ingress knows replicas, or can still discover some.

        Raises:
            RuntimeError: It knows none and discovery keeps failing; Serve then replaces it.
        """
        if self._ingress is not None and self._ingress.fleet.is_lost:
            raise RuntimeError("no replica is known, and discovery keeps failing")

    async def answer_peer(self, question: str, payload: bytes) -> bytes:
        """Answer an ingress of this application, see `Ingress.answer_peer`."""
        return b"" if self._ingress is None else await self._ingress.answer_peer(question, payload)

    def __serve_build_asgi_app__(self) -> Starlette:
        peers = IngressPeers(serve.get_replica_context().app_name)
        ingress = self._ingress = Ingress(self._config, self._keys, self._api_keys, peers)
        app = create_app(
            ingress,
            self._config.ingress,
            version=importlib.metadata.version("ttserve"),
            admission=self._config.router.admission,
            api_keys=self._api_keys,
            quotas=ingress.quotas,
            responses=ingress.responses,
            departure=ingress.departure,
        )

        @contextlib.asynccontextmanager
        async def lifespan(_app: Starlette) -> AsyncIterator[None]:
            loop = asyncio.get_running_loop()
            call_at_end(
                partial(loop.call_soon_threadsafe, ingress.departure.begin, ingress.responses)
            )
            following = asyncio.create_task(ingress.fleet.follow(self._directory))
            sharing = asyncio.create_task(ingress.follow_peers())
            try:
                yield
            finally:
                await ingress.departure.finish(ingress.responses, peers.has_other)
                following.cancel()
                sharing.cancel()
                await ingress.close()
                peers.close()

        app.router.lifespan_context = lifespan
        return app


class IngressPeers:
    """The `Peers` that asks the running replicas of the ingress deployment.

    Args:
        application: Name of the application.
    """

    def __init__(self, application: str) -> None:
        self._application = application
        self._handle: DeploymentHandle[Any] | None = None
        # A question may wait for a replica that hangs while others are asked.
        self._threads = ThreadPoolExecutor(8, "peers")

    async def ask_all(self, question: str, payload: bytes, timeout_s: float) -> list[bytes]:
        """Return the answers of the ingresses that answered in time."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, self._ask_all, question, payload, timeout_s
        )

    async def ask_one(self, question: str, payload: bytes, timeout_s: float) -> bytes:
        """Return the answer of an ingress that Serve chooses; it chooses none that ends."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, self._ask_one, question, payload, timeout_s
        )

    async def has_other(self) -> bool:
        """Return whether Serve runs or starts an ingress that it is not about to end."""
        try:
            status = await asyncio.wait_for(asyncio.to_thread(serve.status), DESCRIBE_TIMEOUT_S)
            states = status.applications[self._application].deployments[INGRESS].replica_states
        except (RayServeException, RayError, asyncio.TimeoutError, KeyError) as error:
            logger.info("cannot get the number of ingresses from Serve: %r", error)
            return False
        return any(count for state, count in states.items() if state != "STOPPING")

    def close(self) -> None:
        """End the threads, those that wait for an answer after their question's timeout."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ask_one(self, question: str, payload: bytes, timeout_s: float) -> bytes:
        asked = None
        try:
            asked = self._ingresses().answer_peer.remote(question, payload)
            answer: bytes = asked.result(timeout_s=timeout_s)
        except (RayServeException, RayError, TimeoutError) as error:
            logger.info("no ingress answers: %s", error)
            if asked is not None:
                asked.cancel()  # type: ignore[no-untyped-call]
            return b""
        return answer

    def _ingresses(self) -> DeploymentHandle[Any]:
        if self._handle is None:
            self._handle = serve.get_deployment_handle(INGRESS, self._application)
        return self._handle

    def _ask_all(self, question: str, payload: bytes, timeout_s: float) -> list[bytes]:
        try:
            answers = (
                self._ingresses()
                .broadcast("answer_peer", question, payload)
                .results(timeout_s=timeout_s, return_exceptions=True)
            )
        except (RayServeException, RayError, TimeoutError) as error:
            logger.info("no ingress answers: %s", error)
            return []
        return [answer for answer in answers if isinstance(answer, bytes)]


class PoolDirectory:
    """The `Discovery` that asks each running replica through the handle of its pool.

    Args:
        handles: Handle of each pool's deployment, by its name.
    """

    def __init__(self, handles: Mapping[str, DeploymentHandle[Any]]) -> None:
        self._handles = dict(handles)
        self._status: asyncio.Future[ServeStatus] | None = None

    async def find(self) -> list[Member]:
        """Return the replicas that answered within `DESCRIBE_TIMEOUT_S`.

        Raises:
            Exception: The error of a pool's handle, if no replica of any pool answered.
        """
        found: list[Member] = []
        errors: list[BaseException] = []
        for answer in await asyncio.gather(
            *(self._find_in_pool(pool, handle) for pool, handle in self._handles.items()),
            return_exceptions=True,
        ):
            if isinstance(answer, BaseException):
                errors.append(answer)
            else:
                found += answer
        if errors and not found:
            raise errors[0]
        return found

    async def num_wanted(self) -> int | None:
        """Return the replicas that Serve runs or starts now; None if Serve does not answer."""
        if self._status is None:
            self._status = asyncio.ensure_future(asyncio.to_thread(serve.status))
        # One request at a time: each one to a controller that hangs occupies a thread.
        await asyncio.wait({self._status}, timeout=DESCRIBE_TIMEOUT_S)
        if not self._status.done():
            return None
        asked, self._status = self._status, None
        try:
            application = serve.get_replica_context().app_name
            deployments = asked.result().applications[application].deployments
            return sum(
                count
                for pool in self._handles
                for state, count in deployments[pool].replica_states.items()
                if state != "STOPPING"
            )
        except (RayServeException, RayError, TimeoutError, KeyError) as error:
            logger.info("cannot get the number of replicas from Serve: %r", error)
            return None

    async def _find_in_pool(self, pool: str, handle: DeploymentHandle[Any]) -> list[Member]:
        try:
            # In a thread, because `results_async` returns nothing if one replica does not answer.
            answers = await asyncio.to_thread(
                handle.broadcast("describe").results,
                timeout_s=DESCRIBE_TIMEOUT_S,
                return_exceptions=True,
            )
        except (RayServeException, RayError, TimeoutError) as error:
            logger.info("pool %s has no replica that answers: %s", pool, error)
            return []
        return [
            Member(pool, f"{pool}-{description.incarnation}", description)
            for description in map(_decode_description, answers)
            if description is not None
        ]


def _decode_description(answer: object) -> EngineDescription | None:
    """Decode a replica's description; None for an error or an unreadable description."""
    if isinstance(answer, BaseException):
        return None
    try:
        return msgspec.convert(answer, EngineDescription)
    except msgspec.ValidationError as error:
        logger.warning("ignoring a replica: this version cannot read its description: %s", error)
        return None


def suppress_logging_errors() -> None:
    """Drop log lines of this process that cannot be written, instead of raising an error.

    `logging` reports a failed write to `sys.stderr`, which Serve redirects to a logger of the same
    file. On a full disk each log call, and discovery with it, would end in a RecursionError.
    """
    logging.raiseExceptions = False


def _write_to_stderr(line: str) -> None:
    """Write to the worker's own standard error, which Ray shows to its driver.

    Writes to the descriptor, because Serve may redirect `sys.stderr` to a log file. Ignores errors:
    a full disk must neither keep an engine from starting nor its replica from ending with it.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


def engine_environment(config: EngineConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return an engine's environment: its parent's, with the configured number of threads.

    Ray sets one thread for every worker, which must not limit the engine. `start_engine` adds the
    variables that a mesh needs.

    Args:
        config: The engine's configuration.
        inherited: The replica's environment, including the devices that Ray assigned to it.
    """
    environment = {k: v for k, v in inherited.items() if k not in _THREAD_VARIABLES}
    if config.num_threads is not None:
        environment |= dict.fromkeys(_THREAD_VARIABLES, str(config.num_threads))
    return environment


def pool_deployment(config: ClusterConfig, role: Role) -> Deployment:
    """Return the deployment of one pool.

    The boards of an engine's mesh are reserved on one host. Ray binds the replica to them through
    `TT_VISIBLE_DEVICES`.
    """
    pool, engine = config.pools[role], config.engines[role]
    resources = pool_resources(pool, engine)
    placement: dict[str, Any] = {}
    if engine.mesh is not None and resources:
        # The replica's actor uses the whole bundle.
        placement["placement_group_bundles"] = [{"CPU": pool.num_cpus, **resources}]
        placement["placement_group_strategy"] = "STRICT_PACK"
    if pool.gang_size > 1:
        placement["gang_scheduling_config"] = GangSchedulingConfig(gang_size=pool.gang_size)
    return bounded_deployment(
        name=role,
        **_scale(pool.replicas, pool.max_replicas),
        ray_actor_options={"num_cpus": pool.num_cpus, "resources": resources},
        graceful_shutdown_timeout_s=_shutdown_timeout_s(config, role),
        **placement,
    )(PoolReplica)


def _scale(replicas: int, max_replicas: int | None) -> dict[str, Any]:
    """Return the replica options. Serve adds no delays, as the policy has its own."""
    if max_replicas is None:
        return {"num_replicas": replicas}
    bounds = AutoscalingConfig(
        min_replicas=replicas, max_replicas=max_replicas, upscale_delay_s=0, downscale_delay_s=0
    )
    return {"autoscaling_config": bounds}


def pool_resources(pool: PoolConfig, engine: EngineConfig) -> dict[str, float]:
    """Return the Ray resources of each replica: the boards of its mesh, unless the pool sets them.

    A pool sets `{TTNPU: 0}` if its mesh has no board that Ray counts, such as a mock cluster.
    """
    boards = {} if engine.mesh is None else {RESOURCE: engine.mesh.spec.num_pcie_devices}
    return {name: count for name, count in {**boards, **pool.resources}.items() if count}


def lacking_resources(config: ClusterConfig, found: Mapping[str, float]) -> str:
    """Describe the resources that pools and ingress need and Ray lacks; "" if they can all start.

    Args:
        config: The cluster's configuration.
        found: Ray's resources, summed over all nodes.
    """
    wanted: defaultdict[str, float] = defaultdict(float)
    for role, pool in config.pools.items():
        for name, count in pool_resources(pool, config.engines[role]).items():
            wanted[name] += count * pool.replicas
    for name, count in config.ingress.resources.items():
        wanted[name] += count * config.ingress.replicas
    return ", ".join(
        f"{count:g} {name} and there are {found.get(name, 0):g}"
        for name, count in wanted.items()
        if count > found.get(name, 0)
    )


def _shutdown_timeout_s(config: ClusterConfig, role: Role) -> float:
    """Return how long Serve waits for a stopping replica: its drain plus twice the stop timeout."""
    return config.pools[role].drain_timeout_s + 2 * stop_timeout_s(config.engines[role])


def ingress_deployment(config: ClusterConfig) -> Deployment:
    """Return the deployment of the HTTP edge."""
    return bounded_deployment(
        name=INGRESS,
        **_scale(
            config.ingress.replicas,
            # Serve collects reports of scalable deployments only.
            config.ingress.replicas if config.is_scaled else None,
        ),
        max_ongoing_requests=_NO_LIMIT_OF_SERVE,
        ray_actor_options={
            "num_cpus": config.ingress.num_cpus,
            "resources": dict(config.ingress.resources),
            "runtime_env": {
                "env_vars": {
                    **_INGRESS_VARIABLES,
                    INGRESS_VARIABLE: msgspec.json.encode(config.ingress, enc_hook=dict).decode(),
                }
            },
        },
        # The drain, and time for the events that end open streams.
        graceful_shutdown_timeout_s=config.ingress_drain_timeout_s
        + max(2 * stop_timeout_s(engine) for engine in config.engines.values()),
    )(serve.ingress()(IngressReplica))
