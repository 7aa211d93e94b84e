"""The Mooncake store: a real master and two engines, where its package is installed."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kv_transfer.errors import TransferError
from kv_transfer.store import StoreConfig
from kv_transfer.stores import backoff, mooncake
from kv_transfer.stores.mooncake import MooncakeStore
from kv_transfer.stores.mooncake_process import MooncakeReply
from tests.kv_transfer.stores.shm_servers import eventually, value

REPOSITORY = Path(__file__).resolve().parents[3]
VALUE_BYTES = 1 << 20
CAPACITY = 32 << 20
LEASE_MS = 300


def missing() -> str:
    """Return why the package cannot be used here, or nothing."""
    if not mooncake._is_installed():
        return "no package mooncake-transfer-engine"
    command = [sys.executable, "-c", "import mooncake.store"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stderr.strip().rpartition("\n")[2]


REASON = missing()
needs_mooncake = pytest.mark.skipif(
    bool(REASON) and "TTSERVE_REQUIRE_TRANSPORTS" not in os.environ, reason=REASON or "installed"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def config(address: str, timeout_s: float = 60.0) -> StoreConfig:
    return StoreConfig(
        backend="mooncake", address=address, capacity_bytes=CAPACITY, timeout_s=timeout_s
    )


@contextlib.contextmanager
def master() -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Run a master; yields its address and its process."""
    command = shutil.which("mooncake_master", path=str(Path(sys.executable).parent))
    assert command is not None
    port = free_port()
    options = ["--rpc_address=127.0.0.1", f"--rpc_port={port}", f"--metrics_port={free_port()}"]
    options += [f"--default_kv_lease_ttl={LEASE_MS}", "--enable_metric_reporting=false"]
    process = subprocess.Popen([command, *options], stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: is_open(port))
        yield f"127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def engine(address: str, timeout_s: float = 60.0) -> Iterator[MooncakeStore]:
    store = MooncakeStore(config(address, timeout_s))
    try:
        yield store
    finally:
        store.close()


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_is_installed", lambda: False)
    with pytest.raises(TransferError, match="mooncake-transfer-engine-non-cuda"):
        MooncakeStore(config("127.0.0.1:50051"))


@pytest.mark.parametrize("address", ["", "host", "host:", ":50051", "host:port"])
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(TransferError, match="needs host:port of its master"):
        MooncakeStore(config(address))


@pytest.mark.process
def test_a_member_whose_engine_is_gone_ends_at_once() -> None:
    ours, theirs = socket.socketpair()
    nobody = 1 << 30
    command = [sys.executable, "-m", "kv_transfer.stores.mooncake_process"]
    command += [str(theirs.fileno()), str(nobody), "127.0.0.1", "1", "1"]
    with ours, theirs:
        ended = subprocess.run(
            command, cwd=REPOSITORY, pass_fds=(theirs.fileno(),), timeout=60, check=False
        )
        theirs.close()
        assert ended.returncode == 1
        assert ours.recv(1) == b"", "it went on to join"


@pytest.mark.process
@pytest.mark.skipif(not REASON, reason="the package is installed")
def test_a_member_that_cannot_join_is_a_miss_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mooncake, "_is_installed", lambda: True)
    store = MooncakeStore(config("127.0.0.1:1", timeout_s=30.0))
    assert store.num_present([b"a"]) == 0
    store.close()
    assert "_ClusterError" in caplog.text


class Ended:
    """Stands for the process that another thread ends meanwhile."""

    is_killed = False

    def kill(self) -> None:
        self.is_killed = True


def test_a_process_that_ends_while_the_store_is_closed_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Ended()
    seen = [process]

    class Racing(MooncakeStore):
        @property
        def _process(self) -> Ended | None:
            return seen.pop() if seen else None

        @_process.setter
        def _process(self, _: object) -> None:
            pass

    monkeypatch.setattr(mooncake, "_is_installed", lambda: True)
    Racing(config("127.0.0.1:1")).close()
    assert process.is_killed


class Puts:
    """Stands for the process in a put: takes its time over every answer."""

    def __init__(self) -> None:
        self.told = iter([MooncakeReply(0), MooncakeReply(1)])

    def send_bytes(self, _: bytes) -> None:
        time.sleep(0.03)

    def recv_bytes(self, _: int) -> bytes:
        return msgspec.msgpack.encode(next(self.told))

    def close(self) -> None:
        pass


def test_copying_a_value_does_not_count_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_is_installed", lambda: True)
    monkeypatch.setattr(backoff, "COPY_BYTES_PER_S", 1.0)
    store = MooncakeStore(config("127.0.0.1:1", timeout_s=0.05))
    store._connection = Puts()
    assert store.put(b"a", np.zeros(60, np.uint8)) == "stored"
    assert store.counters().errors == 0
    store.close()


@pytest.mark.process
@needs_mooncake
def test_another_engine_reads_what_one_put() -> None:
    with master() as (address, _), engine(address) as one, engine(address) as other:
        assert other.num_present([b"a"]) == 0
        assert one.put(b"a", value(1)) == "stored"
        assert one.put(b"b", value(2)) == "stored"
        assert other.put(b"a", value(3)) == "present"
        assert other.num_present([b"a", b"b", b"c", b"a"]) == 2
        leases = other.get([b"a", b"b", b"c"])
        assert [np.array_equal(leases[n].value, value(n + 1)) for n in range(2)] == [True, True]
        assert len(leases) == 2
        assert not leases[0].value.flags.writeable
        assert all(lease.release() for lease in leases)
        assert (other.counters().hits, other.counters().misses) == (2, 4)
        one.discard(b"a")
        assert other.num_present([b"a"]) == 0
        assert other.put(b"a", value(4)) == "stored"
        assert np.array_equal(one.get([b"a"])[0].value, value(4))
        assert one.num_present([b"c"]) == 0
        assert one.put(b"big", np.zeros(3 * CAPACITY, np.uint8)) == "dropped"
        assert one.put(b"none", np.zeros(0, np.uint8)) == "dropped"
        assert one.num_present([]) == 0
        assert one.counters().errors == 0


@pytest.mark.process
@needs_mooncake
def test_what_is_read_stays_while_others_come_and_go() -> None:
    with master() as (address, _), engine(address) as one, engine(address) as other:
        assert one.put(b"a", value(0)) == "stored"
        (lease,) = one.get([b"a"])
        outcomes = {"stored": 0, "present": 0, "dropped": 0}
        while outcomes["stored"] < 4 * CAPACITY // VALUE_BYTES:
            outcomes[other.put(b"%d" % sum(outcomes.values()), value(9))] += 1
        assert one.num_present([b"a"]) == 0
        assert np.array_equal(lease.value, value(0))
        assert lease.release()


@pytest.mark.process
@needs_mooncake
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_master_that_is_gone_or_frozen_is_a_miss_and_is_not_waited_for(how: int) -> None:
    with master() as (address, process), engine(address, timeout_s=0.3) as store:
        # A put whose answer came too late has stored the value all the same.
        eventually(lambda: store.put(b"a", value(0)) != "dropped")
        process.send_signal(how)
        os.waitpid(process.pid, os.WUNTRACED)  # A busy machine delivers a signal late.
        errors = store.counters().errors
        for _ in range(200):
            assert store.num_present([b"a"]) == 0
            assert store.get([b"a"]) == []
            assert store.put(b"b", value(1)) == "dropped"
        assert 1 <= store.counters().errors - errors <= 5
        process.send_signal(signal.SIGCONT)


@pytest.mark.process
@needs_mooncake
def test_without_a_master_everything_is_a_miss() -> None:
    with engine(f"127.0.0.1:{free_port()}", timeout_s=0.3) as store:
        assert [store.put(b"a", value(0)) for _ in range(50)] == ["dropped"] * 50
        assert store.num_present([b"a"]) == 0
        assert store.get([b"a"]) == []
        assert 1 <= store.counters().errors <= 5
