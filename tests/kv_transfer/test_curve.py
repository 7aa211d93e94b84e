"""Sockets secured with a deployment's secrets: which clients and servers accept each other."""

import threading

import pytest
import zmq

from kv_transfer.addresses import check_listen_host
from kv_transfer.curve import CurveAuthenticator, secure_client, secure_server, server_public_key
from kv_transfer.errors import AddressError, ServerKeyError
from kv_transfer.keys import KeyRing

OLD, NEW, OTHER = b"o" * 16, b"n" * 16, b"x" * 16
INCARNATION = "0123abcd"


class Server:
    """Echoes on a secured ROUTER until it is closed."""

    def __init__(self, keys: KeyRing, *, has_authenticator: bool = True) -> None:
        self.context = zmq.Context()
        self.denied = threading.Semaphore(0)
        if has_authenticator:
            CurveAuthenticator(self.context, keys, self.denied.release)
        self.public_key = server_public_key(keys, INCARNATION)
        router = self.context.socket(zmq.ROUTER)
        secure_server(router, keys, INCARNATION)
        router.bind("tcp://127.0.0.1:*")
        self.endpoint = router.get_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._echo, args=(router,))
        self._thread.start()

    def _echo(self, router: zmq.Socket) -> None:
        try:
            while True:
                router.send_multipart(router.recv_multipart())
        except zmq.ContextTerminated:
            router.close(linger=0)

    def close(self) -> None:
        self.context.term()
        self._thread.join()


@pytest.fixture
def serve():
    servers = []

    def start(*secrets: bytes, **options) -> Server:
        servers.append(Server(KeyRing(secrets), **options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def is_answered(server: Server, secure, wait_s: float) -> bool:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        secure(dealer)
        dealer.connect(server.endpoint)
        dealer.send(b"are you there?")
        return bool(dealer.poll(1000 * wait_s)) and dealer.recv() == b"are you there?"


def hears(server: Server, *secrets: bytes, wait_s: float = 10.0) -> bool:
    return is_answered(
        server,
        lambda d: secure_client(d, KeyRing(secrets), INCARNATION, server.public_key),
        wait_s,
    )


def test_every_step_of_a_rotation_keeps_all_pairs_connected(serve):
    steps = [(OLD,), (OLD, NEW), (NEW, OLD), (NEW,)]
    servers = [serve(*secrets) for secrets in steps]
    for at in range(len(steps)):
        for other in {max(at - 1, 0), at, min(at + 1, len(steps) - 1)}:
            assert hears(servers[at], *steps[other]), (steps[at], steps[other])


def test_a_client_refuses_a_server_that_holds_none_of_its_secrets(serve):
    with pytest.raises(ServerKeyError, match="a secret that this process does not have"):
        hears(serve(OTHER), OLD, NEW)


def test_a_client_refuses_the_key_of_another_incarnation(serve):
    with pytest.raises(ServerKeyError, match="a secret that this process does not have"):
        is_answered(
            serve(OLD),
            lambda d: secure_client(
                d, KeyRing((OLD,)), INCARNATION, server_public_key(KeyRing((OLD,)), "another")
            ),
            0.3,
        )


def test_a_client_without_a_secret_is_refused(serve):
    server, unguarded = serve(OLD), serve(OLD, has_authenticator=False)
    public, secret = zmq.curve_keypair()

    def with_public_key(dealer):
        dealer.set(zmq.CURVE_SERVERKEY, server.public_key.encode())
        dealer.set(zmq.CURVE_PUBLICKEY, public)
        dealer.set(zmq.CURVE_SECRETKEY, secret)

    assert not is_answered(server, with_public_key, 0.3)
    assert server.denied.acquire(timeout=10)
    assert not is_answered(server, lambda _dealer: None, 0.3)
    assert not hears(unguarded, OLD, wait_s=0.3), "without an authenticator no client is let in"


def test_without_a_secret_there_are_no_keys():
    with pytest.raises(ServerKeyError, match="no secret"):
        server_public_key(KeyRing(), INCARNATION)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "::ffff:127.0.0.1"])
def test_loopback_needs_no_secret(host):
    check_listen_host(host, has_secrets=False)


@pytest.mark.parametrize("host", ["10.0.0.7", "192.168.1.1", "fd00::1", "[fd00::1]"])
def test_a_network_needs_a_secret(host):
    check_listen_host(host, has_secrets=True)
    with pytest.raises(AddressError, match="without a secret"):
        check_listen_host(host, has_secrets=False)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "[::]", "*", "", "0", "0x0", "::ffff:0.0.0.0", "localhost", "eth0"]
)
def test_wildcards_and_names_are_refused_with_a_secret_too(host):
    with pytest.raises(AddressError, match="cannot listen on"):
        check_listen_host(host, has_secrets=True)
