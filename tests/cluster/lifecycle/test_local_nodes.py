"""Which Ray node a command talks to, and with which variables."""

import os

import pytest

from cluster.lifecycle.local_nodes import NoNodeError, find_node

RAYLET = "/x/ray/core/src/ray/raylet/raylet --node_id={id} --gcs-address={address}"
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


@pytest.fixture
def proc(tmp_path):
    """A process table as the kernel shows it."""

    def add(process_id, command, **environment):
        folder = tmp_path / str(process_id)
        folder.mkdir()
        (folder / "stat").write_text(f"{process_id} (raylet) S " + "1 " * 40)
        (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode())
        entries = "\0".join(f"{name}={value}" for name, value in environment.items())
        (folder / "environ").write_bytes(entries.encode())
        return folder

    add(1, "/sbin/init --node_id=ab --gcs-address=127.0.0.1:9")
    add.root = tmp_path
    return add


def test_a_node_has_only_the_variables_that_connect_to_its_cluster(proc):
    proc(
        7, RAYLET.format(id="ab12", address="127.0.0.1:6379"), HOME="/h", RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH="/p/token",
    )  # fmt: skip
    expected = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/p/token", **LOOPBACK}
    assert find_node({}, proc.root) == ("ab12", "127.0.0.1:6379", expected)


def test_a_node_with_an_address_of_its_own_keeps_it(proc):
    proc(7, RAYLET.format(id="ab12", address="192.0.2.1:6379"))
    assert find_node({}, proc.root) == ("ab12", "192.0.2.1:6379", {})


def test_of_several_nodes_the_named_clusters_is_chosen(proc):
    addresses = ["192.0.2.1:1", "192.0.2.1:2"]
    for number, address in enumerate(addresses):
        proc(7 + number, RAYLET.format(id=f"a{number}", address=address))
    with pytest.raises(NoNodeError, match="2 Ray nodes run here.*RAY_ADDRESS.*" + addresses[0]):
        find_node({}, proc.root)
    assert find_node({"RAY_ADDRESS": addresses[1]}, proc.root).node_id == "a1"


def test_without_a_node_the_error_says_where_to_run_the_command(proc):
    with pytest.raises(NoNodeError, match="where `ttserve serve` or `ray start` ran"):
        find_node({}, proc.root)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_node_of_another_user_is_left_out(proc):
    """It could name any file of this user's as its token, and would be sent what is in it."""
    folder = proc(
        7, RAYLET.format(id="ab12", address="127.0.0.1:1"), RAY_AUTH_TOKEN_PATH="/root/secret"
    )
    os.chown(folder, 65534, 65534)
    with pytest.raises(NoNodeError):
        find_node({}, proc.root)
