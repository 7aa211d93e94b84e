"""Shapes of a lane on a mesh: pure, so without ttnn."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.errors import ConfigError
from replicas.generators.model_config import parse_hf_config
from replicas.generators.simulated.timing import padded_prefill_len
from replicas.generators.ttnn.buckets import (
    MAX_CHUNK,
    bucket_for,
    check_cache,
    check_lane,
    check_window,
    decode_table_width,
    padded_vocab_size,
    prefill_buckets,
    prefill_table_width,
    split_chunks,
    traced_buckets,
)

block_sizes = st.sampled_from([32, 64, 128])
lengths = st.integers(min_value=1, max_value=40_000)


def config(**changes):
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 160,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    return parse_hf_config({**raw, **changes}, "model")


def test_ttnn_is_not_imported():
    code = "import sys, replicas.generators.ttnn.buckets; sys.exit('ttnn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("max_seq_len", "buckets"),
    [
        (1, (128,)),
        (128, (128,)),
        (129, (128, 256)),
        (1024, (128, 1024)),
        (1025, (128, 1024, 1152)),
        (5000, (128, 1024, 2048, 4096, 5120)),
        (8192, (128, 1024, 2048, 4096, 8192)),
        (131072, (128, 1024, 2048, 4096, 8192)),
    ],
)
def test_buckets_end_at_the_longest_sequence_or_chunk(max_seq_len, buckets):
    assert prefill_buckets(max_seq_len) == buckets


@pytest.mark.parametrize(
    ("max_seq_len", "traced"),
    [(100, (128,)), (640, (128, 640)), (2048, (128, 1024)), (131072, (128, 1024))],
)
def test_short_chunks_alone_are_traced(max_seq_len, traced):
    assert traced_buckets(max_seq_len) == traced


@given(num_tokens=st.integers(1, MAX_CHUNK))
def test_buckets_of_long_models_are_those_that_the_simulation_times(num_tokens):
    assert bucket_for(num_tokens, 131072) == padded_prefill_len(num_tokens)


def test_a_chunk_over_the_longest_bucket_is_refused():
    with pytest.raises(ConfigError, match=r"300 tokens .* 256"):
        bucket_for(300, 200)


@given(max_seq_len=lengths, block_size=block_sizes, data=st.data())
def test_chunks_cover_what_is_not_cached_and_fit_their_tables(max_seq_len, block_size, data):
    end = data.draw(st.integers(1, max_seq_len))
    start = data.draw(st.integers(0, end - 1))
    chunks = split_chunks(start, end, max_seq_len, block_size)
    assert start - block_size < chunks[0][0] <= start
    assert chunks[-1][1] == end
    for (_, before), (after, _) in pairwise(chunks):
        assert before == after
    for first, past in chunks:
        bucket = bucket_for(past - first, max_seq_len)
        assert first % block_size == bucket % block_size == 0
        # Padding too has an entry in the table that a later chunk attends through.
        assert first + bucket <= prefill_table_width(max_seq_len, block_size) * block_size
    assert end <= decode_table_width(max_seq_len, block_size) * block_size


@given(max_seq_len=lengths, block_size=block_sizes)
def test_rows_of_page_tables_are_whole_dram_words(max_seq_len, block_size):
    for width in (decode_table_width, prefill_table_width):
        assert width(max_seq_len, block_size) * 4 % 32 == 0


@pytest.mark.parametrize(
    ("vocab_size", "tp", "padded"),
    [(128256, 8, 128256), (151936, 8, 152064), (160, 1, 160), (161, 1, 192), (161, 4, 256)],
)
def test_each_chip_has_whole_tiles_of_the_vocabulary(vocab_size, tp, padded):
    assert padded_vocab_size(vocab_size, tp) == padded


@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("max_rows", [1, 32])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_what_fits_is_taken(tp, max_rows, block_size):
    check_lane(config(), tp, max_rows=max_rows, block_size=block_size)


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({}, 8, "8 query heads and 4 KV heads .* 8 chips"),
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, 4, "6 query heads .* 4 chips"),
        ({"intermediate_size": 96}, 2, "96 .* 64"),
        ({"head_dim": 16}, 1, "head_dim 16 .* 32 .* 64"),
        ({"head_dim": 96}, 1, "head_dim 96 .* 32 .* 64"),
        ({"hidden_size": 48}, 1, "hidden_size 48 .* 32"),
        ({"hidden_size": 96}, 2, "hidden_size 96 .* 64.* 2 chips"),
        ({"num_attention_heads": 64, "num_key_value_heads": 8}, 1, "64 per chip.* 32"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_both_numbers(changes, tp, message):
    with pytest.raises(ConfigError, match=message):
        check_lane(config(**changes), tp, max_rows=1, block_size=64)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_rows": 33}, "33 .* 32"),
        ({"max_rows": 0}, "0 sequences .* 32"),
        ({"block_size": 16}, "16 .* 128"),
        ({"block_size": 96}, "96 .* 128"),
        ({"block_size": 256}, "256 .* 128"),
        ({"block_size": 0}, "block_size 0 .* 128"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_both_numbers(sizes, message):
    with pytest.raises(ConfigError, match=message):
        check_lane(config(), 1, **{"max_rows": 1, "block_size": 64, **sizes})


def test_a_cache_smaller_than_a_page_table_is_refused():
    check_cache(8, 8)
    with pytest.raises(ConfigError, match=r"7 blocks.* 8"):
        check_cache(7, 8)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Phi3", {}),
        ("Olmo2", {}),
        ("Gemma2", {"hidden_activation": "gelu_pytorch_tanh"}),
        ("Gemma3", {"hidden_activation": "gelu_pytorch_tanh"}),
    ],
)
def test_layers_of_other_families_are_refused_by_name(family, changes):
    changes = {"architectures": [f"{family}ForCausalLM"], "max_position_embeddings": 64, **changes}
    with pytest.raises(ConfigError, match=f"has layers of family '{family.lower()}.*on the CPU"):
        check_lane(config(**changes), 1, max_rows=8, block_size=32)


def test_sequences_longer_than_a_window_are_refused():
    windowed = config(architectures=["MistralForCausalLM"], sliding_window=64)
    check_lane(windowed, 1, max_rows=8, block_size=32)
    check_window(windowed, 64)
    with pytest.raises(ConfigError, match=r"window 64 is shorter than max_seq_len=65"):
        check_window(windowed, 65)
