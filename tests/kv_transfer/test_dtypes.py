"""Conversions of KV rows: exact where they can be, rounded once where not, refused otherwise."""

from __future__ import annotations

import itertools
import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.dtypes import acceptable_layouts, convert_rows, is_lossless
from kv_transfer.errors import InvalidLayoutError
from kv_transfer.layout import BFLOAT8_B, KVLayout
from tests.kv_transfer.bfloat8_b_golden import PACKED, READ_BACK, digest, digest_of_numbers, numbers

ARRAYS = ["float64", "float32", "float16", "bfloat16"]
SPECIAL = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    2.0**-149,
    -(2.0**-133),
    2.0**-126,
    3e38,
    65504.0,
    65520.0,
    1 + 2**-8,
    1 + 3 * 2**-8,
    -1 - 2**-8,
]


def layout_of(dtype, **changes):
    values = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 32, "block_size": 32, "num_planes": 1}
    return KVLayout(**{**values, **changes}, dtype=dtype, rope="hf", model_fingerprint="m")


def convert(data, source, target, **changes):
    return convert_rows(data, layout_of(source, **changes), layout_of(target, **changes))


def random_rows(dtype, num_rows=3, seed=0, **changes):
    """Every bit pattern is as likely: NaNs, infinities and tiny numbers among them."""
    shape = (num_rows, layout_of(dtype, **changes).row_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def rows_of(values):
    """Return rows of one piece and head from (n * 32, head_dim) floats."""
    values = np.ascontiguousarray(values)
    return values.reshape(len(values) // 32, -1).view(np.uint8)


def floats(data, dtype, **changes):
    """Return rows as float64, flat, with their NaNs."""
    if dtype != "float64":
        data = convert(data, dtype, "float32", **changes)
    values = data.view(np.float64 if dtype == "float64" else np.float32).ravel()
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return values.astype(np.float64)


# --- plain floats --------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [*itertools.permutations(ARRAYS, 2)])
def test_plain_dtypes_convert_as_torch_does(source, target):
    # torch rounds float64 to bfloat16 twice; see the test below.
    narrow = "float32" if (source, target) == ("float64", "bfloat16") else source
    special = np.resize(np.array([*SPECIAL, math.nan]), 32 * 32)
    rng = np.random.default_rng(0)
    values = rng.standard_normal((6, 1024)) * 2.0 ** rng.integers(-30, 30, (6, 1024))
    values = torch.from_numpy(np.vstack([values, special]))
    sent = values.to(getattr(torch, narrow)).to(getattr(torch, source))
    wanted = sent.to(getattr(torch, target))
    got = convert(sent.view(torch.uint8).numpy(), source, target)
    numbers_there = torch.from_numpy(got).view(getattr(torch, target))
    torch.testing.assert_close(numbers_there, wanted, rtol=0, atol=0, equal_nan=True)
    number = ~wanted.isnan()
    assert torch.equal(torch.signbit(numbers_there)[number], torch.signbit(wanted)[number])


def test_float64_is_rounded_to_bfloat16_once():
    # float32 would take the first for a tie, which is even below; the second for one above.
    values = [
        1 + 2**-8 + 2**-40,
        1 + 3 * 2**-8 - 2**-40,
        -(1 + 2**-8 + 2**-40),
        1e300,
        -1e300,
        1e-300,
    ]
    wanted = [1 + 2 * 2**-8, 1 + 2 * 2**-8, -(1 + 2 * 2**-8), math.inf, -math.inf, 0.0]
    sent = np.resize(np.array(values), (32, 32))
    got = floats(convert(rows_of(sent), "float64", "bfloat16"), "bfloat16")
    assert np.array_equal(got, np.resize(wanted, 1024))


@pytest.mark.parametrize("bits", [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000])
@pytest.mark.parametrize("target", ["bfloat16", "float16", "float64", BFLOAT8_B])
def test_a_nan_stays_one(bits, target):
    sent = np.full((32, 32), bits, np.uint32).view(np.float32)
    got = convert(rows_of(sent), "float32", target)
    assert np.isnan(floats(got, target)).all()


# --- bfloat8_b -----------------------------------------------------------------------------------


def slow_pack(values):
    """One unit of bfloat8_b from (32, head_dim) finite float32, number by number."""
    unit = b""
    for left in range(0, values.shape[1], 32):
        exponents, elements = bytearray(), bytearray()
        for down, right in itertools.product((0, 16), (0, 16)):
            for row in range(16):
                sixteen = [float(v) for v in values[down + row, left + right : left + right + 16]]
                biggest = max(abs(v) for v in sixteen)
                shared = math.frexp(biggest)[1] + 126 if biggest >= 2.0**-126 else 0
                exponents.append(shared)
                for value in sixteen:
                    is_tiny = abs(value) < 2.0**-126
                    cut = 0 if is_tiny else math.floor(math.ldexp(abs(value), 150 - shared))
                    size = min(round(cut / 2**17), 127)
                    elements.append(size | (128 if size and value < 0 else 0))
        unit += exponents + elements
    return unit


def test_packs_and_unpacks_as_the_device_library_does():
    packed = convert(rows_of(numbers()), "float32", BFLOAT8_B, head_dim=64)
    assert digest(packed.tobytes()) == PACKED
    got = convert(packed, BFLOAT8_B, "float32", head_dim=64)
    assert digest_of_numbers(got.view(np.float32)) == READ_BACK


@pytest.mark.parametrize("exponent", [0, 1, 6, 7, 8, 127, 254, 255])
def test_every_element_stands_for_what_the_definition_says(exponent):
    elements = np.resize(np.arange(256, dtype=np.uint8), 1024)
    tile = np.concatenate([np.full(64, exponent, np.uint8), elements])
    got = floats(tile[None], BFLOAT8_B).reshape(2, 16, 2, 16).transpose(0, 2, 1, 3).ravel()
    for element, value in zip(elements.tolist(), got.tolist(), strict=True):
        wanted = math.ldexp(element & 127, exponent - 133)
        if exponent == 255 and element & 127 >= 64:
            wanted = math.inf if element & 127 == 64 else math.nan
        wanted = 0.0 if wanted < 2.0**-126 else wanted
        wanted = -wanted if element >> 7 else wanted
        assert value == wanted or (math.isnan(value) and math.isnan(wanted)), element


@given(st.integers(0, 2**32), st.integers(0, 254), st.integers(0, 16))
def test_packs_as_the_definition_says(seed, low, num_extra_bits):
    rng = np.random.default_rng(seed)
    high = min(low + 12, 254)
    bits = rng.integers(0, 2**32, (32, 32), np.uint32)
    bits = bits & 0x807FFFFF & (0xFFFF0000 | (1 << num_extra_bits) - 1)
    values = (bits | rng.integers(low, high + 1, bits.shape, np.uint32) << 23).view(np.float32)
    got = convert(rows_of(values), "float32", BFLOAT8_B)
    assert got.tobytes() == slow_pack(values)


@pytest.mark.parametrize("wide", ["bfloat16", "float32"])
def test_rows_of_special_numbers_become_what_they_can(wide):
    values = np.zeros((32, 32), np.float32)
    values[1] = -0.0
    values[2] = 2.0**-130
    values[3, :3] = [math.inf, 1.0, 3e38]
    values[4, 20] = -math.inf
    values[5, 7] = math.nan
    values[6] = -1.0
    rows = convert(rows_of(values), "float32", wide)
    got = floats(convert(rows, wide, BFLOAT8_B), BFLOAT8_B).reshape(32, 32)
    wanted = values.astype(np.float64)
    wanted[1:3] = 0.0
    # Beside an infinity there is room for the largest numbers only.
    wanted[3, 1:3] = [0.0, 56 * 2.0**122]
    assert np.array_equal(got, wanted, equal_nan=True)
    assert not np.signbit(got[:3]).any()


# --- rows, layouts and refusals ------------------------------------------------------------------


@pytest.mark.parametrize("target", ["float64", BFLOAT8_B])
def test_units_keep_their_places(target):
    shape = {"num_layers": 2, "num_kv_heads": 3, "num_planes": 2, "head_dim": 64, "block_size": 96}
    rows = random_rows("float32", 2, **shape)
    got = convert(rows, "float32", target, **shape)
    unit, unit_there = (layout_of(dtype, **shape).unit_bytes for dtype in ("float32", target))
    for one, other in zip(rows.reshape(-1, unit), got.reshape(-1, unit_there), strict=True):
        alone = convert(one[None], "float32", target, head_dim=64)
        assert np.array_equal(alone[0], other)


def test_rows_are_taken_read_only_and_as_they_lie_and_come_back_in_another_block_size():
    whole = random_rows("float32", 8)
    whole.flags.writeable = False
    odd = np.frombuffer(b"x" + whole.tobytes(), np.uint8, offset=1).reshape(whole.shape)[::2]
    target = layout_of("bfloat16", block_size=128)
    got = convert_rows(odd, layout_of("float32"), target)
    assert np.array_equal(got, convert(whole[::2].copy(), "float32", "bfloat16"))
    every_other = np.repeat(whole, 2, axis=1)[:, ::2]
    assert np.array_equal(convert_rows(every_other[::2], layout_of("float32"), target), got)
    assert convert_rows(whole, layout_of("float32"), layout_of("float32", block_size=64)) is whole
    assert convert(whole[:0], "float32", BFLOAT8_B).shape == (0, 1088)


@pytest.mark.parametrize("source", [*ARRAYS, BFLOAT8_B])
@pytest.mark.parametrize("target", [*ARRAYS, BFLOAT8_B])
def test_a_pair_is_declared_lossless_where_every_number_survives_and_refused_otherwise(
    source, target
):
    declared = source == target or not (
        BFLOAT8_B in {source, target} and {source, target} & {"float16", "float64"}
    )
    rows = random_rows(source, 4)
    if not declared:
        for call in (is_lossless, lambda *pair: convert(rows, *pair)):
            with pytest.raises(InvalidLayoutError, match=f"'{source}'.* to '{target}'"):
                call(source, target)
        return
    sent, got = floats(rows, source), floats(convert(rows, source, target), target)
    assert np.array_equal(sent, got, equal_nan=True) == is_lossless(source, target)


def test_layouts_that_differ_in_more_than_dtype_and_block_size_are_refused():
    rows = random_rows("float32")
    for changes in ({"rope": "meta"}, {"model_fingerprint": "n"}, {"num_kv_heads": 2}):
        target = msgspec.structs.replace(layout_of("bfloat16"), **changes)
        with pytest.raises(InvalidLayoutError, match="only the dtype may differ"):
            convert_rows(rows, layout_of("float32"), target)


@pytest.mark.parametrize("cut", [lambda r: r[:, 1:], lambda r: r[0], lambda r: r.view(np.int8)])
def test_rows_of_another_shape_are_refused(cut):
    with pytest.raises(ValueError, match="is needed"):
        convert(cut(random_rows("float32")), "float32", "bfloat16")


def test_an_engine_accepts_its_own_dtype_and_configured_ones_at_any_block_size():
    own = layout_of("bfloat16", block_size=64)
    layouts = acceptable_layouts(own, ("float32", BFLOAT8_B, "bfloat16"))
    assert len(layouts) == 3
    for dtype in ("bfloat16", "float32", BFLOAT8_B):
        theirs = layout_of(dtype, block_size=32)
        assert layouts[theirs.content_hash()] == msgspec.structs.replace(own, dtype=dtype)
    assert acceptable_layouts(own, ()) == {own.content_hash(): own}


@pytest.mark.parametrize(
    ("own", "dtype", "words"),
    [
        (layout_of("float64"), BFLOAT8_B, "'bfloat8_b'.* to 'float64'"),
        (layout_of("float32"), "int4", "'int4'"),
        (layout_of("float32", head_dim=16), BFLOAT8_B, "head_dim 16"),
    ],
)
def test_a_dtype_that_can_never_be_converted_is_refused_at_once(own, dtype, words):
    with pytest.raises(InvalidLayoutError, match=words):
        acceptable_layouts(own, ("float32", dtype))
