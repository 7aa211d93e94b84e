"""The immutable configuration that every process of an application gets, made from its `args`.

The only files read here are the model's configuration files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

import configs
from cluster.config.checks import (
    check_args,
    check_kv_memory,
    check_ongoing_requests,
    check_pools,
    check_root_path,
    check_store_units,
    num_decode_slots,
)
from cluster.config.schema import (
    DEMO_MODEL,
    LEAST_ONGOING_REQUESTS,
    AdminConfig,
    ClusterArgs,
    IngressConfig,
    PoolConfig,
    ReasoningParserName,
    RouterConfig,
    ToolParserName,
    convert,
)
from cluster.errors import ClusterConfigError
from kv_transfer.errors import InvalidLayoutError
from kv_transfer.keys import KeyRing
from replicas.config import EngineConfig, GangConfig, LogprobsMode, Role, SchedulingPolicy
from replicas.errors import ConfigError, FaultPlanError
from replicas.faults import INGRESS, FaultPlan
from replicas.generation_config import read_sampling_defaults
from replicas.generators.checkpoint import check_checkpoint, expected_weights, unused_layers
from replicas.generators.model_config import ModelConfig, load_engine_model, read_architecture
from replicas.generators.plugin.routes import check_route
from replicas.generators.plugin.sizes import check_route_sizes
from replicas.kv_sizing import kv_per_token, longest_sequence
from replicas.mesh_environment import check_generator
from replicas.model_name import model_name
from replicas.sampling_params import SamplingDefaults
from replicas.vllm_options import engine_options


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A checked cluster configuration, made by `resolve`.

    Attributes:
        model_folder: Absolute path of the model's folder.
        served_model_names: Names of the model in requests, the first one for metrics.
        max_model_len: Longest sequence that every pool can hold, in tokens.
        sampling_defaults: Sampling values of requests that leave them out.
        tool_call_parser: Format of the model's tool calls; None if it has none.
        reasoning_parser: Format of the model's reasoning; None if it stays in the content.
        data_host: Address on which engines listen, or "node", see `ClusterArgs`.
        key_file: File of the secrets, see `ClusterArgs`; None if a secret is made.
        pools: Number and Ray resources of each pool's replicas.
        engines: Engine configuration of each pool, without the values that `replica_engine` adds.
        router: Queueing and placement of requests.
        ingress: The HTTP edge; its `max_ongoing_requests` is a number.
        admin: The admin server; None: there is none.
        fault_plan: Faults to inject, by replica.
        fault_epoch_unix_s: Unix time at which the plan starts.
    """

    model_folder: Path
    served_model_names: tuple[str, ...]
    max_model_len: int
    sampling_defaults: SamplingDefaults
    tool_call_parser: ToolParserName | None
    reasoning_parser: ReasoningParserName | None
    data_host: str
    key_file: str | None
    pools: Mapping[Role, PoolConfig]
    engines: Mapping[Role, EngineConfig]
    router: RouterConfig
    ingress: IngressConfig
    admin: AdminConfig | None
    fault_plan: FaultPlan
    fault_epoch_unix_s: float

    @property
    def served_model_name(self) -> str:
        """Name of the model in metrics and of requests that name none."""
        return self.served_model_names[0]

    @property
    def ingress_drain_timeout_s(self) -> float:
        """Seconds that a stopping ingress gives its requests to finish."""
        own = self.ingress.drain_timeout_s
        longest = max(pool.drain_timeout_s for pool in self.pools.values())
        return longest if own is None else own

    @property
    def is_disaggregated(self) -> bool:
        """Whether prefill and decode have pools of their own."""
        return "both" not in self.pools

    @property
    def max_logprobs(self) -> int:
        """Most log probabilities for a token that every pool reports; -1 is no limit."""
        limits = [engine.max_logprobs for engine in self.engines.values()]
        return min((limit for limit in limits if limit != -1), default=-1)

    @property
    def logprobs_mode(self) -> LogprobsMode:
        """What pools report for tokens: logits if one of them does."""
        modes = [engine.logprobs_mode for engine in self.engines.values()]
        return next((mode for mode in modes if not mode.endswith("logprobs")), modes[0])

    @property
    def scheduling_policy(self) -> SchedulingPolicy:
        """Whether requests run in order of priority, which requires it of every pool."""
        policies = {engine.scheduling_policy for engine in self.engines.values()}
        return "priority" if policies == {"priority"} else "fcfs"

    @property
    def is_scaled(self) -> bool:
        """Whether any pool is autoscaled."""
        return any(pool.max_replicas is not None for pool in self.pools.values())


def resolve(raw: Any) -> ClusterConfig:  # noqa: ANN401 - any YAML value
    """Check an application's `args`, up to and including the model's own configuration.

    Args:
        raw: Fields of `ClusterArgs`, as plain values.

    Raises:
        ClusterConfigError: A key is unknown or mistyped, the model folder is not usable, or the
            numbers cannot work together; the message names the keys.
    """
    args = read_args(raw)
    is_demo = args.model == DEMO_MODEL
    folder = demo_model_folder() if is_demo else Path(args.model)
    engines = _engine_configs(args, folder)
    check_store_units(args.kv_store, engines)
    models, max_model_len = _load_models(engines)
    check_kv_memory(args, engines)
    check_pools(args.pools, engines, models)
    return ClusterConfig(
        model_folder=folder,
        served_model_names=_served_names(args),
        max_model_len=max_model_len,
        sampling_defaults=_sampling_defaults(args, folder),
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        data_host=args.data_host,
        key_file=args.key_file,
        pools=MappingProxyType({role: _frozen_pool(pool) for role, pool in args.pools.items()}),
        engines=MappingProxyType(engines),
        router=args.router,
        ingress=_ingress_config(args, engines),
        admin=args.admin,
        fault_plan=_fault_plan(args, engines),
        fault_epoch_unix_s=args.fault_epoch_unix_s,
    )


def read_args(raw: Any) -> ClusterArgs:  # noqa: ANN401 - as `resolve`
    """Convert and check `args` without looking at engines and model; raises like `resolve`."""
    args = convert(raw, ClusterArgs, "args")
    check_args(args)
    return args


def replica_engine(
    config: ClusterConfig, role: Role, rank: int, *,
    host: str, keys: KeyRing, gang: GangConfig | None = None,
) -> EngineConfig:  # fmt: skip
    """Return the engine configuration of one replica.

    Args:
        config: The cluster's configuration.
        role: The replica's pool.
        rank: The replica's number in the pool, which it keeps over restarts.
        host: Address on which the engine listens.
        keys: Secrets that seal tickets and authenticate clients.
        gang: The replica's gang; None if it has none.
    """
    engine = config.engines[role]
    simulated = engine.simulated_mesh
    faults = config.fault_plan.entries_for(f"{role}/{rank}")
    if simulated is not None and faults:
        simulated = msgspec.structs.replace(
            simulated, faults=faults, fault_epoch_unix_s=config.fault_epoch_unix_s
        )
    return msgspec.structs.replace(
        engine,
        simulated_mesh=simulated,
        kv_endpoint=f"tcp://{host}:*",
        keys=keys,
        gang=gang,
    )


def check_generators(config: ClusterConfig, environment: Mapping[str, str]) -> None:
    """Refuse generators that an engine on this host would not find.

    `resolve` does not call it, because generators must exist only on the replicas' hosts.

    Args:
        config: The cluster's configuration.
        environment: This process's environment, which locates checkouts and bundles.

    Raises:
        ClusterConfigError: A generator was not found; the message names the pool and the remedy.
    """
    for role, engine in config.engines.items():
        _check_generator(role, engine, environment)


def check_weights(config: ClusterConfig) -> None:
    """Refuse weights that ttserve's own generators could not load, by their files' headers.

    A folder without any is not refused: weights must exist only on the replicas' hosts.

    Args:
        config: The cluster's configuration.

    Raises:
        ClusterConfigError: The weights are not those that config.json implies; the message names
            the pool, the file and the tensor.
    """
    for role, engine in config.engines.items():
        folder = Path(engine.model)
        is_foreign = engine.generator is not None and not engine.uses_native_generator
        if is_foreign or engine.simulated_mesh is not None or engine.load_format == "random":
            continue
        if not any(folder.glob("*.safetensors*")):
            continue
        try:
            model = load_engine_model(engine)
            shapes, unused = expected_weights(model), unused_layers(model)
            check_checkpoint(folder, shapes, model.quantization, unused)
        except ConfigError as error:
            raise ClusterConfigError(f"args.pools.{role}.engine: {error}") from error


def kv_per_token_lines(config: ClusterConfig) -> list[str]:
    """Return for each pool a line about the KV of a token."""
    return [
        f"{role}: {kv_per_token(engine, load_engine_model(engine))}"
        for role, engine in config.engines.items()
    ]


def demo_model_folder() -> Path:
    """Return the folder of the bundled model."""
    return Path(configs.__file__).resolve().parent / "demo-model"


def _check_generator(role: Role, engine: EngineConfig, environment: Mapping[str, str]) -> None:
    try:
        check_generator(engine, environment)
    except ConfigError as error:
        raise ClusterConfigError(f"args.pools.{role}: {error}") from error


def _engine_configs(args: ClusterArgs, folder: Path) -> dict[Role, EngineConfig]:
    # Checked alone first, so that a mistake in args.engine is reported under that key.
    convert({**_translated(args.engine, "args.engine"), "model": ""}, EngineConfig, "args.engine")
    # "p2p" moves KV from prefill to decode pools only; a single pool has no use for it.
    is_useless = args.kv_connector == "p2p" and not args.is_disaggregated
    connector = None if is_useless else args.kv_connector
    own = {
        "model": str(folder),
        "kv_connector": connector,
        "kv_store": args.kv_store,
        "kv_network": args.kv_network,
    }
    engines = {}
    for role, pool in args.pools.items():
        # Requests queue in the router, not in decode engines, so that it can choose late.
        waiting = {"max_num_waiting": 256 if role == "prefill" else 0}
        where = f"args.pools.{role}.engine"
        options = _translated({**args.engine, **pool.engine}, where)
        fields = {**waiting, **options, **own, "role": role}
        engines[role] = convert(fields, EngineConfig, where)
    return engines


def _translated(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return engine options with those of vLLM in our terms; names the key in errors."""
    try:
        return engine_options(options)
    except ConfigError as error:
        raise ClusterConfigError(f"{where}.{error}") from error


def _load_models(engines: Mapping[Role, EngineConfig]) -> tuple[dict[Role, ModelConfig], int]:
    """Return each pool's model configuration, and the longest sequence that every pool can hold."""
    models, lengths = {}, []
    try:
        for role, engine in engines.items():
            engine.validate()
            # First, because the sizes of an unsupported model may not be readable.
            check_route(engine, read_architecture(engine.model) or "")
            model = models[role] = load_engine_model(engine)
            lengths.append(longest_sequence(engine, model))
            check_route_sizes(engine, model.architectures, lengths[-1])
    except (ConfigError, InvalidLayoutError) as error:
        raise ClusterConfigError(f"args: {error}") from error
    return models, min(lengths)


def _served_names(args: ClusterArgs) -> tuple[str, ...]:
    """Return the names of the model in requests.

    Raises:
        ClusterConfigError: There are none, or one is empty or repeated.
    """
    given = args.model_name
    if given is None or given == "":
        return (DEMO_MODEL if args.model == DEMO_MODEL else model_name(args.model),)
    names = (given,) if isinstance(given, str) else tuple(given)
    if not names or "" in names or len({*names}) < len(names):
        raise ClusterConfigError(
            f"model_name is {list(names)}: give at least one name, each of them once and not empty"
        )
    return names


def _sampling_defaults(args: ClusterArgs, folder: Path) -> SamplingDefaults:
    try:
        return read_sampling_defaults(folder, args.generation_config)
    except ConfigError as error:
        raise ClusterConfigError(
            f"args.model: {error}; correct the file, or set args.generation_config: vllm"
        ) from error


def _fault_plan(args: ClusterArgs, engines: Mapping[Role, EngineConfig]) -> FaultPlan:
    """Return the fault plan; refuse one for replicas that do not exist or are not simulated."""
    try:
        plan = FaultPlan.parse(args.faults)
        replicas: dict[str, int] = {role: pool.replicas for role, pool in args.pools.items()}
        plan.check_targets({**replicas, INGRESS: args.ingress.replicas})
    except FaultPlanError as error:
        raise ClusterConfigError(f"args.faults: {error}") from error
    for i, fault in enumerate(plan.faults):
        for role, engine in engines.items():
            if fault.target.startswith(f"{role}/") and engine.simulated_mesh is None:
                raise ClusterConfigError(
                    f"args.faults: [{i}]: only engines on a simulated mesh can be made to fail; "
                    f"remove the plan, or set args.pools.{role}.engine.simulated_mesh"
                )
    return plan


def _ingress_config(args: ClusterArgs, engines: Mapping[Role, EngineConfig]) -> IngressConfig:
    """Return the ingress configuration with its limit of open requests filled in.

    The derived limit is twice the ingress's share of the decode slots, because requests are not
    spread evenly over ingresses, plus the queue's limit. It is at least `LEAST_ONGOING_REQUESTS`.
    """
    ingress, num_slots = args.ingress, num_decode_slots(args.pools, engines)
    check_root_path(ingress)
    check_ongoing_requests(ingress, num_slots)
    share = -(-num_slots // ingress.replicas)
    derived = max(LEAST_ONGOING_REQUESTS, 2 * share + args.router.max_queued_requests)
    limit = ingress.max_ongoing_requests
    return msgspec.structs.replace(
        ingress,
        resources=MappingProxyType(ingress.resources),
        max_ongoing_requests=derived if limit is None else limit,
    )


def _frozen_pool(pool: PoolConfig) -> PoolConfig:
    """Return the pool with immutable resources, and without its engine settings."""
    return PoolConfig(
        replicas=pool.replicas,
        max_replicas=pool.max_replicas,
        gang_size=pool.gang_size,
        num_cpus=pool.num_cpus,
        resources=MappingProxyType(pool.resources),
        drain_timeout_s=pool.drain_timeout_s,
    )
