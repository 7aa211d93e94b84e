"""Copy and check KV blocks in memory of this process.

Between engines of different block sizes rows move (``read_rows``, ``write_rows``); between equal
ones whole blocks move with one copy (``copy_from``). The memory may be this engine's cache or
another's, mapped read-only. Called by one thread at a time.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kv_transfer.layout import BFLOAT8_B, BFLOAT8_B_TILE_BYTES, ROW_TOKENS, KVLayout

Bytes: TypeAlias = NDArray[np.uint8]


class _Span(NamedTuple):
    """Pieces that lie in one array of units.

    Attributes:
        units: (n, unit_bytes) uint8.
        pieces: Which pieces.
        firsts: Per piece the index in ``units`` of its first unit.
    """

    units: Bytes
    pieces: slice
    firsts: NDArray[np.int64]


class HostBlocks:
    """Blocks of one lane as bytes.

    Owner: nothing; the memory belongs to the caller and must live as long as this object. Block ids
    count from 0; a *table* is a list of them that holds a request from position 0.
    """

    def __init__(self, layout: KVLayout, pieces: Sequence[Bytes]) -> None:
        """Make a view of memory as blocks.

        Args:
            layout: Meaning of the bytes.
            pieces: Per layer and plane (``layer * num_planes + plane``) the pieces of all blocks,
                (num_blocks, piece_bytes) uint8, C-contiguous, perhaps read-only.

        Raises:
            ValueError: Number or shape of the pieces differ from the layout.
        """
        num_blocks = len(pieces[0]) if len(pieces) else 0
        wanted = (num_blocks, layout.piece_bytes)
        if len(pieces) != layout.num_pieces or not all(
            piece.shape == wanted and piece.dtype == np.uint8 and piece.flags.c_contiguous
            for piece in pieces
        ):
            found = sorted({f"{piece.shape} {piece.dtype}" for piece in pieces})
            raise ValueError(
                f"{len(pieces)} pieces of {found}; the layout needs {layout.num_pieces} contiguous "
                f"pieces of {wanted} uint8"
            )
        self._layout = layout
        self._num_blocks = num_blocks
        self._pieces = list(pieces)
        self._spans = [
            _Span(piece.reshape(-1, layout.unit_bytes), slice(i, i + 1), np.zeros(1, np.int64))
            for i, piece in enumerate(pieces)
        ]

    @classmethod
    def within(
        cls, layout: KVLayout, memory: Bytes, offsets: Sequence[int], num_blocks: int
    ) -> "HostBlocks":
        """Make a view of blocks whose pieces all lie in one array.

        Args:
            layout: Meaning of the bytes.
            memory: (n,) uint8, contiguous, perhaps read-only.
            offsets: Per layer and plane the offset in ``memory`` of the first block's piece; the
                other blocks follow without gaps.
            num_blocks: Blocks of this lane.

        Raises:
            ValueError: A piece does not fit into the memory, or there are more or fewer of them
                than the layout says.
        """
        num_bytes, unit_bytes = num_blocks * layout.piece_bytes, layout.unit_bytes
        if num_blocks < 1 or not all(0 <= at <= len(memory) - num_bytes for at in offsets):
            raise ValueError(
                f"{num_blocks} blocks with pieces of {layout.piece_bytes} bytes at offsets "
                f"{min(offsets, default=0)} to {max(offsets, default=0)} do not fit into "
                f"{len(memory)} bytes"
            )
        blocks = cls(
            layout, [memory[at : at + num_bytes].reshape(num_blocks, -1) for at in offsets]
        )
        starts = np.asarray(offsets, np.int64) - min(offsets)
        if not (starts % unit_bytes).any():
            # Every unit has a number in one array: rows of all pieces move in one call.
            end = int(starts.max()) + num_bytes
            units = memory[min(offsets) :][:end].reshape(-1, unit_bytes)
            blocks._spans = [_Span(units, slice(0, len(offsets)), starts // unit_bytes)]
        return blocks

    @classmethod
    def empty(cls, layout: KVLayout, num_blocks: int) -> "HostBlocks":
        """Make blocks in new memory, with undefined contents."""
        shape = (num_blocks, layout.piece_bytes)
        return cls(layout, [np.empty(shape, np.uint8) for _ in range(layout.num_pieces)])

    @property
    def layout(self) -> KVLayout:
        """Meaning of the bytes."""
        return self._layout

    @property
    def num_blocks(self) -> int:
        """Blocks of this lane; their ids are 0 to one less."""
        return self._num_blocks

    @property
    def pieces(self) -> Sequence[Bytes]:
        """Pieces of all blocks per layer and plane, (num_blocks, piece_bytes)."""
        return self._pieces

    def read_rows(self, block_ids: Sequence[int], first_row: int, num_rows: int) -> Bytes:
        """Copy rows of a request out.

        Args:
            block_ids: The request's table; blocks without a wanted row are not accessed.
            first_row: First wanted row of the request.
            num_rows: Number of rows.

        Returns:
            (num_rows, row_bytes) uint8, contiguous, not aliased.

        Raises:
            ValueError: The table is too short, or a block id is out of range.
        """
        heads, unit_bytes = self._layout.num_kv_heads, self._layout.unit_bytes
        index = self._unit_index(block_ids, first_row, num_rows)
        data = np.empty((num_rows, self._layout.num_pieces, heads, unit_bytes), np.uint8)
        for span in self._spans:
            # "clip" lets numpy write into `target` without a buffer; the index is checked already.
            target = data[:, span.pieces]
            np.take(span.units, index + span.firsts[:, None], 0, out=target, mode="clip")
        return data.reshape(num_rows, self._layout.row_bytes)

    def write_rows(self, block_ids: Sequence[int], first_row: int, data: Bytes) -> None:
        """Copy rows of a request in.

        Args:
            block_ids: The request's table.
            first_row: Row of the request that ``data[0]`` is.
            data: (n, row_bytes) uint8, contiguous, perhaps read-only.

        Raises:
            ValueError: The table is too short, a block id is out of range, ``data`` has another
                shape or dtype, or the memory is read-only.
        """
        if data.shape[1:] != (self._layout.row_bytes,) or data.dtype != np.uint8:
            raise ValueError(
                f"data has shape {data.shape} and dtype {data.dtype}; "
                f"(n, {self._layout.row_bytes}) uint8 is needed"
            )
        heads, unit_bytes = self._layout.num_kv_heads, self._layout.unit_bytes
        index = self._unit_index(block_ids, first_row, len(data))
        rows = data.reshape(len(data), self._layout.num_pieces, heads, unit_bytes)
        for span in self._spans:
            span.units[index + span.firsts[:, None]] = rows[:, span.pieces]

    def digests(self, block_ids: Sequence[int]) -> NDArray[np.uint64]:
        """Hash each block: xxh3-64 over its pieces in order.

        Detects blocks that were copied wrong or overwritten meanwhile. No protection against an
        attacker who can write to the memory.

        Returns:
            (len(block_ids),) uint64.

        Raises:
            ValueError: A block id is out of range.
        """
        found = np.empty(len(block_ids), np.uint64)
        for position, block in enumerate(_checked(block_ids, self._num_blocks).tolist()):
            digest = xxhash.xxh3_64()
            for piece in self._pieces:
                digest.update(piece[block])
            found[position] = digest.intdigest()
        return found

    def copy_from(
        self,
        source: "HostBlocks",
        source_ids: Sequence[int],
        block_ids: Sequence[int],
        digests: NDArray[np.uint64] | None = None,
    ) -> list[int]:
        """Copy whole blocks of another lane or engine into this one.

        Args:
            source: Blocks to copy from; laid out as these.
            source_ids: Blocks there.
            block_ids: Blocks here, as many, each once.
            digests: ``source.digests(source_ids)`` from when the blocks were last written. The copy
                is hashed, not the source, so that a copy that went wrong is found, too.

        Returns:
            Positions in ``block_ids`` whose blocks do not match their digest, ascending; the
            contents of these blocks are wrong. Empty without digests.

        Raises:
            ValueError: Layouts or numbers of ids differ, an id is out of range, or this memory is
                read-only.
        """
        if source.layout != self._layout:
            raise ValueError(f"cannot copy blocks of {source.layout} to blocks of {self._layout}")
        sources, targets = (
            _checked(source_ids, source.num_blocks),
            _checked(block_ids, self._num_blocks),
        )
        if len(sources) != len(targets) or (digests is not None and len(digests) != len(targets)):
            raise ValueError(
                f"cannot copy {len(sources)} blocks to {len(targets)} with "
                f"{'no' if digests is None else len(digests)} digests: the numbers must be equal"
            )
        pairs = list(zip(self._pieces, source.pieces, strict=True))
        if digests is None:
            _copy(pairs, targets, sources)
            return []
        wrong = []
        blocks = zip(targets.tolist(), sources.tolist(), digests.tolist(), strict=True)
        for position, (block, other, wanted) in enumerate(blocks):
            digest = xxhash.xxh3_64()
            for here, there in pairs:
                copy = here[block]
                copy[:] = there[other]
                digest.update(copy)  # at once: it is still in the processor's cache
            if digest.intdigest() != wanted:
                wrong.append(position)
        return wrong

    def zero_tail(self, block_ids: Sequence[int], num_tokens: int) -> None:
        """Zero the last block of a request behind its last token.

        A reused block holds values of its former request there, and some of them (NaN) survive
        being multiplied by zero.

        Args:
            block_ids: The request's table.
            num_tokens: Its tokens.

        Raises:
            ValueError: The table is too short, or the block's id is out of range.
        """
        size = self._layout.block_size
        if num_tokens % size == 0:
            return
        block = self._table(block_ids, num_tokens // size, 1)[0]
        row, token = divmod(num_tokens % size, ROW_TOKENS)
        layout = self._layout
        shape = layout.num_kv_heads, layout.rows_per_block, layout.unit_bytes
        for piece in self._pieces:
            units = piece[block].reshape(shape)
            _zero_tokens(units[:, row], token, self._layout.dtype)
            units[:, row + 1 :] = 0

    def _unit_index(
        self, block_ids: Sequence[int], first_row: int, num_rows: int
    ) -> NDArray[np.int64]:
        """Return the numbers of the rows' units within a piece, (num_rows, 1, num_kv_heads)."""
        per_block, heads = self._layout.rows_per_block, self._layout.num_kv_heads
        if num_rows < 0 or first_row < 0:
            raise ValueError(f"{num_rows} rows from row {first_row}: neither may be negative")
        if num_rows == 0:
            return np.empty((0, 1, heads), np.int64)
        first = first_row // per_block
        last = (first_row + num_rows - 1) // per_block
        table = self._table(block_ids, first, last + 1 - first)
        rows = np.arange(first_row, first_row + num_rows)
        units = table[rows // per_block - first] * (heads * per_block) + rows % per_block
        return units[:, None, None] + np.arange(heads) * per_block

    def _table(self, block_ids: Sequence[int], first: int, count: int) -> NDArray[np.int64]:
        """Return a checked part of a table."""
        if len(block_ids) < first + count:
            raise ValueError(
                f"a table of {len(block_ids)} blocks of {self._layout.block_size} tokens where "
                f"{first + count} are needed"
            )
        return _checked(block_ids[first : first + count], self._num_blocks)


def _checked(block_ids: Sequence[int], num_blocks: int) -> NDArray[np.int64]:
    # Without the check numpy would take a negative id for a block from the end.
    ids = np.asarray(block_ids, np.int64)
    if len(ids) and (ids.min() < 0 or ids.max() >= num_blocks):
        raise ValueError(f"block ids {ids} are not within 0..{num_blocks - 1}")
    return ids


def _copy(
    pairs: list[tuple[Bytes, Bytes]], targets: NDArray[np.int64], sources: NDArray[np.int64]
) -> None:
    """Copy blocks in every (target, source) pair of pieces, adjacent blocks in one slice."""
    runs = _runs(targets, sources)
    for here, there in pairs:
        for first, other, length in runs:
            if length == 1:  # An index costs less than a slice, which shows in small pieces.
                here[first] = there[other]
            else:
                here[first : first + length] = there[other : other + length]


def _runs(targets: NDArray[np.int64], sources: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Merge blocks adjacent on both sides into runs: (first target, first source, length)."""
    is_next = (np.diff(targets) == 1) & (np.diff(sources) == 1)
    starts = np.flatnonzero(np.concatenate([[True], ~is_next])[: len(targets)])
    lengths = np.diff(starts, append=len(targets))
    return list(
        zip(targets[starts].tolist(), sources[starts].tolist(), lengths.tolist(), strict=True)
    )


def _zero_tokens(units: Bytes, first: int, dtype: str) -> None:
    """Zero the tokens from ``first`` on in units, (num_kv_heads, unit_bytes) uint8."""
    if dtype == BFLOAT8_B:
        tiles = units.reshape(len(units), -1, BFLOAT8_B_TILE_BYTES)
        tiles[..., first <= _TOKEN_OF_TILE_BYTE] = 0
    else:
        units.reshape(len(units), ROW_TOKENS, -1)[:, first:] = 0


def _token_of_tile_byte() -> NDArray[np.int64]:
    """Return the token (of a tile's 32, its rows) to which each byte of a tile belongs, (1088,).

    A tile is four faces of 16x16, left before right and upper before lower: first a byte of
    exponent per row of each face, then a byte of sign and mantissa per element.
    """
    face = np.repeat(np.arange(4), 16) // 2 * 16
    exponents = face + np.tile(np.arange(16), 4)
    return np.concatenate([exponents, np.repeat(exponents, 16)])


_TOKEN_OF_TILE_BYTE = _token_of_tile_byte()


def zero_row_tail(layout: KVLayout, row: NDArray[np.uint8], num_tokens: int) -> None:
    """Zero the last row of a request behind its last token."""
    one_row = msgspec.structs.replace(layout, block_size=ROW_TOKENS)
    pieces = list(row.reshape(layout.num_pieces, 1, -1))
    HostBlocks(one_row, pieces).zero_tail([0], num_tokens % ROW_TOKENS)
