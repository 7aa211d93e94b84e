"""Use of NIXL by the transport, with a stand-in for the agent that copies in this process."""

import itertools

import numpy as np
import pytest

from kv_transfer.transports import nixl_payload
from kv_transfer.transports.nixl import FinishedRead, RemoteRows, Tag
from tests.kv_transfer.nixl_runs import deliver


class StandIn:
    """A `NixlEnd` between engines of this process; reads of unknown agents fail as with NIXL."""

    made: list["StandIn"]
    staged: dict[int, np.ndarray]
    """Memory of all stand-ins, by address."""
    reads_fail = False

    def __init__(self, name, *, slot_bytes, num_slots, deadline_s, wake) -> None:
        self.metadata = name.encode()
        self.introduced: list[str] = []
        self.is_closed = False
        self._peers: dict[str, bytes] = {}
        self._wake = wake
        self._free = [len(self.made) * num_slots + slot for slot in range(num_slots)]
        self._num_slots = num_slots
        self._reads: list[FinishedRead] = []
        self.made.append(self)

    @property
    def num_staged(self) -> int:
        return self._num_slots - len(self._free)

    def stage(self, payload):
        if not self._free:
            return None
        slot = self._free.pop()
        self.staged[slot] = payload.reshape(-1).copy()
        return slot, slot

    def free(self, slot: int) -> None:
        self._free.append(slot)

    def introduce(self, endpoint: str, metadata: bytes) -> None:
        self.introduced.append(endpoint)
        self._peers[endpoint] = metadata

    def forget(self, endpoint: str) -> None:
        self._peers.pop(endpoint, None)

    def read(self, tag: Tag, rows: RemoteRows, now_s: float) -> None:
        is_good = rows.endpoint in self._peers and not self.reads_fail
        payload = self.staged[rows.address][: rows.num_bytes] if is_good else None
        self._reads.append(FinishedRead(tag, payload))
        self._wake()

    def take_reads(self) -> list[FinishedRead]:
        reads, self._reads = self._reads, []
        return reads

    def close(self, deadline_s: float) -> None:
        self.is_closed = True


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """Both engines' agents, the producer's first."""
    monkeypatch.setattr(StandIn, "made", [], raising=False)
    monkeypatch.setattr(StandIn, "staged", {}, raising=False)
    monkeypatch.setattr(nixl_payload, "has_rdma_device", lambda: True)
    monkeypatch.setattr(nixl_payload, "is_installed", lambda: True)
    monkeypatch.setattr(nixl_payload, "NixlEnd", StandIn)
    return StandIn.made


def test_rows_are_read_where_they_were_staged_and_their_places_are_free_again(ends) -> None:
    assert deliver(num_slots=64) == "nixl"
    producer, consumer = ends
    assert len(consumer.introduced) == 1, "it meets the producer once"
    assert producer.num_staged == 0
    assert producer.is_closed
    assert consumer.is_closed


def test_rows_travel_where_nothing_can_be_staged(ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "stage", lambda self, payload: None)
    assert deliver(num_slots=2) == "inline"
    assert ends[1].introduced == [], "there is nothing to read"


def test_rows_that_cannot_be_read_are_sent_and_the_producer_is_not_read_again(
    ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandIn, "reads_fail", True)
    assert deliver(num_slots=64) == "inline"
    assert ends[0].num_staged == 0


def test_an_agent_that_does_not_come_up_costs_nothing_but_the_path(
    ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self, *_args, **_kwargs):
        raise nixl_payload.TransferError("NIXL did not come up")

    monkeypatch.setattr(StandIn, "__init__", fails)
    assert deliver(num_slots=64) == "inline"
    assert "NIXL did not come up" in caplog.text


@pytest.mark.parametrize(
    ("is_agent", "has_payload"), list(itertools.product([False, True], repeat=2))
)
def test_only_an_agent_comes_with_payload(ends, is_agent: bool, has_payload: bool) -> None:
    """Announced rows that no load expects are not read either."""
    end = StandIn("D", slot_bytes=64, num_slots=1, deadline_s=1.0, wake=lambda: None)
    nixl = nixl_payload.NixlPayload(end, "D", NobodyWaits())
    data = nixl_payload.Data(b"t" * 16, 1, "P", 0, 1, 0)
    message = nixl_payload.Agent("P") if is_agent else nixl_payload.Staged(data, 0, 64)
    payload = np.zeros(8, np.uint8) if has_payload else None
    assert nixl.on_message("tcp://p", message, payload, 0.0) == (is_agent and has_payload)
    assert end.introduced == (["tcp://p"] if is_agent and has_payload else [])
    assert nixl.take_reads(pytest.fail, 0.0) is None


class NobodyWaits:
    """Sessions without a transfer."""

    @property
    def consumer(self) -> "NobodyWaits":
        return self

    def expects(self, _data, _num_bytes) -> bool:
        return False
