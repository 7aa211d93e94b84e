"""Each kernel gives what its formula in PyTorch gives, for every instruction set."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from replicas.generators.layer_specs import DeltaConfig
from replicas.generators.torch import delta, native
from replicas.generators.torch.attention import BatchedAttention
from replicas.generators.torch.backends import make_attention
from replicas.generators.torch.delta import DeltaRule
from replicas.generators.torch.fast_attention import FastAttention
from replicas.generators.torch.kernels import PLAIN_SCORING, Scoring, Tiles, kernels_for
from replicas.generators.torch.native import ATTENTION_TILE, NO_FEATURES, Feature
from replicas.generators.torch.plain import PlainKernels, TokenPlaces
from replicas.generators.torch.states import DeltaTokens, StatePlaces
from replicas.generators.torch.team import in_team

DTYPES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2.0**-7}
BLOCK = 16
# Without tiles, without AVX-512, and without any of a processor's features.
MASKS = [NO_FEATURES, Feature.AMX, Feature.AVX512 | Feature.AMX, native.ALL_FEATURES]

dtypes = st.sampled_from(list(DTYPES))
masks = st.sampled_from(MASKS)
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


@given(dtypes, masks, st.integers(1, 40), st.integers(1, 70), st.sampled_from([0.0, 1.0]), seeds)
def test_norm(dtype, mask, num_rows, size, offset, seed):
    make = draw(seed)
    x, weight = make(num_rows, size, dtype=dtype), make(size, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    normed = functional.rms_norm(x.to(wide), (size,), eps=1e-5)
    # Gemma adds 1 to the weight, and rounds behind it.
    wanted = normed * (weight.to(wide) + offset) if offset else normed.to(dtype) * weight
    found = kernels_for(dtype, mask).rms_norm(x, weight, 1e-5, offset)
    assert found.dtype == dtype
    size = wanted.abs().amax() if dtype is torch.bfloat16 else 1
    assert_near(found / size, wanted / size, dtype)


@given(
    dtypes, masks, st.integers(1, 6), st.sampled_from([1, 3]), st.sampled_from([2, 16, 34]), seeds
)  # fmt: skip
def test_rotation_goes_by_position_and_keys_and_values_go_to_their_blocks(
    dtype, mask, num_tokens, num_kv_heads, head_dim, seed
):
    make, rng = draw(seed), np.random.default_rng(seed)
    num_heads, has_norm = 2 * num_kv_heads, bool(seed % 2)
    # All channels of a head rotate, or the first ones alone.
    turning = head_dim if seed % 3 else head_dim // 4 * 2
    heads = make(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    norm = make(num_heads + num_kv_heads, head_dim, dtype=dtype) if has_norm else None
    cos, sin = make(9, turning, dtype=dtype), make(9, turning, dtype=dtype)
    positions = torch.from_numpy(rng.integers(0, 9, num_tokens))
    kv_positions = torch.from_numpy(rng.permutation(3 * BLOCK)[:num_tokens].copy())
    planes = tuple(make(3, num_kv_heads, BLOCK, head_dim, dtype=dtype) for _ in range(2))
    before, given_heads = [plane.clone() for plane in planes], heads.clone()
    places = TokenPlaces(cos, sin, positions, kv_positions)
    kernels_for(dtype, mask).rotate_and_store(heads, places, planes, norm, 1e-5)

    plain = given_heads[:, : num_heads + num_kv_heads].to(torch.float64)
    if norm is not None:
        plain = functional.rms_norm(plain, (head_dim,), eps=1e-5).to(dtype) * norm
        plain = plain.to(torch.float64)
    cosines, sines = cos[positions, None].double(), sin[positions, None].double()
    rotated = plain[..., :turning]
    rotated = rotated * cosines + rotated.roll(turning // 2, -1) * sines
    turned = torch.cat([rotated, plain[..., turning:]], dim=-1)
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


# KV heads, query heads of each, width of a key and of a value. In the last two, values are the
# first part of the keys, as in latent attention.
HEADS = [
    (1, 1, 8, 8), (2, 2, 32, 32), (1, 5, 20, 20), (3, 1, 80, 80), (1, 4, 3, 3), (2, 3, 64, 96),
    (1, 9, 48, 32), (1, 40, 72, 64),
]  # fmt: skip
SCORINGS = st.builds(
    Scoring,
    scale=st.sampled_from([None, 0.2]),
    window=st.sampled_from([None, 1, 7, 40]),
    soft_cap=st.sampled_from([None, 1.5]),
)


def poisoned(planes, tables, lengths, window, counts):
    """NaN wherever no token may look: behind sequences, before windows, in the null block."""
    block = planes[0].shape[2]
    for plane in planes:
        plane[0] = torch.nan
        for table, length, count in zip(tables, lengths, counts, strict=True):
            plane[table[-(-length // block) :]] = torch.nan
            if length % block:
                plane[table[length // block], :, length % block :] = torch.nan
            before = 0 if window is None else max(length - count + 1 - window, 0)
            plane[table[: before // block]] = torch.nan
            plane[table[before // block], :, : before % block] = torch.nan


def expected(q, k, v, first, scoring, sinks):
    """The formula for the query heads of one token over the keys that it sees, in float64."""
    num_kv_heads = len(k)
    queries = q.double().view(num_kv_heads, -1, q.shape[-1])
    scale = q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    scores = queries @ k[:, first:].transpose(1, 2) * scale
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * (scores / scoring.soft_cap).tanh()
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(num_kv_heads, -1, 1)], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[1] - first]
    return (weights @ v[:, first:]).reshape(len(q), -1)


@given(
    dtypes,
    masks,
    st.sampled_from(HEADS),
    st.lists(st.integers(1, 64), min_size=1, max_size=5),
    st.sampled_from([8, 16, 24, 200]),
    st.sampled_from([1, ATTENTION_TILE]),
    SCORINGS,
    seeds,
)
def test_tokens_attend_to_what_they_see_and_to_nothing_else(
    dtype, mask, heads, lengths, block, size, scoring, seed
):
    make, rng = draw(seed), np.random.default_rng(seed)
    num_kv_heads, share, key_width, value_width = heads
    num_requests, num_heads = len(lengths), num_kv_heads * share
    lengths = np.array(lengths) * (5 if block == 200 else 1)
    keys = make(41, num_kv_heads, block, key_width, dtype=dtype)
    values = (
        keys[..., :value_width]
        if value_width < key_width
        else make(41, num_kv_heads, block, value_width, dtype=dtype)
    )
    sinks = make(num_heads, dtype=dtype) if seed % 2 else None
    tables = rng.permutation(40)[: 8 * num_requests].reshape(num_requests, 8) + 1
    k, v = (plane[tables].transpose(1, 2).flatten(2, 3).double() for plane in (keys, values))
    counts = np.array([int(rng.integers(1, min(size, length) + 1)) for length in lengths])
    poisoned((keys, values), tables, lengths, scoring.window, counts)
    # Other tokens lie between, and queries are part of a wider tensor.
    tokens = rng.permutation(2 * num_requests)[:num_requests].astype(np.int64) * size
    num_tokens = 2 * num_requests * size
    q = make(num_tokens, num_heads + 3, key_width, dtype=dtype)[:, :num_heads]
    out = torch.zeros(num_tokens, num_heads, value_width, dtype=dtype)
    order = rng.permutation(num_requests)
    tiles = Tiles(size, tokens, counts, lengths, np.argsort(order), tables[order].astype(np.int64))
    kernels_for(dtype, mask).attend(q, tiles, (keys, values), out, replace(scoring, sinks=sinks))

    written = []
    for row, (first, count, length) in enumerate(zip(tokens, counts, lengths, strict=True)):
        for token in range(first, first + count):
            seen = length - (first + count - 1 - token)
            begin = 0 if scoring.window is None else max(seen - scoring.window, 0)
            wanted = expected(q[token], k[row, :, :seen], v[row, :, :seen], begin, scoring, sinks)
            assert_near(out[token], wanted, dtype)
            written.append(token)
    assert not out[np.setdiff1d(np.arange(num_tokens), written)].any()


@given(
    dtypes, masks, st.sampled_from(HEADS[:6]), st.integers(1, 150), st.sampled_from([16, 24]),
    st.sampled_from([None, 9]), seeds,
)  # fmt: skip
def test_a_token_has_the_same_bits_alone_and_beside_others(
    dtype, mask, heads, length, block, window, seed
):
    make = draw(seed)
    num_kv_heads, share, key_width, value_width = heads
    keys = make(12, num_kv_heads, block, key_width, dtype=dtype)
    values = make(12, num_kv_heads, block, value_width, dtype=dtype)
    count = min(ATTENTION_TILE, length)
    q = make(count, num_kv_heads * share, key_width, dtype=dtype)
    table = np.random.default_rng(seed).permutation(12)[None, :10].astype(np.int64)
    kernels, scoring = kernels_for(dtype, mask), Scoring(window=window)

    def attend(queries, size, lengths):
        out = queries.new_empty(*queries.shape[:2], value_width)
        num = len(lengths)
        which, counts = np.arange(num), np.full(num, len(queries) // num)
        tiles = Tiles(size, which, counts, np.array(lengths), np.zeros_like(which), table)
        kernels.attend(queries, tiles, (keys, values), out, scoring)
        return out

    together = attend(q, ATTENTION_TILE, [length])
    alone = attend(q, 1, [length - count + 1 + i for i in range(count)])
    assert torch.equal(together, alone)


@given(
    dtypes, masks, st.sampled_from(HEADS), st.integers(ATTENTION_TILE, 100),
    st.sampled_from([None, 9]), st.sampled_from([torch.nan, torch.inf]), seeds,
)  # fmt: skip
def test_a_number_that_is_none_reaches_the_tokens_alone_that_see_it(
    dtype, mask, heads, length, window, wrong, seed
):
    make, rng = draw(seed), np.random.default_rng(seed)
    num_kv_heads, share, key_width, value_width = heads
    planes = [make(8, num_kv_heads, BLOCK, size, dtype=dtype) for size in (key_width, value_width)]
    q = make(ATTENTION_TILE, num_kv_heads * share, key_width, dtype=dtype)
    table = rng.permutation(8)[None].astype(np.int64)
    arrays = (np.array([number]) for number in (0, ATTENTION_TILE, length, 0))
    tile = Tiles(ATTENTION_TILE, *arrays, table)

    def attend():
        out = q.new_empty(*q.shape[:2], value_width)
        kernels_for(dtype, mask).attend(q, tile, tuple(planes), out, Scoring(window=window))
        return out

    clean = attend()
    place = length - 1 - int(rng.integers(min(length, 16)))
    planes[1][table[0, place // BLOCK], :, place % BLOCK] = wrong
    found = attend()
    positions = np.arange(length - ATTENTION_TILE, length)
    sees = (positions >= place) & (positions < place + (window or length))
    assert torch.equal(found[~sees], clean[~sees])
    assert not found[sees].isfinite().any()


def one_tile(length, block):
    """The first token of a pass, alone."""
    return Tiles(1, *(np.array([number]) for number in (0, 1, length, 0)), np.array([[block]]))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e4])
def test_great_scores_leave_one_token(dtype, mask, scale):
    k_plane = torch.zeros(2, 1, BLOCK, 8, dtype=dtype)
    k_plane[1, 0, 5] = scale
    v_plane = torch.arange(2 * BLOCK * 8).view(2, 1, BLOCK, 8).to(dtype)
    q = torch.full((1, 1, 8), scale, dtype=dtype)
    out = torch.empty_like(q)
    kernels_for(dtype, mask).attend(q, one_tile(BLOCK, 1), (k_plane, v_plane), out)
    if scale > 1:
        assert torch.equal(out[0, 0], v_plane[1, 0, 5])
    assert out.isfinite().all()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_number_that_is_none_stays_so(dtype, mask):
    ours = kernels_for(dtype, mask)
    x = torch.ones(1, 8, dtype=dtype)
    x[0, 3] = torch.nan
    ones = torch.ones(8, dtype=dtype)
    assert ours.rms_norm(x, ones, 1e-5).isnan().all()
    planes = torch.ones(1, 1, BLOCK, 8, dtype=dtype), torch.ones(1, 1, BLOCK, 8, dtype=dtype)
    out = torch.zeros(1, 1, 8, dtype=dtype)
    ours.attend(x.view(1, 1, 8), one_tile(3, 0), planes, out)
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


PLANE = torch.zeros(3, 2, BLOCK, 8)
WRONG_CALLS = {
    "heads that no KV head has": ({"q": torch.zeros(2, 3, 8)}, ValueError),
    "another key width": ({"q": torch.zeros(2, 4, 16)}, ValueError),
    "another value width": ({"out": torch.zeros(2, 4, 16)}, ValueError),
    "planes that differ": ({"values": torch.zeros(2, 2, BLOCK, 8)}, ValueError),
    "a plane that is turned": ({"values": PLANE.transpose(1, 2).contiguous().transpose(1, 2)},
                               ValueError),
    "a dtype": ({"q": torch.zeros(2, 4, 8).double()}, ValueError),
    "sinks of other heads": ({"scoring": Scoring(sinks=torch.zeros(3))}, ValueError),
    "a token behind the last": ({"tokens": 2}, ValueError),
    "a negative token": ({"tokens": -1}, ValueError),
    "more tokens than a tile has": ({"counts": 2}, ValueError),
    "no token": ({"counts": 0}, ValueError),
    "a length behind the table": ({"lengths": 2 * BLOCK + 1}, ValueError),
    "no key": ({"lengths": 0}, ValueError),
    "a request without a table": ({"requests": 1}, ValueError),
    "a block behind the last": ({"tables": [[0, 3]], "lengths": BLOCK + 1}, ValueError),
    "a negative block": ({"tables": [[-1, 0]]}, ValueError),
    "a tile of another size": ({"size": 3}, ValueError),
    "a negative window": ({"scoring": Scoring(window=-1)}, ValueError),
    "too wide a key": (
        {"q": torch.zeros(2, 4, 1032), "out": torch.zeros(2, 4, 1032),
         "keys": torch.zeros(3, 2, 1, 1032), "values": torch.zeros(3, 2, 1, 1032)},
        native.UnsupportedCallError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_shape_or_index_is_an_error(name):
    changes, error = WRONG_CALLS[name]
    given = {
        "q": torch.zeros(2, 4, 8), "out": torch.zeros(2, 4, 8), "keys": PLANE, "values": PLANE,
        "size": 1, "tokens": 1, "counts": 1, "lengths": 1, "requests": 0, "tables": [[0, 1]],
        "scoring": PLAIN_SCORING, **changes,
    }  # fmt: skip
    arrays = [np.array([given[key]]) for key in ("tokens", "counts", "lengths", "requests")]
    tiles = Tiles(given["size"], *arrays, np.array(given["tables"]))
    with pytest.raises(error):
        kernels_for(torch.float32).attend(
            given["q"], tiles, (given["keys"], given["values"]), given["out"], given["scoring"]
        )


@given(
    st.sampled_from([torch.float32, torch.float64]), masks,
    st.sampled_from([(1, 1, 3, 5), (2, 2, 12, 20), (2, 3, 32, 16), (1, 4, 33, 65)]),
    st.sampled_from([2, 4]), st.integers(1, 6), seeds,
)  # fmt: skip
def test_tokens_of_a_delta_rule_are_those_of_plain_operations(
    dtype, mask, heads, kernel, num, seed
):
    key_heads, share, key_dim, value_dim = heads
    sizes = DeltaConfig(key_heads, key_heads * share, key_dim, value_dim, kernel)
    make, dice = draw(seed), np.random.default_rng(seed)
    # Of each pair of blocks one is written, and either read: a checkpoint's, or the written one.
    written = 2 * torch.from_numpy(dice.permutation(num))
    is_first = torch.from_numpy(dice.random(num) < 0.3)
    read = written + torch.from_numpy(dice.integers(0, 2, num))
    singles = torch.from_numpy(dice.permutation(num + 2)[:num])
    places = StatePlaces(singles, read, written, is_first, [])
    states = make(2 * num, 1, 1, sizes.state, dtype=dtype)
    states[read[is_first]] = torch.nan
    mixed = make(num + 2, sizes.channels + 3, dtype=dtype)[:, : sizes.channels]
    by_head = num + 2, sizes.value_heads
    rates, decays = make(*by_head, dtype=dtype).sigmoid(), -make(*by_head, dtype=dtype).exp()
    convolution = make(kernel, sizes.channels, dtype=dtype)
    spec = SimpleNamespace(sizes=sizes)
    rule = DeltaRule(spec, None, convolution, None, None, None, None)
    found, wide = states.clone(), states.double()
    wanted = replace(rule, convolution=convolution.double())._singles(
        delta._States(wide, sizes), places, mixed.double(), rates.double(), decays.double()
    )
    out = torch.full((*by_head, value_dim), 7.0, dtype=dtype)
    tokens = DeltaTokens(mixed, rates, decays, convolution, out)
    kernels_for(dtype, mask).step_delta(sizes, places, found, tokens)
    near = {torch.float32: 1e-4, torch.float64: 1e-11}[dtype]
    torch.testing.assert_close(out[singles].double(), wanted, atol=near, rtol=near)
    torch.testing.assert_close(found.double(), wide, atol=near, rtol=near, equal_nan=True)
    others = [i for i in range(num + 2) if i not in singles]
    assert (out[others] == 7.0).all()


def test_positions_outside_of_their_arrays_are_an_error():
    places = TokenPlaces(
        torch.zeros(9, 8), torch.zeros(9, 8), torch.tensor([8]), torch.tensor([47])
    )
    given = torch.zeros(1, 6, 8), places, (PLANE.clone(), PLANE.clone()), None, 1e-5
    kernels_for(torch.float32).rotate_and_store(*given)
    for wrong in ({"positions": torch.tensor([9])}, {"kv_positions": torch.tensor([48])}):
        with pytest.raises(ValueError, match="index outside"):
            kernels_for(torch.float32).rotate_and_store(
                given[0], replace(places, **wrong), *given[2:]
            )


def test_without_the_library_plain_operations_are_taken_with_one_warning(monkeypatch, caplog):
    def refuse(*_arguments):
        raise native.NativeError("it was not built")

    assert isinstance(make_attention("fast", torch.float64), FastAttention)
    kernels_for.cache_clear()
    monkeypatch.setattr(native, "kernel_set", refuse)
    assert isinstance(make_attention("fast", torch.float64), BatchedAttention)
    [warning] = caplog.records
    assert "it was not built" in warning.getMessage()
