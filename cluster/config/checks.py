"""Checks of the configuration that span several keys. Pure.

Each check raises a `ClusterConfigError` that names the key at fault.
"""

import math
import re
from collections.abc import Collection, Mapping
from ipaddress import ip_address
from pathlib import PurePath

from cluster.config.front import is_origin
from cluster.config.schema import (
    DEMO_MODEL,
    LARGEST_BODY_BYTES,
    MAX_TENANT_CHARS,
    NODE_HOST,
    AdminConfig,
    AdmissionConfig,
    ClusterArgs,
    IngressConfig,
    PoolConfig,
    RouterConfig,
    TenantConfig,
)
from cluster.errors import ClusterConfigError
from kv_transfer.addresses import check_listen_host
from kv_transfer.dtypes import is_lossless
from kv_transfer.errors import AddressError, InvalidLayoutError
from kv_transfer.layout import ROW_TOKENS
from kv_transfer.store import STORE_BACKENDS, StoreConfig
from replicas.config import STORE_CONNECTORS, EngineConfig, Role
from replicas.errors import ConfigError
from replicas.generators.expert_placement import place_experts
from replicas.generators.model_config import ModelConfig
from replicas.kv_sizing import kv_rope, resolve_dtype

_CONNECTORS = ("p2p", *STORE_CONNECTORS)
_RESERVED_KV_KEYS = ("kv_connector", "kv_endpoint", "kv_store", "kv_network")
_RESERVED_ENGINE_KEYS = ("model", "role", *_RESERVED_KV_KEYS, "keys", "gang")
_RESERVED_MESH_KEYS = ("faults", "fault_epoch_unix_s")
_MIN_RESOURCE = 0.0001
# The empty name stands for requests without the header.
_TENANT_NAME = re.compile(rf"[!-~](?:[ -~]{{0,{MAX_TENANT_CHARS - 2}}}[!-~])?|")
_MIN_WEIGHT = 1e-3
_LARGEST_PORT = 65535
_HOST = re.compile(r"[a-z0-9_.-]+|\[[0-9a-f:.]+\]")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def check_args(args: ClusterArgs) -> None:
    """Run the checks that need neither engines nor model."""
    roles = set(args.pools)
    if roles not in ({"both"}, {"prefill", "decode"}):
        raise ClusterConfigError(
            f"args.pools must hold prefill and decode, or both alone; got {sorted(roles)}"
        )
    _check_counts(args)
    for role, pool in args.pools.items():
        _check_gang_counts(args, role, pool)
        _check_resources(f"args.pools.{role}", pool.resources)
    _check_resources("args.ingress", args.ingress.resources)
    if args.admin is not None:
        _check_admin(args.admin)
    if args.model != DEMO_MODEL:
        _check_absolute("args.model", args.model, f", or {DEMO_MODEL!r}")
    _check_data_host(args.data_host)
    _check_kv_transfer(args)
    _check_reserved_keys(args)


def check_store_units(store: StoreConfig | None, engines: Mapping[Role, EngineConfig]) -> None:
    """Refuse a store whose units are not whole blocks of every engine."""
    for role, engine in engines.items():
        # The engine's own check reports a block size below 1.
        if store is not None and engine.block_size > 0 and store.unit_tokens % engine.block_size:
            raise ClusterConfigError(
                f"args.kv_store.unit_tokens {store.unit_tokens} is not a multiple of block_size "
                f"{engine.block_size} of pool {role}; use a common multiple of every pool's"
            )


def check_kv_memory(args: ClusterArgs, engines: Mapping[Role, EngineConfig]) -> None:
    """Refuse `kv_cache_memory_bytes` where all engines run on meshes, which ignore it.

    A value for all pools is accepted if one of them is not on a mesh.
    """
    for where, roles, options in args.engine_options:
        on_mesh = all(engines[role].mesh is not None for role in roles)
        if on_mesh and "kv_cache_memory_bytes" in options:
            raise ClusterConfigError(
                f"{where}.kv_cache_memory_bytes is for engines on the CPU: KV on a mesh takes the "
                "memory that the weights leave; remove it, or set num_blocks"
            )


def check_pools(
    pools: Mapping[Role, PoolConfig],
    engines: Mapping[Role, EngineConfig],
    models: Mapping[Role, ModelConfig],
) -> None:
    """Refuse replicas that would share boards, and pools with incompatible KV."""
    for role, engine in engines.items():
        _check_gang_model(role, pools[role].gang_size, engine, models[role])
        _check_visible_devices(role, pools[role].max_replicas or pools[role].replicas, engine)
        if engine.kv_connector is not None and engine.block_size % ROW_TOKENS:
            raise ClusterConfigError(
                f"block_size {engine.block_size} of pool {role} is not a multiple of {ROW_TOKENS}, "
                "the tokens of a row, the unit of KV transfer"
            )
    if "both" not in engines:
        prefill, decode = engines["prefill"], engines["decode"]
        _check_kv_agrees(prefill, decode)
        of_prefill = resolve_dtype(prefill, models["prefill"])
        _check_dtypes(prefill, decode, of_prefill, resolve_dtype(decode, models["decode"]))


def num_decode_slots(pools: Mapping[Role, PoolConfig], engines: Mapping[Role, EngineConfig]) -> int:
    """Return the decode slots of all replicas, with each pool at its largest size."""
    return sum(
        (pool.max_replicas or pool.replicas) * engines[role].max_batch_size
        for role, pool in pools.items()
        if role != "prefill"
    )


def check_root_path(ingress: IngressConfig) -> None:
    """Refuse a root path that no request can begin with.

    Raises:
        ClusterConfigError: It does not begin with a slash, ends with one, or has other characters
            than those of paths.
    """
    if re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", ingress.root_path) is None:
        raise ClusterConfigError(
            f"args.ingress.root_path {ingress.root_path!r} must be empty, or begin with a slash "
            "and not end with one, such as /llm"
        )


def check_ongoing_requests(ingress: IngressConfig, num_slots: int) -> None:
    """Refuse a limit of open requests that would leave some decode slots always empty."""
    limit = ingress.max_ongoing_requests
    if limit is None or limit * ingress.replicas >= num_slots:
        return
    raise ClusterConfigError(
        f"args.ingress.max_ongoing_requests {limit} x {ingress.replicas} ingress replicas is less "
        f"than the {num_slots} decode slots, which could never be filled: set it to "
        f"{-(-num_slots // ingress.replicas)} or more, or remove it"
    )


def _check_hosts(hosts: list[str] | None) -> None:
    for host in hosts or ():
        if not _HOST.fullmatch(host):
            raise ClusterConfigError(
                f"args.ingress.allowed_hosts: {host!r} must be a host name in lower case, without "
                "a port"
            )


def _check_origins(ingress: IngressConfig) -> None:
    for origin in ingress.cors_origins:
        if not is_origin(origin):
            raise ClusterConfigError(
                f"args.ingress.cors_origins: {origin!r} must be an origin, such as "
                "https://chat.example.com, without a path"
            )
    if "*" in ingress.cors_origins and ingress.api_keys is None:
        raise ClusterConfigError(
            'args.ingress.cors_origins: "*" lets any web page use the model through the browser of '
            "a reader who reaches it; name the origins, or set args.ingress.api_keys"
        )


def _check_counts(args: ClusterArgs) -> None:
    counts = {
        "args.ingress.replicas": args.ingress.replicas,
        "args.ingress.max_body_bytes": args.ingress.max_body_bytes,
        "args.router.max_attempts": args.router.max_attempts,
        **{f"args.pools.{role}.replicas": pool.replicas for role, pool in args.pools.items()},
    }
    for key, count in counts.items():
        if count < 1:
            raise ClusterConfigError(f"{key} must be at least 1, got {count}")
    for role, pool in args.pools.items():
        if pool.max_replicas is not None and pool.max_replicas < pool.replicas:
            raise ClusterConfigError(
                f"args.pools.{role}.max_replicas {pool.max_replicas} is less than replicas "
                f"{pool.replicas}, the minimum"
            )
    if args.ingress.max_body_bytes > LARGEST_BODY_BYTES:
        raise ClusterConfigError(
            f"args.ingress.max_body_bytes must be at most {LARGEST_BODY_BYTES}, "
            f"got {args.ingress.max_body_bytes}"
        )
    _check_ingress(args.ingress)
    if args.ingress.api_keys is not None:
        _check_absolute("args.ingress.api_keys", args.ingress.api_keys)
        if args.router.admission is not None and args.router.admission.tenant_header is not None:
            raise ClusterConfigError(
                "args.ingress.api_keys and args.router.admission.tenant_header exclude each other: "
                "a key names its tenant; remove one of them"
            )
    _check_router(args.router, has_keys=args.ingress.api_keys is not None)


def _check_ingress(ingress: IngressConfig) -> None:
    _check_hosts(ingress.allowed_hosts)
    _check_origins(ingress)
    if ingress.response_store_bytes < 0:
        raise ClusterConfigError("args.ingress.response_store_bytes must not be negative")
    if ingress.drain_timeout_s is not None and not 0 <= ingress.drain_timeout_s < math.inf:
        raise ClusterConfigError("args.ingress.drain_timeout_s must be finite and not negative")
    for name in ("stream_keep_alive_s", "response_store_age_s", "request_timeout_s"):
        if not 0 < getattr(ingress, name) < math.inf:
            raise ClusterConfigError(f"args.ingress.{name} must be more than 0 and finite")


def _check_admin(admin: AdminConfig) -> None:
    for name in ("api_keys", "certificate"):
        path = getattr(admin, name)
        if path is not None:
            _check_absolute(f"args.admin.{name}", path)
    if not 0 < admin.port <= _LARGEST_PORT:
        raise ClusterConfigError(
            f"args.admin.port must be between 1 and {_LARGEST_PORT}, got {admin.port}"
        )
    try:
        is_local = ip_address(admin.host).is_loopback
    except ValueError as error:
        raise ClusterConfigError(f"args.admin.host must be an IP address: {error}") from error
    if not is_local and admin.api_keys is None:
        raise ClusterConfigError(
            f"args.admin.host {admin.host} is not a loopback address, and any host that reaches it "
            "could pause the cluster: set args.admin.api_keys, or leave host out"
        )


def _check_router(router: RouterConfig, *, has_keys: bool) -> None:
    if router.max_queued_requests < 0:
        raise ClusterConfigError("args.router.max_queued_requests must not be negative")
    if not router.queue_timeout_s > 0:
        raise ClusterConfigError("args.router.queue_timeout_s must be positive")
    if router.admission is not None:
        _check_admission(router.admission, has_keys=has_keys)
    if router.route_log is not None:
        _check_absolute("args.router.route_log", router.route_log)


def _check_admission(admission: AdmissionConfig, *, has_keys: bool) -> None:
    where = "args.router.admission"
    positive: dict[str, float | None] = {
        f"{where}.ttft_s": admission.ttft_s,
        f"{where}.tpot_s": admission.tpot_s,
        f"{where}.max_queued_tokens": admission.max_queued_tokens,
    }
    for name, tenant in admission.tenants.items():
        positive[f"{where}.tenants.{name}.weight"] = tenant.weight
    for key, value in positive.items():
        if value is not None and not 0 < value < math.inf:
            raise ClusterConfigError(f"{key} must be more than 0 and finite, got {value}")
    for name, tenant in admission.tenants.items():
        if not _TENANT_NAME.fullmatch(name):
            raise ClusterConfigError(
                f"{where}.tenants.{name!r} cannot be the value of a header: use up to "
                f"{MAX_TENANT_CHARS} visible ASCII characters"
            )
        if tenant.weight < _MIN_WEIGHT:
            raise ClusterConfigError(
                f"{where}.tenants.{name}.weight must be at least {_MIN_WEIGHT}, got {tenant.weight}"
            )
        if has_keys and tenant != TenantConfig(weight=tenant.weight, priority=tenant.priority):
            raise ClusterConfigError(
                f"{where}.tenants.{name}: with args.ingress.api_keys, limits of tenants are in the "
                "file of keys; leave only weight and priority here"
            )
    header = admission.tenant_header
    if header is None and admission.tenants and not has_keys:
        raise ClusterConfigError(
            f"{where}.tenants has no effect without {where}.tenant_header; set it to the header "
            "in which your gateway sends the tenant's name, or set args.ingress.api_keys"
        )
    if header is not None and not _HEADER.fullmatch(header):
        raise ClusterConfigError(f"{where}.tenant_header {header!r} is not a valid header name")


def _check_gang_counts(args: ClusterArgs, role: Role, pool: PoolConfig) -> None:
    where = f"args.pools.{role}"
    if pool.gang_size < 1 or pool.replicas % pool.gang_size:
        raise ClusterConfigError(
            f"{where}.replicas {pool.replicas} is not a multiple of gang_size {pool.gang_size}: "
            "replicas of a gang start and end together"
        )
    if pool.gang_size == 1:
        return
    if pool.max_replicas is not None:
        raise ClusterConfigError(
            f"{where}.max_replicas and gang_size exclude each other: remove one of them"
        )
    is_shared = args.data_host == NODE_HOST or not ip_address(args.data_host).is_loopback
    if is_shared and args.kv_network != "plain":
        raise ClusterConfigError(
            f"{where}.gang_size: replicas of a gang exchange data over data_host {args.data_host} "
            "without encryption or authentication; if nothing else can reach that network, set "
            "args.kv_network: plain"
        )


def _check_gang_model(role: Role, size: int, engine: EngineConfig, model: ModelConfig) -> None:
    """Refuse gangs of models without experts, and of engines that are not on the CPU."""
    where = f"args.pools.{role}.gang_size"
    if size == 1 and engine.expert_placement is not None:
        raise ClusterConfigError(f"{where} is 1, so remove expert_placement, or set gang_size")
    if size == 1:
        return
    if engine.mesh is not None or engine.simulated_mesh is not None:
        raise ClusterConfigError(f"{where} is for engines on the CPU: remove it, or the mesh")
    if model.experts is None:
        raise ClusterConfigError(
            f"{where}: the model has no experts, so its replicas need no gang; remove gang_size"
        )
    try:
        place_experts(model.experts.num_experts, size, engine.expert_placement)
    except ConfigError as error:
        raise ClusterConfigError(f"{where}: {error}") from error


def _check_resources(where: str, resources: Mapping[str, float]) -> None:
    for name, quantity in resources.items():
        if name == "CPU":
            raise ClusterConfigError(f"{where}.resources.CPU is not allowed; set {where}.num_cpus")
        # Ray counts in ten-thousandths and treats anything less as 0.
        if quantity != 0 and quantity < _MIN_RESOURCE:
            raise ClusterConfigError(
                f"{where}.resources.{name} must be 0 or at least {_MIN_RESOURCE}, got {quantity}"
            )


def _check_absolute(key: str, path: str, instead: str = "") -> None:
    if not PurePath(path).is_absolute():
        raise ClusterConfigError(
            f"{key} {path!r} is a relative path, but replicas run in other folders: give an "
            f"absolute path{instead}"
        )


def _check_data_host(host: str) -> None:
    if host == NODE_HOST:
        return
    try:
        # A cluster always has a secret: from its key_file, or made for it.
        check_listen_host(host, has_secrets=True)
    except AddressError as error:
        raise ClusterConfigError(
            f"args.data_host: {error}, or {NODE_HOST} for each host's address in Ray"
        ) from error


def _check_choice(key: str, name: str, choices: Collection[str]) -> None:
    if name not in choices and ":" not in name:
        raise ClusterConfigError(
            f"{key} must be one of {', '.join(choices)}, or module:Class; got {name!r}"
        )


def _check_kv_transfer(args: ClusterArgs) -> None:
    """Refuse a KV connector that does not fit the pools or lacks its store."""
    name = args.kv_connector
    if args.key_file is not None:
        _check_absolute("args.key_file", args.key_file)
    _check_choice("args.kv_connector", name, _CONNECTORS)
    if name == "pooled" and args.is_disaggregated:
        raise ClusterConfigError(
            "args.kv_connector pooled does not move KV from the prefill to the decode pool: use "
            "multi, or the pool both"
        )
    if name == "multi" and not args.is_disaggregated:
        raise ClusterConfigError(
            "args.kv_connector multi is for prefill and decode pools: use pooled for the pool both"
        )
    if args.kv_store is not None:
        _check_store(name, args.kv_store)
    elif name in STORE_CONNECTORS:
        raise ClusterConfigError(
            f"args.kv_connector {name} needs args.kv_store, such as "
            "{backend: shm, capacity_bytes: 1073741824}"
        )


def _check_store(connector: str, store: StoreConfig) -> None:
    if connector == "p2p":
        raise ClusterConfigError(
            "args.kv_store is for kv_connector pooled and multi; set one of them, or remove it"
        )
    _check_choice("args.kv_store.backend", store.backend, STORE_BACKENDS)


def _check_reserved_keys(args: ClusterArgs) -> None:
    """Refuse engine settings that only the cluster may set."""
    for where, _, options in args.engine_options:
        for key in _RESERVED_ENGINE_KEYS:
            if key in options:
                raise ClusterConfigError(f"{where}.{key} is set by the cluster; remove it")
        mesh = options.get("simulated_mesh")
        for key in _RESERVED_MESH_KEYS:
            if isinstance(mesh, dict) and key in mesh:
                raise ClusterConfigError(
                    f"{where}.simulated_mesh.{key} is set by the cluster, for one replica; "
                    "name faults in args.faults"
                )


def _check_visible_devices(role: Role, num_replicas: int, engine: EngineConfig) -> None:
    """Refuse `visible_devices` for several replicas, which cannot share boards."""
    devices = engine.mesh.visible_devices if engine.mesh is not None else None
    if devices is not None and num_replicas > 1:
        raise ClusterConfigError(
            f"args.pools.{role}: {num_replicas} replicas cannot share the boards of "
            f"mesh.visible_devices {list(devices)}; remove visible_devices, and Ray gives each "
            "replica its own boards"
        )


def _check_kv_agrees(prefill: EngineConfig, decode: EngineConfig) -> None:
    """Refuse prefill and decode pools whose KV has different meanings."""
    of_prefill, of_decode = _simulated_model(prefill), _simulated_model(decode)
    if of_prefill != of_decode:
        raise ClusterConfigError(
            f"simulated_mesh.model is {of_prefill} in the prefill pool and {of_decode} in the "
            "decode pool; make them equal"
        )
    of_prefill, of_decode = kv_rope(prefill), kv_rope(decode)
    if of_prefill != of_decode:
        raise ClusterConfigError(
            f"the prefill pool ({_generator_name(prefill)}) rotates keys in {of_prefill} order and "
            f"the decode pool ({_generator_name(decode)}) in {of_decode} order, so neither can use "
            "the other's KV; set the same kind of generator for both"
        )


def _check_dtypes(
    prefill: EngineConfig, decode: EngineConfig, of_prefill: str, of_decode: str
) -> None:
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
        f"{engine.role}: mesh.optimizations {engine.mesh.optimizations}"
        for engine in (prefill, decode)
        if engine.mesh is not None
    ]
    why = f" ({', '.join(by)})" if by else ""
    convert = f", or let decode convert: args.pools.decode.engine.kv_accept_dtypes: [{of_prefill}]"
    if decode.kv_connector in STORE_CONNECTORS:
        convert = ""
    raise ClusterConfigError(
        f"dtype is {of_prefill} in the prefill pool and {of_decode} in the decode pool{why}; make "
        f"them equal{convert}"
    )


def _generator_name(engine: EngineConfig) -> str:
    return "ttserve's generator" if engine.generator is None else f"generator {engine.generator}"


def _simulated_model(engine: EngineConfig) -> str | None:
    return engine.simulated_mesh.model if engine.simulated_mesh is not None else None
