"""The boards that `tt-smi` resets: doubles of the command record its runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from replicas.errors import DeviceError
from replicas.generators.ttnn.board_locks import BoardLocks
from replicas.generators.ttnn.board_reset import lock_names, reset_left_open
from replicas.tt.boards import read_devices
from tests.hosts import FakeHost

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CROSSED = (3, 1, 0, 2)
"""Device nodes of four boards in the order of their addresses, which is not theirs."""


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path / "host")


def crossed(host: FakeHost, card: str = "n300") -> list[str]:
    return [host.add_board(card, node=node) for node in CROSSED]


def die_with(host: FakeHost, boards: Sequence[str]) -> BoardLocks:
    """A process opens these boards and dies; the locks of the next one that wants them."""
    folder = host.root / "locks"
    dead = BoardLocks(boards, folder)
    dead.mark_open()
    dead.release()
    return BoardLocks(boards, folder)


def reset(host: FakeHost, locks: BoardLocks) -> None:
    reset_left_open(locks, read_devices(host.root), host.environment)


@pytest.mark.parametrize(
    ("visible", "version", "asked"),
    [
        # The first two addresses have the nodes 3 and 1.
        ("0,1", "6.2.1", "-r /dev/tenstorrent/1,/dev/tenstorrent/3\n"),
        ("0,1", "4.2.0", "-r /dev/tenstorrent/1,/dev/tenstorrent/3\n"),
        ("0,1", "4.1.2", "-r 1,3\n"),
        ("0,1", "3.0.39", "-r 1,3\n"),
        ("0000:03:00.0", "6.2.1", "-r /dev/tenstorrent/0\n"),
        ("0000:03:00.0", "3.0.39", "-r 0\n"),
        ("2", "3.0.39", "-r 0\n"),
    ],
)
def test_the_boards_that_were_open_are_reset_and_no_others(
    host: FakeHost, visible: str, version: str, asked: str
) -> None:
    crossed(host)
    run = host.add_tt_smi(version=version)
    names = lock_names(visible.split(","), read_devices(host.root))
    reset(host, die_with(host, names))
    assert run.read_text() == asked


def test_of_several_boards_only_the_one_that_was_open(host: FakeHost) -> None:
    addresses = crossed(host)
    run = host.add_tt_smi()
    die_with(host, addresses[2:3]).release()
    locks = BoardLocks(addresses, host.root / "locks")
    assert locks.left_open == (addresses[2],)
    reset(host, locks)
    assert run.read_text() == "-r /dev/tenstorrent/0\n"


def test_a_reset_by_nodes_looks_at_our_own_boards_alone_afterwards(host: FakeHost) -> None:
    addresses = crossed(host)
    run = host.add_tt_smi()
    host.environment["TT_VISIBLE_DEVICES"] = "2"
    reset(host, die_with(host, addresses[2:3]))
    assert run.read_text() == "-r /dev/tenstorrent/0 on 2\n"


def test_a_board_that_others_have_open_is_not_reset_under_them(host: FakeHost) -> None:
    addresses = crossed(host)
    run = host.add_tt_smi()
    host.write("proc/driver/tenstorrent/3/pids", f"71\n{os.getpid()}\n72\n0\n")
    locks = die_with(host, addresses[:1])
    with pytest.raises(DeviceError) as refused:
        reset(host, locks)
    text = str(refused.value)
    assert "/dev/tenstorrent/3 by a process elsewhere, process 71, process 72" in text
    assert str(os.getpid()) not in text
    file = locks.folder / f"{addresses[0]}.lock"
    assert f"end these processes, or run `tt-smi -r /dev/tenstorrent/3` and delete {file}" in text
    assert file.exists()
    assert not run.exists()


def test_what_this_process_has_open_itself_is_reset(host: FakeHost) -> None:
    addresses = crossed(host)
    run = host.add_tt_smi()
    host.write("proc/driver/tenstorrent/3/pids", f"{os.getpid()}\n")
    host.write("proc/driver/tenstorrent/1/pids", "71\n")
    reset(host, die_with(host, addresses[:1]))
    assert run.read_text() == "-r /dev/tenstorrent/3\n"


def test_a_galaxy_with_an_open_chip_is_not_reset(host: FakeHost) -> None:
    addresses = galaxy(host)
    run = host.add_tt_smi()
    host.write("proc/driver/tenstorrent/31/pids", "71\n")
    die_with(host, addresses[:1]).release()
    with pytest.raises(DeviceError, match=r"/dev/tenstorrent/31 by process 71: end these"):
        reset(host, BoardLocks(addresses, host.root / "locks"))
    assert not run.exists()


def test_boards_that_were_closed_are_left_alone(host: FakeHost) -> None:
    addresses = crossed(host)
    run = host.add_tt_smi()
    reset(host, BoardLocks(addresses, host.root / "locks"))
    assert not run.exists()


def test_two_names_of_one_board_are_one_lock(host: FakeHost) -> None:
    addresses = crossed(host)
    devices = read_devices(host.root)
    assert lock_names(["1"], devices) == lock_names(["02:00.0"], devices) == (addresses[1],)
    assert lock_names(["1", "0000:02:00.0"], devices) == (addresses[1],)
    assert sorted(lock_names([], devices)) == addresses
    assert lock_names(["7", "0"], devices) == ("7", addresses[0])


def test_a_command_that_says_no_version_is_not_guessed_at(host: FakeHost) -> None:
    (address,) = [host.add_board("n150", node=5)]
    run = host.add_tt_smi(version="tt-smi")
    with pytest.raises(DeviceError, match=r"prints no version.* reset /dev/tenstorrent/5 by hand"):
        reset(host, die_with(host, [address]))
    assert not run.exists()


def test_a_reset_that_fails_says_what_the_command_said(host: FakeHost) -> None:
    address = host.add_board("n150")
    host.add_tt_smi(code=3)
    with pytest.raises(DeviceError, match=r"`tt-smi -r /dev/tenstorrent/0` .* exit code 3: \{"):
        reset(host, die_with(host, [address]))


def test_without_the_command_it_is_said_what_to_run(
    host: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = crossed(host)
    reset(host, die_with(host, addresses[:1]))
    assert "tt-smi -r /dev/tenstorrent/3" in caplog.text


def test_a_board_that_is_not_found_is_not_reset(
    host: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    crossed(host)
    run = host.add_tt_smi()
    reset(host, die_with(host, ["7"]))
    assert "boards 7 open, and this host has no device nodes" in caplog.text
    assert not run.exists()


def galaxy(host: FakeHost, *, is_named: bool = True) -> list[str]:
    addresses = []
    for _ in range(32):
        addresses.append(host.add_board("n", is_named=False))
        (folder,) = (host.root / f"sys/bus/pci/devices/{addresses[-1]}/tenstorrent").iterdir()
        if is_named:
            (folder / "tt_card_type").write_text("galaxy-wormhole\n")
        else:
            host.write(f"sys/bus/pci/devices/{addresses[-1]}/subsystem_device", "0x0035\n")
    return addresses


@pytest.mark.parametrize("is_named", [True, False], ids=["new driver", "old driver"])
def test_a_galaxy_is_reset_by_the_holder_of_all_its_chips(host: FakeHost, is_named: bool) -> None:
    addresses = galaxy(host, is_named=is_named)
    run = host.add_tt_smi()
    # Ray sets it for an engine that has all boards too, and tt-smi refuses to reset under it.
    host.environment["TT_VISIBLE_DEVICES"] = ",".join(map(str, range(32)))
    reset(host, die_with(host, addresses))
    assert run.read_text() == "-glx_reset\n"


def test_a_part_of_a_galaxy_is_not_reset_under_the_others(host: FakeHost) -> None:
    addresses = galaxy(host)
    run = host.add_tt_smi()
    with pytest.raises(DeviceError, match=r"all 32 .* has 8: stop .* `tt-smi -glx_reset`, and del"):
        reset(host, die_with(host, addresses[:8]))
    assert not run.exists()


def test_an_old_command_does_not_touch_a_galaxy(host: FakeHost) -> None:
    addresses = galaxy(host)
    run = host.add_tt_smi(version="3.0.20")
    with pytest.raises(DeviceError, match=r"tt-smi 3\.0\.20 cannot reset a Galaxy"):
        reset(host, die_with(host, addresses))
    assert not run.exists()
