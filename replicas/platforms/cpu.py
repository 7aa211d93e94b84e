"""Platform of the host's own cores."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import torch

from kv_transfer.transports.process import keep_heap
from replicas.errors import ConfigError
from replicas.generators.protocol import CpuDevice
from replicas.generators.registry import resolve_generator
from replicas.generators.torch.kv_io import TorchKVIO
from replicas.kv_sizing import kv_groups, resolve_dtype
from replicas.memory_profile import MemoryProfile, kv_bytes, peak_bytes_of, resident_bytes
from replicas.platforms.platform import DTYPES, LoadedModel, Platform, allocate_kv

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_transfer.connector import KVDeviceIO
    from replicas.config import EngineConfig
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.protocol import Exchange, Generator, KVCache
    from replicas.kv_groups import KVGroup

logger = logging.getLogger(__name__)


class CpuPlatform(Platform):
    """The cores of this host.

    Args:
        config: The engine's configuration.
        model: The served model's configuration.
        progress: Called with (stage, fraction done) during start.
        join: Connects this rank to its gang, among whose ranks the model's experts are divided.
            None: the engine is in no gang.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        progress: Callable[[str, float], None],
        join: Callable[[], Exchange] | None = None,
    ) -> None:
        super().__init__(config, model)
        self._progress = progress
        self._join = join
        self._device: CpuDevice

    def open(self) -> None:
        """Find the class of the model, connect the gang and set up the heap."""
        config = self.config
        self.dtype = DTYPES[resolve_dtype(config, self.model)]
        name = config.generator or next(iter(self.model.architectures), "")
        self.generator_class = resolve_generator(name)
        exchange = None
        if self._join is not None:
            if not hasattr(self.generator_class, "forward_idle"):
                name = self.generator_class.__qualname__
                raise ConfigError(f"generator {name} does not support gangs; remove gang_size")
            self._progress("gang", 0.0)
            exchange = self._join()
        self._device = CpuDevice(
            dtype=self.dtype,
            load_format=config.load_format,
            seed=config.weights_seed,
            attention=config.attention,
            progress=self._progress,
            # No engine on this host reads a decode engine's KV, and private memory is faster.
            shares_kv=config.kv_connector is not None and config.role != "decode",
            exchange=exchange,
            expert_placement=config.expert_placement,
        )
        if config.dtype == "auto" and self.model.dtype == "float16":
            logger.warning(
                "%s has float16 weights but is computed in bfloat16, which keeps 8 of their 11 "
                "bits of precision; set engine.dtype to float32 to compute with all of them",
                config.model,
            )
        keep_heap()

    def load(self) -> LoadedModel:
        """Load the weights and, if `gpu_memory_utilization` is set, measure the memory for KV."""
        config, resident = self.config, resident_bytes()
        max_seq_len = config.max_model_len or self.model.max_position_embeddings
        made: list[Generator] = []
        peak = peak_bytes_of(lambda: made.append(self.initialize(self._device, max_seq_len)))
        generator = made.pop()
        self.memory = MemoryProfile(resident_bytes() - resident, loading=peak - resident)
        if config.gpu_memory_utilization is not None:
            self.memory = self._measured(generator, self.memory, max_seq_len)
            config = msgspec.structs.replace(
                config,
                kv_cache_memory_bytes=kv_bytes(config.gpu_memory_utilization, self.memory),
                gpu_memory_utilization=None,
            )
        return LoadedModel(generator, config)

    def kv_ios(self, kv_cache: KVCache, kv_groups: Sequence[KVGroup]) -> tuple[KVDeviceIO, ...]:
        """Return access to a KV cache in host memory."""
        whole = self.kv_layout(str(self.dtype).removeprefix("torch."))
        layouts = [
            msgspec.structs.replace(
                whole,
                num_layers=len(group.layers),
                num_kv_heads=group.spec.heads,
                head_dim=group.spec.width,
                num_planes=group.spec.planes,
                window=group.spec.window,
                block_size=group.block_size,
                dtype=group.spec.dtype,
            )
            for group in kv_groups
        ]
        return tuple(TorchKVIO(kv_cache, layout, nth) for nth, layout in enumerate(layouts))

    def _measured(
        self, generator: Generator, memory: MemoryProfile, max_seq_len: int
    ) -> MemoryProfile:
        """Run a step of the largest size, and return the memory with what it needs at its peak.

        Every row computes a prompt in the null block of a cache of two blocks.
        """
        config, model = self.config, self.model
        if config.enable_chunked_prefill is None:
            chunked = generator.model_capabilities.get("supports_chunked_prefill", False)
            config = msgspec.structs.replace(config, enable_chunked_prefill=chunked)
        budget = config.token_budget(max_seq_len)
        num_rows = min(config.max_batch_size, budget)
        length = min(budget // num_rows, max_seq_len)
        num_blocks = -(-length // config.block_size)
        groups = kv_groups(msgspec.structs.replace(config, num_blocks=2), model)
        groups = tuple(msgspec.structs.replace(group, num_blocks=2) for group in groups)
        kv_cache = allocate_kv(generator, groups, self.dtype)
        table = torch.zeros((num_rows, num_blocks), dtype=torch.int32)
        num_layers = sum(len(group.layers) for group in groups)
        resident = resident_bytes()
        peak = peak_bytes_of(
            lambda: generator.prefill_forward(
                tokens=torch.zeros((num_rows, length), dtype=torch.int32),
                page_table=table,
                page_tables_per_layer=None if len(groups) == 1 else [table] * num_layers,
                kv_cache=kv_cache,
                enable_trace=False,
                prompt_lens=torch.full((num_rows,), length, dtype=torch.int32),
                start_pos=torch.zeros(num_rows, dtype=torch.int32),
                empty_slots=range(num_rows),
            )
        )
        return memory._replace(activation=peak - resident, peak=peak)
