"""How much of each chip's DRAM is set aside for traces: by mesh and model, or as configured. Pure.

A trace is the commands of a call, so its size goes with the layers and with the chips that exchange
data, not with the weights. Too small a region ends an engine while it warms up.

Source: what tt-inference-server publishes for Llama-3.1-8B (release_model_spec.json), for classes
of tt_transformers that trace a decode and two or five lengths of prompts. Unsure: that our own
models need no more, and what lanes of other sizes need; they get what the next larger one does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from replicas.meshes import lane_shape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from replicas.config import MeshConfig
    from replicas.meshes import MeshSpec

_PUBLISHED_LAYERS = 32
_PUBLISHED: Mapping[str, Mapping[int, int]] = {
    "wormhole": {1: 52_000_000, 2: 70_000_000, 8: 117_000_000},
    "p100": {1: 90_000_000},
    "p150": {1: 900_000_000, 4: 155_000_000},
}
"""Chip -> chips of a lane -> bytes of each."""


def trace_region_bytes(mesh: MeshConfig, num_layers: int, tt_data_parallel: int) -> int:
    """Bytes of each chip: as configured, or the usual; none without traces.

    Args:
        mesh: Its settings.
        num_layers: Of the model.
        tt_data_parallel: Lanes, which share the chips.
    """
    if mesh.trace_region_size is not None:
        return mesh.trace_region_size
    if mesh.trace == "none":
        return 0
    return usual_trace_region_bytes(mesh.spec, num_layers, tt_data_parallel)


def usual_trace_region_bytes(spec: MeshSpec, num_layers: int, tt_data_parallel: int) -> int:
    """Bytes that a model of so many layers is given on each chip.

    Raises:
        ConfigError: The lanes do not divide the chips.
    """
    _, num_chips = lane_shape(spec, tt_data_parallel)
    published = _PUBLISHED[spec.chip.name]
    sizes = [published[n] for n in sorted(published) if n >= num_chips]
    size = sizes[0] if sizes else published[max(published)]
    return size * max(num_layers, _PUBLISHED_LAYERS) // _PUBLISHED_LAYERS
