"""Attention over a block of keys in vectors, as LLVM has them, for kernels that numba compiles.

numba leaves it to LLVM to find vectors in loops. It finds few in these: heads are too short, and a
maximum that keeps NaN is none that it may reorder. Here their instructions are written out, one by
one for the size of a head and for the query heads that share a KV head, which are therefore
literals; queries that share are treated together, so that a key is widened once.

Dimensions: D head size, h query heads of a KV head, n tokens of a block, S block size.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_Value: TypeAlias = Any
"""Of LLVM; llvmlite has no types to check."""

FLAGS = ("reassoc", "contract", "nsz", "arcp")
"""Sums may be taken in any order, and a product and a sum be one operation; NaN stays NaN."""

WIDTH = 16
"""Numbers of a vector: float32 of AVX-512; LLVM splits them for lesser processors."""

_TOGETHER = 4
"""Heads, tokens or vectors of a head that are treated at once: their sums fit the registers."""

_EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)

_INDEX = ir.IntType(64)
_PLACE = ir.IntType(32)


def _index(number: int) -> _Value:
    return ir.Constant(_INDEX, number)


def _fours(items: Sequence[int]) -> Iterator[Sequence[int]]:
    for first in range(0, len(items), _TOGETHER):
        yield items[first : first + _TOGETHER]


class _Vectors:
    """Writes instructions on vectors of one width.

    Args:
        builder: Where to.
        number: What they compute in.
        width: Numbers of a vector, a power of two.
    """

    def __init__(self, builder: _Value, number: _Value, width: int) -> None:
        self._builder, self._number, self._width = builder, number, width
        self.zero = ir.Constant(ir.VectorType(number, width), None)

    def load(self, array: _Value, index: _Value) -> _Value:
        """Numbers from an index on, which need not be aligned; 16 bits are a bfloat16's."""
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
        """Of any width, from an index on, which need not be aligned."""
        place = self._builder.gep(array, [index])
        self._builder.store(vector, self._builder.bitcast(place, vector.type.as_pointer()), align=4)

    def spread(self, number: _Value) -> _Value:
        """One number everywhere."""
        one = self._builder.insert_element(self.zero, number, ir.Constant(_PLACE, 0))
        return self._take(one, one, [0] * self._width)

    def spread_from(self, array: _Value, index: _Value) -> _Value:
        """One number of an array everywhere."""
        return self.spread(self._builder.load(self._builder.gep(array, [index])))

    def add(self, one: _Value, other: _Value) -> _Value:
        return self._builder.fadd(one, other, flags=FLAGS)

    def add_product(self, one: _Value, other: _Value, to: _Value) -> _Value:
        return self.add(self._builder.fmul(one, other, flags=FLAGS), to)

    def greater(self, one: _Value, other: _Value) -> _Value:
        """The other where either is NaN."""
        return self._builder.select(self._builder.fcmp_ordered(">", one, other), one, other)

    def are_before(self, limit: _Value) -> _Value:
        """Which places are below a limit."""
        bits = ir.VectorType(_PLACE, self._width)
        one = self._builder.insert_element(
            ir.Constant(bits, None), self._builder.trunc(limit, _PLACE), ir.Constant(_PLACE, 0)
        )
        limits = self._builder.shuffle_vector(one, one, ir.Constant(bits, None))
        return self._builder.icmp_signed("<", ir.Constant(bits, list(range(self._width))), limits)

    def exp(self, x: _Value) -> _Value:
        """Of x <= 0; float32 by a polynomial, with an error below 2 units in the last place.

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

    def _constant(self, number: float) -> _Value:
        return ir.Constant(self.zero.type, [number] * self._width)

    def _call(self, name: str, x: _Value) -> _Value:
        """One of LLVM's functions of a vector."""
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
        return self._builder.extract_element(vector, ir.Constant(_PLACE, 0))

    def join(self, by: Callable[[_Value, _Value], _Value], vectors: Sequence[_Value]) -> _Value:
        """What the numbers of each vector are together, as a vector."""
        if len(vectors) != _TOGETHER or self._width < _TOGETHER:
            found = ir.Constant(ir.VectorType(self._number, len(vectors)), None)
            for place, vector in enumerate(vectors):
                one = self.first(self.fold(by, vector, 1))
                found = self._builder.insert_element(found, one, ir.Constant(_PLACE, place))
            return found
        one, two, three, four = vectors
        # Of every four numbers one is left of each vector; these are what a processor shuffles.
        joined = self._pairs(by, self._pairs(by, one, two), self._pairs(by, three, four))
        return self.fold(by, joined, _TOGETHER)

    def _pairs(self, by: Callable[[_Value, _Value], _Value], one: _Value, other: _Value) -> _Value:
        """Neighbours joined: of each four, two of the one, then two of the other."""
        starts = range(0, self._width, _TOGETHER)
        even = [start + i for start in starts for i in (0, 2, self._width, self._width + 2)]
        odd = [place + 1 for place in even]
        return by(self._take(one, other, even), self._take(one, other, odd))

    def _take(self, one: _Value, other: _Value, places: Sequence[int]) -> _Value:
        mask = ir.Constant(ir.VectorType(_PLACE, len(places)), list(places))
        return self._builder.shuffle_vector(one, other, mask)


def _in_turn(builder: _Value, count: _Value, write: Callable[[_Value, int], None]) -> None:
    """Loops over so many tokens: some at once, then one by one.

    Args:
        builder: Where to.
        count: How many.
        write: Given the first token and how many it is about.
    """
    rounds = builder.sdiv(count, _index(_TOGETHER))
    with cgutils.for_range(builder, rounds) as loop:
        write(builder.mul(loop.index, _index(_TOGETHER)), _TOGETHER)
    done = builder.mul(rounds, _index(_TOGETHER))
    with cgutils.for_range(builder, builder.sub(count, done)) as loop:
        write(builder.add(done, loop.index), 1)


def _starts(context: _Value, builder: _Value, signature: _Value, values: _Value) -> list[_Value]:
    """Arguments, arrays as where they begin."""
    return [
        context.make_array(kind)(context, builder, value).data
        if isinstance(kind, types.Array)
        else value
        for kind, value in zip(signature.args, values, strict=True)
    ]


@intrinsic(prefer_literal=True)
def score(_context, queries, keys, at, count, scores, stride, head_dim, share):
    """Products of each query and each key.

    Args:
        queries: (h * D,).
        keys: The plane.
        at: Of the first key in it.
        count: n keys, one after the other.
        scores: (h, S), the first n of each row are written.
        stride: S.
        head_dim: D.
        share: h.
    """
    size, heads = head_dim.literal_value, range(share.literal_value)

    def generate(context, builder, signature, values):
        queries, keys, at, count, scores, stride, *_ = _starts(context, builder, signature, values)
        width = min(WIDTH, size & -size)
        vectors = _Vectors(builder, queries.type.pointee, width)

        def tokens(first: _Value, num: int) -> None:
            begin = builder.add(at, builder.mul(first, _index(size)))
            for some in _fours(heads):
                sums = {(h, t): vectors.zero for h in some for t in range(num)}
                for d in range(0, size, width):
                    places = [builder.add(begin, _index(t * size + d)) for t in range(num)]
                    found = [vectors.load(keys, place) for place in places]
                    for h in some:
                        query = vectors.load(queries, _index(h * size + d))
                        for t in range(num):
                            sums[h, t] = vectors.add_product(query, found[t], sums[h, t])
                for h in some:
                    place = builder.add(builder.mul(stride, _index(h)), first)
                    found = vectors.join(vectors.add, [sums[h, t] for t in range(num)])
                    vectors.store(found, scores, place)

        _in_turn(builder, count, tokens)
        return context.get_dummy_value()

    return types.void(queries, keys, at, count, scores, stride, head_dim, share), generate


@intrinsic
def exp(_context, x):
    """Of a number <= 0, as `_Vectors.exp`."""

    def generate(_context, builder, _signature, values):
        vectors = _Vectors(builder, values[0].type, 1)
        return vectors.first(vectors.exp(vectors.spread(values[0])))

    return x(x), generate


@intrinsic(prefer_literal=True)
def soften(_context, scores, stride, seen, count, tops, totals, fades, num_rows):
    """Makes scores weights, relative to the greatest of a row so far.

    Args:
        scores: (h, S), full vectors each; the first n of a row are read and written.
        stride: S.
        seen: (h,), how many of a row are none that a token must not see; the others weigh nothing.
        count: n.
        tops: (h,), the greatest so far, -inf before any; NaN is not seen.
        totals: (h,), the sum of the weights so far.
        fades: (h,), written: what was found before counts by so much.
        num_rows: h.
    """
    rows = range(num_rows.literal_value)

    def generate(context, builder, signature, values):
        scores, stride, seen, count, tops, totals, fades, _ = _starts(
            context, builder, signature, values
        )
        number = tops.type.pointee
        vectors = _Vectors(builder, number, WIDTH)

        for some in _fours(rows):
            few = _Vectors(builder, number, len(some))
            before = few.load(tops, _index(some[0]))
            starts = [builder.mul(stride, _index(row)) for row in some]
            limits = [builder.load(builder.gep(seen, [_index(row)])) for row in some]
            least = vectors.spread(ir.Constant(number, float("-inf")))
            best = [cgutils.alloca_once_value(builder, least) for _ in some]
            with _whole_vectors(builder, count) as first:
                for start, limit, kept in zip(starts, limits, best, strict=True):
                    found = vectors.load(scores, builder.add(start, first))
                    is_seen = vectors.are_before(builder.sub(limit, first))
                    found = builder.select(is_seen, found, least)
                    builder.store(vectors.greater(found, builder.load(kept)), kept)
            found = vectors.join(vectors.greater, [builder.load(kept) for kept in best])
            after = few.greater(found, before)
            few.store(after, tops, _index(some[0]))
            # Nothing was before the first block: there is nothing to fade.
            fade = few.exp(builder.fsub(before, after, flags=FLAGS))
            few.store(fade, fades, _index(some[0]))
            sums = [cgutils.alloca_once_value(builder, vectors.zero) for _ in some]
            with _whole_vectors(builder, count) as first:
                for place, (start, limit, kept) in enumerate(
                    zip(starts, limits, sums, strict=True)
                ):
                    at = builder.add(start, first)
                    top = vectors.spread(builder.extract_element(after, ir.Constant(_PLACE, place)))
                    found = builder.fsub(vectors.load(scores, at), top, flags=FLAGS)
                    is_seen = vectors.are_before(builder.sub(limit, first))
                    found = builder.select(is_seen, vectors.exp(found), vectors.zero)
                    vectors.store(found, scores, at)
                    builder.store(vectors.add(builder.load(kept), found), kept)
            total = vectors.join(vectors.add, [builder.load(kept) for kept in sums])
            total = few.add_product(few.load(totals, _index(some[0])), fade, total)
            few.store(total, totals, _index(some[0]))
        return context.get_dummy_value()

    arguments = (scores, stride, seen, count, tops, totals, fades, num_rows)
    return types.void(*arguments), generate


@contextlib.contextmanager
def _whole_vectors(builder: _Value, count: _Value) -> Iterator[_Value]:
    """A loop over so many numbers, and whatever until a vector is full: the first of a vector."""
    rounds = builder.sdiv(builder.add(count, _index(WIDTH - 1)), _index(WIDTH))
    with cgutils.for_range(builder, rounds) as loop:
        yield builder.mul(loop.index, _index(WIDTH))


@intrinsic(prefer_literal=True)
def add_weighted(_context, weights, stride, plane, at, count, found, fades, head_dim, share):
    """What was found before fades; the weighted sums of values are added to it.

    Args:
        weights: (h, S), the first n of each row are read.
        stride: S.
        plane: Of the values.
        at: Of the first value in it.
        count: n values, one after the other.
        found: (h * D,).
        fades: (h,), by how much.
        head_dim: D.
        share: h.
    """
    size, heads = head_dim.literal_value, range(share.literal_value)

    def generate(context, builder, signature, values):
        weights, stride, plane, at, count, found, fades, *_ = _starts(
            context, builder, signature, values
        )
        width = min(WIDTH, size & -size)
        vectors = _Vectors(builder, found.type.pointee, width)

        def columns(some: Sequence[int], parts: Sequence[int]) -> None:
            sums = {}
            for h in some:
                fade = vectors.spread_from(fades, _index(h))
                for d in parts:
                    before = vectors.load(found, _index(h * size + d))
                    before = builder.fmul(before, fade, flags=FLAGS)
                    sums[h, d] = cgutils.alloca_once_value(builder, before)

            def tokens(first: _Value, num: int) -> None:
                begin = builder.add(at, builder.mul(first, _index(size)))
                starts = {h: builder.add(builder.mul(stride, _index(h)), first) for h in some}
                shares = {
                    (h, t): vectors.spread_from(weights, builder.add(starts[h], _index(t)))
                    for h in some
                    for t in range(num)
                }
                for d in parts:
                    places = [builder.add(begin, _index(t * size + d)) for t in range(num)]
                    read = [vectors.load(plane, place) for place in places]
                    for h in some:
                        here = vectors.zero
                        for t in range(num):
                            here = vectors.add_product(shares[h, t], read[t], here)
                        # Once for all of them: a sum that waits for the one before costs time.
                        builder.store(vectors.add(builder.load(sums[h, d]), here), sums[h, d])

            _in_turn(builder, count, tokens)
            for (h, d), place in sums.items():
                vectors.store(builder.load(place), found, _index(h * size + d))

        for some in _fours(heads):
            for parts in _fours(range(0, size, width)):
                columns(some, parts)
        return context.get_dummy_value()

    arguments = (weights, stride, plane, at, count, found, fades, head_dim, share)
    return types.void(*arguments), generate
