"""Worker: owner of one device (or one rank of a mesh), its model, KV memory and connector side.

Life cycle, each step called once and in this order through `Executor.collective_rpc`: `init_device`
→ `load_model` → `initialize_kv_cache` → `warm_up`, then per step `submit_step`, `collect_step` if
there was anything to compute and, if a KV transfer is at stake, `end_step`. A second step may be
submitted before the first is collected.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import torch

from kv_transfer.connector import load_connector
from kv_transfer.layout import KVLayout
from kv_transfer.transports.process import keep_heap
from replicas.engine.facts import connector_settings, model_facts
from replicas.engine.model_runner import ModelRunner
from replicas.engine.rows.grammar import GrammarCache
from replicas.engine.rows.logprobs import Logprobs
from replicas.engine.rows.order import row_processors
from replicas.engine.sampler import SamplingColumns, sample
from replicas.engine.speculation import NgramDrafter
from replicas.errors import ConfigError, DeviceError, InvalidRequestError
from replicas.generators.fingerprint import model_fingerprint
from replicas.generators.model_config import load_engine_model
from replicas.generators.plugin.limits import check_block_output, foreign_token_budget, warn_of_name
from replicas.generators.plugin.routes import route_mesh
from replicas.generators.plugin.sizes import check_class_sizes
from replicas.generators.protocol import CpuDevice
from replicas.generators.registry import resolve_generator, resolve_mesh_generator
from replicas.generators.simulated.device import DeviceTimeline, SimulatedMesh, WallClock
from replicas.generators.simulated.kv_io import SimulatedKVIO, simulated_kv_layout
from replicas.generators.simulated.profiles import engine_timing
from replicas.generators.torch.kv_io import TorchKVIO
from replicas.grammars import GrammarCompiler
from replicas.kv_groups import only_kv_group
from replicas.kv_sizing import (
    derive_max_model_len,
    kv_groups,
    longest_sequence,
    resolve_dtype,
)
from replicas.memory_profile import (
    MemoryProfile,
    kv_bytes,
    memory_table,
    peak_bytes_of,
    resident_bytes,
)
from replicas.messages import WorkerDescription
from replicas.tt.trace_regions import trace_region_bytes
from replicas.warm_up import timed_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_transfer.connector import (
        ConnectorMeta,
        KVConnectorWorker,
        KVDeviceIO,
        TransferInfo,
        TransferResults,
        TransferStats,
    )
    from replicas.config import (
        EngineConfig,
        MeshConfig,
        SimulatedMeshConfig,
        SpeculativeConfig,
    )
    from replicas.engine.hooks import EngineHooks
    from replicas.engine.model_runner import SubmittedStep
    from replicas.engine.speculation import Drafter
    from replicas.engine.step import ModelFacts, Preparation, Prepared, ScheduledBatch, StepResult
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.protocol import (
        Closes,
        DescribesKVCache,
        Generator,
        KVCache,
        ModelCapabilities,
        SupportsLayerCallbacks,
    )
    from replicas.generators.ttnn.mesh import TTMesh
    from replicas.kv_groups import KVGroup

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_MESH_DTYPE = torch.bfloat16
"""Dtype of a mesh's computation; its profile decides how weights and KV are stored."""
_SIMULATED_GENERATOR = "replicas.generators.simulated.generator:SimulatedGenerator"


class Worker:
    """One device with its model, KV caches and connector side.

    Args:
        config: The engine's configuration.
        incarnation: Id of this start of the engine, named by tickets.
        notify: Wakes the engine's core thread; may be called from any thread.
        progress: Called with (stage, fraction done) during start.
        hooks: What a simulation replaces.
    """

    _generator_class: type[Generator]
    _runner: ModelRunner
    _hf_config: ModelConfig
    _device: CpuDevice | SimulatedMesh | TTMesh

    def __init__(
        self,
        config: EngineConfig,
        incarnation: str,
        notify: Callable[[], None],
        progress: Callable[[str, float], None],
        hooks: EngineHooks,
    ) -> None:
        self._config = _routed(config)
        self._hooks = hooks
        self._incarnation = incarnation
        self._notify = notify
        self._progress = progress
        self._generator: Generator | None = None
        self._grammars = GrammarCache(self._grammar_compiler, notify)
        self._connector: KVConnectorWorker | None = None
        # None on a mesh, and before the model is loaded.
        self._memory: MemoryProfile | None = None
        # The mesh, for as long as it is open.
        self._mesh: TTMesh | None = None
        # Compiles KV transfers, which must happen before traces are captured.
        self._compile_kv_io: Callable[[], None] = lambda: None
        # The generator, if it supports callbacks per layer; and whether they are set.
        self._layers: SupportsLayerCallbacks | None = None
        self._tells_layers = False
        # Submitted and not collected, oldest first.
        self._steps: deque[SubmittedStep] = deque()

    def init_device(self) -> None:
        """Open the device and build the communication groups; on the CPU, set threads and heap.

        Raises:
            ConfigError: Configuration, model and generator do not fit; gives the reason.
            DeviceError: There is no such mesh here, or it cannot be opened.
        """
        config = self._config
        # With a simulated mesh the host only samples. A second thread would cost milliseconds a
        # step where engines share cores.
        num_threads = config.num_threads or (None if config.simulated_mesh is None else 1)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._hf_config = load_engine_model(config)
        if not self._hf_config.states_max_positions and config.max_model_len is None:
            logger.warning(
                "%s/config.json states no longest sequence; using the default of %s models, %d "
                "tokens; set max_model_len if the model was trained for another length",
                config.model,
                self._hf_config.family,
                self._hf_config.max_position_embeddings,
            )
        if config.mesh is not None:
            self._init_mesh(config.mesh)
            return
        self._dtype = _DTYPES[resolve_dtype(config, self._hf_config)]
        if config.simulated_mesh is not None:
            self._generator_class = resolve_generator(_SIMULATED_GENERATOR)
            self._device = self._simulated_mesh(config.simulated_mesh)
        else:
            name = config.generator or next(iter(self._hf_config.architectures), "")
            self._generator_class = resolve_generator(name)
            self._device = self._cpu()
            self._report_lost_precision()
            keep_heap()

    def _report_lost_precision(self) -> None:
        saved = self._hf_config.dtype
        if self._config.dtype == "auto" and saved == "float16":
            logger.warning(
                "%s has float16 weights but is computed in bfloat16, which keeps 8 of their 11 "
                "bits of precision; set engine.dtype to float32 to compute with all of them",
                self._config.model,
            )

    def load_model(self) -> ModelFacts:
        """Load the weights and measure how many KV blocks fit."""
        config, hf = self._config, self._hf_config
        if config.mesh is None:
            resident = resident_bytes()
            max_seq_len = config.max_model_len or hf.max_position_embeddings
            self._generator = self._generator_class.initialize_vllm_model(
                hf,
                self._device,
                config.max_batch_size,
                max_seq_len=max_seq_len,
                tt_data_parallel=config.tt_data_parallel,
            )
            capabilities = self._generator_class.model_capabilities
            if config.simulated_mesh is None:
                self._memory = MemoryProfile(resident_bytes() - resident)
            if config.gpu_memory_utilization is not None:
                config = self._with_measured_memory(config.gpu_memory_utilization, max_seq_len)
            return model_facts(config, hf, capabilities)
        max_seq_len = longest_sequence(config, hf)
        budget = None
        if not config.uses_native_generator:
            generator = self._generator_class
            budget = foreign_token_budget(config, config.mesh, hf, generator, max_seq_len)
            # Checked before minutes of loading, as soon as the budget is known.
            derive_max_model_len(config, max_seq_len, kv_groups(config, hf, budget))
        self._generator = self._generator_class.initialize_vllm_model(
            hf,
            self._device,
            config.max_batch_size,
            max_seq_len=max_seq_len,
            tt_data_parallel=config.tt_data_parallel,
            optimizations=config.mesh.optimizations,
        )
        capabilities = self._generator.model_capabilities
        name = self._generator_class.__qualname__
        _check_capabilities(config, config.mesh, hf, name, capabilities)
        return model_facts(config, hf, capabilities, budget)

    def _with_measured_memory(self, utilization: float, max_seq_len: int) -> EngineConfig:
        """Run a step of the largest size, and return the configuration with the memory for KV.

        Every row computes a prompt in the null block of a cache of two blocks.
        """
        config, generator = self._config, self._generator
        assert generator is not None
        assert self._memory is not None
        if config.enable_chunked_prefill is None:
            chunked = generator.model_capabilities.get("supports_chunked_prefill", False)
            config = msgspec.structs.replace(config, enable_chunked_prefill=chunked)
        budget = config.token_budget(max_seq_len)
        num_rows = min(config.max_batch_size, budget)
        length = min(budget // num_rows, max_seq_len)
        num_blocks = -(-length // config.block_size)
        hf = self._hf_config
        shape = (2, hf.num_key_value_heads, config.block_size, hf.head_dim)
        kv_cache = generator.allocate_kv_cache(shape, self._dtype, hf.num_hidden_layers)
        resident = resident_bytes()
        peak = peak_bytes_of(
            lambda: generator.prefill_forward(
                tokens=torch.zeros((num_rows, length), dtype=torch.int32),
                page_table=torch.zeros((num_rows, num_blocks), dtype=torch.int32),
                kv_cache=kv_cache,
                enable_trace=False,
                prompt_lens=torch.full((num_rows,), length, dtype=torch.int32),
                start_pos=torch.zeros(num_rows, dtype=torch.int32),
                empty_slots=range(num_rows),
            )
        )
        self._memory = self._memory._replace(activation=peak - resident, peak=peak)
        return msgspec.structs.replace(
            self._config,
            kv_cache_memory_bytes=kv_bytes(utilization, self._memory),
            gpu_memory_utilization=None,
        )

    def initialize_kv_cache(
        self, kv_groups: Sequence[KVGroup], max_model_len: int
    ) -> tuple[tuple[str, ...], tuple[KVLayout, ...]] | None:
        """Allocate the KV caches and, with a connector, start listening.

        Args:
            kv_groups: The groups that `load_model` has returned.
            max_model_len: Longest sequence in tokens.

        Returns:
            The connector's endpoints and the layout of the blocks of each KV group, or None without
            a connector.

        Raises:
            ConfigError: There are several KV groups.
        """
        hf, config = self._hf_config, self._config
        group = only_kv_group(kv_groups, f"generator {self._generator_class.__qualname__}")
        shape = (group.num_blocks, hf.num_key_value_heads, group.block_size, hf.head_dim)
        logger.info("%s", memory_table(self._memory, group, max_model_len, config.tt_data_parallel))
        assert self._generator is not None
        kv_cache = self._generator.allocate_kv_cache(shape, self._dtype, len(group.layers))
        device = self._device
        wait = device.wait if isinstance(device, SimulatedMesh) else _wait
        logprobs = Logprobs(config.logprobs_mode)
        self._runner = ModelRunner(
            self._generator,
            kv_cache,
            config,
            group.block_size,
            max_model_len,
            wait,
            processors=row_processors(hf.eos_token_id, self._grammars, logprobs),
            logprobs=logprobs,
            drafter=_drafter(config.speculative_config),
        )
        if config.kv_connector is None:
            return None
        step_now_s = device.clock.now_s if isinstance(device, SimulatedMesh) else time.monotonic
        settings = msgspec.structs.replace(
            connector_settings(config, self._incarnation, self._hooks.unix_now_s, step_now_s),
            make_transport=self._hooks.make_transport,
        )
        self._connector = load_connector(config.kv_connector).create_worker(settings, self._notify)
        io = self._kv_io(kv_cache)
        self._connector.register_kv_caches((io,))
        if self._generator.model_capabilities.get("supports_layer_callbacks"):
            self._layers = cast("SupportsLayerCallbacks", self._generator)
        return self._connector.endpoints, (io.layout,)

    def warm_up(self) -> None:
        """Run every shape once, so that the first request finds it compiled."""
        self._progress("warm up", 0.0)
        with timed_pass("all passes"):
            self._runner.compile()
            with timed_pass("compile KV transfers"):
                self._compile_kv_io()
            with timed_pass("sample on the host"):
                _draw_once(self._hf_config.vocab_size)
            self._progress("warm up", 0.5)
            self._runner.capture()
        self._progress("warm up", 1.0)

    def prepare(self, orders: Sequence[Preparation]) -> list[Prepared]:
        """Begin to compile grammars, and return those that have ended since the last call."""
        return self._grammars.prepare(orders)

    def submit_step(
        self, batch: ScheduledBatch | None, meta: ConnectorMeta | None, now_s: float
    ) -> None:
        """Begin a step: inject arrived KV, then start the forward pass.

        Args:
            batch: The batch to compute; None if there are only transfers to serve.
            meta: The connector's part of the step; None if it has nothing to do.
            now_s: Monotonic clock.
        """
        if self._connector is not None and meta is not None:
            self._connector.start_load_kv(meta, now_s)
        if batch is not None:
            if self._layers is not None:
                self._tell_layers(self._layers, on=meta is not None)
            self._steps.append(self._runner.submit(batch))

    def collect_step(self) -> StepResult:
        """Return the result of the oldest step that is not collected."""
        return self._runner.collect(self._steps.popleft())

    def end_step(self, meta: ConnectorMeta, now_s: float) -> TransferResults:
        """End a step with transfers: extract new KV, then collect ended transfers.

        Args:
            meta: The connector's part, as in `submit_step`.
            now_s: Monotonic clock.
        """
        assert self._connector is not None
        self._connector.mark_ready(meta, now_s)
        self._connector.wait_for_save()
        return self._connector.get_transfer_results(now_s)

    def transfers(self, now_s: float) -> list[TransferInfo]:
        """Return the KV transfers under way."""
        return self._connector.transfers(now_s) if self._connector is not None else []

    def transfer_stats(self, now_s: float) -> TransferStats | None:
        """Return totals of the KV connector; None without one."""
        return self._connector.stats(now_s) if self._connector is not None else None

    def describe(self) -> WorkerDescription:
        """Return what runs here; see `WORKER_METHODS`."""
        return WorkerDescription(
            pid=os.getpid(),
            generator=f"{self._generator_class.__module__}:{self._generator_class.__qualname__}",
            dtype=self._config.dtype,
            num_threads=torch.get_num_threads(),
            peak_resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )

    def shutdown(self) -> None:
        """Close the connector, the generator and the device, as far as they are open.

        An error in one does not keep the others open: a mesh that is left open may be unusable
        until it is reset.
        """
        self._grammars.close()
        with contextlib.ExitStack() as closing:
            if self._mesh is not None:
                closing.callback(self._mesh.close)
                self._mesh = None
            if hasattr(self._generator, "close"):
                closing.callback(cast("Closes", self._generator).close)
            if self._connector is not None:
                closing.callback(self._connector.close, deadline_s=2.0)

    def _grammar_compiler(self) -> GrammarCompiler:
        """Read the model's vocabulary.

        Raises:
            InvalidRequestError: There is none, or of a kind that grammars cannot be used with.
        """
        hf, path = self._hf_config, Path(self._config.model, "tokenizer.json")
        try:
            text = path.read_text(encoding="utf-8")
            return GrammarCompiler.for_model(text, hf.vocab_size, hf.eos_token_id)
        except (OSError, ValueError) as error:
            raise InvalidRequestError(
                "structured_outputs", f"this model's tokenizer.json cannot be used: {error}"
            ) from error

    def _tell_layers(self, layers: SupportsLayerCallbacks, *, on: bool) -> None:
        """Set or remove the connector's callbacks around each layer."""
        if on == self._tells_layers:
            return
        assert self._connector is not None
        if on:
            layers.set_layer_callbacks(
                self._connector.wait_for_layer_load, self._connector.save_kv_layer
            )
        else:
            layers.set_layer_callbacks(None, None)
        self._tells_layers = on

    # --- the device ----------------------------------------------------------------------------

    def _init_mesh(self, mesh: MeshConfig) -> None:
        self._dtype = _MESH_DTYPE
        open_mesh = _import_open_mesh(mesh)
        architecture = next(iter(self._hf_config.architectures), "")
        self._generator_class = resolve_mesh_generator(self._config, architecture)
        capabilities = self._generator_class.model_capabilities
        name = self._generator_class.__qualname__
        _check_capabilities(self._config, mesh, self._hf_config, name, capabilities)
        if not self._config.uses_native_generator:
            longest = longest_sequence(self._config, self._hf_config)
            check_class_sizes(self._config, self._generator_class, longest)
            warn_of_name(self._config, self._generator_class)
        region = trace_region_bytes(
            mesh, self._hf_config.num_hidden_layers, self._config.tt_data_parallel
        )
        self._device = self._mesh = open_mesh(
            msgspec.structs.replace(mesh, trace_region_size=region),
            fabric_config=capabilities.get("fabric_config"),
            load_format=self._config.load_format,
            seed=self._config.weights_seed,
            progress=self._progress,
        )

    def _cpu(self) -> CpuDevice:
        return CpuDevice(
            dtype=self._dtype,
            load_format=self._config.load_format,
            seed=self._config.weights_seed,
            attention=self._config.attention,
            progress=self._progress,
            # No engine on this host reads a decode engine's KV, and private memory is faster.
            shares_kv=self._config.kv_connector is not None and self._config.role != "decode",
        )

    def _simulated_mesh(self, mesh: SimulatedMeshConfig) -> SimulatedMesh:
        hooks = self._hooks
        return SimulatedMesh(
            engine_timing(self._config, mesh, mesh.compile_s),
            WallClock(),
            DeviceTimeline(
                hooks.device_faults, hooks.plan_clock, mesh.jitter, seed=self._incarnation
            ),
        )

    def _kv_io(self, kv_cache: KVCache) -> KVDeviceIO:
        config, device = self._config, self._device
        if isinstance(device, SimulatedMesh):
            layout = simulated_kv_layout(config.block_size, model_fingerprint(config))
            return SimulatedKVIO(kv_cache, layout, device.timing, device.clock)
        if isinstance(device, CpuDevice):
            return TorchKVIO(kv_cache, self._kv_layout(str(self._dtype).removeprefix("torch.")))
        from replicas.generators.ttnn.kv_io import TTKVIO

        dtype, rope = resolve_dtype(config, self._hf_config), "hf"
        if hasattr(self._generator, "kv_rope"):
            described = cast("DescribesKVCache", self._generator)
            dtype, rope = described.kv_dtype, described.kv_rope
        io = TTKVIO(kv_cache, self._kv_layout(dtype, rope))
        self._compile_kv_io = io.warm_up
        return io

    def _kv_layout(self, dtype: str, rope: str = "hf") -> KVLayout:
        hf, config = self._hf_config, self._config
        return KVLayout(
            num_layers=hf.num_hidden_layers,
            num_kv_heads=hf.num_key_value_heads,
            head_dim=hf.head_dim,
            block_size=config.block_size,
            dtype=dtype,
            rope=rope,
            model_fingerprint=model_fingerprint(config),
        )


def _routed(config: EngineConfig) -> EngineConfig:
    """Return the configuration with the mesh settings that its route's classes need."""
    if config.mesh is None:
        return config
    return msgspec.structs.replace(config, mesh=route_mesh(config.generator, config.mesh))


def _drafter(config: SpeculativeConfig | None) -> Drafter | None:
    return None if config is None else NgramDrafter(*config.ngram_sizes)


def _check_capabilities(
    config: EngineConfig, mesh: MeshConfig, model: ModelConfig, name: str, can: ModelCapabilities
) -> None:
    """Refuse settings that the generator does not support.

    Called before a mesh is opened and weights are loaded, and again for the loaded model, which may
    support less than its class declares.

    Raises:
        ConfigError: A setting does not fit; names setting and generator.
    """
    asked = mesh.sample_on_device not in (None, "none")
    check_block_output(config, mesh, can)
    may_sample = can.get("supports_sample_on_device") or can.get("samples_on_device_if_asked")
    if asked and not may_sample:
        raise ConfigError(
            f"mesh.sample_on_device is {mesh.sample_on_device!r}, but generator {name} does not "
            "sample on the device; set it to none"
        )
    if mesh.sample_on_device == "all" and not can.get("supports_sample_in_prefill"):
        raise ConfigError(
            f"mesh.sample_on_device is 'all', but generator {name} does not sample in prefill; "
            "set it to decode_only"
        )
    block_size = can.get("required_block_size") or config.block_size
    if block_size != config.block_size:
        raise ConfigError(
            f"block_size is {config.block_size}, but generator {name} needs {block_size}"
        )
    if not can.get("supports_chunked_prefill") and config.enable_chunked_prefill is None:
        config = msgspec.structs.replace(config, enable_chunked_prefill=False)
    longest_sequence(config, model)


def _import_open_mesh(mesh: MeshConfig) -> Callable[..., TTMesh]:
    """Import and return `open_mesh`; this imports ttnn, which most hosts do not have.

    Raises:
        DeviceError: ttnn cannot be imported here.
    """
    try:
        from replicas.generators.ttnn.mesh import open_mesh
    except ImportError as error:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise DeviceError(
            f"mesh {mesh.name} needs the package ttnn, which has wheels for Python 3.10 and 3.12 "
            f"on Linux x86_64 and cannot be imported by this Python {version} ({error}); run "
            "`ttserve doctor` to see what is missing"
        ) from error
    return open_mesh


def _wait(event: object) -> None:
    """Wait until a mesh reaches an event."""
    from replicas.generators.ttnn.events import wait_for_event

    wait_for_event(event)


def _draw_once(vocab_size: int) -> None:
    """Draw a token, so that the first request finds the sampler's code loaded."""
    columns = SamplingColumns(1)
    columns.temperature[:] = 1.0
    sample(torch.zeros(1, vocab_size), columns, np.zeros(1, dtype=np.int32), np.full(1, 0.5))
