"""KV over the network: who may connect at all, and what can be read on the way."""

import socket
import threading
from contextlib import ExitStack, closing, suppress

import msgspec
import pytest
import zmq

from kv_transfer.errors import FailureReason, TransferError
from kv_transfer.keys import KeyRing
from kv_transfer.messages import encode
from kv_transfer.transports.tcp import address_of
from tests.kv_transfer.fakes import KEYS, FakeEngine, FakeIO, make_engine, make_ticket, run_until
from tests.kv_transfer.sockets import (
    NUM_TOKENS,
    SOURCE,
    dial,
    engines,
    start,
    wait_until,
    zmq_socket,
)
from tests.kv_transfer.test_messages import FETCH


def move(both: list[FakeEngine], endpoint: str) -> None:
    start(both, endpoints=(endpoint,))
    run_until(lambda: "r" in both[1].ended, both)


def far(engine: FakeEngine) -> str:
    return engine.worker.endpoints[0]


def test_a_stolen_ticket_is_worth_nothing_without_a_secret() -> None:
    with engines() as (producer, _), ExitStack() as stack:
        plain, with_public_key, insider = (
            stack.enter_context(zmq_socket(zmq.DEALER)) for _ in range(3)
        )
        ticket = make_ticket("r", far(producer), NUM_TOKENS)
        producer.add(ticket)
        producer.save("r", SOURCE, NUM_TOKENS)
        producer.step()
        fetch = msgspec.structs.replace(
            FETCH, transfer_id=ticket.transfer_id, ticket=KEYS.seal(ticket), consumer="D"
        )
        address, _, key = far(producer).partition("#")
        public, secret = zmq.curve_keypair()
        with_public_key.set(zmq.CURVE_SERVERKEY, key.encode())
        with_public_key.set(zmq.CURVE_PUBLICKEY, public)
        with_public_key.set(zmq.CURVE_SECRETKEY, secret)
        for thief in (plain, with_public_key):
            thief.connect(address)
            thief.send(encode(fetch))
        wait_until(lambda: producer.stats.num_denied > 0, "it was counted")
        for _ in range(10):
            producer.step()
            assert not plain.poll(50)
            assert not with_public_key.poll(50)
        dial(insider, far(producer))
        insider.send(encode(fetch))
        wait_until(lambda: producer.step() or insider.poll(10), "the insider is answered")


class Wiretap:
    """Passes on what two ends of a TCP connection say, and writes it down."""

    def __init__(self, to: str) -> None:
        host, _, port = address_of(to).removeprefix("tcp://").rpartition(":")
        self._to = host, int(port)
        self.heard = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        """Take connections until the listener is shut down; then end them all."""
        with ExitStack() as stack, suppress(OSError):
            stack.enter_context(self._listener)
            while True:
                near = stack.enter_context(self._listener.accept()[0])
                there = stack.enter_context(socket.create_connection(self._to))
                for ends in ((near, there), (there, near)):
                    passing = threading.Thread(target=self._pass_on, args=ends)
                    passing.start()
                    stack.callback(passing.join)
                    stack.callback(_shut, ends[0])

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.heard += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        _shut(self._listener)
        self._accepting.join()


def _shut(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("network", ["encrypted", "plain"])
def test_an_encrypted_network_shows_neither_kv_nor_tickets(network: str) -> None:
    with engines(network=network) as both, closing(Wiretap(far(both[0]))) as tap:
        _, separator, key = far(both[0]).partition("#")
        endpoint = f"tcp://127.0.0.1:{tap.port}{separator}{key}"
        move(both, endpoint)
        assert "r" in both[1].received
        kv = both[0].io.blocks[0].read_rows(SOURCE, 0, 1).tobytes()[:64]
        sealed = KEYS.seal(make_ticket("r", endpoint, NUM_TOKENS))
        is_heard = [secret in tap.heard for secret in (kv, sealed)]
        # In plain it is heard, which says that the encrypted case looks for the right thing.
        assert is_heard == [network == "plain"] * 2


def test_an_engine_that_requires_encryption_refuses_plain_kv() -> None:
    with engines(each=({"network": "plain"}, {})) as both:
        move(both, far(both[0]))
        assert both[1].reasons == {"r": FailureReason.PEER_DEAD}


def test_an_engine_that_takes_plain_kv_takes_it_encrypted_too() -> None:
    with engines(each=({}, {"network": "plain"})) as both:
        move(both, far(both[0]))
        assert both[1].received == {"r"}


@pytest.mark.parametrize("network", ["encrypted", "plain"])
def test_without_a_secret_only_loopback_is_bound(network: str) -> None:
    made = make_engine("P", FakeIO(4), keys=KeyRing(), network=network)
    made.worker.close(5.0)
    with pytest.raises(TransferError, match="without a secret"):
        make_engine("P", FakeIO(4), bind="tcp://10.0.0.1:*", keys=KeyRing(), network=network)


def test_nixl_unused_because_of_encryption_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.transports.nixl_payload.is_installed", lambda: True)
    monkeypatch.setattr("kv_transfer.transports.nixl_payload.has_rdma_device", lambda: True)
    caplog.set_level("INFO", "kv_transfer")
    make_engine("P", FakeIO(10, seed=0)).worker.close(5.0)
    assert [r.message for r in caplog.records if "NIXL" in r.message] == [
        "KV transfer: NIXL and an RDMA device are present but not used: NIXL cannot encrypt, "
        "and kv_network is encrypted"
    ]
