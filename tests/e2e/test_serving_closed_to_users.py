"""The server of `test_serving.py` under another user's eyes, and its listeners beside SECURITY.md.

It was started with Ray's authentication switched off in its caller's environment, from a home
folder that every user may enter.
"""

import os
import re
import subprocess
from pathlib import Path

import harness
import other_user
import pytest
from other_user import as_other_user

from cluster.config.front import is_loopback
from cluster.lifecycle.listeners import read_listeners

pytestmark = pytest.mark.ray
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")

NOT_HERE = {"admin", "pool"}
"""Sockets of the table that this server does not have: its configuration asks for neither."""


@pytest.fixture(scope="module")
def family(server):
    return server.footprint.look()


@pytest.fixture(scope="module")
def folder(server, family):
    """The server's private folder."""
    commands = (Path(f"/proc/{p}/cmdline").read_text() for p in family)
    [name] = {name for c in commands for name in re.findall(r'"folder":"([^"]+)"', c)}
    return Path(name)


@pytest.fixture(scope="module")
def token(family):
    """Ray's token, as the server's own processes have it."""
    paths = set()
    for process_id in family:
        environ = Path(f"/proc/{process_id}/environ").read_bytes().decode().split("\0")
        paths |= {v.partition("=")[2] for v in environ if v.startswith("RAY_AUTH_TOKEN_PATH=")}
    [path] = paths
    return Path(path).read_text()


def everything_in(folder):
    return [str(folder), *(str(path) for path in folder.rglob("*"))]


@needs_root
def test_another_user_sees_no_secret_and_can_write_nothing(server, family, folder, token):
    home = (b"\0" + Path(f"/proc/{server.process.pid}/environ").read_bytes()).split(b"\0HOME=")[1]
    home = Path(os.fsdecode(home.split(b"\0")[0]))
    assert home.stat().st_mode & 0o005 == 0o005
    own = [*everything_in(folder), str(home / ".ray" / "auth_token")]
    held = sorted(other_user.held_files(family) | set(own))
    assert any(path.endswith("/sockets/raylet") for path in own)
    assert any(path.endswith("/admin.sock") for path in own)
    commands = [f"/proc/{process_id}/cmdline" for process_id in family]
    looked = as_other_user(
        lambda: {
            "parts": other_user.readable_parts(family),
            "writable": other_user.writable(held),
            "texts": other_user.texts([*own, *commands]),
        }
    )
    assert looked["parts"] == []
    assert looked["writable"] == []
    assert looked["texts"].keys() <= set(commands), "files of the server that others can read"
    assert looked["texts"].keys() & set(commands)
    assert not [path for path, text in looked["texts"].items() if token in text]


def test_what_a_server_makes_is_closed_to_others_by_its_umask(server, family):
    statuses = [_text(Path(f"/proc/{p}/status")) for p in family - {server.process.pid}]
    umasks = {umask for status in statuses for umask in re.findall(r"Umask:\s+(\d+)", status)}
    assert umasks == {"0077"}


@needs_root
def test_another_user_runs_no_code_through_a_port(server, family, token, tmp_path):
    ports = {port for _, port in harness.listening_ports(family)}
    proofs = {port: tmp_path / str(port) for port in ports}

    def attack():
        for port, proof in proofs.items():
            other_user.call_replica(port, other_user.pickled(proof), None)

    as_other_user(attack)
    assert [port for port, proof in proofs.items() if proof.exists()] == []
    # With the token the same words run, at the three pool replicas and the ingress: it is the
    # token that stops them.
    for port, proof in proofs.items():
        other_user.call_replica(port, other_user.pickled(proof), token)
    assert len([proof for proof in proofs.values() if "uid=0" in _text(proof)]) == 4


def _text(path):
    return path.read_text() if path.exists() else ""


def test_the_listeners_are_those_of_the_security_policy(server, family, folder):
    found = [listener for listener in read_listeners() if listener.pid in family]
    table = _policy()
    assert {listener.socket for listener in found} == table.keys() - NOT_HERE
    for listener in found:
        assert listener.level == "ok", listener
        where, address = table[listener.socket], listener.address
        if address.startswith("@"):
            prefix = re.search(r"`(@[\w-]+)", where)[1]
            assert address.startswith(prefix), listener
        elif address.startswith("/"):
            assert "private" in where
            assert folder in Path(address).parents, listener
        else:
            assert re.search(r"loopback|`http_options.host`", where)
            assert is_loopback(address.rpartition(":")[0]), listener
    assert {x.address.rpartition(":")[2] for x in found if x.address[0] not in "@/"} == {
        str(port) for _, port in harness.listening_ports(family)
    }


def _policy():
    """Return where each socket of SECURITY.md's table listens, by its name."""
    text = (harness.REPOSITORY / "SECURITY.md").read_text()
    rows = text[text.index("| socket |") :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name.strip("`"): where for name, where, _ in cells}


@pytest.mark.parametrize(
    ("words", "code", "answer"),
    [
        (["status"], 0, "ttserve: RUNNING"),
        (
            ["flip", "decode-0", "prefill"],
            1,
            "no replica 'decode-0' runs; running replicas: decode-",
        ),
    ],
)
def test_commands_reach_a_local_server_without_its_variables(server, family, words, code, answer):
    commands = [_text(Path(f"/proc/{process_id}/cmdline")) for process_id in family]
    addresses = {x for command in commands for x in re.findall(r"--gcs-address=([\w.:]+)", command)}
    # Other clusters may run on this host.
    [address] = addresses
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [str(harness.BINARIES / "ttserve"), *words],
        env={**environment, "RAY_ADDRESS": address}, cwd=harness.REPOSITORY, timeout=150,
        check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert answer in done.stdout
    assert done.returncode == code
