"""Cluster configuration: the only module that reads YAML and the environment.

A deployment is one Ray Serve config file. `load_serve_file` reads all of it and refuses keys that
Serve itself would ignore; `load_cluster_config` reads the application's `args`, which is what
`serve deploy` hands to `cluster.app:build`. Everything that can be checked without starting
anything is checked here.
"""

import os
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec
import yaml

import configs
from cluster.errors import ClusterConfigError
from kv_transfer.dtypes import is_lossless
from kv_transfer.errors import InvalidLayoutError
from kv_transfer.layout import ROW_TOKENS
from kv_transfer.store import STORE_BACKENDS, StoreConfig
from replicas.config import STORE_CONNECTORS, EngineConfig
from replicas.errors import ConfigError, FaultPlanError
from replicas.faults import FaultPlan
from replicas.generators.model_config import load_engine_model
from replicas.kv_sizing import kv_rope, longest_sequence, resolve_dtype

Role = Literal["prefill", "decode", "both"]
"""What a pool's replicas start as: prefill only, decode (and short prompts), or everything."""

PolicyName = Literal["most_empty_slots", "round_robin"]
"""most_empty_slots: where the most decode slots are free, prefill where the fewest tokens wait.
round_robin: in turn, whatever the load; a baseline to compare others with."""

OrderName = Literal["decode_first", "prefill_first"]
"""decode_first: a decode slot is reserved before the prompt is computed. Nothing is computed for a
request that finds no slot, and its KV moves as soon as it is there; but the slot and its blocks
stand idle meanwhile. Better where prompts are short, prefill seldom queues, or an error after the
first token is worse than a late one.
prefill_first: the prompt is computed at once, and its KV waits with the prefill replica for a slot.
A first token never waits for a slot, and slots only hold what decodes; but KV that waits takes
prefill blocks, a client may get one token and then an error, and whoever waits longer than
`TransferConfig.rendezvous_s` has the prompt computed again. Better where prompts are long, prefill
queues, or decode slots are what there is too little of."""

DEMO_MODEL = "demo"
NODE_HOST = "node"
IMPORT_PATH = "cluster.app:build"

_CONNECTORS = ("p2p", *STORE_CONNECTORS)

T = TypeVar("T")

_OWN_ENGINE_KEYS = ("model", "role", "kv_connector", "kv_endpoint", "kv_store", "kv_keys")


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pool of equal replicas.

    Attributes:
        replicas: How many.
        num_cpus: CPUs that Ray sets aside for each replica's actor.
        resources: Further Ray resources of each, for one `{TTNPU: 1}`.
        drain_timeout_s: How long a replica that is told to stop lets its requests finish.
        engine: Fields of the engine's configuration, over those of `ClusterConfig.engine`.
    """

    replicas: int = 1
    num_cpus: float = 0.1
    resources: dict[str, float] = {}
    drain_timeout_s: float = 600.0
    engine: dict[str, Any] = {}


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How requests are placed.

    Attributes:
        max_queued_requests: Requests that may wait for a slot at one ingress; more get 429. With
            `prefill_first` only before their prompt is computed: with a first token they wait.
        queue_timeout_s: How long one may wait; then 408.
        max_attempts: Replicas that are tried for one step of a request (reserve, prefill).
        min_remote_prefill_tokens: Shorter prompts are computed on the decode replica itself.
        policy: Which DP group a request gets, see `cluster.placement`.
        order: Whether a decode slot or the prompt comes first, see `OrderName`.
    """

    max_queued_requests: int = 256
    queue_timeout_s: float = 60.0
    max_attempts: int = 3
    min_remote_prefill_tokens: int = 0
    policy: PolicyName = "most_empty_slots"
    order: OrderName = "decode_first"


class IngressConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP edge.

    Attributes:
        replicas: Ingress processes behind the load balancer; each can serve every request.
        num_cpus: CPUs that Ray sets aside for each.
        max_ongoing_requests: Requests that one of them holds open at a time.
        max_body_bytes: Larger request bodies get 413.
    """

    replicas: int = 1
    num_cpus: float = 0.1
    max_ongoing_requests: int = 1024
    max_body_bytes: int = 8 * 2**20


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `args` of the application.

    Attributes:
        model: Absolute path of a model folder, or "demo" for the bundled model.
        model_name: Name that requests give; None takes the folder's.
        data_host: Address on which engines listen for ingresses and for each other; "node" takes
            each host's own, as Ray knows it, which a cluster of several hosts needs.
        kv_connector: How KV moves: "p2p" between the pools, "pooled" through a store, "multi" by
            either, or "module:Class". Replicas of the pool `both` have no use for "p2p".
        kv_store: The store of "pooled" and "multi", one for all replicas; fields of
            `kv_transfer.store.StoreConfig`.
        kv_key_file: File of the secrets that seal tickets between the pools, on every host, for one
            of a Kubernetes Secret: one a line, in hexadecimal or base64, at least 16 bytes each;
            the first seals, each of them opens (`KeyRing` says how to change it). None makes one
            for each version of the application: while one version replaces another, replicas of
            the two hand nothing over, and prompts are computed where they are decoded. Ray stores
            what is made, see `cluster.app`: give a file on a cluster that others use too.
        engine: Fields of every engine's configuration.
        pools: Either `prefill` and `decode`, or `both` alone.
        router: How requests are placed.
        ingress: The HTTP edge.
        faults: Entries of a fault plan, which `docs/fault-plans.md` explains; only for pools whose
            engines run on a simulated mesh.
        fault_epoch_unix_s: When the plan starts; `cluster.app.build` sets it.
    """

    pools: dict[Role, PoolConfig]
    model: str = DEMO_MODEL
    model_name: str | None = None
    data_host: str = "127.0.0.1"
    kv_connector: str = "p2p"
    kv_store: StoreConfig | None = None
    kv_key_file: str | None = None
    engine: dict[str, Any] = {}
    router: RouterConfig = RouterConfig()
    ingress: IngressConfig = IngressConfig()
    faults: list[Any] = []
    fault_epoch_unix_s: float = 0.0

    @property
    def fault_plan(self) -> FaultPlan:
        """What goes wrong with which replica.

        Raises:
            FaultPlanError: An entry cannot work.
        """
        return FaultPlan.parse(self.faults)

    @property
    def model_folder(self) -> Path:
        """Where the model is."""
        return demo_model_folder() if self.model == DEMO_MODEL else Path(self.model)

    @property
    def served_model_name(self) -> str:
        """Name that requests give."""
        return self.model_name or (
            DEMO_MODEL if self.model == DEMO_MODEL else self.model_folder.name
        )

    @property
    def is_disaggregated(self) -> bool:
        """Whether prefill and decode have pools of their own."""
        return "both" not in self.pools

    @property
    def _engine_connector(self) -> str | None:
        """Between pools any; within one pool nothing goes from one engine to another."""
        is_useless = self.kv_connector == "p2p" and not self.is_disaggregated
        return None if is_useless else self.kv_connector

    def engine_config(self, role: Role) -> EngineConfig:
        """Configuration of the engines of one pool, without the keys of tickets.

        Raises:
            ClusterConfigError: An engine field is unknown, mistyped, or set by the cluster itself.
        """
        pool = self.pools[role]
        of_pool = f"args.pools.{role}.engine"
        for where, options in (("args.engine", self.engine), (of_pool, pool.engine)):
            for key in _OWN_ENGINE_KEYS:
                if key in options:
                    raise ClusterConfigError(f"{where}.{key} is set by the cluster; remove it")
        fields = {
            # A router queues in front of decode slots, so that it can still choose.
            "max_num_waiting": 256 if role == "prefill" else 0,
            **self.engine,
            **pool.engine,
            "model": str(self.model_folder),
            "role": role,
            "kv_connector": self._engine_connector,
            "kv_endpoint": f"tcp://{self.data_host}:*",
            "kv_store": self.kv_store,
        }
        # Alone first: a mistake in what all pools share is named where it stands.
        _convert({**self.engine, "model": ""}, EngineConfig, "args.engine")
        return _with_model_places(_convert(fields, EngineConfig, of_pool))

    def replica_config(self, role: Role, rank: int) -> EngineConfig:
        """Configuration of the engine of one replica: its pool's, with the replica's own faults.

        Args:
            role: Its pool.
            rank: Its number in the pool; a replica that is started again has the same one.

        Raises:
            ClusterConfigError: As `engine_config`.
        """
        config = self.engine_config(role)
        faults = self.fault_plan.entries_for(f"{role}/{rank}")
        if config.simulated_mesh is None or not faults:
            return config
        mesh = msgspec.structs.replace(
            config.simulated_mesh, faults=faults, fault_epoch_unix_s=self.fault_epoch_unix_s
        )
        return msgspec.structs.replace(config, simulated_mesh=mesh)


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serve's `http_options`; `host` is required: Serve's own default is every address."""

    host: str
    port: int = 8000
    root_path: str = ""
    request_timeout_s: float | None = None
    keep_alive_timeout_s: int = 90


class DeploymentOverride(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of an application's `deployments`; values are checked by Serve."""

    name: str
    num_replicas: Any = None
    max_ongoing_requests: Any = None
    max_queued_requests: Any = None
    backpressure_config: Any = None
    user_config: Any = None
    autoscaling_config: Any = None
    graceful_shutdown_wait_loop_s: Any = None
    graceful_shutdown_timeout_s: Any = None
    health_check_period_s: Any = None
    health_check_timeout_s: Any = None
    ray_actor_options: Any = None
    placement_group_bundles: Any = None
    placement_group_strategy: Any = None
    placement_group_bundle_label_selector: Any = None
    max_replicas_per_node: Any = None
    rolling_update_percentage: Any = None
    max_surge_percent: Any = None
    logging_config: Any = None


class ApplicationFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The entry of `applications`."""

    name: str
    import_path: str
    args: dict[str, Any]
    route_prefix: str = "/"
    runtime_env: dict[str, Any] = {}
    deployments: list[DeploymentOverride] = []
    logging_config: dict[str, Any] = {}
    external_scaler_enabled: bool = False


class ServeFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole Ray Serve config file with one ttserve application."""

    http_options: HttpOptions
    applications: list[ApplicationFile]
    proxy_location: Literal["HeadOnly", "EveryNode", "Disabled"] = "EveryNode"
    grpc_options: dict[str, Any] = {}
    controller_options: dict[str, Any] = {}
    logging_config: dict[str, Any] = {}
    tracing_config: dict[str, Any] = {}
    target_capacity: float | None = None

    @property
    def name(self) -> str:
        """The application's name."""
        return self.applications[0].name

    @property
    def args(self) -> dict[str, Any]:
        """What `cluster.app:build` gets."""
        return self.applications[0].args

    @property
    def host(self) -> str:
        """Address of the HTTP endpoint."""
        return self.http_options.host

    @property
    def port(self) -> int:
        """Port of the HTTP endpoint."""
        return self.http_options.port

    @property
    def url(self) -> str:
        """Where a client on this host reaches the endpoint."""
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{host}:{self.port}"

    @property
    def model_name(self) -> str:
        """Name that requests give."""
        return load_cluster_config(self.args).served_model_name

    def override(
        self,
        *,
        model: str | None = None,
        host: str | None = None,
        port: int | None = None,
        faults: str | Path | None = None,
    ) -> "ServeFile":
        """The same file with another model, host, port or fault plan; None keeps what it says.

        Raises:
            ClusterConfigError: The file of the fault plan cannot be read or cannot work.
        """
        args = self.args
        if faults is not None:
            args = {**args, "faults": msgspec.to_builtins(load_fault_plan(faults).faults)}
        if model is not None:
            args = {**args, "model": model}
            args.pop("model_name", None)
        http = msgspec.structs.replace(
            self.http_options,
            host=self.host if host is None else host,
            port=self.port if port is None else port,
        )
        application = msgspec.structs.replace(self.applications[0], args=args)
        return msgspec.structs.replace(self, http_options=http, applications=[application])


def demo_model_folder() -> Path:
    """Folder of the bundled model, wherever the package is installed."""
    return Path(configs.__file__).resolve().parent / "demo-model"


def load_fault_plan(path: str | Path) -> FaultPlan:
    """Read and check a fault plan, YAML or JSON.

    Raises:
        ClusterConfigError: It cannot be read, or an entry cannot work; names the entry.
    """
    raw = _read_yaml(path)
    try:
        return FaultPlan.parse(raw)
    except FaultPlanError as error:
        raise ClusterConfigError(f"{path}: {error}") from error


def load_serve_file(path: str | Path) -> ServeFile:
    """Read and check a Ray Serve config file.

    Raises:
        ClusterConfigError: It cannot be read, a key is unknown or mistyped, or it cannot work.
    """
    file = _convert(_read_yaml(path), ServeFile, "")
    if len(file.applications) != 1:
        raise ClusterConfigError(
            f"applications: a file has one ttserve application, not {len(file.applications)}"
        )
    if file.applications[0].import_path != IMPORT_PATH:
        raise ClusterConfigError(
            f"applications[0].import_path must be {IMPORT_PATH}, "
            f"got {file.applications[0].import_path!r}"
        )
    load_cluster_config(file.args)
    return file


def load_cluster_config(args: Any) -> ClusterConfig:  # noqa: ANN401 - whatever a YAML file held
    """Read and check an application's `args`, up to and including the model's own configuration.

    Raises:
        ClusterConfigError: A key is unknown or mistyped, the model folder is not usable, or the
            numbers cannot work together; the message names the keys.
    """
    config = _convert(args, ClusterConfig, "args")
    roles = set(config.pools)
    if roles not in ({"both"}, {"prefill", "decode"}):
        raise ClusterConfigError(
            f"args.pools must hold prefill and decode, or both alone; got {sorted(roles)}"
        )
    _check_counts(config)
    if config.model != DEMO_MODEL and not config.model_folder.is_absolute():
        raise ClusterConfigError(
            f"args.model {config.model!r} is a relative path, and replicas run in folders of their "
            f"own: give an absolute path, or {DEMO_MODEL!r}"
        )
    _check_kv(config)
    try:
        for role in config.pools:
            _check_engine(config.engine_config(role))
    except (ConfigError, InvalidLayoutError) as error:
        raise ClusterConfigError(f"args: {error}") from error
    _check_boards(config)
    _check_kv_memory(config)
    _check_pools_agree(config)
    _check_faults(config)
    return config


def process_environment() -> dict[str, str]:
    """A copy of this process's environment, to start children with."""
    return dict(os.environ)  # noqa: TID251 - the one place


def _with_model_places(engine: EngineConfig) -> EngineConfig:
    """Where a mesh's generator comes from, as Tenstorrent's own tools are told: the environment.

    Each replica asks the environment of its own host.
    """
    mesh = engine.mesh
    if mesh is None or engine.uses_native_generator:
        return engine
    mesh = msgspec.structs.replace(
        mesh,
        tt_metal_home=mesh.tt_metal_home or _variable("TT_METAL_HOME"),
        extra_models_dir=mesh.extra_models_dir or _variable("EXTRA_MODELS_DIR"),
    )
    return msgspec.structs.replace(engine, mesh=mesh)


def _variable(name: str) -> str | None:
    return os.environ.get(name) or None  # noqa: TID251 - see `process_environment`


def _check_counts(config: ClusterConfig) -> None:
    counts = {
        "args.ingress.replicas": config.ingress.replicas,
        "args.ingress.max_ongoing_requests": config.ingress.max_ongoing_requests,
        "args.ingress.max_body_bytes": config.ingress.max_body_bytes,
        "args.router.max_attempts": config.router.max_attempts,
        **{f"args.pools.{role}.replicas": pool.replicas for role, pool in config.pools.items()},
    }
    for key, count in counts.items():
        if count < 1:
            raise ClusterConfigError(f"{key} must be at least 1, got {count}")
    if config.router.max_queued_requests < 0:
        raise ClusterConfigError("args.router.max_queued_requests must not be negative")
    if config.router.queue_timeout_s <= 0:
        raise ClusterConfigError("args.router.queue_timeout_s must be positive")


def _check_engine(engine: EngineConfig) -> None:
    """Everything about an engine that its model's config.json decides."""
    engine.validate()
    longest_sequence(engine, load_engine_model(engine))


def _check_boards(config: ClusterConfig) -> None:
    """Replicas do not share boards: those that are named are one replica's."""
    for role, pool in config.pools.items():
        mesh = config.engine_config(role).mesh
        if mesh is not None and mesh.visible_devices is not None and pool.replicas > 1:
            raise ClusterConfigError(
                f"args.pools.{role}: {pool.replicas} replicas cannot all have the boards of "
                f"mesh.visible_devices {list(mesh.visible_devices)}; remove visible_devices, and "
                "Ray gives each replica boards of its own"
            )


def _check_kv_memory(config: ClusterConfig) -> None:
    """Nobody waits for a mesh to take as much memory as it was told: it takes what there is.

    What all pools share may be meant for one of them that is not on a mesh.
    """
    on_mesh = {role for role in config.pools if config.engine_config(role).mesh is not None}
    places = {f"args.pools.{role}.engine": config.pools[role].engine for role in on_mesh}
    if on_mesh == set(config.pools):
        places["args.engine"] = config.engine
    for where, fields in places.items():
        if "kv_cache_memory_bytes" in fields:
            raise ClusterConfigError(
                f"{where}.kv_cache_memory_bytes is for engines on the CPU: a mesh's KV takes what "
                "its memory holds beside the weights; remove it, or set num_blocks"
            )


def _check_kv(config: ClusterConfig) -> None:
    """How KV moves fits the pools, and names what it needs."""
    name = config.kv_connector
    if config.kv_key_file is not None and not Path(config.kv_key_file).is_absolute():
        raise ClusterConfigError(
            f"args.kv_key_file {config.kv_key_file!r} is a relative path, and replicas run in "
            "folders of their own: give an absolute path"
        )
    if name not in _CONNECTORS and ":" not in name:
        raise ClusterConfigError(
            f"args.kv_connector must be one of {', '.join(_CONNECTORS)}, or module:Class; "
            f"got {name!r}"
        )
    if name == "pooled" and config.is_disaggregated:
        raise ClusterConfigError(
            "args.kv_connector pooled hands no request from one pool to the other: use multi for "
            "prefill and decode, or the pool both"
        )
    if name == "multi" and not config.is_disaggregated:
        raise ClusterConfigError(
            "args.kv_connector multi is for prefill and decode pools: use pooled for the pool both"
        )
    if config.kv_store is not None:
        _check_store(config, config.kv_store)
    elif name in STORE_CONNECTORS:
        raise ClusterConfigError(
            f"args.kv_connector {name} needs args.kv_store, for one "
            "{backend: shm, capacity_bytes: 1073741824}"
        )


def _check_store(config: ClusterConfig, store: StoreConfig) -> None:
    if config.kv_connector == "p2p":
        raise ClusterConfigError(
            "args.kv_store is for kv_connector pooled and multi; set one of them, or remove it"
        )
    if store.backend not in STORE_BACKENDS and ":" not in store.backend:
        raise ClusterConfigError(
            f"args.kv_store.backend must be one of {', '.join(STORE_BACKENDS)}, or module:Class; "
            f"got {store.backend!r}"
        )
    for role in config.pools:
        block_size = config.engine_config(role).block_size
        if store.unit_tokens % block_size:
            raise ClusterConfigError(
                f"args.kv_store.unit_tokens {store.unit_tokens} is no multiple of block_size "
                f"{block_size} of pool {role}; use a common multiple of every pool's"
            )


def _check_pools_agree(config: ClusterConfig) -> None:
    """KV moves between engines that mean the same by a row of it."""
    for role in config.pools:
        engine = config.engine_config(role)
        if engine.kv_connector is not None and engine.block_size % ROW_TOKENS:
            raise ClusterConfigError(
                f"block_size {engine.block_size} of pool {role} is no multiple of {ROW_TOKENS}, "
                "the tokens of a row that KV transfer moves"
            )
    if not config.is_disaggregated:
        return
    prefill, decode = config.engine_config("prefill"), config.engine_config("decode")
    of_prefill, of_decode = _simulated_model(prefill), _simulated_model(decode)
    if of_prefill != of_decode:
        raise ClusterConfigError(
            f"simulated_mesh.model is {of_prefill} in the prefill pool and {of_decode} in the "
            "decode pool; make them equal"
        )
    of_prefill, of_decode = kv_rope(prefill), kv_rope(decode)
    if of_prefill != of_decode:
        raise ClusterConfigError(
            f"keys are rotated in the order of {of_prefill} by {_generator_name(prefill)} of the "
            f"prefill pool, and of {of_decode} by {_generator_name(decode)} of the decode pool: "
            "neither can use the other's KV; give both a generator of one kind"
        )
    _check_dtypes_agree(config, prefill, decode)


def _check_dtypes_agree(config: ClusterConfig, prefill: EngineConfig, decode: EngineConfig) -> None:
    of_prefill = resolve_dtype(prefill, load_engine_model(prefill))
    of_decode = resolve_dtype(decode, load_engine_model(decode))
    if of_prefill == of_decode:
        return
    if of_prefill in decode.kv_accept_dtypes:
        try:
            is_lossless(of_prefill, of_decode)
        except InvalidLayoutError as error:
            raise ClusterConfigError(f"args.pools.decode.engine.kv_accept_dtypes: {error}") from (
                error
            )
        return
    by = [
        f"{role}: mesh.optimizations {engine.mesh.optimizations}"
        for role, engine in (("prefill", prefill), ("decode", decode))
        if engine.mesh is not None
    ]
    why = f" ({', '.join(by)})" if by else ""
    convert = (
        ""
        if config.kv_connector in STORE_CONNECTORS
        else f", or let decode convert: args.pools.decode.engine.kv_accept_dtypes: [{of_prefill}]"
    )
    raise ClusterConfigError(
        f"dtype is {of_prefill} in the prefill pool and {of_decode} in the decode pool{why}; make "
        f"them equal{convert}"
    )


def _generator_name(engine: EngineConfig) -> str:
    return "ttserve's own" if engine.generator is None else f"generator {engine.generator}"


def _simulated_model(engine: EngineConfig) -> str | None:
    return engine.simulated_mesh.model if engine.simulated_mesh is not None else None


def _check_faults(config: ClusterConfig) -> None:
    """A plan is only for replicas that exist, on simulated meshes."""
    options = {"args.engine": config.engine}
    options |= {f"args.pools.{role}.engine": pool.engine for role, pool in config.pools.items()}
    for where, fields in options.items():
        for key in ("faults", "fault_epoch_unix_s"):
            if key in (fields.get("simulated_mesh") or {}):
                raise ClusterConfigError(
                    f"{where}.simulated_mesh.{key} is set by the cluster, for one replica; "
                    "name faults in args.faults"
                )
    try:
        plan = config.fault_plan
        plan.check_targets({role: pool.replicas for role, pool in config.pools.items()})
    except FaultPlanError as error:
        raise ClusterConfigError(f"args.faults: {error}") from error
    for i, fault in enumerate(plan.faults):
        role = cast("Role", fault.target.partition("/")[0])
        if config.engine_config(role).simulated_mesh is None:
            raise ClusterConfigError(
                f"args.faults: [{i}]: only engines on a simulated mesh can be made to fail; remove "
                f"the plan, or set args.pools.{role}.engine.simulated_mesh"
            )


def _read_yaml(path: str | Path) -> Any:  # noqa: ANN401 - whatever the file holds
    try:
        return yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ClusterConfigError(f"cannot read {path}: {error}") from error


def _convert(raw: Any, kind: type[T], where: str) -> T:  # noqa: ANN401 - whatever YAML held
    """Convert, naming the full path of the key at fault."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        path = where
        for at in (" - at `$", " - at `key` in `$"):
            if at in message:
                message, _, tail = message.partition(at)
                path = f"{where}{tail.rstrip('`')}".lstrip(".")
        raise ClusterConfigError(f"{path}: {message}" if path else message) from error
