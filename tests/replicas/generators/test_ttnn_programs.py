"""Programs of a lane's products: arithmetic, held against what tt-metal's own models choose."""

from __future__ import annotations

import math

import pytest

from replicas.generators.model_config import parse_hf_config
from replicas.generators.ttnn.profiles import PRODUCTS, PROFILES, TILE_BYTES
from replicas.generators.ttnn.programs import (
    L1_FOR_PRODUCTS,
    BankProduct,
    ChipCores,
    ColumnProduct,
    Grid,
    chunk_product,
    column_product,
    lane_programs,
    product_sizes,
    shard_grid,
    weight_tile_bytes,
)
from tests.replicas.generators.test_ttnn_budget import (
    LLAMA_8B,
    LLAMA_70B,
    QWEN3_8B,
    QWEN_7B,
    QWEN_HALF_B,
)

WORMHOLE = ChipCores(Grid(8, 8), dram_banks=12)
P150 = ChipCores(Grid(13, 10), dram_banks=8)
P100 = ChipCores(Grid(12, 10), dram_banks=7)
MISTRAL_7B = {**LLAMA_8B, "architectures": ["MistralForCausalLM"], "vocab_size": 32768}

# Cores, block along the summed dimension, columns per core: what `dram_matmul_config` of tt-metal's
# models/tt_transformers/tt/model_config.py gives for qkv, wo, ff1 and ff3, and ff2.
LLAMA_ONE_CHIP = {"qkv": (32, 4, 6), "o": (32, 4, 4), "gate": (64, 2, 7), "down": (64, 7, 2)}
LLAMA_TWO_CHIPS = {"qkv": (32, 4, 3), "o": (16, 4, 8), "gate": (32, 4, 7), "down": (32, 7, 4)}
# wo of eight chips is fused with a collective there.
LLAMA_EIGHT_CHIPS = {"qkv": (32, 4, 1), "gate": (8, 8, 7), "down": (8, 7, 16)}
QWEN3_ONE_CHIP = {"qkv": (32, 4, 6), "o": (32, 4, 4), "gate": (64, 2, 6), "down": (64, 6, 2)}
QWEN3_TWO_CHIPS = {"qkv": (32, 4, 3), "o": (16, 4, 8), "gate": (64, 2, 3), "down": (64, 3, 2)}
QWEN3_EIGHT_CHIPS = {"qkv": (32, 4, 1), "gate": (16, 8, 3), "down": (16, 3, 8)}
UPSTREAM = [
    pytest.param(raw, chip, tp, wanted, id=f"{model}-{mesh}")
    for model, raw, one, two, eight in (
        ("llama", LLAMA_8B, LLAMA_ONE_CHIP, LLAMA_TWO_CHIPS, LLAMA_EIGHT_CHIPS),
        ("mistral", MISTRAL_7B, LLAMA_ONE_CHIP, LLAMA_TWO_CHIPS, LLAMA_EIGHT_CHIPS),
        ("qwen3", QWEN3_8B, QWEN3_ONE_CHIP, QWEN3_TWO_CHIPS, QWEN3_EIGHT_CHIPS),
    )
    for mesh, chip, tp, wanted in (
        ("N150", WORMHOLE, 1, one),
        ("N300", WORMHOLE, 2, two),
        ("T3K", WORMHOLE, 8, eight),
        ("P150", P150, 1, one),
    )
]


@pytest.mark.parametrize("optimizations", PROFILES)
@pytest.mark.parametrize(("raw", "chip", "tp", "wanted"), UPSTREAM)
def test_decode_programs_are_those_of_tt_metal(raw, chip, tp, wanted, optimizations):
    model = parse_hf_config(raw, "model")
    decode = lane_programs(model, PROFILES[optimizations], chip, tp).decode
    assert decode.keys() == set(PRODUCTS)
    found = {
        name: (product.cores, product.block, product.columns_per_core)
        for name, product in decode.items()
    }
    assert {name: found[name] for name in wanted} == wanted
    assert found["up"] == found["gate"]


def test_grids_are_those_of_tt_metal():
    """Residual, and where the norm of the MLP is: `find_grid` and `find_grid_k_n` there."""
    for raw, tp, residual, mlp in (
        (LLAMA_8B, 1, (8, 4), (8, 8)),
        (LLAMA_8B, 8, (8, 4), (8, 1)),
        (QWEN3_8B, 8, (8, 4), (8, 2)),
        (QWEN_7B, 1, (7, 4), (8, 2)),
        (QWEN_HALF_B, 1, (7, 4), (4, 1)),
    ):
        programs = lane_programs(parse_hf_config(raw, "model"), PROFILES["accuracy"], WORMHOLE, tp)
        grids = [programs.residual.grid, programs.mlp_norm.grid]
        assert [(grid.columns, grid.rows) for grid in grids] == [residual, mlp]
    assert shard_grid(31).num_cores == 1  # 31 cores in a row are no rectangle that chips have


@pytest.mark.parametrize("optimizations", PROFILES)
@pytest.mark.parametrize("chip", [WORMHOLE, P150, P100], ids=["wormhole", "p150", "p100"])
@pytest.mark.parametrize(
    "raw",
    [LLAMA_8B, LLAMA_70B, QWEN3_8B, QWEN_7B, QWEN_HALF_B, MISTRAL_7B],
    ids=["llama-8b", "llama-70b", "qwen3-8b", "qwen-7b", "qwen-half-b", "mistral-7b"],
)
def test_every_product_is_whole_and_fits(raw, chip, optimizations):
    model, profile = parse_hf_config(raw, "model"), PROFILES[optimizations]
    for tp in (1, 2, 4, 8):
        if model.num_key_value_heads % tp or model.num_attention_heads % tp:
            continue
        programs = lane_programs(model, profile, chip, tp)
        sizes = product_sizes(model, tp)
        for name, product in programs.decode.items():
            k, n = (size // 32 for size in sizes[name])
            assert product.l1_bytes <= L1_FOR_PRODUCTS
            if raw is LLAMA_70B and tp == 1 and isinstance(product, ColumnProduct):
                assert_columns_are_whole(product, k, n)  # no chip has the memory for its weights
                continue
            assert isinstance(product, BankProduct), product
            assert k % product.cores == 0
            assert k // product.cores % product.block == 0
            assert product.cores * product.columns_per_core >= n
            # As many for each of its readers, which is what ttnn wants of a stripe.
            assert product.readers == (2 if chip is P150 else 1)
            per_reader = math.ceil(n / chip.dram_banks / product.readers)
            assert product.columns_per_bank == per_reader * product.readers
        for norm in (programs.residual, programs.mlp_norm):
            assert norm.grid.num_cores * norm.columns_per_core * 32 == model.hidden_size
            assert norm.columns_per_core % norm.subblock == 0
        vocab = math.ceil(model.vocab_size / 32 / tp)
        assert_columns_are_whole(programs.output, model.hidden_size // 32, vocab)
        for name, (k, n) in sizes.items():
            if isinstance(programs.decode[name], ColumnProduct):
                continue
            for num_tokens in (128, 1024, 2048, 2176, 8192):
                assert_chunk_is_whole(
                    chunk_product(
                        num_tokens,
                        k // 32,
                        n // 32,
                        chip,
                        weight_tile_bytes(profile, name),
                        profile.product(name),
                    ),
                    num_tokens,
                    k // 32,
                    n // 32,
                    chip,
                )


def assert_columns_are_whole(product, k, n):
    assert isinstance(product, ColumnProduct)
    assert product.l1_bytes <= L1_FOR_PRODUCTS
    assert k % product.block == 0
    assert product.grid.num_cores * product.columns_per_core >= n
    assert product.columns_per_core % product.columns_at_once == 0
    assert product.columns_at_once % product.subblock == 0
    assert product.reason


def assert_chunk_is_whole(product, num_tokens, k, n, chip):
    assert product is not None
    assert product.l1_bytes <= L1_FOR_PRODUCTS
    assert num_tokens % product.tokens == 0
    assert product.tokens % 32 == 0
    assert k % product.block == 0
    assert product.grid.rows * product.rows_per_core * 32 >= product.tokens
    assert product.grid.columns * product.columns_per_core >= n
    assert product.columns_per_core % product.subblock == 0
    # A column of cores that had less than a bank's stripe would read past its block.
    assert product.columns_per_core >= math.ceil(n / chip.dram_banks)
    assert product.grid.columns <= chip.grid.columns
    assert product.grid.rows <= chip.grid.rows


def test_weights_whose_stripes_are_too_wide_are_interleaved_with_a_reason():
    wide = {**LLAMA_8B, "intermediate_size": 64 * 1024}
    gate = lane_programs(parse_hf_config(wide, "model"), PROFILES["accuracy"], WORMHOLE, 1).decode[
        "gate"
    ]
    assert_columns_are_whole(gate, 128, 2048)
    assert gate.reason == "2048 tiles of columns are too many for a chunk's program for stripes"
    heads = {**LLAMA_8B, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 32}
    assert isinstance(
        lane_programs(parse_hf_config(heads, "model"), PROFILES["accuracy"], WORMHOLE, 1).decode[
            "o"
        ],
        BankProduct,
    )


def test_columns_that_do_not_fit_at_once_are_taken_in_turns():
    precision = PROFILES["accuracy"].linear
    product = column_product(128, 300 * 64, Grid(8, 8), TILE_BYTES["bfloat16"], precision, "wide")
    assert_columns_are_whole(product, 128, 300 * 64)
    assert product.columns_per_core == 300
    assert product.columns_at_once < 300
