"""Platform of a mesh that is not there: modelled times, on the host's clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.generators.fingerprint import model_fingerprint
from replicas.generators.registry import resolve_generator
from replicas.generators.simulated.device import SimulatedMesh, WallClock
from replicas.generators.simulated.kv_io import SimulatedKVIO, simulated_kv_layout
from replicas.generators.simulated.profiles import engine_timing
from replicas.kv_sizing import resolve_dtype
from replicas.platforms.platform import DTYPES, LoadedModel, Platform

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kv_transfer.connector import KVDeviceIO
    from replicas.config import EngineConfig, SimulatedMeshConfig
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.protocol import KVCache
    from replicas.generators.simulated.device import DeviceTimeline
    from replicas.kv_groups import KVGroup

_GENERATOR = "replicas.generators.simulated.generator:SimulatedGenerator"


class SimulatedPlatform(Platform):
    """A simulated mesh.

    Args:
        config: The engine's configuration.
        mesh: The mesh in it.
        model: The served model's configuration.
        timeline: Time of the mesh, with its faults.

    Attributes:
        device: The mesh; set by `open`.
    """

    device: SimulatedMesh

    def __init__(
        self,
        config: EngineConfig,
        mesh: SimulatedMeshConfig,
        model: ModelConfig,
        timeline: DeviceTimeline,
    ) -> None:
        super().__init__(config, model)
        self._mesh = mesh
        self._timeline = timeline

    def open(self) -> None:
        """Make the mesh."""
        self.dtype = DTYPES[resolve_dtype(self.config, self.model)]
        self.generator_class = resolve_generator(_GENERATOR)
        timing = engine_timing(self.config, self._mesh, self._mesh.compile_s)
        self.device = SimulatedMesh(timing, WallClock(), self._timeline)
        self.step_now_s, self.wait = self.device.clock.now_s, self.device.wait

    def load(self) -> LoadedModel:
        """Make a model without weights."""
        max_seq_len = self.config.max_model_len or self.model.max_position_embeddings
        return LoadedModel(self.initialize(self.device, max_seq_len), self.config)

    def kv_ios(self, kv_cache: KVCache, kv_groups: Sequence[KVGroup]) -> tuple[KVDeviceIO, ...]:
        """Return access that takes the modelled time."""
        layout = simulated_kv_layout(self.config.block_size, model_fingerprint(self.config))
        return (SimulatedKVIO(kv_cache, layout, self.device.timing, self.device.clock),)
