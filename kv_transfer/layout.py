"""Meaning of the bytes of a KV block, on which two engines agree before any of them move.

The unit of everything that moves is a *row*: 32 consecutive tokens of all layers, planes and KV
heads, in the order (layer, plane, KV head, unit). A *unit* is 32 tokens of one head in one plane of
one layer: for plain dtypes an array (32, head_dim), for ``bfloat8_b`` a row of hardware tiles. A
request's rows are numbered from its position 0. Block sizes and device shards never meet on the
wire: each end slices its own blocks into rows. A block's bytes in one (layer, plane), a *piece*,
run over (KV head, row of the block, unit).

Pure; owns no state.
"""

import hashlib
from collections.abc import Sequence

import msgspec

from kv_transfer.errors import InvalidLayoutError

ROW_TOKENS = 32
"""Tokens of a row of hardware tiles; block sizes are multiples of it, so any two can be mapped."""

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Element sizes of the dtypes whose units are plain arrays."""

BFLOAT8_B = "bfloat8_b"
"""Block floating point: 32x32 tiles in which 16 elements of a row share an exponent."""

BFLOAT8_B_TILE_BYTES = 1088
"""64 shared exponents and 1,024 signs with mantissas."""

_FORMAT = 2
"""Rises when the byte order of a row on the wire changes."""


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape and meaning of one engine's KV blocks.

    Attributes:
        num_layers: Layers whose KV a block holds.
        num_kv_heads: KV heads of one layer, over all device shards.
        head_dim: Elements of one token in one head; for a latent cache, of its vector.
        block_size: Tokens of a block; a multiple of 32.
        dtype: Element type, a key of ``DTYPE_BYTES`` or ``"bfloat8_b"``.
        rope: Element order in which K was rotated: ``"hf"`` (halves) or ``"meta"`` (pairs).
        model_fingerprint: Names the weights and their rope scaling; equal means equal KV.
        num_planes: 2 for K and V, 1 for a latent cache (MLA).
        window: Tokens that a position sees, its own included; None: all before it. An engine with
            a window does not keep the rows behind it.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    rope: str
    model_fingerprint: str
    num_planes: int = 2
    window: int | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InvalidLayoutError: When a count is not positive, the block size is no multiple of 32,
                dtype, rope order or number of planes is unknown, or the window is not positive.
        """
        if self.window is not None and self.window <= 0:
            raise InvalidLayoutError(f"window must be positive, got {self.window}")
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) <= 0:
                raise InvalidLayoutError(f"{name} must be positive, got {getattr(self, name)}")
        if self.block_size % ROW_TOKENS:
            raise InvalidLayoutError(
                f"block_size {self.block_size} is no multiple of {ROW_TOKENS}: KV transfer moves "
                f"whole {ROW_TOKENS}-token rows; set block_size to a multiple of {ROW_TOKENS}"
            )
        if self.dtype not in DTYPE_BYTES and self.dtype != BFLOAT8_B:
            known = sorted([*DTYPE_BYTES, BFLOAT8_B])
            raise InvalidLayoutError(f"KV dtype {self.dtype!r} is unknown: use one of {known}")
        if self.dtype == BFLOAT8_B and self.head_dim % ROW_TOKENS:
            raise InvalidLayoutError(
                f"head_dim {self.head_dim} is no multiple of {ROW_TOKENS}: {BFLOAT8_B} has "
                f"{ROW_TOKENS}x{ROW_TOKENS} tiles; use another KV dtype"
            )
        if self.rope not in {"hf", "meta"}:
            raise InvalidLayoutError(f"rope {self.rope!r} is neither 'hf' nor 'meta'")
        if self.num_planes not in {1, 2}:
            raise InvalidLayoutError(f"num_planes must be 1 or 2, got {self.num_planes}")

    @property
    def unit_bytes(self) -> int:
        """Bytes of 32 tokens of one head in one plane of one layer."""
        if self.dtype == BFLOAT8_B:
            return self.head_dim // ROW_TOKENS * BFLOAT8_B_TILE_BYTES
        return ROW_TOKENS * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def num_pieces(self) -> int:
        """Pieces of a block: one per layer and plane."""
        return self.num_layers * self.num_planes

    @property
    def row_bytes(self) -> int:
        """Bytes of 32 tokens over all layers, planes and heads."""
        return self.num_pieces * self.num_kv_heads * self.unit_bytes

    @property
    def groups(self) -> tuple["KVLayout"]:
        """This layout, as that of the only KV group; see ``GroupedLayout``."""
        return (self,)

    def num_bytes(self, num_tokens: int, first_row: int, num_rows: int) -> int:
        """Return the bytes of these rows of a request of ``num_tokens`` tokens."""
        return num_rows * self.row_bytes

    def with_dtype(self, dtype: str) -> "KVLayout":
        """Return this layout with another dtype."""
        return msgspec.structs.replace(self, dtype=dtype)

    @property
    def rows_per_block(self) -> int:
        """Rows of one block."""
        return self.block_size // ROW_TOKENS

    @property
    def piece_bytes(self) -> int:
        """Bytes of one block in one plane of one layer."""
        return self.num_kv_heads * self.rows_per_block * self.unit_bytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: every layer and plane."""
        return self.num_pieces * self.piece_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` tokens; the last one may be partly filled."""
        return -(-num_tokens // self.block_size)

    def num_rows(self, num_tokens: int) -> int:
        """Return how many rows hold ``num_tokens`` tokens; the last one may be partly filled."""
        return -(-num_tokens // ROW_TOKENS)

    def first_row(self, num_tokens: int) -> int:
        """Return the first row that an engine needs to continue behind so many tokens.

        It may compute the last of them again, and that token sees its whole window.
        """
        window = num_tokens if self.window is None else self.window
        return max(num_tokens - window, 0) // ROW_TOKENS

    def covering(self, first_row: int, num_rows: int) -> tuple[int, int]:
        """Return the blocks that hold these rows: a half-open range of positions in the table."""
        end_row = first_row + num_rows
        return first_row // self.rows_per_block, -(-end_row // self.rows_per_block)

    def content_hash(self) -> str:
        """Return 32 hexadecimal digits that are equal for equal rows.

        Neither the block size nor the window changes a row.
        """
        body = msgspec.to_builtins(self)
        del body["block_size"], body["window"]
        return hashlib.blake2b(msgspec.msgpack.encode((_FORMAT, body)), digest_size=16).hexdigest()


class GroupedLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layout of a transfer of several KV groups.

    A row has 32 tokens of each group that still needs them: a group with a window has no part in
    the rows behind the window of the request's last token. Consecutive rows travel as those of the
    first group, then those of the next.

    Attributes:
        groups: Layout of each KV group; they may differ in everything but the weights.
    """

    groups: tuple[KVLayout, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that all groups need, the largest there is."""
        return sum(layout.row_bytes for layout in self.groups)

    def num_bytes(self, num_tokens: int, first_row: int, num_rows: int) -> int:
        """Return the bytes of these rows of a request of ``num_tokens`` tokens."""
        parts = zip(self.groups, group_rows(self, num_tokens, first_row, num_rows), strict=True)
        return sum(len(rows) * layout.row_bytes for layout, rows in parts)

    def with_dtype(self, dtype: str) -> "GroupedLayout":
        """Return this layout with another dtype in each group."""
        return GroupedLayout(tuple(layout.with_dtype(dtype) for layout in self.groups))

    def num_rows(self, num_tokens: int) -> int:
        """Return how many rows hold ``num_tokens`` tokens; the last one may be partly filled."""
        return -(-num_tokens // ROW_TOKENS)

    def first_row(self, num_tokens: int) -> int:
        """Return the first row that any group needs; see ``KVLayout.first_row``."""
        return min(layout.first_row(num_tokens) for layout in self.groups)

    def content_hash(self) -> str:
        """Return 32 hexadecimal digits that are equal for equal rows.

        Windows count here, because they decide which groups a row has.
        """
        body = [(layout.content_hash(), layout.window) for layout in self.groups]
        return hashlib.blake2b(msgspec.msgpack.encode((_FORMAT, body)), digest_size=16).hexdigest()


RowLayout = KVLayout | GroupedLayout
"""Layout of the rows of a transfer."""


def join_layouts(layouts: Sequence[KVLayout]) -> RowLayout:
    """Return the layout of a transfer of these KV groups."""
    return layouts[0] if len(layouts) == 1 else GroupedLayout(tuple(layouts))


def group_rows(
    layout: RowLayout, num_tokens: int, first_row: int, num_rows: int
) -> tuple[range, ...]:
    """Return which of these rows of a request each KV group has a part in.

    Args:
        layout: Layout of the transfer.
        num_tokens: Tokens of the request.
        first_row: First of the rows; the caller asks for none before ``layout.first_row``.
        num_rows: How many.

    Returns:
        For each group a range that ends with the last of these rows, or is empty.
    """
    end_row = first_row + num_rows
    if isinstance(layout, KVLayout):
        return (range(first_row, end_row),)
    return tuple(
        range(min(max(first_row, group.first_row(num_tokens)), end_row), end_row)
        for group in layout.groups
    )
