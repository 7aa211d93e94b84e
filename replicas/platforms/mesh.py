"""Platform of a mesh of Tenstorrent chips."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, cast

import msgspec
import torch

from replicas.errors import ConfigError, DeviceError
from replicas.generators.plugin.limits import check_block_output, foreign_token_budget, warn_of_name
from replicas.generators.plugin.sizes import check_class_sizes
from replicas.generators.registry import resolve_mesh_generator
from replicas.kv_sizing import derive_max_model_len, kv_groups, longest_sequence, resolve_dtype
from replicas.platforms.platform import LoadedModel, Platform
from replicas.tt.trace_regions import trace_region_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kv_transfer.connector import KVDeviceIO
    from replicas.config import EngineConfig, MeshConfig
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.protocol import DescribesKVCache, KVCache, ModelCapabilities
    from replicas.generators.ttnn.mesh import TTMesh
    from replicas.kv_groups import KVGroup


class MeshPlatform(Platform):
    """A mesh, opened through ttnn.

    Its profile decides how weights and KV are stored; `dtype` is that of the computation.

    Args:
        config: The engine's configuration.
        mesh: The mesh in it.
        model: The served model's configuration.
        progress: Called with (stage, fraction done) during start.

    Attributes:
        mesh: The mesh, for as long as it is open.
    """

    def __init__(
        self,
        config: EngineConfig,
        mesh: MeshConfig,
        model: ModelConfig,
        progress: Callable[[str, float], None],
    ) -> None:
        super().__init__(config, model)
        self._settings = mesh
        self._progress = progress
        self._compile: Callable[[], None] = lambda: None
        self.dtype = torch.bfloat16
        self.mesh: TTMesh | None = None
        self.wait = _wait

    def open(self) -> None:
        """Check the settings against the class of the model, and open the mesh."""
        config, settings, model = self.config, self._settings, self.model
        open_mesh = _import_open_mesh(settings)
        architecture = next(iter(model.architectures), "")
        self.generator_class = resolve_mesh_generator(config, architecture)
        capabilities = self.generator_class.model_capabilities
        self._check(capabilities)
        if not config.uses_native_generator:
            check_class_sizes(config, self.generator_class, longest_sequence(config, model))
            warn_of_name(config, self.generator_class)
        region = trace_region_bytes(settings, model.num_hidden_layers, config.tt_data_parallel)
        self.mesh = open_mesh(
            msgspec.structs.replace(settings, trace_region_size=region),
            fabric_config=capabilities.get("fabric_config"),
            load_format=config.load_format,
            seed=config.weights_seed,
            progress=self._progress,
        )

    def load(self) -> LoadedModel:
        """Load the weights, and check the settings against the model."""
        config, settings, model = self.config, self._settings, self.model
        max_seq_len = longest_sequence(config, model)
        budget = None
        if not config.uses_native_generator:
            generator_class = self.generator_class
            budget = foreign_token_budget(config, settings, model, generator_class, max_seq_len)
            # Checked before minutes of loading, as soon as the budget is known.
            derive_max_model_len(config, max_seq_len, kv_groups(config, model, budget))
        generator = self.initialize(self.mesh, max_seq_len, optimizations=settings.optimizations)
        self._check(generator.model_capabilities)
        return LoadedModel(generator, config, budget)

    def kv_ios(self, kv_cache: KVCache, kv_groups: Sequence[KVGroup]) -> tuple[KVDeviceIO, ...]:
        """Return access by programs on the mesh."""
        from replicas.generators.ttnn.kv_io import TTKVIO

        dtype, rope = resolve_dtype(self.config, self.model), "hf"
        if hasattr(self.generator, "kv_rope"):
            described = cast("DescribesKVCache", self.generator)
            dtype, rope = described.kv_dtype, described.kv_rope
        io = TTKVIO(kv_cache, self.kv_layout(dtype, rope))
        self._compile = io.warm_up
        return (io,)

    def compile_kv_io(self) -> None:
        """Compile the programs of `kv_ios`, if it was called."""
        self._compile()

    def close(self) -> None:
        """Close the model and the mesh.

        An error in one does not keep the other open: a mesh that is left open may be unusable until
        it is reset.
        """
        with contextlib.ExitStack() as closing:
            if self.mesh is not None:
                closing.callback(self.mesh.close)
                self.mesh = None
            super().close()

    def _check(self, can: ModelCapabilities) -> None:
        """Refuse settings that the generator does not support.

        Called before a mesh is opened and weights are loaded, and again for the loaded model, which
        may support less than its class declares.

        Raises:
            ConfigError: A setting does not fit; names setting and generator.
        """
        config, mesh, name = self.config, self._settings, self.generator_class.__qualname__
        asked = mesh.sample_on_device not in (None, "none")
        check_block_output(config, mesh, can)
        may_sample = can.get("supports_sample_on_device") or can.get("samples_on_device_if_asked")
        if asked and not may_sample:
            raise ConfigError(
                f"mesh.sample_on_device is {mesh.sample_on_device!r}, but generator {name} does "
                "not sample on the device; set it to none"
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
        longest_sequence(config, self.model)


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
