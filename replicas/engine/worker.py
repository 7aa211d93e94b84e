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
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import torch

from kv_transfer.connector import load_connector
from replicas.engine.facts import connector_settings, model_facts
from replicas.engine.model_runner import ModelRunner
from replicas.errors import InvalidRequestError
from replicas.generators.model_config import load_engine_model
from replicas.generators.plugin.routes import route_mesh
from replicas.generators.simulated.device import DeviceTimeline
from replicas.grammars import GrammarCompiler
from replicas.host_cores import usable_cores
from replicas.memory_profile import memory_table
from replicas.messages import ExpertCounters, WorkerDescription
from replicas.platforms.cpu import CpuPlatform
from replicas.platforms.mesh import MeshPlatform
from replicas.platforms.platform import allocate_kv
from replicas.platforms.simulated import SimulatedPlatform
from replicas.sampling.grammar import GrammarCache
from replicas.sampling.logprobs import Logprobs
from replicas.sampling.order import row_processors
from replicas.sampling.sampler import SamplingColumns, sample
from replicas.speculation.drafts import NgramDrafter
from replicas.warm_up import timed_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_transfer.connector import (
        ConnectorMeta,
        KVConnectorWorker,
        TransferInfo,
        TransferResults,
        TransferStats,
    )
    from kv_transfer.layout import KVLayout
    from replicas.config import EngineConfig, SpeculativeConfig
    from replicas.engine.hooks import EngineHooks
    from replicas.engine.model_runner import SubmittedStep
    from replicas.engine.step import ModelFacts, ScheduledBatch, StepResult
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.protocol import Generator, SupportsLayerCallbacks
    from replicas.kv_groups import KVGroup
    from replicas.platforms.platform import Platform
    from replicas.sampling.preparation import Preparation, Prepared
    from replicas.speculation.drafts import Drafter

logger = logging.getLogger(__name__)


class Worker:
    """One device with its model, KV caches and connector side.

    Args:
        config: The engine's configuration.
        incarnation: Id of this start of the engine, named by tickets.
        notify: Wakes the engine's core thread; may be called from any thread.
        progress: Called with (stage, fraction done) during start.
        hooks: What a simulation replaces.
    """

    _generator: Generator
    _runner: ModelRunner
    _hf_config: ModelConfig
    _platform: Platform

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
        self._grammars = GrammarCache(self._grammar_compiler, notify)
        self._connector: KVConnectorWorker | None = None
        # Closes what is open, the latest first.
        self._closing = contextlib.ExitStack()
        # The generator, if it supports callbacks per layer; and whether they are set.
        self._layers: SupportsLayerCallbacks | None = None
        self._has_layer_callbacks = False
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
        most = min(torch.get_num_threads(), usable_cores()) if config.simulated_mesh is None else 1
        torch.set_num_threads(config.num_threads or most)
        self._hf_config = load_engine_model(config)
        if not self._hf_config.states_max_positions and config.max_model_len is None:
            logger.warning(
                "%s/config.json states no longest sequence; using the default of %s models, %d "
                "tokens; set max_model_len if the model was trained for another length",
                config.model,
                self._hf_config.family,
                self._hf_config.max_position_embeddings,
            )
        self._platform = self._make_platform()
        self._closing.callback(self._platform.close)
        self._platform.open()

    def load_model(self) -> ModelFacts:
        """Load the weights and measure how many KV blocks fit."""
        self._generator, config, budget = self._platform.load()
        capabilities = self._generator.model_capabilities
        facts = model_facts(config, self._hf_config, capabilities, budget)
        if capabilities.get("supports_prefix_caching") and not facts.supports_prefix_caching:
            logger.warning(
                "prefix caching is off: generator %s cannot restore the states of the recurrent "
                "layers of %s at the end of a cached prefix",
                config.generator,
                config.model,
            )
        return facts

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

        """
        hf, config = self._hf_config, self._config
        platform, generator = self._platform, self._generator
        memory = memory_table(platform.memory, kv_groups, max_model_len, config.tt_data_parallel)
        logger.info("%s", memory)
        kv_cache = allocate_kv(generator, kv_groups, platform.dtype)
        logprobs = Logprobs(config.logprobs_mode)
        self._runner = ModelRunner(
            generator,
            kv_cache,
            config,
            kv_groups,
            max_model_len,
            platform.wait,
            processors=row_processors(hf.eos_token_id, self._grammars, logprobs),
            logprobs=logprobs,
            drafter=_drafter(config.speculative_config),
        )
        if config.kv_connector is None:
            return None
        hooks = self._hooks
        settings = msgspec.structs.replace(
            connector_settings(config, self._incarnation, hooks.unix_now_s, platform.step_now_s),
            make_transport=hooks.make_transport,
        )
        self._connector = load_connector(config.kv_connector).create_worker(settings, self._notify)
        self._closing.callback(self._connector.close, deadline_s=2.0)
        ios = platform.kv_ios(kv_cache, kv_groups)
        self._connector.register_kv_caches(ios)
        if generator.model_capabilities.get("supports_layer_callbacks"):
            self._layers = cast("SupportsLayerCallbacks", generator)
        return self._connector.endpoints, tuple(io.layout for io in ios)

    def warm_up(self) -> None:
        """Run every shape once, so that the first request finds it compiled."""
        self._progress("warm up", 0.0)
        with timed_pass("all passes"):
            self._runner.compile()
            with timed_pass("compile KV transfers"):
                self._platform.compile_kv_io()
            with timed_pass("sample on the host"):
                _draw_once(self._hf_config.vocab_size)
            self._progress("warm up", 0.5)
            self._runner.capture()
        self._progress("warm up", 1.0)

    def prepare(self, orders: Sequence[Preparation]) -> list[Prepared]:
        """Begin to compile grammars, and return how those are that are compiled."""
        return self._grammars.prepare(orders) + self._grammars.progress()

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
                self._set_layer_callbacks(self._layers, on=meta is not None)
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

    def expert_counters(self) -> ExpertCounters:
        """Return the load of the model's experts; zeros without any."""
        generator = self._generator
        load = generator.expert_load() if hasattr(generator, "expert_load") else None
        if load is None:
            return ExpertCounters()
        most, mean = load.num_tokens.max(1), load.num_tokens.mean(1)
        return ExpertCounters(
            num_tokens=load.num_tokens.sum(0).tolist(),
            num_rows=load.num_rows,
            imbalance=float((most / mean).mean()) if mean.all() else 0.0,
        )

    def describe(self) -> WorkerDescription:
        """Return what runs here; see `WORKER_METHODS`."""
        generator = self._platform.generator_class
        return WorkerDescription(
            pid=os.getpid(),
            generator=f"{generator.__module__}:{generator.__qualname__}",
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
        self._closing.close()

    def _make_platform(self) -> Platform:
        config, model, hooks = self._config, self._hf_config, self._hooks
        if config.mesh is not None:
            return MeshPlatform(config, config.mesh, model, self._progress)
        if config.simulated_mesh is not None:
            mesh = config.simulated_mesh
            timeline = DeviceTimeline(
                hooks.device_faults, hooks.plan_clock, mesh.jitter, seed=self._incarnation
            )
            return SimulatedPlatform(config, mesh, model, timeline)
        return self._cpu_platform()

    def _cpu_platform(self) -> CpuPlatform:
        return CpuPlatform(self._config, self._hf_config, self._progress)

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

    def _set_layer_callbacks(self, layers: SupportsLayerCallbacks, *, on: bool) -> None:
        """Set or remove the connector's callbacks around each layer."""
        if on == self._has_layer_callbacks:
            return
        assert self._connector is not None
        if on:
            layers.set_layer_callbacks(
                self._connector.wait_for_layer_load, self._connector.save_kv_layer
            )
        else:
            layers.set_layer_callbacks(None, None)
        self._has_layer_callbacks = on


def _routed(config: EngineConfig) -> EngineConfig:
    """Return the configuration with the mesh settings that its route's classes need."""
    if config.mesh is None:
        return config
    return msgspec.structs.replace(config, mesh=route_mesh(config.generator, config.mesh))


def _drafter(config: SpeculativeConfig | None) -> Drafter | None:
    return None if config is None else NgramDrafter(*config.ngram_sizes)


def _draw_once(vocab_size: int) -> None:
    """Draw a token, so that the first request finds the sampler's code loaded."""
    columns = SamplingColumns(1)
    columns.temperature[:] = 1.0
    sample(torch.zeros(1, vocab_size), columns, np.zeros(1, dtype=np.int32), np.full(1, 0.5))
