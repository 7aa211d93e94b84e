"""Describe the bytes of one KV block, so that two engines can tell whether theirs agree.

The wire form of a block is its bytes in the order (layer, K|V, KV head, token row, head_dim). Pure;
owns no state and never sees a tensor.
"""

import hashlib

import msgspec

from kv_transfer.errors import InvalidLayoutError

ROW_TOKENS = 32
"""Token rows of a hardware tile: block sizes are multiples of it so that any two can be mapped."""

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Element sizes of the dtypes whose blocks are plain arrays."""

_FORMAT = 1
"""Raised when the byte order of a block on the wire changes."""


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape and meaning of one KV block, all layers and planes included.

    Attributes:
        num_layers: Layers whose K and V a block holds.
        num_kv_heads: KV heads of one layer.
        head_dim: Elements of one head's row.
        block_size: Token rows of a block; a multiple of 32.
        dtype: Element type, a key of ``DTYPE_BYTES``.
        rope: Element order in which K was rotated: ``"hf"`` (halves) or ``"meta"`` (pairs).
        model_fingerprint: Names the weights and their rope scaling; equal means equal KV.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    rope: str
    model_fingerprint: str

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InvalidLayoutError: When a count is not positive, the block size is no multiple of 32,
                or dtype or rope order is unknown.
        """
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) <= 0:
                raise InvalidLayoutError(f"{name} must be positive, got {getattr(self, name)}")
        if self.block_size % ROW_TOKENS:
            raise InvalidLayoutError(
                f"block_size {self.block_size} is no multiple of {ROW_TOKENS}: KV transfer moves "
                f"whole {ROW_TOKENS}-token rows; set block_size to a multiple of {ROW_TOKENS}"
            )
        if self.dtype not in DTYPE_BYTES:
            raise InvalidLayoutError(f"dtype {self.dtype!r} is none of {sorted(DTYPE_BYTES)}")
        if self.rope not in {"hf", "meta"}:
            raise InvalidLayoutError(f"rope {self.rope!r} is neither 'hf' nor 'meta'")

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row of one head in one plane of one layer."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def rows_shape(self) -> tuple[int, int, int]:
        """Shape ``(layer * plane * head, block_size, row_bytes)`` of one block's bytes."""
        return self.num_layers * 2 * self.num_kv_heads, self.block_size, self.row_bytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block on the wire: every layer, K and V."""
        num_planes, num_rows, row_bytes = self.rows_shape
        return num_planes * num_rows * row_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` tokens, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def layout_hash(self) -> str:
        """Return 32 hexadecimal digits (16 bytes) that are equal for equal layouts only."""
        body = msgspec.msgpack.encode((_FORMAT, msgspec.to_builtins(self)))
        return hashlib.blake2b(body, digest_size=16).hexdigest()
