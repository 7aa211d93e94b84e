"""Where a replica's port of Ray Serve is bound, and the token without which it is not opened."""

import shutil
import tempfile
import warnings
from pathlib import Path

import pytest

from cluster.lifecycle.private_files import UnsafeFileError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    from ray.serve._private import replica

    from cluster.lifecycle import replica_port


@pytest.fixture
def bound(monkeypatch):
    """Addresses that Serve's own function was called with."""
    addresses = []
    monkeypatch.setattr(
        replica, "add_port_to_grpc_server", lambda _, address: addresses.append(address)
    )
    return addresses


def guard(monkeypatch, node_address):
    monkeypatch.setattr(replica_port.ray.util, "get_node_ip_address", lambda: node_address)
    monkeypatch.setattr(replica_port, "process_environment", dict)
    replica_port.guard_replica_port()


@pytest.mark.parametrize(
    ("node_address", "expected"), [("127.0.0.1", "127.0.0.1:0"), ("192.0.2.1", "[::]:0")]
)
def test_the_port_is_on_loopback_if_the_node_is(monkeypatch, bound, node_address, expected):
    guard(monkeypatch, node_address)
    replica.add_port_to_grpc_server(None, "[::]:0")
    assert bound == [expected]


def test_an_address_that_serve_did_not_use_before_is_refused(monkeypatch, bound):
    guard(monkeypatch, "127.0.0.1")
    with pytest.raises(RuntimeError, match=r"0\.0\.0\.0:5"):
        replica.add_port_to_grpc_server(None, "0.0.0.0:5")
    assert bound == []


def test_no_replica_starts_with_a_token_that_others_can_read(monkeypatch):
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        folder.chmod(0o755)
        token = folder / "token"
        token.write_text("secret")
        token.chmod(0o644)
        environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        monkeypatch.setattr(replica_port, "process_environment", lambda: environment)
        with pytest.raises(UnsafeFileError, match="can be used by other users"):
            replica_port.guard_replica_port()
    finally:
        shutil.rmtree(folder)
