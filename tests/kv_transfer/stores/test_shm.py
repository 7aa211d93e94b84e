"""The shared-memory store: what its clients see of each other, of faults, and of strangers."""

import contextlib
import fcntl
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.stores import backoff, shm, shm_server
from kv_transfer.stores.shm import ShmStore, ensure_server
from kv_transfer.stores.shm_messages import (
    MAX_KEYS,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Answer,
    Begin,
    Commit,
    Count,
    Get,
    Greeting,
    Leased,
    Placed,
    Welcome,
    encode,
    socket_name,
)
from kv_transfer.stores.shm_server import SLAB_SEALS
from tests.kv_transfer.children import child
from tests.kv_transfer.stores.shm_servers import (
    NUM_SLOTS,
    VALUE_BYTES,
    config,
    connect,
    end_started,
    eventually,
    new_address,
    server_pid,
    server_process,
    server_thread,
    start_server,
    value,
)


@contextlib.contextmanager
def two_clients(**server: float) -> Iterator[tuple[ShmStore, ShmStore]]:
    with server_thread(**server) as address:
        stores = connect(address), connect(address)
        try:
            yield stores
        finally:
            for store in stores:
                store.close()


# ---- values


def test_another_client_reads_what_one_put() -> None:
    with two_clients() as (one, other):
        assert one.put(b"a", value(1)) == "stored"
        assert one.put(b"b", value(2, 1000)) == "stored"
        assert other.put(b"a", value(3)) == "present"
        assert other.num_present([b"a", b"b", b"c", b"a"]) == 2
        leases = other.get([b"a", b"b", b"c", b"a"])
        assert np.array_equal(leases[0].value, value(1))
        assert np.array_equal(leases[1].value, value(2, 1000))
        assert len(leases) == 2
        with pytest.raises(ValueError, match="read-only"):
            leases[0].value[0] = 1
        assert [lease.release() for lease in leases] == [True, True]
        assert leases[0].release()
        counters = other.counters()
        assert (counters.hits, counters.misses, counters.puts) == (2, 4, 0)
        assert (counters.drops, counters.errors) == (0, 0)
        assert one.counters().puts == 2


def test_a_leased_value_stays_while_others_come_and_go() -> None:
    with two_clients() as (reader, writer):
        reader.put(b"a", value(0))
        (lease,) = reader.get([b"a"])
        for number in range(3 * NUM_SLOTS):
            assert writer.put(b"x%d" % number, value(number)) == "stored"
            assert np.array_equal(lease.value, value(0))
        assert lease.release()
        for number in range(NUM_SLOTS):
            writer.put(b"y%d" % number, value(number))
        assert writer.num_present([b"a"]) == 0


def test_a_lease_that_lapsed_is_no_protection_and_says_so() -> None:
    with two_clients(lease_s=0.05) as (reader, writer):
        reader.put(b"a", value(0))
        (lease,) = reader.get([b"a"])
        numbers = iter(range(1000))
        eventually(
            lambda: (
                [writer.put(b"x%d" % next(numbers), value(9)) for _ in range(NUM_SLOTS)]
                and not np.array_equal(lease.value, value(0))
            )
        )
        assert not lease.release()


def test_a_value_that_proved_wrong_can_be_replaced() -> None:
    with two_clients() as (one, other):
        one.put(b"a", value(0))
        poisoned = one._slab  # Any client of the slab can do this; a checksum must detect it.
        poisoned[7] ^= 0xFF
        (lease,) = other.get([b"a"])
        assert not np.array_equal(lease.value, value(0))
        other.discard(b"a")
        assert one.num_present([b"a"]) == 0
        assert one.put(b"a", value(0)) == "stored"
        assert np.array_equal(one.get([b"a"])[0].value, value(0))
        assert lease.release()


def test_absurd_inputs_are_dropped() -> None:
    with two_clients() as (one, _):
        assert one.put(b"a", np.zeros(NUM_SLOTS * VALUE_BYTES + 1, np.uint8)) == "dropped"
        assert one.put(b"a", np.zeros(0, np.uint8)) == "dropped"
        assert one.put(b"", value(0)) == "dropped"
        assert one.put(b"k" * 65, value(0)) == "dropped"
        assert one.put(b"k" * 64, value(0)) == "stored"
        one.discard(b"k" * 65)
        assert one.num_present([b"k" * 64, b"k" * 65]) == 1
        assert one.num_present([]) == 0
        assert one.get([]) == []
        assert one.get([b""]) == []
        assert one.counters().errors == 0


def test_more_keys_than_fit_one_question() -> None:
    with two_clients(capacity_bytes=64 * 3000) as (one, other):
        keys = [b"%064d" % number for number in range(2 * MAX_KEYS + 10)]
        for key in keys:
            one.put(key, np.full(1, 7, np.uint8))
        assert other.num_present([*keys, b"no"]) == len(keys)
        leases = other.get([*keys, b"no"])
        assert len(leases) == len(keys)
        assert all(lease.release() for lease in leases)


def test_close_frees_everything_and_leaves_what_was_read() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with two_clients() as (one, other):
        keys = [b"%d" % number for number in range(NUM_SLOTS)]
        for key in keys:
            one.put(key, value(1))
        leases = one.get(keys)
        assert other.put(b"x", value(2)) == "dropped"
        one.close()
        one.close()
        eventually(lambda: other.put(b"x", value(2)) == "stored")
        assert not leases[0].release()
        assert leases[-1].value.shape == (VALUE_BYTES,)
        assert one.num_present([b"x"]) == 0
        assert one.put(b"y", value(1)) == "dropped"
        del leases
    assert len(os.listdir("/proc/self/fd")) == descriptors


# ---- deaths


@contextlib.contextmanager
def client_process(address: str, key: str) -> Iterator[subprocess.Popen[str]]:
    """A client that holds leases and half a put; see ``store_process``."""
    with child("stores.store_process", address, key) as process:
        assert process.stdout.readline().startswith("holding")
        yield process


@pytest.mark.process
def test_a_killed_client_gives_everything_back() -> None:
    with server_thread() as address, contextlib.closing(connect(address)) as store:
        for number in range(NUM_SLOTS - 1):
            store.put(b"%d" % number, value(number))
        with client_process(address, "half") as client:
            assert store.put(b"x", value(1)) == "dropped"
            assert store.put(b"half", value(1)) == "dropped"
            client.send_signal(signal.SIGKILL)
            client.wait()
            eventually(lambda: store.put(b"x", value(1)) == "stored")
            assert store.num_present([b"half"]) == 0
            for number in range(NUM_SLOTS):
                assert store.put(b"y%d" % number, value(number)) == "stored"


@pytest.mark.process
def test_a_frozen_writer_neither_shows_half_a_value_nor_writes_into_anothers() -> None:
    with (
        server_thread(lease_s=0.1) as address,
        contextlib.closing(connect(address)) as store,
        client_process(address, "half") as client,
    ):
        eventually(lambda: store.put(b"half", value(0)) == "stored")
        for number in range(3 * NUM_SLOTS):
            assert store.put(b"%d" % number, value(number)) == "stored"
        client.stdin.write("\n")
        client.stdin.flush()
        assert client.stdout.readline().strip() == "dropped"
        for number in range(2 * NUM_SLOTS + 1, 3 * NUM_SLOTS):
            (lease,) = store.get([b"%d" % number])
            assert np.array_equal(lease.value, value(number))
        assert store.num_present([b"half"]) == 0


@pytest.mark.process
def test_a_killed_server_is_a_miss_and_another_takes_its_place() -> None:
    with server_process() as (address, server):
        store = connect(address)
        store.put(b"a", value(0))
        (lease,) = store.get([b"a"])
        server.kill()
        server.wait()
        assert store.num_present([b"a"]) == 0
        assert store.get([b"a"]) == []
        assert store.put(b"b", value(1)) == "dropped"
        assert not lease.release()
        assert np.array_equal(lease.value, value(0))
        assert store.counters().errors == 1
        eventually(lambda: store.put(b"b", value(1)) == "stored")
        assert np.array_equal(store.get([b"b"])[0].value, value(1))
        store.close()


@pytest.mark.process
def test_a_frozen_server_is_a_miss_and_is_not_waited_for_each_time() -> None:
    with server_process() as (address, server):
        store = connect(address, timeout_s=0.2)
        assert store.put(b"a", value(0)) == "stored"
        (lease,) = store.get([b"a"])
        server.send_signal(signal.SIGSTOP)
        began_s = time.monotonic()
        for _ in range(200):
            assert store.num_present([b"a"]) == 0
            assert store.get([b"a"]) == []
            assert store.put(b"b", value(1)) == "dropped"
        assert not lease.release()
        # Each wait is twice the one before: a slow host has time for one or two more, not for all.
        took_s = time.monotonic() - began_s
        num_doubled = math.log2(1 + took_s / backoff._FIRST_S)
        assert 1 <= store.counters().errors <= 2 + num_doubled + took_s / backoff._LAST_S
        server.send_signal(signal.SIGCONT)
        eventually(lambda: store.num_present([b"a"]) == 1)
        assert store.put(b"b", value(1)) == "stored"
        store.close()


def test_a_server_stays_for_its_last_client() -> None:
    address = new_address()
    server = shm_server.ShmServer(shm_server.bind(address), VALUE_BYTES, lease_s=60.0, idle_s=600.0)
    thread = threading.Thread(target=server.run)
    thread.start()
    one, other = connect(address), connect(address)
    server._idle_s = 0.01
    one.close()
    time.sleep(0.05)
    assert other.put(b"a", value(0)) == "stored"
    other.close()
    thread.join(30)
    assert not thread.is_alive()
    server.close()


@pytest.mark.process
def test_a_server_is_started_once_and_ends_without_clients() -> None:
    address = new_address()
    try:
        ensure_server(config(address), idle_s=0.5)
        with pytest.raises(OSError, match="in use"):
            shm_server.bind(address)
        ensure_server(config(address), idle_s=0.5)
        eventually(lambda: server_pid(address))
        pid = server_pid(address)
        ensure_server(config(address), idle_s=0.5)
        assert server_pid(address) == pid
        eventually(lambda: server_pid(address) is None)
        shm_server.bind(address).close()
    finally:
        end_started(address)


def descendants(pid: int) -> list[int]:
    """Processes that are a process's children, or theirs, as `ps` would find them."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found, new = [], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


@pytest.mark.process
def test_a_server_outlives_its_starter_and_all_its_descendants() -> None:
    address = new_address()
    try:
        with child("stores.store_process", "start", address) as starter:
            assert starter.stdout.readline().strip() == "stored"
            server = server_pid(address)
            for pid in [*descendants(starter.pid), starter.pid]:
                os.kill(pid, signal.SIGKILL)
        with contextlib.closing(connect(address)) as store:
            assert np.array_equal(store.get([b"a"])[0].value, value(1))
        assert server_pid(address) == server
        assert os.getpgid(server) != os.getpgid(0), "it would be killed with its starter's group"
    finally:
        end_started(address)


def test_a_server_that_cannot_be_started_is_an_error_and_leaves_the_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = new_address()
    monkeypatch.setattr(shm, "_LAUNCHER", "raise SystemExit(3)")
    with pytest.raises(OSError, match="cannot start"):
        ensure_server(config(address))
    shm_server.bind(address).close()
    store = ShmStore(config(address))
    assert store.num_present([b"a"]) == 0
    store.close()


def test_stores_without_an_address_are_told_apart_by_their_name() -> None:
    with server_thread() as name:
        store = connect("", name=name)
        assert store.put(b"a", value(1)) == "stored"
        with contextlib.closing(connect(name, name="of no account")) as other:
            assert other.num_present([b"a"]) == 1
        store.close()


@pytest.mark.process
def test_of_servers_that_start_at_once_one_stays() -> None:
    address = new_address()
    servers = [start_server(address) for _ in range(3)]
    try:
        eventually(lambda: sum(server.poll() is None for server in servers) == 1)
        assert sorted(str(server.poll()) for server in servers) == ["0", "0", "None"]
        with contextlib.closing(connect(address)) as store:
            assert store.put(b"a", value(0)) == "stored"
    finally:
        for server in servers:
            server.kill()
            server.wait()


# ---- strangers


@contextlib.contextmanager
def stranger(address: str, *, greet: bool = False) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(10)
        # The backlog is short, and the server has other things to do.
        eventually(lambda: connection.connect_ex(socket_name(address, os.getuid())) == 0)
        if greet:
            connection.send(encode(Greeting(PROTOCOL_VERSION)))
            connection.recv(MAX_MESSAGE_BYTES)
        yield connection


def is_closed(connection: socket.socket) -> bool:
    """Return whether the server hangs up, after any answer."""
    try:
        while connection.recv(MAX_MESSAGE_BYTES):
            pass
    except ConnectionError:
        return True
    return True


def send_many(connection: socket.socket, packet: bytes) -> None:
    for _ in range(100_000):
        connection.send(packet)


@pytest.mark.parametrize(
    ("greet", "packet"),
    [
        (False, encode(Get((b"a",)))),
        (False, encode(Greeting(PROTOCOL_VERSION + 1))),
        (True, encode(Greeting(PROTOCOL_VERSION))),
        (True, encode(Welcome(1))),
        (True, encode(Count(1)) + b"\0"),
        (True, bytes(MAX_MESSAGE_BYTES + 1)),
        (True, encode(Get((b"k",) * (MAX_KEYS + 1)))),
        (True, encode(Get((b"k" * 65,)))),
        (True, encode(Begin(b"", 1))),
        (True, encode(Commit(-1))),
    ],
)
def test_a_client_that_breaks_the_protocol_is_disconnected(greet: bool, packet: bytes) -> None:
    with server_thread() as address, stranger(address, greet=greet) as connection:
        connection.send(packet)
        assert is_closed(connection)


def test_a_client_that_never_reads_is_disconnected() -> None:
    with (
        server_thread() as address,
        contextlib.closing(connect(address)) as store,
        stranger(address, greet=True) as connection,
    ):
        with pytest.raises(ConnectionError):
            send_many(connection, encode(Get((b"a",))))
        assert store.put(b"a", value(0)) == "stored"


def test_connections_that_say_nothing_keep_no_server_and_disturb_no_client() -> None:
    with (
        contextlib.ExitStack() as silent,
        server_thread() as address,
        contextlib.closing(connect(address)) as store,
    ):
        for _ in range(300):
            silent.enter_context(stranger(address))
        assert store.put(b"a", value(0)) == "stored"
        silent.close()
        second = connect(address)
        assert second.num_present([b"a"]) == 1
        second.close()
        for _ in range(3):
            silent.enter_context(stranger(address))


def test_another_user_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with server_thread() as address:
        with contextlib.closing(connect(address)) as store:
            assert store.put(b"a", value(0)) == "stored"
        monkeypatch.setattr(shm_server, "peer_user_id", lambda _: os.getuid() + 1)
        with stranger(address) as connection, contextlib.suppress(BrokenPipeError):
            connection.send(encode(Greeting(PROTOCOL_VERSION)))
            assert is_closed(connection)


def test_the_server_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with server_thread() as address:
        monkeypatch.setattr(shm, "peer_user_id", lambda _: os.getuid() + 1)
        store = ShmStore(config(address))
        assert store.put(b"a", value(0)) == "dropped"
        assert store.counters().errors == 1
        store.close()


def test_the_servers_memory_is_not_passed_on_to_child_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inheritable: list[bool] = []
    check = shm._check_slab

    def look(descriptor: int, capacity_bytes: int) -> None:
        inheritable.append(os.get_inheritable(descriptor))
        check(descriptor, capacity_bytes)

    monkeypatch.setattr(shm, "_check_slab", look)
    with server_thread() as address, contextlib.closing(connect(address)):
        assert inheritable == [False]


# ---- servers that cannot be trusted


@contextlib.contextmanager
def false_server(
    answers: Callable[[], list[Answer | bytes]], seals: int = SLAB_SEALS, size: int = 4096
) -> Iterator[ShmStore]:
    """A client of a server with a slab of ``size`` bytes of 4,096 that it promises."""
    address = new_address()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(socket_name(address, os.getuid()))
    listener.listen()
    slab = os.memfd_create("false", os.MFD_ALLOW_SEALING)
    os.ftruncate(slab, size)
    fcntl.fcntl(slab, fcntl.F_ADD_SEALS, seals)

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.recv(MAX_MESSAGE_BYTES)
                socket.send_fds(connection, [encode(Welcome(4096))], [slab])
                for answer in answers():
                    connection.recv(MAX_MESSAGE_BYTES)
                    connection.send(answer if isinstance(answer, bytes) else encode(answer))
                connection.recv(MAX_MESSAGE_BYTES)

    thread = threading.Thread(target=serve)
    thread.start()
    store = ShmStore(config(address))
    try:
        yield store
    finally:
        store.close()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)
        os.close(slab)


FALSE_ANSWERS = [
    b"",
    b"\xff" * 100,
    bytes(MAX_MESSAGE_BYTES + 1),
    Welcome(4096),
    Leased(((1, 4096, 1),)),
    Leased(((1, 0, 4097),)),
    Leased(((1, 0, 1), (2, 0, 1))),
    Placed(None, 1, 4000),
    Placed(None, 1, 1 << 61),
]


@pytest.mark.parametrize("answer", FALSE_ANSWERS, ids=lambda answer: repr(answer)[:30])
@pytest.mark.parametrize("call", ["num_present", "get", "put", "discard"])
def test_a_server_that_sends_nonsense_is_disconnected(answer: Answer | bytes, call: str) -> None:
    with false_server(lambda: [answer]) as store:
        if call == "put":
            assert store.put(b"a", np.zeros(1000, np.uint8)) == "dropped"
        elif call == "get":
            assert store.get([b"a"]) == []
        elif call == "num_present":
            assert store.num_present([b"a"]) == 0
        else:
            store.discard(b"a")
        assert store.counters().errors == 1
        assert store._connection is None


def test_a_count_beyond_the_question_is_no_count() -> None:
    with false_server(lambda: [Count(1000)]) as store:
        assert store.num_present([b"a", b"b"]) == 2


@pytest.mark.parametrize(("seals", "size"), [(0, 4096), (SLAB_SEALS, 100), (SLAB_SEALS, 8192)])
def test_memory_that_may_shrink_is_not_mapped(seals: int, size: int) -> None:
    with false_server(list, seals=seals, size=size) as store:
        assert store._connection is None
        assert store.counters().errors == 1
