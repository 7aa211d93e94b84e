"""Messages between the ranks of a gang and their hub: frames on a TCP connection.

Both ends first prove that they hold a secret of the deployment; the secret is not sent. Later
messages, and the tensors that ranks exchange, are neither encrypted nor authenticated: a gang
belongs on a private network.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from typing import TYPE_CHECKING

import msgspec

from replicas.errors import GangLostError
from replicas.gang.lockstep import Declaration, Loss, Turn

if TYPE_CHECKING:
    from kv_transfer.keys import KeyRing

PROVE_S = 5.0
"""Time limit for the mutual proof of a new connection."""
BEAT_S = 0.5
"""Interval at which each end sends a beat and checks for the other end's."""
SILENT_LOOKS = 10
"""Checks without a message after which the other end counts as lost."""

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_MAX_BYTES = 1 << 16
_LENGTH = struct.Struct(">I")


class Join(msgspec.Struct, frozen=True, tag="join", array_like=True):
    """First message of a rank.

    Attributes:
        rank: Its number.
        store: Address of the rendezvous store that rank 0 hosts; "" from other ranks.
    """

    rank: int
    store: str


class Complete(msgspec.Struct, frozen=True, tag="complete", array_like=True):
    """Announcement that all ranks have joined.

    Attributes:
        store: Address of the rendezvous store, from rank 0.
    """

    store: str


class Drained(msgspec.Struct, frozen=True, tag="drained", array_like=True):
    """Up: the rank refuses new requests and has none left. Down: all ranks are drained."""


class Beat(msgspec.Struct, frozen=True, tag="beat", array_like=True):
    """Sign of life.

    Attributes:
        stalled_s: From a rank: seconds that it has been in one turn, if that is too long and not
            caused by waiting for other ranks.
    """

    stalled_s: float = 0.0


Up = Join | Declaration | Drained | Beat
Down = Complete | Turn | Drained | Loss | Beat

encode = msgspec.msgpack.Encoder().encode
decode_up = msgspec.msgpack.Decoder(Up).decode
decode_down = msgspec.msgpack.Decoder(Down).decode


def send(connection: socket.socket, message: Up | Down) -> None:
    """Send one message. Concurrent callers must use a lock.

    Raises:
        OSError: The other end is gone.
    """
    raw = encode(message)
    connection.sendall(_LENGTH.pack(len(raw)) + raw)


def receive(connection: socket.socket, until_s: float | None = None) -> bytes:
    """Receive the next message.

    Args:
        connection: Connection to the other end.
        until_s: Deadline on the monotonic clock; None for none.

    Raises:
        OSError: The other end is gone or sent an invalid message.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, until_s))
    if length > _MAX_BYTES:
        raise ConnectionError(f"it sent a message of {length} bytes, more than {_MAX_BYTES}")
    return _exactly(connection, length, until_s)


def admit(connection: socket.socket, keys: KeyRing, gang: str) -> bytes:
    """Run the hub's side of the mutual proof; return the rank's first message.

    Raises:
        OSError: The peer holds none of the secrets, or exceeds `PROVE_S` in total.
    """
    until_s = time.monotonic() + PROVE_S
    connection.settimeout(PROVE_S)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(nonce)
    theirs = _exactly(connection, _NONCE_BYTES, until_s)
    proof = _exactly(connection, _PROOF_BYTES, until_s)
    for key in keys.derive(f"gang {gang}"):
        if hmac.compare_digest(_proof(key, b"rank", nonce, theirs), proof):
            connection.sendall(_proof(key, b"hub", nonce, theirs))
            joins = receive(connection, until_s)
            _settle(connection)
            return joins
    raise ConnectionError("it holds no key of this deployment")


def connect(address: str, keys: KeyRing, gang: str) -> socket.socket:
    """Connect to the hub at "host:port" and run the rank's side of the mutual proof.

    Raises:
        GangLostError: The hub is not there, or holds another secret.
    """
    derived = keys.derive(f"gang {gang}")
    if not derived:
        raise GangLostError(
            f"gang {gang} has no secret to prove; set keys on every engine of the gang"
        )
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), PROVE_S)
    except OSError as error:
        raise GangLostError(f"cannot reach the hub of gang {gang} at {address}: {error}") from error
    try:
        _prove(connection, derived[0])
    except OSError as error:
        connection.close()
        raise GangLostError(
            f"the hub of gang {gang} at {address} rejected this rank: {error}"
        ) from error
    return connection


def _prove(connection: socket.socket, key: bytes) -> None:
    until_s = time.monotonic() + PROVE_S
    nonce, ours = _exactly(connection, _NONCE_BYTES, until_s), secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(ours + _proof(key, b"rank", nonce, ours))
    proof = _exactly(connection, _PROOF_BYTES, until_s)
    if not hmac.compare_digest(_proof(key, b"hub", nonce, ours), proof):
        raise ConnectionError("it holds no key of this deployment")
    _settle(connection)


def _proof(key: bytes, who: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(key, who + b"".join(nonces), "sha256")


def _settle(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _exactly(connection: socket.socket, num_bytes: int, until_s: float | None = None) -> bytes:
    """Receive exactly `num_bytes`, by a deadline on the monotonic clock if one is given."""
    found = bytearray()
    while len(found) < num_bytes:
        if until_s is not None:
            # The socket's own timeout restarts with every received byte, so shrink it each time.
            left_s = until_s - time.monotonic()
            if left_s <= 0.0:
                raise TimeoutError("it did not complete the handshake in time")
            connection.settimeout(left_s)
        part = connection.recv(num_bytes - len(found))
        if not part:
            raise ConnectionError("the other end closed the connection")
        found += part
    return bytes(found)
