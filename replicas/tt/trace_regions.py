"""Size of each chip's DRAM region for traces, by mesh and model or as configured. Pure.

A trace records the commands of a call, so its size grows with the number of layers and of chips
that exchange data, not with the weights. An engine whose region is too small fails during warm-up.

Source: what tt-inference-server publishes for Llama-3.1-8B (release_model_spec.json), for classes
of tt_transformers that trace a decode and two or five lengths of prompts. Unsure: whether ttserve's
own models need no more, and the needs of lanes of other sizes, which get the next larger value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.tt.meshes import lane_shape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replicas.config import MeshConfig
    from replicas.tt.meshes import MeshSpec

_PUBLISHED_LAYERS = 32
_PUBLISHED: Mapping[str, Mapping[int, int]] = {
    "wormhole": {1: 52_000_000, 2: 70_000_000, 8: 117_000_000},
    "p100": {1: 90_000_000},
    "p150": {1: 900_000_000, 4: 155_000_000},
}
"""Chip -> chips of a lane -> bytes of each."""


def trace_region_bytes(mesh: MeshConfig, num_layers: int, tt_data_parallel: int) -> int:
    """Return the bytes per chip: as configured, else the usual size; 0 without traces.

    Args:
        mesh: The mesh's settings.
        num_layers: Number of the model's layers.
        tt_data_parallel: Lanes, which share the chips.
    """
    if mesh.trace_region_size is not None:
        return mesh.trace_region_size
    if mesh.trace == "none":
        return 0
    return usual_trace_region_bytes(mesh.spec, num_layers, tt_data_parallel)


def usual_trace_region_bytes(spec: MeshSpec, num_layers: int, tt_data_parallel: int) -> int:
    """Return the default bytes per chip for a model of so many layers.

    Raises:
        ConfigError: The number of lanes does not divide the number of chips.
    """
    _, num_chips = lane_shape(spec, tt_data_parallel)
    published = _PUBLISHED[spec.chip.name]
    sizes = [published[n] for n in sorted(published) if n >= num_chips]
    size = sizes[0] if sizes else published[max(published)]
    return size * max(num_layers, _PUBLISHED_LAYERS) // _PUBLISHED_LAYERS
