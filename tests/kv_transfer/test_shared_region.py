"""Region between processes: who may have it, what a reader can do with it, and its end."""

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import resource
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kv_transfer import host_memory
from kv_transfer.errors import TransferError, WireError
from kv_transfer.host_blocks import HostBlocks
from kv_transfer.layout import KVLayout
from kv_transfer.shared_region import (
    MAX_REGION_LAYOUT_BYTES,
    MappedRegion,
    RegionFetch,
    RegionLayout,
    RegionServer,
    SharedRegion,
)
from tests.kv_transfer.children import child

LAYOUT = KVLayout(2, 2, 16, 64, "bfloat16", "hf", "m")
NUM_BLOCKS, NUM_LANES = 3, 2
LANE_BYTES = NUM_BLOCKS * LAYOUT.bytes_per_block
NUM_BYTES = NUM_LANES * LANE_BYTES
OFFSETS = tuple(
    tuple(
        lane * LANE_BYTES + piece * NUM_BLOCKS * LAYOUT.piece_bytes
        for piece in range(LAYOUT.num_pieces)
    )
    for lane in range(NUM_LANES)
)
REGION_LAYOUT = RegionLayout(64, NUM_BLOCKS, LAYOUT.content_hash(), OFFSETS)
TICKET = b"a ticket"


def admits(shown: bytes) -> bool:
    return shown == TICKET


def make_region(seed: int = 1) -> SharedRegion:
    region = SharedRegion.create(NUM_BYTES)
    region.memory[:] = np.random.default_rng(seed).integers(0, 256, NUM_BYTES, np.uint8)
    return region


def own_lanes(region: SharedRegion) -> list[HostBlocks]:
    return [HostBlocks.within(LAYOUT, region.memory, at, NUM_BLOCKS) for at in OFFSETS]


def changed(**changes: Any) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(REGION_LAYOUT, **changes))


def mapped(region: SharedRegion, frame: bytes) -> MappedRegion:
    return MappedRegion(os.dup(region.fd), frame)


def received(fetch: RegionFetch) -> MappedRegion:
    """Wait for an answer that another process gives."""
    while (found := fetch.poll()) == "waiting":
        select.select([fetch], [], [])
    assert isinstance(found, MappedRegion)
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module", autouse=True)
def _nothing_of_other_tests_is_open() -> None:
    """Collect the regions and sockets that tests of other files have left as garbage."""
    gc.collect()


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    """Assert that a test leaves no file open, of its own or of an array that it has made."""
    before = open_files()
    yield
    if open_files() > before:
        gc.collect()
    assert open_files() == before


def bound_names() -> str:
    return Path("/proc/net/unix").read_text()


@contextmanager
def serving() -> Iterator[tuple[SharedRegion, RegionServer]]:
    region = make_region()
    server = RegionServer(region, REGION_LAYOUT, admits)
    try:
        yield region, server
    finally:
        server.close()
        region.close()


@contextmanager
def stranger() -> Iterator[tuple[socket.socket, str]]:
    """Listen where a server would, to answer otherwise."""
    name = secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0ttserve-kv-{name}")
        listener.listen()
        yield listener, f"shm://{name}"


# ---- the owner


def test_a_region_starts_as_zeros_of_its_size_and_is_closed_once() -> None:
    region = SharedRegion.create(12345)
    assert region.memory.shape == (12345,)
    assert not region.memory.any()
    assert os.fstat(region.fd).st_size == 12345
    assert not os.get_inheritable(region.fd)
    memory, fd = region.memory, region.fd
    region.close()
    region.close()
    assert region.fd == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    memory[:] = 7
    assert memory.all()


def test_an_unclosed_region_is_gone_with_its_last_array() -> None:
    before = open_files()
    memory = make_region().memory
    memory[0] = 1
    assert open_files() == before + 1


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_a_region_of_nothing_is_refused(num_bytes: int) -> None:
    with pytest.raises(TransferError, match="make the KV cache smaller"):
        SharedRegion.create(num_bytes)


def test_a_shortage_of_memory_is_refused_before_any_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Asked of the real host, a mistake here would cost every process on it its memory.
    monkeypatch.setattr(host_memory, "available_bytes", lambda: (8191, "on this host"))
    SharedRegion.create(8191)
    with pytest.raises(TransferError, match=r"8192 bytes.*only 8191 bytes are available"):
        SharedRegion.create(8192)


def test_available_memory_is_a_part_of_the_hosts() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    assert total / 1000 < host_memory.available_bytes()[0] <= total


def test_all_of_a_region_is_in_memory_from_the_start() -> None:
    region = SharedRegion.create(1 << 20)
    assert os.fstat(region.fd).st_blocks * 512 == 1 << 20


# ---- handing it out


def test_a_peer_waits_until_it_is_served_and_then_reads_the_owners_memory() -> None:
    with serving() as (region, server):
        fetch = RegionFetch(server.address, TICKET)
        assert fetch.poll() == "waiting"
        assert select.select([server], [], [], 0)[0]
        server.serve()
        assert select.select([fetch], [], [], 0)[0]
        found = fetch.poll()
        assert isinstance(found, MappedRegion)
        assert fetch.poll() == "failed"
        assert fetch.fileno() == -1
        lanes = found.lanes(LAYOUT)
        found.close()
        found.close()
        for lane, own in zip(lanes, own_lanes(region), strict=True):
            assert lane.layout == LAYOUT
            assert lane.num_blocks == NUM_BLOCKS
            assert np.array_equal(lane.digests([2, 0, 1]), own.digests([2, 0, 1]))
            assert not any(piece.flags.writeable for piece in lane.pieces)
        region.memory[:] = 5
        assert (lanes[1].read_rows([1], 0, 2) == 5).all()
        del lanes, lane


def test_what_is_received_is_not_passed_on_to_child_processes() -> None:
    with serving() as (_, server):
        fetch = RegionFetch(server.address, TICKET)
        assert not os.get_inheritable(fetch.fileno())
        server.serve()
        found = fetch.poll()
        links = {fd: f"/proc/self/fd/{fd}" for fd in map(int, os.listdir("/proc/self/fd"))}
        held = [
            fd
            for fd, link in links.items()
            if os.path.lexists(link) and "memfd:ttserve-kv" in os.readlink(link)
        ]
        assert len(held) == 3  # the owner's, of which the mapping has its own, and the received one
        assert not any(os.get_inheritable(fd) for fd in held)
        assert isinstance(found, MappedRegion)
        found.close()


def test_blocks_of_another_size_are_found_as_they_are() -> None:
    with serving() as (region, _):
        other = msgspec.structs.replace(LAYOUT, block_size=128)
        lanes = mapped(region, changed()).lanes(other)
        assert lanes[0].layout == LAYOUT
        target = HostBlocks.within(
            other,
            np.zeros(other.bytes_per_block, np.uint8),
            range(0, other.bytes_per_block, other.piece_bytes),
            1,
        )
        rows = lanes[1].read_rows([2, 1], 0, 4)
        target.write_rows([0], 0, rows)
        assert np.array_equal(target.read_rows([0], 0, 4), rows)


def test_a_layout_of_the_largest_size_arrives_and_a_larger_one_is_refused() -> None:
    with serving() as (region, _):
        lanes = (MAX_REGION_LAYOUT_BYTES - 100) // (9 * 1000 + 3)
        offsets = ((1 << 33,) * 1000,) * lanes
        region_layout = msgspec.structs.replace(REGION_LAYOUT, offsets=offsets)
        server = RegionServer(region, region_layout, admits)
        fetch = RegionFetch(server.address, TICKET)
        server.serve()
        found = fetch.poll()
        assert isinstance(found, MappedRegion)
        with pytest.raises(WireError, match="4 pieces"):
            found.lanes(LAYOUT)
        found.close()
        server.close()
        too_long = msgspec.structs.replace(REGION_LAYOUT, offsets=offsets * 2)
        with pytest.raises(TransferError, match="use fewer lanes"):
            RegionServer(region, too_long, admits)


@pytest.mark.parametrize(
    "address",
    [
        "shm://" + "0" * 32,
        "shm://" + "0" * 31,
        "shm://" + "G" * 32,
        "tcp://127.0.0.1:1",
        "",
    ],
)
def test_a_fetch_without_a_server_fails_at_once(address: str) -> None:
    fetch = RegionFetch(address, TICKET)
    assert fetch.poll() == "failed"
    fetch.close()


def test_only_the_whole_address_is_one() -> None:
    with serving() as (_, server):
        for address in (f"{server.address}\n", f"{server.address}0", f" {server.address}"):
            assert RegionFetch(address, TICKET).poll() == "failed"


def test_another_users_process_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (_, server):
        fetch = RegionFetch(server.address, TICKET)
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
            server.serve()
        assert fetch.poll() == "failed"


@pytest.mark.parametrize("shown", [b"", b"a ticket of another cluster", b"a ticket" * 1000])
def test_a_process_without_a_ticket_gets_nothing(shown: bytes) -> None:
    with serving() as (_, server):
        fetch = RegionFetch(server.address, shown)
        server.serve()
        assert fetch.poll() == "failed"


def test_a_peer_without_a_ticket_is_kept_until_others_need_its_place() -> None:
    with serving() as (_, server), ExitStack() as stack:
        name = "\0ttserve-kv-" + server.address.removeprefix("shm://")
        idle, slow, *others = (
            stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            for _ in range(257)
        )
        for peer in (idle, slow):
            peer.connect(name)
            peer.setblocking(False)
        server.serve()
        with pytest.raises(BlockingIOError):
            slow.recv(1)
        slow.send(TICKET)
        server.serve()
        assert slow.recv(1 << 17), "late is not too late"
        for peer in others:
            peer.connect(name)
        server.serve()
        with pytest.raises(BlockingIOError):
            idle.recv(1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as last:
            last.connect(name)
            server.serve()
            assert idle.recv(1) == b"", "the oldest gave way"


def test_without_descriptors_a_peer_is_turned_away_and_the_thread_may_sleep(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("ERROR", "kv_transfer")  # A record of the error would hold the region.
    with serving() as (_, server):
        fetch = RegionFetch(server.address, TICKET)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        fillers: list[int] = []
        try:
            with suppress(OSError):
                while True:
                    fillers.append(os.dup(0))
            server.serve()
            assert not select.select([server], [], [], 0)[0]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for filler in fillers:
                os.close(filler)
        assert fetch.poll() == "failed"
        again = RegionFetch(server.address, TICKET)
        server.serve()
        found = again.poll()
        assert isinstance(found, MappedRegion)
        found.close()


def test_another_users_server_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (_, server), monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        fetch = RegionFetch(server.address, TICKET)
        patch.undo()
        server.serve()
        assert fetch.poll() == "failed"


def test_closing_a_server_frees_its_name_and_fails_those_that_wait() -> None:
    with serving() as (_, server):
        name = server.address.removeprefix("shm://")
        fetch = RegionFetch(server.address, TICKET)
        assert name in bound_names()
        server.close()
        server.close()
        assert fetch.poll() == "failed"
        assert name not in bound_names()
        assert RegionFetch(server.address, TICKET).poll() == "failed"


@pytest.mark.parametrize(
    ("num_fds", "num_bytes"),
    [(0, 1), (2, 1), (20, 1), (0, MAX_REGION_LAYOUT_BYTES + 1), (1, MAX_REGION_LAYOUT_BYTES + 1)],
)
def test_an_answer_without_one_descriptor_and_one_layout_is_dropped(
    num_fds: int, num_bytes: int
) -> None:
    with stranger() as (listener, address), make_file() as file:
        fetch = RegionFetch(address, TICKET)
        peer, _ = listener.accept()
        socket.send_fds(peer, [bytes(num_bytes)], [file] * num_fds)
        peer.close()
        assert fetch.poll() == "failed"


# ---- what arrives is not trusted


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"", "not the layout"),
        (b"\xff", "not the layout"),
        (b"\xc1\x00", "not the layout"),
        (changed()[:-1], "not the layout"),
        (changed() + b"\0", "not the layout"),
        (msgspec.msgpack.encode([64, NUM_BLOCKS, "h", OFFSETS, 1]), "not the layout"),
        (msgspec.msgpack.encode([64, NUM_BLOCKS, "h"]), "not the layout"),
        (msgspec.msgpack.encode([64, NUM_BLOCKS, b"\xff", OFFSETS]), "not the layout"),
        (changed(num_blocks=0), "not the layout"),
        (changed(num_blocks=1 << 40), "not the layout"),
        (changed(block_size=-64), "not the layout"),
        (changed(offsets=()), "not the layout"),
        (changed(offsets=((-1, 0, 0, 0),)), "not the layout"),
        (changed(offsets=((1 << 60, 0, 0, 0),)), "not the layout"),
        (changed(content_hash="another"), "KV layout differs"),
        (changed(offsets=((0, 0, 0),)), "4 pieces"),
        (changed(offsets=((0, 0, 0, 0), ())), "4 pieces"),
        (changed(block_size=48), "impossible blocks"),
        (changed(block_size=96), "smaller than its layout"),
        (changed(num_blocks=NUM_BLOCKS + 1), "smaller than its layout"),
        (changed(num_blocks=(1 << 31) - 1), "smaller than its layout"),
        (changed(offsets=(*OFFSETS, (OFFSETS[1][-1] + 1, 0, 0, 0))), "smaller than its layout"),
        (changed(offsets=((1 << 55, 0, 0, 0),)), "smaller than its layout"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(frame: bytes, words: str) -> None:
    region = make_region()
    with pytest.raises(WireError, match=words):
        mapped(region, frame).lanes(LAYOUT)
    assert len(mapped(region, changed()).lanes(LAYOUT)) == NUM_LANES


@contextmanager
def make_file(size: int = NUM_BYTES) -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        yield file.fileno()


@pytest.mark.parametrize("seals", [None, 0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SHRINK | 0x10])
def test_memory_that_its_owner_could_shrink_is_refused(seals: int | None) -> None:
    """Reading behind the end of a file would kill the process."""
    if seals is None:
        with make_file() as file, pytest.raises(WireError):
            MappedRegion(os.dup(file), changed()).lanes(LAYOUT)
        return
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.truncate(fd, NUM_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(WireError, match="not sealed"):
        MappedRegion(fd, changed()).lanes(LAYOUT)


def test_a_pipe_and_an_empty_file_are_no_regions() -> None:
    fd = os.memfd_create("empty", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0x1F)
    with pytest.raises(WireError):
        MappedRegion(fd, changed()).lanes(LAYOUT)
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(WireError, match="cannot map"):
        MappedRegion(reader, changed()).lanes(LAYOUT)


# ---- between processes


@contextmanager
def owner() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run ``main`` in a process of its own."""
    with child("test_shared_region") as process:
        yield process, process.stdout.readline().strip()


def main() -> None:
    """Own a region and hand it out until killed."""
    region = make_region(seed=2)
    server = RegionServer(region, REGION_LAYOUT, admits)
    sys.stdout.write(f"{server.address}\n")
    sys.stdout.flush()
    while True:
        select.select([server], [], [])
        server.serve()


def holders(inode: int) -> list[str]:
    """Return the processes, among those that may be inspected, that have a file open or mapped."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    if "memfd:ttserve-kv" in str(link.readlink()) and link.stat().st_ino == inode:
                        found.append(str(link))
        with suppress(OSError):
            found.extend(
                f"{process}: {line}"
                for line in (process / "maps").read_text().splitlines()
                if "memfd:ttserve-kv" in line and line.split()[4] == str(inode)
            )
    return found


@pytest.mark.process
def test_a_receiver_reads_and_cannot_write_by_any_means() -> None:
    expected = make_region(seed=2)
    with owner() as (_, address):
        found = received(RegionFetch(address, TICKET))
        fd = found._fd
        lanes = found.lanes(LAYOUT)
        for lane, own in zip(lanes, own_lanes(expected), strict=True):
            target = own_lanes(make_region(seed=3))[0]
            assert target.copy_from(lane, [2, 0], [1, 2], own.digests([2, 0])) == []

        with pytest.raises(PermissionError):
            mmap.mmap(fd, NUM_BYTES, mmap.MAP_SHARED)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        for size in (0, 2 * NUM_BYTES):
            with pytest.raises(PermissionError):
                os.truncate(fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        piece = lanes[0].pieces[0]
        with pytest.raises(ValueError, match="read-only"):
            piece[0, 0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            piece.flags.writeable = True
        libc = ctypes.CDLL(None, use_errno=True)
        page = piece.ctypes.data & ~(mmap.PAGESIZE - 1)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        assert libc.mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, protection) == -1
        assert ctypes.get_errno() == errno.EACCES
        punch_and_keep_size = 3
        arguments = ctypes.c_long(0), ctypes.c_long(mmap.PAGESIZE)
        assert libc.fallocate(fd, punch_and_keep_size, *arguments) == -1
        assert ctypes.get_errno() == errno.EPERM

        assert np.array_equal(lanes[1].digests([0, 1]), own_lanes(expected)[1].digests([0, 1]))
        found.close()


@pytest.mark.process
def test_what_a_killed_owner_shared_stays_readable_and_is_gone_with_its_last_reader() -> None:
    expected = own_lanes(make_region(seed=2))
    with owner() as (process, address):
        name = address.removeprefix("shm://")
        found, waiting = received(RegionFetch(address, TICKET)), RegionFetch(address, TICKET)
        inode = os.fstat(found._fd).st_ino
        lanes = found.lanes(LAYOUT)
        found.close()
        assert name in bound_names()
        assert any(f"/{process.pid}/" in holder for holder in holders(inode))
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert RegionFetch(address, TICKET).poll() == "failed"
        answered_or_failed = waiting.poll()
        assert answered_or_failed != "waiting"
        if isinstance(answered_or_failed, MappedRegion):
            answered_or_failed.close()
        for lane, own in zip(lanes, expected, strict=True):
            assert np.array_equal(lane.digests([0, 1, 2]), own.digests([0, 1, 2]))
        assert holders(inode)
        del lane, lanes, found, answered_or_failed
        gc.collect()
        assert holders(inode) == []
        assert name not in bound_names()


if __name__ == "__main__":
    main()
