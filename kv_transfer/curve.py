"""Mutual proof, on ZMQ sockets, that both ends hold a secret of one deployment: CurveZMQ.

Whoever listens is a *server*: its key pair comes of the deployment's first secret and its own
incarnation. Whoever connects is a *client*: one key pair for all of them, of the first secret. A
server lets in the clients of each of its secrets; a client speaks to a server whose public key one
of its own secrets gives for that incarnation, whatever the one who told it of the server says. So
two processes understand each other when each has the other's first secret, which is what
`KeyRing`'s way to rotate keeps true at every moment. CurveZMQ makes new keys for each connection:
what it carries can be neither read nor repeated on another one. There is no way to turn it off.

Owns no state but the `Doorkeeper`'s thread.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq
from zmq.utils import z85

from kv_transfer.errors import ServerKeyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kv_transfer.keys import KeyRing

HANDSHAKE_MS = 5000
"""A connection that has not proved itself after so long is closed."""
BACKLOG = 128
"""Connections that may wait to be taken; more are refused by the kernel."""

_DOMAIN = b"ttserve"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_NUM_ZAP_FRAMES = 7


class _Pair(NamedTuple):
    """A key pair, as ZMQ takes it: 40 characters each."""

    public: bytes
    secret: bytes


def server_public_key(keys: KeyRing, incarnation: str) -> str:
    """The public key of the server of this incarnation, to be told to its clients.

    Raises:
        ServerKeyError: There is no secret.
    """
    return _pairs(keys, _server_purpose(incarnation))[0].public.decode()


def secure_server(socket: zmq.Socket[Any], keys: KeyRing, incarnation: str) -> None:
    """Let only clients of this deployment connect; before `bind`, with a `Doorkeeper` at work.

    Args:
        socket: Of a context that has a `Doorkeeper`; without one nobody gets in.
        keys: The deployment's secrets.
        incarnation: The server's.

    Raises:
        ServerKeyError: There is no secret.
    """
    pair = _pairs(keys, _server_purpose(incarnation))[0]
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, pair.secret)
    socket.set(zmq.ZAP_DOMAIN, _DOMAIN)
    # Without it a context whose doorkeeper is missing would let in whoever knows the public key.
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.set(zmq.BACKLOG, BACKLOG)


def secure_client(
    socket: zmq.Socket[Any], keys: KeyRing, incarnation: str, server_key: str
) -> None:
    """Connect only to the server of this incarnation and deployment; before `connect`.

    Args:
        socket: Of any context.
        keys: The deployment's secrets.
        incarnation: The server's.
        server_key: Its public key, as whoever described it says.

    Raises:
        ServerKeyError: None of the secrets gives that key to that incarnation.
    """
    known = [pair.public for pair in _pairs(keys, _server_purpose(incarnation))]
    if server_key.encode() not in known:
        raise ServerKeyError(
            f"engine {incarnation} proves itself with none of this process's secrets: give both "
            "the same key_file; to rotate, first deploy another file, the new secret behind the old"
        )
    client = _pairs(keys, _CLIENT_PURPOSE)[0]
    socket.set(zmq.CURVE_SERVERKEY, server_key.encode())
    socket.set(zmq.CURVE_PUBLICKEY, client.public)
    socket.set(zmq.CURVE_SECRETKEY, client.secret)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


class Doorkeeper:
    """Says for the server sockets of one ZMQ context who gets in; ends with the context.

    Owner of a thread and its socket. It says nothing of those it turns away but to `on_denied`:
    a line for each would be theirs to fill a disk with.

    Args:
        context: Of the server sockets, which must not be bound before.
        keys: The deployment's secrets: a client of any of them gets in.
        on_denied: Called on the thread, once for each that does not.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: KeyRing,
        on_denied: Callable[[], None] = lambda: None,
    ) -> None:
        self._known = frozenset(z85.decode(p.public) for p in _pairs(keys, _CLIENT_PURPOSE))
        self._on_denied = on_denied
        self._socket = context.socket(zmq.REP)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ENDPOINT)
        threading.Thread(target=self._run, name="doorkeeper", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            self._socket.close(linger=0)

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        """ZMQ's RFC 27: version, request, domain, address, routing id, mechanism, credentials."""
        gets_in = (
            len(frames) == _NUM_ZAP_FRAMES
            and frames[2] == _DOMAIN
            and frames[5] == b"CURVE"
            and frames[6] in self._known
        )
        request_id = frames[1] if len(frames) > 1 else b""
        if gets_in:
            return [_VERSION, request_id, b"200", b"OK", b"", b""]
        self._on_denied()
        return [_VERSION, request_id, b"400", b"no key of this deployment", b"", b""]


_CLIENT_PURPOSE = "curve client"


def _server_purpose(incarnation: str) -> str:
    return f"curve server {incarnation}"


def _pairs(keys: KeyRing, purpose: str) -> list[_Pair]:
    if not keys.secrets:
        raise ServerKeyError("no secret: set keys on whoever connects and on every engine")
    pairs = []
    for secret in keys.derive(purpose):
        # Any 32 bytes are a secret key of Curve25519.
        encoded = z85.encode(secret)
        pairs.append(_Pair(zmq.curve_public(encoded), encoded))
    return pairs
