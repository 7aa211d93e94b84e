"""The KV transfer benchmark: its arithmetic, and that it notices when bytes or paths are wrong."""

import os
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks import kv_transfer
from benchmarks.kv import contest, slow_receiver
from benchmarks.kv.contest import Blocks, ConnectorPair, MemoryCopy, PeerPair, Rates, Round
from benchmarks.kv.handover import HiddenShare
from benchmarks.kv.recording_connector import (
    RECORD_VARIABLE,
    RECORDING_CONNECTOR,
    RecordingConnector,
    Stage,
)
from kv_transfer.config import TransferConfig
from kv_transfer.connector import load_connector
from kv_transfer.layout import KVLayout
from tests.kv_transfer.fakes import make_settings

LAYOUT = KVLayout(2, 2, 32, 64, "bfloat8_b", "hf", "test")
BLOCKS = Blocks(LAYOUT, 8)


@pytest.fixture
def pair():
    """Starts pairs that end with the test."""
    pairs = []

    def start(schemes, **changes):
        pairs.append(ConnectorPair("pair", BLOCKS, schemes=schemes, **changes))
        return pairs[-1]

    yield start
    for started in pairs:
        started.kill()


# --- arithmetic ---------------------------------------------------------------------------------


def test_blocks_are_the_pieces_of_whole_kv_blocks():
    blocks = Blocks.about(kv_transfer.ONE_HEAD, 256)
    assert blocks.layout.piece_bytes == 8704
    assert kv_transfer.LLAMA_8B.piece_bytes == 64 << 10
    assert blocks.num_bytes == blocks.num_pieces * 8704
    assert (255 << 20) < blocks.num_bytes <= (256 << 20)
    assert Blocks.about(kv_transfer.LLAMA_8B, 1).num_blocks == 1


def test_summary_is_of_medians_per_gigabyte():
    rounds = [Round(2.0, 1.0), Round(0.5, 5.0), Round(1.0, 3.0)]
    assert contest.summary(rounds, 2 * 10**9) == Rates(median=2.0, best=4.0, cpu_s=1.5)


def test_contest_takes_turns_and_drops_the_first_round():
    order = []

    class Scripted:
        def __init__(self, name, seconds):
            self.name = name
            self.rounds = [Round(x, 0.0) for x in seconds]

        def measure(self):
            order.append(self.name)
            return self.rounds.pop(0)

    rates = contest.contest([Scripted("a", [9, 1, 2, 3]), Scripted("b", [9, 4, 4, 4])], 10**9, 3)
    assert order == ["a", "b"] * 4
    assert rates["a"].median == 0.5
    assert rates["b"].best == 0.25


def test_ratios_take_the_better_of_two_rows():
    def rate(median):
        return Rates(median, median, 0.0)

    rates = {
        "memcpy": rate(4.0),
        "memcpy again": rate(10.0),
        "shm": rate(9.0),
        "shm verified": rate(6.0),
        "tcp": rate(3.0),
        "mooncake read": rate(1.0),
        "mooncake write": rate(2.0),
    }
    assert kv_transfer.ratios(rates) == {
        "shm_vs_memcpy": 0.9,
        "shm_verified_vs_memcpy": 0.6,
        "tcp_vs_mooncake": 1.5,
        "tcp_vs_nixl": None,
    }


def test_hidden_share():
    assert HiddenShare(2048, exposed_s=0.25, total_s=1.0).share == 0.75


# --- contestants --------------------------------------------------------------------------------


def test_memory_copy_copies():
    copy = MemoryCopy("memcpy", BLOCKS)
    assert copy.measure().seconds > 0
    copy._order.pop()
    with pytest.raises(SystemExit, match="memcpy: the copy differs"):
        copy.measure()


@pytest.mark.process
@pytest.mark.parametrize("schemes", ["tcp", "tcp ipc shm"])
def test_connector_moves_the_blocks_again_and_again(pair, schemes):
    started = pair(schemes)
    for _ in range(2):
        done = started.measure()
        assert done.seconds > 0
        assert done.cpu_s > 0


@pytest.mark.process
def test_connector_is_checked_for_bytes_and_path(pair):
    started = pair("tcp", config=TransferConfig(verify=False))
    digests = started._digests
    started._digests = [digests[0] ^ 1]
    with pytest.raises(SystemExit, match="not what was sent"):
        started.measure()
    started._digests = digests
    started._path = "shared"
    with pytest.raises(SystemExit, match=r"over \['inline'\], not over shared"):
        started.measure()


@pytest.mark.process
def test_peer_that_is_not_there():
    # The base interpreter has no packages.
    python = Path(sys.base_prefix, "bin", "python3")
    absent = PeerPair.start("mooncake", "read", BLOCKS, python, None)
    assert absent is None


IDLE_MOONCAKE = """
class TransferEngine:
    def initialize(self, *_):
        return 0
    def get_rpc_port(self):
        return 1
    def register_memory(self, *_):
        return 0
    def batch_transfer_sync_read(self, *_):
        return 0
    batch_transfer_sync_write = batch_transfer_sync_read
"""


@pytest.mark.process
@pytest.mark.parametrize("operation", ["read", "write"])
def test_peer_that_moves_nothing_is_found_out(tmp_path, monkeypatch, operation):
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text(IDLE_MOONCAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = PeerPair.start("mooncake", operation, BLOCKS, Path(sys.executable), None)
    assert started is not None
    try:
        with pytest.raises(SystemExit, match=f"mooncake {operation}: what arrived is not"):
            started.measure()
    finally:
        started.close()


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("receiver", ["core stands still", "process is stopped"])
def test_growth_is_seen_and_bounded_by_the_windows(monkeypatch, receiver):
    monkeypatch.setattr(slow_receiver, "WATCH_S", 0.3)
    blocks = Blocks.about(kv_transfer.LLAMA_8B, 64)
    growth = slow_receiver.measure_growth(blocks, receiver, 2)
    assert growth.source > 0
    assert max(growth.source, growth.target) <= growth.allowed + (16 << 20)


def test_anonymous_bytes_are_those_of_the_process():
    before = slow_receiver.anonymous_bytes(os.getpid())
    taken = bytearray(b"\x01") * (32 << 20)
    assert slow_receiver.anonymous_bytes(os.getpid()) - before > (24 << 20)
    del taken


# --- record -------------------------------------------------------------------------------------


def test_recording_connector_is_found_by_its_name_and_writes_what_ended(tmp_path, monkeypatch):
    record = tmp_path / "record"
    monkeypatch.setenv(RECORD_VARIABLE, str(record))
    connector = load_connector(RECORDING_CONNECTOR)
    assert isinstance(connector, RecordingConnector)
    worker = connector.create_worker(make_settings("x"), lambda: None)
    worker._note(Stage("committed", "r", 1.5, stages={"total": 0.5}))
    worker.close(1.0)
    assert msgspec.json.decode(record.read_bytes(), type=Stage).stages == {"total": 0.5}
