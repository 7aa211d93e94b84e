"""Norm and rotation of rows in vectors, as LLVM has them, for kernels that numba compiles.

Arrays are of float32 or float64, or of 16 bits that are a bfloat16's, which is computed in float32.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from replicas.generators.torch.vectors import WIDTH, Vectors, along, unpacked

_Value: TypeAlias = Any
"""Of LLVM; llvmlite has no types to check."""


def _number(array: _Value) -> _Value:
    """Return the compute type of an array's numbers."""
    item = array.type.pointee
    return ir.FloatType() if isinstance(item, ir.IntType) else item


@intrinsic
def square_sum(_context, x, at, size, nothing):
    """Return the sum of the squares of some numbers.

    Args:
        x: The numbers.
        at: Of the first.
        size: How many.
        nothing: Zero, of the type of the sum.
    """

    def generate(context, builder, signature, values):
        x, at, size, nothing = unpacked(context, builder, signature, values)
        vectors = Vectors(builder, _number(x), WIDTH)
        totals = cgutils.alloca_once_value(builder, vectors.zero)
        rest = cgutils.alloca_once_value(builder, nothing)

        def add(part: Vectors, place: _Value) -> None:
            found = part.load(x, builder.add(at, place))
            if found.type.count == 1:
                number = part.first(found)
                product = builder.fmul(number, number)
                builder.store(builder.fadd(builder.load(rest), product), rest)
            else:
                builder.store(part.add_product(found, found, builder.load(totals)), totals)

        along(builder, _number(x), size, add)
        total = vectors.first(vectors.fold(vectors.add, builder.load(totals), 1))
        return builder.fadd(total, builder.load(rest))

    return nothing(x, at, size, nothing), generate


@intrinsic
def weigh(_context, x, at, scale, weight, weight_at, out, out_at, size):
    """Multiply numbers by a scale, round, multiply by weights, and round."""

    def generate(context, builder, signature, values):
        x, at, scale, weight, weight_at, out, out_at, size = unpacked(
            context, builder, signature, values
        )

        def write(part: Vectors, place: _Value) -> None:
            found = part.load(x, builder.add(at, place))
            found = part.rounded(builder.fmul(found, part.spread(scale)), out)
            by = part.load(weight, builder.add(weight_at, place))
            part.round_into(builder.fmul(found, by), out, builder.add(out_at, place))

        along(builder, _number(x), size, write)
        return context.get_dummy_value()

    return types.void(x, at, scale, weight, weight_at, out, out_at, size), generate


@intrinsic
def rotate(_context, heads, at, cos, sin, angle, half):
    """Rotate the pairs of a head, i and i + half, in place.

    Args:
        heads: The numbers.
        at: Of the head.
        cos: Of each position, twice.
        sin: Of each position, with a minus, then without.
        angle: Of the position in them.
        half: Pairs.
    """

    def generate(context, builder, signature, values):
        heads, at, cos, sin, angle, half = unpacked(context, builder, signature, values)

        def write(part: Vectors, place: _Value) -> None:
            near, far = builder.add(at, place), builder.add(builder.add(at, half), place)
            left, right = part.load(heads, near), part.load(heads, far)
            place = builder.add(angle, place)
            behind = builder.add(place, half)
            turned = builder.fmul(left, part.load(cos, place))
            turned = part.add_product(right, part.load(sin, place), turned)
            other = builder.fmul(right, part.load(cos, behind))
            other = part.add_product(left, part.load(sin, behind), other)
            part.round_into(turned, heads, near)
            part.round_into(other, heads, far)

        along(builder, _number(heads), half, write)
        return context.get_dummy_value()

    return types.void(heads, at, cos, sin, angle, half), generate
