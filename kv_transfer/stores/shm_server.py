"""Server process of the node's store: KV units in shared memory for all engines of a node.

``python -m kv_transfer.stores.shm_server --address NAME --capacity-bytes N --lease-s S`` serves
until no client has been connected for ``--idle-s``. It owns a memfd that every client maps, and
sends clients the offsets to read and write; no value passes through it. Nothing is on disk, and
nothing outlives the last process that maps the memory. The name of the abstract socket is the lock:
a second server of one store ends at once. Clients must run as the same user. Such a process could
harm the engines more easily than by writing to the wrong place, which the values' checksums would
show.
"""

import argparse
import errno
import fcntl
import logging
import os
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.errors import WireError
from kv_transfer.host_memory import reserve
from kv_transfer.peer_user import peer_user_id
from kv_transfer.stores.shm_messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Answer,
    Begin,
    Commit,
    Count,
    Discard,
    Get,
    Greeting,
    Leased,
    NumPresent,
    Placed,
    PutEnded,
    Question,
    Release,
    Welcome,
    decode_question,
    encode,
    socket_name,
)
from kv_transfer.stores.table import ClientId, PutPlace, StoreTable

logger = logging.getLogger(__name__)

IDLE_S = 30.0
"""Time that a server without clients waits for one."""

_HELLO_S = 5.0
"""Time in which a new connection must send ``Greeting``."""

CAPACITY_ADVICE = "lower capacity_bytes of kv_store, or give this host more memory"

_MAX_CLIENTS = 256
_BACKLOG = 128
SLAB_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Seals of the slab: its size cannot change, so that no access within it ever faults."""


def bind(address: str) -> socket.socket:
    """Bind the name of a store, which no other process can have while this socket is open.

    Raises:
        OSError: With EADDRINUSE when another server of this store runs or is starting.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(socket_name(address, os.getuid()))
    except BaseException:
        listener.close()
        raise
    return listener


@dataclass(slots=True, eq=False)
class _Client:
    client_id: ClientId
    connection: socket.socket
    connected_s: float
    is_welcome: bool = False


class ShmServer:
    """Server of one store. Owner of the slab and its table: the only thread, which runs it."""

    def __init__(
        self, listener: socket.socket, capacity_bytes: int, lease_s: float, idle_s: float
    ) -> None:
        """Allocate the slab and listen.

        Args:
            listener: From ``bind``; closed by ``close``.
            capacity_bytes: Size of the slab.
            lease_s: How long a lease or a put lasts.
            idle_s: How long to wait for a client when there is none.

        Raises:
            SharedMemoryError: There is not that much memory; says both numbers.
        """
        self._capacity_bytes = capacity_bytes
        self._idle_s = idle_s
        self._table = StoreTable(capacity_bytes, lease_s)
        self._clients: dict[ClientId, _Client] = {}
        self._num_accepted = 0
        self._num_malformed = 0
        self._idle_since_s = time.monotonic()
        self._slab = _make_slab(capacity_bytes)
        self._listener = listener
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until idle for ``idle_s``."""
        while self._is_wanted(time.monotonic()):
            events = self._selector.select(self._timeout_s(time.monotonic()))
            now_s = time.monotonic()
            for key, _ in events:
                if key.data is None:
                    self._accept(now_s)
                else:
                    self._receive(key.data, now_s)

    def close(self) -> None:
        """Close every connection and the slab."""
        for client in list(self._clients.values()):
            self._drop(client, time.monotonic())
        self._selector.close()
        self._listener.close()
        os.close(self._slab)

    def _is_wanted(self, now_s: float) -> bool:
        """Close connections that sent no Greeting in time; return whether to keep serving."""
        for client in list(self._clients.values()):
            if not client.is_welcome and client.connected_s + _HELLO_S <= now_s:
                self._drop(client, now_s)
        return self._has_welcome() or now_s < self._idle_since_s + self._idle_s

    def _timeout_s(self, now_s: float) -> float | None:
        """Return the seconds until the next deadline; None without one."""
        due_s = [c.connected_s + _HELLO_S for c in self._clients.values() if not c.is_welcome]
        if not self._has_welcome():
            due_s.append(self._idle_since_s + self._idle_s)
        return max(0.0, min(due_s) - now_s) if due_s else None

    def _has_welcome(self) -> bool:
        return any(client.is_welcome for client in self._clients.values())

    def _accept(self, now_s: float) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # The client was gone before it was accepted.
            logger.debug("cannot accept a client: %s", error)
            return
        if len(self._clients) >= _MAX_CLIENTS or peer_user_id(connection) != os.getuid():
            connection.close()
            return
        connection.setblocking(False)
        self._num_accepted += 1
        client = _Client(self._num_accepted, connection, now_s)
        self._clients[client.client_id] = client
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _receive(self, client: _Client, now_s: float) -> None:
        """Answer one message; drop a client that is gone or breaks the protocol, with all it holds.

        Its unfinished put is freed at once, which is safe: a client that sends or is dead does not
        write.
        """
        try:
            packet = client.connection.recv(MAX_MESSAGE_BYTES + 1)
            if packet:
                self._answer(client, decode_question(packet), now_s)
                return
        except OSError as error:
            logger.debug("dropped client %d, gone or not reading: %s", client.client_id, error)
        except WireError as error:
            self._num_malformed += 1
            if self._num_malformed & (self._num_malformed - 1) == 0:  # Log at powers of two only.
                logger.warning(
                    "dropped clients for %d malformed messages so far, the last: %s",
                    self._num_malformed,
                    error,
                )
        self._drop(client, now_s)

    def _answer(self, client: _Client, question: Question, now_s: float) -> None:
        if isinstance(question, Greeting):
            if question.version != PROTOCOL_VERSION or client.is_welcome:
                raise WireError(f"an unexpected hello of version {question.version}")
            packet = encode(Welcome(self._capacity_bytes))
            socket.send_fds(client.connection, [packet], [self._slab])
            client.is_welcome = True
        elif client.is_welcome:
            client.connection.send(encode(self._ask_table(client.client_id, question, now_s)))
        else:
            raise WireError("a question before hello")

    def _ask_table(
        self,
        client: ClientId,
        question: NumPresent | Get | Release | Begin | Commit | Discard,
        now_s: float,
    ) -> Answer:
        match question:
            case NumPresent(keys):
                return Count(self._table.num_present(keys))
            case Get(keys):
                grants = self._table.get(client, keys, now_s)
                return Leased(tuple((x.lease_id, x.offset, x.num_bytes) for x in grants))
            case Release(lease_id):
                return Count(int(self._table.release(client, lease_id, now_s)))
            case Begin(key, num_bytes):
                place = self._table.begin_put(client, key, num_bytes, now_s)
                return Placed(None, *place) if isinstance(place, PutPlace) else Placed(place)
            case Commit(put_id):
                return PutEnded(self._table.commit(client, put_id, now_s))
            case Discard(key):
                self._table.discard(key)
                return Count(0)

    def _drop(self, client: _Client, now_s: float) -> None:
        del self._clients[client.client_id]
        self._selector.unregister(client.connection)
        client.connection.close()
        self._table.drop_client(client.client_id)
        if client.is_welcome and not self._has_welcome():
            self._idle_since_s = now_s


def _make_slab(capacity_bytes: int) -> int:
    """Return a memfd of fixed size whose memory is all allocated, so that none is missing later."""
    slab = os.memfd_create("ttserve-kv-store", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        reserve(slab, capacity_bytes, purpose="a KV pool", advice=CAPACITY_ADVICE)
        fcntl.fcntl(slab, fcntl.F_ADD_SEALS, SLAB_SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(slab)
        raise
    return slab


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one store; return 0 at once when another process serves it."""
    parser = argparse.ArgumentParser(description="Keep KV units in shared memory for one node.")
    name = parser.add_mutually_exclusive_group(required=True)
    name.add_argument("--address", help="name of the store")
    name.add_argument("--listener", type=int, help="inherited descriptor of a socket of that name")
    parser.add_argument("--capacity-bytes", type=int, required=True)
    parser.add_argument("--lease-s", type=float, required=True)
    parser.add_argument("--idle-s", type=float, default=IDLE_S)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)
    try:
        if options.listener is not None:
            listener = socket.socket(fileno=options.listener)
        else:
            listener = bind(options.address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        logger.info("another process already serves store %r; exiting", options.address)
        return 0
    server = ShmServer(listener, options.capacity_bytes, options.lease_s, options.idle_s)
    try:
        server.run()
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
