"""The program that ttnn ran for every product of a lane, at the sizes of real models.

Weights are allocated and not filled: the mock device computes nothing, but it lays out programs and
their circular buffers as a device would, and refuses what does not fit.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
import ttnn

from replicas.generators.model_config import parse_hf_config
from replicas.generators.ttnn import programs as choice
from replicas.generators.ttnn import weights
from replicas.generators.ttnn.buckets import prefill_buckets
from replicas.generators.ttnn.products import chip_cores, chunk_program, row_program, striped
from replicas.generators.ttnn.profiles import PROFILES, TILE_BYTES
from replicas.generators.ttnn.programs import BankProduct
from replicas.generators.ttnn.weights import LaneTensor
from tests.replicas.generators.test_ttnn_budget import LLAMA_8B, QWEN3_8B, QWEN_7B
from tests.tt.test_model import LaneUnderTest

L1_BYTES = 1_499_136
"""Of a Wormhole core."""

LIMIT = choice.L1_FOR_PRODUCTS

MODELS = {
    "llama-8b": LLAMA_8B,
    "qwen3-8b": QWEN3_8B,
    "mistral-7b": {**LLAMA_8B, "architectures": ["MistralForCausalLM"], "vocab_size": 32768},
    "qwen2-7b": QWEN_7B,
}
NUM_LAYERS = 2

STRIPES = "MatmulMultiCoreReuseMultiCastDRAMShardedProgramFactory"
COLUMNS = "MatmulMultiCoreReuseMcast1DProgramFactory"
CHUNK = "MatmulMultiCoreReuseMcast2DProgramFactory"
LINE, RING = "LineReduceScatterMeshWorkloadFactory", "RingReduceScatterMeshWorkloadFactory"


def without_numbers(monkeypatch):
    """Let weights be allocated at their sizes, with nothing in them."""

    def sizes_of(shapes, seed):
        return lambda name: torch.empty(shapes[name], device="meta")

    def shard(tensor, fetch, lane_shape):
        return next(iter(tensor.shards(fetch)))

    def on_device(tensor, shard, lane, where):
        layout = ttnn.TILE_LAYOUT if tensor.is_tiled else ttnn.ROW_MAJOR_LAYOUT
        return allocated(lane, shard.shape, getattr(ttnn, tensor.dtype), where, layout)

    monkeypatch.setattr(weights, "random_source", sizes_of)
    monkeypatch.setattr(LaneTensor, "convert", shard)
    monkeypatch.setattr(weights, "_to_device", on_device)


@pytest.fixture
def lane_of(open_mock_mesh, monkeypatch):
    """A lane over the whole of the test's board, of a real model with few layers."""
    without_numbers(monkeypatch)

    def make(model, optimizations, **changes):
        config = parse_hf_config({**MODELS[model], "num_hidden_layers": NUM_LAYERS}, "model")
        mesh = open_mock_mesh(load_format="random", trace="none")
        return LaneUnderTest(mesh, config, optimizations=optimizations, **changes)

    return make


def programs_of(call):
    """(operation, program) of every operation of a call that ttnn has run, in order."""
    ttnn.graph.begin_graph_capture(ttnn.graph.RunMode.NORMAL)
    try:
        call()
    finally:
        graph = ttnn.graph.end_graph_capture()
    return [
        (node["params"]["name"], node["params"]["program_factory_type"].rpartition("::")[2])
        for node in graph
        if "program_factory_type" in (node["params"] or {})
    ]


def of(operation, programs):
    return [program for name, program in programs if name == operation]


def board_and(board, model, optimizations):
    return pytest.param(
        model,
        optimizations,
        marks=pytest.mark.board(board),
        id=f"{board}-{model}-{optimizations}",
    )


@pytest.mark.parametrize(
    ("model", "optimizations"),
    [
        board_and(board, model, optimizations)
        for board in ("N150", "N300", "T3K", "P150")
        for model in MODELS
        for optimizations in PROFILES
        if (board, model) != ("T3K", "qwen2-7b")  # four KV heads do not divide among eight chips
    ],
)
def test_every_product_runs_the_program_that_was_chosen(lane_of, model, optimizations):
    lane = lane_of(model, optimizations, max_seq_len=2048)
    decode = programs_of(lambda: lane.decode([0, -1, 2047]))
    assert of("MatmulDeviceOperation", decode) == [STRIPES] * 5 * NUM_LAYERS + [COLUMNS]
    norms = Counter(of("LayerNormDeviceOperation", decode))
    of_heads = 2 * NUM_LAYERS if lane.config.qk_norm else 0
    assert norms.pop("LayerNormShardedProgramFactory") == 2 * NUM_LAYERS + 1
    assert norms == Counter({"LayerNormMultiCoreProgramFactory": of_heads})
    sums = 0 if lane.tp == 1 else 2 * NUM_LAYERS + 1
    assert of("ReduceScatterMinimalAsyncDeviceOperation", decode) == [LINE] * sums
    assert of("AllGatherAsyncDeviceOperation", decode) == ["DefaultMeshWorkloadFactory"] * sums
    assert len(of("PagedFusedUpdateCacheDeviceOperation", decode)) == NUM_LAYERS
    for bucket in prefill_buckets(2048):
        for start in (0, 64):
            chunk = programs_of(lambda: lane.prefill(start, bucket - start))  # noqa: B023
            assert of("MatmulDeviceOperation", chunk) == [CHUNK] * 5 * NUM_LAYERS + [COLUMNS]


def allocated(
    device,
    shape,
    dtype=ttnn.bfloat16,
    where=ttnn.DRAM_MEMORY_CONFIG,
    layout=ttnn.TILE_LAYOUT,
):
    return ttnn.allocate_tensor_on_device(ttnn.Shape(shape), dtype, layout, device, where)


def in_shards(device, num_cores, width):
    grid = device.compute_with_storage_grid_size()
    return ttnn.MemoryConfig(
        ttnn.TensorMemoryLayout.WIDTH_SHARDED,
        ttnn.BufferType.L1,
        ttnn.ShardSpec(
            ttnn.num_cores_to_corerangeset(num_cores, grid, row_wise=True),
            [32, width],
            ttnn.ShardOrientation.ROW_MAJOR,
        ),
    )


FOR_KERNELS = {"N150": 105_824, "P150": 111_744}
"""Bytes of a core's L1 that are not a program's to have."""


@pytest.mark.parametrize("optimizations", ["performance", "accuracy"])
@pytest.mark.parametrize("dtype", list(TILE_BYTES))
@pytest.mark.parametrize(
    ("board", "kind"),
    [
        pytest.param(board, kind, marks=pytest.mark.board(board), id=f"{board}-{kind}")
        for board, kind in (
            ("N150", "stripes"),
            ("N150", "columns"),
            ("N150", "chunk"),
            # Two cores read a stripe.
            ("P150", "stripes"),
            ("P150", "columns"),
        )
    ],
)
def test_l1_is_counted_to_the_byte(open_mock_mesh, monkeypatch, optimizations, dtype, board, kind):
    """ttnn's error names the L1 of a program that was chosen as if there were enough."""
    (device,) = open_mock_mesh(trace="none").lanes(1)
    monkeypatch.setattr(choice, "L1_FOR_PRODUCTS", 10**9)
    chip, tile_bytes = chip_cores(device), TILE_BYTES[dtype]
    precision = PROFILES[optimizations].down
    k, rows, where, out = 128, 32, ttnn.DRAM_MEMORY_CONFIG, ttnn.DRAM_MEMORY_CONFIG
    # So many columns that there is not enough L1 for weights of any dtype.
    many = {"N150": 10752, "P150": 21504}[board]
    n, shards = {"stripes": 2688, "columns": many, "chunk": 1792}[kind], 0
    if kind == "stripes":
        product = choice._decode_product(k, n, 32, chip, tile_bytes, precision)
        assert isinstance(product, BankProduct)
        where = striped(k * 32, n * 32, chip.dram_banks)
        out = in_shards(device, 32, product.columns_per_core * 32)
        x = allocated(device, [1, 1, 32, k * 32], where=in_shards(device, 32, k))
        # Its rows and its result are tensors, whose L1 is theirs already.
        shards = (k // 32 + product.columns_per_core) * 2048
    elif kind == "columns":
        product = choice.column_product(k, n, chip.grid, tile_bytes, precision, "many")
        x = allocated(device, [1, 1, 32, k * 32], where=ttnn.L1_MEMORY_CONFIG)
    else:
        rows = 2048
        product = choice.chunk_product(rows, k, n, chip, tile_bytes, precision)
        x = allocated(device, [1, 1, rows, k * 32])
    is_chunk = isinstance(product, choice.ChunkProduct)
    program = chunk_program(product, is_whole=True) if is_chunk else row_program(product)
    with pytest.raises(RuntimeError, match="beyond max L1 size") as refusal:
        ttnn.linear(
            x,
            allocated(device, [1, 1, k * 32, n * 32], getattr(ttnn, dtype), where),
            dtype=ttnn.bfloat16,
            memory_config=out,
            program_config=program,
            compute_kernel_config=ttnn.WormholeComputeKernelConfig(
                math_fidelity=ttnn.MathFidelity.HiFi2,
                fp32_dest_acc_en=precision.fp32_accumulation,
                packer_l1_acc=True,
            ),
        )
    needed = int(re.search(r"grow to (\d+) B", str(refusal.value))[1])
    for_kernels = needed - (product.l1_bytes - shards)
    # The same for every kind, and with it a product that is taken leaves some for activations.
    assert for_kernels == FOR_KERNELS[board]
    assert for_kernels + LIMIT < L1_BYTES - 150_000
