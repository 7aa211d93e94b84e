"""What `ttserve doctor` says of a host, and of a configuration on it."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from cluster import cli
from cluster.config.resolve import resolve
from cluster.lifecycle import doctor, haproxy
from cluster.lifecycle.doctor import check_pools
from cluster.lifecycle.findings import can_run_mesh, findings
from replicas.tt.boards import HUGEPAGES_FILE
from replicas.tt.meshes import mesh_spec
from tests.hosts import FakeHost, take_home


@pytest.fixture
def host(tmp_path):
    return FakeHost(tmp_path)


def found(host, subject):
    """Level, text and all advice about one thing; None if nothing was said."""
    matches = [f for f in findings(host.report()) if f.subject == subject]
    assert len(matches) < 2
    return (matches[0].level, matches[0].text, " ".join(matches[0].advice)) if matches else None


def lacks(host):
    return [f.subject for f in findings(host.report()) if f.level == "missing"]


def test_a_host_without_boards_lacks_nothing(host):
    assert lacks(host) == []
    assert not can_run_mesh(host.report())
    assert found(host, "boards")[1].startswith("none")
    assert found(host, "hugepages") is None


@pytest.mark.parametrize(
    "cards", [["n150"], ["n300"] * 2, ["n300"] * 4, ["p150b"] * 4], ids=["n150", "2", "T3K", "p4"]
)
def test_boards_with_all_they_need_can_run(host, cards):
    host.add_everything(*cards)
    assert lacks(host) == []
    assert can_run_mesh(host.report())
    assert found(host, "Ray") == ("ok", f"counts {len(cards)} TTNPU", "")
    assert {f.level for f in findings(host.report())} == {"ok"}


def test_a_missing_driver_is_the_first_thing_to_mend(host):
    host.add_everything("n150")
    host.add_board("n150", has_driver=False)
    (host.root / "sys/module/tenstorrent/version").unlink()
    (host.root / "sys/module/tenstorrent").rmdir()
    level, _, advice = found(host, "driver")
    assert level == "missing"
    assert "modprobe tenstorrent" in advice


def test_missing_hugepages_are_counted_and_mounted(host):
    host.add_board("n300")
    host.add_ttnn()
    level, text, advice = found(host, "hugepages")
    assert (level, text) == (
        "missing",
        "0 of 1 GiB, 0 for each of 1 device, not mounted on /dev/hugepages-1G",
    )
    assert "echo 4" in advice
    assert "mount -t hugetlbfs" in advice
    assert lacks(host) == ["hugepages"]


def test_fewer_hugepages_than_usual_are_worth_a_note(host):
    host.add_board("n300")
    host.add_hugepages(1)
    assert found(host, "hugepages")[0] == "note"


@pytest.mark.parametrize(("version", "level"), [("1.29", "ok"), ("2.0", "ok"), ("1.9", "missing")])
def test_an_iommu_makes_hugepages_needless_with_a_driver_that_uses_it(host, version, level):
    host.add_board("p150a", iommu="DMA-FQ")
    host.write("sys/module/tenstorrent/version", version)
    assert found(host, "hugepages")[0] == level


def test_python_without_a_wheel_is_noted_with_the_versions_that_have_one(host):
    host.add_board("n150")
    host.python = (3, 11)
    level, text, advice = found(host, "ttnn")
    assert (level, text) == ("missing", "not installed, and has no wheel for Python 3.11")
    assert "Python 3.10 or 3.12" in advice
    host.python = (3, 12)
    assert found(host, "ttnn") == ("missing", "not installed", "`pip install ttnn`")


def test_a_stand_in_compiler_is_enough_for_a_mock_cluster_only(host):
    host.add_everything("n150")
    host.add_ttnn(compiler=b"#!/bin/sh\n")
    assert lacks(host) == ["SFPI"]
    descriptor = host.write("n150.yaml")
    host.environment["TT_METAL_MOCK_CLUSTER_DESC_PATH"] = str(descriptor)
    assert lacks(host) == []
    assert found(host, "mock cluster")[0] == "note"


def test_a_compiler_that_is_not_there_is_missing(host):
    host.add_board("n150")
    host.add_ttnn(compiler=None)
    assert found(host, "SFPI")[0] == "missing"


def test_a_mock_cluster_runs_without_boards(host):
    host.add_ttnn(compiler=b"#!/bin/sh\n")
    host.environment["TT_METAL_MOCK_CLUSTER_DESC_PATH"] = str(host.root / "n150.yaml")
    assert lacks(host) == ["boards"]
    host.write("n150.yaml")
    assert can_run_mesh(host.report())


def test_rays_own_count_is_corrected(host):
    host.add_board("n150")
    host.write("dev/tenstorrent/by-id/wormhole-00")
    _, text, advice = found(host, "Ray")
    assert "counts 2 TTNPU" in text
    assert """--resources '{"TTNPU": 1}'""" in advice


def test_nodes_that_a_container_was_not_given(host):
    host.add_board("n150", has_node=False)
    assert found(host, "device nodes")[0] == "missing"
    host.add_board("n150")
    assert found(host, "device nodes")[:2] == ("note", "1 of 2 are visible here")


def test_processes_that_hold_a_board_are_named(host):
    host.add_everything("n150")
    host.write("proc/driver/tenstorrent/0/pids", "0\n71\n")
    assert found(host, "in use")[1] == "/dev/tenstorrent/0 by a process elsewhere, process 71"


def test_boards_of_another_make_cannot_run(host):
    host.add_board("grayskull")
    assert found(host, "boards")[0] == "missing"


def test_differing_firmware_is_noted(host):
    host.add_board("n150")
    host.add_board("n150", firmware="18.12.0.0")
    assert found(host, "firmware")[1] == "bundles 18.12.0.0, 19.4.2.0 side by side"


@pytest.mark.parametrize(
    ("card", "firmware", "level"),
    [
        ("n150", "18.2.9", "missing"),
        ("n150", "18.3.0", "ok"),
        ("p150a", "18.4.0", "missing"),
        # Before 18 they counted from 80 on.
        ("n150", "80.17.0.0", "missing"),
        ("p150a", "80.18.1.0", "missing"),
    ],
)
def test_firmware_that_ttnn_does_not_open_is_missing(host, card, firmware, level):
    host.add_board(card, firmware=firmware)
    assert found(host, "firmware")[0] == level


RELEASES = """\
sfpi_version='7.89.0'
| Release | Release Date | FW Version | KMD Version | SMI Version |
|:---------:|:--------------:|:------------:|:--------:|:--------:|
| 0.90.0 | ETA Apr 30, 2027 | 20.0.0 | 3.0.0 | 7.0.0 |
| [0.68.0](https://example.org/v0.68.0) | Apr 30, 2026 | 19.5.0 | 2.9.1 | 3.0.38 |
| [0.67.4](https://example.org/v0.67.4) | Mar 30, 2026 | 19.2.0 | 2.5.0 | 3.0.38 |
| 0.61.0 | Skipped | - | - | - |
"""


def test_versions_are_compared_with_those_of_this_ttnn(host):
    host.add_everything("n150")
    host.add_ttnn(b"\x7fELF\0tenstorrent/sfpi:7.80.0[960]\0", RELEASES)
    level, text, advice = found(host, "firmware")
    assert (level, text) == (
        "note", "bundle 19.4.2.0; ttnn's list of releases names 19.5.0 (for 0.68.0)",
    )  # fmt: skip
    assert "a newer one" in advice
    assert found(host, "driver")[:2] == (
        "note", "tt-kmd 2.9.0; ttnn's list of releases names 2.9.1 (for 0.68.0)",
    )  # fmt: skip
    level, text, advice = found(host, "SFPI")
    assert level == "note"
    assert text.startswith("7.80.0, ")
    assert text.endswith("; ttnn asks for 7.89.0")
    assert "install SFPI" in advice
    host.add_ttnn(b"\x7fELF\0tenstorrent/sfpi:7.89.0[1050]\0", RELEASES)
    assert found(host, "SFPI")[0] == "ok"
    assert can_run_mesh(host.report()), "notes stop nobody"


def test_a_checkout_of_tt_metal_says_which_compiler_it_wants(host):
    host.add_everything("n150")
    host.add_ttnn(b"\x7fELF\0tenstorrent/sfpi:7.89.0[1050]\0", RELEASES)
    host.write("metal/tt_metal/sfpi-version", "sfpi_version='8.0.0'\n")
    host.environment["TT_METAL_HOME"] = str(host.root / "metal")
    assert found(host, "SFPI")[1].endswith("; ttnn asks for 8.0.0")


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("6.2.1", "6.2.1: `-r` takes device nodes; a number is a position in the order of PCI "
         "addresses"),
        ("3.0.39", "3.0.39: `-r` takes the numbers of device nodes"),
    ],
)  # fmt: skip
def test_the_numbering_of_this_tt_smi_is_explained(host, version, text):
    host.add_everything("n150")
    host.add_tt_smi(version=version)
    assert found(host, "tt-smi") == ("ok", text, "")


def test_an_unsuitable_tt_smi_is_noted(host):
    host.add_board("n150")
    host.environment["PATH"] = str(host.root / "bin")
    assert found(host, "tt-smi")[:2] == (
        "note", "not on PATH: boards that a killed engine left open will not be reset",
    )  # fmt: skip
    host.add_tt_smi(version="none")
    assert "reports no version" in found(host, "tt-smi")[1]
    host.write("sys/bus/pci/devices/0000:01:00.0/tenstorrent/tenstorrent!0/tt_card_type",
               "galaxy-wormhole")  # fmt: skip
    host.add_tt_smi(version="3.0.20")
    assert "cannot reset a Galaxy" in found(host, "tt-smi")[1]


def test_numbers_that_are_not_those_of_the_nodes_are_explained(host):
    for node in (1, 0):
        host.add_board("n150", node=node)
    assert found(host, "numbers")[1].endswith("0 is /dev/tenstorrent/1, 1 is /dev/tenstorrent/0")
    host.environment["TT_VISIBLE_DEVICES"] = "1"
    assert [d.index for d in host.report().usable] == [0]


def test_numbers_that_are_those_of_the_nodes_are_not_mentioned(host):
    host.add_everything("n150", "n150")
    assert found(host, "numbers") is None


def test_folders_that_cannot_be_written_are_named(host):
    host.add_everything("n150")
    host.write("home/.cache/ttserve")
    level, text, advice = found(host, "caches")
    assert level == "note"
    assert text == f"this user cannot write to {host.root}/home/.cache/ttserve"
    assert "mesh.weight_cache" in advice
    host.environment["TT_METAL_CACHE"] = "/dev/null/kernels"
    assert found(host, "caches")[1].endswith(", /dev/null/kernels")


def test_hugepages_that_other_processes_hold_are_reported(host):
    host.add_everything("n150", "n150")
    host.write(HUGEPAGES_FILE.replace("nr_", "free_"), "1\n")
    level, text, advice = found(host, "hugepages")
    assert (level, text) == ("note", "8 of 1 GiB, 4 for each of 2 devices, 1 free")
    assert "delete files of dead processes" in advice
    host.write("proc/driver/tenstorrent/0/pids", "71\n")
    assert found(host, "hugepages")[0] == "ok"


def test_a_tt_metal_that_is_not_there_is_missing(host):
    host.environment["TT_METAL_HOME"] = str(host.root / "nowhere")
    assert found(host, "tt-metal")[0] == "missing"


@pytest.mark.parametrize(
    ("visible", "level", "text"),
    [
        ("7", "missing", "TT_VISIBLE_DEVICES is '7', which names no board of this host"),
        ("0,7", "note", "TT_VISIBLE_DEVICES is '0,7', but there is no 7"),
        ("1", "note", "TT_VISIBLE_DEVICES is '1': 1 of 2 boards"),
        ("", "note", "TT_VISIBLE_DEVICES is ''"),
    ],
)
def test_the_environment_may_hide_boards(host, visible, level, text):
    host.add_everything("n150", "n150")
    host.environment["TT_VISIBLE_DEVICES"] = visible
    assert found(host, "visible devices")[:2] == (level, text)
    assert can_run_mesh(host.report()) == (level != "missing")
    if "7" in visible:
        assert "boards that are here: 0, 1" in found(host, "visible devices")[2]


def test_a_host_whose_only_board_is_hidden_runs_no_mesh(run, host):
    host.add_everything("n150")
    host.environment["TT_VISIBLE_DEVICES"] = "7"
    output = run().output
    assert "no engine on a mesh" in output
    assert "replica" not in output


def check_pool_on(host, config):
    """The check of a configuration's one pool."""
    (check,) = check_pools(config, host.report(), host.environment)
    return check


def pools(mesh, replicas=1, resources=None):
    lanes = mesh_spec(mesh).num_chips
    engine = {"mesh": {"name": mesh}, "block_size": 64}
    engine |= {"max_batch_size": lanes, "tt_data_parallel": lanes}
    pool = {"replicas": replicas, "engine": engine, "resources": resources or {}}
    return resolve({"pools": {"both": pool}})


def test_a_pool_fits_if_one_of_its_replicas_does(host):
    host.add_everything(*["n300"] * 4)
    check = check_pool_on(host, pools("T3K", replicas=3))
    assert (check.pool, check.mesh, check.problem) == ("both", "T3K", None)
    assert check.note == "1 of 3 replicas fit here; others need further hosts"
    assert check_pool_on(host, pools("N300", replicas=4)).note == ""


@pytest.mark.parametrize(
    ("cards", "resources", "problem"),
    [
        (["n150"] * 2, {}, "(1,2) is 2 devices here, and the pool asks Ray for 1: set its "
         "resources: {TTNPU: 2}"),
        (["n150"] * 2, {"TTNPU": 2}, None),
        (["n150"] * 2, {"TTNPU": 0}, None),
        (["n300"], {}, None),
        (["n300"], {"TTNPU": 2}, "(1,2) is 1 device here, and the pool asks Ray for 2: set its "
         "resources: {TTNPU: 1}"),
        (["n300"] * 2, {"TTNPU": 2}, None),
    ],
)  # fmt: skip
def test_a_grid_takes_as_many_devices_as_its_pool_asks_ray_for(host, cards, resources, problem):
    host.add_everything(*cards)
    check = check_pool_on(host, pools("(1,2)", resources=resources))
    assert check.problem == problem
    host.environment["TT_METAL_MOCK_CLUSTER_DESC_PATH"] = str(host.write("n150.yaml"))
    assert check_pool_on(host, pools("(1,2)", resources=resources)).problem is None


def test_replicas_on_a_grid_fit_by_the_boards_that_they_take(host):
    host.add_everything(*["n150"] * 4)
    config = pools("(1,2)", replicas=3, resources={"TTNPU": 2})
    check = check_pool_on(host, config)
    assert check.note == "2 of 3 replicas fit here; others need further hosts"


def test_a_pool_whose_mesh_is_not_here_cannot_run(host):
    host.add_everything("n150")
    check = check_pool_on(host, pools("T3K"))
    assert "needs 4 n300 devices" in check.problem


def test_a_pool_cannot_run_before_missing_parts_are_fixed(host):
    host.add_board("n150")
    check = check_pool_on(host, pools("n150"))
    assert check.problem == "fix first: hugepages, ttnn"


def mesh_pool(**engine):
    return resolve({"pools": {"both": {"engine": {"block_size": 64, **engine}}}})


@pytest.mark.parametrize(
    ("mesh", "note"),
    [
        ({"trace_region_size": 50_000_000},
         "trace_region_size 50000000 is less than the 52000000 that such a mesh and model usually "
         "need: remove it to use 52000000"),
        ({"trace_region_size": 52_000_000}, ""),
        ({"trace_region_size": 1, "trace": "none"}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_a_trace_region_is_compared_with_the_table(host, mesh, note):
    host.add_everything("n150")
    check = check_pool_on(host, mesh_pool(mesh={"name": "N150", **mesh}))
    assert (check.problem, check.note) == (None, note)


@pytest.mark.parametrize(
    ("size", "is_noted"), [(None, False), (200_000_000, True), (216_580_672, False)]
)
def test_a_trace_region_is_compared_with_that_of_galaxy_classes(host, size, is_noted):
    mesh = {"name": "Galaxy", "trace_region_size": size}
    config = mesh_pool(
        mesh=mesh, generator="llama3_70b_galaxy", tt_data_parallel=4, max_batch_size=32
    )
    check = check_pool_on(host, config)
    assert ("200000000 is less than the 216580672 that" in check.note) == is_noted
    assert ("trace_region_size" in check.note) == is_noted


def test_a_foreign_class_needs_a_folder_that_can_be_written(host):
    host.add_everything("n150")
    mesh = {"name": "N150", "weight_cache": "/dev/null/weights"}
    check = check_pool_on(host, mesh_pool(mesh=mesh))
    assert check.problem is None, "ours go on without"
    make_checkout(host)
    check = check_pool_on(host, mesh_pool(mesh=mesh, generator="tt-metal"))
    assert "cannot write to /dev/null/weights" in check.problem
    assert "set weight_cache" in check.problem


def make_checkout(host):
    """A tt-metal that has the class's file, and that TT_METAL_HOME names."""
    host.write("metal/models/tt_transformers/tt/generator_vllm.py")
    host.environment["TT_METAL_HOME"] = str(host.root / "metal")


def test_a_foreign_class_is_looked_for_before_an_engine_starts(host):
    host.add_everything("n150")
    config = mesh_pool(mesh={"name": "N150"}, generator="tt-metal")
    assert "set TT_METAL_HOME or mesh.tt_metal_home" in check_pool_on(host, config).problem
    make_checkout(host)
    assert check_pool_on(host, config).problem is None
    misspelt = mesh_pool(mesh={"name": "N150"}, generator="tt-mettal")
    assert "no generator class for 'tt-mettal'" in check_pool_on(host, misspelt).problem


def test_a_user_without_a_home_is_told_what_to_set(host, monkeypatch):
    host.add_everything("n150")
    make_checkout(host)
    del host.environment["HOME"]
    take_home(monkeypatch)
    assert "set HOME" in found(host, "caches")[1]
    foreign = {"generator": "tt-metal", "mesh": {"name": "N150"}}
    assert "set HOME, or weight_cache" in check_pool_on(host, mesh_pool(**foreign)).problem
    kept = {"generator": "tt-metal", "mesh": {"name": "N150", "weight_cache": str(host.root)}}
    assert check_pool_on(host, mesh_pool(**kept)).problem is None


@pytest.mark.parametrize(
    ("cards", "mesh", "problem"),
    [
        (["n150"] * 2, {"name": "N150", "visible_devices": [1]}, None),
        (["n150"] * 2, {"name": "N150", "visible_devices": [2]},
         "visible_devices names 2, and the boards here are 0, 1"),
        (["n150", "n300"], {"name": "N150", "visible_devices": [1]},
         "of the boards in visible_devices [1]: it needs 1 n150 devices under /dev/tenstorrent, "
         "and this host has 0"),
        (["n300"] * 4, {"name": "T3K", "visible_devices": [0, 1, 2, 3]}, None),
        (["n300"] * 4, {"name": "(1,4)", "visible_devices": [0]},
         "of the boards in visible_devices [0]: it needs 4 wormhole chips, and this host has 2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("bound", [None, "0"])
def test_boards_in_visible_devices_are_checked(host, cards, mesh, problem, bound):
    """What an engine is bound to is the configuration's choice, whatever the environment says."""
    host.add_everything(*cards)
    lanes = mesh_spec(mesh["name"]).num_chips
    config = mesh_pool(mesh=mesh, tt_data_parallel=lanes, max_batch_size=lanes)
    if bound is not None:
        host.environment["TT_VISIBLE_DEVICES"] = bound
    check = check_pool_on(host, config)
    if problem is not None:
        assert check.problem == problem
    else:
        assert "visible_devices" not in (check.problem or "")


def test_pools_without_a_mesh_run_anywhere(host):
    simulated = {"simulated_mesh": {"model": "Llama-3.1-8B", "board": "T3K"}, "max_model_len": 512}
    both = [resolve({"engine": e, "pools": {"both": {}}}).engines["both"] for e in (simulated, {})]
    config = resolve({"pools": {"prefill": {}, "decode": {}}})
    config = dataclasses.replace(
        config, engines=dict(zip(("prefill", "decode"), both, strict=True))
    )
    checks = check_pools(config, host.report(), host.environment)
    assert [(c.pool, c.mesh, c.problem) for c in checks] == [
        ("prefill", "simulated T3K", None),
        ("decode", "CPU", None),
    ]


@pytest.fixture
def run(host, monkeypatch):
    """The command, on a host of ours."""
    monkeypatch.setattr(doctor, "read_host", lambda _environment: host.report())
    monkeypatch.setattr(doctor, "read_listeners", tuple)
    runner = CliRunner()
    return lambda *arguments: runner.invoke(cli.app, ["doctor", *map(str, arguments)])


CONFIG = """\
http_options: {host: 127.0.0.1}
applications:
- name: ttserve
  import_path: cluster.app:build
  args:
    model: demo
    pools: {both: {engine: {mesh: {name: T3K}, block_size: 64, tt_data_parallel: 8}}}
"""


def test_the_command_explains_a_host_without_boards(run):
    result = run()
    assert result.exit_code == 0
    assert "none: no PCI device of Tenstorrent's" in result.output
    assert "engines on the CPU, with torch" in result.output
    assert "engines on simulated meshes" in result.output
    assert max(map(len, result.output.splitlines())) < 160


def test_the_command_fails_only_for_a_configured_mesh_that_is_not_here(run, host, tmp_path):
    path = tmp_path / "t3k.yaml"
    path.write_text(CONFIG)
    result = run("--config", path)
    assert result.exit_code == 1
    assert "cannot run here: it needs 4 n300 devices" in result.output
    host.add_everything(*["n300"] * 4)
    result = run("--config", path)
    assert result.exit_code == 0
    assert "can run here" in result.output
    assert "T3K" in result.output


def test_the_command_refuses_a_bad_configuration(run, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(CONFIG.replace("T3K", "T4K"))
    result = run("--config", path)
    assert result.exit_code == 2
    assert "T4K" in result.output


def test_the_command_writes_everything_as_json(run, host):
    host.add_everything("n150")
    diagnosis = json.loads(run("--json").output)
    assert diagnosis["can_run_mesh"] is True
    assert diagnosis["meshes"] == [{"mesh": "N150", "num_replicas": 1, "condition": ""}]
    assert diagnosis["host"]["devices"][0]["board"] == "n150"
    assert diagnosis["http_front"] in {"haproxy", "python"}


def test_the_http_front_is_named(run, monkeypatch):
    monkeypatch.setattr(haproxy, "find_script", lambda: "/bin/ttserve-haproxy")
    assert "HTTP through HAProxy" in run().output
    monkeypatch.setattr(haproxy, "find_script", lambda: None)
    assert "HTTP through Serve's Python proxy" in run().output
