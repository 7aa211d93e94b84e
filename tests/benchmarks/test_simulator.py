"""The comparison with Dynamo's mocker: every request of a trace is served, and every pair shown."""

import dataclasses

import pytest

from benchmarks.simulator import Figures, difference, figures, longest, print_rows, simulate
from cluster.lab.workloads.request import TraceRequest, Workload

PEER = Figures(
    wall_s=1.0, num_ok=2, reuse=0.0, ttft_ms_mean=100.0, ttft_ms_p99=200.0, itl_ms_mean=5.0,
    good=0.5,
)  # fmt: skip


def workload(*lengths):
    requests = [TraceRequest(float(i), n, 8, (i,)) for i, n in enumerate(lengths)]
    return Workload("lengths", tuple(requests))


def test_a_request_as_long_as_the_cache_is_served_whole():
    result = simulate(workload(100, 150_000), 1, "round_robin")
    assert figures(result).num_ok == 2
    assert [len(record.token_times_s) for record in result.records] == [8, 8]


def test_a_request_that_no_cache_holds_is_named():
    with pytest.raises(ValueError, match="2,000,008 tokens has no room"):
        longest(workload(2_000_000))


def test_rows_show_both_where_the_peer_reuses_nothing(capsys):
    print_rows("round_robin", 4, dataclasses.replace(PEER, reuse=0.25), PEER)
    ours, peer, compared = capsys.readouterr().out.splitlines()
    assert "25.00" in ours
    assert "100.00" in peer
    assert "none" in compared
    assert "+0.00 %" in compared


def test_a_difference_is_a_share_of_the_peers_figure():
    assert difference(110.0, 100.0) == "+10.00 %"
    assert difference(0.0, 0.0) == "equal"
