"""The bounded inbox of an engine, and its sender's state of clients."""

import queue
import threading

import pytest
import zmq

from replicas.engine_process.parent import GONE, WAKE, Inbox
from replicas.engine_process.sockets import Sender
from replicas.messages import Abort, EngineFrame, NotGreeted
from replicas.watchdog import Watchdog

A = b"a"
SAID = (A, Abort([]))


@pytest.mark.parametrize("bounds", [{"max_messages": 2}, {"max_bytes": 20}])
def test_a_full_inbox_makes_the_reader_wait_and_nobody_else(bounds):
    inbox = Inbox(**bounds)
    num_put = []

    def read():
        for n in range(5):
            inbox.put_message(SAID, 10)
            num_put.append(n)

    reader = threading.Thread(target=read)
    reader.start()
    reader.join(0.5)
    assert reader.is_alive()
    assert len(num_put) == 2
    inbox.put((b"", WAKE))
    assert [inbox.get(timeout=20.0)[1] for _ in range(6)].count(WAKE) == 1
    reader.join(20.0)
    with pytest.raises(queue.Empty):
        inbox.get(block=False)


def test_a_message_larger_than_all_that_may_wait_waits_alone():
    inbox = Inbox(max_bytes=10)
    inbox.put_message(SAID, 1000)
    assert inbox.get() == SAID


def test_a_closed_inbox_lets_its_reader_go():
    inbox = Inbox(max_messages=1)
    inbox.put_message(SAID, 1)
    reader = threading.Thread(target=inbox.put_message, args=(SAID, 1))
    reader.start()
    inbox.close()
    reader.join(20.0)
    assert not reader.is_alive()


class Socket:
    """An output socket that cannot send while a test disconnects it."""

    def __init__(self):
        self.is_cut = False
        self.sent = []
        self.num_waiting = 0
        self.num_looks = 0

    def getsockopt_string(self, _option):
        return ""

    def recv_multipart(self, _flags):
        self.num_looks += 1
        if not self.num_waiting:
            raise zmq.Again
        self.num_waiting -= 1

    def close(self, linger):
        pass

    def send_multipart(self, frames, flags):
        if self.is_cut:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self.sent.append(frames[1])


@pytest.fixture
def sender(monkeypatch):
    """A sender whose heartbeats are always due."""
    monkeypatch.setattr("replicas.engine_process.sockets.HEARTBEAT_S", 0.0)
    return Sender(Socket(), "e", Inbox(), Watchdog())


def test_a_client_that_missed_a_frame_gets_nothing_until_the_core_has_forgotten_it(sender):
    socket, inbox = sender._socket, sender._inbox
    sender.send(A, EngineFrame("e"))
    sender._send_heartbeats()
    assert len(socket.sent) == 2
    socket.is_cut = True
    sender.send(A, EngineFrame("e"))
    assert inbox.get(block=False) == (A, GONE)
    socket.is_cut = False
    sender.send(A, EngineFrame("e"))
    sender._send_heartbeats()
    assert len(socket.sent) == 2, "neither what comes after a gap nor heartbeats"
    sender.forget(A)
    sender._send_heartbeats()
    assert len(socket.sent) == 2
    sender.send(A, EngineFrame("e"))
    sender._send_heartbeats()
    assert len(socket.sent) == 4, "it has greeted again"


def test_a_stranger_gets_one_answer_and_no_heartbeats(sender):
    sender.send(A, EngineFrame("e", [NotGreeted()]))
    sender._send_heartbeats()
    assert len(sender._socket.sent) == 1


def test_what_clients_say_to_the_output_socket_delays_no_frame(sender):
    socket = sender._socket
    socket.num_waiting = 5000
    for _ in range(10):
        sender.send(A, EngineFrame("e"))
    assert (len(socket.sent), socket.num_looks) == (10, 0)
    sender._send_heartbeats()
    assert 0 < socket.num_looks <= 100


def test_the_output_socket_is_looked_at_as_often_as_heartbeats_go(sender, monkeypatch):
    monkeypatch.setattr("replicas.engine_process.sockets.HEARTBEAT_S", 1000.0)
    for _ in range(10):
        sender.send(A, EngineFrame("e"))
        sender._send_heartbeats()
    assert sender._socket.num_looks == 1


def test_whatever_is_said_to_the_output_socket_is_read_in_the_end(sender, monkeypatch):
    monkeypatch.setattr("replicas.engine_process.sockets.HEARTBEAT_S", 1000.0)
    sender._socket.num_waiting = 5000
    for _ in range(100):
        sender._send_heartbeats()
    assert sender._socket.num_waiting == 0
