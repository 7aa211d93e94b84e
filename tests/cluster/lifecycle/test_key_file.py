"""The file of secrets: what it may hold, who may reach it, and what its errors show."""

import base64
import itertools
import os

import pytest

from cluster.config.resolve import resolve
from cluster.errors import ClusterConfigError
from cluster.lifecycle.key_file import key_ring
from cluster.routing.tickets import TicketOffice
from kv_transfer.config import TransferConfig
from replicas.config import EngineConfig
from replicas.messages import EngineRequest
from tests.cluster.engines import make_member, sampling

ONE, OTHER = bytes(range(16)), bytes(range(100, 132))


def write(path, content):
    """Write a file of secrets that only its owner can open."""
    path.touch(mode=0o600)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def test_key_file_is_hex_or_base64_and_its_first_line_seals(tmp_path):
    path = tmp_path / "keys"
    text = f"# new\n{ONE.hex().upper()}\n\n  {base64.b64encode(OTHER).decode()}  \n"
    write(path, text)
    assert key_ring(str(path)).secrets == (ONE, OTHER)


def test_rotation_never_has_a_ticket_that_is_refused(tmp_path):
    path = tmp_path / "keys"
    stages = [(ONE,), (ONE, OTHER), (OTHER, ONE), (OTHER,)]
    rings = []
    for secrets in stages:
        write(path, "\n".join(secret.hex() for secret in secrets))
        rings.append(key_ring(str(path)))
    for one, next_one in itertools.pairwise(rings):
        for sealing, opening in ((one, next_one), (next_one, one)):
            tickets = TicketOffice(sealing, TransferConfig(), unix_now_s=lambda: 1000.0)
            request = EngineRequest("r", [1, 2, 3], sampling())
            transfer = tickets.begin(request, 1, make_member("prefill", "p").description)
            assert opening.unseal(tickets.seal(transfer, "d"), 1000.0).consumer == "d"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "holds no secret"),
        (b"# nothing\n\n", "holds no secret"),
        (b"%s\nnot a key!\n" % ONE.hex().encode(), "line 2 is neither hexadecimal nor base64"),
        (b"00112233445566778899aabbccddee\n", "line 1 has 15 bytes; a secret has at least 16"),
        (b"\xff\xfe\n", "not ASCII"),
        (None, "cannot read .*No such file"),
    ],
)
def test_key_file_that_cannot_be_used_is_refused_and_shows_nothing_of_it(tmp_path, content, reason):
    path = tmp_path / "keys"
    if content is not None:
        write(path, content)
    with pytest.raises(ClusterConfigError, match=reason) as caught:
        key_ring(str(path))
    assert "args.key_file" in str(caught.value)
    for secret in ("not a key", "00112233", ONE.hex()):
        assert secret not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602, 0o620, 0o660, 0o601])
def test_key_file_that_others_can_read_or_write_is_refused(tmp_path, mode):
    path = tmp_path / "keys"
    write(path, ONE.hex())
    path.chmod(mode)
    with pytest.raises(ClusterConfigError, match=f"has mode {mode:04o}: .*chmod 600") as caught:
        key_ring(str(path))
    assert ONE.hex() not in str(caught.value)


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640])
def test_key_file_may_be_read_by_its_group_as_a_kubernetes_secret_is(tmp_path, mode):
    folder, path = tmp_path / "..data", tmp_path / "keys"
    folder.mkdir()
    write(folder / "keys", ONE.hex())
    (folder / "keys").chmod(mode)
    path.symlink_to(folder / "keys")
    assert key_ring(str(path)).secrets == (ONE,)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_key_file_of_another_user_is_refused_unless_it_is_roots(tmp_path, monkeypatch):
    path = tmp_path / "keys"
    write(path, ONE.hex())
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert key_ring(str(path)).secrets == (ONE,)
    os.chown(path, 65534, -1)
    with pytest.raises(ClusterConfigError, match="belongs to user 65534"):
        key_ring(str(path))


def test_no_text_of_a_cluster_shows_a_secret(tmp_path):
    path = tmp_path / "keys"
    write(path, ONE.hex())
    ring = key_ring(str(path))
    shown = [repr(ring), str(ring), repr(TicketOffice(ring)), f"{ring!r}"]
    shown += [repr(resolve({"pools": {"both": {}}, "key_file": str(path)}))]
    shown.append(repr(EngineConfig(model="/x", keys=ring)))
    for text in shown:
        assert ONE.hex() not in text
        assert repr(ONE)[2:-1] not in text
        assert base64.b64encode(ONE).decode() not in text
