"""Counts of an ingress: each request arrives once and ends once."""

from dataclasses import astuple

from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.traffic import Traffic

ENDS = st.sampled_from(["waits", "dropped", "decodes", "ended"])


def counted(requests):
    traffic = Traffic()
    for length, end in requests:
        traffic.come(length)
        if end in ("decodes", "ended"):
            traffic.begin(length, length // 2)
        if end in ("dropped", "ended"):
            traffic.end(length, 7 if end == "ended" else 0)
    return traffic


requests = st.lists(st.tuples(st.integers(1, 5000), ENDS))


@given(requests)
def test_every_request_is_in_one_place(asked):
    traffic = counted(asked)
    ends = [end for _, end in asked]
    assert traffic.num_waiting == ends.count("waits")
    assert traffic.num_decoding == ends.count("decodes")
    assert traffic.ended == ends.count("ended")
    assert traffic.dropped == ends.count("dropped")


@given(requests, requests)
def test_counts_of_ingresses_can_be_added_and_subtracted(one, other):
    both = counted(one) + counted(other)
    assert both == counted([*one, *other])
    assert both - counted(one) == counted(other)
    assert Traffic(**both.as_dict()) == both
    assert min(astuple(both)) >= 0
