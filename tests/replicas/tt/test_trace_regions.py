"""The usual size of a trace region: as published, and never less for a larger model."""

import pytest

from replicas.config import MeshConfig
from replicas.errors import ConfigError
from replicas.tt.meshes import MESHES, mesh_spec
from replicas.tt.trace_regions import trace_region_bytes, usual_trace_region_bytes

MB = 10**6


@pytest.mark.parametrize(
    ("mesh", "lanes", "size"),
    [
        ("N150", 1, 52), ("N300", 1, 70), ("N300", 2, 52), ("T3K", 1, 117), ("T3K", 8, 52),
        ("T3K", 2, 117), ("Galaxy", 4, 117), ("P100", 1, 90), ("P150", 1, 900), ("P150x4", 1, 155),
        ("P150x4", 4, 900), ("P300", 1, 155), ("P300x2", 1, 155), ("P150x8", 1, 155),
    ],
)  # fmt: skip
def test_llama_8b_gets_what_is_published_for_chips_that_share_it(mesh, lanes, size):
    assert usual_trace_region_bytes(mesh_spec(mesh), 32, lanes) == size * MB


def test_more_layers_get_more_and_fewer_no_less():
    t3k = mesh_spec("T3K")
    assert usual_trace_region_bytes(t3k, 80, 1) == 117 * MB * 80 // 32
    assert usual_trace_region_bytes(t3k, 16, 1) == 117 * MB


@pytest.mark.parametrize("spec", MESHES.values(), ids=lambda spec: spec.name)
def test_no_mesh_gives_traces_a_tenth_of_its_memory(spec):
    for lanes in (1, spec.num_chips):
        assert usual_trace_region_bytes(spec, 80, lanes) < spec.dram_bytes_per_chip / 10


def test_a_configured_size_is_taken_and_without_traces_there_is_none():
    assert trace_region_bytes(MeshConfig(name="N150", trace_region_size=5), 32, 1) == 5
    assert trace_region_bytes(MeshConfig(name="N150", trace="none"), 32, 1) == 0
    assert trace_region_bytes(MeshConfig(name="N150", trace="decode_only"), 32, 1) == 52 * MB


def test_lanes_that_do_not_divide_the_chips():
    with pytest.raises(ConfigError, match="3 does not divide the 8"):
        usual_trace_region_bytes(mesh_spec("T3K"), 32, 3)
