"""ttnn accepts a lane's calls: every family, bucket and number of rows, on its mock device.

The mock device computes nothing; numbers are `test_numbers_model.py`'s.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import ttnn

from replicas.errors import ConfigError
from replicas.generators.model_config import parse_hf_config
from replicas.generators.ttnn.buckets import (
    bucket_for,
    decode_table_width,
    padded_vocab_size,
    prefill_buckets,
    prefill_table_width,
)
from replicas.generators.ttnn.inputs import (
    PADDING_POSITION,
    host_decode_inputs,
    host_prefill_inputs,
    refresh,
    to_device,
)
from replicas.generators.ttnn.model import TTTransformer
from replicas.generators.ttnn.profiles import profile
from replicas.generators.ttnn.weights import load_lane_weights

SIZES = {
    "small": {
        "vocab_size": 170,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 32,
    },
    # Layers of Qwen3-0.6B and of its kind.
    "large": {
        "vocab_size": 2000,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": {"architectures": ["LlamaForCausalLM"], "rope_scaling": LLAMA3_ROPE},
    "llama-biases": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
}


def make_config(family="llama", size="small", **changes):
    return parse_hf_config({**SIZES[size], **FAMILIES[family], **changes}, "model")


class LaneUnderTest:
    """One lane over a whole mock mesh, with random weights and a zeroed cache."""

    def __init__(
        self,
        mesh,
        config,
        *,
        optimizations="performance",
        max_seq_len=256,
        rows=32,
        block_size=64,
        num_blocks=None,
    ):
        (self.device,) = mesh.lanes(1)
        self.config, self.rows, self.block_size = config, rows, block_size
        self.max_seq_len = max_seq_len
        self.tp = self.device.get_num_devices()
        self.vocab = padded_vocab_size(config.vocab_size, self.tp)
        precision = profile(optimizations, config)
        self.model = TTTransformer(
            config,
            self.device,
            load_lane_weights(config, mesh, [self.device], precision)[0],
            precision,
            max_seq_len=max_seq_len,
            max_rows=rows,
            block_size=block_size,
        )
        self.decode_width = decode_table_width(max_seq_len, block_size)
        shape = (
            num_blocks or self.decode_width + 1,
            config.num_key_value_heads // self.tp,
            block_size,
            config.head_dim,
        )
        dtype = getattr(ttnn, precision.kv_dtype)
        self.cache = [
            [
                ttnn.zeros(shape, dtype, ttnn.TILE_LAYOUT, self.device, ttnn.DRAM_MEMORY_CONFIG)
                for _ in "kv"
            ]
            for _ in range(config.num_hidden_layers)
        ]

    @property
    def num_programs(self):
        return self.device.num_program_cache_entries()

    def prefill(self, start, num_tokens):
        host = host_prefill_inputs(
            np.arange(num_tokens) % self.config.vocab_size,
            start,
            1 + np.arange(-(-(start + num_tokens) // self.block_size)),
            max_seq_len=self.max_seq_len,
            block_size=self.block_size,
            table_width=prefill_table_width(self.max_seq_len, self.block_size),
            hidden_size=self.config.hidden_size,
        )
        piece = self.model.attention_piece(host.tokens.shape[-1], start)
        self._check(self.model.prefill(to_device(host, self.device), self.cache, piece))

    def decode(self, positions, rows=None, table_width=None):
        rows = rows or self.rows
        host = host_decode_inputs(
            np.arange(rows) % self.config.vocab_size,
            np.resize(positions, rows),
            np.ones((rows, 1), dtype=np.int64),
            table_width=table_width or self.decode_width,
        )
        self._check(self.model.decode(to_device(host, self.device), self.cache))

    def _check(self, logits):
        assert tuple(logits.shape) == (1, 1, 32, self.vocab // self.tp)
        assert logits.dtype == ttnn.bfloat16


@pytest.fixture
def mock_lane(open_mock_mesh):
    """A lane under test on the mesh of the test's board."""

    def make(config, **settings):
        mesh = open_mock_mesh(load_format="random", trace="none")
        return LaneUnderTest(mesh, config, **settings)

    return make


def on_board(board, *values):
    return pytest.param(
        board, *values, marks=pytest.mark.board(board), id="-".join(map(str, (board, *values)))
    )


@pytest.mark.parametrize(
    ("board", "family", "size", "optimizations"),
    [
        on_board(board, family, size, optimizations)
        for board in ("N150", "N300")
        for size, optimizations in (("small", "performance"), ("large", "accuracy"))
        for family in FAMILIES
        if (family, size) != ("llama-biases", "large")
    ]
    + [on_board("N150", "qwen3", "large", "performance")]
    + [on_board("T3K", "llama-biases", "small", "performance")]
    + [on_board("P150", "qwen3", "large", "performance")],
)
def test_every_bucket_and_a_decode_are_taken_and_compile_once(
    mock_lane, board, family, size, optimizations
):
    # A tile of the residual on each chip.
    config = make_config(family, size, **({"hidden_size": 256} if board == "T3K" else {}))
    # The longest bucket there is once; longer prompts are more chunks of it.
    longest = 8192 if (board, family, size) == ("N150", "llama", "small") else 2048
    max_seq_len = longest if size == "small" else 1024
    lane = mock_lane(config, optimizations=optimizations, max_seq_len=max_seq_len)
    assert lane.tp == {"N150": 1, "N300": 2, "T3K": 8, "P150": 1}[board]
    shorter = 0
    for bucket in prefill_buckets(max_seq_len):
        for start, other_start in ((0, 0), (64, 192), (256, 512)):
            num_tokens = min(bucket, max_seq_len - start)
            if bucket_for(num_tokens, max_seq_len) != bucket:
                continue
            lane.prefill(start, num_tokens)
            num_programs = lane.num_programs
            lane.prefill(other_start, shorter + 1)
            assert lane.num_programs == num_programs
        shorter = bucket
    lane.decode([0, -1, max_seq_len - 1])
    num_programs = lane.num_programs
    lane.decode([5, 77, -1, -1, 130])
    assert lane.num_programs == num_programs


@pytest.mark.board("N150")
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_attention_takes_large_pieces_where_a_chunk_begins_at_one(mock_lane, block_size):
    config = make_config("qwen3", num_attention_heads=32)
    piece = mock_lane(config, block_size=block_size).model.attention_piece
    assert [piece(1024, start) for start in (0, 128, 256, 640, 768)] == [
        256, block_size, 256, block_size, 256,
    ]  # fmt: skip
    # Larger ones of few tokens would leave cores without work.
    assert [piece(128, start) for start in (0, 256)] == [64, max(64, block_size)]
    for bucket in (128, 1024, 2048):
        assert all(start % piece(bucket, start) == 0 for start in range(0, 2048, block_size))


@pytest.mark.board("N150")
@pytest.mark.parametrize("heads", [8, 32])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 31])
def test_any_number_of_rows_is_taken(mock_lane, rows, heads):
    mock_lane(make_config("qwen3", num_attention_heads=heads), rows=rows).decode([3, -1])


@pytest.mark.parametrize(
    ("board", "kv_heads"), [on_board("N150", 8), on_board("N150", 32), on_board("P150", 32)]
)
@pytest.mark.parametrize("rows", [1, 9, 31, 32])
def test_heads_are_rotated_on_the_cores_that_have_their_rotary_rows(
    mock_lane, monkeypatch, board, kv_heads, rows
):
    config = make_config("qwen3", num_attention_heads=32, num_key_value_heads=kv_heads)
    lane = mock_lane(config, rows=rows)
    attention, places = lane.model._attention, []
    rotated = attention._rotated

    def noted(tensor, rope, *, is_decode):
        places.append([each.memory_config() for each in (tensor, *rope)])
        return rotated(tensor, rope, is_decode=is_decode)

    monkeypatch.setattr(attention, "_rotated", noted)
    lane.decode([3, -1])
    assert len(places) == 2 * lane.config.num_hidden_layers
    for of_heads, of_cos, of_sin in places:
        assert of_heads == of_cos == of_sin
    queries, keys = places[0][0], places[1][0]
    # Where heads are more than cores, those of keys are on the same as those of queries.
    assert (queries == keys) == (board == "N150" and kv_heads == 32)


@pytest.mark.board("N150")
@pytest.mark.parametrize("optimizations", ["performance", "accuracy"])
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_every_block_size_is_taken(mock_lane, block_size, optimizations):
    lane = mock_lane(make_config("qwen2"), block_size=block_size, optimizations=optimizations)
    for bucket in prefill_buckets(lane.max_seq_len):
        lane.prefill(0, bucket)
        lane.prefill(block_size, bucket - block_size)
    lane.decode([200, -1])


@pytest.mark.board("N300")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 1}, "8 query heads and 1 KV heads .* 2 chips"),
        ({"intermediate_size": 96}, "96 .* 64"),
        ({"head_dim": 16}, "head_dim 16 "),
    ],
)
def test_a_model_that_does_not_fit_the_chips_is_refused(open_mock_mesh, changes, message):
    (device,) = open_mock_mesh(trace="none").lanes(1)
    with pytest.raises(ConfigError, match=message):
        TTTransformer(
            make_config(**changes),
            device,
            None,
            profile(None),
            max_seq_len=256,
            max_rows=1,
            block_size=64,
        )


@pytest.mark.board("N150")
def test_a_decode_of_other_sizes_is_refused(mock_lane):
    with pytest.raises(ConfigError, match="3 rows, but the lane 4"):
        mock_lane(make_config(), rows=4).decode([1], rows=3)
    with pytest.raises(ConfigError, match=r"7 blocks.* 8,"):
        mock_lane(make_config(), num_blocks=7).decode([1])


def as_lists(inputs, *names):
    return [ttnn.to_torch(getattr(inputs, name)).tolist() for name in names]


def chunk(token_ids, start, block_ids, block_size=64):
    return host_prefill_inputs(
        np.array(token_ids),
        start,
        block_ids,
        max_seq_len=256,
        block_size=block_size,
        table_width=8,
        hidden_size=96,
    )


def test_a_chunk_is_laid_out_for_the_device():
    found = chunk([7, 8, 9], 64, [5, 3, 6])
    tokens, ropes, table, own, start, tile_start, tile_end, last = as_lists(
        found,
        "tokens",
        "rope_indices",
        "page_table",
        "chunk_page_table",
        "chunk_start",
        "last_tile_start",
        "last_tile_end",
        "last_index",
    )
    assert tokens == [[7, 8, 9] + [0] * 125]
    assert ropes == [[64, 65, 66] + [0] * 125]
    # The third block is not reached yet: padding that is written there would be lost work at best.
    assert table == [[5, 3] + [0] * 6]
    assert own == [[3, 0]]
    assert start == [64]
    assert (tile_start, tile_end, last) == ([0, 0, 0, 0], [1, 1, 32, 96], [[2] * 32])
    tiles = as_lists(chunk(range(70), 0, [5, 3]), "last_tile_start", "last_tile_end", "last_index")
    assert tiles == [[0, 0, 64, 0], [1, 1, 96, 96], [[5] * 32]]
    assert found.tokens.dtype == found.rope_indices.dtype == found.last_index.dtype == ttnn.uint32
    assert found.page_table.dtype == found.chunk_page_table.dtype == ttnn.int32
    assert found.chunk_start.dtype == ttnn.int32
    assert chunk([7], 0, [5]).chunk_start is None


def test_padding_rows_of_a_decode_write_nothing_and_read_the_null_block():
    found = host_decode_inputs(
        np.array([4, 5, 6]),
        np.array([70, PADDING_POSITION, 0]),
        np.array([[2, 3], [8, 9], [1, 0]]),
        table_width=8,
    )
    tokens, positions, ropes, table = as_lists(
        found, "tokens", "positions", "rope_indices", "page_table"
    )
    assert tokens == [[4, 0, 6]]
    assert positions == [70, -1, 0]
    assert ropes == [[70, 0, 0]]
    assert table == [[2, 3] + [0] * 6, [0] * 8, [1] + [0] * 7]
    assert found.tokens.dtype == found.rope_indices.dtype == ttnn.uint32
    assert found.positions.dtype == found.page_table.dtype == ttnn.int32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 2], 32, [1, 2]), "starts at 32, .*block_size=64"),
        (([1] * 65, 0, [1]), "65 tokens need 2 blocks, but got 1"),
        (([1] * 257, 0, range(5)), "257 tokens .* 256"),
    ],
)
def test_a_wrong_chunk_is_refused_with_both_numbers(arguments, message):
    with pytest.raises(ConfigError, match=message):
        chunk(*arguments)


def test_a_page_table_wider_than_the_lanes_is_refused():
    with pytest.raises(ConfigError, match="9 blocks per row, the lane's only 8"):
        host_decode_inputs(np.zeros(1), np.zeros(1), np.zeros((1, 9)), table_width=8)


@pytest.mark.board("N150")
def test_inputs_are_refreshed_in_place(open_mock_mesh):
    device = open_mock_mesh(trace="none").device
    inputs = to_device(chunk([1, 2], 64, [1, 2]), device)
    before = [tensor.buffer_address() for tensor in (inputs.tokens, inputs.chunk_start)]
    refresh(inputs, chunk([3, 4, 5], 128, [1, 2, 3]))
    assert [t.buffer_address() for t in (inputs.tokens, inputs.chunk_start)] == before
    with pytest.raises(ConfigError, match="chunk_start"):
        refresh(inputs, chunk([3], 0, [1]))
    with pytest.raises(ConfigError, match="chunk_start"):
        refresh(replace(inputs, chunk_start=None), chunk([3], 64, [1, 2]))
