"""Interface of a platform: a device, the model on it, and access to the model's KV."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from kv_transfer.layout import KVLayout
from replicas.generators.fingerprint import model_fingerprint
from replicas.kv_sizing import kv_specs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_transfer.connector import KVDeviceIO
    from replicas.config import EngineConfig
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.protocol import Closes, Generator, KVCache, SupportsKVGroups
    from replicas.kv_groups import KVGroup
    from replicas.memory_profile import MemoryProfile

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class LoadedModel(NamedTuple):
    """A model on a device.

    Attributes:
        generator: The model.
        config: The engine's configuration, with the memory for KV if that was measured.
        token_budget: See `replicas.kv_sizing.kv_groups`.
    """

    generator: Generator
    config: EngineConfig
    token_budget: int | None = None


class Platform(ABC):
    """A device with a model, used by one worker in this order: `open`, `load`, the rest, `close`.

    Args:
        config: The engine's configuration.
        model: The served model's configuration.

    Attributes:
        config: As given.
        model: As given.
        dtype: Dtype of the computation; set by `open`.
        generator_class: Class of the model; set by `open`.
        generator: The loaded model; None before `load`.
        memory: Host memory of the model; None if it is not measured.
        step_now_s: Clock of the engine's steps.
        wait: Waits for an event of `read_decode_output`; None if there are no events.
    """

    dtype: torch.dtype
    generator_class: type[Generator]
    wait: Callable[[object], None] | None = None

    def __init__(self, config: EngineConfig, model: ModelConfig) -> None:
        self.config = config
        self.model = model
        self.generator: Generator | None = None
        self.memory: MemoryProfile | None = None
        self.step_now_s: Callable[[], float] = time.monotonic

    @abstractmethod
    def open(self) -> None:
        """Open the device.

        Raises:
            ConfigError: Configuration, model and generator do not fit; gives the reason.
            DeviceError: There is no such device here, or it cannot be opened.
        """

    @abstractmethod
    def load(self) -> LoadedModel:
        """Load the weights.

        Raises:
            ConfigError: As for `open`, now that the model's abilities are known.
        """

    @abstractmethod
    def kv_ios(self, kv_cache: KVCache, kv_groups: Sequence[KVGroup]) -> tuple[KVDeviceIO, ...]:
        """Return access to each KV group in the cache of the loaded model, for a connector."""

    def compile_kv_io(self) -> None:  # noqa: B027 - most platforms have nothing to compile
        """Compile KV transfers, which must happen before traces are captured."""

    def close(self) -> None:
        """Close the model."""
        if hasattr(self.generator, "close"):
            cast("Closes", self.generator).close()

    def kv_layout(self, dtype: str, rope: str = "hf") -> KVLayout:
        """Return the layout of the model's KV, of a dtype and an order of rotated features."""
        config = self.config
        spec, *_ = specs = self.model.kv_specs(dtype)
        return KVLayout(
            num_layers=len(specs),
            num_kv_heads=spec.heads,
            head_dim=spec.width,
            num_planes=spec.planes,
            window=kv_specs(config, self.model)[0].window,
            block_size=config.block_size,
            dtype=dtype,
            rope=rope,
            model_fingerprint=model_fingerprint(config),
        )

    def initialize(self, device: object, max_seq_len: int, **arguments: str | None) -> Generator:
        """Load the weights onto a device, as an object of `generator_class`.

        Args:
            device: The device in the form that the class takes.
            max_seq_len: Longest sequence in tokens.
            arguments: Further arguments of its `initialize_vllm_model`.
        """
        self.generator = self.generator_class.initialize_vllm_model(
            self.model,
            device,
            self.config.max_batch_size,
            max_seq_len=max_seq_len,
            tt_data_parallel=self.config.tt_data_parallel,
            **arguments,
        )
        return self.generator


def allocate_kv(generator: Generator, kv_groups: Sequence[KVGroup], dtype: torch.dtype) -> KVCache:
    """Allocate the KV cache of a loaded model, of a dtype where its groups do not say."""
    if len(kv_groups) == 1:
        [group] = kv_groups
        shape = group.num_blocks, group.spec.heads, group.block_size, group.spec.width
        return generator.allocate_kv_cache(shape, dtype, len(group.layers))
    # `kv_sizing.kv_specs` gives several only to classes that take them.
    return cast("SupportsKVGroups", generator).allocate_kv_groups(kv_groups, dtype)
