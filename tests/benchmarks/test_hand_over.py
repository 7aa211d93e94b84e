"""The figures of hand-overs are of streams that were handed over: with their KV, and without."""

from benchmarks.hand_over import measure


def test_a_long_stream_stands_still_for_far_longer_without_its_kv():
    moved, recomputed = (measure(8_000, connector) for connector in ("p2p", None))
    assert moved.steady < moved.gap < recomputed.gap / 10
    assert min(moved.context, recomputed.context) > 8_000
    assert moved.others < recomputed.others / 10
