"""Configuration of one engine: a frozen struct, validated once and immutable afterwards."""

import math
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import msgspec

from kv_transfer.config import KVNetwork
from kv_transfer.keys import KeyRing
from kv_transfer.store import StoreConfig
from replicas.errors import ConfigError
from replicas.faults import Fault
from replicas.tt.meshes import Arch, MeshSpec, lane_shape, mesh_spec
from replicas.user_cache import user_cache

Role = Literal["prefill", "decode", "both"]
SchedulingPolicy = Literal["fcfs", "priority"]
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
"""Work that an engine accepts: prompts to hand over, decoding (and short prompts), or both."""

STORE_CONNECTORS = ("pooled", "multi")
"""Connectors that require a store."""

NATIVE_TT_GENERATOR = "replicas.generators.ttnn.generator:TTGenerator"
"""Default generator of a mesh."""

MOST_NICE = 19
"""Largest niceness of Linux."""

DEFAULT_KV_BYTES = 256 * 2**20
"""Memory of an engine's KV caches on the CPU, if nothing is configured."""

DEFAULT_STEP_TOKENS = 2048
"""Most tokens of a step that is not configured, except for a longer prompt in one piece."""

TILE_ROWS = 32
"""Rows of a hardware tile. KV is written in tiles; the decode batch of a lane fills one."""

MAX_SCHEDULER_STEPS = 32
"""Most decode passes of one step."""

MAX_SPECULATIVE_TOKENS = 128
"""Most drafts of a row in one pass."""

_NGRAM_SIZE = 5
"""Tokens of the n-grams that are searched by default."""


class SimulatedMeshConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Device with the timing and memory of a TT mesh and no arithmetic; see docs/simulated-mesh.md.

    Attributes:
        model: Name of the model whose time and memory are simulated, such as "Llama-3.1-8B".
        board: Name of the board, such as "n150", "T3K", "Galaxy", "p150".
        compile_s: Seconds of warm-up before the replica is ready. A real mesh takes minutes, which
            the simulator accounts for; for interactive use the default of 0 is enough.
        jitter: Standard deviation of the logarithm of a random factor on every step; 0 is none.
        link_setup_s: Fixed seconds per message of KV blocks, on each side.
        link_bytes_per_s: Bandwidth of a KV transfer, on each side. The default is 100 Gbit/s.
        faults: The faults of this replica; set by the cluster.
        fault_epoch_unix_s: Unix time from which the faults' times count; set by the cluster.
    """

    model: str
    board: str
    compile_s: float = 0.0
    jitter: float = 0.0
    link_setup_s: float = 0.0002
    link_bytes_per_s: float = 12.5e9
    faults: tuple[Fault, ...] = ()
    fault_epoch_unix_s: float = 0.0

    def validate(self) -> None:
        """Check the numbers; names are checked where they are looked up.

        Raises:
            ConfigError: A number is out of range; names it.
        """
        for name in ("compile_s", "jitter", "link_setup_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"simulated_mesh.{name} must not be negative, got {value}")
        if not self.link_bytes_per_s > 0:
            raise ConfigError(
                f"simulated_mesh.link_bytes_per_s must be positive, got {self.link_bytes_per_s}"
            )


_Optimizations: TypeAlias = Literal["performance", "balanced", "accuracy"]
_Calls: TypeAlias = Literal["none", "decode_only", "all"]
_Axis: TypeAlias = Literal["row", "col"]
_MESH_CHOICES: dict[str, tuple[str | None, ...]] = {
    "arch": (*get_args(Arch), None),
    "optimizations": get_args(_Optimizations),
    "trace": get_args(_Calls),
    "sample_on_device": (*get_args(_Calls), None),
    "dispatch_core_axis": (*get_args(_Axis), None),
}


class MeshConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tenstorrent mesh that an engine runs on.

    Attributes:
        name: A known mesh such as "N150" or "T3K", or a shape like "(2,4)"; see
            `replicas.tt.meshes`.
        arch: Architecture of the chips, where `name` is a shape; None is "wormhole".
        optimizations: "performance" keeps weights and KV in bfloat8_b, most of the MLP's weights in
            bfloat4_b; "balanced" all in bfloat8_b; "accuracy" in bfloat16.
        trace: Which calls are captured once and replayed: all, decode only, or none.
        sample_on_device: Which steps draw their tokens on the device: none, decode steps, or all;
            None is all that the generator supports. For the same seed, device and host draw
            different tokens. Requests that the device cannot draw for, such as those with a larger
            top_k, are drawn by the host even in a step that otherwise draws on the device.
        trace_region_size: Bytes of each chip's DRAM reserved for traces; None takes the usual size
            for the mesh and the model, see `replicas.tt.trace_regions`.
        worker_l1_size: Bytes of L1 per worker core; 0 leaves ttnn's default.
        l1_small_size: Bytes of L1 reserved for small buffers.
        fabric: Member of `ttnn.FabricConfig` that replaces the mesh's default.
        dispatch_core_axis: "row" or "col"; None is the mesh's default.
        visible_devices: Boards to open, as indices into the sorted PCI addresses; None takes the
            boards that Ray or the environment has bound the process to.
        weight_cache: Absolute path of the folder for converted weights, also those of third-party
            classes; None is a folder in the user's cache.
        tt_metal_home: Absolute path of a tt-metal checkout, for generators that come from there.
            Refused with any other generator, as is `extra_models_dir`.
        extra_models_dir: Absolute path of a folder of model bundles, each with a
            vllm_metadata.json.
    """

    name: str
    arch: Arch | None = None
    optimizations: _Optimizations = "performance"
    trace: _Calls = "all"
    sample_on_device: _Calls | None = None
    trace_region_size: int | None = None
    worker_l1_size: int = 0
    l1_small_size: int = 0
    fabric: str | None = None
    dispatch_core_axis: _Axis | None = None
    visible_devices: tuple[int, ...] | None = None
    weight_cache: str | None = None
    tt_metal_home: str | None = None
    extra_models_dir: str | None = None

    @property
    def spec(self) -> MeshSpec:
        """The mesh's chips and grid.

        Raises:
            ConfigError: There is no such mesh, or its architecture is not `arch`.
        """
        return mesh_spec(self.name, arch=self.arch)

    @property
    def weight_cache_folder(self) -> Path | None:
        """Folder for the converted weights of all models; None if the user has no home folder."""
        if self.weight_cache:
            return Path(self.weight_cache)
        cache = user_cache()
        return None if cache is None else cache / "weights"

    def validate(self) -> None:
        """Check everything that needs no device.

        Raises:
            ConfigError: A value is out of range or there is no such mesh; names it.
        """
        spec = self.spec
        spec.check_one_host()
        self._validate_choices()
        for name in ("trace_region_size", "worker_l1_size", "l1_small_size"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"mesh.{name} must not be negative, got {getattr(self, name)}")
        if self.trace != "none" and self.trace_region_size == 0:
            raise ConfigError(
                f"mesh.trace {self.trace!r} needs memory for traces and mesh.trace_region_size is "
                "0; remove trace_region_size for the default, or set mesh.trace: none"
            )
        if (self.trace_region_size or 0) >= spec.dram_bytes_per_chip:
            raise ConfigError(
                f"mesh.trace_region_size {self.trace_region_size} leaves no memory of the "
                f"{spec.dram_bytes_per_chip} bytes of each chip of mesh {spec.name}; remove it "
                "for the default"
            )
        self._validate_folders()
        devices = self.visible_devices
        if devices is None:
            return
        if min(devices, default=-1) < 0 or len(set(devices)) != len(devices):
            raise ConfigError(
                f"mesh.visible_devices must be distinct indices of 0 or more, got {list(devices)}"
            )
        if spec.board is not None and len(devices) != spec.num_pcie_devices:
            raise ConfigError(
                f"mesh.visible_devices names {len(devices)} devices, but mesh {spec.name} has "
                f"{spec.num_pcie_devices}; name as many, or remove it"
            )

    def _validate_folders(self) -> None:
        for name in ("weight_cache", "tt_metal_home", "extra_models_dir"):
            folder = getattr(self, name)
            if folder is not None and not Path(folder).is_absolute():
                raise ConfigError(
                    f"mesh.{name} {folder!r} is not an absolute path; engines run in a folder of "
                    f'their own and do not expand "~": write it like "/home/me/{name}", or '
                    "remove it"
                )

    def _validate_choices(self) -> None:
        """Check literal values, which msgspec checks only when it decodes a struct."""
        for name, choices in _MESH_CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                known = ", ".join(repr(choice) for choice in choices)
                raise ConfigError(f"mesh.{name} {value!r} is not one of {known}")


class GangConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Membership of an engine in a gang that steps in lockstep, see `replicas.gang.lockstep`.

    Attributes:
        name: Name of the gang, never reused.
        rank: This engine's number, from 0 on.
        size: Number of engines in the gang.
        hub: "host:port" of the hub that coordinates every step.
    """

    name: str
    rank: int
    size: int
    hub: str


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding: drafts of the next tokens, verified together in one pass.

    Source: vLLM config/speculative.py, with its names and rules.

    Attributes:
        method: "ngram" proposes the tokens that followed the row's last n-gram where it occurred
            before in its own prompt and output.
        num_speculative_tokens: The most drafts of a row in one pass, at most 128.
        prompt_lookup_min: Tokens of the shortest n-gram that is searched; null takes
            `prompt_lookup_max`.
        prompt_lookup_max: Tokens of the longest n-gram; null takes `prompt_lookup_min`, and 5 if
            both are null. The longest one that occurs wins.
    """

    method: Literal["ngram"]
    num_speculative_tokens: int
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None

    @property
    def ngram_sizes(self) -> tuple[int, int]:
        """Tokens of the shortest and of the longest n-gram."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        return shortest or longest or _NGRAM_SIZE, longest or shortest or _NGRAM_SIZE

    def validate(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: One is out of range; names it.
        """
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"speculative_config.{name} must be at least 1, got {value}")
        if self.num_speculative_tokens > MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"speculative_config.num_speculative_tokens must be at most "
                f"{MAX_SPECULATIVE_TOKENS}, got {self.num_speculative_tokens}"
            )
        shortest, longest = self.ngram_sizes
        if shortest > longest:
            raise ConfigError(
                f"speculative_config.prompt_lookup_min {shortest} is more than "
                f"speculative_config.prompt_lookup_max {longest}; change one of them"
            )


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Complete configuration of one engine; values derived from it are passed as arguments.

    Attributes:
        model: Folder of the model, absolute.
        role: Which part of a request it runs; also reported in its snapshots.
        generator: Class that runs the model, as "module:Class"; None takes the one registered for
            the model's architecture. With `mesh`, other names are possible, see there.
        load_format: "safetensors" loads the checkpoint. "random" draws weights from `weights_seed`
            and needs only config.json.
        weights_seed: Seed of random weights.
        dtype: Element type of computation and KV; "auto" takes the checkpoint's. On a mesh set
            `mesh.optimizations` instead.
        attention: Attention on the CPU, by compiled kernels ("fast") or PyTorch's operations.
        max_model_len: Longest sequence, prompt and output together; None takes the model's.
        max_batch_size: Decode slots of the engine, in all lanes together.
        tt_data_parallel: Lanes (DP groups) that the engine drives in lockstep.
        block_size: Tokens per KV block; on a mesh a multiple of 32, usually 64.
        kv_cache_memory_bytes: Memory for the KV caches of all lanes together, on the CPU; None is
            256 MiB.
        gpu_memory_utilization: Instead of `kv_cache_memory_bytes`, on the CPU: the share of the
            host's memory (or of the control group's limit) for this engine, from 0 to 1. The start
            measures what weights and a full step take, and KV gets the rest. Each engine of a host
            takes its own share: two with 0.4 take 0.8 of it.
        num_blocks: Blocks per lane, null block included; None derives it from
            `kv_cache_memory_bytes`, or from a mesh's memory beside the weights. Layers with a
            window beside others have fewer if their slots cannot use as many.
        max_num_batched_tokens: Most tokens computed in one step. None is 2,048, or without chunked
            prefill the longest sequence if that is longer.
        long_prefill_token_threshold: A prompt with more tokens left to compute is long: a step
            gives it that many at most, unless it is the only sequence that the step could serve. 0
            sets no limit, unless several partial prefills are allowed: then 4 % of the longest
            sequence.
        max_num_partial_prefills: With such a threshold, the most prompts of a step that are
            computed in part.
        max_long_partial_prefills: The most of them that are long. Prompts that fit whole, and those
            that are not long, pass long ones that wait for this.
        scheduling_policy: Order of the queue, and choice of the sequence that loses its blocks when
            they run out. "fcfs": order of arrival, and the sequence admitted last. "priority":
            order of the requests' `priority`, lower first, then of arrival, and the last in that
            order. Requests with a priority need it.
        max_num_waiting: Sequences queued for a slot in the engine, each choice of a request being
            one, from which on it refuses requests that would queue more. The last one that it
            takes may exceed this by its choices. None sets no limit. A cluster sets 256 for prefill
            engines and 0 for others, whose requests queue in the router.
        enable_chunked_prefill: Whether a prompt may be computed over several steps. Here and in the
            next two, None enables it if the generator supports it.
        enable_prefix_caching: Whether prompts reuse cached KV blocks of equal prefixes.
        mixed_batches: Whether prefill chunks and decodes share a pass; otherwise each step is all
            prefill or all decode.
        prefill_steps_per_decode_step: Without mixed batches, the most prefill steps in a row while
            sequences wait to decode.
        steps_in_flight: 2 lets a decode step start before the tokens of the previous one have been
            read, if the generator supports it; 1 does not.
        num_scheduler_steps: Most decode passes of one step, 1 to 32: after each but the last, rows
            continue without the scheduler. A row that ends within a step is computed to the end of
            the step, and the further tokens are dropped. A new request waits for that end, too. A
            step has one pass while a queued request might be admitted, while KV is transferred,
            with grammars, log probabilities or drafts, and where blocks are short. Two steps are
            then never in flight, but two passes of a step may be. Not for gangs.
        logprobs_mode: The values that requests with `logprobs` get: log probabilities or logits,
            raw, or processed as for the draw, by penalties, biases, temperature and top-p. Those of
            prompts are always raw.
        max_logprobs: Most tokens whose log probabilities a request may ask for at each position; -1
            sets no limit.
        speculative_config: Drafts of the next tokens, verified in passes of several tokens a row.
            The tokens are those of plain decoding. It needs a generator with mixed batches.
        num_threads: Compute threads of the generator; None is one for each core that affinity and
            the CPU quota of the container leave, or one on a simulated mesh.
        niceness: Niceness of the engine's process relative to its parent, 0 to 19. Against
            processes of its container (of its session, where Linux groups by these) that want the
            same core, 3 leaves it a third of the core and 5 a quarter. Where engines share cores,
            nicer decode engines shorten the time to first token. It stays when the role changes; an
            engine in its caller's process cannot have one.
        simulated_mesh: A simulated device instead of the CPU. `model` then provides only the
            tokenizer, vocabulary and end tokens; this setting decides generator, dtype and KV
            capacity.
        mesh: A Tenstorrent mesh instead of the CPU. It decides dtype and KV capacity. `generator`
            may then name a class written for Tenstorrent's vLLM plug-in as "module:Class"; a route
            (`replicas.generators.plugin.routes`) such as "tt-transformers" or "tt-metal", for the
            class that serves the model's architecture there; or a bundle's architecture.
        step_timeout_s: Longest step. A longer one counts as a hung device, and the engine is
            killed. None derives it from the kind of engine and the duration of its warm-up.
        start_timeout_s: Longest time without progress during the start. Third-party classes report
            none while they load: for these it must cover the first conversion of the weights.
        kv_connector: Connector for KV transfer: "p2p", "pooled", "multi" or "module:Class". A
            cluster sets it from `args.kv_connector`.
        kv_endpoint: Address on which the connector listens; port * picks a free one.
        keys: Secrets that authenticate clients and seal tickets; `replicas.launch.start_engine`
            makes one where there is none. The first one also keys the prefix cache, whose key is
            random without.
        kv_network: "encrypted": KV between hosts is confidential and authenticated, and only
            holders of the keys connect. "plain": only tickets authorise a transfer, and anyone on
            the network can read the KV; 2.5 times as fast, and required by NIXL.
        kv_accept_dtypes: Element types of other engines' KV that this engine converts to its own,
            for use by the requesting request only; not with "pooled" and "multi".
        kv_store: The store of pooled KV, if any.
        kv_load_failure_policy: Handling of a request whose KV another engine failed to send.
            "recompute" keeps the verified part and computes the rest, as is always done with KV
            lost by a store; "fail" ends the request with an error.
        reservation_timeout_s: How long a reserved slot waits for its KV before it is released.
        expert_placement: In a gang, for each expert the list of ranks that hold it, in every layer.
            Experts that many tokens choose may be on several ranks. None gives each rank an equal
            run of experts.
        gang: The gang of engines that share out the experts of the model; None for an engine with
            all experts. Only on the CPU.
    """

    model: str
    role: Role = "both"
    generator: str | None = None
    load_format: Literal["safetensors", "random"] = "safetensors"
    weights_seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    attention: Literal["fast", "batched"] = "fast"
    max_model_len: int | None = None
    max_batch_size: int = 32
    tt_data_parallel: int = 1
    block_size: int = 32
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    num_blocks: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    scheduling_policy: SchedulingPolicy = "fcfs"
    max_num_waiting: int | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    mixed_batches: bool | None = None
    prefill_steps_per_decode_step: int = 1
    steps_in_flight: Literal[1, 2] = 2
    num_scheduler_steps: int = 1
    logprobs_mode: LogprobsMode = "raw_logprobs"
    max_logprobs: int = 20
    speculative_config: SpeculativeConfig | None = None
    num_threads: int | None = None
    niceness: int = 0
    simulated_mesh: SimulatedMeshConfig | None = None
    mesh: MeshConfig | None = None
    step_timeout_s: float | None = None
    start_timeout_s: float = 3600.0
    kv_connector: str | None = None
    kv_endpoint: str = "tcp://127.0.0.1:*"
    keys: KeyRing = KeyRing()
    kv_network: KVNetwork = "encrypted"
    kv_accept_dtypes: tuple[str, ...] = ()
    kv_store: StoreConfig | None = None
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    reservation_timeout_s: float = 120.0
    expert_placement: tuple[tuple[int, ...], ...] | None = None
    gang: GangConfig | None = None

    def validate(self) -> None:
        """Check everything that needs no model.

        Raises:
            ConfigError: A value is out of range or two values exclude each other; names both.
        """
        self._validate_ranges()
        if self.max_batch_size % self.tt_data_parallel:
            raise ConfigError(
                f"max_batch_size {self.max_batch_size} is not a multiple of "
                f"tt_data_parallel {self.tt_data_parallel}; change one of them"
            )
        budget = self.max_num_batched_tokens
        if budget is not None and budget < self.max_batch_size:
            raise ConfigError(
                f"max_num_batched_tokens {budget} is less than max_batch_size "
                f"{self.max_batch_size}: a full decode step would not fit"
            )
        if self.simulated_mesh is not None:
            self._validate_simulated(self.simulated_mesh)
        if self.mesh is not None:
            self._validate_mesh(self.mesh)
        self.validate_partial_prefills()
        self._validate_memory()
        self._validate_store()
        if self.speculative_config is not None:
            self.speculative_config.validate()
            if self.mixed_batches is False:
                raise ConfigError(
                    "speculative_config and mixed_batches: false exclude each other: drafts are "
                    "verified in mixed passes; remove one of them"
                )
        if self.gang is not None and (self.mesh is not None or self.simulated_mesh is not None):
            raise ConfigError("gangs are for engines on the CPU: remove gang_size, or the mesh")
        if self.gang is not None and self.num_scheduler_steps > 1:
            raise ConfigError(
                f"num_scheduler_steps {self.num_scheduler_steps} and a gang exclude each other: "
                "the members of a gang coordinate every pass; remove one of them"
            )

    def _validate_ranges(self) -> None:
        for name in (
            "max_batch_size", "tt_data_parallel", "block_size", "prefill_steps_per_decode_step",
            "max_num_partial_prefills", "max_long_partial_prefills",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, least in (
            ("max_model_len", 2), ("kv_cache_memory_bytes", 1), ("max_num_batched_tokens", 1),
            ("num_threads", 1), ("max_num_waiting", 0),
            ("max_logprobs", -1), ("long_prefill_token_threshold", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        for name in ("reservation_timeout_s", "step_timeout_s", "start_timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
                raise ConfigError(f"{name} must be positive, got {seconds}")
        if not 1 <= self.num_scheduler_steps <= MAX_SCHEDULER_STEPS:
            raise ConfigError(
                f"num_scheduler_steps must be from 1 to {MAX_SCHEDULER_STEPS}, got "
                f"{self.num_scheduler_steps}"
            )
        if not 0 <= self.niceness <= MOST_NICE:
            raise ConfigError(f"niceness must be from 0 to {MOST_NICE}, got {self.niceness}")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ConfigError(
                f"num_blocks must be at least 2 (one is the null block), got {self.num_blocks}"
            )

    def validate_partial_prefills(self) -> None:
        """Check the limits of prompts that are computed in part.

        Raises:
            ConfigError: Two of them exclude each other, or they need chunked prefill.
        """
        threshold, most = self.long_prefill_token_threshold, self.max_num_partial_prefills
        if self.max_long_partial_prefills > most:
            raise ConfigError(
                f"max_long_partial_prefills {self.max_long_partial_prefills} is more than "
                f"max_num_partial_prefills {most}; change one of them"
            )
        if self.max_model_len is not None and threshold > self.max_model_len:
            raise ConfigError(
                f"long_prefill_token_threshold {threshold} is more than max_model_len "
                f"{self.max_model_len}, so that no prompt is long; change one of them"
            )
        if self.enable_chunked_prefill is False:
            for name, value, off in (
                ("long_prefill_token_threshold", threshold, 0),
                ("max_num_partial_prefills", most, 1),
            ):
                if value != off:
                    raise ConfigError(
                        f"{name} {value} needs chunked prefill, which is off or which the "
                        "generator lacks; remove it"
                    )

    def _validate_memory(self) -> None:
        share = self.gpu_memory_utilization
        if share is None:
            return
        if not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, got {share}")
        for name in ("kv_cache_memory_bytes", "num_blocks", "mesh", "simulated_mesh"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"gpu_memory_utilization {share} and {name} exclude each other: it is for "
                    "engines on the CPU, whose KV gets what weights and a step leave of that "
                    "share; remove one of them"
                )

    def _validate_store(self) -> None:
        store = self.kv_store
        if store is None:
            if self.kv_connector in STORE_CONNECTORS:
                raise ConfigError(f"kv_connector {self.kv_connector!r} needs a kv_store; set one")
        elif self.kv_connector in {None, "p2p"}:
            raise ConfigError(
                f"kv_connector {self.kv_connector!r} does not use kv_store; set one of "
                f"{', '.join(STORE_CONNECTORS)}"
            )
        elif store.unit_tokens % self.block_size:
            raise ConfigError(
                f"kv_store.unit_tokens {store.unit_tokens} is not a multiple of block_size "
                f"{self.block_size}; change one of them"
            )
        if self.kv_connector in STORE_CONNECTORS and self.kv_accept_dtypes:
            raise ConfigError(
                f"kv_accept_dtypes and kv_connector {self.kv_connector!r} exclude each other: "
                "engines would read converted KV from the store as if it had been computed in this "
                "dtype; remove kv_accept_dtypes, or use kv_connector 'p2p'"
            )

    def _validate_simulated(self, mesh: SimulatedMeshConfig) -> None:
        mesh.validate()
        if self.generator is not None:
            raise ConfigError(
                f"generator {self.generator!r} and simulated_mesh exclude each other; remove one"
            )
        if self.mixed_batches:
            raise ConfigError("mixed_batches: a mesh cannot mix prefill and decode in one pass")

    def _validate_mesh(self, mesh: MeshConfig) -> None:
        mesh.validate()
        if self.simulated_mesh is not None:
            raise ConfigError(
                f"mesh {mesh.name} and simulated_mesh {self.simulated_mesh.board} exclude each "
                "other; remove one of them"
            )
        if self.mixed_batches:
            raise ConfigError("mixed_batches: a mesh cannot mix prefill and decode in one pass")
        if self.dtype != "auto":
            raise ConfigError(
                f"dtype {self.dtype!r} and mesh exclude each other: mesh.optimizations decides, "
                '"balanced" for bfloat8_b, "accuracy" for bfloat16; remove dtype'
            )
        if self.attention != "fast":
            raise ConfigError(f"attention {self.attention!r} is for engines on the CPU; remove it")
        self._validate_mesh_generator(mesh)
        lane_shape(mesh.spec, self.tt_data_parallel)
        if self.slots_per_group > TILE_ROWS:
            raise ConfigError(
                f"max_batch_size {self.max_batch_size} in {self.tt_data_parallel} lanes gives "
                f"{self.slots_per_group} slots a lane; a mesh decodes at most {TILE_ROWS} a lane"
            )
        if self.block_size % TILE_ROWS:
            raise ConfigError(
                f"block_size {self.block_size} is not a multiple of {TILE_ROWS}, the rows of the "
                "tiles that a mesh writes KV in; 64 is usual"
            )
        budget = self.max_num_batched_tokens
        if budget is not None and budget < self.block_size:
            raise ConfigError(
                f"max_num_batched_tokens {budget} is less than block_size "
                f"{self.block_size}, but a mesh writes a prompt's KV in whole blocks; raise it"
            )

    def _validate_mesh_generator(self, mesh: MeshConfig) -> None:
        """Refuse settings that the generator would ignore."""
        if self.uses_native_generator:
            for name in ("tt_metal_home", "extra_models_dir"):
                if getattr(mesh, name) is not None:
                    raise ConfigError(
                        f"mesh.{name} {getattr(mesh, name)!r} is for third-party classes, but this "
                        "engine runs ttserve's own generator; remove it, or set generator"
                    )
        elif self.load_format == "random":
            raise ConfigError(
                f"load_format 'random' is for ttserve's own generators; {self.generator} loads its "
                "weights by itself; remove load_format or generator"
            )
        elif mesh.optimizations == "balanced":
            raise ConfigError(
                "mesh.optimizations 'balanced' is for ttserve's own generators; "
                f"{self.generator} supports 'performance' and 'accuracy': set one of them"
            )

    def token_budget(self, max_model_len: int) -> int:
        """Return the most tokens of one step.

        Args:
            max_model_len: Longest sequence, a step's size if a prompt cannot be divided. Source:
                vLLM config/scheduler.py (the default without chunked prefill).
        """
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        whole_prompt = 0 if self.enable_chunked_prefill else max_model_len
        return max(DEFAULT_STEP_TOKENS, whole_prompt, self.max_batch_size, self.block_size)

    @property
    def uses_native_generator(self) -> bool:
        """Whether the engine runs on a mesh with ttserve's own models."""
        return self.mesh is not None and self.generator in {None, NATIVE_TT_GENERATOR}

    @property
    def slots_per_group(self) -> int:
        """Decode slots of one DP group."""
        return self.max_batch_size // self.tt_data_parallel
