"""Security of the TCP side of a KV endpoint.

With ``network`` "encrypted" both ends prove with CurveZMQ that they hold a secret of the
deployment, and no other host can read or change their traffic. With "plain" a consumer shows only a
ticket. Neither applies to engines of one host, which connect over a Unix socket of their user.
"""

import zmq

from kv_transfer.addresses import check_listen_host
from kv_transfer.connector import ConnectorSettings
from kv_transfer.curve import CurveAuthenticator, secure_client, secure_server, server_public_key
from kv_transfer.errors import AddressError, ServerKeyError, TransferError
from kv_transfer.transport import WireCounters

_CURVE_BYTES = 33
"""Bytes that CurveZMQ adds to a frame; libzmq counts them as part of the frame's size."""

_KEY = "#"
"""Separates an address from the server's public key, where it has one."""


def address_of(endpoint: str) -> str:
    """Return the address of an endpoint, for ZMQ, without the key that may follow it."""
    return endpoint.partition(_KEY)[0]


def bind_tcp(router: zmq.Socket[bytes], settings: ConnectorSettings, counters: WireCounters) -> str:
    """Bind to ``settings.bind``, secured if the settings say so.

    Call last: security applies to the binds of a socket that follow it, too.

    Args:
        router: The socket, not bound to TCP yet.
        settings: The engine's.
        counters: Where refused connections are counted.

    Returns:
        The endpoint for consumers.

    Raises:
        TransferError: The address is a wildcard or a name, beyond loopback although there is no
            secret, or cannot be bound.
    """
    bind, keys = settings.bind, settings.keys
    try:
        if bind.startswith("ipc://"):
            router.bind(bind)
            return _last(router)
        host, _, _ = bind.removeprefix("tcp://").rpartition(":")
        check_listen_host(host, has_secrets=bool(keys.secrets))
        if settings.network == "plain" or not keys.secrets:
            router.bind(bind)
            return _last(router)
        CurveAuthenticator(router.context, keys, counters.count_denied)
        secure_server(router, keys, settings.incarnation)
        _make_room(router)
        router.bind(bind)
        return f"{_last(router)}{_KEY}{server_public_key(keys, settings.incarnation)}"
    except (zmq.ZMQError, AddressError) as error:
        raise TransferError(f"cannot bind KV transfer to {bind!r}: {error}") from error


def connect_tcp(
    dealer: zmq.Socket[bytes], endpoint: str, settings: ConnectorSettings, producer: str
) -> None:
    """Connect to a producer's TCP endpoint.

    Args:
        dealer: The socket.
        endpoint: From the producer's ticket.
        settings: This engine's.
        producer: The incarnation that has to answer.

    Raises:
        ServerKeyError: The producer has a key of another deployment, or none although this engine
            requires encryption.
        zmq.ZMQError: It is no address.
    """
    address, _, key = endpoint.partition(_KEY)
    if key:
        secure_client(dealer, settings.keys, producer, key)
        _make_room(dealer)
    elif settings.network != "plain":
        raise ServerKeyError(
            f"engine {producer} sends KV unencrypted, and this engine requires encryption: give "
            "both pools the same kv_network"
        )
    dealer.connect(address)


def _make_room(secured: zmq.Socket[bytes]) -> None:
    """Raise the limit on a frame's size, if there is one, by what encryption adds."""
    limit = int(secured.get(zmq.MAXMSGSIZE))
    if limit >= 0:
        secured.set(zmq.MAXMSGSIZE, limit + _CURVE_BYTES)


def _last(router: zmq.Socket[bytes]) -> str:
    return router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
