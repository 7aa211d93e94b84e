"""A Ray Serve config file with one ttserve application, read and overridden but not yet resolved.

Keys that Serve itself would ignore are refused. `cluster.config.resolve` checks the application's
`args`, after all overrides.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
import yaml

from cluster.config.front import is_loopback
from cluster.config.schema import convert
from cluster.errors import ClusterConfigError
from replicas.errors import FaultPlanError
from replicas.faults import FaultPlan

IMPORT_PATH = "cluster.app:build"

_NO_CHANGES: Mapping[str, Any] = MappingProxyType({})


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serve's `http_options`; `host` is required, because Serve's own default is every address.

    Attributes:
        host: Address of the public listener; a loopback address keeps other hosts out.
        port: Port of the public listener; the operations listener has the next one.
        root_path: Prefix under which a gateway serves the API.
        request_timeout_s: Refused; set `args.ingress.request_timeout_s` instead.
        keep_alive_timeout_s: Seconds for which an idle connection stays open. HAProxy treats 90,
            Serve's own default, as 10.
    """

    host: Annotated[str, msgspec.Meta(min_length=1)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65534)] = 8000
    root_path: str = ""
    request_timeout_s: float | None = None
    keep_alive_timeout_s: int = 10

    def __post_init__(self) -> None:
        """Refuse `request_timeout_s`, which ingresses ignore; files written by Serve have null."""
        if self.request_timeout_s is not None:
            raise ValueError(
                "`request_timeout_s` has no effect; set args.ingress.request_timeout_s instead"
            )


class DeploymentOverride(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of an application's `deployments`; values are checked by Serve.

    Serve's limits of requests must be null, as in files written by Serve; set those of
    `args.ingress` instead.
    """

    name: str
    num_replicas: Any = None
    max_ongoing_requests: None = None
    max_queued_requests: None = None
    backpressure_config: None = None
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


class PolicyArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of `cluster.lifecycle.autoscaling.ApplicationPolicy`.

    Attributes:
        ttft_s: Objective for the time to first token, in seconds; null sets none.
        tpot_s: Objective for the mean time per further token, in seconds; null sets none.
    """

    ttft_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    tpot_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


class AutoscalingPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An application's `autoscaling_policy`; only one policy exists."""

    policy_function: Literal["cluster.lifecycle.autoscaling:ApplicationPolicy"]
    policy_kwargs: PolicyArguments = PolicyArguments()


class ApplicationFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The entry of `applications`.

    Attributes:
        name: Serve's name of the application.
        import_path: Must be `cluster.app:build`.
        args: The cluster's configuration, see `args` below.
        route_prefix: Path under which Serve routes to the application.
        runtime_env: Ray's runtime environment.
        deployments: Serve's overrides of single deployments.
        logging_config: Serve's logging.
        external_scaler_enabled: Whether Serve lets an external program scale.
        autoscaling_policy: The policy that scales pools that have `max_replicas`.
    """

    name: str
    import_path: str
    args: dict[str, Any]
    route_prefix: str = "/"
    runtime_env: dict[str, Any] = {}
    deployments: list[DeploymentOverride] = []
    logging_config: dict[str, Any] = {}
    external_scaler_enabled: bool = False
    autoscaling_policy: AutoscalingPolicy | None = None


class ServeFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole file. Its own keys are checked; the application's `args` are not.

    Attributes:
        http_options: Address and options of the public listener.
        applications: A list of one application.
        proxy_location: Hosts that run a proxy: all of them, the head alone, or none.
        grpc_options: Serve's gRPC proxy.
        controller_options: Serve's controller.
        logging_config: Serve's logging.
        tracing_config: Serve's tracing.
        target_capacity: Serve's share of each deployment's replicas, in percent.
    """

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
        """The application's `args`, which `cluster.app:build` gets."""
        return self.applications[0].args

    @property
    def url(self) -> str:
        """URL of the endpoint for a client on this host."""
        host = self.http_options.host.strip("[]")
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.http_options.port}"

    @property
    def warning(self) -> str:
        """Warning that other hosts can use the endpoint without keys; "" if they cannot."""
        ingress = self.args.get("ingress")
        if isinstance(ingress, Mapping) and ingress.get("api_keys") is not None:
            return ""
        return public_warning(self.http_options.host)

    def override(
        self,
        *,
        args: Mapping[str, Any] = _NO_CHANGES,
        http_options: Mapping[str, Any] = _NO_CHANGES,
    ) -> "ServeFile":
        """Return a copy of the file with other values.

        Args:
            args: Changes of the application's `args`, merged into nested mappings; None keeps the
                file's value. Another `model` drops the file's `model_name`.
            http_options: Changes of `http_options`, likewise.

        Raises:
            ClusterConfigError: The `http_options` are not valid. `resolve` checks the `args`.
        """
        new_args = _merged(self.args, args)
        if args.get("model") is not None and "model_name" not in args:
            new_args.pop("model_name", None)
        http = _merged(msgspec.structs.asdict(self.http_options), http_options)
        return msgspec.structs.replace(
            self,
            http_options=convert(http, HttpOptions, "http_options"),
            applications=[msgspec.structs.replace(self.applications[0], args=new_args)],
        )


def public_warning(host: str) -> str:
    """Return the warning for a host that other hosts can reach; "" for a loopback address."""
    if is_loopback(host):
        return ""
    return (
        f"http_options.host is {host}: without API keys (args.ingress.api_keys) every client that "
        "reaches this address can use the model, unless a gateway in front of it checks keys"
    )


def read_serve_file(path: str | Path) -> ServeFile:
    """Read a Ray Serve config file.

    Raises:
        ClusterConfigError: The file cannot be read, a key outside of `args` is unknown or mistyped,
            or the file does not have exactly one ttserve application.
    """
    file = convert(_read_yaml(path), ServeFile, "")
    if len(file.applications) != 1:
        raise ClusterConfigError(
            f"applications must have exactly one ttserve application, got {len(file.applications)}"
        )
    import_path = file.applications[0].import_path
    if import_path != IMPORT_PATH:
        raise ClusterConfigError(
            f"applications[0].import_path must be {IMPORT_PATH}, got {import_path!r}"
        )
    _check_scaling(file.applications[0])
    return file


def _check_scaling(application: ApplicationFile) -> None:
    """Refuse `max_replicas` without an autoscaling policy, and a policy without `max_replicas`.

    Raises:
        ClusterConfigError: One of the two is missing; the message says which.
    """
    pools = application.args.get("pools")
    pools = pools if isinstance(pools, Mapping) else {}
    scaled = [
        role
        for role, pool in pools.items()
        if isinstance(pool, Mapping) and pool.get("max_replicas") is not None
    ]
    if scaled and application.autoscaling_policy is None:
        raise ClusterConfigError(
            f"applications[0].args.pools.{scaled[0]}.max_replicas needs "
            "applications[0].autoscaling_policy, see docs/autoscaling.md"
        )
    if application.autoscaling_policy is not None and not scaled:
        raise ClusterConfigError(
            "applications[0].autoscaling_policy needs a pool with max_replicas"
        )


def read_faults(path: str | Path) -> list[Any]:
    """Read a fault plan, YAML or JSON.

    Returns:
        The plan's entries, for `args.faults`.

    Raises:
        ClusterConfigError: The file cannot be read, or an entry is not valid; the message names
            file and entry.
    """
    raw = _read_yaml(path)
    try:
        FaultPlan.parse(raw)
    except FaultPlanError as error:
        raise ClusterConfigError(f"{path}: {error}") from error
    return list(raw)


def _read_yaml(path: str | Path) -> Any:  # noqa: ANN401 - any YAML value
    try:
        return yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ClusterConfigError(f"cannot read {path}: {error}") from error


def _merged(read: Any, changes: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as above
    """Merge changes into a mapping; leave any other value for `resolve` to refuse."""
    if not isinstance(read, dict):
        return read
    changed = dict(read)
    for key, value in changes.items():
        if isinstance(value, Mapping):
            changed[key] = _merged(read.get(key, {}), value)
        elif value is not None:
            changed[key] = value
    return changed
