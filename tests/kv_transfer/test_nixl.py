"""Payload over NIXL: same bytes, no room, a frozen producer. Needs the optional package."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kv_transfer.messages import Data
from kv_transfer.transports.nixl import FinishedRead, NixlEnd, RemoteRows, is_installed
from tests.kv_transfer.nixl_runs import deliver
from tests.kv_transfer.sockets import wait_until

pytestmark = pytest.mark.skipif(
    not is_installed() and "TTSERVE_REQUIRE_TRANSPORTS" not in os.environ,
    reason="NIXL is not installed",
)

PRODUCER = """
import sys, numpy as np
from kv_transfer.transports.nixl import NixlEnd
end = NixlEnd("P", slot_bytes=1 << 24, num_slots=2, deadline_s=5.0, wake=lambda: None)
slot, address = end.stage(np.full(1 << 24, 7, np.uint8))
print(end.metadata.hex(), address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")


@pytest.fixture
def end() -> Iterator[NixlEnd]:
    end = NixlEnd("D", slot_bytes=1 << 24, num_slots=2, deadline_s=1.0, wake=lambda: None)
    yield end
    end.close(2.0)


@pytest.fixture(autouse=True)
def _pretend_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.transports.nixl_payload.has_rdma_device", lambda: True)


def test_rows_arrive_over_nixl() -> None:
    assert deliver(num_slots=64) == "nixl"


def test_a_read_from_a_frozen_producer_ends_by_its_deadline(end: NixlEnd) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PRODUCER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as producer:
        assert producer.stdout is not None
        # The library logs to the same stream.
        line = next(x for x in producer.stdout if x.split(" ")[0].isalnum() and len(x) > 200)
        metadata, address = line.split()
        end.introduce("P", bytes.fromhex(metadata))
        rows = RemoteRows("P", int(address), 1 << 24)
        whole = _read(end, rows)
        assert whole.payload is not None
        assert (whole.payload == 7).all()
        os.kill(producer.pid, signal.SIGSTOP)
        try:
            assert _read(end, rows).payload is None
        finally:
            os.kill(producer.pid, signal.SIGCONT)
        wait_until(lambda: end.num_lost_slots == 0, "its landing place is free: NIXL let go")
        producer.communicate("")


def test_an_unknown_producer_is_no_harm(end: NixlEnd) -> None:
    end.introduce("Q", b"no metadata at all")
    assert _read(end, RemoteRows("Q", 4096, 64)).payload is None
    assert _read(end, RemoteRows("nobody", 4096, 64)).payload is None


def _read(end: NixlEnd, rows: RemoteRows) -> FinishedRead:
    header = Data(b"t" * 16, 1, "P", 0, 1, 0)
    end.read((rows.endpoint, header), rows, time.monotonic())
    finished: list[FinishedRead] = []
    wait_until(lambda: finished.extend(end.take_reads()) or finished, "the read ended")
    return finished[0]
