"""What GET /kv says, and the tables made of it."""

import hashlib

import msgspec

from cluster.edge.transfers import TransfersView, transfers_text, transfers_view
from kv_transfer.connector import TransferInfo
from kv_transfer.store import StoreCounters
from replicas.messages import KVTransfers
from tests.cluster.engines import make_member


def info(request_id, role, peer, **changes):
    fields = {
        "path": "inline",
        "state": "streaming",
        "total_rows": 8,
        "ready_rows": 6,
        "done_rows": 4,
        "num_blocks": 5,
        "age_s": 0.5,
    }
    return TransferInfo(request_id=request_id, role=role, peer=peer, **{**fields, **changes})


def label(request_id):
    return hashlib.blake2b(request_id.encode(), digest_size=6).hexdigest()


PREFILL, DECODE = make_member("prefill", "p"), make_member("decode", "d")
SENDING = KVTransfers(
    transfers=[
        info("young", "producer", "", state="waiting", path="", age_s=0.25, lease_left_s=29.96),
        info("old", "producer", "d", age_s=2.0, lease_left_s=12.0),
        info("lost", "producer", "gone", age_s=1.0, lease_left_s=0.0),
    ],
    num_leased_blocks=15,
    num_quarantined_blocks=2,
)
POOLING = KVTransfers(store=StoreCounters(hits=11, misses=12, puts=13, drops=14, errors=15))
LOADING = KVTransfers(transfers=[info("old", "consumer", "p")], num_reserved_blocks=5)


def test_peers_have_their_replicas_names_and_the_oldest_comes_first():
    view = transfers_view([(PREFILL, SENDING), (DECODE, LOADING)])
    decode, prefill = view.replicas
    assert (decode.replica, prefill.replica) == ("decode-d", "prefill-p")
    assert [(t.request, t.peer) for t in prefill.transfers] == [
        (label("old"), "decode-d"),
        (label("lost"), "gone"),
        (label("young"), ""),
    ]
    assert (prefill.leased_blocks, prefill.reserved_blocks, prefill.quarantined_blocks) == (
        15,
        0,
        2,
    )
    [load] = decode.transfers
    assert (load.role, load.peer, load.lease_left_s) == ("consumer", "prefill-p", None)
    assert (load.ready_rows, load.done_rows, load.total_rows) == (6, 4, 8)


def test_replica_that_does_not_answer_is_silent_and_claims_nothing():
    view = transfers_view([(PREFILL, None), (DECODE, LOADING)])
    assert [replica.is_silent for replica in view.replicas] == [False, True]
    assert view.replicas[1].transfers == []
    silent = transfers_text(view).splitlines()[2].split()
    assert silent == ["prefill-p", "silent", "?", "?", "?"]


def test_tables_show_every_replica_and_every_transfer():
    lines = transfers_text(transfers_view([(PREFILL, SENDING), (DECODE, LOADING)])).splitlines()
    assert lines[0].split() == ["REPLICA", "TRANSFERS", "LEASED", "RESERVED", "QUARANTINED"]
    assert [line.split() for line in lines[1:3]] == [
        ["decode-d", "1", "0", "5", "0"],
        ["prefill-p", "3", "15", "0", "2"],
    ]
    assert lines[3] == ""
    rows = [" ".join(line.split()) for line in lines[4:]]
    assert rows[0].startswith("REQUEST REPLICA ROLE")
    assert rows[1] == f"{label('old')} decode-d consumer prefill-p inline streaming 6/4/8 5 0.5 s -"
    assert rows[-1] == f"{label('young')} prefill-p producer - - waiting 6/4/8 5 0.2 s 30.0 s"
    starts = {line.index("inline") for line in lines[5:8]}
    assert len(starts) == 1, "columns are aligned"


def test_cluster_without_transfers_is_one_table():
    text = transfers_text(transfers_view([(DECODE, KVTransfers())]))
    assert "REQUEST" not in text
    assert transfers_text(TransfersView(replicas=[])).startswith("REPLICA")


def test_only_replicas_with_a_store_are_in_its_table():
    text = transfers_text(transfers_view([(PREFILL, POOLING), (DECODE, LOADING)]))
    replicas, stores, transfers = ([x.split() for x in t.splitlines()] for t in text.split("\n\n"))
    assert len(replicas) == 3
    assert stores == [
        ["REPLICA", "HITS", "MISSES", "PUTS", "DROPS", "ERRORS"],
        ["prefill-p", "11", "12", "13", "14", "15"],
    ]
    assert transfers[0][0] == "REQUEST"


def test_the_view_survives_a_round_trip_through_json():
    view = transfers_view([(PREFILL, POOLING), (DECODE, None)])
    assert msgspec.json.decode(msgspec.json.encode(view), type=TransfersView) == view


def test_the_view_does_not_reveal_engines_request_ids():
    view = transfers_view([(PREFILL, SENDING), (DECODE, LOADING)])
    told = msgspec.json.encode(view).decode() + transfers_text(view)
    for request_id in ("old", "lost", "young"):
        assert request_id not in told
    by_replica = [{t.request for t in replica.transfers} for replica in view.replicas]
    assert by_replica[0] <= by_replica[1], "both ends of a transfer tell of it by one name"
