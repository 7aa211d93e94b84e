"""Boards read from a host's files, and the meshes that they form."""

import dataclasses
import re
import sys

import pytest

from replicas.tt.boards import MeshChoice, mesh_choices, mesh_problem, num_devices, read_host
from replicas.tt.meshes import mesh_spec
from tests.hosts import FakeHost

CABLED = "its boards are cabled to each other"


@pytest.fixture
def host(tmp_path):
    return FakeHost(tmp_path)


def test_a_host_without_anything(host):
    report = host.report()
    assert report.devices == report.usable == ()
    assert report.num_ray_devices == 0
    assert (report.driver, report.ttnn, report.sfpi, report.metal_home) == (None,) * 4
    assert not report.has_iommu
    assert mesh_choices(report) == ()


def test_this_host_can_be_read():
    read_host({})


def test_a_board_is_read_from_the_drivers_files(host):
    host.add_board("p150b", iommu="DMA-FQ")
    host.write("proc/driver/tenstorrent/0/pids", "0\n71\n71\n")
    report = host.report()
    (device,) = report.devices
    assert dataclasses.asdict(device) == {
        "address": "0000:01:00.0",
        "arch": "blackhole",
        "index": 0,
        "has_node": True,
        "is_usable": True,
        "board": "p150",
        "firmware": "19.4.2.0",
        "holders": (0, 71),
    }
    assert report.driver == "2.9.0"
    assert report.has_iommu


def test_devices_of_other_vendors_are_not_ours(host):
    host.write("sys/bus/pci/devices/0000:00:02.0/vendor", "0x8086\n")
    assert host.report().devices == ()


def test_a_board_without_a_driver_has_no_node(host):
    host.add_board("n150", has_driver=False)
    report = host.report()
    assert (report.driver, report.devices[0].index, report.usable) == (None, None, ())


def test_an_old_chip_has_no_architecture(host):
    host.add_board("grayskull")
    assert host.report().devices[0].arch is None


def test_a_container_sees_the_nodes_that_it_was_given(host):
    for i in range(4):
        host.add_board("n300", has_node=i == 2)
    report = host.report()
    assert [d.index for d in report.usable] == [2]
    assert mesh_choices(report) == (MeshChoice("N300", 1),)


def test_ray_counts_a_folder_of_links_too(host):
    host.add_board("n150")
    host.write("dev/tenstorrent/by-id/wormhole-00")
    report = host.report()
    assert (report.num_ray_devices, len(report.usable)) == (2, 1)


def test_tt_smi_names_what_an_older_driver_does_not(host):
    address = host.add_board("n300", is_named=False)
    board = {"board_type": "n300 L", "bus_id": address}
    other = {"board_type": "n300 R", "bus_id": "N/A"}
    firmwares = {"fw_bundle_version": "18.2.0.0"}
    host.add_tt_smi([{"board_info": board, "firmwares": firmwares}, {"board_info": other}])
    (device,) = host.report().devices
    assert (device.board, device.firmware) == ("n300", "18.2.0.0")


def test_tt_smi_is_left_alone_while_a_board_works(host):
    address = host.add_board("n300", is_named=False)
    host.add_tt_smi([{"board_info": {"board_type": "n300 L", "bus_id": address}}])
    host.write("proc/driver/tenstorrent/0/pids", "71\n")
    assert host.report().devices[0].board is None


def test_a_tt_smi_beside_this_interpreter_is_found(host, monkeypatch):
    host.add_tt_smi(version="6.2.1")
    del host.environment["PATH"]
    assert host.report().tt_smi is None
    monkeypatch.setattr(sys, "executable", str(host.root / "bin" / "python"))
    assert host.report().tt_smi.version == "6.2.1"


def test_a_tt_smi_that_fails_names_nothing(host):
    address = host.add_board("n300", is_named=False)
    host.add_tt_smi([{"board_info": {"board_type": "n300 L", "bus_id": address}}], code=1)
    assert host.report().devices[0].board is None


@pytest.mark.parametrize(
    ("written", "board"),
    [
        ("tt-galaxy-wh L", "galaxy-wormhole"),
        ("galaxy-blackhole", "galaxy-blackhole"),
        ("p300c", "p300"),
        ("unknown", None),
    ],
)
def test_cards_are_known_by_the_drivers_names_and_by_tt_smis(host, written, board):
    address = host.add_board("p", is_named=False)
    host.add_tt_smi([{"board_info": {"board_type": written, "bus_id": address}}])
    assert host.report().devices[0].board == board


def test_ttnn_is_found_and_not_imported(host):
    host.add_ttnn()
    report = host.report()
    assert report.ttnn == "0.81.1"
    assert report.is_sfpi_real


def test_ttnn_of_a_source_tree_is_found(host):
    host.write("site-packages/ttnn/__init__.py", "raise AssertionError('imported')\n")
    assert host.report().ttnn == "from source"


def test_a_script_is_no_compiler(host):
    host.add_ttnn(compiler=b"#!/bin/bash\n")
    report = host.report()
    assert report.sfpi is not None
    assert not report.is_sfpi_real


def test_the_compiler_of_tt_metal_comes_before_the_systems(host):
    home = host.root / "tt-metal"
    host.write("tt-metal/runtime/sfpi/compiler/bin/riscv-tt-elf-g++", b"\x7fELF")
    host.write("opt/tenstorrent/sfpi/compiler/bin/riscv-tt-elf-g++", b"#!")
    assert not host.report().is_sfpi_real
    host.environment["TT_METAL_HOME"] = str(home)
    report = host.report()
    assert report.is_sfpi_real
    assert report.has_metal_home


@pytest.mark.parametrize(
    ("cards", "choices"),
    [
        (["n150"], [MeshChoice("N150", 1)]),
        (["n300"] * 2, [MeshChoice("N300", 2)]),
        (["n300"] * 4, [MeshChoice("T3K", 1, CABLED), MeshChoice("N300", 4)]),
        (
            ["p150b"] * 4,
            [MeshChoice("P150x4", 1, CABLED), MeshChoice("P150x2", 2, CABLED),
             MeshChoice("P150", 4)],
        ),
        (["p300c"] * 2, [MeshChoice("P300", 1)]),
        (["n150", "p150a"], [MeshChoice("N150", 1), MeshChoice("P150", 1)]),
    ],
)  # fmt: skip
def test_boards_make_meshes(host, cards, choices):
    for card in cards:
        host.add_board(card)
    assert list(mesh_choices(host.report())) == choices


def test_a_galaxy_is_one_mesh_or_its_trays(host):
    for _ in range(32):
        host.add_board("n", is_named=False)
    for folder in (host.root / "sys/bus/pci/devices").glob("*/tenstorrent/*"):
        (folder / "tt_card_type").write_text("galaxy-wormhole\n")
    assert mesh_choices(host.report()) == (
        MeshChoice("Galaxy", 1),
        MeshChoice("GalaxyT3K", 4, CABLED),
    )


@pytest.mark.parametrize(
    ("cards", "mesh", "problem"),
    [
        (["n300"] * 4, "T3K", None),
        (["n300"] * 4, "(2,4)", None),
        (["n300"] * 2, "T3K", "needs 4 n300 devices under /dev/tenstorrent, and this host has 2"),
        (["p150a"], "N150", "needs 1 n150 devices under /dev/tenstorrent, and this host has 0"),
        (["n150"] * 4, "T3K", "needs 4 n300 devices .* has 0"),
        (["n300"], "(2,4)", "needs 8 wormhole chips, and this host has 2"),
        (["n150"] * 4, "(2,4)", "needs 8 wormhole chips, and this host has 4"),
        (["p150a"] * 8, "(2,4)", "needs 8 wormhole .* has 0; .* set mesh.arch: blackhole"),
        (["n150"], "DualGalaxy", "spans 2 hosts"),
    ],
)
def test_a_mesh_is_here_or_it_is_said_what_lacks(host, cards, mesh, problem):
    for card in cards:
        host.add_board(card)
    found = mesh_problem(host.report(), mesh_spec(mesh))
    assert (found is None) == (problem is None)
    assert re.search(problem or "", found or "")


@pytest.mark.parametrize(
    ("cards", "grid", "count"),
    [
        (["n150"] * 2, "(1,2)", 2),
        (["n300"] * 2, "(1,2)", 1),
        (["n300"] * 2, "(1,3)", 2),
        (["n300", "n150"], "(1,2)", 2),
        (["n300"], "(2,4)", 4),
        (["n150"] * 2, "N300", 1),
    ],
)
def test_the_boards_say_how_many_devices_a_grid_takes(host, cards, grid, count):
    for card in cards:
        host.add_board(card)
    assert num_devices(host.report(), mesh_spec(grid)) == count


def test_the_devices_of_a_grid_of_boards_that_nothing_names_are_supposed(host):
    host.add_board("n150", is_named=False)
    host.add_board("n150", is_named=False)
    assert num_devices(host.report(), mesh_spec("(1,2)")) == 1


def test_a_grid_of_either_architecture_is_judged_by_its_own_chips(host):
    host.add_board("n150")
    host.add_board("p150a")
    blackhole = mesh_spec("(1,1)", arch="blackhole")
    assert num_devices(host.report(), blackhole) == 1
    assert mesh_problem(host.report(), blackhole) is None
    assert mesh_problem(host.report(), mesh_spec("(1,2)", arch="blackhole")) is not None


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("0", [0]), ("2, 1", [1, 2]), ("7", []), ("0,7", [0]), ("", [0, 1, 2]),
        ("0000:02:00.0", [1]), ("03:00", [2]),
    ],
)  # fmt: skip
def test_boards_that_the_environment_hides_cannot_be_used(host, visible, indices):
    for _ in range(3):
        host.add_board("n150")
    host.environment["TT_VISIBLE_DEVICES"] = visible
    report = host.report()
    assert [d.index for d in report.usable] == indices
    assert [d.index for d in report.devices] == [0, 1, 2]


def test_boards_that_nothing_names_are_counted_by_their_chips(host):
    host.add_board("n300", is_named=False)
    report = host.report()
    assert mesh_problem(report, mesh_spec("N300")) is None
    assert mesh_problem(report, mesh_spec("P150")) is not None


def test_a_mock_cluster_stands_in_for_any_mesh(host):
    host.environment["TT_METAL_MOCK_CLUSTER_DESC_PATH"] = "/some/t3k.yaml"
    report = host.report()
    assert not report.has_mock_descriptor
    assert mesh_problem(report, mesh_spec("T3K")) is None
