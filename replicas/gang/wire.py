"""What the ranks of a gang and their hub say to each other: frames on a TCP connection.

Owns nothing. Whoever connects proves that it holds a secret of the deployment, and so does the hub,
before anything is believed; no secret travels. What follows is neither encrypted nor sealed, as are
the tensors that ranks send each other: a gang belongs on a network that nobody else is on.
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
"""How long a connection may take to prove itself."""
BEAT_S = 0.5
"""How often each end says that it is there, and looks whether the others do."""
SILENT_LOOKS = 10
"""Who was not heard between so many looks is lost."""

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_MAX_BYTES = 1 << 16
_LENGTH = struct.Struct(">I")


class Join(msgspec.Struct, frozen=True, tag="join", array_like=True):
    """A rank's first message.

    Attributes:
        rank: Its number.
        store: Where rank 0 keeps what ranks tell each other to connect; "" of the others.
    """

    rank: int
    store: str


class Complete(msgspec.Struct, frozen=True, tag="complete", array_like=True):
    """All ranks have joined.

    Attributes:
        store: As rank 0 said.
    """

    store: str


class Drained(msgspec.Struct, frozen=True, tag="drained", array_like=True):
    """Up: the rank takes no more requests and has none left. Down: so it is with all of them."""


class Beat(msgspec.Struct, frozen=True, tag="beat", array_like=True):
    """It is there.

    Attributes:
        stalled_s: Of a rank: how long it has been in one turn, if that is too long and not because
            it waits for the others.
    """

    stalled_s: float = 0.0


Up = Join | Declaration | Drained | Beat
Down = Complete | Turn | Drained | Loss | Beat

encode = msgspec.msgpack.Encoder().encode
decode_up = msgspec.msgpack.Decoder(Up).decode
decode_down = msgspec.msgpack.Decoder(Down).decode


def send(connection: socket.socket, message: Up | Down) -> None:
    """Send one message; callers take turns.

    Raises:
        OSError: The other end is gone.
    """
    raw = encode(message)
    connection.sendall(_LENGTH.pack(len(raw)) + raw)


def receive(connection: socket.socket, until_s: float | None = None) -> bytes:
    """The bytes of the next message.

    Args:
        connection: To the other end.
        until_s: When it has to be here, as `_exactly` takes it.

    Raises:
        OSError: The other end is gone, or sends what is no message.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, until_s))
    if length > _MAX_BYTES:
        raise ConnectionError(f"a message of {length} bytes")
    return _exactly(connection, length, until_s)


def admit(connection: socket.socket, keys: KeyRing, gang: str) -> bytes:
    """The hub's half of the proof; returns the first message of whoever has proved itself.

    Raises:
        OSError: Whoever connected holds none of the secrets, or is too slow over all of it.
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
    raise ConnectionError("no key of this deployment")


def connect(address: str, keys: KeyRing, gang: str) -> socket.socket:
    """A rank's half: a connection to the hub at "host:port".

    Raises:
        GangLostError: It is not there, or holds another secret.
    """
    derived = keys.derive(f"gang {gang}")
    if not derived:
        raise GangLostError("no secret: set keys on every engine of the gang")
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), PROVE_S)
    except OSError as error:
        raise GangLostError(f"gang {gang} has no hub at {address}: {error}") from error
    try:
        _prove(connection, derived[0])
    except OSError as error:
        connection.close()
        raise GangLostError(f"the hub of gang {gang} at {address} lets nobody in: {error}") from (
            error
        )
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
    """So many bytes, all of which are to be here by a reading of the monotonic clock."""
    found = bytearray()
    while len(found) < num_bytes:
        if until_s is not None:
            # A timeout of the socket's begins anew with every byte that comes.
            left_s = until_s - time.monotonic()
            if left_s <= 0.0:
                raise TimeoutError("too slow")
            connection.settimeout(left_s)
        part = connection.recv(num_bytes - len(found))
        if not part:
            raise ConnectionError("the other end is gone")
        found += part
    return bytes(found)
