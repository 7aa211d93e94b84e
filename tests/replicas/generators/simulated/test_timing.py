"""The model of time: monotone, serial within a lane, padded to buckets, lanes side by side."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.generators.simulated.timing import LinkTiming, MeshTiming, padded_prefill_len

LINK = LinkTiming(0.001, 1e9)


def make(**changes):
    values = {
        "block_size": 64,
        "prefill_token_s": 1e-3,
        "prefill_token_pair_s": 1e-7,
        "decode_base_s": 0.03,
        "context_token_s": 1e-6,
        "prefill_lanes_s": 0.0,
        "decode_lanes_s": 0.0,
        "compile_s": 5.0,
        "host_s": 0.001,
        "host_row_s": 1e-5,
        "bytes_per_token": 1000,
        "link": LINK,
    }
    return MeshTiming(**(values | changes))


@pytest.mark.parametrize(
    ("num_tokens", "padded"),
    [
        (1, 128), (128, 128), (129, 1024), (1024, 1024), (1025, 2048), (2048, 2048), (2049, 4096),
        (100_000, 131_072),
    ],
)  # fmt: skip
def test_prompts_are_padded_to_buckets(num_tokens, padded):
    assert padded_prefill_len(num_tokens) == padded


def test_a_prompt_costs_its_tokens_and_what_they_attend_to():
    assert make().prefill_s([(0, 0, 100)]) == pytest.approx(128 * 1e-3 + 128 * 64 * 1e-7)
    # 65 cached tokens are read as two blocks of 64; only the 115 others are padded.
    expected = 128 * 1e-3 + 128 * (128 + 64) * 1e-7
    assert make().prefill_s([(0, 65, 180)]) == pytest.approx(expected)


def test_prompts_of_a_lane_follow_each_other_and_lanes_run_side_by_side():
    timing = make()
    one = timing.prefill_s([(0, 0, 128)])
    assert timing.prefill_s([(0, 0, 128)] * 5) == pytest.approx(5 * one)
    assert timing.prefill_s([(lane, 0, 128) for lane in range(5)]) == one
    assert timing.prefill_s([(0, 0, 128), (1, 0, 128), (0, 0, 128)]) == pytest.approx(2 * one)


def test_decode_costs_the_same_for_one_slot_as_for_many_but_for_the_contexts():
    timing = make(context_token_s=0.0)
    assert timing.decode_s([(0, 10)]) == timing.decode_s([(0, 10)] * 32) == 0.03
    timing = make()
    assert timing.decode_s([(0, 64)] * 32) == pytest.approx(0.03 + 32 * 64e-6)


def test_decode_waits_for_the_lane_with_the_longest_contexts():
    timing = make()
    rows = [(0, 640), (1, 6400), (1, 64)]
    assert timing.decode_s(rows) == pytest.approx(0.03 + 6464e-6)


def test_contexts_are_read_in_whole_blocks():
    timing = make()
    assert timing.decode_s([(0, 1)]) == timing.decode_s([(0, 64)])
    assert timing.decode_s([(0, 65)]) == timing.decode_s([(0, 128)])
    assert timing.decode_s([(0, 64)]) < timing.decode_s([(0, 65)])


def test_further_lanes_cost_dispatch_once_per_call():
    timing, plain = make(prefill_lanes_s=0.02, decode_lanes_s=0.01), make()
    chunks = [(0, 0, 128), (1, 0, 128), (0, 0, 9)]
    assert timing.prefill_s(chunks) == pytest.approx(plain.prefill_s(chunks) + 0.02)
    assert timing.decode_s([(0, 5), (1, 5)]) == pytest.approx(plain.decode_s([(0, 5)]) + 0.01)


def test_nothing_costs_nothing():
    timing = make(prefill_lanes_s=0.02, decode_lanes_s=0.01)
    assert timing.prefill_s([]) == timing.decode_s([]) == timing.mixed_s([], []) == 0.0
    assert LINK.transfer_s(0) == 0.0


def test_a_mixed_pass_is_one_after_the_other():
    timing = make()
    chunks, rows = [(0, 0, 300)], [(0, 17), (1, 1000)]
    assert timing.mixed_s(chunks, rows) == timing.prefill_s(chunks) + timing.decode_s(rows)


def test_a_transfer_costs_its_setup_and_its_bytes():
    assert LINK.transfer_s(2_000_000) == pytest.approx(0.001 + 0.002)


chunk = st.tuples(st.integers(0, 3), st.integers(0, 5000), st.integers(1, 5000)).map(
    lambda c: (c[0], c[1], c[1] + c[2])
)
row = st.tuples(st.integers(0, 3), st.integers(1, 5000))


@given(st.lists(chunk, max_size=6), chunk)
def test_more_prefill_never_takes_less(chunks, more):
    timing = make()
    assert timing.prefill_s([*chunks, more]) >= timing.prefill_s(chunks)
    lane, start, end = more
    assert timing.prefill_s([(lane, start, end + 1)]) >= timing.prefill_s([more])
    assert timing.prefill_s([(lane, start + 1, end + 1)]) >= timing.prefill_s([more])


@given(st.lists(row, max_size=6), row)
def test_more_decode_never_takes_less(rows, more):
    timing = make()
    assert timing.decode_s([*rows, more]) >= timing.decode_s(rows)
    assert timing.decode_s([(more[0], more[1] + 1)]) >= timing.decode_s([more])


@given(st.lists(chunk, min_size=1, max_size=5), st.lists(row, min_size=1, max_size=5))
def test_order_does_not_matter(chunks, rows):
    timing = make()
    for order in itertools.islice(itertools.permutations(chunks), 6):
        assert timing.prefill_s(order) == pytest.approx(timing.prefill_s(chunks))
    assert timing.decode_s(rows[::-1]) == pytest.approx(timing.decode_s(rows))
