"""KV specs of layers: sizes, checks, and groups of equal layers."""

from __future__ import annotations

import pytest

from replicas.config import SimulatedMeshConfig
from replicas.errors import ConfigError
from replicas.generators.model_config import load_hf_config
from replicas.kv_groups import KVGroup, KVSpec, layers_by_spec, max_concurrency
from replicas.kv_sizing import kv_groups, kv_per_token
from tests.engines import make_config
from tests.models import model_folder

FULL = KVSpec(heads=8, width=128, dtype="bfloat16")
WINDOW = KVSpec(heads=8, width=128, dtype="bfloat16", kind="window", window=1024)


@pytest.mark.parametrize(
    ("spec", "num_bytes"),
    [
        (FULL, 2 * 8 * 128 * 2 * 32),
        (WINDOW, 2 * 8 * 128 * 2 * 32),
        (KVSpec(heads=8, width=128, dtype="bfloat8_b"), 2 * 8 * 128 * 1088 // 1024 * 32),
        (KVSpec(heads=1, width=576, dtype="bfloat16", kind="latent", planes=1), 576 * 2 * 32),
        # A state does not grow with the tokens of a block.
        (KVSpec(heads=4, width=64, dtype="float32", kind="state", planes=1), 4 * 64 * 4),
    ],
    ids=["full", "window", "bfloat8_b", "latent", "state"],
)
def test_bytes_of_a_block_of_one_layer(spec, num_bytes):
    assert spec.bytes_per_block(32) == num_bytes


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"heads": 0}, "heads 0 must be positive"),
        ({"width": -1}, "width -1 must be positive"),
        ({"planes": 0}, "planes 0 must be positive"),
        ({"dtype": "int3"}, "dtype 'int3' is unknown; use one of .*'bfloat16'"),
        ({"kind": "window"}, "kind 'window' with window None"),
        ({"window": 8}, "kind 'full' with window 8"),
        ({"kind": "window", "window": 0}, "window 0 must be positive"),
    ],
    ids=["heads", "width", "planes", "dtype", "no window", "full with window", "empty window"],
)
def test_an_impossible_spec_is_refused(changes, error):
    with pytest.raises(ConfigError, match=f"KV spec: {error}"):
        KVSpec(**{"heads": 1, "width": 32, "dtype": "bfloat16", **changes})


def test_layers_of_equal_spec_are_one_group():
    assert layers_by_spec([WINDOW, WINDOW, FULL, WINDOW]) == [(WINDOW, (0, 1, 3)), (FULL, (2,))]


def test_a_group_has_the_bytes_of_all_its_layers():
    group = KVGroup(layers=(0, 1, 3), spec=WINDOW, block_size=64, num_blocks=9)
    assert group.bytes_per_block == 3 * WINDOW.bytes_per_block(64)


@pytest.mark.parametrize(
    ("case", "changes", "line"),
    [
        # 2 planes, 2 heads of 16, and of 32, elements of 4 bytes.
        ("llama-gqa", {}, "768 bytes of KV per token in 3 layers of float32"),
        ("llama-gqa", {"dtype": "bfloat16"}, "384 bytes of KV per token in 3 layers of bfloat16"),
        ("mistral-window", {}, "768 bytes of KV per token of the last 9 in 3 layers of float32"),
        (
            "gemma2",
            {},
            "1,024 bytes of KV per token of the last 9 in 2 layers of float32, "
            "512 bytes of KV per token in 1 layers of float32",
        ),
        # A matrix of 12 to 20 for each of 4 heads, and 3 inputs of a convolution with 128 channels.
        (
            "qwen3-next",
            {"dtype": "bfloat16"},
            "10,752 bytes of state per sequence in 2 layers of float32, "
            "512 bytes of KV per token in 2 layers of bfloat16",
        ),
        (
            "llama-gqa",
            {"simulated_mesh": SimulatedMeshConfig(board="n150", model="Llama-3.1-8B")},
            "69,632 bytes of KV per token of the simulated model",
        ),
    ],
    ids=["all tokens", "bfloat16", "window", "some windows", "states", "simulated"],
)
def test_kv_of_a_token_as_validate_prints_it(case, changes, line):
    # Of unknown memory, so that only the line's beginning is left.
    config = make_config(model_folder(case), gpu_memory_utilization=0.5, **changes)
    assert kv_per_token(config, load_hf_config(config.model)) == line


@pytest.mark.parametrize(
    ("case", "changes", "room"),
    [
        # 40 blocks of 4 tokens for 25 of a sequence.
        ("llama-gqa", {}, "1.60 sequences of 100"),
        ("llama-gqa", {"tt_data_parallel": 2}, "3.20 sequences of 100"),
        # 9 tokens of a window and 16 of a step take at most 8 blocks.
        ("mistral-window", {}, "5.00 sequences of 100"),
        ("gemma2", {}, "1.60 sequences of 100"),
    ],
    ids=["all tokens", "lanes", "window", "some windows"],
)
def test_validate_prints_how_many_sequences_fit(case, changes, room):
    sizes = {"num_blocks": 41, "block_size": 4, "max_num_batched_tokens": 16}
    config = make_config(model_folder(case), max_model_len=100, **sizes, **changes)
    assert kv_per_token(config, load_hf_config(config.model)).endswith(f"; room for {room} tokens")


def sizes_of(case, **changes):
    config = make_config(model_folder(case), block_size=4, max_num_batched_tokens=16, **changes)
    groups = kv_groups(config, load_hf_config(config.model))
    return groups, [group.num_blocks for group in groups]


def test_a_window_has_what_the_slots_can_use_and_other_layers_the_rest_of_the_memory():
    # Beside the null block two chunks of 16, and for each slot 9 tokens and two blocks more.
    (full, window), (num_full, num_window) = sizes_of(
        "gemma2", max_batch_size=3, enable_prefix_caching=False, num_blocks=None,
        kv_cache_memory_bytes=10**6,
    )  # fmt: skip
    assert num_window == 1 + 2 * 4 + 3 * (3 + 2)
    left = 10**6 - num_window * window.bytes_per_block
    assert num_full == left // full.bytes_per_block
    # As many again keep prefixes that no slot uses.
    assert sizes_of("gemma2", max_batch_size=3, num_blocks=99)[1] == [99, 1 + 2 * 4 + 2 * 3 * 5]


def test_few_blocks_are_the_same_for_all_layers():
    (full, window), sizes = sizes_of(
        "gemma2", num_blocks=None, kv_cache_memory_bytes=35_000, max_model_len=40
    )
    count = 35_000 // (full.bytes_per_block + window.bytes_per_block)
    assert sizes == [count, count]
    assert sizes_of("mistral-window", num_blocks=1000)[1] == [1000]


def test_a_long_sequence_takes_few_blocks_of_a_window():
    (full, window), (num_full, num_window) = sizes_of("gemma2", max_batch_size=2, num_blocks=400)
    # A window and a chunk may begin within blocks.
    assert (full.num_blocks_for(80), window.num_blocks_for(80)) == (20, 1 + 25 // 4 + 1)
    assert window.num_blocks_for(8) == full.num_blocks_for(8) == 2
    assert max_concurrency([full, window], 80, 2) == 2 * min(399 / 20, (num_window - 1) / 8)
    assert window.num_tokens_in(7) == 28
    assert window.num_tokens_in(8) > full.num_tokens_in(num_full)
