"""The golden kit itself: it rounds and packs as ttnn does, refuses what ttnn forbids, and its ops
take and give what those of ttnn do on the mock device."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import ttnn

from kv_transfer.dtypes import convert_rows
from replicas.generators.model_config import load_hf_config
from tests.tt.calls import Calls
from tests.tt.golden.lanes import Lane, golden_mesh, model_folder, root
from tests.tt.golden.library import TRANSFERS, GoldenLibrary, Noting, installed, poisoned
from tests.tt.golden.packing import pack, unpack
from tests.tt.golden.rows import params
from tests.tt.golden.tensors import GoldenDevice, GoldenError, round_to
from tests.tt.test_kv_io import make_layout

TILED, ROW_MAJOR = ttnn.TILE_LAYOUT, ttnn.ROW_MAJOR_LAYOUT


def values(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scales = torch.exp2(torch.randint(-9, 9, shape, generator=generator))
    return (torch.randn(shape, generator=generator) * scales).bfloat16().float()


# ---- numbers


def test_bfloat8_b_is_what_a_transfer_makes_of_it():
    rows = values(64, 32, 64)
    sizes = {"heads": 1, "layers": 1, "block_size": 32}
    floats, blocks = make_layout("float32", **sizes), make_layout("bfloat8_b", **sizes)
    data = rows.view(32, 2, 32, 64).numpy().view(np.uint8).reshape(32, -1)
    back = convert_rows(convert_rows(data, floats, blocks), blocks, floats)
    rounded = torch.from_numpy(back.view(np.float32).reshape(64, 32, 64).copy())
    assert torch.equal(round_to(rows, ttnn.bfloat8_b), rounded)
    assert not torch.equal(rounded, rows)
    assert torch.equal(round_to(rounded, ttnn.bfloat8_b), rounded)


def test_a_row_that_is_poisoned_stays_so():
    rows = values(2, 32)
    rows[0, 3] = math.nan
    rounded = round_to(rows, ttnn.bfloat8_b)
    assert rounded[0, :16].isnan().all()
    assert rounded[0, 16:].isfinite().all()
    assert rounded[1].isfinite().all()


@pytest.mark.board("N150")  # whose arrangement of a tile ttnn asks for
@pytest.mark.parametrize("dtype", [ttnn.bfloat16, ttnn.bfloat8_b])
def test_bytes_are_those_of_ttnn(dtype):
    host = ttnn.from_torch(values(2, 3, 64, 96), dtype=dtype, layout=TILED)
    theirs = torch.as_tensor(host.host_buffer().get_shard(ttnn.MeshCoordinate(0, 0)))
    numbers = ttnn.to_torch(host).float()
    ours = pack(numbers, dtype, TILED)
    assert torch.equal(ours, theirs.view(torch.uint8).reshape(-1))
    assert torch.equal(unpack(ours, numbers.shape, dtype, TILED), numbers)


# ---- refusals: of contents, which the mock device does not look at


@pytest.fixture
def chip():
    return GoldenDevice((1, 1))


def on(device, tensor, dtype=ttnn.bfloat16, layout=None, memory_config=None):
    layout = layout or (TILED if tensor.dtype.is_floating_point else ROW_MAJOR)
    golden = GoldenLibrary()
    return golden.from_torch(
        tensor, dtype, layout=layout, device=device, memory_config=memory_config
    )


def ints(device, *numbers):
    return on(device, torch.tensor(numbers, dtype=torch.int32), ttnn.int32)


SHARDED = ttnn.L1_HEIGHT_SHARDED_MEMORY_CONFIG


def cache(device, dtype=ttnn.bfloat16):
    return on(device, torch.full((6, 2, 32, 32), 9.0), dtype)


def chunk(device, length=64, dtype=ttnn.bfloat16):
    return on(device, values(1, 2, length, 32), dtype)


def rows(device, dtype=ttnn.bfloat16):
    return on(device, values(1, 3, 2, 32), dtype, memory_config=SHARDED)


REFUSED = {
    "a fill of a block that is not there": lambda t, d: t.experimental.paged_fill_cache(
        cache(d), chunk(d), ints(d, [1, 6])
    ),
    "an update past the page table": lambda t, d: t.experimental.paged_update_cache(
        cache(d), rows(d), update_idxs_tensor=ints(d, 0, 32, 2),
        page_table=ints(d, [1], [2], [3]),
    ),
    "a decode past the page table": lambda t, d: (
        t.transformer.paged_scaled_dot_product_attention_decode(
            rows(d), cache(d), cache(d), ints(d, [1], [2], [3]), cur_pos_tensor=ints(d, 0, 32, 1)
        )
    ),
    "a chunk past the page table": lambda t, d: (
        t.transformer.chunked_scaled_dot_product_attention(
            chunk(d), cache(d), cache(d), ints(d, [1, 2]), chunk_start_idx_tensor=ints(d, 32)
        )
    ),
    "a chunk that starts within a tile": lambda t, d: (
        t.transformer.chunked_scaled_dot_product_attention(
            chunk(d, 32), cache(d), cache(d), ints(d, [1, 2]), chunk_start_idx_tensor=ints(d, 16)
        )
    ),
    "a token outside of the embedding": lambda t, d: t.embedding(
        on(d, torch.tensor([[7]]), ttnn.uint32), on(d, values(1, 1, 7, 32), layout=ROW_MAJOR)
    ),
    "an operand of another device": lambda t, d: t.add(
        on(d, values(32, 32)), on(GoldenDevice((1, 1)), values(32, 32))
    ),
    "several chips without a composer": lambda t, d: t.to_torch(
        on(GoldenDevice((1, 2)), values(32, 32))
    ),
    "top-k 33": lambda t, d: t.sampling(
        on(d, values(1, 1, 1, 64)), on(d, torch.zeros(1, 1, 1, 64).int(), ttnn.int32),
        on(d, torch.tensor([33]), ttnn.uint32), on(d, torch.ones(1), layout=ROW_MAJOR),
        on(d, torch.ones(1), layout=ROW_MAJOR),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused(golden, chip, what):
    with pytest.raises(GoldenError):
        REFUSED[what](golden, chip)


def test_a_freed_tensor_and_its_views_are_refused(golden, chip):
    tensor = on(chip, values(1, 1, 64, 32))
    view = golden.reshape(tensor, (1, 2, 32, 32))
    golden.deallocate(tensor)
    with pytest.raises(GoldenError, match="deallocated"):
        golden.add(view, 1.0)


def test_an_op_that_the_kit_does_not_know_is_noticed(golden):
    with pytest.raises(NotImplementedError, match=r"ttnn\.conv2d"):
        getattr(golden, "conv2d")  # noqa: B009
    with pytest.raises(NotImplementedError, match=r"ttnn\.experimental\.rotary"):
        getattr(golden.experimental, "rotary_embedding_llama")  # noqa: B009
    assert golden.bfloat16 is ttnn.bfloat16
    assert golden.MathFidelity is ttnn.MathFidelity


# ---- documented behaviour of the ops without a golden function


def test_a_skipped_row_is_neither_written_nor_computed(golden, chip):
    keys, new = cache(chip), rows(chip)
    positions, table = ints(chip, 40, -1, 3), ints(chip, [1, 2], [3, 4], [5, 1])
    golden.experimental.paged_update_cache(
        keys, new, update_idxs_tensor=positions, page_table=table
    )
    written = (keys.shards[0] != 9.0).any(dim=-1).any(dim=1).nonzero().tolist()
    assert written == [[2, 8], [5, 3]]
    assert torch.equal(keys.shards[0][2, :, 8], new.shards[0][0, 0])
    with poisoned(math.nan):
        out = golden.transformer.paged_scaled_dot_product_attention_decode(
            rows(chip), keys, keys, table, cur_pos_tensor=positions
        ).shards[0]
    assert out[0, 1].isnan().all()
    assert out[0, [0, 2]].isfinite().all()


def test_whole_tiles_are_filled(golden, chip):
    keys = cache(chip)
    with poisoned(5.0):
        golden.experimental.paged_fill_cache(keys, chunk(chip, 40), ints(chip, [4, 1, 0]))
    assert torch.equal(keys.shards[0][4], chunk(chip, 40).shards[0][0, :, :32])
    assert (keys.shards[0][1, :, 8:] == 5.0).all()
    assert (keys.shards[0][[0, 2, 3, 5]] == 9.0).all()


def test_heads_are_cut_from_rows_and_joined_again(golden, chip):
    for length, width in ((64, 5 * 32), (96, 4 * 64)):
        fused = on(chip, values(1, 1, length, width))
        heads = {160: (3, 1), 256: (2, 1)}[width]
        q, k, v = golden.experimental.nlp_create_qkv_heads(
            fused, num_heads=heads[0], num_kv_heads=heads[1], transpose_k_heads=False
        )
        joined = [golden.experimental.nlp_concat_heads(part).shards[0] for part in (q, k, v)]
        assert torch.equal(torch.cat(joined, dim=-1), fused.shards[0])
        rows = golden.slice(fused, (0, 0, 0, 0), (1, 1, 5, width))
        of_rows = golden.experimental.nlp_create_qkv_heads_decode(
            rows, num_heads=heads[0], num_kv_heads=heads[1]
        )
        for of_row, of_chunk in zip(of_rows, (q, k, v), strict=True):
            assert torch.equal(of_row.shards[0][0], of_chunk.shards[0][0, :, :5].transpose(0, 1))


# ---- the same calls on the mock device


def three_calls(lane):
    ids = list(range(3, 163))
    blocks = [4, 1, 7, 3, 6]
    lane.prefill(ids, 0, 64, blocks)
    lane.prefill(ids, 64, 150, blocks)
    lane.decode({1: (9, 150, blocks)})


def calls_of(library):
    """Calls of ops, without what only moves data between the host and the device."""
    return [call for call in library.calls if call.name not in TRANSFERS]


def assert_same_calls(golden, noting):
    ours, theirs = calls_of(golden), calls_of(noting)
    different = [(our, their) for our, their in zip(ours, theirs, strict=False) if our != their]
    for our, their in different[:5]:
        print(f"ours   {our}\ntheirs {their}")
    assert not different
    assert len(ours) == len(theirs) > 100


@pytest.mark.parametrize(
    ("case", "num_chips", "optimizations"),
    [
        pytest.param("qwen3-64", 1, "performance", marks=pytest.mark.board("N150")),
        pytest.param("llama-64-biases", 2, "accuracy", marks=pytest.mark.board("N300")),
        pytest.param("qwen2-32", 2, "performance", marks=pytest.mark.board("N300")),
    ],
)
def test_ops_take_and_give_what_those_of_ttnn_do(open_mock_mesh, case, num_chips, optimizations):
    folder = model_folder(case)
    with golden_mesh(num_chips, optimizations) as (mesh, golden):
        (device,) = mesh.lanes(1)
        three_calls(Lane(golden, device, folder, optimizations, mesh))
    mock = open_mock_mesh(trace="none", weight_cache=str(root() / "mock weights"))
    with installed(Noting()) as noting:
        (device,) = mock.lanes(1)
        three_calls(Lane(noting, device, folder, optimizations, mock))
    assert_same_calls(golden, noting)


def sampled_calls(mesh, folder):
    """A prompt whose token is drawn on the device, and two decode steps, the second steady."""
    calls = Calls(load_hf_config(folder), mesh)
    drawing = {"temperature": 0.7, "top_k": 9, "seed": 4}
    calls.prefill([2], ends=[40], sampling_params=params(1, **drawing), enable_trace=False)
    for reload in (True, False):
        calls.decode(
            [-1, -1, 40, -1],
            sampling_params=params(4, **drawing),
            reload_inputs=reload,
            reload_sampling_params=reload,
            enable_trace=False,
        )


@pytest.mark.board("N300")
def test_a_generator_calls_the_same_ops_on_golden_and_on_mock_chips(open_mock_mesh):
    folder = model_folder("mistral-32")
    with golden_mesh(2) as (mesh, golden):
        sampled_calls(mesh, folder)
    with installed(Noting()) as noting:
        mock = open_mock_mesh(trace="none", weight_cache=str(root() / "mock weights"))
        sampled_calls(mock, folder)
    assert_same_calls(golden, noting)
