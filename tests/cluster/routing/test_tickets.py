"""Tickets: sealed with the cluster's keys, for as long as a hand-over takes; keys from a file."""

import base64
import itertools
import os

import msgspec
import pytest

from cluster.config.resolve import resolve
from cluster.errors import ClusterConfigError
from cluster.routing.tickets import TicketOffice, key_ring
from kv_transfer.config import TransferConfig
from kv_transfer.errors import FailureReason, TicketError
from kv_transfer.keys import CLOCK_TOLERANCE_S, KeyRing
from replicas.config import EngineConfig
from replicas.messages import EngineRequest
from tests.cluster.engines import KEYS, make_member, sampling

ONE, OTHER = bytes(range(16)), bytes(range(100, 132))
CONFIG = TransferConfig(rendezvous_s=50.0, lease_s=10.0, renew_s=1.0)
NOW_S = 1000.0


def office(keys=KEYS, now_s=NOW_S):
    ids = iter([bytes([i]) * 16 for i in range(9)])
    return TicketOffice(keys, CONFIG, lambda: next(ids), lambda: now_s)


def write(path, content):
    """A file of secrets, as it may be."""
    path.touch(mode=0o600)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def begin(tickets, epoch=3):
    request = EngineRequest("r", [1, 2, 3], sampling())
    return tickets.begin(request, epoch, make_member("prefill", "p").description)


def test_both_tickets_of_a_transfer_differ_in_the_consumer_alone():
    tickets = office()
    transfer = begin(tickets)
    offer, fetch = (KEYS.unseal(tickets.seal(transfer, c), NOW_S) for c in ("", "d"))
    assert (offer.consumer, fetch.consumer) == ("", "d")
    assert msgspec.structs.replace(offer, consumer="d") == fetch
    assert (fetch.request_id, fetch.epoch, fetch.num_tokens) == ("r", 3, 3)
    assert begin(tickets).transfer_id != transfer.transfer_id


def test_ticket_lasts_as_long_as_a_hand_over_may_take():
    tickets = office()
    sealed = tickets.seal(begin(tickets), "d")
    end_s = NOW_S + CONFIG.rendezvous_s + CONFIG.lease_s
    assert KEYS.unseal(sealed, end_s).expires_ms == end_s * 1000
    with pytest.raises(TicketError) as caught:
        KEYS.unseal(sealed, end_s + CLOCK_TOLERANCE_S + 1)
    assert caught.value.reason is FailureReason.EXPIRED


def test_ticket_of_another_cluster_is_refused():
    tickets = office(KeyRing((b"of another cluster",)))
    with pytest.raises(TicketError) as caught:
        KEYS.unseal(tickets.seal(begin(tickets), "d"), NOW_S)
    assert caught.value.reason is FailureReason.AUTH


# --- the file -----------------------------------------------------------------------------------


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
            tickets = office(sealing)
            assert opening.unseal(tickets.seal(begin(tickets), "d"), NOW_S).consumer == "d"


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
    shown = [repr(ring), str(ring), repr(office(ring)), f"{ring!r}"]
    shown += [repr(resolve({"pools": {"both": {}}, "key_file": str(path)}))]
    shown.append(repr(EngineConfig(model="/x", keys=ring)))
    for text in shown:
        assert ONE.hex() not in text
        assert repr(ONE)[2:-1] not in text
        assert base64.b64encode(ONE).decode() not in text
