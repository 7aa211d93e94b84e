"""Layouts: sizes, refusals, and hashes that differ when anything does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import InvalidLayoutError
from kv_transfer.layout import DTYPE_BYTES, KVLayout

layouts = st.builds(
    KVLayout,
    num_layers=st.integers(1, 4),
    num_kv_heads=st.integers(1, 4),
    head_dim=st.integers(1, 64),
    block_size=st.integers(1, 4).map(lambda n: 32 * n),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    rope=st.sampled_from(["hf", "meta"]),
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
def test_rows_shape_is_the_block(layout: KVLayout) -> None:
    assert np.prod(layout.rows_shape) == layout.bytes_per_block


@given(layouts, layouts)
def test_hashes_are_equal_only_for_equal_layouts(one: KVLayout, other: KVLayout) -> None:
    assert (one.layout_hash() == other.layout_hash()) == (one == other)
    assert len(bytes.fromhex(one.layout_hash())) == 16


@given(layouts, st.integers(0, 10_000))
def test_blocks_are_as_few_as_hold_the_tokens(layout: KVLayout, num_tokens: int) -> None:
    num_blocks = layout.num_blocks(num_tokens)
    assert (num_blocks - 1) * layout.block_size < num_tokens <= num_blocks * layout.block_size


def test_a_block_size_off_the_tile_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidLayoutError, match="block_size 48 is no multiple of 32"):
        make(block_size=48)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"head_dim": -1}, "head_dim"),
        ({"dtype": "int4"}, "int4"),
        ({"rope": "llama"}, "llama"),
    ],
)
def test_nonsense_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidLayoutError, match=words):
        make(**changes)
