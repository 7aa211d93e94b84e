"""Token budgets of the native ttnn generator: no device, and no ttnn, is needed for them."""

from __future__ import annotations

import pytest

from replicas.config import MeshConfig
from replicas.errors import ConfigError
from replicas.generators.model_config import parse_hf_config
from replicas.generators.ttnn.budget import (
    RESERVED_SHARE,
    activation_bytes_per_chip,
    lane_memory,
    native_token_budget,
    num_blocks,
    weight_bytes_per_chip,
)
from replicas.generators.ttnn.profiles import (
    ACCURACY,
    BALANCED,
    PERFORMANCE,
    PRODUCTS,
    profile,
)
from replicas.tt.meshes import mesh_spec
from replicas.tt.trace_regions import trace_region_bytes

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
LLAMA_70B = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN_7B = {
    **QWEN_HALF_B,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
QWEN3_8B = {
    **LLAMA_8B,
    "architectures": ["Qwen3ForCausalLM"],
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
OFFERED = 12_822_000_000 + 50_000_000
"""Bytes of DRAM that ttnn's allocator has of a Wormhole chip, the trace region included;
tests/tt/test_budget.py asks it."""


def budget(raw, mesh, lanes=1, **settings):
    model = parse_hf_config(raw, "model")
    config = MeshConfig(name=mesh, **settings)
    return native_token_budget(model, mesh_spec(mesh), config, lanes)


def test_an_8b_model_gets_on_one_wormhole_what_the_plugin_gives_it():
    assert budget(LLAMA_8B, "N150") >= 32768
    assert 30000 <= budget(LLAMA_8B, "N150", optimizations="balanced") < 40000


@pytest.mark.parametrize(
    ("raw", "mesh", "lanes", "optimizations"),
    [
        (LLAMA_8B, "N150", 1, "performance"),
        (LLAMA_8B, "N150", 1, "balanced"),
        (LLAMA_8B, "N300", 1, "performance"),
        (LLAMA_8B, "T3K", 1, "accuracy"),
        (LLAMA_8B, "T3K", 4, "performance"),
        (QWEN_7B, "N150", 1, "performance"),
        (QWEN_7B, "N300", 1, "accuracy"),
        (QWEN3_8B, "N150", 1, "performance"),
        (QWEN3_8B, "N300", 1, "accuracy"),
        (LLAMA_70B, "T3K", 1, "performance"),
    ],
)
@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("max_seq_len", [4096, None])
def test_all_that_a_lane_has_fits_its_dram_and_fills_it(
    raw, mesh, lanes, optimizations, block_size, max_seq_len
):
    model = parse_hf_config(raw, "model")
    settings = MeshConfig(name=mesh, optimizations=optimizations)
    sizes = {"block_size": block_size, "max_seq_len": max_seq_len}
    spec = mesh_spec(mesh)
    memory = lane_memory(model, spec, settings, lanes, **sizes)
    tokens = native_token_budget(model, spec, settings, lanes, num_slots=32, **sizes)

    # By arithmetic of its own: elements of bfloat16, tiles of bfloat8_b with an exponent in 16.
    tp, chosen = spec.num_chips // lanes, profile(optimizations, model)
    length = max_seq_len or model.max_position_embeddings
    chunk, num_buckets = min(length, 8192), 2
    vocab = -(-model.vocab_size // (32 * tp)) * 32
    mlp = chunk * (model.hidden_size + 3 * model.intermediate_size // tp + 2 * model.head_dim)
    rope = 2 * length * model.head_dim
    logits = (3 * num_buckets + 1) * 32 * vocab
    kv = num_blocks(tokens, block_size, 32) * block_size * model.num_hidden_layers
    kv *= 2 * model.num_key_value_heads // tp * model.head_dim
    kv_bytes = kv * 2 if chosen.kv_dtype == "bfloat16" else kv * 17 // 16
    banks = spec.chip.dram_banks
    used = weight_bytes_per_chip(model, chosen, tp, banks) + kv_bytes + 2 * (mlp + rope + logits)
    used += trace_region_bytes(settings, model.num_hidden_layers, lanes)
    # 3 % less the 0.1 % that ttnn does not offer are left, and at most a block; the other parts of
    # a layer may need more than the MLP where the chips are many.
    left = OFFERED - used
    assert left > 0.025 * OFFERED
    spare = memory.activations - 2 * mlp + 3 * 64 * vocab
    if tokens < 32 * model.max_position_embeddings:
        assert left < RESERVED_SHARE * memory.dram + memory.block + spare
        assert num_blocks(tokens, block_size, 32) == memory.num_blocks


def test_activations_are_those_that_ttnn_allocates():
    """Peaks of DRAM over 2 bytes and 2,048 tokens; tests/tt/test_budget.py measures them."""

    def columns(tp, hidden, inner, heads):
        sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
        model = parse_hf_config(
            {**LLAMA_8B, "num_key_value_heads": 8, "head_dim": 32, **sizes}, "model"
        )
        return activation_bytes_per_chip(model, tp, 2048) / 2 / 2048

    assert columns(1, 256, 2048, 8) == 6464
    assert columns(1, 1024, 256, 8) == 3136
    assert columns(1, 256, 256, 32) == 3392
    assert columns(8, 1024, 256, 8) == 4288
    assert columns(2, 256, 2048, 8) == 3392
    assert columns(2, 1024, 256, 8) == 4672
    assert columns(2, 256, 256, 32) == 1856


def test_what_is_not_asked_for_is_not_reserved():
    model, spec = parse_hf_config(LLAMA_8B, "model"), mesh_spec("N150")

    def outputs(trace, **draws):
        return lane_memory(model, spec, MeshConfig(name="N150", trace=trace, **draws), 1).outputs

    logits, traces = 32 * 128256 * 2, ("none", "decode_only", "all")
    assert [outputs(trace) / logits for trace in traces] == [2, 4, 10]
    assert [outputs(trace, sample_on_device="none") / logits for trace in traces] == [2, 3, 9]
    assert budget(LLAMA_8B, "N150", trace="none") > budget(LLAMA_8B, "N150")


def test_accuracy_costs_twice_the_weights_and_kv():
    model = parse_hf_config(LLAMA_8B, "model")
    ratio = weight_bytes_per_chip(model, ACCURACY, 1) / weight_bytes_per_chip(model, BALANCED, 1)
    assert 1.75 < ratio < 1.8  # the embedding is bfloat16 in both
    balanced = budget(LLAMA_8B, "N300", optimizations="balanced")
    assert budget(LLAMA_8B, "N300", optimizations="accuracy") < balanced / 3


def test_bfloat4_b_gate_and_up_of_all_layers_but_the_last_are_what_performance_saves():
    model = parse_hf_config(LLAMA_8B, "model")
    saved = weight_bytes_per_chip(model, BALANCED, 1) - weight_bytes_per_chip(model, PERFORMANCE, 1)
    assert saved == 31 * 2 * 4096 * 14336 // 2


def test_weights_in_stripes_are_padded_to_whole_tiles_of_every_bank():
    model = parse_hf_config(LLAMA_8B, "model")
    padding = weight_bytes_per_chip(model, BALANCED, 1, 12) - weight_bytes_per_chip(
        model, BALANCED, 1
    )
    # 128 tiles of columns become 132, 448 become 456, and 192 stay.
    assert padding == 32 * (4 * (128 + 448) + 2 * 8 * 128) * 1088
    assert weight_bytes_per_chip(model, BALANCED, 1, 8) == weight_bytes_per_chip(model, BALANCED, 1)


def test_more_than_all_rows_at_full_length_is_no_use():
    assert budget(QWEN_HALF_B, "T3K", 4) == 32 * 32768


def test_a_model_that_does_not_fit_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"16\.36 GB of each chip\. Of its 12\.88 GB, 11\.52 GB"):
        budget(LLAMA_8B, "N150", optimizations="accuracy")


@pytest.mark.parametrize(
    ("mesh", "lanes", "settings", "ways"),
    [
        ("N150", 1, {}, "use a larger mesh than N150"),
        ("N300", 2, {}, "use a larger mesh than N300, or fewer lanes than tt_data_parallel 2"),
        (
            "N150", 1, {"optimizations": "accuracy"},
            "use a larger mesh than N150, or mesh.optimizations: performance",
        ),
        (
            "N150", 1, {"trace_region_size": 9 * 10**9},
            "use a larger mesh than N150, or a smaller mesh.trace_region_size than 9000000000",
        ),
    ],
)  # fmt: skip
def test_a_refusal_names_only_what_can_be_changed(mesh, lanes, settings, ways):
    with pytest.raises(ConfigError) as refused:
        budget(LLAMA_8B | {"num_hidden_layers": 96}, mesh, lanes, **settings)
    assert str(refused.value).endswith(f" GB; {ways}")


def test_where_the_weights_fit_and_the_slots_do_not_fewer_slots_are_a_way():
    model, settings = parse_hf_config(LLAMA_8B, "model"), MeshConfig(name="N150")
    with pytest.raises(ConfigError, match=r"N150, or fewer slots \(max_batch_size\)$"):
        native_token_budget(model, mesh_spec("N150"), settings, 1, num_slots=100_000)


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
    with pytest.raises(ConfigError, match="'fast' is not one of performance, balanced, accuracy"):
        profile("fast")


def test_qwen_7b_takes_more_for_performance_whatever_it_is_called():
    """BF16 attention and BFP8 MLP, as upstream has it."""
    model = parse_hf_config(QWEN_7B, "/models/mine")
    chosen = profile("performance", model)
    assert chosen.name == "performance"
    dtypes = {name: chosen.weight(name, is_last=False) for name in PRODUCTS}
    assert dtypes == {
        "qkv": "bfloat16", "o": "bfloat16",
        "gate": "bfloat8_b", "up": "bfloat8_b", "down": "bfloat8_b",
    }  # fmt: skip
    assert chosen.kv_dtype == "bfloat16"
    assert {chosen.product(name).fidelity for name in ("qkv", "o")} == {"HiFi4"}
    assert chosen.attention_of_rows.fidelity == chosen.attention.fidelity == "HiFi4"
    assert profile("balanced", model) is profile("balanced")
    for other in (QWEN_HALF_B, QWEN3_8B, LLAMA_8B):
        assert profile("performance", parse_hf_config(other, "Qwen2.5-7B")) is PERFORMANCE
