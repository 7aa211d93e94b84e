"""Token budgets of the native ttnn generator: no device, and no ttnn, is needed for them."""

from __future__ import annotations

import pytest

from replicas.config import MeshConfig
from replicas.errors import ConfigError
from replicas.generators.model_config import parse_hf_config
from replicas.generators.ttnn.budget import (
    RESERVED_SHARE,
    native_token_budget,
    num_blocks,
    weight_bytes_per_chip,
)
from replicas.generators.ttnn.profiles import ACCURACY, PERFORMANCE, profile
from replicas.meshes import mesh_spec

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
QWEN_HALF_B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


def budget(raw, mesh, lanes=1, **settings):
    model = parse_hf_config(raw, "model")
    config = MeshConfig(name=mesh, **settings)
    return native_token_budget(model, mesh_spec(mesh), config, lanes)


def test_an_8b_model_gets_on_one_wormhole_what_the_plugin_gives_it():
    assert 32768 <= budget(LLAMA_8B, "N150") < 40000


@pytest.mark.parametrize(("mesh", "lanes", "tp"), [("N300", 1, 2), ("T3K", 1, 8), ("T3K", 4, 2)])
def test_weights_and_kv_fill_the_dram_of_a_lane_but_for_the_reserve(mesh, lanes, tp):
    model = parse_hf_config(LLAMA_8B, "model")
    tokens = budget(LLAMA_8B, mesh, lanes, trace_region_size=123_000_000)
    # K and V of 32 layers, 8 heads of 128 elements at 17/16 bytes: 69,632 bytes over all chips.
    used = tokens * 69632 // tp + weight_bytes_per_chip(model, PERFORMANCE, tp) + 123_000_000
    dram = mesh_spec(mesh).dram_bytes_per_chip
    assert 0 <= dram * (1 - RESERVED_SHARE) - used < 32 * 69632 // tp


def test_lanes_of_equal_size_get_equal_budgets():
    assert budget(LLAMA_8B, "T3K", 8) == budget(LLAMA_8B, "N150")


def test_accuracy_costs_twice_the_weights_and_kv():
    model = parse_hf_config(LLAMA_8B, "model")
    ratio = weight_bytes_per_chip(model, ACCURACY, 1) / weight_bytes_per_chip(model, PERFORMANCE, 1)
    assert 1.75 < ratio < 1.8  # the embedding is bfloat16 in both
    assert budget(LLAMA_8B, "N300", optimizations="accuracy") < budget(LLAMA_8B, "N300") / 3


def test_more_than_all_rows_at_full_length_is_no_use():
    assert budget(QWEN_HALF_B, "T3K", 4) == 32 * 32768


def test_a_model_that_does_not_fit_is_refused_with_both_numbers():
    with pytest.raises(
        ConfigError, match=r"16\.08 GB of each chip, and of its 12\.88 GB 11\.55 GB"
    ):
        budget(LLAMA_8B, "N150", optimizations="accuracy")


def test_heads_that_do_not_divide_among_the_chips_are_refused():
    with pytest.raises(ConfigError, match=r"14 query heads and 2 KV heads .* the 8 chips"):
        budget(QWEN_HALF_B, "T3K")


def test_lanes_that_do_not_divide_the_chips_are_refused():
    with pytest.raises(ConfigError, match="3 does not divide the 8"):
        budget(LLAMA_8B, "T3K", 3)


def test_blocks_are_those_of_the_plugin():
    assert num_blocks(131072, 64, 32) == 2080  # its published count for Llama-3.1-8B on N300
    assert num_blocks(100, 64, 1) == 3
    assert num_blocks(64, 64, 0) == 1


def test_profiles_are_found_by_name_and_none_is_performance():
    assert profile(None) is profile("performance") is PERFORMANCE
    assert profile("accuracy") is ACCURACY
    with pytest.raises(ConfigError, match="'fast' is not one of performance, accuracy"):
        profile("fast")


def test_what_is_named_on_a_profile_is_there():
    assert (PERFORMANCE.weight_dtype, PERFORMANCE.kv_dtype) == ("bfloat8_b", "bfloat8_b")
    assert (ACCURACY.weight_dtype, ACCURACY.kv_dtype) == ("bfloat16", "bfloat16")
