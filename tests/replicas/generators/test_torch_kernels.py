"""Each compiled kernel gives what its formula in PyTorch gives, on one thread as on several."""

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba.core.caching import IndexDataCacheFile
from numba.core.errors import UnsupportedError
from torch.nn import functional

from replicas.generators.torch import compiled, kernels
from replicas.generators.torch.attention import BatchedAttention, make_attention
from replicas.generators.torch.compiled import TILE
from replicas.generators.torch.fast_attention import FastAttention
from replicas.generators.torch.kernels import (
    Kernel,
    Tiles,
    attention_for,
    kernels_for,
)
from replicas.generators.torch.plain import PlainKernels, TokenPlaces
from replicas.generators.torch.team import in_team

DTYPES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2.0**-7}
BLOCK = 16

dtypes = st.sampled_from(list(DTYPES))
seeds = st.integers(0, 2**20)


@pytest.fixture(params=[1, 5], ids="{} threads".format, autouse=True, scope="module")
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    assert in_team() is not None
    yield
    torch.set_num_threads(before)


def assert_near(found, wanted, dtype):
    limit = DTYPES[dtype] * (1 + wanted.double().abs())
    assert ((found.double() - wanted.double()).abs() <= limit).all()


def draw(seed):
    stream = torch.Generator().manual_seed(seed)
    return lambda *shape, dtype: torch.randn(*shape, generator=stream, dtype=torch.float64).to(
        dtype
    )


@given(dtypes, st.integers(1, 40), st.integers(1, 70), seeds)
def test_norm(dtype, num_rows, size, seed):
    make = draw(seed)
    x, weight = make(num_rows, size, dtype=dtype), make(size, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    wanted = functional.rms_norm(x.to(wide), (size,), eps=1e-5).to(dtype) * weight
    assert_near(kernels_for(dtype).rms_norm(x, weight, 1e-5), wanted, dtype)


@given(dtypes, st.integers(1, 6), st.sampled_from([1, 3]), st.sampled_from([2, 16, 34]), seeds)
def test_rotation_goes_by_position_and_keys_and_values_go_to_their_blocks(
    dtype, num_tokens, num_kv_heads, head_dim, seed
):
    make, rng = draw(seed), np.random.default_rng(seed)
    num_heads, has_norm = 2 * num_kv_heads, bool(seed % 2)
    heads = make(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    norm = make(num_heads + num_kv_heads, head_dim, dtype=dtype) if has_norm else None
    cos, sin = make(9, head_dim, dtype=dtype), make(9, head_dim, dtype=dtype)
    positions = torch.from_numpy(rng.integers(0, 9, num_tokens))
    kv_positions = torch.from_numpy(rng.permutation(3 * BLOCK)[:num_tokens].copy())
    planes = tuple(make(3, num_kv_heads, BLOCK, head_dim, dtype=dtype) for _ in range(2))
    before, given_heads = [plane.clone() for plane in planes], heads.clone()
    places = TokenPlaces(cos, sin, positions, kv_positions)
    kernels_for(dtype).rotate_and_store(heads, places, planes, norm, 1e-5)

    plain = given_heads[:, : num_heads + num_kv_heads].to(torch.float64)
    if norm is not None:
        plain = functional.rms_norm(plain, (head_dim,), eps=1e-5).to(dtype) * norm
        plain = plain.to(torch.float64)
    cosines, sines = cos[positions, None].double(), sin[positions, None].double()
    turned = plain * cosines + plain.roll(head_dim // 2, -1) * sines
    size = turned.abs().amax() if dtype is torch.bfloat16 else 1
    assert_near(heads[:, : num_heads + num_kv_heads] / size, (turned / size).to(dtype), dtype)
    values = heads[:, num_heads + num_kv_heads :]
    assert torch.equal(values, given_heads[:, num_heads + num_kv_heads :])
    blocks, offsets = kv_positions // BLOCK, kv_positions % BLOCK
    for plane, old, new in zip(
        planes, before, (heads[:, num_heads:-num_kv_heads], values), strict=True
    ):
        old[blocks, :, offsets] = new
        assert torch.equal(plane, old)


# Each is a kernel that is compiled: KV heads, query heads of each, and their size.
HEADS = [
    *(
        (torch.float32, heads)
        for heads in [(1, 1, 8), (2, 2, 32), (1, 5, 20), (3, 1, 80), (1, 4, 3)]
    ),
    *((torch.bfloat16, heads) for heads in [(1, 1, 8), (2, 2, 32), (1, 5, 20)]),
    *((torch.float64, heads) for heads in [(1, 1, 8), (1, 5, 20)]),
]


@given(
    st.sampled_from(HEADS),
    st.lists(st.integers(1, 64), min_size=1, max_size=5),
    st.sampled_from([8, 16, 24]),
    st.sampled_from([1, TILE]),
    seeds,
)
def test_tokens_attend_to_their_blocks_and_to_nothing_behind_them(
    dtype_and_heads, lengths, block, size, seed
):
    make, rng = draw(seed), np.random.default_rng(seed)
    dtype, (num_kv_heads, share, head_dim) = dtype_and_heads
    num_requests = len(lengths)
    k_plane, v_plane = (make(41, num_kv_heads, block, head_dim, dtype=dtype) for _ in range(2))
    tables = rng.permutation(40)[: 8 * num_requests].reshape(num_requests, 8) + 1
    k, v = (plane[tables].transpose(1, 2).flatten(2, 3).double() for plane in (k_plane, v_plane))
    k_plane[0] = v_plane[0] = torch.nan
    for table, length in zip(tables, lengths, strict=True):
        for plane in (k_plane, v_plane):
            plane[table[-(-length // block) :]] = torch.nan
            if length % block:
                plane[table[length // block], :, length % block :] = torch.nan
    num_heads = num_kv_heads * share
    # Other tokens lie between, and queries are part of a wider tensor.
    counts = np.array([int(rng.integers(1, min(size, length) + 1)) for length in lengths])
    tokens = rng.permutation(2 * num_requests)[:num_requests].astype(np.int64) * size
    num_tokens = 2 * num_requests * size
    q = make(num_tokens, num_heads + 3, head_dim, dtype=dtype)[:, :num_heads]
    out = torch.zeros(num_tokens, num_heads, head_dim, dtype=dtype)
    order = rng.permutation(num_requests)
    tiles = Tiles(
        size, tokens, counts, np.array(lengths), np.argsort(order), tables[order].astype(np.int64)
    )
    attention_for(dtype, head_dim, share)(q, tiles, (k_plane, v_plane), out)

    written = []
    for row, (first, count, length) in enumerate(zip(tokens, counts, lengths, strict=True)):
        for token in range(first, first + count):
            seen = length - (first + count - 1 - token)
            queries = q[token].double().view(num_kv_heads, share, head_dim)
            scores = queries @ k[row, :, :seen].transpose(1, 2) * head_dim**-0.5
            wanted = (scores.softmax(-1) @ v[row, :, :seen]).reshape(num_heads, head_dim)
            assert_near(out[token], wanted, dtype)
            written.append(token)
    assert not out[np.setdiff1d(np.arange(num_tokens), written)].any()


def one_tile(length, block):
    """The first token of a pass, alone."""
    return Tiles(
        1,
        *(np.array([number]) for number in (0, 1, length, 0)),
        np.array([[block]]),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e4])
def test_great_scores_leave_one_token(dtype, scale):
    k_plane = torch.zeros(2, 1, BLOCK, 8, dtype=dtype)
    k_plane[1, 0, 5] = scale
    v_plane = torch.arange(2 * BLOCK * 8).view(2, 1, BLOCK, 8).to(dtype)
    q = torch.full((1, 1, 8), scale, dtype=dtype)
    out = torch.empty_like(q)
    attention_for(dtype, 8, 1)(q, one_tile(BLOCK, 1), (k_plane, v_plane), out)
    if scale > 1:
        assert torch.equal(out[0, 0], v_plane[1, 0, 5])
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_that_is_none_stays_so(dtype):
    ours = kernels_for(dtype)
    x = torch.ones(1, 8, dtype=dtype)
    x[0, 3] = torch.nan
    ones = torch.ones(8, dtype=dtype)
    assert ours.rms_norm(x, ones, 1e-5).isnan().all()
    planes = torch.ones(1, 1, BLOCK, 8, dtype=dtype), torch.ones(1, 1, BLOCK, 8, dtype=dtype)
    out = torch.zeros(1, 1, 8, dtype=dtype)
    attention_for(dtype, 8, 1)(x.view(1, 1, 8), one_tile(3, 0), planes, out)
    assert out.isnan().all()


def test_concurrent_calls_do_not_share_buffers():
    x, weight = draw(0)(400, 96, dtype=torch.float32), torch.ones(96)
    wanted = PlainKernels().rms_norm(x, weight, 1e-5)

    def call(_):
        torch.set_num_threads(2)
        return kernels_for(torch.float32).rms_norm(x, weight, 1e-5)

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(call, range(200)):
            assert_near(found, wanted, torch.float32)


@pytest.mark.parametrize(
    "wrong",
    [
        {"x": torch.zeros(2, 8, dtype=torch.float64)},
        {"x": torch.zeros(8, 2).T},
        {"weight": torch.zeros(16)[::2]},
    ],
    ids=["dtype", "columns", "stride"],
)
def test_what_is_not_in_a_row_is_refused(wrong):
    given = {"x": torch.zeros(2, 8), "weight": torch.zeros(8), **wrong}
    with pytest.raises(ValueError, match="in a row"):
        kernels_for(torch.float32).rms_norm(**given, eps=1e-5)


@pytest.mark.parametrize("how", ["an empty index", "a full disk"])
def test_code_that_cannot_be_kept_is_compiled_all_the_same(monkeypatch, tmp_path, caplog, how):
    def refuse(*_arguments):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(kernels.numba.config, "CACHE_DIR", str(tmp_path))
    Kernel(compiled.rms_norm, torch.float32)
    [index] = tmp_path.rglob("*.nbi")
    assert not caplog.records
    if how == "an empty index":
        index.write_bytes(b"")
    else:
        index.unlink()
        monkeypatch.setattr(IndexDataCacheFile, "save", refuse)
    kernel = Kernel(compiled.rms_norm, torch.float32)
    monkeypatch.setattr(kernels_for(torch.float32), "_rms_norm", kernel)
    assert "is not cached" in caplog.text
    test_norm.hypothesis.inner_test(torch.float32, 3, 5, 0)


@pytest.mark.parametrize("part", kernels._SOURCES, ids=lambda part: part.__name__)
def test_code_of_another_source_is_not_taken_for_this(monkeypatch, tmp_path, part):
    before = kernels._version()
    changed = tmp_path / "changed.py"
    changed.write_bytes(Path(part.__file__).read_bytes() + b"#")
    monkeypatch.setattr(part, "__file__", str(changed))
    kernels._version.cache_clear()
    try:
        assert kernels._version() != before
    finally:
        kernels._version.cache_clear()


def test_code_for_one_dtype_is_in_files_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(kernels.numba.config, "CACHE_DIR", str(tmp_path))
    for dtype in DTYPES:
        Kernel(compiled.rms_norm, dtype)
    assert len(list(tmp_path.rglob("*.nbi"))) == len(DTYPES)


def test_code_of_other_versions_is_taken_away_when_it_is_old(monkeypatch, tmp_path):
    monkeypatch.setattr(kernels.numba.config, "CACHE_DIR", str(tmp_path))
    Kernel(compiled.rms_norm, torch.float32)
    [own] = tmp_path.rglob("*.nbi")
    month_ago_s = time.time() - kernels._STALE_S - 1.0
    names = {
        "old": own.name.replace(kernels._version(), "0" * 16),
        "new": own.name.replace(kernels._version(), "1" * 16),
        "foreign": "others.function-3.py311.nbi",
    }
    for name in names.values():
        own.with_name(name).touch()
    for name in (own.name, names["old"], names["foreign"]):
        os.utime(own.with_name(name), (month_ago_s, month_ago_s))
    kernels._prune.cache_clear()
    Kernel(compiled.rms_norm, torch.float32)
    left = {path.name for path in own.parent.glob("*.nbi")}
    assert left == {own.name, names["new"], names["foreign"]}


def test_where_numba_cannot_compile_plain_operations_are_taken_with_one_warning(
    monkeypatch, caplog
):
    def refuse(*_arguments, **_options):
        raise UnsupportedError("no such processor")

    assert isinstance(make_attention("fast", torch.float64, 8, 1), FastAttention)
    attention_for.cache_clear()
    monkeypatch.setattr(kernels, "cfunc", refuse)
    assert isinstance(make_attention("fast", torch.float64, 8, 1), BatchedAttention)
    [warning] = caplog.records
    assert "numba cannot compile attend: no such processor" in warning.getMessage()
    assert "Install the numba" in warning.getMessage()


def test_heads_of_another_shape_are_refused():
    planes = torch.zeros(1, 1, BLOCK, 32), torch.zeros(1, 1, BLOCK, 32)
    q = torch.zeros(1, 3, 32)
    with pytest.raises(ValueError, match=r"heads \(3, 32\) over 32, made for \(2, 32\)"):
        attention_for(torch.float32, 32, 2)(q, one_tile(1, 0), planes, q.clone())
