"""Pairs of bfloat16, which AVX-512 has an instruction for: 16 products of two numbers each, summed.

It computes in float32, and takes numbers too small for a normal one as zeros.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target

if TYPE_CHECKING:
    from collections.abc import Sequence

_Value: TypeAlias = Any
"""Of LLVM; llvmlite has no types to check."""

WIDTH = 32
"""Numbers of a vector."""


@cache
def are_supported() -> bool:
    """Return whether numba may use the instruction."""
    return has("avx512bf16")


def has(*features: str) -> bool:
    """Return whether numba compiles for a processor with these features, named as LLVM does."""
    found: str = cpu_target.target_context.codegen().magic_tuple()[2]
    return {f"+{feature}" for feature in features} <= {*found.split(",")}


class _Bfloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


_PAIR = ir.IntType(32)
_SUMS = ir.VectorType(ir.FloatType(), WIDTH // 2)
_PAIRS = ir.VectorType(_PAIR, WIDTH // 2)
_BITS = ir.VectorType(ir.IntType(16), WIDTH)
_HALVES = ir.VectorType(_Bfloat(), WIDTH)
_PLACES = ir.VectorType(_PAIR, WIDTH)


def are_of(array: _Value) -> bool:
    """Return whether an array is of bfloat16, as its bits."""
    return bool(array.type.pointee == ir.IntType(16))


def load(builder: _Value, array: _Value, index: _Value) -> _Value:
    """Return 16 pairs from an index on, which need not be aligned."""
    place = builder.bitcast(builder.gep(array, [index]), _BITS.as_pointer())
    return builder.bitcast(builder.load(place, align=2), _HALVES)


def spread(builder: _Value, array: _Value, index: _Value) -> _Value:
    """Return the pair from an index on everywhere."""
    place = builder.bitcast(builder.gep(array, [index]), _PAIR.as_pointer())
    nothing = ir.Constant(_PAIRS, None)
    one = builder.insert_element(nothing, builder.load(place, align=2), ir.Constant(_PAIR, 0))
    return builder.bitcast(builder.shuffle_vector(one, one, nothing), _HALVES)


def interleaved(builder: _Value, one: _Value, other: _Value | None = None) -> list[_Value]:
    """Return numbers of two vectors as pairs, first halves first; a missing one is zeros."""
    bits = builder.bitcast(one, _BITS)
    beside = ir.Constant(_BITS, None) if other is None else builder.bitcast(other, _BITS)
    found = []
    for first in (0, WIDTH // 2):
        places = [place for i in range(first, first + WIDTH // 2) for place in (i, WIDTH + i)]
        mask = ir.Constant(_PLACES, places)
        found.append(builder.bitcast(builder.shuffle_vector(bits, beside, mask), _HALVES))
    return found


def transposed(builder: _Value, rows: Sequence[_Value]) -> list[_Value]:
    """Return 16 vectors of 16 pairs as vectors of the first pair of each, of the second, and so on.

    Pairs change places within parts of four, then parts do: 64 instructions that are cheap.
    """
    found = [builder.bitcast(row, _PAIRS) for row in rows]

    def swap(one: int, other: int, low: Sequence[int], high: Sequence[int]) -> None:
        """Return the low and the high places of two vectors; the second's count from 16."""
        both = found[one], found[other]
        found[one], found[other] = (
            builder.shuffle_vector(*both, ir.Constant(_PAIRS, list(mask))) for mask in (low, high)
        )

    def within(places: Sequence[int]) -> list[int]:
        return [part + place for part in range(0, 16, 4) for place in places]

    def among(parts: Sequence[int]) -> list[int]:
        return [4 * part + place for part in parts for place in range(4)]

    for row in range(0, 16, 2):
        swap(row, row + 1, within((0, 16, 1, 17)), within((2, 18, 3, 19)))
    for row in range(0, 16, 4):
        for i in (0, 1):
            swap(row + i, row + i + 2, within((0, 1, 16, 17)), within((2, 3, 18, 19)))
    for k in range(4):
        for row in (k, 8 + k):
            swap(row, row + 4, among((0, 2, 4, 6)), among((1, 3, 5, 7)))
        for row in (k, 4 + k):
            swap(row, row + 8, among((0, 2, 4, 6)), among((1, 3, 5, 7)))
    order = [part + place for part in range(0, 16, 4) for place in (0, 2, 1, 3)]
    return [builder.bitcast(found[place], _HALVES) for place in order]


def add_products(builder: _Value, total: _Value, one: _Value, other: _Value) -> _Value:
    """Return the products of each pair, added to float32 (16,)."""
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(_SUMS, [_SUMS, _HALVES, _HALVES]),
        "llvm.x86.avx512bf16.dpbf16ps.512",
    )
    return builder.call(function, [total, one, other])
