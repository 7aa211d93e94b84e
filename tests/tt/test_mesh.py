"""Opening, dividing and closing meshes, on ttnn's mock device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import ttnn

from replicas.config import EngineConfig, MeshConfig
from replicas.errors import ConfigError, DeviceError
from replicas.generators.ttnn import mesh as mesh_module
from replicas.generators.ttnn.board_locks import BoardLocks
from replicas.generators.ttnn.mesh import TTMesh, names_to_open, open_mesh, ttnn_message
from replicas.launch import child_environment
from replicas.tt.boards import read_devices
from tests.hosts import FakeHost
from tests.tt.mock.boards import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    OpenMesh = Callable[..., TTMesh]

_LANES = [
    ("N150", 1, (1, 1)),
    ("N300", 1, (1, 2)),
    ("N300", 2, (1, 1)),
    *[("T3K", lanes, (1, 8 // lanes)) for lanes in (1, 2, 4, 8)],
    ("P150", 1, (1, 1)),
    *[("P150x4", lanes, (1, 4 // lanes)) for lanes in (1, 4)],
]


def _zeros(device: object) -> ttnn.Tensor:
    zeros = torch.zeros(1, 1, 32, 64)
    return ttnn.from_torch(zeros, dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT, device=device)


@pytest.mark.parametrize(
    ("name", "lanes", "shape"),
    [
        pytest.param(*case, marks=pytest.mark.board(case[0]), id=f"{case[0]}-{case[1]}")
        for case in _LANES
    ],
)
def test_lanes_are_rows_of_chips_of_their_own(
    open_mock_mesh: OpenMesh, name: str, lanes: int, shape: tuple[int, int]
) -> None:
    mesh = open_mock_mesh(name)
    devices = mesh.lanes(lanes)
    assert [tuple(device.shape) for device in devices] == [shape] * lanes
    chips = [chip for device in devices for chip in device.get_device_ids()]
    assert len(set(chips)) == len(chips) == mesh.spec.num_chips
    assert mesh.lanes(lanes) == devices


@pytest.mark.board("T3K")
@pytest.mark.parametrize(("lanes", "shape"), [(1, (1, 8)), (2, (1, 4)), (4, (1, 2))])
def test_a_grid_is_cut_into_rectangles_that_become_rows(
    open_mock_mesh: OpenMesh, lanes: int, shape: tuple[int, int]
) -> None:
    devices = open_mock_mesh("(2,4)").lanes(lanes)
    assert [tuple(device.shape) for device in devices] == [shape] * lanes


@pytest.mark.parametrize(
    ("shape", "num_chips", "cut"),
    [((1, 8), 2, (1, 2)), ((8, 4), 32, (8, 4)), ((8, 4), 8, (2, 4)), ((8, 4), 2, (1, 2))],
)
def test_a_mesh_is_cut_as_flat_as_it_can_be(
    shape: tuple[int, int], num_chips: int, cut: tuple[int, int]
) -> None:
    assert mesh_module._cut(shape, num_chips) == cut


class _Galaxy:
    """A double of 32 chips, because this ttnn has no mock descriptor of a Galaxy."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def reshape(self, shape: ttnn.MeshShape) -> None:
        self.asked.append(("reshape", tuple(shape)))

    def create_submeshes(self, shape: ttnn.MeshShape) -> list[_Galaxy]:
        self.asked.append(("cut", tuple(shape)))
        self.parts = [_Galaxy() for _ in range(32 // (shape[0] * shape[1]))]
        return list(self.parts)


@pytest.mark.parametrize(
    ("name", "lanes", "cut", "order"),
    [
        ("Galaxy", 2, (2, 8), [0, 1]),
        ("Galaxy", 4, (1, 8), [0, 2, 3, 1]),
        ("TG", 4, (1, 8), [0, 2, 3, 1]),
        ("BHGalaxy", 4, (1, 8), [0, 1, 2, 3]),
        ("Galaxy", 8, (1, 4), list(range(8))),
        ("Galaxy", 32, (1, 1), list(range(32))),
    ],
)
def test_lanes_of_a_galaxy_are_cut_from_rows_of_eight(
    name: str, lanes: int, cut: tuple[int, int], order: list[int]
) -> None:
    settings = MeshConfig(name=name)
    device = _Galaxy()
    mesh = TTMesh(device, settings.spec, settings)
    assert mesh.lanes(lanes) == [device.parts[index] for index in order]
    assert device.asked == [("reshape", (4, 8)), ("cut", cut)]
    rows = [] if cut[0] == 1 else [("reshape", (1, 32 // lanes))]
    assert all(lane.asked == rows for lane in device.parts)


def test_no_rectangles_of_that_many_chips() -> None:
    with pytest.raises(ConfigError, match="3 by 3 cannot be cut into rectangles of 2"):
        mesh_module._cut((3, 3), 2)


@pytest.mark.board("T3K")
def test_lanes_that_do_not_divide_the_chips(open_mock_mesh: OpenMesh) -> None:
    with pytest.raises(ConfigError, match="tt_data_parallel 3 does not divide the 8 chips"):
        open_mock_mesh().lanes(3)


@pytest.mark.board("T3K")
def test_a_mesh_is_divided_once(open_mock_mesh: OpenMesh) -> None:
    mesh = open_mock_mesh()
    mesh.lanes(4)
    with pytest.raises(ConfigError, match="divided into 4 lanes and cannot be divided into 2"):
        mesh.lanes(2)


@pytest.mark.board("T3K")
def test_closing_twice_and_opening_another(open_mock_mesh: OpenMesh) -> None:
    mesh = open_mock_mesh()
    kept = [_zeros(lane) for lane in mesh.lanes(4)]
    mesh.close()
    mesh.close()
    ring = open_mock_mesh("(2,4)", fabric="FABRIC_1D_RING")
    ring.close()
    assert open_mock_mesh("N150").lanes(1)
    assert len(kept) == 4


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[object, ...], dict]]:
    """A record of ttnn's calls to open, bind and close, in order; the calls are made as usual."""
    seen: list[tuple[str, tuple[object, ...], dict]] = []

    def watch(name: str) -> None:
        real = getattr(ttnn, name)

        def call(*args: object, **kwargs: object) -> object:
            seen.append((name, args, kwargs))
            return real(*args, **kwargs)

        monkeypatch.setattr(ttnn, name, call)

    for name in ("set_fabric_config", "open_mesh_device", "close_mesh_device"):
        watch(name)
    return seen


@pytest.mark.board("T3K")
def test_the_order_of_opening_and_closing(open_mock_mesh: OpenMesh, calls: list) -> None:
    mesh = open_mock_mesh(
        trace_region_size=1 << 20, worker_l1_size=1344544, l1_small_size=32768,
        dispatch_core_axis="col",
    )  # fmt: skip
    lanes = mesh.lanes(2)
    mesh.close()
    assert [name for name, _, _ in calls] == [
        "set_fabric_config",
        "open_mesh_device",
        "close_mesh_device",
        "close_mesh_device",
        "close_mesh_device",
        "set_fabric_config",
    ]
    assert calls[0][2] == {"config": ttnn.FabricConfig.FABRIC_1D}
    (shape,), sizes = calls[1][1:]
    assert tuple(shape) == (1, 8)
    axis = sizes.pop("dispatch_core_config").axis
    assert axis == ttnn.DispatchCoreAxis.COL
    assert sizes == {
        "trace_region_size": 1 << 20,
        "worker_l1_size": 1344544,
        "l1_small_size": 32768,
    }
    closed = [args[0] for name, args, _ in calls if name == "close_mesh_device"]
    assert closed == [*lanes, mesh.device]
    assert calls[-1][1] == (ttnn.FabricConfig.DISABLED,)


@pytest.mark.board("N150")
def test_one_chip_has_no_fabric(open_mock_mesh: OpenMesh, calls: list) -> None:
    open_mock_mesh(fabric="FABRIC_1D", fabric_config={"config": "FABRIC_2D"}).close()
    assert [name for name, _, _ in calls] == ["open_mesh_device", "close_mesh_device"]
    assert calls[0][2]["dispatch_core_config"].axis == ttnn.DispatchCoreAxis.ROW
    assert "worker_l1_size" not in calls[0][2]


@pytest.mark.board("N300")
@pytest.mark.parametrize(
    ("fabric", "asked", "config"),
    [
        (None, {"config": "FABRIC_1D_RING"}, "FABRIC_1D_RING"),
        (None, {"config": ttnn.FabricConfig.FABRIC_1D_RING}, "FABRIC_1D_RING"),
        ("FABRIC_1D", {"config": "FABRIC_1D_RING"}, "FABRIC_1D"),
        ("FABRIC_2D", None, "FABRIC_2D"),
    ],
)
def test_which_fabric(
    open_mock_mesh: OpenMesh, calls: list, fabric: str | None, asked: dict | None, config: str
) -> None:
    reliability = {"reliability_mode": "RELAXED_INIT"}
    open_mock_mesh(fabric=fabric, fabric_config=None if asked is None else asked | reliability)
    given = calls[0][2]
    assert given["config"] == getattr(ttnn.FabricConfig, config)
    if asked is not None:
        assert given["reliability_mode"] == ttnn.FabricReliabilityMode.RELAXED_INIT


@pytest.mark.board("N300")
def test_what_cannot_be_opened(open_mock_mesh: OpenMesh) -> None:
    with pytest.raises(DeviceError, match=r"T3K needs 8 chips, but ttnn finds 2 .*ttserve doctor"):
        open_mock_mesh("T3K")
    with pytest.raises(DeviceError, match=r"P150 has blackhole chips, .* are wormhole"):
        open_mock_mesh("P150")
    with pytest.raises(ConfigError, match=r"ttnn has no FabricConfig 'RING'; use one of .*1D_RING"):
        open_mock_mesh(fabric="RING")
    with pytest.raises(ConfigError, match="2 hosts"):
        open_mock_mesh("DualGalaxy")
    with pytest.raises(DeviceError, match="cannot open mesh N300: Worker L1 size 1073741824 is"):
        open_mock_mesh(worker_l1_size=1 << 30)
    with pytest.raises(DeviceError, match="cannot open mesh N300: set_fabric_config"):
        open_mock_mesh(fabric_config={"planets": 9})
    assert open_mock_mesh().lanes(2)


@pytest.mark.board("P150x4")
def test_a_grid_is_of_the_architecture_that_it_says(open_mock_mesh: OpenMesh) -> None:
    with pytest.raises(DeviceError, match=r"has wormhole chips.* set mesh.arch: blackhole"):
        open_mock_mesh("(1,4)")
    mesh = open_mock_mesh("(1,4)", arch="blackhole")
    assert mesh.spec == mesh.settings.spec
    assert mesh.spec.arch == "blackhole"


@pytest.mark.board("N300")
def test_a_mistyped_fabric_needs_no_reset(
    open_mock_mesh: OpenMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TT_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="RING"):
        open_mock_mesh(fabric="RING")
    open_mock_mesh()
    assert "tt-smi" not in caplog.text


@pytest.mark.board("N300")
def test_a_failed_close_leaves_the_mark_and_the_lock(
    open_mock_mesh: OpenMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TT_VISIBLE_DEVICES", "0")
    mesh = open_mock_mesh()
    close = ttnn.close_mesh_device

    def refuse(device: object) -> None:
        close(device)
        raise RuntimeError("TT_THROW @ /src/mesh.cpp:1: x\ninfo:\ncq is in use\nbacktrace:\n --- f")

    monkeypatch.setattr(ttnn, "close_mesh_device", refuse)
    mesh.close()
    assert "cq is in use" in caplog.text
    monkeypatch.setattr(ttnn, "close_mesh_device", close)
    with pytest.raises(DeviceError, match=f"board 0 is in use by process {os.getpid()}"):
        open_mock_mesh()
    mesh._locks.release()


def test_the_boards_that_are_opened() -> None:
    any_boards = MeshConfig(name="N300")
    assert names_to_open(any_boards, None) == names_to_open(any_boards, "") == ()
    assert names_to_open(any_boards, "0, 3") == ("0", "3")
    assert names_to_open(any_boards, "0,") == names_to_open(any_boards, ",0 ,") == ("0",)
    two = MeshConfig(name="N300", visible_devices=(2, 3))
    assert names_to_open(two, "3,2") == ("3", "2")
    for bound in (None, "2", "0,1"):
        with pytest.raises(ConfigError, match=f"'2', '3'.*TT_VISIBLE_DEVICES={bound or ''}:"):
            names_to_open(two, bound)


def test_the_message_among_the_lines() -> None:
    fatal = "TT_FATAL @ /src/mesh.cpp:1: a <= b\ninfo:\nA is too large\nbacktrace:\n --- f\n"
    assert ttnn_message(RuntimeError(fatal)) == "A is too large"
    assert ttnn_message(RuntimeError("\nplain\nmore")) == "plain"
    assert ttnn_message(RuntimeError()) == "RuntimeError"


_HOLD = """
import logging, sys
from replicas.config import MeshConfig
from replicas.generators.ttnn.mesh import open_mesh

mesh = open_mesh(MeshConfig(name="N300", visible_devices=(0,)))
mesh.lanes(int(sys.argv[1]))
print(mesh.device.get_num_devices(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start_holder(tmp_path: Path) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """Starts a process that opens board 0 of an N300 and keeps it until its input ends."""
    processes: list[subprocess.Popen[str]] = []

    def start(lanes: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _HOLD, str(lanes)],
            env={
                **os.environ, **environment("N300"),
                "TMPDIR": str(tmp_path), "TT_VISIBLE_DEVICES": "0",
            },
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes.append(process)
        assert process.stdout.readline() == "2\n"
        return process

    yield start
    for process in processes:
        process.kill()
        with process:
            pass


@pytest.mark.board("N300")
def test_two_processes_and_one_board(
    open_mock_mesh: OpenMesh,
    start_holder: Callable[[int], subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("TT_VISIBLE_DEVICES", "0")
    holder = start_holder(1)
    with pytest.raises(DeviceError, match=f"board 0 is in use by process {holder.pid}; end it"):
        open_mock_mesh()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    # A mock cluster's boards are none of the host's: nothing may be reset for them.
    open_mock_mesh().close()
    assert "no device nodes for them" in caplog.text


@pytest.mark.board("N300")
def test_a_board_that_was_left_open_is_reset_before_it_is_opened(
    open_mock_mesh: OpenMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = FakeHost(tmp_path / "host")
    address = host.add_board("n300", node=4)
    monkeypatch.setattr(mesh_module, "_host_devices", lambda: read_devices(host.root))
    monkeypatch.setenv("TT_VISIBLE_DEVICES", "0")
    asked = host.add_tt_smi()
    monkeypatch.setenv("PATH", host.environment["PATH"])
    dead = BoardLocks([address])
    dead.mark_open()
    dead.release()
    mesh = open_mock_mesh()
    assert asked.read_text() == "-r /dev/tenstorrent/4 on 0\n"
    mesh.close()
    open_mock_mesh().close()
    assert asked.read_text().count("-r") == 1, "a mesh that was closed needs no reset"
    dead = BoardLocks([address])
    dead.mark_open()
    dead.release()
    host.add_tt_smi(code=3)
    with pytest.raises(DeviceError, match="did not reset the boards, exit code 3"):
        open_mock_mesh()
    assert BoardLocks([address]).left_open == (address,), "and the next one tries again"


@pytest.mark.board("N300")
def test_a_mesh_is_closed_when_its_process_exits(
    start_holder: Callable[[int], subprocess.Popen[str]], tmp_path: Path
) -> None:
    holder = start_holder(2)
    (lock,) = tmp_path.glob("*/0.lock")
    assert lock.read_text() == f"{holder.pid}\n"
    holder.stdin.close()
    assert holder.wait() == 0
    assert lock.read_text() == ""


_LOOK = """
from pathlib import Path
from replicas.config import MeshConfig
from replicas.generators.ttnn.mesh import open_mesh

open_mesh(MeshConfig(name="N150"))
print("shared memory" if "sm_segment" in Path("/proc/self/maps").read_text() else "none")
"""


def test_an_engine_leaves_nothing_in_shared_memory_and_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    root = str(Path(__file__).parents[2])
    of_test = {**os.environ, **environment("N150"), "PYTHONPATH": root}
    for name in ("OMPI_MCA_btl", "TT_METAL_LOGS_PATH"):
        of_test.pop(name, None)
    on_mesh = EngineConfig(model="/none", mesh=MeshConfig(name="N150"))
    folder = tmp_path / "folder"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _LOOK],
        env=child_environment(on_mesh, of_test), cwd=folder,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "none"
    assert list(folder.iterdir()) == []
    assert (tmp_path / ".cache" / "ttserve" / "ttnn-logs" / "generated").is_dir()


def test_no_device_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> int:
        raise RuntimeError("TT_FATAL @ /src/cluster.cpp:1: n > 0\ninfo:\nNo chips detected\n")

    monkeypatch.setattr(ttnn, "get_num_devices", nothing)
    with pytest.raises(DeviceError, match=r"N150 needs 1 chips, .* none .*\(No chips detected\)"):
        open_mesh(MeshConfig(name="N150"))
