"""What `ttserve doctor` says of sockets, and that SECURITY.md says the same."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cluster import cli
from cluster.config.front import is_loopback
from cluster.config.ray_auth import VARIABLES
from cluster.lifecycle import doctor, listeners
from cluster.lifecycle.listeners import KNOWN_SOCKETS, Socket, judge, judge_ray, read_listeners

REPOSITORY = Path(__file__).resolve().parents[3]
GCS = "/x/site-packages/ray/core/src/ray/gcs/gcs_server --gcs_server_port=6379"

INGRESS = "ray::ServeReplica:ttserve:ingress"


@pytest.fixture(autouse=True)
def no_other_cluster(monkeypatch, tmp_path):
    """Tokens of this host's user and clusters are no matter of these tests."""
    monkeypatch.setattr(doctor, "ray_environments", list)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in VARIABLES - {"RAY_AUTH_MODE"}:
        monkeypatch.delenv(name, raising=False)


def test_the_security_policy_lists_the_sockets_that_are_known():
    text = (REPOSITORY / "SECURITY.md").read_text()
    table = text[text.index("| socket |") :].split("\n\n")[0].splitlines()[2:]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table]
    assert rows == [(f"`{known.name}`", known.where, known.who) for known in KNOWN_SOCKETS]


@pytest.mark.parametrize(
    ("family", "address", "command", "has_token", "name", "level"),
    [
        ("tcp", "127.0.0.1:5", "python -m replicas.engine_process.process", False, "engine", "ok"),
        ("tcp", "10.0.0.1:5", "python -m replicas.engine_process.process", False, "engine", "note"),
        ("abstract", "@kv", "python -m replicas.engine_process.process", False, "engine-kv", "ok"),
        ("abstract", "@s", "python -m kv_transfer.stores.shm_server", False, "pool", "ok"),
        ("tcp", "[::1]:8000", "/b/haproxy -db -f x", False, "http", "ok"),
        ("tcp", "0.0.0.0:8000", "/b/haproxy -db -f x", True, "http", "note"),
        ("unix", "/tmp/h/admin.sock", "/b/haproxy -db -f x", False, "http-admin", "ok"),
        ("tcp", "[::]:6379", GCS, True, "ray", "ok"),
        ("tcp", "[::]:6379", GCS, False, "ray", "missing"),
        ("tcp", "10.0.0.1:6379", GCS, False, "ray", "missing"),
        ("tcp", "127.0.0.1:6379", GCS, False, "ray", "ok"),
        ("tcp", "[::]:1", "ray::ServeReplica:ttserve:decode", False, "ray", "missing"),
        ("tcp", "0.0.0.0:30000", INGRESS, True, "http-behind", "note"),
        ("tcp", "127.0.0.1:30000", INGRESS, True, "http-behind", "ok"),
        ("tcp", "[::]:30001", INGRESS, True, "http-behind", "note"),
        ("tcp", "0.0.0.0:8500", "ray::ProxyActor", True, "http-behind", "note"),
        ("tcp", "[::]:8000", "ray::ProxyActor.ready", True, "http-behind", "note"),
        ("tcp", "0.0.0.0:40000", "ray::ProxyActor", True, "http-behind", "note"),
        ("tcp", "[::]:36207", INGRESS, True, "ray", "ok"),
        ("tcp", "[::ffff:a00:1]:10002", INGRESS, True, "ray", "ok"),
        ("tcp", "[::]:36207", INGRESS, False, "ray", "missing"),
        ("tcp", "[::]:17088", "ray-dashboard-ServeHead-0 (python -c)", False, "ray", "missing"),
        ("unix", "/tmp/x", "python -m replicas.engine_process.process", False, "unknown", "note"),
        ("abstract", "@x", "/b/haproxy -db -f x", False, "unknown", "note"),
        ("unix", "/tmp/ray/s/sockets/raylet", "/x/ray/core/src/ray/raylet/raylet", False,
         "ray-local", "ok"),
    ],
)  # fmt: skip
def test_each_socket_is_named_and_checked(family, address, command, has_token, name, level):
    listener = judge(Socket(family, address, 7, command, has_token))
    assert (listener.socket, listener.level) == (name, level)
    assert bool(judge_ray((listener,))) == (level == "missing")


def test_sockets_of_other_programs_are_ignored():
    assert judge(Socket("tcp", "0.0.0.0:22", 7, "sshd", False)) is None


def test_an_unknown_socket_of_a_clusters_descendant_is_reported():
    listener = judge(Socket("tcp", "0.0.0.0:22", 7, "sshd", False, is_below=True))
    assert (listener.level, listener.socket) == ("note", "unknown")
    assert listener.verdict == "not expected"


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("[::1]", True), ("localhost", True),
     ("[::ffff:127.0.0.1]", True), ("0.0.0.0", False), ("::", False), ("example.org", False)],
)  # fmt: skip
def test_local_addresses_are_recognised(host, expected):
    assert is_loopback(host) is expected


LISTEN = """
import socket, sys
sockets = [socket.create_server(("127.0.0.1", 0)),
           socket.create_server(("::1", 0), family=socket.AF_INET6) if socket.has_ipv6 else None]
name = socket.socket(socket.AF_UNIX)
name.bind(sys.argv[1]); name.listen()
print(*(s.getsockname()[1] for s in sockets if s), flush=True)
sys.stdin.read()
"""


@pytest.mark.process
def test_a_process_is_found_by_its_sockets_as_the_kernel_lists_them(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN, str(tmp_path / "s"),
         "replicas.engine_process.process"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        ports = process.stdout.readline().split()
        mine = [x for x in read_listeners() if x.pid == process.pid]
        found = {x.address for x in mine if x.socket == "engine"}
        assert found == {f"127.0.0.1:{ports[0]}", *(f"[::1]:{port}" for port in ports[1:])}
        assert {x.address for x in mine if x.socket == "unknown"} == {str(tmp_path / "s")}
    finally:
        process.communicate()


@pytest.mark.process
def test_sockets_of_an_engines_descendants_are_found(tmp_path):
    # Two processes down, as what an engine runs may start others.
    start = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    process = subprocess.Popen(
        [sys.executable, "-c", start + "; 'replicas.engine_process.process'", start, LISTEN,
         str(tmp_path / "s")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        port = process.stdout.readline().split()[0]
        [found] = [x for x in read_listeners() if x.address == f"127.0.0.1:{port}"]
        assert (found.socket, found.level, found.verdict) == ("unknown", "note", "not expected")
    finally:
        process.communicate()


@pytest.mark.process
@pytest.mark.parametrize("mode", [None, "token", "disabled"])
def test_doctor_fails_for_an_open_ray_without_a_token(monkeypatch, mode):
    environment = {k: v for k, v in os.environ.items() if k != "RAY_AUTH_MODE"}
    if mode is not None:
        environment["RAY_AUTH_MODE"] = mode
    code = LISTEN.replace('("127.0.0.1", 0)', '("0.0.0.0", 0)')
    name = f"\0{os.urandom(8).hex()}"
    code = code.replace("sys.argv[1]", repr(name))
    process = subprocess.Popen(
        [sys.executable, "-c", code, "/ray/core/src/ray/gcs/gcs_server"],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    read = listeners.read_listeners

    def only_this():
        return tuple(x for x in read() if x.pid == process.pid)

    try:
        process.stdout.readline()
        monkeypatch.setattr(doctor, "read_listeners", only_this)
        result = CliRunner().invoke(cli.app, ["doctor"])
        assert ("export RAY_AUTH_MODE=token" in result.output) == (mode != "token")
        assert result.exit_code == (0 if mode == "token" else 1), result.output
    finally:
        process.communicate()


CONFIG = {
    "http_options": {"host": "0.0.0.0"},
    "applications": [
        {"name": "t", "import_path": "cluster.app:build", "args": {"pools": {"both": {}}}}
    ],
}


@pytest.mark.parametrize("command", [["validate"], ["doctor", "--config"]])
@pytest.mark.parametrize(("host", "num_warnings"), [("0.0.0.0", 1), ("127.0.0.1", 0)])
def test_a_public_address_is_warned_of_once(tmp_path, monkeypatch, command, host, num_warnings):
    monkeypatch.setattr(doctor, "read_listeners", tuple)
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "http_options": {"host": host}}))
    result = CliRunner().invoke(cli.app, [*command, str(path)])
    assert len(re.findall("without API keys", result.output)) == num_warnings
    assert result.exit_code == 0


def test_serving_on_such_an_address_warns_once_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.lifecycle.supervisor.serve", lambda *_: 0)
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({**CONFIG, "http_options": {"host": "127.0.0.1"}}))
    for more, num_warnings in (([], 0), (["--host", "0.0.0.0"], 1)):
        result = CliRunner().invoke(cli.app, ["serve", "--config", str(path), *more])
        assert result.output.count("without API keys") == num_warnings


def test_serving_tells_haproxy_the_origins_of_web_pages(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("cluster.lifecycle.supervisor.serve", lambda *call: calls.append(call) or 0)
    path = tmp_path / "serve.yaml"
    application = copy.deepcopy(CONFIG["applications"][0])
    application["args"]["ingress"] = {"cors_origins": ["https://a.example"]}
    path.write_text(yaml.safe_dump({**CONFIG, "applications": [application]}))
    assert CliRunner().invoke(cli.app, ["serve", "--config", str(path)]).exit_code == 0
    assert calls[0][-1] == ("https://a.example",)
