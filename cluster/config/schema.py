"""What a person writes under an application's `args`, and how a mistake in it is named."""

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
"""least_delay: where it adds the fewest seconds, to itself, to all there and to who will come.
most_empty_slots: where the most decode slots are free, prefill where the fewest tokens wait.
round_robin: in turn, whatever the load; a baseline to compare others with.
random: anywhere that fits, each place as likely.
least_loaded: where the fewest requests are.
power_of_two: the less loaded of two that are drawn.
prefix_aware: where the most of the prompt is cached, unless load is out of balance (SGLang).
waiting_and_running: least of 4 x waiting + running (vLLM's data parallel balancer).
cache_and_load: least of tokens to prefill and tokens held (Dynamo's KV router).
Equal places: most_empty_slots takes the first by name, all others take them in turn."""

OrderName = Literal["predicted", "decode_first", "prefill_first"]
"""predicted: a decode slot is reserved when the prompt is about to be computed, and so much earlier
as slots have to be waited for. With `admission` as decode_first: who is let in is about to be.
decode_first: a decode slot is reserved with the prompt, and stands idle while others are computed
before it. Better where an error after the first token is worse than a late one.
prefill_first: the KV waits with the prefill replica for a slot, takes its blocks there, and is
computed again after `TransferConfig.rendezvous_s`."""

LEAST_ONGOING_REQUESTS = 1024
"""Open requests of an ingress, unless the configuration says otherwise or the slots need more."""

LARGEST_BODY_BYTES = 64 * 2**20
"""No ingress can be told to read more: what stands before it does not know its configuration."""

DEMO_MODEL = "demo"
NODE_HOST = "node"

T = TypeVar("T")


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One pool of equal replicas.

    Attributes:
        replicas: How many; the fewest where there may be more.
        max_replicas: The most that there may be; None keeps as many as `replicas`. Who decides is
            the application's `autoscaling_policy`, see docs/autoscaling.md.
        gang_size: How many replicas step together as one data-parallel group whose ranks share out
            the experts of their model: `replicas` is a multiple of it. A replica that is lost ends
            its gang, and Serve starts that anew. See docs/gangs.md.
        num_cpus: CPUs that Ray sets aside for each replica's actor.
        resources: Further Ray resources of each, for one `{TTNPU: 1}`.
        drain_timeout_s: How long a replica that is told to stop lets its requests finish; after
            three quarters of it they go on elsewhere, where there is room.
    """

    replicas: int = 1
    max_replicas: int | None = None
    gang_size: int = 1
    num_cpus: float = 0.1
    resources: Mapping[str, float] = {}
    drain_timeout_s: float = 600.0


class PoolArgs(PoolConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pool as it is written.

    Attributes:
        engine: Fields of the engine's configuration, over those of `ClusterArgs.engine`.
    """

    engine: dict[str, Any] = {}


MAX_TENANT_CHARS = 128
"""Of the name of a tenant, which a header brings."""


class TenantConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one tenant may have.

    Attributes:
        weight: Slot-seconds that it gets for each that a tenant of weight 1 gets, as long as both
            have requests that wait.
        priority: Its requests go before those of tenants with a larger number.
        max_requests: Requests that it may have at one ingress, waiting or not; more get 429.
    """

    weight: float = 1.0
    priority: int = 0
    max_requests: int | None = None


class AdmissionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is let in, and when; see docs/overload.md.

    Attributes:
        ttft_s: Seconds that a first token may take; None: no matter. Whoever would have to wait
            longer gets 429 at once.
        tpot_s: Seconds that each further token may take in the mean; None: no matter.
        max_queued_tokens: Prompt tokens of those who wait at one ingress; more get 429.
        tenant_header: Header that names the tenant, which whoever stands before the ingresses sets
            and takes from clients; None: there is one tenant.
        tenants: What tenants may have that are not as the others.
        share_prefix_cache: Whether tenants find each other's prompts in the prefix caches. Sharing
            saves work, and lets a tenant measure what another one has asked. Without a
            `tenant_header` there is one tenant, and this changes nothing.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    max_queued_tokens: int | None = None
    tenant_header: str | None = None
    tenants: dict[str, TenantConfig] = {}
    share_prefix_cache: bool = False


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How requests are placed.

    Attributes:
        max_queued_requests: Requests that may wait for a slot at one ingress; more get 429. Those
            whose prompt is under way count from where there are more of them than empty slots;
            with a first token they wait, however many there are.
        queue_timeout_s: How long one may wait; then 408.
        max_attempts: Replicas that are asked for one prompt, and that a request may lose in all, of
            either kind: they may have died of it.
        min_remote_prefill_tokens: Shorter prompts are computed on the decode replica itself, all
            others by the prefill pool: 0 sends every prompt there. None goes by what either is
            predicted to take, see `cluster.routing.conditional_prefill`.
        policy: Which DP group a request gets, see `cluster.routing.cost`.
        order: When a decode slot is reserved for a prompt that moves, see `OrderName`.
        admission: Objectives, and tenants; None lets everybody in who finds room in the queue.
        route_log: Folder, an absolute path, in which each ingress writes a file of every placement
            and all that it was chosen among, which `python -m cluster.lab.replay` reads; None
            writes nothing. What is in it grows with the requests and the replicas: about 350 bytes
            for each DP group.
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
        num_cpus: CPUs that Ray sets aside for each.
        resources: Further Ray resources of each, for one `{edge: 0.001}`: they start only on hosts
            where `ray start --resources` says that there is some.
        max_ongoing_requests: Requests that one of them holds open at a time, running or queued;
            more get 429. None takes twice the ingress's share of the decode slots and
            `router.max_queued_requests`, and at least 1,024.
        max_body_bytes: Larger request bodies get 413; at most 64 MiB.
        request_timeout_s: How long a request may take in all; then it is aborted and gets 408, or
            a last event with the error. Clients cannot say another time.
        prompt_tokens_details: Whether answers say how many prompt tokens were cached
            (`usage.prompt_tokens_details.cached_tokens`). It tells a client exactly which prompts
            of others are cached, as far as their caches are shared.
        route_header: Whether `x-debug-route` is answered, with names of replicas, predicted times
            and, likewise, the number of cached tokens.
        stream_keep_alive_s: A stream that has nothing to send for so long sends a comment, which
            clients ignore, so that no load balancer takes it for dead.
        allowed_hosts: Names that a request's `Host` header may have, without port; others get 421.
            Names of the loopback interface are always allowed, and where the listener has no
            loopback address any address. None allows no other name on a loopback address, and any
            name elsewhere.
    """

    replicas: int = 1
    num_cpus: float = 0.1
    resources: Mapping[str, float] = {}
    max_ongoing_requests: int | None = None
    max_body_bytes: int = 8 * 2**20
    request_timeout_s: float = 3600.0
    prompt_tokens_details: bool = False
    route_header: bool = False
    stream_keep_alive_s: float = 15.0
    allowed_hosts: list[str] | None = None


class ClusterArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `args` of the application.

    Attributes:
        pools: Either `prefill` and `decode`, or `both` alone.
        model: Absolute path of a model folder, or "demo" for the bundled model.
        model_name: Name that requests give; None takes the folder's, or of a snapshot in Hugging
            Face's cache the model's.
        generation_config: Source of the sampling values of requests that leave them out. "auto" is
            the model folder's generation_config.json: temperature, top_p, top_k, and max_new_tokens
            as the limit of chats that state none. "vllm" is neutral: temperature 1, all tokens.
        data_host: Address on which engines listen for ingresses and for each other, a number and no
            wildcard; "node" takes each host's own, as Ray knows it, which a cluster of several
            hosts needs.
        kv_connector: How KV moves: "p2p" between the pools, "pooled" through a store, "multi" by
            either, or "module:Class". Replicas of the pool `both` have no use for "p2p".
        kv_store: The store of "pooled" and "multi", one for all replicas; fields of
            `kv_transfer.store.StoreConfig`.
        kv_network: "encrypted", or "plain" where nobody else is on the network between the engines'
            hosts: see `replicas.config.EngineConfig`.
        key_file: File of the secrets by which ingresses and engines know each other and that seal
            tickets between the pools, on every host, for one of a Kubernetes Secret: one a line, in
            hexadecimal or base64, at least 16 bytes each; the first proves and seals, each of them
            is believed. Serve restarts replicas for another name alone, not for what a file says.
            None makes one for each application, and Ray stores it, see `cluster.lifecycle.secret`:
            give a file on a cluster that others use too.
        engine: Fields of every engine's configuration.
        router: How requests are placed.
        ingress: The HTTP edge.
        faults: Entries of a fault plan, which `docs/fault-plans.md` explains; only for pools whose
            engines run on a simulated mesh.
        fault_epoch_unix_s: When the plan starts; `cluster.lifecycle.application.bind` sets it.
    """

    pools: dict[Role, PoolArgs]
    model: str = DEMO_MODEL
    model_name: str | None = None
    generation_config: GenerationConfigSource = "auto"
    data_host: str = "127.0.0.1"
    kv_connector: str = "p2p"
    kv_store: StoreConfig | None = None
    kv_network: KVNetwork = "encrypted"
    key_file: str | None = None
    engine: dict[str, Any] = {}
    router: RouterConfig = RouterConfig()
    ingress: IngressConfig = IngressConfig()
    faults: list[Any] = []
    fault_epoch_unix_s: float = 0.0

    @property
    def is_disaggregated(self) -> bool:
        """Whether prefill and decode have pools of their own."""
        return "both" not in self.pools

    @property
    def engine_options(self) -> list[tuple[str, list[Role], dict[str, Any]]]:
        """Where fields of engines are written, the pools that get them, and the fields."""
        of_pools = [(f"args.pools.{r}.engine", [r], pool.engine) for r, pool in self.pools.items()]
        return [("args.engine", list(self.pools), self.engine), *of_pools]


def convert(raw: Any, kind: type[T], where: str) -> T:  # noqa: ANN401 - whatever YAML held
    """Make a struct of plain values.

    Args:
        raw: The values.
        kind: The struct.
        where: Their path in the file; "" for the file itself.

    Raises:
        ClusterConfigError: A key is unknown, missing or mistyped; names its full path.
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
