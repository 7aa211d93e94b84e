"""Configuration of one engine: one frozen struct, checked once, never changed afterwards."""

import math
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import msgspec

from kv_transfer.config import KVNetwork
from kv_transfer.keys import KeyRing
from kv_transfer.store import StoreConfig
from replicas.errors import ConfigError
from replicas.faults import Fault
from replicas.meshes import Arch, MeshSpec, lane_shape, mesh_spec
from replicas.user_cache import user_cache

Role = Literal["prefill", "decode", "both"]
"""What an engine takes: prompts for others to go on from, decoding (and short prompts), or all."""

STORE_CONNECTORS = ("pooled", "multi")
"""Connectors that cannot do without a store."""

NATIVE_TT_GENERATOR = "replicas.generators.ttnn.generator:TTGenerator"
"""The generator of a mesh whose configuration names none."""

MOST_NICE = 19
"""What Linux has of niceness."""

TILE_ROWS = 32
"""Rows of a hardware tile: KV is written in tiles, and a decode batch of one lane fills one."""


class SimulatedMeshConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device that costs what a TT mesh costs and computes nothing; see docs/simulated-mesh.md.

    Attributes:
        model: Name of the model whose time and memory it takes, for one "Llama-3.1-8B".
        board: Name of the board, for one "n150", "T3K", "Galaxy", "p150".
        compile_s: Warm-up before the replica is ready. On a mesh it takes minutes, which the
            simulator reckons with; a replica that is started to be looked at need not.
        jitter: Standard deviation of the logarithm of a factor on every step; 0 is none.
        link_setup_s: Seconds per message of KV blocks, on each side.
        link_bytes_per_s: Bandwidth of a KV transfer, on each side. The default is 100 Gbit/s.
        faults: What goes wrong with this replica; set by the cluster.
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
        """Check the numbers; whether the names are known is checked where they are looked up.

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
    """The Tenstorrent mesh that an engine runs on.

    Attributes:
        name: A known mesh, for one "N150", "T3K", or a shape like "(2,4)"; see `replicas.meshes`.
        arch: Architecture of the chips, where `name` is a shape; None is "wormhole".
        optimizations: "performance" keeps weights and KV in bfloat8_b, most of the MLP's weights in
            bfloat4_b; "balanced" all in bfloat8_b; "accuracy" in bfloat16.
        trace: Which calls are captured once and replayed: all, decode only, or none.
        sample_on_device: Which steps draw their tokens on the device: none, decode steps, or
            prefill too; None is whatever the generator can. Draws of a device are its own: they are
            not those of the host for the same seed. For a request that it cannot draw for, for one
            with a larger top_k, the host draws, whoever else is in the step.
        trace_region_size: Bytes of each chip's DRAM set aside for traces; None is what the mesh and
            the model usually need, see `replicas.trace_regions`.
        worker_l1_size: Bytes of L1 per worker core; 0 leaves ttnn's default.
        l1_small_size: Bytes of L1 set aside for small buffers.
        fabric: Member of `ttnn.FabricConfig`, instead of the mesh's usual one.
        dispatch_core_axis: "row" or "col", instead of the mesh's usual one.
        visible_devices: Boards to open, by their places in the order of PCI addresses; None takes
            those that Ray, or the environment, has bound the process to.
        weight_cache: Folder for converted weights, of others' classes too, absolute, as the next
            two; None is a folder in the user's cache.
        tt_metal_home: Checkout of tt-metal, for generators that come from there; without such a
            `generator` it is refused, as is the next.
        extra_models_dir: Folder of model bundles, each with a vllm_metadata.json.
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
            ConfigError: There is no such mesh, or it is of another architecture than `arch`.
        """
        return mesh_spec(self.name, arch=self.arch)

    @property
    def weight_cache_folder(self) -> Path | None:
        """Folder for the converted weights of all models; None: the user has no home for one."""
        if self.weight_cache:
            return Path(self.weight_cache)
        cache = user_cache()
        return None if cache is None else cache / "weights"

    def validate(self) -> None:
        """Check what can be checked without the device.

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
                "0; leave it out for the usual, or set mesh.trace: none"
            )
        if (self.trace_region_size or 0) >= spec.dram_bytes_per_chip:
            raise ConfigError(
                f"mesh.trace_region_size {self.trace_region_size} leaves nothing of the "
                f"{spec.dram_bytes_per_chip} bytes of each chip of mesh {spec.name}; leave it out "
                "for the usual"
            )
        self._validate_folders()
        devices = self.visible_devices
        if devices is None:
            return
        if min(devices, default=-1) < 0 or len(set(devices)) != len(devices):
            raise ConfigError(
                f"mesh.visible_devices {list(devices)} must be different indices from 0 on"
            )
        if spec.board is not None and len(devices) != spec.num_pcie_devices:
            raise ConfigError(
                f"mesh.visible_devices names {len(devices)} devices, and mesh {spec.name} has "
                f"{spec.num_pcie_devices}; name as many, or leave it out"
            )

    def _validate_folders(self) -> None:
        for name in ("weight_cache", "tt_metal_home", "extra_models_dir"):
            folder = getattr(self, name)
            if folder is not None and not Path(folder).is_absolute():
                raise ConfigError(
                    f"mesh.{name} {folder!r} is not absolute, and an engine starts in a folder of "
                    'its own, where nobody expands "~"; write it from the root on, as '
                    f'"/home/me/{name}", or leave it out'
                )

    def _validate_choices(self) -> None:
        """Check what a decoder would: made in Python, the struct takes any value."""
        for name, choices in _MESH_CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                known = ", ".join(repr(choice) for choice in choices)
                raise ConfigError(f"mesh.{name} {value!r} is not one of {known}")


class GangConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine's place among those that step together, see `replicas.gang.lockstep`.

    Attributes:
        name: Of the gang, never used again.
        rank: This engine's number, from 0 on.
        size: How many there are.
        hub: "host:port" of what agrees with all ranks on every step.
    """

    name: str
    rank: int
    size: int
    hub: str


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that an engine is told; what it computes itself travels as arguments.

    Attributes:
        model: Folder of the model, absolute.
        role: Which part of a request it takes; its snapshots say so.
        generator: None (the generator registered for the model's architecture) or "module:Class".
        load_format: "safetensors", or "random": weights drawn from `weights_seed`, config.json
            only.
        weights_seed: Seed of random weights.
        dtype: Compute and KV dtype; "auto" takes the checkpoint's. On a mesh
            `mesh.optimizations` decides.
        attention: Attention back end of the torch generator.
        max_model_len: Longest sequence, prompt and output together; None takes the model's.
        max_batch_size: Decode slots of the engine, over all lanes.
        tt_data_parallel: Lanes (DP groups) that the engine drives in lock-step.
        block_size: Tokens per KV block; on a mesh a multiple of 32, as a rule 64.
        kv_cache_memory_bytes: Memory for the KV caches of all lanes together, on the CPU.
        num_blocks: Blocks per lane, null block included; None: from `kv_cache_memory_bytes`, or
            what the mesh's memory holds beside the weights.
        max_num_batched_tokens: Token budget of one step.
        max_num_waiting: Most sequences that wait for a slot; None is unbounded (offline use).
        enable_chunked_prefill: Whether a prompt may be computed over several steps; None, as for
            the next two: if the generator can.
        enable_prefix_caching: Whether full blocks are found again by their hash.
        mixed_batches: Whether prefill chunks and decodes share a pass; otherwise a step is all one
            or all the other.
        prefill_steps_per_decode_step: Where one step is all prefill or all decode: how many prefill
            steps may follow each other while sequences wait to decode.
        steps_in_flight: 2 lets the next decode step begin before the tokens of the one before have
            been read, where the generator can; 1 does not.
        num_threads: Compute threads of the generator; None leaves the library's default, or takes
            one on a simulated mesh.
        niceness: How much nicer the engine's process is than its parent, 19 being all that Linux
            has, to others of its container (of its session, where Linux groups by these) that want
            the same core: with 3 it gets a third of it, with 5 a quarter. Where engines share
            cores, first tokens come sooner if those that decode are. It stays when the role
            changes; an engine in its caller's process has none.
        simulated_mesh: A simulated device instead of the CPU: `model` then gives the tokenizer,
            the vocabulary and the end tokens alone. It decides generator, dtype and KV capacity.
        mesh: A Tenstorrent mesh instead of the CPU. It decides dtype and KV capacity. `generator`
            may then name a class written for Tenstorrent's vLLM plug-in: "module:Class"; a route
            (`replicas.generators.plugin.routes`), for one "tt-transformers" or "tt-metal", for the
            class that serves the model's architecture there; or a bundle's architecture.
        step_timeout_s: A step that takes longer means that the device hangs: the engine is ended.
            None derives it, see `replicas.launch.step_timeout_s`.
        start_timeout_s: Longest time without progress while it starts. Classes of others report
            none while they load: for these it must cover the first conversion of the weights.
        kv_connector: None, "p2p", "pooled", "multi", or "module:Class" of a KV connector.
        kv_endpoint: Where the connector listens; port * takes a free one.
        keys: What clients prove themselves with, and tickets must be sealed with;
            `replicas.launch.start_engine` makes one where there is none. The first one also keys
            the prefix cache, whose key is random without.
        kv_network: "encrypted": KV between hosts can be neither read nor changed on its way, and
            only holders of the keys connect. "plain": tickets alone say who is served, and whoever
            sees the network reads the KV; 2.5 times as fast, and NIXL needs it.
        kv_accept_dtypes: Element types of other engines' KV that this one converts to its own, each
            for the request that asked alone; not with "pooled" and "multi".
        kv_store: The store that pooled KV is kept in, if there is one.
        kv_load_failure_policy: What becomes of a request whose KV another engine did not send:
            "recompute" goes on from the part that was verified and computes the rest, as is always
            done with what a store lost; "fail" ends the request with an error.
        reservation_timeout_s: How long a reserved slot waits for its KV before it is given up.
        gang: The engines that this one steps with, which have the other experts of its model; None
            if it has all that it needs. On the CPU alone.
    """

    model: str
    role: Role = "both"
    generator: str | None = None
    load_format: Literal["safetensors", "random"] = "safetensors"
    weights_seed: int = 0
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    attention: Literal["fast", "reference"] = "fast"
    max_model_len: int | None = None
    max_batch_size: int = 32
    tt_data_parallel: int = 1
    block_size: int = 32
    kv_cache_memory_bytes: int = 256 * 2**20
    num_blocks: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_waiting: int | None = None
    enable_chunked_prefill: bool | None = None
    enable_prefix_caching: bool | None = None
    mixed_batches: bool | None = None
    prefill_steps_per_decode_step: int = 1
    steps_in_flight: Literal[1, 2] = 2
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
    gang: GangConfig | None = None

    def validate(self) -> None:
        """Check what can be checked without the model.

        Raises:
            ConfigError: A value is out of range or two values exclude each other; names both.
        """
        self._validate_ranges()
        if self.max_batch_size % self.tt_data_parallel:
            raise ConfigError(
                f"max_batch_size {self.max_batch_size} is not a multiple of "
                f"tt_data_parallel {self.tt_data_parallel}"
            )
        if self.max_num_batched_tokens < self.max_batch_size:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_batch_size "
                f"{self.max_batch_size}: a full decode step would not fit"
            )
        if self.simulated_mesh is not None:
            self._validate_simulated(self.simulated_mesh)
        if self.mesh is not None:
            self._validate_mesh(self.mesh)
        self._validate_store()
        if self.gang is not None and (self.mesh is not None or self.simulated_mesh is not None):
            raise ConfigError("a gang is for engines on the CPU: remove gang_size, or the mesh")

    def _validate_ranges(self) -> None:
        for name in (
            "max_batch_size", "tt_data_parallel", "block_size", "kv_cache_memory_bytes",
            "max_num_batched_tokens", "prefill_steps_per_decode_step",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, least in (("max_model_len", 2), ("num_threads", 1), ("max_num_waiting", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        for name in ("reservation_timeout_s", "step_timeout_s", "start_timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
                raise ConfigError(f"{name} must be positive, got {seconds}")
        if not 0 <= self.niceness <= MOST_NICE:
            raise ConfigError(f"niceness must be from 0 to {MOST_NICE}, got {self.niceness}")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ConfigError(
                f"num_blocks must be at least 2 (one is the null block), got {self.num_blocks}"
            )

    def _validate_store(self) -> None:
        store = self.kv_store
        if store is None:
            if self.kv_connector in STORE_CONNECTORS:
                raise ConfigError(f"kv_connector {self.kv_connector!r} needs a kv_store")
        elif self.kv_connector in {None, "p2p"}:
            raise ConfigError(
                f"kv_connector {self.kv_connector!r} does not use kv_store; set one of "
                f"{', '.join(STORE_CONNECTORS)}"
            )
        elif store.unit_tokens % self.block_size:
            raise ConfigError(
                f"kv_store.unit_tokens {store.unit_tokens} is not a multiple of block_size "
                f"{self.block_size}"
            )
        if self.kv_connector in STORE_CONNECTORS and self.kv_accept_dtypes:
            raise ConfigError(
                f"kv_accept_dtypes and kv_connector {self.kv_connector!r} exclude each other: the "
                "store would give KV that was converted here to others as if it had been computed "
                "in this dtype; remove kv_accept_dtypes, or use kv_connector 'p2p'"
            )

    def _validate_simulated(self, mesh: SimulatedMeshConfig) -> None:
        mesh.validate()
        if self.generator is not None:
            raise ConfigError(f"generator {self.generator!r} and simulated_mesh exclude each other")
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
                f"max_batch_size {self.max_batch_size} in {self.tt_data_parallel} lanes is "
                f"{self.slots_per_group} slots a lane, and a mesh decodes at most {TILE_ROWS}"
            )
        if self.block_size % TILE_ROWS:
            raise ConfigError(
                f"block_size {self.block_size} is no multiple of {TILE_ROWS}, the rows of a tile, "
                "which a mesh writes KV in; 64 is usual"
            )
        if self.max_num_batched_tokens < self.block_size:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than block_size "
                f"{self.block_size}, and a mesh writes a prompt's KV in whole blocks"
            )

    def _validate_mesh_generator(self, mesh: MeshConfig) -> None:
        """Refuse settings that the generator has no use for."""
        if self.uses_native_generator:
            for name in ("tt_metal_home", "extra_models_dir"):
                if getattr(mesh, name) is not None:
                    raise ConfigError(
                        f"mesh.{name} {getattr(mesh, name)!r} is for classes of others, and this "
                        "engine runs the generator of this package; remove it, or set generator"
                    )
        elif self.load_format == "random":
            raise ConfigError(
                f"load_format 'random' is for the generators of this package, and {self.generator} "
                "loads its weights by itself; remove one of them"
            )
        elif mesh.optimizations == "balanced":
            raise ConfigError(
                "mesh.optimizations 'balanced' is for the generators of this package, and "
                f"{self.generator} knows performance and accuracy; set one of them"
            )

    @property
    def uses_native_generator(self) -> bool:
        """Whether it runs on a mesh with this package's own models."""
        return self.mesh is not None and self.generator in {None, NATIVE_TT_GENERATOR}

    @property
    def slots_per_group(self) -> int:
        """Decode slots of one DP group."""
        return self.max_batch_size // self.tt_data_parallel
