"""Vectors of numbers as LLVM has them, for kernels that numba compiles.

numba leaves it to LLVM to find vectors in loops. It finds few in these kernels: heads are short,
bfloat16 is no number to it, and a maximum that keeps NaN is none that it may reorder. Here
instructions on vectors are written out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_Value: TypeAlias = Any
"""Of LLVM; llvmlite has no types to check."""

FLAGS = ("contract", "nsz", "arcp")
"""A product and a sum may be one operation; sums are taken as they are written; NaN stays NaN."""

WIDTH = 16
"""Numbers of a vector: float32 of AVX-512; LLVM splits them for lesser processors."""

TOGETHER = 4
"""Heads, tokens or vectors of a head that are treated at once: their sums fit the registers."""

_EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)

_LINE_BYTES = 64
"""What a processor brings at once."""

_INDEX = ir.IntType(64)
_PLACE = ir.IntType(32)


def number_of(number: int) -> _Value:
    """Return a constant."""
    return ir.Constant(_INDEX, number)


class Vectors:
    """Generator of instructions on vectors of one width.

    Args:
        builder: Where to.
        number: Type of the numbers.
        width: Numbers of a vector, a power of two.
    """

    def __init__(self, builder: _Value, number: _Value, width: int) -> None:
        self._builder, self._number, self._width = builder, number, width
        self.zero = ir.Constant(ir.VectorType(number, width), None)

    def load(self, array: _Value, index: _Value) -> _Value:
        """Return numbers from an index on, which need not be aligned; 16 bits are a bfloat16's."""
        builder, item = self._builder, array.type.pointee
        size = item.width // 8 if isinstance(item, ir.IntType) else 4
        place = builder.bitcast(
            builder.gep(array, [index]), ir.VectorType(item, self._width).as_pointer()
        )
        found = builder.load(place, align=size)
        if item == self._number:
            return found
        bits = ir.VectorType(ir.IntType(32), self._width)
        shift = ir.Constant(bits, [16] * self._width)
        return builder.bitcast(builder.shl(builder.zext(found, bits), shift), self.zero.type)

    def store(self, vector: _Value, array: _Value, index: _Value) -> None:
        """Store a vector of any width from an index on, which need not be aligned."""
        place = self._builder.gep(array, [index])
        self._builder.store(vector, self._builder.bitcast(place, vector.type.as_pointer()), align=4)

    def round_into(self, vector: _Value, array: _Value, index: _Value) -> None:
        """Store from an index on, rounded to even if 16 bits are a bfloat16's."""
        builder, item = self._builder, array.type.pointee
        if item == self._number:
            self.store(vector, array, index)
            return
        places = ir.VectorType(item, self._width)
        place = builder.bitcast(builder.gep(array, [index]), places.as_pointer())
        builder.store(builder.trunc(self._half(vector), places), place, align=2)

    def rounded(self, vector: _Value, array: _Value) -> _Value:
        """Return a number rounded as an array would store it."""
        if array.type.pointee == self._number:
            return vector
        bits = self._builder.shl(self._half(vector), self._bits(16))
        return self._builder.bitcast(bits, vector.type)

    def _half(self, vector: _Value) -> _Value:
        """Return the bits of bfloat16 numbers."""
        builder = self._builder
        bits = builder.bitcast(vector, ir.VectorType(ir.IntType(32), self._width))
        odd = builder.and_(builder.lshr(bits, self._bits(16)), self._bits(1))
        bits = builder.add(bits, builder.add(odd, self._bits(0x7FFF)))
        # A NaN must not be rounded into a number.
        is_number = builder.fcmp_ordered("ord", vector, vector)
        return builder.select(is_number, builder.lshr(bits, self._bits(16)), self._bits(0x7FC0))

    def _bits(self, number: int) -> _Value:
        return ir.Constant(ir.VectorType(ir.IntType(32), self._width), [number] * self._width)

    def spread(self, number: _Value) -> _Value:
        """Return one number everywhere."""
        one = self._builder.insert_element(self.zero, number, ir.Constant(_PLACE, 0))
        return self._take(one, one, [0] * self._width)

    def spread_from(self, array: _Value, index: _Value) -> _Value:
        """Return one number of an array everywhere."""
        return self.spread(self._builder.load(self._builder.gep(array, [index])))

    def add(self, one: _Value, other: _Value) -> _Value:
        """Number by number."""
        return self._builder.fadd(one, other, flags=FLAGS)

    def add_product(self, one: _Value, other: _Value, to: _Value) -> _Value:
        """Return the product of two added to a third."""
        return self.add(self._builder.fmul(one, other, flags=FLAGS), to)

    def greater(self, one: _Value, other: _Value) -> _Value:
        """Return the other where either is NaN."""
        return self._builder.select(self._builder.fcmp_ordered(">", one, other), one, other)

    def are_before(self, limit: _Value) -> _Value:
        """Return which places are below a limit."""
        bits = ir.VectorType(_PLACE, self._width)
        one = self._builder.insert_element(
            ir.Constant(bits, None), self._builder.trunc(limit, _PLACE), ir.Constant(_PLACE, 0)
        )
        limits = self._builder.shuffle_vector(one, one, ir.Constant(bits, None))
        return self._builder.icmp_signed("<", ir.Constant(bits, list(range(self._width))), limits)

    def exp(self, x: _Value) -> _Value:
        """Return the exponential of x <= 0; float32 by a polynomial, with an error below 2 ulp.

        Source: Cephes expf.
        """
        if isinstance(self._number, ir.DoubleType):
            return self._call("llvm.exp", x)
        builder, number = self._builder, self._constant
        least = number(-87.0)
        x = builder.select(builder.fcmp_ordered("<", x, least), least, x)  # NaN stays
        power = self._call("llvm.floor", self.add_product(x, number(1.44269504), number(0.5)))
        rest = self.add_product(power, number(-0.693359375), x)
        rest = self.add_product(power, number(2.12194440e-4), rest)
        found = number(_EXP[0])
        for coefficient in _EXP[1:]:
            found = self.add_product(found, rest, number(coefficient))
        found = self.add_product(builder.fmul(found, rest, flags=FLAGS), rest, rest)
        bits = ir.VectorType(ir.IntType(32), self._width)
        # What NaN is as an integer is not defined; the product with `found` is NaN again.
        power = builder.select(builder.fcmp_ordered("ord", power, power), power, self.zero)
        exponent = builder.add(builder.fptosi(power, bits), ir.Constant(bits, [127] * self._width))
        scale = builder.shl(exponent, ir.Constant(bits, [23] * self._width))
        found = self.add(found, number(1.0))
        return builder.fmul(found, builder.bitcast(scale, x.type), flags=FLAGS)

    def swish(self, x: _Value) -> _Value:
        """Return a number times its sigmoid."""
        builder, one = self._builder, self._constant(1.0)
        is_negative = builder.fcmp_ordered("<", x, self.zero)
        raised = self.exp(builder.select(is_negative, x, builder.fneg(x)))
        share = builder.select(is_negative, raised, one)
        return builder.fmul(x, builder.fdiv(share, self.add(one, raised), flags=FLAGS), flags=FLAGS)

    def _constant(self, number: float) -> _Value:
        return ir.Constant(self.zero.type, [number] * self._width)

    def _call(self, name: str, x: _Value) -> _Value:
        """Return one of LLVM's functions of a vector."""
        kind = "f64" if isinstance(self._number, ir.DoubleType) else "f32"
        of = ir.FunctionType(x.type, [x.type])
        function = cgutils.get_or_insert_function(
            self._builder.module, of, f"{name}.v{self._width}{kind}"
        )
        return self._builder.call(function, [x])

    def fold(self, join: Callable[[_Value, _Value], _Value], vector: _Value, width: int) -> _Value:
        """Halves joined until so many numbers are left."""
        while (have := vector.type.count) > width:
            low, high = range(have // 2), range(have // 2, have)
            vector = join(self._take(vector, vector, low), self._take(vector, vector, high))
        return vector

    def first(self, vector: _Value) -> _Value:
        """Return its first number."""
        return self._builder.extract_element(vector, ir.Constant(_PLACE, 0))

    def join(self, by: Callable[[_Value, _Value], _Value], vectors: Sequence[_Value]) -> _Value:
        """Reduce each of up to four vectors to a number; return these as a vector."""
        if self._width < TOGETHER:
            found = ir.Constant(ir.VectorType(self._number, len(vectors)), None)
            for place, vector in enumerate(vectors):
                one = self.first(self.fold(by, vector, 1))
                found = self._builder.insert_element(found, one, ir.Constant(_PLACE, place))
            return found
        # Fewer are made up, or sums would go by how many there are.
        one, two, three, four = [*vectors, *vectors[-1:] * (TOGETHER - len(vectors))]
        # Of every four numbers one is left of each vector; these are what a processor shuffles.
        joined = self._pairs(by, self._pairs(by, one, two), self._pairs(by, three, four))
        found = self.fold(by, joined, TOGETHER)
        return self._take(found, found, range(len(vectors)))

    def _pairs(self, by: Callable[[_Value, _Value], _Value], one: _Value, other: _Value) -> _Value:
        """Return neighbours joined: of each four, two of the one, then two of the other."""
        starts = range(0, self._width, TOGETHER)
        even = [start + i for start in starts for i in (0, 2, self._width, self._width + 2)]
        odd = [place + 1 for place in even]
        return by(self._take(one, other, even), self._take(one, other, odd))

    def _take(self, one: _Value, other: _Value, places: Sequence[int]) -> _Value:
        mask = ir.Constant(ir.VectorType(_PLACE, len(places)), list(places))
        return self._builder.shuffle_vector(one, other, mask)


def along(
    builder: _Value, number: _Value, size: _Value, write: Callable[[Vectors, _Value], None]
) -> None:
    """Loops over so many numbers, a vector at a time, and over the last ones one by one."""
    whole = builder.sdiv(size, number_of(WIDTH))
    done = builder.mul(whole, number_of(WIDTH))
    with cgutils.for_range(builder, whole) as loop:
        write(Vectors(builder, number, WIDTH), builder.mul(loop.index, number_of(WIDTH)))
    with cgutils.for_range(builder, builder.sub(size, done)) as loop:
        write(Vectors(builder, number, 1), builder.add(done, loop.index))


def unpacked(context: _Value, builder: _Value, signature: _Value, values: _Value) -> list[_Value]:
    """Return arguments, arrays as where they begin."""
    return [
        context.make_array(kind)(context, builder, value).data
        if isinstance(kind, types.Array)
        else value
        for kind, value in zip(signature.args, values, strict=True)
    ]


@intrinsic
def fetch(_context, array, at, size):
    """Prefetch numbers that are read soon into the core's second-level cache.

    Blocks lie anywhere in memory, so the hardware cannot predict these reads.

    Args:
        array: Array of the numbers.
        at: Index of the first.
        size: How many.
    """

    def generate(context, builder, signature, values):
        array, at, size = unpacked(context, builder, signature, values)
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # To read, into the second cache, data: the first one cannot wait for many at once.
        how = [ir.Constant(flag, number) for number in (0, 2, 1)]
        of_line = number_of(_LINE_BYTES * 8 // signature.args[0].dtype.bitwidth)
        with cgutils.for_range(builder, builder.sdiv(size, of_line)) as loop:
            index = builder.add(at, builder.mul(loop.index, of_line))
            place = builder.bitcast(builder.gep(array, [index]), byte)
            builder.call(function, [place, *how])
        return context.get_dummy_value()

    return types.void(array, at, size), generate


@intrinsic
def exp(_context, x):
    """Return the exponential of a number <= 0, as `Vectors.exp`."""

    def generate(_context, builder, _signature, values):
        vectors = Vectors(builder, values[0].type, 1)
        return vectors.first(vectors.exp(vectors.spread(values[0])))

    return x(x), generate
