"""Products of bfloat16 rows and packed weights, by what processors have for pairs of numbers.

One instruction of AVX-512 multiplies two numbers each of 16 columns and adds them up in float32;
one of AMX does so with 16 pairs of 16 rows. A weight matrix is therefore packed as panels of 64
columns, in each pair after pair of features: six rows and a panel fill the vectors with sums, two
blocks of 16 rows and half a panel the tiles. A sum of a row never depends on the rows beside it, so
that a token's results do not depend on its batch.

Dimensions: T rows, K features in, N features out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from replicas.generators.torch import pairs, tiles
from replicas.generators.torch.memory import Pieces
from replicas.generators.torch.vectors import FLAGS, Vectors, along, number_of, unpacked

_Value: TypeAlias = Any
"""Of LLVM; llvmlite has no types to check."""

PANEL = 64
"""Columns of a panel."""
ROWS = 6
"""Rows that are multiplied by a panel together: 6 * 4 sums, 4 weights and a pair of 32 vectors."""
MOST_ROWS = 2 * tiles.ROWS
"""The same where there are tiles: 4 of sums, 2 of rows and 2 of columns of 8."""
NOTHING, PLUS, TIMES, SWISH = 0, 1, 2, 3
"""What becomes of a product."""

_WIDTH = 16
_PARTS = PANEL // _WIDTH
_memory = Pieces()


@dataclass(frozen=True, slots=True, eq=False)
class Panels:
    """A weight matrix as the kernel reads it.

    Attributes:
        weight: (panels, K / 2, 64, 2) bfloat16, aligned to vectors.
        bias: (N,) bfloat16 or None.
        num_outputs: N.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    num_outputs: int


@register_jitable
def num_panels(num_outputs: int) -> int:
    """Return how many panels so many columns need."""
    return -(-num_outputs // PANEL)


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Panels:
    """Return a weight matrix as panels; columns that the last one lacks are zeros.

    Args:
        weight: (N, K) bfloat16, K even.
        bias: (N,) or None.
    """
    num_outputs, size = weight.shape
    shape = (num_panels(num_outputs), size // 2, PANEL, 2)
    memory = _memory.take(math.prod(shape) * weight.itemsize)
    packed = torch.from_numpy(memory).view(weight.dtype).view(shape)
    in_pairs = weight.view(num_outputs, size // 2, 2)
    for panel, columns in enumerate(in_pairs.split(PANEL)):
        packed[panel, :, : len(columns)] = columns.transpose(0, 1)
    return Panels(packed, bias, num_outputs)


_SUMS = ir.VectorType(ir.FloatType(), _WIDTH)


@intrinsic(prefer_literal=True)
def multiply_rows(_context, x, at, stride, weight, panel, size, before, sums, num_rows):
    """Multiply some rows by a panel.

    Args:
        x: The rows.
        at: Of the first one in it.
        stride: From one row to the next.
        weight: Packed.
        panel: Which of its panels.
        size: K.
        before: float32 (64,), where each column's sums begin.
        sums: float32 (rows, 64), written.
        num_rows: At most ``ROWS``.
    """
    rows = range(num_rows.literal_value)

    def generate(context, builder, signature, values):
        x, at, stride, weight, panel, size, before, sums, _ = unpacked(
            context, builder, signature, values
        )
        num_pairs = builder.sdiv(size, number_of(2))
        firsts = [builder.add(at, builder.mul(stride, number_of(row))) for row in rows]
        weight_at = builder.mul(panel, builder.mul(size, number_of(PANEL)))
        before, sums = (builder.bitcast(array, _SUMS.as_pointer()) for array in (before, sums))
        parts = range(_PARTS)
        begin = [builder.load(builder.gep(before, [number_of(part)]), align=4) for part in parts]
        found = {
            (row, part): cgutils.alloca_once_value(builder, begin[part])
            for row in rows
            for part in parts
        }
        with cgutils.for_range(builder, num_pairs) as loop:
            pair = builder.mul(loop.index, number_of(2))
            place = builder.add(weight_at, builder.mul(loop.index, number_of(2 * PANEL)))
            columns = [
                pairs.load(builder, weight, builder.add(place, number_of(part * pairs.WIDTH)))
                for part in parts
            ]
            for row in rows:
                everywhere = pairs.spread(builder, x, builder.add(firsts[row], pair))
                for part in parts:
                    kept = found[row, part]
                    total = builder.load(kept)
                    total = pairs.add_products(builder, total, columns[part], everywhere)
                    builder.store(total, kept)
        for (row, part), kept in found.items():
            place = builder.gep(sums, [number_of(row * _PARTS + part)])
            builder.store(builder.load(kept), place, align=4)
        return context.get_dummy_value()

    arguments = (x, at, stride, weight, panel, size, before, sums, num_rows)
    return types.void(*arguments), generate


@intrinsic(prefer_literal=True)
def multiply_tiles(_context, x, at, stride, weight, panel, size, before, sums, num_blocks):
    """`multiply_rows` of up to 16 rows, or up to 32, in tiles that `shape_tiles` has shaped.

    Args:
        x: The rows.
        at: Of the first one in it.
        stride: From one row to the next.
        weight: Packed.
        panel: Which of its panels.
        size: K, a multiple of 32.
        before: float32 (64,), where each column's sums begin.
        sums: float32 (rows, 64), written.
        num_blocks: Of 16 rows each, the last may have fewer: 1 or 2.
    """
    blocks = range(num_blocks.literal_value)
    together = _PARTS // len(blocks)

    def generate(context, builder, signature, values):
        if not tiles.are_supported():
            return context.get_dummy_value()
        x, at, stride, weight, panel, size, before, sums, _ = unpacked(
            context, builder, signature, values
        )
        firsts = [builder.add(at, builder.mul(stride, number_of(b * tiles.ROWS))) for b in blocks]
        row_bytes = builder.mul(stride, number_of(2))
        weight_at = builder.mul(panel, builder.mul(size, number_of(PANEL)))
        num_steps = builder.sdiv(size, number_of(tiles.FEATURES))
        for part in range(0, _PARTS, together):
            parts = range(part, part + together)
            kept = {(b, p): b * together + p - part for b in blocks for p in parts}
            for (_, p), tile in kept.items():
                place = builder.gep(before, [number_of(p * _WIDTH)])
                tiles.load(builder, tile, place, tiles.stride_of(0))
            with cgutils.for_range(builder, num_steps) as loop:
                feature = builder.mul(loop.index, number_of(tiles.FEATURES))
                step = builder.add(weight_at, builder.mul(feature, number_of(PANEL)))
                for b in blocks:
                    place = builder.gep(x, [builder.add(firsts[b], feature)])
                    tiles.load(builder, _TILE_OF_ROWS + b, place, row_bytes)
                for p in parts:
                    columns = _TILE_OF_COLUMNS + p % 2
                    place = builder.gep(weight, [builder.add(step, number_of(p * pairs.WIDTH))])
                    tiles.load(builder, columns, place, tiles.stride_of(4 * PANEL))
                    for b in blocks:
                        tiles.add_products(builder, kept[b, p], _TILE_OF_ROWS + b, columns)
            for (b, p), tile in kept.items():
                place = builder.gep(sums, [number_of(b * tiles.ROWS * PANEL + p * _WIDTH)])
                tiles.store(builder, tile, place, tiles.stride_of(4 * PANEL))
        return context.get_dummy_value()

    arguments = (x, at, stride, weight, panel, size, before, sums, num_blocks)
    return types.void(*arguments), generate


_TILE_OF_ROWS, _TILE_OF_COLUMNS = 4, 6
"""The first of two each; those before are of sums, of a block one after the other."""


@njit
def shape_tiles(shapes, num_rows):
    """Take tiles for so many rows, at most `MOST_ROWS`; until `leave_tiles`.

    Args:
        shapes: uint8 (64,), written.
        num_rows: Rows.
    """
    first = min(num_rows, tiles.ROWS)
    second = num_rows - first
    shapes[:] = 0
    shapes[0] = 1
    for tile in range(tiles.COUNT):
        is_second = second > 0 and (tile in (2, 3, _TILE_OF_ROWS + 1))
        is_weight = tile >= _TILE_OF_COLUMNS
        shapes[16 + 2 * tile] = tiles.ROW_BYTES
        shapes[48 + tile] = tiles.ROWS if is_weight else second if is_second else first
    _begin_tiles(shapes)


@intrinsic
def _begin_tiles(_context, shapes):
    def generate(context, builder, signature, values):
        if tiles.are_supported():
            tiles.begin(builder, *unpacked(context, builder, signature, values))
        return context.get_dummy_value()

    return types.void(shapes), generate


@intrinsic
def leave_tiles(_context):
    """Give up what `shape_tiles` took."""

    def generate(context, builder, _signature, _values):
        if tiles.are_supported():
            tiles.end(builder)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic(prefer_literal=True)
def finish_rows(_context, sums, num_rows, width, other, other_at, out, at, stride, then):
    """Rounds sums, and whatever else is to be done with them, to where they go.

    Args:
        sums: float32 (rows, 64).
        num_rows: Rows.
        width: Columns of each, the others are left.
        other: The summand or factor.
        other_at: Of its first row.
        out: May be ``other``.
        at: Of its first row.
        stride: From a row to the next, of both.
        then: ``NOTHING``, ``PLUS``, ``TIMES`` or ``SWISH``.
    """
    kind = then.literal_value

    def generate(context, builder, signature, values):
        sums, num_rows, width, other, other_at, out, at, stride, _ = unpacked(
            context, builder, signature, values
        )
        with cgutils.for_range(builder, num_rows) as loop:
            row = builder.mul(loop.index, stride)
            first = builder.mul(loop.index, number_of(PANEL))

            def write(part: Vectors, column: _Value) -> None:
                value = part.load(sums, builder.add(first, column))
                place = builder.add(row, column)
                if kind in (PLUS, TIMES):
                    beside = part.load(other, builder.add(other_at, place))
                    join = builder.fadd if kind == PLUS else builder.fmul
                    value = join(value, beside, flags=FLAGS)
                elif kind == SWISH:
                    value = part.swish(value)
                part.round_into(value, out, builder.add(at, place))

            along(builder, ir.FloatType(), width, write)
        return context.get_dummy_value()

    arguments = (sums, num_rows, width, other, other_at, out, at, stride, then)
    return types.void(*arguments), generate
