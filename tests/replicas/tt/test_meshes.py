"""Names of meshes, and the known facts of each."""

import pytest

from replicas.errors import ConfigError
from replicas.tt.meshes import MESHES, lane_shape, mesh_spec

SHAPES = {
    "N150": (1, 1), "N150x4": (1, 4), "N300": (1, 2), "T3K": (1, 8), "TG": (8, 4),
    "Galaxy": (8, 4), "GalaxyT3K": (1, 8), "DualGalaxy": (8, 8),
    "QuadGalaxy": (8, 16), "P100": (1, 1), "P150": (1, 1),
    "P150x2": (1, 2), "P150x4": (1, 4), "P150x8": (1, 8), "P300": (1, 2), "P300x2": (1, 4),
    "BHGalaxy": (8, 4),
}  # fmt: skip


def test_every_mesh_has_its_published_shape():
    assert {name: spec.shape for name, spec in MESHES.items()} == SHAPES


@pytest.mark.parametrize("spec", MESHES.values(), ids=lambda spec: spec.name)
def test_the_facts_of_a_mesh_agree_with_each_other(spec):
    rows, cols = spec.physical_shape
    assert rows * cols == spec.num_chips
    chips_per_device = 2 if spec.board == "n300" else 1
    assert spec.num_pcie_devices * chips_per_device == spec.num_chips
    assert (spec.arch == "wormhole") == (spec.dram_bytes_per_chip == 12 * 2**30)
    assert spec.dispatch_core_axis == ("row" if spec.arch == "wormhole" else "col")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("n150", "N150"),
        ("P150X4", "P150x4"),
        ("p300_x2", "P300x2"),
        ("GALAXY", "Galaxy"),
        ("bh-galaxy", "BHGalaxy"),
        ("BH Galaxy", "BHGalaxy"),
        ("BLACKHOLE_GALAXY", "BHGalaxy"),
        ("wh galaxy", "Galaxy"),
        ("dual galaxy", "DualGalaxy"),
        ("T3000", "T3K"),
        ("GALAXY_T3K", "GalaxyT3K"),
    ],
)
def test_names_are_read_in_any_case_and_spelling(written, name):
    assert mesh_spec(written) is MESHES[name]


@pytest.mark.parametrize(
    ("name", "fabric"),
    [
        ("N150", None),
        ("P150", None),
        ("N300", "FABRIC_1D"),
        ("T3K", "FABRIC_1D"),
        ("P150x8", "FABRIC_1D"),
        ("GalaxyT3K", "FABRIC_1D"),
        ("Galaxy", "FABRIC_1D_RING"),
        ("TG", "FABRIC_1D_RING"),
        ("BHGalaxy", "FABRIC_2D_TORUS_XY"),
        ("(1,1)", None),
        ("(2,4)", "FABRIC_1D"),
        ("(4,8)", "FABRIC_1D_RING"),
    ],
)
def test_the_fabric_follows_from_chips_and_machine(name, fabric):
    assert mesh_spec(name).fabric == fabric


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("N150", "N150"), ("P150x4", "P150x4"), ("TG", "TG"), ("Galaxy", "TG"),
        ("GalaxyT3K", "T3K"), ("BHGalaxy", "BH-Galaxy"), ("DualGalaxy", "(8,8)"),
        ("(2,4)", "(2,4)"),
    ],
)  # fmt: skip
def test_tenstorrents_own_word_for_a_mesh(name, word):
    assert mesh_spec(name).mesh_device == word


def test_an_n300_and_a_t3k_have_a_device_for_two_chips():
    assert (mesh_spec("N300").num_pcie_devices, mesh_spec("T3K").num_pcie_devices) == (1, 4)
    assert (mesh_spec("N300").num_chips, mesh_spec("T3K").num_chips) == (2, 8)


def test_a_grid_takes_its_chips_from_the_architecture():
    wormhole, blackhole = mesh_spec(" (2, 4) "), mesh_spec("[2,4]", arch="blackhole")
    assert wormhole.name == blackhole.name == "(2,4)"
    assert wormhole.shape == (2, 4)
    assert (wormhole.arch, wormhole.num_pcie_devices) == ("wormhole", 4)
    assert (blackhole.arch, blackhole.num_pcie_devices) == ("blackhole", 8)
    assert mesh_spec("(8,4)").num_pcie_devices == 32
    assert mesh_spec("(8,8)").num_hosts == 2


def test_a_named_mesh_has_its_own_architecture():
    assert mesh_spec("P150", arch="blackhole") is MESHES["P150"]
    with pytest.raises(ConfigError, match="T3K has wormhole chips, but arch is 'blackhole'"):
        mesh_spec("T3K", arch="blackhole")


@pytest.mark.parametrize("name", ["N151", "", "(0,4)", "(4)", "(1,2,3)", "(-1,2)"])
def test_an_unknown_mesh_is_refused_with_what_is_known(name):
    with pytest.raises(ConfigError, match=r"T3K|at least 1"):
        mesh_spec(name)


def test_a_mesh_of_several_hosts_is_refused_with_their_number():
    mesh_spec("Galaxy").check_one_host()
    with pytest.raises(ConfigError, match="QuadGalaxy spans 4 hosts"):
        mesh_spec("QuadGalaxy").check_one_host()


def test_lanes_are_rows_of_chips():
    assert lane_shape(mesh_spec("T3K"), 1) == (1, 8)
    assert lane_shape(mesh_spec("Galaxy"), 4) == (1, 8)
    assert lane_shape(mesh_spec("N150"), 1) == (1, 1)


@pytest.mark.parametrize("lanes", [3, 16, 0])
def test_lanes_that_do_not_divide_the_chips_are_refused_with_both_numbers(lanes):
    with pytest.raises(ConfigError, match=rf"tt_data_parallel {lanes} .* 8 chips of mesh T3K"):
        lane_shape(mesh_spec("T3K"), lanes)
