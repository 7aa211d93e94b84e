"""Schema of an application's `args`, and the conversion that names the key of each mistake."""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from cluster.config.literals import literal_values_at
from cluster.errors import ClusterConfigError
from kv_transfer.config import KVNetwork
from kv_transfer.store import StoreConfig
from replicas.config import Role
from replicas.sampling_params import GenerationConfigSource

PolicyName = Literal[
    "least_delay",
    "most_empty_slots",
    "round_robin",
    "random",
    "least_loaded",
    "power_of_two",
    "prefix_aware",
    "waiting_and_running",
    "cache_and_load",
]
"""least_delay: fewest seconds added to this request, to those already there and to later ones.
most_empty_slots: most free decode slots; for prefill, fewest waiting tokens.
round_robin: each place in turn, whatever the load; a baseline.
random: any place that fits, all equally likely.
least_loaded: fewest requests.
power_of_two: the less loaded of two random places.
prefix_aware: most of the prompt cached, unless the load is out of balance (SGLang).
waiting_and_running: least 4 x waiting + running (vLLM's data parallel balancer).
cache_and_load: fewest tokens to prefill plus tokens held (Dynamo's KV router).
Ties: most_empty_slots takes the first by name, all others rotate."""

OrderName = Literal["predicted", "decode_first", "prefill_first"]
"""predicted: a decode slot is reserved just before the prompt is computed, earlier by the time
that slots have to be waited for. With `admission` it acts as decode_first, because admitted
requests are computed soon.
decode_first: a decode slot is reserved together with the prompt, and stays empty while the prefill
engine computes other prompts first. Choose it where an error after the first token is worse than
a late first token.
prefill_first: the prompt is computed first. Its KV keeps its blocks on the prefill replica until a
slot is free; after `TransferConfig.rendezvous_s` it is dropped and computed again."""

ToolParserName = Literal[
    "hermes", "llama3_json", "qwen3_coder", "deepseek_v3", "deepseek_v31", "deepseek_v32",
    "deepseek_v4", "deepseek_v41", "openai", "gemma4", "mistral", "pythonic", "llama4_pythonic",
    "glm45", "glm47", "kimi_k2", "kimi_k3",
]  # fmt: skip
"""Formats of tool calls, see docs/tools.md."""

ReasoningParserName = Literal[
    "qwen3", "deepseek_r1", "deepseek_v3", "deepseek_v4", "deepseek_v41", "openai_gptoss", "gemma4",
    "mistral", "glm45", "glm47", "kimi_k2", "kimi_k3",
]  # fmt: skip
"""Formats of reasoning, see docs/tools.md."""

LEAST_ONGOING_REQUESTS = 1024
"""Smallest limit of open requests that an ingress derives when none is configured."""

LARGEST_BODY_BYTES = 64 * 2**20
"""Upper bound of `max_body_bytes`. Serve's own proxies do not know an ingress's configuration and
read up to this many bytes."""

DEMO_MODEL = "demo"
NODE_HOST = "node"

T = TypeVar("T")


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pool of equal replicas.

    Attributes:
        replicas: Number of replicas; with `max_replicas`, the minimum.
        max_replicas: Maximum number of replicas; None disables autoscaling. It needs the
            application's `autoscaling_policy`, see docs/autoscaling.md.
        gang_size: Replicas per gang, see docs/gangs.md. A gang steps together and divides the
            model's experts among its replicas. `replicas` must be a multiple of it. A lost replica
            ends its gang, and Serve starts a new one.
        num_cpus: CPUs that Ray reserves for each replica's actor.
        resources: Further Ray resources of each replica, such as `{TTNPU: 1}`.
        drain_timeout_s: Seconds that a stopping replica gives its requests to finish. After three
            quarters of them the rest migrate to other replicas, where there is room.
    """

    replicas: int = 1
    max_replicas: int | None = None
    gang_size: int = 1
    num_cpus: float = 0.1
    resources: Mapping[str, float] = {}
    drain_timeout_s: float = 600.0


class PoolArgs(PoolConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool as the config file has it.

    Attributes:
        engine: Engine settings of this pool; they override those of `args.engine`.
    """

    engine: dict[str, Any] = {}


MAX_TENANT_CHARS = 128
"""Longest name of a tenant."""


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one tenant, over all ingresses; see docs/keys.md.

    Attributes:
        max_requests: Most open requests, queued and running; more get 429.
        requests_per_minute: Most requests a minute; more get 429. As many may come at once after a
            pause of a minute.
        tokens_per_minute: Most tokens a minute, of prompts and outputs. Requests get 429 while more
            have been used than the minutes so far allow.
        min_priority: Smallest `priority`, which goes first, that its requests may have; smaller
            ones are raised to it. None: any.
        max_priority: Largest `priority` likewise.
    """

    max_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    min_priority: int | None = 0
    max_priority: int | None = None

    def __post_init__(self) -> None:
        """Refuse limits below 1, and an empty range of priorities."""
        for name in ("max_requests", "requests_per_minute", "tokens_per_minute"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ValueError(f"`{name}` must be at least 1, got {limit}")
        low, high = self.min_priority, self.max_priority
        if low is not None and high is not None and low > high:
            raise ValueError(f"`min_priority` {low} is more than `max_priority` {high}")


class TenantConfig(TenantLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Share and limits of one tenant that a gateway names.

    With API keys, limits are in the file of keys, and only `weight` and `priority` are set here.

    Attributes:
        weight: The tenant's share of slot time. While both have queued requests, a tenant of weight
            2 gets twice the slot-seconds of a tenant of weight 1.
        priority: Requests of tenants with a smaller number go first.
    """

    weight: float = 1.0
    priority: int = 0


class KeyTenant(TenantLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant in the file of API keys, see docs/keys.md.

    Attributes:
        keys: Its API keys as `ttserve keys new` prints them: "sha256:" and 64 hexadecimal digits.
            Several keys let a client change to a new one before the old one is removed.
        admin: Whether its keys open the operations routes, such as /debug/slots, and those of the
            admin server.
        models: Models and adapters that it may use, by their names in requests; null allows all.
            Others do not exist for it (404).
    """

    keys: list[str]
    admin: bool = False
    models: list[str] | None = None


class AdmissionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Objectives and tenants of admission control; see docs/overload.md.

    Attributes:
        ttft_s: Objective for the time to first token, in seconds; None sets none. A request that
            would have to wait longer gets 429 at once.
        tpot_s: Objective for the mean time per further token, in seconds; None sets none.
        max_queued_tokens: Most prompt tokens queued at one ingress; more get 429. None sets no
            limit.
        tenant_header: Header with the tenant's name. Your gateway must set it, and remove it from
            clients' requests. None: all requests belong to one tenant.
        tenants: Settings of single tenants, by name; others get the defaults below.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    max_queued_tokens: int | None = None
    tenant_header: str | None = None
    tenants: dict[str, TenantConfig] = {}


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Queueing and placement of requests.

    Attributes:
        max_queued_requests: Most requests queued for a slot at one ingress; more get 429. A request
            whose prompt is already being computed counts only if no empty slot is left for it. One
            that has its first token is never refused.
        queue_timeout_s: Longest wait for a slot, in seconds; then 408.
        max_attempts: Prefill replicas tried for one prompt, and replicas that one request may lose.
            The limit keeps a request that kills its replicas from killing all of them.
        min_remote_prefill_tokens: Prompts of fewer tokens are computed on the decode replica, all
            others in the prefill pool; 0 sends every prompt there. None compares the predicted
            times, see docs/policies.md.
        policy: How a DP group is chosen for a request, see docs/policies.md.
        order: When the decode slot of a prompt from the prefill pool is reserved, see
            docs/policies.md. With `admission`, "predicted" acts as "decode_first".
        admission: Objectives and tenants. None admits every request that the queue has room for.
        route_log: Absolute path of a folder in which each ingress logs every placement and its
            candidates, for `python -m cluster.lab.replay`; None logs nothing. A placement takes
            about 350 bytes per DP group, and files are not rotated.
    """

    max_queued_requests: int = 256
    queue_timeout_s: float = 60.0
    max_attempts: int = 3
    min_remote_prefill_tokens: int | None = None
    policy: PolicyName = "least_delay"
    order: OrderName = "predicted"
    admission: AdmissionConfig | None = None
    route_log: str | None = None


class IngressConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP edge.

    Attributes:
        replicas: Ingress processes behind the load balancer; each can serve every request.
        num_cpus: CPUs that Ray reserves for each ingress.
        resources: Further Ray resources of each ingress, such as `{edge: 0.001}`. Ingresses then
            start only on hosts that offer the resource with `ray start --resources`.
        max_ongoing_requests: Most open requests of one ingress, running or queued; more get 429.
            None takes twice the ingress's share of the decode slots, plus
            `router.max_queued_requests`, and at least 1,024.
        max_body_bytes: Largest request body; larger ones get 413. At most 64 MiB.
        request_timeout_s: Longest time for a whole request, in seconds. Then it is aborted and gets
            408, or an error as the last event of its stream. Clients cannot change it.
        drain_timeout_s: Seconds that a stopping ingress gives its requests to finish. Streams that
            take longer end with an event that says how to continue them. None: the longest
            `drain_timeout_s` of the pools.
        share_prefix_cache: Whether tenants share cached prompts. Sharing saves work, but lets a
            tenant detect what others have asked. It has no effect without either `api_keys`
            or `router.admission.tenant_header`.
        prompt_tokens_details: Whether answers have `usage.prompt_tokens_details.cached_tokens`. It
            shows a client which prompts of other clients are cached, if they share a cache.
        route_header: Whether requests with `x-debug-route` get an answer header with replica names,
            predicted times and the number of cached tokens (see `prompt_tokens_details`).
        response_store_bytes: Most memory for the answers of /v1/responses that an ingress keeps, so
            that clients can continue or read them at any ingress; 0 keeps none, and refuses
            `previous_response_id` and `background`.
        response_store_age_s: Seconds for which an answer is kept, at most.
        stream_keep_alive_s: Seconds without an event after which a stream sends a comment, which
            clients ignore, so that load balancers do not close it.
        unknown_fields: What becomes of fields in request bodies that no API documents, at any
            depth. "ignore" drops them, and the header `x-ttserve-ignored-fields` of the answer
            names up to 16 of them. "refuse" answers 400. Documented fields that are not supported
            are always refused.
        root_path: Path under which a proxy in front of this server shows it, such as "/llm"; "" for
            none. Requests are served with it and without it, as proxies may strip it, and
            /openapi.json names it.
        trust_request_chat_template: Whether chats may bring a `chat_template` of their own. It runs
            in a sandbox that does not limit its time and memory, so only for trusted clients.
        api_keys: Absolute path of the file of API keys on each host of an ingress, see
            docs/keys.md. A change of the file acts within seconds, without a restart. Every route
            but the health checks then needs a key, which also names the tenant. None: no keys.
        cors_origins: Origins of web pages that may use the API from a browser, such as
            "https://chat.example.com"; "*" allows all, which is for endpoints with API keys. Empty:
            none.
        allowed_hosts: Host names, without port, that requests may have in `Host`; others get 421.
            Loopback names are always allowed. A listener that is not on a loopback address also
            allows any IP address, and with None any name.
    """

    replicas: int = 1
    num_cpus: float = 0.1
    resources: Mapping[str, float] = {}
    max_ongoing_requests: int | None = None
    max_body_bytes: int = 8 * 2**20
    request_timeout_s: float = 3600.0
    drain_timeout_s: float | None = None
    share_prefix_cache: bool = False
    prompt_tokens_details: bool = False
    route_header: bool = False
    response_store_bytes: int = 64 * 2**20
    response_store_age_s: float = 86400.0
    stream_keep_alive_s: float = 15.0
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    root_path: str = ""
    trust_request_chat_template: bool = False
    api_keys: str | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: list[str] | None = None


class AdminConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The admin server, see docs/admin.md. It runs on the head node of the Ray cluster.

    Attributes:
        host: IP address that it listens on. Other than a loopback address it needs `api_keys`.
        port: TCP port that it listens on.
        api_keys: Absolute path of the file of API keys on the head node, in the form of
            `ingress.api_keys`. Requests need the key of a tenant with `admin: true`. A change of
            the file acts within seconds. None: no keys.
        certificate: Absolute path of a PEM file with a certificate, its chain and its private key.
            With it the server speaks TLS alone; None: plain HTTP.
    """

    host: str = "127.0.0.1"
    port: int = 8002
    api_keys: str | None = None
    certificate: str | None = None


class ClusterArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `args` of the application.

    Attributes:
        pools: Either `prefill` and `decode`, or `both` alone.
        model: Absolute path of a model folder, or "demo" for the bundled model.
        model_name: Model name in requests, or a list of names for the same model; metrics have the
            first one. None takes the folder's name, or the repository's name for a snapshot in the
            Hugging Face cache.
        generation_config: Source of the sampling values of requests that leave them out. "auto" is
            the model folder's generation_config.json: temperature, top_p, top_k, min_p,
            repetition_penalty, and max_new_tokens as the limit of chats that state none. "vllm" is
            neutral: temperature 1, all tokens.
        tool_call_parser: Format of the model's tool calls, see docs/tools.md; None refuses requests
            with tools. The names are those of vLLM's `--tool-call-parser`.
        reasoning_parser: Format of the model's reasoning, which then comes apart from the content;
            None leaves it in the content. The names are those of vLLM's `--reasoning-parser`.
        data_host: IP address on which engines listen for ingresses and for each other; wildcards
            are refused. A cluster of several hosts needs "node": each host's address in Ray.
        kv_connector: How KV moves: "p2p" from prefill to decode replicas, "pooled" through a store,
            "multi" for both, or "module:Class". Replicas of the pool `both` do not use "p2p".
        kv_store: The store of "pooled" and "multi", shared by all replicas, see `args.kv_store`
            below.
        kv_network: "encrypted", or "plain" on a network that nothing else can reach: there KV is
            not encrypted, and faster.
        key_file: Absolute path of a file with the cluster's secrets, on every host; a Kubernetes
            Secret, for example. One secret a line, in hexadecimal or base64, at least 16 bytes. The
            first one is used, all are accepted. Replicas restart when the path changes, not when
            the content does. None makes a secret that Ray stores; if others use the Ray cluster
            too, give a file.
        engine: Settings of every engine; a pool's `engine` overrides them.
        router: Queueing and placement of requests.
        ingress: The HTTP edge.
        admin: The admin server; None starts none.
        faults: Entries of a fault plan, see docs/fault-plans.md. Only for pools whose engines run
            on a simulated mesh.
        fault_epoch_unix_s: Unix time at which the plan starts; `cluster.lifecycle.application.bind`
            sets it.
    """

    pools: dict[Role, PoolArgs]
    model: str = DEMO_MODEL
    model_name: str | list[str] | None = None
    generation_config: GenerationConfigSource = "auto"
    tool_call_parser: ToolParserName | None = None
    reasoning_parser: ReasoningParserName | None = None
    data_host: str = "127.0.0.1"
    kv_connector: str = "p2p"
    kv_store: StoreConfig | None = None
    kv_network: KVNetwork = "encrypted"
    key_file: str | None = None
    engine: dict[str, Any] = {}
    router: RouterConfig = RouterConfig()
    ingress: IngressConfig = IngressConfig()
    admin: AdminConfig | None = None
    faults: list[Any] = []
    fault_epoch_unix_s: float = 0.0

    @property
    def is_disaggregated(self) -> bool:
        """Whether prefill and decode have pools of their own."""
        return "both" not in self.pools

    @property
    def engine_options(self) -> list[tuple[str, list[Role], dict[str, Any]]]:
        """Engine settings: the key that holds them, the pools that get them, and the values."""
        of_pools = [(f"args.pools.{r}.engine", [r], pool.engine) for r, pool in self.pools.items()]
        return [("args.engine", list(self.pools), self.engine), *of_pools]


def convert(raw: Any, kind: type[T], where: str) -> T:  # noqa: ANN401 - whatever YAML held
    """Convert plain values into a struct.

    Args:
        raw: The values.
        kind: The struct's class.
        where: Path of the values in the file; "" for the file itself.

    Raises:
        ClusterConfigError: A key is unknown, missing or mistyped; the message has its full path.
    """
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        message, path = str(error), where
        for at in (" - at `$", " - at `key` in `$"):
            if at in message:
                message, _, tail = message.partition(at)
                tail = tail.rstrip("`")
                path = f"{where}{tail}".lstrip(".")
                words = literal_values_at(kind, tail, is_key="key" in at)
                if words and message.startswith("Invalid enum value"):
                    message = f"{message}: one of {', '.join(words)}"
        raise ClusterConfigError(f"{path}: {message}" if path else message) from error
