"""The simulated model: right tokens from right rows, other tokens from any other row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.generators.simulated.tokens import (
    NextToken,
    PagedKVCache,
    expected_tokens,
    kv_rows,
)

VOCAB, EOS = 4096, (0, 5)
BLOCK = 4


def decode(cache, lane, table, context, num_tokens):
    """Generate by the cache alone, as a generator does."""
    next_token, lanes, tables = NextToken(VOCAB, EOS), np.array([lane]), np.array([table])
    output = []
    for position in range(context, context + num_tokens):
        token = next_token(cache.context_sums(lanes, tables, np.array([position])))
        output.append(int(token[0]))
        cache.write_rows(lanes, tables, token, np.array([position]))
    return output


@given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), st.integers(1, 12))
def test_tokens_through_pages_are_those_expected(prompt, num_tokens):
    cache = PagedKVCache(2, 40, BLOCK)
    table = np.random.default_rng(0).permutation(np.arange(1, 40))
    cache.write_tokens(1, table, prompt, 0)
    found = decode(cache, 1, table, len(prompt), num_tokens)
    assert found == expected_tokens(prompt, num_tokens, VOCAB, EOS)


def test_a_prompt_may_be_written_in_parts():
    prompt = list(range(19))
    cache = PagedKVCache(1, 10, BLOCK)
    table = [9, 3, 7, 1, 2, 4, 5]
    for start, end in ((0, 3), (3, 11), (11, 19)):
        cache.write_tokens(0, table, prompt[start:end], start)
    assert decode(cache, 0, table, 19, 5) == expected_tokens(prompt, 5, VOCAB, EOS)


@pytest.mark.parametrize("position", range(11))
@pytest.mark.parametrize("plane", [0, 1])
def test_a_row_that_is_wrong_changes_the_token(position, plane):
    prompt = list(range(100, 111))
    cache = PagedKVCache(1, 10, BLOCK)
    table = [9, 3, 7]
    cache.write_tokens(0, table, prompt, 0)
    block = cache.read_blocks(0, [table[position // BLOCK]])
    block[0, position % BLOCK, plane] ^= np.uint64(1 << 40)
    cache.write_blocks(0, [table[position // BLOCK]], block)
    assert decode(cache, 0, table, 11, 1) != expected_tokens(prompt, 1, VOCAB, EOS)


def test_another_block_or_lane_or_length_is_another_token():
    prompt = list(range(100, 108))
    cache = PagedKVCache(2, 10, BLOCK)
    cache.write_tokens(0, [1, 2], prompt, 0)
    right = expected_tokens(prompt, 1, VOCAB, EOS)
    assert decode(cache, 0, [1, 2, 3], 8, 1) == right
    assert decode(cache, 0, [1, 3, 4], 8, 1) != right
    assert decode(cache, 1, [1, 2, 3], 8, 1) != right
    assert decode(cache, 0, [1, 2, 3], 7, 1) != right


def test_rows_behind_the_context_do_not_count():
    prompt = list(range(100, 106))
    cache = PagedKVCache(1, 10, BLOCK)
    cache.write_tokens(0, [1, 2], list(range(50, 58)), 0)
    cache.write_tokens(0, [1, 2], prompt, 0)
    assert decode(cache, 0, [1, 2, 3], 6, 3) == expected_tokens(prompt, 3, VOCAB, EOS)


def test_k_and_v_depend_on_token_and_position():
    rows = kv_rows([7, 7, 8], [0, 1, 0])
    assert len(np.unique(rows)) == 6


def test_sums_of_blocks_stay_those_of_the_rows():
    rng = np.random.default_rng(1)
    cache = PagedKVCache(2, 6, BLOCK)
    for _ in range(50):
        lane, table = int(rng.integers(2)), rng.permutation(np.arange(1, 6))
        cache.write_tokens(lane, table, rng.integers(0, VOCAB, 7), int(rng.integers(0, 9)))
        tables = np.stack([table, table])  # both write the same block
        positions = rng.integers(0, 20, 2)
        cache.write_rows(np.array([lane, lane]), tables, rng.integers(0, VOCAB, 2), positions)
        cache.write_blocks(lane, [2, 3], cache.read_blocks(1 - lane, [3, 4]))
        tables = np.arange(1, 6)[None]
        for of_lane in range(2):
            total = cache.context_sums(np.array([of_lane]), tables, np.array([5 * BLOCK]))
            assert total[0] == cache.rows[of_lane, 1:].sum(dtype=np.uint64)


@pytest.mark.parametrize(("length", "window"), [(11, 1), (11, 4), (11, 6), (3, 8)])
def test_a_sum_of_a_window_reads_no_row_behind_it(length, window):
    cache, table, lane = PagedKVCache(2, 5, BLOCK), [4, 1, 3], 1
    cache.write_tokens(lane, table, range(length), 0)
    wanted = cache.rows[lane, table].reshape(-1, 2)[max(length - window, 0) : length]
    behind = max(length - window, 0) // BLOCK
    tables = np.array([[0] * behind + table[behind:]])
    cache.rows[lane, 0] = 1
    found = cache.window_sums(np.array([lane]), tables, np.array([length]), window)
    assert found[0] == wanted.sum(dtype=np.uint64)


def test_reading_blocks_gives_a_copy():
    cache = PagedKVCache(1, 3, BLOCK)
    cache.read_blocks(0, [1])[:] = 9
    assert not cache.rows.any()


@given(st.integers(0, 2**64 - 1))
def test_an_end_token_is_never_given(total):
    token = int(NextToken(8, (0, 3, 7))(np.array([total], dtype=np.uint64))[0])
    assert token in (1, 2, 4, 5, 6)


def test_every_other_token_is_given():
    sums = np.arange(2000, dtype=np.uint64)
    assert set(NextToken(8, (0, 3))(sums).tolist()) == {1, 2, 4, 5, 6, 7}


def test_a_vocabulary_of_end_tokens_is_refused():
    with pytest.raises(ValueError, match="only end tokens"):
        NextToken(2, (0, 1))


def test_expected_tokens_are_these():
    """Golden: a change of the hash would make recorded runs differ."""
    assert expected_tokens([1, 2, 3], 5, 4096, [0]) == [694, 1848, 610, 349, 264]
