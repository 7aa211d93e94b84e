"""Mutual authentication of ZMQ sockets by secrets of one deployment, with CurveZMQ.

The end that binds is a *server*: its key pair is derived from the deployment's first secret and its
own incarnation. The end that connects is a *client*: all clients share one key pair, derived from
the first secret. A server accepts the clients of each of its secrets. A client connects to a server
only if one of its own secrets gives the server's public key for that incarnation, so a false
description of a server does not help an attacker. Two processes can connect when each has the
other's first secret, which `KeyRing`'s way to rotate keeps true at every moment. CurveZMQ makes new
keys for each connection, so its traffic can be neither read nor replayed on another one. It cannot
be turned off.

Owns no state but the `CurveAuthenticator`'s thread.
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
"""Time in which a new connection must prove itself, or it is closed."""
BACKLOG = 128
"""Connections that may wait to be accepted; the kernel refuses more."""

_DOMAIN = b"ttserve"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_NUM_ZAP_FRAMES = 7


class _Pair(NamedTuple):
    """Key pair in ZMQ's form: 40 characters each."""

    public: bytes
    secret: bytes


def server_public_key(keys: KeyRing, incarnation: str) -> str:
    """Return the public key of the server of this incarnation, for its clients.

    Raises:
        ServerKeyError: There is no secret.
    """
    return _pairs(keys, _server_purpose(incarnation))[0].public.decode()


def secure_server(socket: zmq.Socket[Any], keys: KeyRing, incarnation: str) -> None:
    """Accept only clients of this deployment; call before `bind`.

    Args:
        socket: Socket of a context with a `CurveAuthenticator`; without one it accepts no client.
        keys: The deployment's secrets.
        incarnation: The server's.

    Raises:
        ServerKeyError: There is no secret.
    """
    pair = _pairs(keys, _server_purpose(incarnation))[0]
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, pair.secret)
    socket.set(zmq.ZAP_DOMAIN, _DOMAIN)
    # Without it, a context without authenticator would accept any client that has the public key.
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.set(zmq.BACKLOG, BACKLOG)


def secure_client(
    socket: zmq.Socket[Any], keys: KeyRing, incarnation: str, server_key: str
) -> None:
    """Connect only to the server of this incarnation and deployment; call before `connect`.

    Args:
        socket: Socket of any context.
        keys: The deployment's secrets.
        incarnation: The server's.
        server_key: Its public key, from the server's description.

    Raises:
        ServerKeyError: No secret here gives that key for that incarnation.
    """
    known = [pair.public for pair in _pairs(keys, _server_purpose(incarnation))]
    if server_key.encode() not in known:
        raise ServerKeyError(
            f"engine {incarnation} proves itself with a secret that this process does not have: "
            "give both the same key_file; to rotate, first deploy a file with the new secret "
            "behind the old one"
        )
    client = _pairs(keys, _CLIENT_PURPOSE)[0]
    socket.set(zmq.CURVE_SERVERKEY, server_key.encode())
    socket.set(zmq.CURVE_PUBLICKEY, client.public)
    socket.set(zmq.CURVE_SECRETKEY, client.secret)
    socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


class CurveAuthenticator:
    """Authenticator of the server sockets of one ZMQ context; ends with the context.

    Owner of a thread and its socket. A refused client is only passed to `on_denied` and never
    logged: with a line for each, clients could fill the disk.

    Args:
        context: Context of the server sockets, none of which may be bound yet.
        keys: The deployment's secrets: a client of any of them is accepted.
        on_denied: Called on the thread, once for each refused client.
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
        threading.Thread(target=self._run, name="curve-auth", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            self._socket.close(linger=0)

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        """Answer a request of ZMQ's RFC 27.

        Frames: version, request, domain, address, routing id, mechanism, credentials.
        """
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
        raise ServerKeyError("no secret to authenticate with: set key_file on every process")
    pairs = []
    for secret in keys.derive(purpose):
        # Any 32 bytes are a secret key of Curve25519.
        encoded = z85.encode(secret)
        pairs.append(_Pair(zmq.curve_public(encoded), encoded))
    return pairs
