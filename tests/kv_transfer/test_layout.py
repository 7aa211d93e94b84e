"""Layouts: sizes, refusals, and hashes that differ when anything does."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import InvalidLayoutError
from kv_transfer.layout import (
    DTYPE_BYTES,
    GroupedLayout,
    KVLayout,
    RowLayout,
    group_rows,
    join_layouts,
)

layouts = st.builds(
    KVLayout,
    num_layers=st.integers(1, 4),
    num_kv_heads=st.integers(1, 4),
    head_dim=st.integers(1, 64),
    block_size=st.integers(1, 4).map(lambda n: 32 * n),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    rope=st.sampled_from(["hf", "meta"]),
    num_planes=st.sampled_from([1, 2]),
    window=st.none() | st.integers(1, 300),
    model_fingerprint=st.text(max_size=4),
)


def make(**changes: object) -> KVLayout:
    values = {
        "num_layers": 2,
        "num_kv_heads": 4,
        "head_dim": 32,
        "block_size": 64,
        "dtype": "bfloat16",
        "rope": "hf",
        "model_fingerprint": "m",
    }
    return KVLayout(**{**values, **changes})  # type: ignore[arg-type]


def test_block_bytes_cover_layers_planes_heads_rows_and_dims() -> None:
    assert make().bytes_per_block == 2 * 2 * 4 * 64 * 32 * 2


@given(layouts)
def test_a_block_is_its_rows_and_its_pieces(layout: KVLayout) -> None:
    assert layout.rows_per_block * layout.row_bytes == layout.bytes_per_block
    assert layout.num_pieces * layout.piece_bytes == layout.bytes_per_block
    assert layout.num_pieces * layout.num_kv_heads * layout.unit_bytes == layout.row_bytes


def test_a_latent_cache_has_one_plane() -> None:
    assert 2 * make(num_planes=1).row_bytes == make().row_bytes


def test_a_row_of_tiles_has_an_exponent_for_every_sixteen_elements() -> None:
    tiles = make(dtype="bfloat8_b", head_dim=64)
    assert tiles.unit_bytes == 32 * 64 + 32 * 64 // 16


@given(layouts, layouts, st.sampled_from(KVLayout.__struct_fields__))
def test_a_hash_changes_with_all_that_changes_a_row(
    one: KVLayout, other: KVLayout, field: str
) -> None:
    other = msgspec.structs.replace(one, **{field: getattr(other, field)})
    same_rows = one == other or field in {"block_size", "window"}
    assert (one.content_hash() == other.content_hash()) == same_rows
    assert len(bytes.fromhex(one.content_hash())) == 16


@pytest.mark.parametrize(
    ("window", "num_tokens", "first_row"),
    [(None, 999, 0), (100, 99, 0), (100, 131, 0), (100, 132, 1), (1, 65, 2), (1, 64, 1)],
)
def test_behind_a_prompt_the_window_of_its_last_token_is_needed(
    window: int | None, num_tokens: int, first_row: int
) -> None:
    assert make(window=window).first_row(num_tokens) == first_row


@given(layouts, st.integers(0, 500), st.integers(1, 500))
def test_the_blocks_that_cover_rows_hold_them_and_none_is_idle(
    layout: KVLayout, first_row: int, num_rows: int
) -> None:
    first, end = layout.covering(first_row, num_rows)
    per_block = layout.rows_per_block
    assert first * per_block <= first_row < (first + 1) * per_block
    assert (end - 1) * per_block < first_row + num_rows <= end * per_block


@given(layouts, st.integers(0, 10_000))
def test_blocks_are_as_few_as_hold_the_tokens(layout: KVLayout, num_tokens: int) -> None:
    num_blocks = layout.num_blocks(num_tokens)
    assert (num_blocks - 1) * layout.block_size < num_tokens <= num_blocks * layout.block_size
    num_rows = layout.num_rows(num_tokens)
    assert 32 * (num_rows - 1) < num_tokens <= 32 * num_rows


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": 0}, "window must be positive"),
        ({"num_layers": 0}, "num_layers"),
        ({"block_size": 48}, "block_size 48 is no multiple of 32"),
        ({"head_dim": -1}, "head_dim"),
        ({"dtype": "int4"}, "int4"),
        ({"rope": "llama"}, "llama"),
        ({"num_planes": 3}, "num_planes"),
        ({"dtype": "bfloat8_b", "head_dim": 48}, "head_dim 48"),
    ],
)
def test_nonsense_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidLayoutError, match=words):
        make(**changes)


several = st.lists(layouts, min_size=1, max_size=3).map(join_layouts)


@given(several, st.integers(1, 600), st.data())
def test_each_group_gets_every_row_that_it_needs_once_however_rows_are_cut(
    layout: RowLayout, num_tokens: int, data: st.DataObject
) -> None:
    first, end = layout.first_row(num_tokens), layout.num_rows(num_tokens)
    cuts = data.draw(st.sets(st.integers(first, end)))
    bounds = sorted({first, end} | cuts)
    chunks = [
        (layout.num_bytes(num_tokens, start, stop - start),
         group_rows(layout, num_tokens, start, stop - start))
        for start, stop in pairwise(bounds)
    ]  # fmt: skip
    for nth, group in enumerate(layout.groups):
        rows = [row for _, ranges in chunks for row in ranges[nth]]
        assert rows == list(range(group.first_row(num_tokens), end))
    for num_bytes, ranges in chunks:
        sizes = [len(x) * g.row_bytes for x, g in zip(ranges, layout.groups, strict=True)]
        assert num_bytes == sum(sizes)
        assert num_bytes <= max(map(len, ranges)) * layout.row_bytes


def test_the_hash_of_groups_changes_with_what_a_row_has() -> None:
    full, windowed = make(), make(num_layers=3, window=64)
    same = [make(block_size=32), make(num_layers=3, window=64, block_size=96)]
    others = [
        [windowed, full],
        [full, make(num_layers=3, window=65)],
        [full, make(num_layers=4, window=64)],
        [full],
    ]
    own = join_layouts([full, windowed]).content_hash()
    assert join_layouts(same).content_hash() == own
    assert own not in {join_layouts(other).content_hash() for other in others}
    assert join_layouts([full]).content_hash() == full.content_hash()


def test_another_dtype_is_that_of_every_group() -> None:
    layout = GroupedLayout((make(), make(window=64))).with_dtype("float32")
    assert [group.dtype for group in layout.groups] == ["float32", "float32"]
