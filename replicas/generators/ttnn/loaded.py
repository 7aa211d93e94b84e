"""A model on a mesh: its weights on every lane, and the sizes that it was loaded for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from replicas.errors import ConfigError
from replicas.generators.model_config import check_sizes
from replicas.generators.ttnn.buckets import (
    TILE,
    check_cache,
    check_lane,
    check_window,
    decode_table_width,
)
from replicas.generators.ttnn.calls import CallLimits
from replicas.generators.ttnn.mesh import TTMesh, refusals
from replicas.generators.ttnn.profiles import profile
from replicas.generators.ttnn.weights import load_lane_weights

if TYPE_CHECKING:
    import ttnn

    from replicas.config import MeshConfig
    from replicas.generators.model_config import ModelConfig
    from replicas.generators.protocol import KVCacheShape
    from replicas.generators.ttnn.profiles import Profile
    from replicas.generators.ttnn.weights import DeviceWeights


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """Model loaded on a mesh.

    Attributes:
        config: The model's configuration.
        precision: Formats of storage and computation.
        settings: Settings of the mesh.
        lanes: Each lane's submesh and weights.
        max_batch_size: Slots of all lanes.
        max_seq_len: Tokens of the longest sequence.
    """

    config: ModelConfig
    precision: Profile
    settings: MeshConfig
    lanes: tuple[tuple[ttnn.MeshDevice, DeviceWeights], ...]
    max_batch_size: int
    max_seq_len: int

    @property
    def rows_per_lane(self) -> int:
        """Slots of one lane."""
        return self.max_batch_size // len(self.lanes)

    def limits(self, shape: KVCacheShape, dtype: torch.dtype, num_layers: int) -> CallLimits:
        """Return the limits of calls over a KV cache; arguments as in ``allocate_kv_cache``.

        Raises:
            ConfigError: The cache does not match this model and these sizes.
        """
        config = self.config
        num_blocks, num_heads, block_size, head_dim = shape
        wanted = (config.num_key_value_heads, config.head_dim, config.num_hidden_layers)
        given = (num_heads, head_dim, num_layers)
        if given != wanted or dtype != torch.bfloat16:
            raise ConfigError(
                f"KV cache of (kv heads, head size, layers) {given} in {dtype}, but the model has "
                f"{wanted} in {torch.bfloat16}"
            )
        tp = self.lanes[0][0].get_num_devices()
        check_lane(config, tp, max_rows=self.rows_per_lane, block_size=block_size)
        table_width = decode_table_width(self.max_seq_len, block_size)
        check_cache(num_blocks, table_width)
        return CallLimits(
            max_batch_size=self.max_batch_size,
            max_seq_len=self.max_seq_len,
            vocab_size=config.vocab_size,
            num_blocks=num_blocks,
            block_size=block_size,
            table_width=table_width,
        )


def load_model(
    config: ModelConfig,
    mesh: object,
    optimizations: str | None,
    max_batch_size: int,
    max_seq_len: int,
    num_lanes: int,
) -> LoadedModel:
    """Load a model onto every lane of a mesh; see ``TTGenerator.initialize_vllm_model``."""
    if not isinstance(mesh, TTMesh):
        raise ConfigError(
            f"the ttnn generator runs on a TTMesh, not {type(mesh).__name__}; set mesh"
        )
    precision = profile(optimizations or mesh.settings.optimizations, config)
    check_sizes(config, max_batch_size, max_seq_len, num_lanes)
    check_window(config, max_seq_len)
    devices = mesh.lanes(num_lanes)
    # Check before minutes of loading, with any valid block size, as the real one is unknown yet.
    num_rows = max_batch_size // num_lanes
    check_lane(config, devices[0].get_num_devices(), max_rows=num_rows, block_size=TILE)
    with refusals("loading the weights"):
        weights = load_lane_weights(config, mesh, devices, precision)
    lanes = tuple(zip(devices, weights, strict=True))
    return LoadedModel(config, precision, mesh.settings, lanes, max_batch_size, max_seq_len)
